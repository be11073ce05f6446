"""Whole checkpoints of a run: noted when they are written, checked when they are read."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.errors import first_line


def free_name(path: Path) -> Path:
    """Returns the path, or a similar one if that exists."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def write_text(path: Path, text: str) -> None:
    """Replaces a text file in one step, even if the process is killed meanwhile."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replaces a JSON file in one step; see `write_text`."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces a file in one step; see `write_text`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        # /dev/null and pipes stay what they are.
        path.write_bytes(content)
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        # mkstemp makes private files; results are for everyone whom the directory is for.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


MANIFEST_FILE = "checkpoints.json"


def note_checkpoint(path: str) -> None:
    """Adds a checkpoint, just written, to its directory's manifest; removes those without files."""
    prefix = Path(path)
    manifest = prefix.parent / MANIFEST_FILE
    entries = {
        name: entry
        for name, entry in _read(manifest).items()
        if prefix.with_name(f"{name}.index").exists()
    }
    entries[prefix.name] = {
        "files": {file.name: file.stat().st_size for file in checkpoint_files(path)},
        "index_sha256": _index_hash(path),
    }
    write_json(manifest, {"checkpoints": entries})


def forget_checkpoint(path: str) -> None:
    """Removes a checkpoint from the manifest, before other files get its name."""
    prefix = Path(path)
    manifest = prefix.parent / MANIFEST_FILE
    entries = _read(manifest)
    if entries.pop(prefix.name, None):
        write_json(manifest, {"checkpoints": entries})


def differs_from_manifest(path: str) -> str | None:
    """Returns how a checkpoint's files differ from those in the manifest; None if they do not."""
    prefix = Path(path)
    entry = _read(prefix.parent / MANIFEST_FILE).get(prefix.name)
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
    """Returns the existing files of a checkpoint, its index first."""
    prefix = Path(path)
    data = sorted(prefix.parent.glob(f"{prefix.name}.data-?????-of-?????"))
    return [file for file in (prefix.with_name(f"{prefix.name}.index"), *data) if file.exists()]


def _index_hash(path: str) -> str:
    return hashlib.sha256(Path(f"{path}.index").read_bytes()).hexdigest()


def _read(manifest: Path) -> dict[str, Any]:
    """Returns the manifest's checkpoints by name; none if it is missing or cannot be read."""
    try:
        entries = json.loads(manifest.read_text(encoding="utf-8"))["checkpoints"]
        return {
            name: entry
            for name, entry in entries.items()
            if isinstance(entry["files"], dict) and isinstance(entry["index_sha256"], str)
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # TensorFlow's checksums still hold


# What TensorFlow's reader raises of a file that it cannot read.
UNREADABLE = (tf.errors.OpError, ValueError, LookupError, RuntimeError, TypeError, OSError)


def damage_of(path: str, of_a_run: bool = True) -> str | None:
    """Returns what is wrong with a checkpoint, in words; None if it is intact.

    All of it is read, so that TensorFlow compares checksums. `of_a_run` says whether it has to have
    a global step.
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
    # Seconds for the largest models; silent where nobody watches.
    for name in tqdm(
        sorted(shapes), desc="checking the checkpoint", unit="variable", leave=False, disable=None
    ):
        try:
            reader.get_tensor(name)
        except UNREADABLE as error:
            return f"{name} cannot be read: {first_line(error)}"
    return None
