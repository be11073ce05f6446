"""Every wrapper, as it stands around another optimizer, and which may stand around which.

A wrapper that the package exports has an entry in docs/write_order_table.py, or a test fails by its
name; what is parametrized by `WRAPPERS` is then tested of it, too.
"""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any, Callable

import mtf_gradsync as gs
from mtf_gradsync.optimizers import Wrapper

ROOT = pathlib.Path(__file__).resolve().parents[1]
_SPEC = importlib.util.spec_from_file_location("order_table", ROOT / "docs/write_order_table.py")
order_table = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(order_table)

# Of a mesh of four shards along two dimensions, which those that need it are given.
SHAPE, LAYOUT, BATCH_DIMS = order_table.MESH.values()
WRAPPERS: dict[str, Callable[[Any], Wrapper]] = order_table.WRAPPERS
plain = order_table.plain

# For each pair, outer and inner, the rule that refuses it; None for one that works.
TABLE: dict[tuple[str, str], str | None] = order_table.table()
WORKS = sorted(p for p, why in TABLE.items() if not why)
# Each wrapper around another one, and inside of one.
SOME_THAT_WORK = sorted(
    {*dict(WORKS).items(), *((a, b) for b, a in {b: a for a, b in WORKS}.items())}
)


def exported() -> set[str]:
    """Returns the names of the wrappers that the package exports."""
    found = {name: getattr(gs, name) for name in dir(gs) if name.endswith("Optimizer")}
    return {n for n, c in found.items() if isinstance(c, type) and issubclass(c, Wrapper)}
