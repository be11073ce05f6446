"""The values of variables after operations have written them."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import give_outputs


class ValuesAfter(mtf.Operation):
    """Reads variables of a mesh (`reads`) once operations have run, also those of a branch."""

    def __init__(self, variables: Sequence[mtf.Variable], writes: Sequence[mtf.Operation]):
        super().__init__([], mesh=variables[0].mesh, name="values_after")
        give_outputs(
            self,
            [
                mtf.Tensor(self, v.shape, v.slice_dtype, index=index)
                for index, v in enumerate(variables)
            ],
        )
        self.reads, self._writes = list(variables), list(writes)

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        # An operation of a branch is lowered to the whole conditional.
        with tf.control_dependencies([lowering.operations[op] for op in self._writes]):
            for variable, output in zip(self.reads, self.outputs):
                lowering.set_tensor_lowering(output, _held(variable, lowering))


def _held(variable: mtf.Variable, lowering: mtf.Lowering) -> Any:
    """Reads the slices of a variable, which autostack may have stacked with others."""
    number = None
    holder = variable
    if variable not in lowering.variables:
        holder = next(
            v
            for v in lowering.variables
            if isinstance(v, mtf.StackedVariable)
            and v.mesh is variable.mesh
            and variable.name in v.original_names
        )
        number = holder.original_names.index(variable.name)

    def read(x: Any) -> tf.Tensor:
        return tf.convert_to_tensor(x) if number is None else tf.convert_to_tensor(x)[number]

    slices = lowering.variables[holder].laid_out_tensor
    return lowering.mesh_impl(variable).slicewise(read, slices)


def values_after(
    variables: Sequence[mtf.Variable], writes: Sequence[mtf.Operation]
) -> Sequence[mtf.Tensor]:
    """Returns the values of variables after operations, whether or not their branch ran.

    `writes` are lowered before. The tensors have the variables' shapes, in the dtype of their
    slices.
    """
    values: dict[mtf.Variable, mtf.Tensor] = {}
    for mesh in dict.fromkeys(v.mesh for v in variables):
        some = [v for v in variables if v.mesh is mesh]
        values.update(zip(some, ValuesAfter(some, writes).outputs))
    return [values[v] for v in variables]
