"""Reduction of gradients by `Strategy.reduce_gradients`, which may keep state for them."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.partial_sums import terms_of_processors
from mtf_gradsync.gradients.pending import PendingSums
from mtf_gradsync.gradients.stage import StageOperation, dims_to_sum, reshaped
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.reduce.state import State


class ReduceGradients(StageOperation):
    """Reduces gradients by `Strategy.reduce_gradients`, and gives the strategy's new state.

    Attributes:
      sums: the reduced gradients.
      new_state: pairs of a variable of the state and its new value.
    """

    takes_pending = True

    def __init__(
        self,
        grads: Sequence[mtf.Tensor],
        variables: Sequence[mtf.Variable],
        shard_dims: Sequence[mtf.Dimension],
        axes: ReplicaAxes,
        strategy: Strategy,
        state: State,
    ):
        """Adds the operation.

        The gradients are pending or per shard, and are reduced over the replica axes of
        `shard_dims`; over other axes by the strategy's `all_reduce`. The state is a structure of
        mesh variables, with or without shard dims in front.
        """
        self._axes, self._strategy, self._state = axes, strategy, state
        self._mesh_axes = [m for d, m in zip(axes.shard_dims, axes.mesh_axes) if d in shard_dims]
        self._sum_dims = dims_to_sum(grads, variables)
        pending = [g for g, dims in zip(grads, self._sum_dims) if not dims]
        PendingSums.want(pending, False, [d.name for d in axes.shard_dims], strategy)
        held = _present(state)
        self._num_grads = len(grads)
        super().__init__(
            [*grads, *(v.value for v in held)],
            [*(v.shape for v in variables), *(v.shape for v in held)],
            "reduce_gradients",
            [*(g.dtype for g in grads), *(v.activation_dtype for v in held)],
        )
        self.sums = self.outputs[: self._num_grads]
        self.new_state = list(zip(held, self.outputs[self._num_grads :]))

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)
        self._axes.check_mesh_impl(mesh_impl)
        groups = ProcessorGroups.along(mesh_impl, self._mesh_axes)
        # Each core's term of each gradient, of the shape of the variable's slice.
        grads = self.inputs[: self._num_grads]
        replica_axes = [self._mesh_axes] * len(grads)
        values = terms_of_processors(lowering, grads, self._sum_dims, replica_axes, self._strategy)
        held = iter([self._held(lowering, x) for x in self.inputs[self._num_grads :]])
        before = tf.nest.map_structure(lambda v: None if v is None else next(held), self._state)
        sums, after = self._strategy.reduce_gradients(mesh_impl, values, groups, before)
        name = type(self._strategy).__name__
        _check([*sums], values, f"{name}.reduce_gradients returned sums that")
        tf.nest.assert_same_structure(before, after)
        new = _present(after)
        _check(new, _present(before), f"{name}.reduce_gradients returned a state that")
        shapes = [mesh_impl.slice_shape(variable.shape) for variable, _ in self.new_state]
        laid_out = [reshaped(mesh_impl, *x) for x in zip(new, shapes)]
        self.set_outputs(lowering, [*sums, *laid_out])

    def _held(self, lowering: mtf.Lowering, tensor: mtf.Tensor) -> Any:
        """Each core's slice of a variable, without the shard dims."""
        mesh_impl = lowering.mesh_impl(self)
        names = {d.name for d in self._axes.shard_dims}
        sizes = zip(tensor.shape.dims, mesh_impl.slice_shape(tensor.shape))
        shape = [size for dim, size in sizes if dim.name not in names]
        value = lowering.tensors[tensor].to_laid_out_tensor()
        return reshaped(mesh_impl, value, shape)


def _present(state: State) -> list[Any]:
    return [x for x in tf.nest.flatten(state) if x is not None]


def _check(found: Sequence[Any], wanted: Sequence[Any], what: str) -> None:
    """Raises ValueError if dtypes or shapes of values differ from those that are wanted."""

    def described(values: Sequence[Any]) -> list[str]:
        return [
            f"{x.tensor_list[0].dtype.base_dtype.name}{list(map(int, x.slice_shape))}"
            for x in values
        ]

    if described(found) != described(wanted):
        raise ValueError(
            f"{what} are {described(found)}; return {described(wanted)}, the dtypes and shapes "
            "that it was given."
        )
