"""Checks the arguments of `Strategy.reduce` and `broadcast`, and copies results to devices."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.axes import is_simd
from mtf_gradsync.mesh.devices import canonical_device, process_of


def check_aggregation(aggregation: Any) -> bool:
    """Returns True for a mean and False for a sum; raises ValueError for other aggregations."""
    if aggregation == tf.VariableAggregation.MEAN:
        return True
    if aggregation == tf.VariableAggregation.SUM:
        return False
    raise ValueError(
        "aggregation must be tf.VariableAggregation.SUM or tf.VariableAggregation.MEAN, got "
        f"{aggregation!r}."
    )


def check_divisible(values: Sequence[Any]) -> None:
    """Raises ValueError if a value has an integer dtype, which has no mean."""
    for value in values:
        dtype = value.tensor_list[0].dtype
        if dtype.is_integer:
            raise ValueError(
                f"There is no mean of {dtype.name} values: got {value!r}. Cast it to a float, or "
                "take the sum."
            )


def divide(mesh_impl: Any, value: Any, number: int) -> Any:
    """Returns a `LaidOutTensor` divided by a number.

    A slice that several processors share is divided once.
    """
    if is_simd(mesh_impl):
        return mesh_impl.slicewise(lambda x: x / tf.cast(number, x.dtype), value)
    divided: dict[str, tf.Tensor] = {}
    for x in value.tensor_list:
        if x.name not in divided:
            with tf.device(x.device):
                divided[x.name] = x / tf.cast(number, x.dtype)
    return mesh_impl.LaidOutTensor([divided[x.name] for x in value.tensor_list])


def check_destinations(mesh_impl: Any, destinations: Any) -> list[str] | None:
    """Returns the devices that destinations name, or None if they are a `LaidOutTensor`.

    See `Strategy.reduce` for what destinations may be.

    Raises:
      ValueError: destinations are of another kind, or empty, or are devices and the mesh is a SIMD
        mesh.
    """
    if hasattr(destinations, "tensor_list"):
        _check_on_mesh(mesh_impl, destinations, "destinations")
        return None
    # Ref and resource variables have no common base in tf.compat.v1.
    if hasattr(destinations, "read_value") and hasattr(destinations, "device"):
        devices = [destinations.device]
    elif isinstance(destinations, str):
        devices = [destinations]
    elif isinstance(destinations, (list, tuple)) and all(isinstance(d, str) for d in destinations):
        devices = list(destinations)
    else:
        raise ValueError(
            "destinations must be a LaidOutTensor, a device string, a list of device strings or a "
            f"tf.Variable, got {destinations!r}."
        )
    if not devices or not all(devices):
        raise ValueError(
            f"destinations must not be empty: got {destinations!r}. Give a device such as "
            "'/device:CPU:0', or a LaidOutTensor for the whole mesh."
        )
    for device in devices:
        canonical_device(device, "A device of destinations")
    if is_simd(mesh_impl):
        raise ValueError(
            f"destinations must be a LaidOutTensor on a SIMD mesh, whose one program runs on all "
            f"cores and cannot name a device; got {destinations!r}."
        )
    return devices


def check_value(mesh_impl: Any, value: Any) -> Any:
    """Returns `value` unchanged; raises ValueError unless it has one slice per processor."""
    if isinstance(value, mtf.Tensor):
        raise ValueError(
            f"A value to reduce must be a LaidOutTensor, got {value!r}. Give what it was lowered "
            "to: lowering.tensors[x].to_laid_out_tensor()."
        )
    if not hasattr(value, "tensor_list"):
        raise ValueError(
            "A value to reduce must be a LaidOutTensor with a slice for each processor of the "
            f"mesh, got {value!r}."
        )
    _check_on_mesh(mesh_impl, value, "A value to reduce")
    return value


def as_pairs(pairs: Any) -> list[tuple[Any, Any]]:
    """Returns (value, destinations) pairs as a list; raises ValueError for anything else."""
    if not isinstance(pairs, (list, tuple)):
        raise ValueError(
            "value_destination_pairs must be a list or tuple of tuples (value, destinations), got "
            f"{pairs!r}."
        )
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                "Each element of value_destination_pairs must be a tuple (value, destinations), "
                f"got {pair!r}."
            )
    return list(pairs)


def copies(mesh_impl: Any, value: Any, devices: Sequence[str]) -> dict[str, tf.Tensor]:
    """Copies a value that is the same on all processors to devices.

    Each copy is made from the nearest slice: one on the device itself, or else in its process.
    """
    on_device: dict[str, tf.Tensor] = {}
    in_process: dict[Any, tf.Tensor] = {}
    for device, x in zip(mesh_impl.devices, value.tensor_list):
        on_device.setdefault(canonical_device(device) if device else "", x)
        in_process.setdefault(process_of(device), x)
    result = {}
    for device in devices:
        near = in_process.get(process_of(device), value.tensor_list[0])
        with tf.device(device):
            result[device] = tf.identity(on_device.get(canonical_device(device), near))
    return result


def spread(tensor: tf.Tensor, devices: Sequence[str]) -> list[tf.Tensor]:
    """Copies a tensor to devices, so that each process receives it only once."""
    first: dict[Any, tf.Tensor] = {}
    result = []
    for device in devices:
        with tf.device(device):
            result.append(tf.identity(first.get(process_of(device), tensor)))
        first.setdefault(process_of(device), result[-1])
    return result


def _check_on_mesh(mesh_impl: Any, value: Any, what: str) -> None:
    slices, each = mesh_impl.size, f"one slice for each of the {mesh_impl.size} processors"
    if is_simd(mesh_impl):
        slices, each = 1, "the one slice that a core's program holds"
    if len(value.tensor_list) != slices:
        raise ValueError(
            f"{what} must have {each} of the mesh {mesh_impl.shape.to_string}, got "
            f"{len(value.tensor_list)}."
        )
