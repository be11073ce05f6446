"""The manifest of a run: which files it wrote for each checkpoint.

TensorFlow's index of a checkpoint has a checksum of each variable, and the manifest has one of the
index. Together they distinguish a checkpoint of this run from any other file of the same name.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mtf_gradsync.runtimes.files import write_json

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
