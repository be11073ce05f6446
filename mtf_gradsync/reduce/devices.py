"""Device strings."""

from __future__ import annotations

from typing import Any

from mtf_gradsync._tf_compat import tf


def canonical_device(device: Any, argument: str = "A device") -> str:
    """A device string in TensorFlow's full form: "cpu:0" is "/device:CPU:0".

    Raises:
      ValueError: it is no device string.
    """
    try:
        canonical = tf.DeviceSpec.from_string(device).to_string()
    except (AttributeError, TypeError, ValueError) as error:
        canonical, cause = "", error
    else:
        cause = None
    if not canonical:
        raise ValueError(
            f"{argument} must be a string such as '/device:CPU:0' or "
            f"'/job:worker/task:1/device:GPU:0', got {device!r}."
        ) from cause
    return canonical


def process_of(device: str) -> tuple[Any, ...]:
    """The process that a device string names: its job, replica and task."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.job, spec.replica, spec.task
