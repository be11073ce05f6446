"""describe: the work of an optimizer in a step, a line for each part."""

from __future__ import annotations

import contextlib
import json
import math
import textwrap
from typing import Any, Mapping, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import mesh_impls_with
from mtf_gradsync.compat_v1 import (
    AppliesGradients,
    CrossShardOptimizer,
    GradientAccumulationOptimizer,
)
from mtf_gradsync.gradients.arguments import check_variables
from mtf_gradsync.gradients.layout import find_replica_axes
from mtf_gradsync.gradients.rounding import NEAREST
from mtf_gradsync.mesh.axes import (
    LayoutLike,
    MeshShapeLike,
    ReplicaAxes,
    as_layout,
    as_mesh_shape,
    axes_by_names,
)
from mtf_gradsync.optimizers.pipeline.stack import ProgramFacts, complete_stack, in_blocks
from mtf_gradsync.optimizers.pipeline.words import About, Line, frequency_text
from mtf_gradsync.optimizers.slots import optimizer_of
from mtf_gradsync.optimizers.wrapper import Wrapper
from mtf_gradsync.reduce.strategy import OneLevel, has_gradient_reduction


class DescribedLine(NamedTuple):
    """A line of a description.

    Attributes:
      when: the steps on which the work is done, such as "every step"; "" for the same steps as the
        line before.
      what: the work on these steps.
      wrapper: the name of the wrapper that does the work; "" for the innermost optimizer.
    """

    when: str
    what: str
    wrapper: str


class Description(NamedTuple):
    """The lines of `describe`: what an optimizer does in a step, in order. `str()` makes a table.

    Attributes:
      lines: one line for each part of the work.
    """

    lines: tuple[DescribedLine, ...]

    def __str__(self) -> str:
        return self.as_text()

    def as_text(self, width: int | None = None) -> str:
        """Returns the table, in lines of at most `width` characters if that is given."""
        of_wrappers = [f"({line.wrapper})" if line.wrapper else "" for line in self.lines]
        when, what, by = (
            max(map(len, column))
            for column in ([x.when for x in self.lines], [x.what for x in self.lines], of_wrappers)
        )
        if width is not None:
            what = min(what, max(20, width - when - by - 4))
        rows = []
        for line, wrapper in zip(self.lines, of_wrappers):
            first, *more = textwrap.wrap(line.what, what)
            rows.append(f"{line.when:{when}}  {first:{what}}  {wrapper}".rstrip())
            rows += [f"{'':{when}}    {rest}" for rest in more]
        return "\n".join(rows)

    def to_json(self) -> str:
        """Returns the lines as JSON text: a list of objects with `when`, `what` and `wrapper`.

        Every object has a value of `when`. In the table, a line shows no `when` if it is the same
        as on the line before.
        """
        when, rows = "", []
        for line in self.lines:
            when = line.when or when
            rows.append(line._replace(when=when)._asdict())
        return json.dumps(rows, indent=2)


def describe(
    opt: AppliesGradients,
    mesh_shape: MeshShapeLike | None = None,
    layout: LayoutLike | None = None,
    variables: Sequence[mtf.Variable] | None = None,
) -> Description:
    """Describes what an optimizer does in a step: when, what, over which axes, how many bytes.

    If gradients were applied already, the description is of the last step that was built. A call of
    `describe` adds nothing to the graph.

    Args:
      opt: an optimizer, usually a stack of wrappers.
      mesh_shape: Mesh-TF's mesh shape, for wrappers that were not given one. None takes the mesh
        that the program has made for this graph; if there is no such mesh, neither the number of
        shards nor bytes are shown.
      layout: Mesh-TF's layout rules, which go together with mesh_shape: give both or neither.
      variables: the mesh variables that get gradients, whose bytes are shown. None takes those of
        the last step, if there was one.

    Returns:
      The description; print it, or take its `lines` or `to_json()`.

    Raises:
      TypeError: variables are no mesh variables.
      ValueError: only one of mesh_shape and layout is given, or one cannot be read.

    Examples:
      >>> print(gs.describe(gs.CrossShardOptimizer(gs.AdamWOptimizer(0.001))))
      every step  reduce over the replica axes: fused  (CrossShardOptimizer)
                  update by AdamW
    """
    if (mesh_shape is None) != (layout is None):
        raise ValueError(
            "mesh_shape and layout go together, got "
            f"mesh_shape={mesh_shape!r} and layout={layout!r}."
        )
    mesh = None if mesh_shape is None else (as_mesh_shape(mesh_shape), as_layout(layout))
    given = () if variables is None else tuple(check_variables(variables))
    step = opt.step if isinstance(opt, Wrapper) else None
    # The mesh of a step is that of the step's TensorFlow graph.
    owners = step.received[0].owners if step is not None and step.received else ()
    with owners[0].get_master().graph.as_default() if owners else contextlib.nullcontext():
        return Description(tuple(_in_order_of_work(_stage_lines(opt, mesh, given))))


class _StageLine(NamedTuple):
    """A line of `describe`, with the wrapper that it is about.

    Attributes:
      line: the line, as a stage returns it.
      wrapper: the name of the stage's wrapper; "" for the innermost optimizer.
      when: the steps on which the stage runs; "" for the same steps as the line before.
    """

    line: Line
    wrapper: str
    when: str = ""


def _stage_lines(
    opt: Any, mesh: Any, variables: Sequence[mtf.Variable], passes: int = 1
) -> list[_StageLine]:
    """Returns the lines of `describe` for a stack, in the order of its stages.

    Args:
      opt: the outermost optimizer of the stack.
      mesh: a pair of mesh shape and layout; None takes the mesh that the program has made.
      variables: the variables that get gradients; empty for those of the last step, if there was
        one.
      passes: the number of steps from one call of an optimizer of `tf.compat.v1` to the next.
    """
    if isinstance(opt, (GradientAccumulationOptimizer, CrossShardOptimizer)):
        described = [(what, passes * when) for what, when in opt.described()]
        own = [_StageLine(Line(x), opt.get_name(), frequency_text(when)) for x, when in described]
        inside = max([passes, *(when for _, when in described)])
        return [*own, *_stage_lines(opt.opt, mesh, variables, inside)]
    if not isinstance(opt, Wrapper):
        return _update_lines(opt, variables)
    step, innermost = opt.step, opt.innermost()
    grads: Sequence[mtf.Tensor] = ()
    mixed: Mapping[str, Sequence[mtf.Variable]] = {}
    if step is not None and step.received:
        mixed = step.mixed
        owners, grads = step.received[0].owners, step.received[0].present
        others = [v for o in owners[:1] for v in o.graph.trainable_variables if v not in owners]
        frozen = [v for v in others if optimizer_of(innermost, v) is None]
        variables = variables or [*owners, *frozen]
    # Gradients of the others are not reduced.
    updated = tuple(v for v in variables if optimizer_of(innermost, v) is not None)

    def axes_of_program(names: Sequence[str]) -> ReplicaAxes | None:
        found = find_replica_axes(grads, names) if grads and mesh is None else None
        return found or axes_by_names(names, mesh)

    if step is None or mesh is not None:
        meshes = {v.mesh for v in variables} or {None}
        program = ProgramFacts(axes_of_program, len(meshes))
        stack = complete_stack(*opt._segment(), program)
    else:
        stack = step.stack
    lines: list[_StageLine] = []
    dtype: Any = None
    when = ""
    for block in in_blocks(stack):
        when = frequency_text(block.condition.when) or when if block.condition else when
        for number, stage in block.stages:
            reductions = [segment.reduction for segment in stack.segments[number or 0 :]]
            known = next((one.axes for one in reductions if one.axes), None)
            axes = known or axes_of_program(reductions[0].batch_dims)
            name = reductions[0].name
            about = _about(axes, updated, dtype, mixed.get(name, ()))
            lines += [_StageLine(line, name, when) for line in stage.describe(about)]
            dtype = stage._sums_in or dtype
    more = next((x for x in opt._segment()[1] if isinstance(x, Wrapper)), None)
    if more is None:
        return [*lines, *_update_lines(stack.opt, variables, when)]
    handed = _StageLine(Line(f"hand gradients to {type(stack.opt).__name__}"), "", when)
    return [*lines, handed, *_stage_lines(more, mesh, variables)]


def _in_order_of_work(stage_lines: Sequence[_StageLine]) -> list[DescribedLine]:
    """Puts lines into the order in which the step does the work, and adds when it is done.

    `stage_lines` has lines in the order of stages. In the result, `when` is "" for a line that is
    for the same steps as the line before it.
    """
    first = [x for x in stage_lines if x.line.first]
    after = [x for x in reversed(stage_lines) if x.line.after]
    between = [x for x in stage_lines if x not in first and x not in after]
    lines, when = [], "every step"
    for one in [*first, *between]:
        when = when if one.line.first else one.when or when
        lines.append(DescribedLine(one.line.when or when, one.line.what, one.wrapper))
    lines += [DescribedLine(x.line.when or "after it", x.line.what, x.wrapper) for x in after]
    shown = [""] + [line.when for line in lines]
    return [
        line._replace(when="" if line.when == before else line.when)
        for line, before in zip(lines, shown)
    ]


def _update_lines(opt: Any, variables: Sequence[mtf.Variable], when: str = "") -> list[_StageLine]:
    """Returns the lines on the update that `opt` makes: a `ByVariable` has one for each group.

    The lines say how many of `variables` each optimizer updates. `when` says on which steps there
    is an update; "" stands for the same steps as the line before.
    """
    described = getattr(opt, "described", None)
    groups = described(variables) if described else [(opt, "", len(variables))]
    return [_StageLine(Line(_update(*group)), "", when) for group in groups]


def _update(opt: Any, more: str, count: int) -> str:
    which = f" {count:,} variable{'s' * (count != 1)}" if count else ""
    if opt is None:
        return f"leave{which or ' variables'} as {'it is' if count == 1 else 'they are'}{more}"
    inside = opt.opt if type(opt).__name__ == "MeshOptimizer" else opt
    name = type(inside).__name__
    name = name[: -len("Optimizer")] if name.endswith("Optimizer") else name
    for setting, default in (("rounding", NEAREST), ("slot_dtype", None)):
        value = getattr(opt, setting, default)
        if value != default and f", {setting} " not in more:
            name += f", {setting} {getattr(value, 'name', value)}"
    return f"update{which} by {name}{more}"


def _about(
    axes: ReplicaAxes | None,
    variables: Sequence[mtf.Variable],
    dtype: Any,
    mixed: Sequence[mtf.Variable],
) -> About:
    """Returns the facts that the lines of a stage name.

    `axes` are the replica axes, and `variables` those that get gradients. If gradients were added
    up before, `dtype` is the dtype of the sums, or "wide" for at least float32. `mixed` are the
    variables whose gradients are reduced already, because shards are mixed in them.
    """

    def num_bytes(strategy: Any) -> tuple[int, int | None] | None:
        if axes is None or not variables:
            return None
        # For each mesh and set of axes: the shape and dtype of a core's part of each gradient.
        sent: dict[Any, list[tuple[tuple[int, ...], tf.DType]]] = {}
        for variable in variables:
            free = tuple(d for d in axes.free_shard_dims(variable.shape) if d.size > 1)
            if free and variable not in mixed:
                one = _sent_dtype(variable.activation_dtype, dtype, strategy)
                sent.setdefault((variable.mesh, free), []).append(
                    (tuple(axes.slice_shape(variable.shape)), one)
                )
        total = sum(math.prod(shape) * one.size for some in sent.values() for shape, one in some)
        sums = getattr(strategy, "reducer", strategy)
        if not isinstance(sums, OneLevel) or has_gradient_reduction(strategy):
            return total, None
        mesh_impl = next(iter(mesh_impls_with(axes.mesh_shape, axes.layout)), None)
        groups = 0
        for some in sent.values():
            shapes, dtypes = zip(*some)
            groups += sums.count_groups(shapes, dtypes, mesh_impl)
        return total, groups

    return About(axes, tuple(variables), num_bytes, tuple(mixed))


def _sent_dtype(dtype: tf.DType, summed_in: Any, strategy: Any) -> tf.DType:
    """Returns the dtype in which a gradient is sent.

    `dtype` is the gradient's dtype. If gradients are added up before they are sent, `summed_in` is
    the dtype of the sums, or "wide" for at least float32; otherwise `summed_in` is None. `strategy`
    is the reduction strategy, which may send numbers in a narrower dtype.
    """
    if summed_in is not None and (summed_in != "wide" or dtype.size < 4):
        dtype = tf.float32 if summed_in == "wide" else summed_in
    narrow = getattr(strategy, "compressed_dtype", None)
    return narrow if narrow is not None and dtype.size >= 4 else dtype
