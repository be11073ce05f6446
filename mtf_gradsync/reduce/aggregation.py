"""Sums and means."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.mesh.kind import is_simd


def check_aggregation(aggregation: Any) -> bool:
    """Whether a mean is wanted.

    Raises:
      ValueError: aggregation is neither sum nor mean.
    """
    if aggregation == tf.VariableAggregation.MEAN:
        return True
    if aggregation == tf.VariableAggregation.SUM:
        return False
    raise ValueError(
        "aggregation must be tf.VariableAggregation.SUM or tf.VariableAggregation.MEAN, got "
        f"{aggregation!r}."
    )


def check_divisible(values: Sequence[Any]) -> None:
    """Raises ValueError where a mean would not be of the values' own dtype."""
    for value in values:
        dtype = value.tensor_list[0].dtype
        if dtype.is_integer:
            raise ValueError(
                f"A mean of {dtype.name} is no {dtype.name}: cast the value to a float, or take "
                f"the sum; got {value!r}."
            )


def divide(mesh_impl: Any, value: Any, number: int) -> Any:
    """Divides each slice by a number, those that several processors read in one place once."""
    if is_simd(mesh_impl):
        return mesh_impl.slicewise(lambda x: x / tf.cast(number, x.dtype), value)
    divided: dict[str, tf.Tensor] = {}
    for x in value.tensor_list:
        if x.name not in divided:
            with tf.device(x.device):
                divided[x.name] = x / tf.cast(number, x.dtype)
    return mesh_impl.LaidOutTensor([divided[x.name] for x in value.tensor_list])
