"""The rules for the order of wrappers, and their check."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

from mtf_gradsync._common import some_of
from mtf_gradsync._private.libraries import mtf


class Traits(NamedTuple):
    """What a wrapper needs of its stack, and does to gradients.

    Attributes:
      reduces: it reduces gradients over the shards, or needs them reduced, on every step.
      needs_shards: it needs per-shard gradients, which no wrapper around it may have reduced.
      or_else: for the error, an argument with which it does not need them.
      schedules_updates: it decides on which steps there is an update.
      skips_not_finite: it skips gradients that are not finite; wrappers inside do not get them.
      watches_not_finite: it needs gradients that are not finite, to change the loss scale.
      shards_updates: the optimizer inside it gets parts of variables.
      takes_parts: it works on parts of gradients and variables, too.
      skips_shards: it applies the gradients of some shards without those of others.
      averages: it keeps moving averages of variables.
      squares: it squares reduced gradients, which overflow before they do.
      keeps_outer_values: it trains other values of variables than those that programs see.
      makes_islands: it gives each of several islands its own values of variables and slots.
      counts_shards: it counts which shards contribute, to decide when there is an update.
      one_mesh: it needs gradients of one mesh: what to do about those of several, for the error.
        "" if it takes them.
    """

    reduces: bool = True
    needs_shards: bool = False
    or_else: str = ""
    schedules_updates: bool = False
    skips_not_finite: bool = False
    watches_not_finite: bool = False
    shards_updates: bool = False
    takes_parts: bool = False
    skips_shards: bool = False
    averages: bool = False
    squares: bool = False
    keeps_outer_values: bool = False
    makes_islands: bool = False
    counts_shards: bool = False
    one_mesh: str = ""


#: A value of `Traits.one_mesh`.
ONE_FOR_EACH_MESH = "Make one for the variables of each mesh, each with a name= of its own"


class OrderRule(NamedTuple):
    """An order that makes no sense; `forbids` gets the traits of outer and inner wrapper.

    `why` is the error, with fields {outer}, {inner} and {or_else}.
    """

    forbids: Callable[[Traits, Traits], bool]
    why: str


RULES = (
    OrderRule(
        lambda outer, inner: outer.keeps_outer_values and inner.keeps_outer_values,
        "{inner} inside {outer} would make islands of islands; use one.",
    ),
    OrderRule(
        lambda outer, inner: (
            (outer.makes_islands and inner.counts_shards)
            or (outer.counts_shards and inner.makes_islands)
        ),
        "{outer} cannot be around {inner}: islands update in lock step, but the shards of one "
        "could have contributed enough when those of another have not. To accumulate, and to skip "
        "what is not finite, use OuterOptimizer(GradientAccumulationOptimizer(opt, passes, "
        "should_skip_update_fn=skip_not_finite), ..., leave_out_not_finite=True).",
    ),
    OrderRule(
        lambda outer, inner: (
            inner.makes_islands
            and (outer.reduces or outer.needs_shards or outer.watches_not_finite)
        ),
        "{outer} around {inner} would reduce gradients over the islands, which {inner} trains "
        "separately: turn them round, {inner}({outer}(opt, ...), ...).",
    ),
    OrderRule(
        lambda outer, inner: outer.averages and inner.averages,
        "{outer} and {inner} would update the same averages of variables twice; use one.",
    ),
    OrderRule(
        lambda outer, inner: outer.shards_updates and inner.shards_updates,
        "{inner} inside {outer} would shard updates that are sharded already; use one.",
    ),
    OrderRule(
        lambda outer, inner: outer.watches_not_finite and inner.watches_not_finite,
        "A {inner} inside a {outer} would scale the loss twice; use one.",
    ),
    OrderRule(
        lambda outer, inner: outer.schedules_updates and inner.schedules_updates,
        "{inner} cannot be inside {outer}: each decides by itself when there is an update, so "
        "that one would count the updates of the other as steps. Use one: "
        "GradientAccumulationOptimizer with the product of both backward_passes_per_step, or "
        "SyncReplicasOptimizer with replicas_to_aggregate=K * num_shards.",
    ),
    OrderRule(
        lambda outer, inner: outer.skips_not_finite and inner.watches_not_finite,
        "{outer} skips gradients that are not finite, so that {inner} inside it cannot find that "
        "its scale is too large: turn them round, {inner}({outer}(opt, ...)), or skip nothing in "
        "{outer}.",
    ),
    OrderRule(
        lambda outer, inner: (
            outer.watches_not_finite and inner.schedules_updates and not inner.skips_not_finite
        ),
        "{outer} around {inner} needs {inner} to skip microbatch steps that are not finite: turn "
        "them round, {inner}({outer}(opt), ...), which skips whole updates, or give {inner} "
        "should_skip_update_fn=skip_not_finite.",
    ),
    OrderRule(
        lambda outer, inner: outer.shards_updates and not inner.takes_parts,
        "{inner} cannot be inside {outer}, whose inner optimizer gets parts of variables: turn "
        "them round, {inner}({outer}(opt), ...).",
    ),
    OrderRule(
        lambda outer, inner: outer.reduces and inner.needs_shards and not outer.watches_not_finite,
        "{outer} around {inner} would reduce gradients over the mesh on every step, but {inner} "
        "needs per-shard gradients: turn them round, {inner}({outer}(opt), ...), or {or_else}.",
    ),
)


def traits_of(opt: Any) -> Traits:
    """Returns the traits of an optimizer; an optimizer without traits may be anywhere."""
    traits = getattr(opt, "traits", None)
    if isinstance(traits, Traits):
        return traits
    # Optimizers of users may have an attribute for one trait: docs/training.md.
    skips = bool(getattr(opt, "skips_not_finite", False))
    return Traits(reduces=False, takes_parts=True, skips_not_finite=skips)


def why_not(outer: Traits, inner: Traits) -> str | None:
    """Returns why a wrapper must not be around another one, with fields; None if it may."""
    return next((rule.why for rule in RULES if rule.forbids(outer, inner)), None)


def check_order(outer: Any, inner_stack: Sequence[Any]) -> None:
    """Raises ValueError if a wrapper must not be around one of the optimizers inside it."""
    for inner in inner_stack:
        traits = traits_of(inner)
        why = why_not(outer.traits, traits)
        if why is not None:
            raise ValueError(
                why.format(
                    outer=type(outer).__name__,
                    inner=type(inner).__name__,
                    or_else=traits.or_else,
                )
            )


def check_meshes(
    stack: Sequence[Any], grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
) -> None:
    """Raises ValueError if gradients are on several meshes and a wrapper needs those of one."""
    first: dict[mtf.Mesh, mtf.Variable] = {}
    for grad, variable in zip(grads, variables):
        if grad is not None:
            first.setdefault(variable.mesh, variable)
    needs_one = next((x for x in stack if x.traits.one_mesh), None)
    if len(first) > 1 and needs_one is not None:
        raise ValueError(
            f"{type(needs_one).__name__} needs to know the shards, and shards are of one mesh, but "
            f"the variables {some_of([repr(v.name) for v in first.values()])} are on different "
            f"ones. {needs_one.traits.one_mesh}."
        )
