"""Names, reads and writes the files of an exported step."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np

from .jax_devices import StepError

# The version of the format that is read and written here.
FORMAT = 1
MANIFEST, PROGRAM, VALUES, SUMS = "manifest.json", "program.stablehlo", "values.npz", "SHA256SUMS"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns a folder's manifest: the content of ``manifest.json``.

    Raises a StepError if a file that is needed to run the step is missing or damaged, or if the
    folder has another format.
    """
    sums = read_sums(folder)
    for name in (MANIFEST, PROGRAM, VALUES):
        path = folder / name
        if not path.exists():
            raise StepError(f"{path} is missing. Copy the whole folder again.")
        if _sha256(path) != sums.get(name):
            raise StepError(
                f"{path} is damaged: its sha256 is not what {SUMS} says. Copy the folder again."
            )
        if name == MANIFEST:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            if manifest["format"] != FORMAT:
                raise StepError(
                    f"{folder} has format {manifest['format']}, written by mtf_gradsync "
                    f"{manifest['made_by']['mtf_gradsync']}, and this runner reads format "
                    f"{FORMAT}. Run the folder's own run.py."
                )
    return manifest


def read_sums(folder: Path) -> dict[str, str]:
    """Returns the sha256, in hexadecimal, that each file of a folder had when it was written.

    The keys are the files' paths in the folder. Raises a StepError if the folder has no list of
    these sums.
    """
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise StepError(
            f"{folder} holds no exported step: {SUMS} cannot be read. Name a folder that "
            "mtf_gradsync.xla.export wrote."
        ) from error
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def write_folder(
    folder: Path,
    manifest: Mapping[str, Any],
    values: Mapping[str, np.ndarray],
    others: Mapping[str, bytes],
    replace: bool,
) -> None:
    """Writes the folder of an exported step, completely or not at all.

    Args:
      folder: the folder to write.
      manifest: the content of ``manifest.json``.
      values: the arrays to write into ``values.npz``, by name.
      others: the contents of the other files, by their paths in the folder.
      replace: whether an exported step that is at `folder` may be replaced.

    Raises:
      StepError: when something is at `folder` that may not be replaced.
    """
    check_free(folder, replace)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # In the same directory, so that renaming moves it to its place.
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        new, old = made / "new", made / "old"
        new.mkdir()
        with open(new / VALUES, "wb") as file:
            arrays: dict[str, Any] = {name: as_savable(x) for name, x in values.items()}
            np.savez(file, **arrays)
        text = json.dumps(manifest, indent=1) + "\n"
        for name, content in {**others, MANIFEST: text.encode()}.items():
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).write_bytes(content)
        paths = sorted(p for p in new.rglob("*") if p.is_file())
        lines = [f"{_sha256(p)}  {p.relative_to(new).as_posix()}\n" for p in paths]
        (new / SUMS).write_text("".join(lines), encoding="utf-8")
        try:
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
        except BaseException:
            if old.exists() and not folder.exists():
                old.rename(folder)
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def check_free(folder: Path, replace: bool) -> None:
    """Raises a StepError if something that may not be replaced is at a folder's path.

    Only an exported step may be replaced, and only if `replace` is True.
    """
    if not os.path.lexists(folder):
        return
    if not replace:
        raise StepError(f"{folder} is there already. Name another folder, or ask to replace it.")
    if not (folder / SUMS).exists():
        raise StepError(f"{folder} is no exported step, and is not replaced. Name another folder.")


def array_name(parameter: Mapping[str, Any]) -> str:
    """Returns the name of a parameter's array in the file ``values.npz``.

    `parameter` is the manifest's entry for the parameter.
    """
    return f"{parameter['kind']}s/{parameter['name']}"


def distinct_rows(per_core: Sequence[np.ndarray]) -> tuple[np.ndarray, list[int]]:
    """Returns the distinct values of cores as the rows of an array, and each core's row number.

    `per_core` has one value for each core, all of one shape and dtype.
    """
    found: dict[bytes, int] = {}
    kept: list[np.ndarray] = []
    rows: list[int] = []
    for value in per_core:
        digest = hashlib.sha256(np.ascontiguousarray(value).view(np.uint8).data).digest()
        if digest not in found:
            found[digest] = len(kept)
            kept.append(value)
        rows.append(found[digest])
    return np.stack(kept), rows


def assemble(parameter: Mapping[str, Any], per_core: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Assembles a variable from its slices on the cores; returns a dict from name to array.

    If Mesh-TensorFlow has stacked several variables into this variable, the dict has an entry for
    each of them. `parameter` is the manifest's entry for the variable, and `per_core` has each
    core's slice.
    """
    layout = parameter["whole"]
    if layout is None:
        return {parameter["name"]: per_core[0]}
    value = np.empty(layout["shape"], per_core[0].dtype)
    for core, begin in layout["slices"]:
        value[tuple(slice(b, b + n) for b, n in zip(begin, parameter["shape"]))] = per_core[core]
    return dict(zip(layout["names"], value if layout["is_stacked"] else [value]))


def dtype_of(name: str) -> np.dtype:
    """Returns the dtype with a name such as "float32", or "bfloat16" (from ``ml_dtypes``)."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # comes with jax

        return np.dtype(getattr(ml_dtypes, name))


def as_savable(value: np.ndarray) -> np.ndarray:
    """Returns the array `value` in a dtype that numpy can save.

    Numbers of a dtype that numpy lacks, such as bfloat16, become unsigned integers with the same
    bits. Arrays of other dtypes are returned unchanged.
    """
    value = np.asarray(value)
    if value.dtype.kind != "V":
        return value
    return value.view(np.dtype(f"u{value.dtype.itemsize}"))


def from_savable(value: np.ndarray, name: str) -> np.ndarray:
    """Undoes `as_savable`: returns the array `value` in its original dtype, named `name`."""
    return value.view(dtype_of(name))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
