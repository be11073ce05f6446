"""Every wrapper: what it is made with, what it is in numpy, and which may stand around which.

A wrapper that the package exports has an entry in `REGISTRY` and in docs/write_order_table.py, or a
test fails by its name. What is parametrized by `REGISTRY` or `WRAPPERS` is then tested of it, too.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import pathlib
import types
from typing import Any, Callable, Mapping, NamedTuple

import mtf_gradsync as gs
from mtf_gradsync.optimizers import Wrapper
from tests.optimizers.outer import outer_reference
from tests.optimizers.pipeline import stack_reference

NOTHING: Mapping[str, Any] = types.MappingProxyType({})


class Entry(NamedTuple):
    """A class of wrappers.

    Attributes:
      layer: what it does in numpy.
      needs: arguments that it has to be given beside the optimizer.
      needs_mesh: whether it has to know the mesh when it is made.
      telling: more arguments, with which its state changes in the first steps.
    """

    layer: Callable[..., Any]
    needs: Mapping[str, Any] = NOTHING
    needs_mesh: bool = False
    telling: Mapping[str, Any] = NOTHING


_LAYERS = stack_reference.LAYERS
REGISTRY = {
    "AverageOptimizer": Entry(_LAYERS["AverageOptimizer"], telling={"decay": 0.5}),
    "ClipByGlobalNormOptimizer": Entry(_LAYERS["ClipByGlobalNormOptimizer"], {"clip_norm": 1.0}),
    "CrossShardOptimizer": Entry(_LAYERS["CrossShardOptimizer"]),
    "GradientAccumulationOptimizer": Entry(
        _LAYERS["GradientAccumulationOptimizer"], {"backward_passes_per_step": 2}
    ),
    "LossScaleOptimizer": Entry(
        _LAYERS["LossScaleOptimizer"], telling={"initial_scale": 8.0, "growth_steps": 1}
    ),
    "OuterOptimizer": Entry(outer_reference.train, {"inner_steps": 2}, True),
    "ShardedUpdateOptimizer": Entry(
        # By default small variables stay whole.
        _LAYERS["ShardedUpdateOptimizer"],
        {"min_size": 1},
        True,
    ),
    "SyncReplicasOptimizer": Entry(
        _LAYERS["SyncReplicasOptimizer"], {"replicas_to_aggregate": 2}, True
    ),
}

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


class Kind(NamedTuple):
    """A wrapper as stacks are made of it, which leaves an optimizer's updates as they are.

    Attributes:
      name: of its class.
      given: what it is made with, but for what a stack is given.
      needs_mesh: whether it is given the mesh.
      passes: how many steps make an update, which is that of their mean.
    """

    name: str
    given: Mapping[str, Any] = NOTHING
    needs_mesh: bool = False
    passes: int = 1


_MEANS = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
# Each wrapper is among them, which a test holds them to.
KINDS = {
    "cross_shard": Kind("CrossShardOptimizer"),
    "clip": Kind("ClipByGlobalNormOptimizer", {"clip_norm": 1e9}),
    "loss_scale": Kind("LossScaleOptimizer"),
    "average": Kind("AverageOptimizer", {"decay": 0.5}),
    "sharded": Kind("ShardedUpdateOptimizer", {"min_size": 1}, True),
    "replicas": Kind("SyncReplicasOptimizer", {"replicas_to_aggregate": 1}, True),
    "local": Kind("GradientAccumulationOptimizer", {**_MEANS, "accumulate": "local"}, True, 2),
    "synced": Kind("GradientAccumulationOptimizer", {**_MEANS, "accumulate": "synced"}, False, 2),
    "sharded sums": Kind(
        "GradientAccumulationOptimizer", {**_MEANS, "accumulate": "sharded"}, True, 2
    ),
    "islands": Kind("OuterOptimizer", {"inner_steps": 2}, True),
    "one island": Kind(
        "OuterOptimizer",
        {"inner_steps": 1, "outer_learning_rate": 1.0, "outer_momentum": 0.0, "outer_dims": ()},
    ),
}


def parts(stack: str) -> list[str]:
    """Returns the names in `KINDS` that a stack is made of, the outermost first."""
    return stack.rstrip(")").split("(")


def wrap(stack: str, opt: Any, axes: Mapping[str, Any] = NOTHING, /, **given: Any) -> Any:
    """Makes wrappers around an optimizer.

    Args:
      stack: names in `KINDS`, around each other: `"loss_scale(local)"`.
      opt: the optimizer.
      axes: the mesh, for those that need it.
      given: arguments, for those of the wrappers that have them.
    """
    for kind in (KINDS[part] for part in reversed(parts(stack))):
        made = getattr(gs, kind.name)
        mesh = axes if kind.needs_mesh else NOTHING
        its_own = {k: x for k, x in given.items() if k in inspect.signature(made).parameters}
        opt = made(opt, **{**kind.given, **mesh, **its_own})
    return opt


def passes(stack: str) -> int:
    """Returns how many steps make an update of a stack."""
    return math.prod(KINDS[part].passes for part in parts(stack))


# Each of these trains as the optimizer alone does, on the mean of its steps. Islands do not; three
# are around a wrapper that they are used with.
_WITH = {"average": "cross_shard", "local": "sharded", "sharded sums": "sharded"}
ALIKE = [f"{name}({_WITH[name]})" if name in _WITH else name for name in KINDS if name != "islands"]


def exported() -> set[str]:
    """Returns the names of the wrappers that the package exports."""
    found = {name: getattr(gs, name) for name in dir(gs) if name.endswith("Optimizer")}
    return {n for n, c in found.items() if isinstance(c, type) and issubclass(c, Wrapper)}
