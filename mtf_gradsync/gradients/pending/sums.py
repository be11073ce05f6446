"""Pending sums of a lowering: each processor's part, and the reduced sum once it is needed."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import sum_made_by
from mtf_gradsync._private.tensorflow import control_flow_context


class PendingSum(mtf.LazyAllreduceSum):
    """A lowered tensor that is the sum of a part on each processor.

    Parts and sum are made when they are first used, so that nothing unused is computed.

    Attributes:
      mesh_impl: the mesh that it lies on.
      mesh_axes: numbers of the mesh axes to sum over.
      add_counter_fn: Mesh-TF's, to be called when the sum is made.
      context: the loop or branch that it was made in.
    """

    def __init__(
        self,
        mesh_impl: mtf.MeshImpl,
        mesh_axes: list[int],
        slice_shape: list[int],
        make_part: Callable[[], Any],
        make_reduced: Callable[[PendingSum], None],
        add_counter_fn: Callable[[], None] | None = None,
        sources: Sequence[Any] = (),
    ):
        """Describes the sum; makes nothing.

        `make_part` returns the `LaidOutTensor` of the parts, and `make_reduced` calls `set_reduced`
        with that of the sum. `sources` are the lowered tensors that the sum is computed from, if it
        is not reduced itself.
        """
        self.mesh_impl = mesh_impl
        self.mesh_axes = list(mesh_axes)
        self.add_counter_fn = add_counter_fn
        self.context = current_context()
        self._slice_shape = list(slice_shape)
        self._make_part = make_part
        self._make_reduced = make_reduced
        self._part: Any = None
        self._reduced_value: Any = None
        self._sources = tuple(sources)

    @property
    def slice_shape(self) -> list[int]:
        """Shape of a processor's part, and of a slice of the sum."""
        return self._slice_shape

    @property
    def laid_out_input(self) -> Any:
        """The `LaidOutTensor` of the parts."""
        if self._part is None:
            self._part = self._make_part()
        return self._part

    @property
    def is_reduced(self) -> bool:
        """Whether the sum has been made."""
        return self._reduced_value is not None

    @property
    def is_complete(self) -> bool:
        """Whether both the parts and the sum have been made."""
        return self.is_reduced and self._part is not None

    @property
    def sends_nothing(self) -> bool:
        """Whether the sum has been made, or can be made without sending anything."""
        return self.is_reduced or (bool(self._sources) and all(map(_sends_nothing, self._sources)))

    def set_reduced(self, value: Any) -> None:
        """Sets the `LaidOutTensor` of the sum, which was reduced just now."""
        self._reduced_value = value
        if self.add_counter_fn:
            self.add_counter_fn()

    def to_laid_out_tensor(self) -> Any:
        """Returns the `LaidOutTensor` of the sum, made on the first call."""
        if self._reduced_value is None:
            self._make_reduced(self)
        return self._reduced_value

    @property
    def tensor_list(self) -> list[tf.Tensor]:
        """The slices of the sum."""
        return self.to_laid_out_tensor().tensor_list


def _sends_nothing(lowered: Any) -> bool:
    if isinstance(lowered, PendingSum):
        return lowered.sends_nothing
    return not isinstance(lowered, mtf.LazyAllreduceSum) or sum_made_by(lowered) is not None


def current_context() -> Any:
    """Returns the loop or branch that is being built, which tensors made in it belong to."""
    graph = tf.get_default_graph()
    return graph, control_flow_context(graph)
