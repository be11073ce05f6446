"""Chooses the checkpoint that a run goes on from; deletes nothing."""

from __future__ import annotations

import os
import re
from typing import Any, Callable

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.checkpoints.damage import damage_of
from mtf_gradsync.runtimes.checkpoints.flags import SKIP_FLAG
from mtf_gradsync.runtimes.checkpoints.manifest import checkpoint_files, forget_checkpoint
from mtf_gradsync.runtimes.checkpoints.start import Start
from mtf_gradsync.runtimes.errors import ConfigError
from mtf_gradsync.runtimes.files import free_name

# TensorFlow's file that says which checkpoint is the newest.
STATE_FILE = "checkpoint"
DAMAGED_DIRECTORY = "damaged"


def choose_checkpoint(
    model_dir: str, skip_damaged: bool, say: Callable[[str], None], skip_setting: str = SKIP_FLAG
) -> Start:
    """Returns the newest checkpoint of a directory, after reading all of it to see if it is intact.

    If it is not, and `skip_damaged` is set, the run goes on from the newest intact one, and damaged
    files are put aside; otherwise, or if there is none, a ConfigError is raised. `say` takes each
    line about a problem.
    """
    paths = _listed(model_dir)
    is_listed = bool(paths)
    if not is_listed:
        paths = sorted(_on_disk(model_dir), key=_step_of)
    if not paths:
        return Start()
    newest = paths[-1]
    damage = damage_of(newest)
    if not damage:
        if not is_listed:
            say(
                f"{os.path.join(model_dir, STATE_FILE)}, which says what the newest checkpoint is, "
                f"is missing or cannot be read: the newest there is {newest}"
            )
            _list(model_dir, paths)
        return _chosen(paths)
    found = f"The newest checkpoint, {newest}, is damaged: {damage}."
    others = {*paths[:-1], *_on_disk(model_dir)} - {newest}
    older = sorted((path for path in others if _step_of(path) < _step_of(newest)), key=_step_of)
    intact = next((path for path in reversed(older) if damage_of(path) is None), None)
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
    _list(model_dir, kept)
    return _chosen(kept)


def newest(model_dir: str) -> Start:
    """Returns the newest checkpoint of a directory, as its state file says; reads no checkpoint."""
    kept = _listed(model_dir)
    if kept and not tf.train.checkpoint_exists(kept[-1]):
        # A state file may be written by hand, to begin with what another run has trained.
        elsewhere = tf.train.latest_checkpoint(model_dir)
        if elsewhere:
            return Start(elsewhere)
    return Start(kept[-1] if kept else None, tuple(kept))


def latest_checkpoint(model_dir: str) -> str | None:
    """Returns the path of the newest checkpoint in a directory, as its state file says, or None."""
    return next(reversed(_listed(model_dir)), None)


def checkpoint_state(model_dir: str) -> Any:
    """Returns the content of a directory's state file; None where it cannot be read."""
    try:
        return tf.train.get_checkpoint_state(model_dir)
    except ValueError:
        return None


def _chosen(paths: list[str]) -> Start:
    step = int(tf.train.load_variable(paths[-1], "global_step"))
    return Start(paths[-1], tuple(paths), step)


def _listed(model_dir: str) -> list[str]:
    """Returns the checkpoints in the state file, the newest last; none where it cannot be read."""
    # Not tf.train.latest_checkpoint: where the file names what is not there, it returns None, and
    # a run would begin again from nothing.
    state = checkpoint_state(model_dir)
    if state is None:
        return []
    # By name: others' state files have absolute paths, which in a copy are those of the original.
    newest, *others = (
        os.path.join(model_dir, os.path.basename(path))
        for path in (state.model_checkpoint_path, *state.all_model_checkpoint_paths)
    )
    there = [path for path in others if path != newest and tf.io.gfile.exists(f"{path}.index")]
    return [*dict.fromkeys(there), newest]


def _list(model_dir: str, paths: list[str]) -> None:
    names = [os.path.basename(path) for path in paths]
    tf.train.update_checkpoint_state(model_dir, names[-1], names)


def _on_disk(model_dir: str) -> list[str]:
    names = os.listdir(model_dir) if os.path.isdir(model_dir) else ()
    indices = (name for name in names if name.endswith(".index") and _step_of(name) >= 0)
    return [os.path.join(model_dir, name[: -len(".index")]) for name in indices]


def _step_of(path: str) -> int:
    """Returns the step that a checkpoint's name says; -1 for none."""
    match = re.search(r"model\.ckpt-(\d+)(\.index)?$", path)
    return int(match.group(1)) if match else -1


def _put_aside(path: str) -> None:
    forget_checkpoint(path)
    for file in checkpoint_files(path):
        aside = file.parent / DAMAGED_DIRECTORY
        aside.mkdir(exist_ok=True)
        os.replace(file, free_name(aside / file.name))
