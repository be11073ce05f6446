"""The reports of a stack of optimizers, under stable names."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Mapping

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.compat_v1 import AppliesGradients
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.optimizers.pipeline import GradientSet, StepBuilder
from mtf_gradsync.optimizers.report import norms
from mtf_gradsync.optimizers.wrapper import Wrapper
from mtf_gradsync.step import Branch


def reported(opt: AppliesGradients, axes: ReplicaAxes | None = None) -> dict[str, mtf.Tensor]:
    """Returns norms and counts of the step that they are fetched with, by name.

    Call it once, after gradients were applied and before the graph is lowered; tensors that are not
    fetched cost nothing. Norms cost a pass over the gradients and a reduction of a few numbers;
    those that clipping has computed are used again. A stack has some of these names:

    - `gradient_norm/applied`: norm of the reduced and clipped gradients that the innermost
      optimizer gets.
    - `gradient_norm/before_clipping`: norm of the reduced gradients before they were clipped by it.
    - `gradient_norm/of_shards`: `[shards...]`, for each shard the norm of its term of the sum (of a
      mean over the batch, 1/num_shards of its own gradient), before clipping. Missing if per-shard
      gradients are not recoverable, or only by communication of the size of gradients.
    - `gradient_norm/of_shards_clipped`: `[shards...]`, the same after `clip_by_shard_norm`, if the
      applied gradients come from it.
    - `compression/rate`: bytes of the gradients, divided by those that a strategy sends in their
      place (`QuantizedAllReduce`, `LowRankAllReduce`). `compression/whole`: the number of gradients
      that it does not compress; the log names them.
    - `update_step`: updates made.
    - `accumulation/micro_step`: microbatch steps in the sum so far. `accumulation/skipped`:
      microbatch steps skipped so far.
    - `sync_replicas/contributions`, `sync_replicas/dropped`: `[shards...]`, contributions that each
      replica made and steps on which it made none, so far.
      `sync_replicas/waiting_contributions`: contributions since the last update.
      `sync_replicas/steps_without_update`: steps since the last update.

    Counts are those after the step. Norms of shards are of the step (a microbatch step). Norms of
    reduced gradients inside an optimizer that skips updates are of the last update: they keep their
    values on steps without one, and are NaN before the first update of a session.

    With several wrappers of a kind the outermost has the plain names; the others' names end with
    "/" and the wrapper's name.

    Args:
      opt: an optimizer. Each in its stack may have `reported()`, as wrappers do, which returns mtf
        tensors by name.
      axes: the replica axes, if no wrapper was given them; None takes those of the mesh that the
        program has made for this graph.

    Returns:
      mtf tensors by name: scalars, or of the shape of the shard dims (see `split_by_shard`), the
      same on every processor; empty for optimizers of other libraries.
    """
    stack, wrappers = [opt], []
    if isinstance(opt, Wrapper):
        stack, wrappers = [opt, *opt.inner_stack()], opt._wrappers()
    values: dict[str, mtf.Tensor] = {}

    def add(tag: str, value: mtf.Tensor | None, name: str) -> None:
        if value is not None:
            values[f"{tag}/{name}" if tag in values else tag] = value

    if wrappers and wrappers[0].step is not None:
        # Several steps if an optimizer of another library is in between.
        steps = list(dict.fromkeys(w.step for w in wrappers if w.step is not None))
        _add_norms(wrappers, steps, axes, add)
        _add_compression(steps, add)
    for one in stack:
        name = getattr(one, "name", type(one).__name__)
        report = getattr(one, "reported", None)
        for tag, value in (report() if callable(report) else {}).items():
            add(tag, value, name)
    return values


def _add_norms(
    wrappers: list[Wrapper],
    steps: list[StepBuilder],
    axes: ReplicaAxes | None,
    add: Callable[[str, mtf.Tensor | None, str], None],
) -> None:
    outer, inner = wrappers[0], wrappers[-1]
    received, applied = steps[0].received[0], steps[-1].passed_on[-1]
    axes = axes or outer.axes_now(received.present)
    shards = next((s.per_shard for s in steps if s.per_shard), received)
    if axes and axes.num_shards > 1 and shards.branch is None:
        own, clipped = norms.norms_of_shards(shards.present, axes, outer.reducer)
        add("gradient_norm/of_shards", own, outer.name)
        add("gradient_norm/of_shards_clipped", clipped, outer.name)
    # If the program itself has clipped the gradients before.
    places = {received.present[0]: (received, "program")}
    for step in steps:
        for passed_on, name in zip(step.passed_on, step.names):
            places[passed_on.present[0]] = passed_on, name
    of_branches: dict[Branch, dict[tuple[str, str], mtf.Tensor]] = {}

    def add_norm(tag: str, norm: mtf.Tensor | None, place: GradientSet, name: str) -> None:
        if norm is not None and place.branch is not None:
            of_branches.setdefault(place.branch, {})[tag, name] = norm
        else:
            add(tag, norm, name)

    for place, name in places.values():
        before = norms.norm_before_clipping(place.present)
        add_norm("gradient_norm/before_clipping", before, place, name)
    with applied.branch.opened() if applied.branch else contextlib.nullcontext():
        norm = norms.norm_of_reduced(applied.present, inner.reducer)
    add_norm("gradient_norm/applied", norm, applied, inner.name)
    for branch, found in of_branches.items():
        held = norms.kept(list(found.values()), branch, f"{inner.name}/reported")
        for (tag, name), value in zip(found, held):
            add(tag, value, name)


def _add_compression(
    steps: list[StepBuilder], add: Callable[[str, mtf.Tensor | None, str], None]
) -> None:
    for step in steps:
        if step.compressions:
            given, sent, whole = zip(*step.compressions)
            found = {"rate": sum(given) / max(1, sum(sent)), "whole": len(sum(whole, ()))}
            for name, number in found.items():
                mesh = step.received[0].mesh
                value = mtf.constant(mesh, float(number), mtf.Shape([]), tf.float32)
                add(f"compression/{name}", value, step.names[0])


def split_by_shard(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns scalars by name, for summaries.

    Args:
      values: scalars, and one value for each shard, by name: tf tensors of a known shape, arrays
        or numbers.

    Returns:
      Scalars: those of a name with shards are under `<name>/shard_0` and so on, in row-major order
      of the shard dims.
    """
    scalars: dict[str, Any] = {}
    for tag, value in values.items():
        shape = tuple(getattr(value, "shape", ()))
        if not shape:
            scalars[tag] = value
            continue
        each = (
            tf.unstack(tf.reshape(value, [-1])) if isinstance(value, tf.Tensor) else value.ravel()
        )
        scalars.update((f"{tag}/shard_{number}", one) for number, one in enumerate(each))
    return scalars
