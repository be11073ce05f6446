"""Pending sums of a lowering: each processor's part, and the whole once somebody needs it."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import kept_sum
from mtf_gradsync._private.tensorflow import control_flow_context


class PendingSum(mtf.LazyAllreduceSum):
    """A lowered tensor of which each processor has a part, and the parts add up to the whole.

    Either is made when it is first asked for, so that nothing is computed that nobody uses.

    Attributes:
      mesh_impl: the mesh that it lies on.
      mesh_axes: the mesh axes to sum over, as Mesh-TF has them.
      slice_shape: shape of a processor's part, and of the whole's slice.
      add_counter_fn: Mesh-TF's, to be called when the sum is made.
      context: the loop or branch that it belongs to.
    """

    def __init__(
        self,
        mesh_impl: mtf.MeshImpl,
        mesh_axes: list[int],
        slice_shape: list[int],
        make_part: Callable[[], Any],
        make_whole: Callable[[PendingSum], Any],
        add_counter_fn: Callable[[], None] | None = None,
        context: Any = None,
        sources: Sequence[Any] = (),
    ):
        """Describes the sum; makes nothing.

        Args:
          mesh_impl: the mesh.
          mesh_axes: the mesh axes to sum over.
          slice_shape: of its slices.
          make_part: makes the `LaidOutTensor` of the parts.
          make_whole: makes the `LaidOutTensor` of the whole, or sees to it that `set_whole` is
            called with it, and returns None.
          add_counter_fn: see the attribute.
          context: see the attribute; None takes what is being built.
          sources: the lowered tensors that the whole is made of, where it is no sum of its own.
        """
        self.mesh_impl = mesh_impl
        self.mesh_axes = list(mesh_axes)
        self.add_counter_fn = add_counter_fn
        self.context = context or current_context()
        self._slice_shape = list(slice_shape)
        self._make_part = make_part
        self._make_whole = make_whole
        self._part: Any = None
        self._whole: Any = None
        self._sources = tuple(sources)

    @property
    def slice_shape(self) -> list[int]:
        """Shape of a slice."""
        return self._slice_shape

    @property
    def laid_out_input(self) -> Any:
        """The parts, a `LaidOutTensor`."""
        if self._part is None:
            self._part = self._make_part()
        return self._part

    @property
    def is_whole(self) -> bool:
        """Whether the whole has been made."""
        return self._whole is not None

    @property
    def is_complete(self) -> bool:
        """Whether both the parts and the whole have been made."""
        return self.is_whole and self._part is not None

    @property
    def sends_nothing(self) -> bool:
        """Whether the whole is there, or can be made without sending anything."""
        return self.is_whole or (bool(self._sources) and all(map(_sends_nothing, self._sources)))

    def set_whole(self, value: Any) -> None:
        """Gives it the whole, a `LaidOutTensor`."""
        self._whole = value

    def to_laid_out_tensor(self) -> Any:
        """The whole, a `LaidOutTensor`."""
        if self._whole is None:
            value = self._make_whole(self)
            if value is not None:
                self._whole = value
        return self._whole

    @property
    def tensor_list(self) -> list[tf.Tensor]:
        """The slices of the whole, as a `LaidOutTensor` has them."""
        return self.to_laid_out_tensor().tensor_list

    def copied(self) -> PendingSum:
        """The same sum; what is made of the one later, the other does not have."""
        part = self._part
        copy = PendingSum(
            self.mesh_impl,
            self.mesh_axes,
            self._slice_shape,
            # What exists outside of a branch can be used inside.
            self._make_part if self._part is None else lambda: part,
            self._make_whole,
            self.add_counter_fn,
            self.context,
            self._sources,
        )
        copy._whole = self._whole
        return copy


def _sends_nothing(lowered: Any) -> bool:
    if isinstance(lowered, PendingSum):
        return lowered.sends_nothing
    return not isinstance(lowered, mtf.LazyAllreduceSum) or kept_sum(lowered) is not None


def current_context() -> Any:
    """The loop or branch that is being built: what is made there is of use there alone."""
    graph = tf.get_default_graph()
    return graph, control_flow_context(graph)
