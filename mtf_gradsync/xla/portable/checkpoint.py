"""Makes a checkpoint of a folder's values, for any of the runtimes to continue."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from mtf_gradsync.simd.program import Program
from mtf_gradsync.xla.portable.host import Host
from mtf_gradsync.xla.portable.runner.files import (
    VALUES,
    key_of,
    read_manifest,
    with_dtype,
)


def to_checkpoint(
    folder: str | os.PathLike[str], program: Program, lowering: Any, path: str
) -> str:
    """Writes the values of an exported step as a checkpoint.

    Args:
      folder: what `export` or its runner wrote.
      program: the program that was exported, built anew or still there.
      lowering: as for `Program.session`.
      path: prefix of the checkpoint's files.

    Returns:
      The path to give to ``restore``; programs with the same variables can read it, on another
      mesh, on another runtime or without a mesh. The step counter (``tf.train.get_global_step``),
      where it stands outside the program, counts the runner's steps.

    Raises:
      StepError: when a file is missing or damaged.
      ValueError: when the folder's variables are not the program's.
    """
    manifest = read_manifest(Path(folder))
    host = Host(program, lowering)
    values: dict[str, np.ndarray] = {}
    with np.load(Path(folder) / VALUES, allow_pickle=False) as file:
        for parameter in manifest["parameters"]:
            if parameter["kind"] == "variable":
                stored = with_dtype(file[key_of(parameter)], parameter["dtype"])
                sources = parameter["sources"]
                rows = parameter["rows"] if len(sources) > 1 else parameter["rows"][:1]
                values.update((s, stored[row]) for s, row in zip(sources, rows))
        for name, dtype in manifest["others"].items():
            values[name] = with_dtype(file[f"others/{name}"], dtype)
        if host.counter in manifest["others"]:
            values[host.counter] = values[host.counter] + manifest["steps"]
    with host.session() as session:
        host.set(values, session)
        return host.save(session, path)
