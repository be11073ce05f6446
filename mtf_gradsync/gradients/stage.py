"""The base of operations on lists of gradients."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import give_outputs, lowered_on


class StageOperation(mtf.Operation):
    """An operation on a list of tensors, all of which are lowered at once.

    Attributes:
      takes_pending: whether it reads pending sums as they are, but for those for which it called
        `PendingSums.want` with `reduced=True`. If false, all inputs of an operation that is not
        linear are reduced.
      is_linear: whether its outputs are linear in all of its inputs together.
    """

    takes_pending = False
    is_linear = False

    def __init__(
        self,
        inputs: Sequence[mtf.Tensor],
        shapes: Sequence[mtf.Shape],
        name: str,
        dtypes: Any = None,
        mesh: mtf.Mesh | None = None,
    ):
        """Adds the operation.

        Its outputs have the dtypes of the inputs, in order, and lie on their mesh, unless others
        are given.
        """
        super().__init__(list(inputs), mesh=mesh, name=name)
        dtypes = dtypes or [x.dtype for x in inputs]
        tensors = [
            mtf.Tensor(self, shape, dtype, index=index)
            for index, (shape, dtype) in enumerate(zip(shapes, dtypes))
        ]
        give_outputs(self, tensors)

    def set_outputs(self, lowering: mtf.Lowering, values: Sequence[Any]) -> None:
        """Records the lowered outputs, in order."""
        for output, value in zip(self.outputs, values):
            lowering.set_tensor_lowering(output, value)


class _OnMesh(StageOperation):
    """Gives a tensor that no mesh splits to the processors of another mesh."""

    def __init__(self, x: mtf.Tensor, mesh: mtf.Mesh):
        super().__init__([x], [x.shape], "on_mesh", mesh=mesh)

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        self.set_outputs(lowering, [lowered_on(lowering, self.inputs[0], self.mesh)])


def on_mesh(x: mtf.Tensor, mesh: mtf.Mesh) -> mtf.Tensor:
    """Returns a tensor on another mesh of the same graph, if it is not on it already.

    The tensor is a scalar, or has dimensions that neither mesh splits. Nothing is reduced.
    """
    return x if x.mesh is mesh else _OnMesh(x, mesh).outputs[0]


def reduced_values(lowering: mtf.Lowering, tensors: Sequence[mtf.Tensor]) -> list[Any]:
    """Returns the lowered values of tensors, reduced over all of their pending axes."""
    return [lowering.tensors[t].to_laid_out_tensor() for t in tensors]


def reshaped(mesh_impl: Any, value: Any, shape: Sequence[int]) -> Any:
    """Reshapes each slice of a `LaidOutTensor`."""
    return mesh_impl.slicewise(lambda x: tf.reshape(x, shape), value)


def dims_to_sum(
    grads: Sequence[mtf.Tensor], variables: Sequence[mtf.Variable]
) -> list[list[mtf.Dimension]]:
    """Returns for each gradient the dims that its variable lacks: its shard dims."""
    return [[d for d in g.shape.dims if d not in v.shape.dims] for g, v in zip(grads, variables)]
