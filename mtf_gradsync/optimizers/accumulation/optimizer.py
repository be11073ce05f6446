"""GradientAccumulationOptimizer: one update, and one reduction, for several microbatch steps."""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Literal, NamedTuple, Sequence, Union

import gin

from mtf_gradsync import compat_v1
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import meshes_made
from mtf_gradsync._private.tensorflow import optimizers_inside
from mtf_gradsync._warn import log_once
from mtf_gradsync.compat_v1 import NOT_GIVEN, OptimizerLike, given_optimizer, is_v1
from mtf_gradsync.compat_v1.checks import refuse_with_v1
from mtf_gradsync.gradients.pending import find_axes
from mtf_gradsync.gradients.stage import on_mesh
from mtf_gradsync.mesh.axes import LayoutLike, MeshShapeLike, ReplicaAxes
from mtf_gradsync.optimizers.accumulation import hints
from mtf_gradsync.optimizers.accumulation.passes import Passes, check_passes, passes_at
from mtf_gradsync.optimizers.accumulation.skipping import SkipFn, check_skip_fn, says_skip
from mtf_gradsync.optimizers.pairs import OfStep
from mtf_gradsync.optimizers.pipeline import Form, GradientSet, Stage, StepBuilder, Traits
from mtf_gradsync.optimizers.pipeline.accumulators import Accumulators, without_skipped
from mtf_gradsync.optimizers.state.variables import scalar_state
from mtf_gradsync.optimizers.wrapper import Wrapper
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.reduce.strategies.compressed import WireDtype

#: Where gradients of microbatch steps add up: on each shard, or reduced over the mesh.
Accumulate = Literal["local", "synced"]
LOCAL: Accumulate = "local"
SYNCED: Accumulate = "synced"


_HOW = {
    LOCAL: ": each shard adds up its own gradients, which are reduced once an update",
    SYNCED: ": gradients are reduced on every microbatch step",
}
_SYNCED_INSTEAD = "Accumulate reduced gradients, by accumulate='synced', for one update of all"


class _Counters(NamedTuple):
    """Integer scalars: mtf variables, or their values after a step."""

    mini_step: Any
    update_step: Any
    skipped: Any


@gin.configurable(module="mtf_gradsync")
class GradientAccumulationOptimizer(Wrapper):
    """Adds up the gradients of several microbatch steps, then applies another optimizer once.

    On microbatch steps without an update the inner optimizer does not run, variables and slots do
    not change, and no gradients are reduced if they accumulate locally.

    Gradients accumulate in one of two places. "local": each shard adds up its own partial sums,
    which are reduced once for each update; the mesh must be known when the graph is built.
    "synced": gradients are reduced on each microbatch step. The log says once which it is.

    State, by name: `<variable>/gradient_accumulator` for each variable, and
    `<name>/mini_step`, `<name>/update_step`, `<name>/skipped`.

    Attributes:
      accumulate: where gradients accumulate, "local" or "synced"; None if that is decided when they
        are applied.
      backward_passes_per_step: microbatch steps for each update, as given.

    References:
      horovod.tensorflow.DistributedOptimizer(backward_passes_per_step=...), optax.MultiSteps
    """

    shown = (
        ("micro step", "accumulation/micro_step"),
        ("update step", "update_step"),
        ("skipped", "accumulation/skipped"),
    )
    accumulate = OfStep[Union[Accumulate, None]](None)
    backward_passes_per_step: Passes
    # For the graph that gradients were last applied in: variables, and their values after a step.
    _counters = OfStep[Union[_Counters, None]](None)
    _now = OfStep[Union[_Counters, None]](None)

    def __new__(
        cls,
        opt: OptimizerLike,
        backward_passes_per_step: Passes = gin.REQUIRED,
        average_aggregated_gradients: bool = False,
        should_skip_update_fn: SkipFn | None = None,
        accumulator_dtype: tf.DType | None = None,
        checkpoint_accumulators: bool = True,
        accumulate: Accumulate | None = None,
        sparse_as_dense: bool = False,
        allreduce_fn: compat_v1.AllReduceFn | None = None,
        name: str = "GradientAccumulationOptimizer",
        learning_rate: Any = NOT_GIVEN,
        axes: ReplicaAxes | None = None,
        mesh_shape: MeshShapeLike | None = None,
        layout: LayoutLike | None = None,
        batch_dims: str | Sequence[str] = ("batch",),
        reducer: Strategy | None = None,
        reduce_dtype: WireDtype | None = None,
    ) -> Any:
        """Wraps an optimizer.

        A subclass with arguments of its own overrides ``__new__``; there is no ``__init__``.

        Args:
          opt: a Mesh-TF optimizer, or a class or factory of one. With an optimizer of
            `tf.compat.v1.train` the result is `compat_v1.GradientAccumulationOptimizer`, and
            arguments for the mesh or checkpoints have no effect.
          backward_passes_per_step: microbatch steps for each update: a whole number of 1 or more,
            or a function from the update step (mtf int32 scalar) to one. A function is evaluated
            when an accumulation begins; the number does not change before the update.
          average_aggregated_gradients: whether to divide the sum by its number of microbatch steps.
          should_skip_update_fn: a function from the list of gradients to a boolean mtf scalar,
            whether to skip the microbatch step: `skip_not_finite`, `skip_large_updates(norm)`, or
            your own. A skipped microbatch step does not count. None skips nothing: a NaN then stays
            in the sum until the update.
          accumulator_dtype: dtype to add up in; None takes the gradient's, but at least float32.
          checkpoint_accumulators: whether checkpoints hold the sums. If not, a restart begins a
            new accumulation, and local sums need no master copy on the host.
          accumulate: "local" or "synced". None takes "local" if the mesh is known when gradients
            are applied: given, or the only one that the program has made for this graph by then;
            if not, or if a wrapper around this one reduces on every step, "synced".
          sparse_as_dense: only with an optimizer of `tf.compat.v1.train`: turn `tf.IndexedSlices`
            into dense gradients. Those of mesh variables are always dense.
          allreduce_fn: only with such an optimizer; see there.
          name: name of the wrapper, prefix of its counters.
          learning_rate: the learning rate for opt; only if opt is a class or factory.
          axes: the replica axes (`ReplicaAxes`); or give mesh_shape and layout. Without either they
            are those of the mesh that the program has made for this graph.
          mesh_shape: Mesh-TF's mesh shape.
          layout: Mesh-TF's layout rules.
          batch_dims: names of the tensor dimensions that the batch is split along.
          reducer: the reduction strategy; None takes `FusedAllReduce()`.
          reduce_dtype: the dtype that gradients are sent in, by `CompressedAllReduce`: "bfloat16",
            "float16" or the tf dtype. Accumulators keep their dtype, and each processor's sum is
            rounded once. None sends the accumulators' dtype. Sharded updates use their own reducer.

        Raises:
          ValueError: an argument is out of range, or arguments contradict each other.
          TypeError: an argument has the wrong type, or opt is a Keras optimizer.
        """
        dtype = _floating(accumulator_dtype)
        opt = given_optimizer(opt, learning_rate, cls.__name__)
        if is_v1(opt):
            refuse_with_v1(opt, should_skip_update_fn=should_skip_update_fn)
            counterpart = compat_v1.GradientAccumulationOptimizer(
                opt,
                backward_passes_per_step,  # type: ignore[arg-type]  # it refuses functions itself
                average_aggregated_gradients,
                sparse_as_dense,
                allreduce_fn,
                dtype,
                name,
            )
            hints.hint_if_micro_steps_are_counted(optimizers_inside(opt)[-1], name)
            return counterpart
        if allreduce_fn is not None:
            raise ValueError(
                "allreduce_fn is only for optimizers of tf.compat.v1, but got allreduce_fn="
                f"{allreduce_fn!r} with {opt!r}. On a mesh, give reducer= a strategy."
            )
        check_passes(backward_passes_per_step)
        check_skip_fn(should_skip_update_fn)
        if accumulate not in (None, LOCAL, SYNCED):
            raise ValueError(
                f"accumulate must be {LOCAL!r}, {SYNCED!r} or None, got {accumulate!r}."
            )
        self = super().__new__(cls)
        self._accumulates = backward_passes_per_step != 1 or should_skip_update_fn is not None
        needs_mesh_for = "the shards" if accumulate == LOCAL and self._accumulates else ""
        common = (name, axes, mesh_shape, layout, batch_dims, reducer, needs_mesh_for, reduce_dtype)
        self._wrap(opt, NOT_GIVEN, *common)
        self._given_dims = self._shard_names
        self._is_open = accumulate is None and self.axes is None
        self.accumulate = accumulate or (None if self._is_open else LOCAL)
        self.backward_passes_per_step = backward_passes_per_step
        self._average = bool(average_aggregated_gradients)
        self._skip_fn = should_skip_update_fn
        self.traits = self._traits()
        self._check_order()
        self._dtype = dtype
        self._checkpointed = bool(checkpoint_accumulators)
        hints.hint_if_micro_steps_are_counted(self.innermost(), name)
        return self

    def _traits(self) -> Traits:
        if not self._accumulates:  # it is the inner optimizer, which may be anywhere
            return Traits(reduces=False, takes_parts=True)
        is_local = self.accumulate == LOCAL
        return Traits(
            reduces=not is_local,
            needs_shards=is_local,
            or_else="accumulate reduced gradients, by accumulate='synced'",
            schedules_updates=True,
            skips_not_finite=getattr(self._skip_fn, "leaves_out_not_finite", False),
            one_mesh=_SYNCED_INSTEAD if is_local else "",
        )

    def settle(self, grads: Sequence[mtf.Tensor | None], around: Sequence[Wrapper]) -> None:
        """Decides where gradients accumulate, if neither that nor the mesh was given; logs it."""
        present = [g for g in grads if g is not None]
        if not present or not self._accumulates:
            return
        why = ""
        if self._is_open:
            found = self._inside or find_axes(present, self._given_dims)
            is_split = found is not None and found.num_shards > 1
            why = _why_synced(present, around, is_known=found is not None)
            self.accumulate = LOCAL if is_split and not why else SYNCED
            self.axes = found if self.accumulate == LOCAL else None
            self._shard_names = self.axes.batch_dims if self.axes else self._given_dims
            self.traits = self._traits()
        how = _HOW[LOCAL] if self.accumulate == LOCAL else _HOW[SYNCED]
        level = logging.WARNING if why else logging.INFO
        log_once(f"{self.name} {how} {why}", level, "%s%s%s.", self.name, how, why)

    def stages(self) -> list[Stage]:
        """See `Wrapper.stages`."""
        return [_Accumulate(self)] if self._accumulates else []

    @property
    def mini_step(self) -> mtf.Variable | None:
        """Microbatch steps in the sum so far; None if nothing accumulates (yet)."""
        return self._counters and self._counters.mini_step

    @property
    def update_step(self) -> mtf.Variable | None:
        """Updates made so far (int32); None before gradients were applied."""
        return self._counters and self._counters.update_step

    @property
    def update_step_now(self) -> mtf.Tensor | None:
        """`update_step` after the step that it is fetched with; None if every step updates."""
        return self._now and self._now.update_step

    @property
    def skipped(self) -> mtf.Variable | None:
        """Microbatch steps skipped so far (int32); None before gradients were applied."""
        return self._counters and self._counters.skipped

    def reported(self) -> dict[str, mtf.Tensor]:
        """See `mtf_gradsync.reported`."""
        now = self._now
        if now is None:
            return {}
        steps = {"update_step": now.update_step, "accumulation/micro_step": now.mini_step}
        return steps if self._skip_fn is None else {**steps, "accumulation/skipped": now.skipped}

    def variables(self) -> list[mtf.Variable]:
        """All variables that the stack made: the inner optimizer's, then the wrapper's."""
        return super().variables() + list(self._counters or ())

    def _note_counters(self, before: _Counters, now: _Counters) -> None:
        self._counters, self._now = before, now

    def _make_counters(self, mesh: mtf.Mesh) -> _Counters:
        return _Counters(
            scalar_state(mesh, f"{self.name}/mini_step", checkpointed=self._checkpointed),
            _update_step(mesh, self.name),
            scalar_state(mesh, f"{self.name}/skipped"),
        )


class _Accumulate(Stage):
    """Adds up gradients, and passes on the sums when an update is due."""

    gives = Form.REDUCED
    wants_reduced = True
    mixed = "reduce"
    mixed_warning = (
        "%s: the program itself needs the sums of the gradients of %s on every micro step (for "
        "%s), so they are reduced on each of them, and their sums are added up. Do that after "
        "accumulation: ClipByGlobalNormOptimizer inside it clips the sum."
    )

    def __init__(self, wrapper: GradientAccumulationOptimizer):
        self._wrapper = wrapper
        self.takes = Form.PER_SHARD if wrapper.accumulate == LOCAL else Form.REDUCED

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        wrapper, mesh = self._wrapper, gradients.mesh
        before = step.plan.state(wrapper, wrapper.name, lambda: wrapper._make_counters(mesh))
        mini_step, update_step, skipped = (on_mesh(c.value, mesh) for c in before)
        for state in before:
            mtf.scalar_summary(f"summary/{state.name}", state.value)
        counted = mtf.constant(mesh, 1, mtf.Shape([]), tf.int32)
        if wrapper._skip_fn is not None:
            skip = on_mesh(says_skip(wrapper._skip_fn, gradients.present, wrapper.reducer), mesh)
            skip = step.agreed(skip, by_any=True)
            gradients = without_skipped(gradients, skip)
            counted -= mtf.cast(skip, tf.int32)
            step.write_state(when=lambda: mtf.logical_not(skip))
        accumulators = Accumulators(
            gradients,
            wrapper._slots,
            wrapper._dtype,
            wrapper._checkpointed,
            counter=before.mini_step.name,
        )
        count = mini_step + counted
        passes = passes_at(wrapper.backward_passes_per_step, update_step)
        passes = on_mesh(passes, mesh) if isinstance(passes, mtf.Tensor) else passes
        due = mtf.greater_equal(count, passes)
        if wrapper._skip_fn is not None:
            # A checkpoint may hold more microbatch steps than an update takes now; a skipped step
            # brings no update even then.
            due = mtf.logical_and(due, mtf.greater(counted, 0))
        updated = mtf.cast(due, tf.int32)
        now = _Counters(count * (1 - updated), update_step + updated, skipped + (1 - counted))
        step.when_built(lambda: wrapper._note_counters(before, now))
        gate = accumulators.add(step)
        counts = step.plan.graph.combine_assignments(
            [mtf.assign(c, on_mesh(value, c.mesh)) for c, value in zip(before, now)]
        )
        step.write(counts, gate)
        divisor = count if wrapper._average else None
        return accumulators.take_when(due, step, gate, counts_every_step=True, divisor=divisor)


def _why_synced(grads: Sequence[mtf.Tensor], around: Sequence[Wrapper], is_known: bool) -> str:
    """Returns, for the log, why gradients cannot accumulate on each shard; "" if they can.

    `is_known` says whether the replica axes are.
    """
    reduces = [w for w in around if w.traits.reduces and not w.traits.watches_not_finite]
    if reduces:
        outer = type(reduces[0]).__name__
        return f", because {outer} around it does so: turn them round, to reduce once an update"
    if len({g.mesh for g in grads}) > 1:
        return ", because they are on several meshes: use one for each, to reduce once an update"
    if is_known or len(meshes_made()) == 1:
        return ""
    what = "several meshes" if meshes_made() else "no mesh yet"
    return (
        f", because the program has made {what}: give mesh_shape and layout, to reduce once an "
        "update, or accumulate='synced'"
    )


def get_update_step(mesh: mtf.Mesh, name: str = "GradientAccumulationOptimizer") -> mtf.Tensor:
    """Returns the number of updates made so far, for schedules of the inner optimizer.

    It is the wrapper's counter, also before the wrapper exists, and in any variable scope. It stays
    0 if backward_passes_per_step is 1 and nothing is skipped: the global step counts updates then.

    Args:
      mesh: the mesh that is trained on.
      name: name of the wrapper.

    Returns:
      An int32 mtf scalar.
    """
    return on_mesh(_update_step(mesh, name).value, mesh)


def _update_step(mesh: mtf.Mesh, name: str) -> mtf.Variable:
    """Finds or makes the counter of updates, which may be on another mesh of the graph already."""
    # In a run without the wrapper every step was an update.
    return scalar_state(mesh, f"{name}/update_step", start="global_step")


def _floating(dtype: Any) -> tf.DType | None:
    if dtype is None:
        return None
    with contextlib.suppress(TypeError):
        if tf.as_dtype(dtype).is_floating:
            return tf.as_dtype(dtype)
    raise ValueError(
        f"accumulator_dtype must be a floating dtype such as tf.float32, got {dtype!r}."
    )
