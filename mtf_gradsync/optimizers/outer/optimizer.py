"""OuterOptimizer: islands of a mesh train separately, and outer steps synchronize them.

Every island has its own values of variables and of the inner optimizer's slots, in the variables'
slices. Variables `<variable>/island`, with a dimension for the islands, hold these slices and have
masters for checkpoints (`mtf_gradsync.step.Islands`). The model and the inner optimizer need no
change. The variable's own master has the outer values, which evaluation and export read.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Mapping, Sequence, Union

import gin

from mtf_gradsync._numbers import check_whole_number, is_number
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.compat_v1 import NOT_GIVEN, MeshOptimizerLike
from mtf_gradsync.gradients.recoverable import check_addable, check_recoverable
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike, ReplicaAxes, as_dim_names
from mtf_gradsync.optimizers.outer.stage import OuterState, OuterSteps
from mtf_gradsync.optimizers.pairs import OfStep
from mtf_gradsync.optimizers.pipeline import Reduction, Stage, Traits
from mtf_gradsync.optimizers.skips import ReportsSkips, Skips, check_limit
from mtf_gradsync.reduce import FusedAllReduce, Strategy
from mtf_gradsync.reduce.strategy import has_gradient_reduction
from mtf_gradsync.step import Islands, Plan


@gin.configurable(module="mtf_gradsync")
class OuterOptimizer(ReportsSkips):
    """Trains islands of the mesh separately, and synchronizes them every `inner_steps` updates.

    Each island, a coordinate along the axes of `outer_dims`, updates its own values with gradients
    of its part of the batch. After `inner_steps` updates the mean over the islands of the
    difference of their values from the outer values is the gradient for SGD with momentum on the
    outer values, which all islands then continue from. On other steps islands send each other no
    gradients.

    An island's gradient is scaled by num_islands, to estimate that of the whole batch, so that
    learning rates need no change. Values that a program fetches (a loss, a norm) are those of all
    islands if Mesh-TF sums over the batch, otherwise of the first one.

    State, by name: `<variable>/island` and `<slot>/island` with a value for each island,
    `<variable>/outer_momentum`, `<name>/inner_step`, `<name>/skipped`, with leave_out_not_finite
    `<name>/bad_loss`, with max_steps_without_update `<name>/updated_at`. The variable itself holds
    the outer values.

    Attributes:
      islands: the axes between islands, `ReplicaAxes`.
      inside: the replica axes inside of an island.
      state: mesh variables; None before gradients were applied.

    References:
      Douillard et al., DiLoCo, https://arxiv.org/abs/2311.08105; and with fragments,
      https://arxiv.org/abs/2501.18512
    """

    shown = (("outer step", "outer/step"),)
    axes: ReplicaAxes
    state = OfStep[Union[OuterState, None]](None)
    _now = OfStep[Union[OuterState, None]](None)
    _outer = OfStep[Mapping[mtf.Variable, mtf.Variable]](MappingProxyType({}))
    traits = Traits(reduces=False, needs_shards=True, makes_islands=True)

    def __init__(
        self,
        opt: MeshOptimizerLike,
        inner_steps: int = gin.REQUIRED,
        outer_learning_rate: float = 0.7,
        outer_momentum: float = 0.5,
        nesterov: bool = True,
        fragments: int = 1,
        outer_dims: str | Sequence[str] | None = None,
        leave_out_not_finite: bool = False,
        name: str = "OuterOptimizer",
        learning_rate: Any = NOT_GIVEN,
        axes: ReplicaAxes | None = None,
        mesh_shape: MeshShapeLike | None = None,
        layout: LayoutLike | None = None,
        batch_dims: str | Sequence[str] = ("batch",),
        reducer: Strategy | None = None,
        max_steps_without_update: int | None = None,
    ):
        """Wraps an optimizer.

        Args:
          opt: a Mesh-TF optimizer or a wrapper, or a class or factory of one.
          inner_steps: updates of each island between two outer steps of a variable, 1 or more.
          outer_learning_rate: learning rate of the outer step, greater than 0.
          outer_momentum: momentum of the outer step, from 0 up to 1 (not included).
          nesterov: whether the momentum is Nesterov's. It has no effect with a momentum of 0.
          fragments: the number F of equal parts of all values, of which one is synchronized every
            inner_steps / F updates: no step sends more than 1/F of what it takes to send all, or
            with a reducer that keeps state up to a row of a variable more.
          outer_dims: the names in batch_dims that are split over islands; None for all of them.
            The others are split over the replicas inside an island.
          leave_out_not_finite: whether an outer step skips islands with a loss, values or slots
            that are not finite: these restart with the outer values and zeros in their slots. The
            losses are those of all microbatch steps since the outer step before, except inside of
            loops.
          name: name of the wrapper, prefix of its state.
          learning_rate: the learning rate for opt; only if opt is a class or factory.
          axes: the replica axes (`ReplicaAxes`); or give mesh_shape and layout. Without either they
            are those of the mesh that the program has made for this graph.
          mesh_shape: Mesh-TF's mesh shape.
          layout: Mesh-TF's layout rules.
          batch_dims: names of the tensor dimensions that the batch is split along.
          reducer: the reduction strategy between islands; None takes `FusedAllReduce()`. Inside an
            island, sums use the reducers of the wrappers inside.
          max_steps_without_update: the largest number of updates of islands in a row without an
            outer step that did not skip all islands; one more raises an error that names variables
            and islands (see `NoUpdateError`). It has an effect only with leave_out_not_finite. None
            for no limit.

        Raises:
          ValueError: an argument is out of range, arguments contradict each other, there is no mesh
            or only one island.
          TypeError: an argument has the wrong type.
        """
        check_whole_number("inner_steps", inner_steps)
        check_whole_number("fragments", fragments)
        if inner_steps % fragments:
            raise ValueError(
                "inner_steps must be a multiple of fragments, as a fragment is synchronized every "
                f"inner_steps / fragments updates, got inner_steps={inner_steps!r} and "
                f"fragments={fragments!r}."
            )
        between = inner_steps // fragments
        why = f"there is an outer step every inner_steps / fragments = {between} updates"
        limit = check_limit(max_steps_without_update, between, why)
        if not is_number(outer_learning_rate) or not outer_learning_rate > 0:
            raise ValueError(
                f"outer_learning_rate must be greater than 0, got {outer_learning_rate!r}."
            )
        if not is_number(outer_momentum) or not 0 <= outer_momentum < 1:
            raise ValueError(
                f"outer_momentum must be from 0 up to 1 (not included), got {outer_momentum!r}."
            )
        needs_mesh_for = "the islands"
        self._wrap(
            opt, learning_rate, name, axes, mesh_shape, layout, batch_dims, reducer, needs_mesh_for
        )
        self._check_order()
        self.inner_steps, self.fragments = int(inner_steps), int(fragments)
        self.outer_learning_rate = float(outer_learning_rate)
        self.outer_momentum, self.nesterov = float(outer_momentum), bool(nesterov)
        self.leave_out_not_finite = bool(leave_out_not_finite)
        self._limit = limit if leave_out_not_finite else None
        self.islands, self.inside = _islands(self.axes, outer_dims)
        for inner in self._wrappers()[1:]:
            if inner.traits.averages and inner not in self._segment_wrappers():
                raise ValueError(
                    f"{inner.name} inside an optimizer of another library would average the values "
                    f"of each island: put {type(inner).__name__} directly inside {self.name}, or "
                    "around it."
                )
            inner._check_inside(self.islands, self.inside)

    def _gradient_reduction(self) -> Reduction:
        # Gradients are reduced inside an island; the wrapper's reducer is for outer steps.
        return Reduction(FusedAllReduce(), self._shard_names, self.axes, self.name)

    @property
    def plain_reducer(self) -> Strategy:
        """The strategy for flags and counts, without compression."""
        return FusedAllReduce() if has_gradient_reduction(self.reducer) else self.reducer

    def stages(self) -> list[Stage]:
        """See `Wrapper.stages`."""
        return [OuterSteps(self)]

    def check(self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]) -> None:
        """See `Wrapper.check`."""
        given = [v for g, v in zip(grads, variables) if g is not None]
        if not given:
            return
        held = Plan.of(given[0].graph).part(Islands)
        for variable in given:
            if self.islands.free_shard_dims(variable.shape) != self.islands.shard_dims:
                raise ValueError(
                    f"The layout splits variable {variable.name!r} of shape "
                    f"{variable.shape.to_string} over an axis of the islands, so that no island "
                    "has all of it: split it over another mesh axis, or choose other axes for "
                    "islands by outer_dims."
                )
            if isinstance(variable, mtf.StackedVariable):
                raise ValueError(
                    f"{self.name}: {variable.name!r} is a stack of variables: apply gradients "
                    "before graph.rewrite_stack_variables is called."
                )
            if held.holder(variable) is not None:
                raise ValueError(
                    f"{self.name} has applied a gradient of {variable.name!r} in this graph "
                    "already; give apply_grads all variables at once."
                )
        if len(given) < self.fragments:
            raise ValueError(
                f"{self.name} needs at least fragments={self.fragments} variables with gradients, "
                f"but got {len(given)}: {[v.name for v in given]}. Give fewer fragments."
            )
        own = [None if g is None or self._shard_dims(g.shape) else g for g in grads]
        names = [f"variable {v.name!r}" for v in variables]
        check_addable(own, self.axes, names)
        check_recoverable(own, self.islands, names, whole=self.axes)

    def outer_value(self, var: mtf.Variable) -> mtf.Variable | None:
        """Returns the holder of a variable's outer values; None before gradients were applied."""
        return self._outer.get(var)

    def reported(self) -> dict[str, mtf.Tensor]:
        """See `mtf_gradsync.reported`; `outer/skipped` has a count for each island."""
        if self._now is None:
            return {}
        made = mtf.cwise(lambda x: x // self.inner_steps, [self._now.inner_step], tf.int32)
        values = {"outer/step": made}
        if self.leave_out_not_finite:
            values["outer/skipped"] = self._now.skipped
        return values

    def variables(self) -> list[mtf.Variable]:
        """All variables that the stack made: the inner optimizer's, then the wrapper's."""
        return super().variables() + [v for v in self.state or () if v is not None]

    def _note(
        self,
        state: OuterState,
        now: OuterState,
        outer: dict[mtf.Variable, mtf.Variable],
        skips: Skips | None,
    ) -> None:
        self.state, self._now, self._outer = state, now, outer
        self._note_skips(skips)


def _islands(
    axes: ReplicaAxes, outer_dims: str | Sequence[str] | None
) -> tuple[ReplicaAxes, ReplicaAxes]:
    """Returns the replica axes between islands, and those inside an island."""
    names = axes.batch_dims if outer_dims is None else as_dim_names(outer_dims)
    unknown = [name for name in names if name not in axes.batch_dims]
    if unknown:
        raise ValueError(
            f"outer_dims must be names in batch_dims {list(axes.batch_dims)}, got {list(names)}: "
            f"give batch_dims={(*unknown, *axes.batch_dims)} if the batch is split along them."
        )
    ordered = [name for name in axes.batch_dims if name in names]
    split = [d.name for d in axes.shard_dims]
    if not any(name in split for name in ordered) or axes.num_shards == 1:
        raise ValueError(
            f"There are no islands: the mesh {axes.mesh_shape.to_string} with {axes.layout} splits "
            f"none of the outer_dims {ordered}. Add a layout rule for one of them."
        )
    inside = [name for name in axes.batch_dims if name not in names]
    made = ReplicaAxes(axes.mesh_shape, axes.layout, ordered)
    if made.num_shards == 1:
        raise ValueError(
            f"The outer_dims {ordered} are split over one island only: {made!r}. Split them over a "
            "mesh axis of 2 or more."
        )
    return made, ReplicaAxes(axes.mesh_shape, axes.layout, inside)
