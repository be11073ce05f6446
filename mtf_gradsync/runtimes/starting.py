"""The checkpoints in a run's folder, and how a run begins or goes on from a checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

from tqdm import tqdm

from mtf_gradsync.extension import tf
from mtf_gradsync.runtimes._common import (
    SKIP_FLAG,
    ConfigError,
    first_line,
    unused_path,
    write_json,
)
from mtf_gradsync.runtimes.checkpoints import averaged_checkpoint, write_changed

MANIFEST_FILE = "checkpoints.json"


def add_to_manifest(path: str) -> None:
    """Adds a new checkpoint to its directory's manifest, and drops deleted checkpoints from it.

    `path` is the checkpoint's path. The manifest, `MANIFEST_FILE`, has the names and sizes of the
    files of each checkpoint, and a hash of the checkpoint's index. Damage of the files is found by
    comparing them with the manifest.
    """
    prefix = Path(path)
    manifest = prefix.parent / MANIFEST_FILE
    entries = {
        name: entry
        for name, entry in _read_manifest(manifest).items()
        if prefix.with_name(f"{name}.index").exists()
    }
    entries[prefix.name] = {
        "files": {file.name: file.stat().st_size for file in checkpoint_files(path)},
        "index_sha256": _index_hash(path),
    }
    write_json(manifest, {"checkpoints": entries})


def remove_from_manifest(path: str) -> None:
    """Removes the checkpoint `path` from its directory's manifest.

    Call this function before the checkpoint's files are written again.
    """
    prefix = Path(path)
    manifest = prefix.parent / MANIFEST_FILE
    entries = _read_manifest(manifest)
    if entries.pop(prefix.name, None):
        write_json(manifest, {"checkpoints": entries})


def differs_from_manifest(path: str) -> str | None:
    """Returns in words how the files of the checkpoint `path` differ from the directory's manifest.

    The manifest has the sizes of the files. The result is None if the files do not differ, or if
    the manifest does not have the checkpoint.
    """
    prefix = Path(path)
    entry = _read_manifest(prefix.parent / MANIFEST_FILE).get(prefix.name)
    if not entry:
        return None
    for name, size in entry["files"].items():
        file = prefix.with_name(name)
        if not file.exists():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes, and the run wrote {size:,}"
    if _index_hash(path) != entry["index_sha256"]:
        return f"{prefix.name}.index is not the one that the run wrote"
    return None


def checkpoint_files(path: str) -> list[Path]:
    """Returns the existing files of the checkpoint `path`, its index first."""
    prefix = Path(path)
    data = sorted(prefix.parent.glob(f"{prefix.name}.data-?????-of-?????"))
    return [file for file in (prefix.with_name(f"{prefix.name}.index"), *data) if file.exists()]


def _index_hash(path: str) -> str:
    return hashlib.sha256(Path(f"{path}.index").read_bytes()).hexdigest()


def _read_manifest(manifest: Path) -> dict[str, Any]:
    """Returns what a manifest says of each checkpoint, by the checkpoint's file name.

    The result is {} if the manifest is missing or unreadable. Malformed entries of the manifest are
    left out.
    """
    try:
        entries = json.loads(manifest.read_text(encoding="utf-8"))["checkpoints"]
        return {
            name: entry
            for name, entry in entries.items()
            if isinstance(entry["files"], dict) and isinstance(entry["index_sha256"], str)
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # TensorFlow's checksums still hold


# The errors that TensorFlow's reader raises for a file that it cannot read.
UNREADABLE = (tf.errors.OpError, ValueError, LookupError, RuntimeError, TypeError, OSError)


def find_damage(path: str, of_a_run: bool = True) -> str | None:
    """Returns what is wrong with the checkpoint `path`, in words; None if it is intact.

    The whole checkpoint is read, so that TensorFlow compares checksums. If `of_a_run` is True, a
    checkpoint without a global step counts as damaged, too.
    """
    if not os.path.exists(f"{path}.index"):
        return f"{os.path.basename(path)}.index is missing"
    different = differs_from_manifest(path)
    if different:
        return different
    try:
        reader = tf.train.load_checkpoint(path)
        shapes = reader.get_variable_to_shape_map()
    except UNREADABLE as error:
        return f"its index cannot be read: {first_line(error)}"
    if of_a_run and "global_step" not in shapes:
        return "it has no global_step: it is no checkpoint of a training run"
    # Takes seconds for the largest models. Without a terminal the bar is not shown.
    for name in tqdm(
        sorted(shapes), desc="checking the checkpoint", unit="variable", leave=False, disable=None
    ):
        try:
            reader.get_tensor(name)
        except UNREADABLE as error:
            return f"{name} cannot be read: {first_line(error)}"
    return None


class Start(NamedTuple):
    """The checkpoint with which a session begins, and what to take from it.

    `path` is the checkpoint; if it is None, the session begins with initial values. `kept` are all
    checkpoints of the run, from the oldest to the newest. `step` is the step of the checkpoint; 0
    if it was not read. `new` are variables that the checkpoint lacks and that begin as in a new
    run. `with_averages` says whether moving averages are restored in place of the variables.
    """

    path: str | None = None  # the checkpoint to restore; None for initial values
    kept: tuple[str, ...] = ()  # all checkpoints of the run, from the oldest to the newest
    step: int = 0  # steps made before, if they were asked for
    new: tuple[str, ...] = ()  # variables that the checkpoint lacks: they begin as in a new run
    with_averages: bool = False  # whether to restore moving averages in place of the variables

    @contextlib.contextmanager
    def restorable(
        self, initial_values: Callable[[Sequence[str]], Mapping[str, Any]] = lambda names: {}
    ) -> Iterator[str | None]:
        """Yields the path of a checkpoint that has all variables to restore; None in a new run.

        The yielded path is `path`, or the path of a temporary checkpoint that is made from `path`.
        If `with_averages` is True, a temporary checkpoint has moving averages in place of the
        variables. If `with_averages` is False and `new` names variables, a temporary checkpoint
        also has values for these variables, which the function `initial_values` returns by name.
        Raises NoAveragesError if `with_averages` is True and the checkpoint has no averages.
        """
        if not self.path:
            yield None
        elif self.with_averages:
            with averaged_checkpoint(self.path, tf.global_variables()) as path:
                yield path
        elif self.new:
            # In the same folder, so that every machine that can read one can read both.
            with tempfile.TemporaryDirectory(
                prefix=".completed-", dir=os.path.dirname(self.path)
            ) as directory:
                path = os.path.join(directory, os.path.basename(self.path))
                write_changed(self.path, path, initial_values(self.new))
                yield path
        else:
            yield self.path


# TensorFlow's file that says which checkpoint is the newest.
STATE_FILE = "checkpoint"
DAMAGED_DIRECTORY = "damaged"


def choose_checkpoint(
    model_dir: str, skip_damaged: bool, say: Callable[[str], None], skip_setting: str = SKIP_FLAG
) -> Start:
    """Chooses the checkpoint in a directory from which a run goes on: the newest, if it is intact.

    `model_dir` is the directory. The checkpoint is read to find damage. If there is no checkpoint,
    the result is a `Start` without a path, with which a run begins from initial values.

    If the newest checkpoint is damaged and `skip_damaged` is True, the newest intact checkpoint is
    chosen. The files of all newer checkpoints are then moved to the folder `DAMAGED_DIRECTORY`.
    `say` is called with each line of text about a problem. `skip_setting` is the name by which
    users know `skip_damaged`; errors use this name.

    Raises:
      ConfigError: when the newest checkpoint is damaged, and `skip_damaged` is False or no older
        checkpoint is intact.
    """
    paths = _paths_in_state_file(model_dir)
    is_listed = bool(paths)
    if not is_listed:
        paths = sorted(_paths_on_disk(model_dir), key=_step_of)
    if not paths:
        return Start()
    newest = paths[-1]
    damage = find_damage(newest)
    if not damage:
        if not is_listed:
            say(
                f"{os.path.join(model_dir, STATE_FILE)}, which says what the newest checkpoint is, "
                f"is missing or cannot be read: the newest checkpoint there is {newest}"
            )
            _write_state_file(model_dir, paths)
        return _chosen(paths)
    found = f"The newest checkpoint, {newest}, is damaged: {damage}."
    others = {*paths[:-1], *_paths_on_disk(model_dir)} - {newest}
    older = sorted((path for path in others if _step_of(path) < _step_of(newest)), key=_step_of)
    intact = next((path for path in reversed(older) if find_damage(path) is None), None)
    if intact is None:
        raise ConfigError(
            f"{found} No older one in {model_dir} is intact. Nothing was changed. Put a copy of a "
            "checkpoint there, or train in another --model_dir."
        )
    if not skip_damaged:
        raise ConfigError(
            f"{found} Nothing was changed. With {skip_setting} the run goes on from {intact}, "
            f"which is intact, and moves damaged files to "
            f"{os.path.join(model_dir, DAMAGED_DIRECTORY)}."
        )
    say(f"{found} The run goes on from {intact}.")
    for path in (newest, *older):
        if _step_of(path) > _step_of(intact):
            _put_aside(path)
    kept = older[: older.index(intact) + 1]
    _write_state_file(model_dir, kept)
    return _chosen(kept)


def start_from_newest(model_dir: str) -> Start:
    """Returns the `Start` from the checkpoint that a directory's state file names as the newest.

    No checkpoint is read. So damage is not found, and the `step` of the result is 0. If there is no
    checkpoint, the result is a `Start` without a path, with which a run begins from initial values.
    """
    kept = _paths_in_state_file(model_dir)
    if kept and not tf.train.checkpoint_exists(kept[-1]):
        # A state file may be written by hand, to begin with what another run has trained.
        elsewhere = tf.train.latest_checkpoint(model_dir)
        if elsewhere:
            return Start(elsewhere)
    return Start(kept[-1] if kept else None, tuple(kept))


def latest_checkpoint(model_dir: str) -> str | None:
    """Returns the path of the newest checkpoint in `model_dir`; None if there is none.

    The directory's state file says which checkpoint is the newest.
    """
    return next(reversed(_paths_in_state_file(model_dir)), None)


def checkpoint_state(model_dir: str) -> Any:
    """Returns the content of the state file of `model_dir`, as a `CheckpointState`.

    The state file is TensorFlow's list of the directory's checkpoints. The result is None if the
    file is missing or cannot be read.
    """
    try:
        return tf.train.get_checkpoint_state(model_dir)
    except ValueError:
        return None


def _chosen(paths: list[str]) -> Start:
    step = int(tf.train.load_variable(paths[-1], "global_step"))
    return Start(paths[-1], tuple(paths), step)


def _paths_in_state_file(model_dir: str) -> list[str]:
    """Returns the paths of the checkpoints in the state file of `model_dir`, the newest last.

    The newest checkpoint is in the list even if its files are missing. The result is [] if the
    state file cannot be read.
    """
    # Not tf.train.latest_checkpoint: if the file names a checkpoint that does not exist, it returns
    # None, and a run would begin again from nothing.
    state = checkpoint_state(model_dir)
    if state is None:
        return []
    # By file name: other programs' state files have absolute paths, wrong in a copied folder.
    newest, *others = (
        os.path.join(model_dir, os.path.basename(path))
        for path in (state.model_checkpoint_path, *state.all_model_checkpoint_paths)
    )
    there = [path for path in others if path != newest and tf.io.gfile.exists(f"{path}.index")]
    return [*dict.fromkeys(there), newest]


def _write_state_file(model_dir: str, paths: list[str]) -> None:
    names = [os.path.basename(path) for path in paths]
    tf.train.update_checkpoint_state(model_dir, names[-1], names)


def _paths_on_disk(model_dir: str) -> list[str]:
    names = os.listdir(model_dir) if os.path.isdir(model_dir) else ()
    indices = (name for name in names if name.endswith(".index") and _step_of(name) >= 0)
    return [os.path.join(model_dir, name[: -len(".index")]) for name in indices]


def _step_of(path: str) -> int:
    """Returns the step in the file name of the checkpoint `path`; -1 if the name has no step."""
    match = re.search(r"model\.ckpt-(\d+)(\.index)?$", path)
    return int(match.group(1)) if match else -1


def _put_aside(path: str) -> None:
    remove_from_manifest(path)
    for file in checkpoint_files(path):
        aside = file.parent / DAMAGED_DIRECTORY
        aside.mkdir(exist_ok=True)
        os.replace(file, unused_path(aside / file.name))


# Files that TensorFlow and `write_bytes` rename once they are written, and checkpoints made to
# restore one of another configuration.
_LEFTOVER = re.compile(
    r"model\.ckpt-\d+\.(data-\d+-of-\d+|index)\.tempstate\d+|model\.ckpt-\d+_temp"
    r"|checkpoint\.tmp[0-9a-f]{32}"
    r"|\.(checkpoints\.json|facts\.json|loss\.png|metrics\.jsonl|operative_config\.gin|report\.html"
    r"|result\.json|samples\.txt|timeline\.json|timeline\.trace\.json\.gz)\.[a-z0-9_]{8}"
    r"|\.completed-[a-z0-9_]{8}|\.adapted-[0-9a-f]{32}"
)
_DATA = re.compile(r"(model\.ckpt-\d+)\.data-\d+-of-\d+")


def remove_leftovers(model_dir: str) -> None:
    """Removes files that a killed process was writing or deleting in `model_dir`; ignores errors.

    No process may be writing to the directory. If a checkpoint's index is missing, the checkpoint's
    data files are useless, and they are removed, too. But the data files are kept if the state file
    lists the checkpoint, or if the state file is unreadable.
    """
    with contextlib.suppress(OSError):
        state = checkpoint_state(model_dir)
        listed = None
        if state is not None:
            listed = {os.path.basename(path) for path in state.all_model_checkpoint_paths}
        for path in Path(model_dir).iterdir():
            data = _DATA.fullmatch(path.name)
            is_orphan = (
                data is not None
                and path.is_file()
                and listed is not None
                and data.group(1) not in listed
                and not path.with_name(f"{data.group(1)}.index").exists()
            )
            if is_orphan or _LEFTOVER.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextlib.contextmanager
def lock_model_dir(model_dir: str) -> Iterator[None]:
    """Makes the directory `model_dir`, and locks it in the block, so that no other run uses it.

    Raises a ConfigError if another run has the lock, the directory cannot be written to, or the
    directory's name has "://" or a wildcard.
    """
    if "://" in model_dir:
        raise ConfigError(f"--model_dir={model_dir} must be a directory of this machine")
    special = set("*?[]") & set(os.path.abspath(model_dir))
    if special:
        raise ConfigError(
            f"--model_dir={model_dir} has {' '.join(sorted(special))} in its name, which "
            "TensorFlow takes for a pattern: no checkpoint in this directory would be found again"
        )
    try:
        os.makedirs(model_dir, exist_ok=True)
        # Only a test file shows that files can be written: permissions do not say all.
        with tempfile.TemporaryFile(dir=model_dir) as probe:
            probe.write(b"x")
            probe.flush()
        descriptor = os.open(model_dir, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(
            f"--model_dir={model_dir} cannot be written to: {error.strerror}"
        ) from error
    try:
        _lock(descriptor, model_dir)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, model_dir: str) -> None:
    """Locks an open directory until its descriptor is closed or the process ends.

    `model_dir` is the directory's path, which the error names. Raises a ConfigError if another run
    has the lock. On systems without locks, this function does nothing.
    """
    try:
        import fcntl
    except ImportError:  # no POSIX
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"Another run writes to {model_dir}: wait for its end, or choose another --model_dir"
        ) from error
    except OSError:  # a file system without locks
        return
