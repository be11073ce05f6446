"""Device strings in forms that can be compared."""

from __future__ import annotations

import functools
from typing import Any

from mtf_gradsync._private.libraries import tf


def canonical_device(device: Any, argument: str = "A device") -> str:
    """Returns a device string in TensorFlow's full form: "cpu:0" is "/device:CPU:0".

    Anything else raises a ValueError, which calls it `argument`.
    """
    cause: Exception | None = None
    try:
        canonical = tf.DeviceSpec.from_string(device).to_string()
    except (AttributeError, TypeError, ValueError) as error:
        canonical, cause = "", error
    if not canonical:
        raise ValueError(
            f"{argument} must be a string such as '/device:CPU:0' or "
            f"'/job:worker/task:1/device:GPU:0', got {device!r}."
        ) from cause
    return canonical


# Asked for each device of each operation of a program.
@functools.lru_cache(maxsize=None)
def full_name(device: str) -> str:
    """Returns a device's full name, one name for all ways to write it; "" stays empty."""
    return tf.DeviceSpec.from_string(device).to_string()


def place_of(device: str) -> tuple[Any, ...]:
    """Returns a value that is equal for all strings that name one device.

    Unlike `full_name` it knows that "/device:CPU:0" is "/job:localhost/task:0/device:CPU:0".
    """
    spec = tf.DeviceSpec.from_string(device)
    return process_of(device), spec.device_type, spec.device_index or 0


def process_of(device: str) -> tuple[Any, ...]:
    """Returns the process that a device string names: its job, replica and task.

    TensorFlow's name for the local process counts as no name.
    """
    spec = tf.DeviceSpec.from_string(device)
    if spec.job in (None, "localhost") and not spec.task:
        return None, spec.replica or 0, None
    return spec.job, spec.replica or 0, spec.task
