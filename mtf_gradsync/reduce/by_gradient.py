"""The base of strategies with a special reduction for gradients."""

from __future__ import annotations

import abc
from typing import Any, Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.reduce.one_level import FusedAllReduce
from mtf_gradsync.reduce.parts import Cuts
from mtf_gradsync.reduce.state import State
from mtf_gradsync.reduce.strategy import Strategy, check_strategy, reduce_scatter_by


class GradientStrategy(Strategy):
    """A base class: reduces gradients by `reduce_gradients`, all other sums by `reducer`.

    It is for strategies whose sums are not exact, or that keep errors of compression: norms, flags
    and the model's own sums stay exact. A subclass defines `reduce_gradients`, and
    `gradient_state` if it keeps state.

    Attributes:
      reducer: the strategy of all other sums.
    """

    def __init__(self, reducer: Strategy | None = None):
        """Sets the strategy of all other sums.

        Args:
          reducer: a strategy; None takes `FusedAllReduce()`.

        Raises:
          TypeError: reducer is no strategy.
        """
        self.reducer = FusedAllReduce() if reducer is None else check_strategy(reducer)

    @property
    def has_gradient_reduction(self) -> bool:
        """See `Strategy.has_gradient_reduction`."""
        return True

    @abc.abstractmethod
    def reduce_gradients(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups, state: State
    ) -> tuple[list[Any], State]:
        """See `Strategy.reduce_gradients`."""

    def all_reduce(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> list[Any]:
        """See `Strategy.all_reduce`."""
        return self.reducer.all_reduce(mesh_impl, values, groups)

    def reduce_scatter(
        self,
        mesh_impl: Any,
        values: Sequence[Any],
        groups: ProcessorGroups,
        cuts: Sequence[Cuts],
    ) -> list[Any]:
        """See `Strategy.reduce_scatter`."""
        return reduce_scatter_by(self.reducer, mesh_impl, values, groups, cuts)

    def check(self, mesh_impl: Any, groups: ProcessorGroups) -> None:
        """See `Strategy.check`."""
        getattr(self.reducer, "check", super().check)(mesh_impl, groups)

    def wire_dtype(self, mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
        """See `Strategy.wire_dtype`; of all other sums."""
        return getattr(self.reducer, "wire_dtype", super().wire_dtype)(mesh_impl, dtype, groups)


def plus_errors(mesh_impl: Any, values: Sequence[Any], errors: Sequence[Any]) -> list[Any]:
    """Adds compression errors of earlier steps to values, in float32; a None adds nothing."""

    def plus(x: tf.Tensor, error: tf.Tensor) -> tf.Tensor:
        return tf.cast(x, tf.float32) + error

    return [
        x if error is None else mesh_impl.slicewise(plus, x, error)
        for x, error in zip(values, errors)
    ]


def no_errors(mesh_impl: Any, errors: Sequence[Any]) -> list[Any]:
    """Returns zeros in place of each error; None for None."""
    return [None if e is None else mesh_impl.slicewise(tf.zeros_like, e) for e in errors]


def in_dtype_of(mesh_impl: Any, value: Any, other: Any) -> Any:
    """Casts a value to the dtype of another."""
    dtype = other.tensor_list[0].dtype.base_dtype
    if value.tensor_list[0].dtype.base_dtype == dtype:
        return value
    return mesh_impl.slicewise(lambda x: tf.cast(x, dtype), value)
