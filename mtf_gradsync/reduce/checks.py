"""Checks of arguments of strategies."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._private.libraries import tf


def check_count(argument: str, value: Any, what: str, least: int = 0) -> int:
    """Returns value; raises ValueError if it is not a whole number of `least` or more.

    The error says that `argument`, a name, must be `what`, a description.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{argument} must be {what}: {least} or more, got {value!r}.")
    return value


def check_values(values: Sequence[Any]) -> None:
    """Raises ValueError unless all slices of a value are dense numbers of one known shape."""
    for index, value in enumerate(values):
        slices = getattr(value, "tensor_list", None)
        if slices is None:
            raise ValueError(
                f"values must be LaidOutTensors, as lowering.tensors[x].to_laid_out_tensor() "
                f"gives them, but values[{index}] is {value!r}."
            )
        for x in slices:
            if isinstance(x, (tf.IndexedSlices, tf.SparseTensor)):
                raise ValueError(
                    f"values[{index}] is {type(x).__name__}, and only dense tensors can be summed "
                    f"over a mesh: {x!r}. Make it dense with tf.convert_to_tensor first."
                )
            if not x.shape.is_fully_defined():
                raise ValueError(
                    f"The shape of values[{index}] is unknown: {x!r}. A mesh needs the shape of "
                    "every slice; set it with tf.ensure_shape."
                )
            if not (x.dtype.is_floating or x.dtype.is_integer or x.dtype.is_complex):
                raise ValueError(
                    f"values[{index}] has the dtype {x.dtype.name}, which has no sum: {x!r}. Cast "
                    "it to a number first."
                )
        kinds = {(x.dtype.base_dtype.name, *x.shape.as_list()) for x in slices}
        if len(kinds) > 1:
            raise ValueError(
                f"The slices of values[{index}] must have one dtype and one shape, got "
                f"{sorted(kinds)}."
            )
