"""Reduction of gradients by strategies that keep state for them."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.partial_sums import (
    PartialSum,
    partial_sum,
    reduce_partial_sums,
    share,
)
from mtf_gradsync.gradients.pending import PendingSums
from mtf_gradsync.gradients.stage import StageOperation
from mtf_gradsync.gradients.stages import local_sum
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.reduce.state import State


class ReduceApart(StageOperation):
    """Reduces gradients by a strategy that keeps state, and gives the new state.

    Attributes:
      sums: the reduced gradients.
      kept: pairs of a variable of the state and its new value.
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

        Args:
          grads: pending or per-shard gradients, at least one.
          variables: their variables.
          shard_dims: the shard dims that the gradients are reduced over.
          axes: the replica axes.
          strategy: its `reduce_gradients` reduces over the replica axes, its `all_reduce` over
            other axes.
          state: a structure of mesh variables, with or without shard dims in front.
        """
        self._axes, self._strategy, self._state = axes, strategy, state
        self._mesh_axes = [m for d, m in zip(axes.shard_dims, axes.mesh_axes) if d in shard_dims]
        self._sum_dims = [
            [d for d in g.shape.dims if d not in v.shape.dims] for g, v in zip(grads, variables)
        ]
        pending = [g for g, dims in zip(grads, self._sum_dims) if not dims]
        if pending:
            PendingSums.want(pending, False, [d.name for d in axes.shard_dims], strategy)
        held = [v for v in tf.nest.flatten(state) if v is not None]
        self._num_grads = len(grads)
        super().__init__(
            [*grads, *(v.value for v in held)],
            [*(v.shape for v in variables), *(v.shape for v in held)],
            "reduce_apart",
            [*(g.dtype for g in grads), *(v.activation_dtype for v in held)],
        )
        self.sums = self.outputs[: self._num_grads]
        self.kept = list(zip(held, self.outputs[self._num_grads :]))

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        mesh_impl = lowering.mesh_impl(self)
        self._axes.check_mesh_impl(mesh_impl)
        groups = ProcessorGroups.along(mesh_impl, self._mesh_axes)
        values = self._parts(lowering)
        held = iter([self._held(lowering, x) for x in self.inputs[self._num_grads :]])
        before = tf.nest.map_structure(lambda v: None if v is None else next(held), self._state)
        sums, after = self._strategy.reduce_gradients(mesh_impl, values, groups, before)
        name = type(self._strategy).__name__
        _check([*sums], values, f"{name}.reduce_gradients returned sums that")
        tf.nest.assert_same_structure(before, after)
        old, new = (
            [x for x in tf.nest.flatten(state) if x is not None] for state in (before, after)
        )
        _check(new, old, f"{name}.reduce_gradients returned a state that")
        laid_out = []
        for value, (variable, _) in zip(new, self.kept):
            shape = mesh_impl.slice_shape(variable.shape)
            laid_out.append(mesh_impl.slicewise(lambda x, to=shape: tf.reshape(x, to), value))
        self.set_outputs(lowering, [*sums, *laid_out])

    def _parts(self, lowering: mtf.Lowering) -> list[Any]:
        """Each core's part of each gradient, of the shape of the variable's slice."""
        mesh_impl = lowering.mesh_impl(self)
        sums, missing = [], []
        for grad, dims in zip(self.inputs, self._sum_dims):
            value, pending = partial_sum(lowering, grad)
            value, summed = local_sum(mesh_impl, value, grad.shape, dims)
            mesh_axes = {*pending, *summed}
            # Equal shares of what is reduced along an axis already keep the sum the same.
            missing.append(set(self._mesh_axes) - mesh_axes)
            sums.append(PartialSum(value, tuple(sorted(mesh_axes - set(self._mesh_axes)))))
        values = reduce_partial_sums(mesh_impl, sums, self._strategy)
        return [share(mesh_impl, value, axes) for value, axes in zip(values, missing)]

    def _held(self, lowering: mtf.Lowering, tensor: mtf.Tensor) -> Any:
        """Each core's slice of a variable, without the shard dims."""
        mesh_impl = lowering.mesh_impl(self)
        names = {d.name for d in self._axes.shard_dims}
        sizes = zip(tensor.shape.dims, mesh_impl.slice_shape(tensor.shape))
        shape = [size for dim, size in sizes if dim.name not in names]
        value = lowering.tensors[tensor].to_laid_out_tensor()
        return mesh_impl.slicewise(lambda x: tf.reshape(x, shape), value)


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
