"""Keeps a directory for one run at a time, and removes files that killed runs left half written."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Iterator

from mtf_gradsync.runtimes.checkpoints.choice import checkpoint_state
from mtf_gradsync.runtimes.errors import ConfigError

# Files that TensorFlow and `files.write_text` rename once they are written, and checkpoints made to
# restore one of another configuration.
_LEFTOVER = re.compile(
    r"model\.ckpt-\d+\.(data-\d+-of-\d+|index)\.tempstate\d+|model\.ckpt-\d+_temp"
    r"|checkpoint\.tmp[0-9a-f]{32}"
    r"|\.(checkpoints\.json|facts\.json|loss\.png|metrics\.jsonl|operative_config\.gin|report\.html"
    r"|result\.json|samples\.txt)\.[a-z0-9_]{8}"
    r"|\.completed-[a-z0-9_]{8}|\.(adapted|resharding)-[0-9a-f]{32}"
)
_DATA = re.compile(r"(model\.ckpt-\d+)\.data-\d+-of-\d+")


def remove_leftovers(model_dir: str) -> None:
    """Removes files that a killed process was writing or deleting; errors are ignored.

    Nothing may be writing to the directory. Data of a checkpoint without its index cannot be read
    and are removed, too, unless the state file lists the checkpoint or cannot be read itself.
    """
    with contextlib.suppress(OSError):
        listed = _listed(model_dir)
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


def _listed(model_dir: str) -> set[str] | None:
    """Returns the names of checkpoints in the state file; None where it cannot be read."""
    state = checkpoint_state(model_dir)
    if state is None:
        return None
    return {os.path.basename(path) for path in state.all_model_checkpoint_paths}


@contextlib.contextmanager
def only_run_in(model_dir: str) -> Iterator[None]:
    """Makes a directory and locks it for one run inside the block.

    Raises a ConfigError if another run has it, it cannot be written to, or its name has
    "://" or a wildcard.
    """
    if "://" in model_dir:
        raise ConfigError(f"--model_dir={model_dir} must be a directory of this machine")
    special = set("*?[]") & set(os.path.abspath(model_dir))
    if special:
        raise ConfigError(
            f"--model_dir={model_dir} has {' '.join(sorted(special))} in its name, which "
            "TensorFlow takes for a pattern: it would find no checkpoint there again"
        )
    try:
        os.makedirs(model_dir, exist_ok=True)
        # Only writing shows that files can be written: permissions and mounts do not say all.
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
    """Locks an open directory until it is closed; the end of the process closes it, too.

    Raises a ConfigError if another run has the lock; does nothing where there are no locks.
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
