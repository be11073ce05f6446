"""The replica axes of a wrapper, and shard dims in the shapes of gradients and variables."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.mesh.axes import ReplicaAxes


class ShardShapes:
    """A mixin for wrappers: their replica axes, and shard dims in shapes."""

    _given_axes: ReplicaAxes | None = None
    _given_names: tuple[str, ...] = ()
    # The wrapper around this one that makes islands (`OuterOptimizer`), while a step is built.
    _in_islands_of: Any = None

    @property
    def axes(self) -> ReplicaAxes | None:
        """`ReplicaAxes`, or None if no mesh was given.

        While a step is built inside of islands, these are the replica axes inside an island.
        """
        given, around = self._given_axes, self._in_islands_of
        if given is None or around is None:
            return given
        return around.inside if set(given.mesh_axes) & set(around.islands.mesh_axes) else given

    @property
    def _shard_names(self) -> tuple[str, ...]:
        return self.axes.batch_dims if self.axes else self._given_names

    def _shard_dims(self, shape: mtf.Shape) -> list[mtf.Dimension]:
        """The shard dims that a shape has, in the order that numbers the shards."""
        by_name = {d.name: d for d in shape.dims}
        return [by_name[name] for name in self._shard_names if name in by_name]

    def _has_own_copy(self, variable: mtf.Variable) -> bool:
        """Whether every shard has its own copy of a variable, which then has all shard dims."""
        dims = self._shard_dims(variable.shape)
        needed = [d.name for d in self.axes.shard_dims] if self.axes else []
        missing = [name for name in needed if name not in [d.name for d in dims]]
        if dims and missing:
            raise ValueError(
                f"Variable {variable.name!r} of shape {variable.shape.to_string} has the shard "
                f"dims {[d.name for d in dims]} but not {missing}: a variable has either all of "
                "them (every shard its own copy) or none."
            )
        return bool(dims)

    def _check_shapes(
        self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> None:
        for grad, variable in zip(grads, variables):
            if grad is None:
                continue
            shard_dims = [] if self._has_own_copy(variable) else self._shard_dims(grad.shape)
            if [d for d in grad.shape.dims if d not in shard_dims] != variable.shape.dims:
                raise ValueError(
                    f"The gradient of {variable.name!r} has shape {grad.shape.to_string}, but "
                    f"the variable has {variable.shape.to_string}: a gradient has the "
                    f"variable's shape, or the shard dims {list(self._shard_names)} in front."
                )
