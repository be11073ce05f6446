"""Checks of aggregations, and means."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.mesh.kind import is_simd


def check_aggregation(aggregation: Any) -> bool:
    """Returns whether an aggregation is a mean; raises ValueError if it is not a sum either."""
    if aggregation == tf.VariableAggregation.MEAN:
        return True
    if aggregation == tf.VariableAggregation.SUM:
        return False
    raise ValueError(
        "aggregation must be tf.VariableAggregation.SUM or tf.VariableAggregation.MEAN, got "
        f"{aggregation!r}."
    )


def check_divisible(values: Sequence[Any]) -> None:
    """Raises ValueError if a value's dtype has no means."""
    for value in values:
        dtype = value.tensor_list[0].dtype
        if dtype.is_integer:
            raise ValueError(
                f"There is no mean of {dtype.name} values: got {value!r}. Cast it to a float, or "
                "take the sum."
            )


def divide(mesh_impl: Any, value: Any, number: int) -> Any:
    """Divides each slice by a number; slices that processors share are divided once."""
    if is_simd(mesh_impl):
        return mesh_impl.slicewise(lambda x: x / tf.cast(number, x.dtype), value)
    divided: dict[str, tf.Tensor] = {}
    for x in value.tensor_list:
        if x.name not in divided:
            with tf.device(x.device):
                divided[x.name] = x / tf.cast(number, x.dtype)
    return mesh_impl.LaidOutTensor([divided[x.name] for x in value.tensor_list])
