"""Writes to the slices of variables, which Mesh-TensorFlow's own assignments cannot make."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from mtf_gradsync._private.libraries import mtf, tf


class WriteInPlace(mtf.Operation):
    """Writes variables slice by slice, each from the same processor's slice of a value."""

    def __init__(
        self,
        variables: Sequence[mtf.Variable],
        values: Sequence[mtf.Tensor],
        write: Callable[[Any, tf.Tensor], Any],
        name: str,
    ):
        """Adds the operation; values are laid out like the variables.

        `write` makes the assignment of a value to a tf variable.
        """
        super().__init__(list(values), name=name)
        self.variables, self._write = list(variables), write

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""

        def write(variable: Any, slice_variable: Any, value: tf.Tensor) -> Any:
            return self._write(slice_variable, value)

        writes = [
            lowering.variables[variable].assign_to_slices(
                write, lowering.tensors[value].to_laid_out_tensor().all_slices
            )
            for variable, value in zip(self.variables, self.inputs)
        ]
        lowering.operations[self] = tf.group(*writes)
