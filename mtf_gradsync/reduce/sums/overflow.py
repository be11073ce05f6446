"""Reports overflows of sums in a narrow dtype while a session runs."""

from __future__ import annotations

import sys
from typing import Any, Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.tensorflow import control_flow_v1
from mtf_gradsync.mesh.groups import ProcessorGroups


def say_where_sums_overflow(
    mesh_impl: Any,
    values: Sequence[Any],
    sums: Sequence[Any],
    results: Sequence[Any],
    groups: ProcessorGroups,
    in_parts: bool = False,
) -> list[Any]:
    """Returns results that, when used, print a message where sums of finite values are not finite.

    `values` are those before rounding, read only after an overflow; `sums` are in the narrow dtype.
    With `in_parts` each processor of a group has only a part of the sum.
    """
    devices = mesh_impl.devices
    pairs = [(i, group) for i in range(len(values)) for group in groups.groups]
    finite = []
    for i, group in pairs:
        holders = group if in_parts else group[:1]
        found = [_all_finite(sums[i].tensor_list[p], devices[p]) for p in holders]
        with tf.device(devices[group[0]]):
            finite.append(tf.reduce_all(tf.stack(found)) if in_parts else found[0])
    host = tf.DeviceSpec.from_string(devices[0]).replace(device_type="CPU", device_index=0)
    host = host.to_string()

    def look_closer() -> tf.Tensor:
        overflown = []
        for (i, group), sum_finite in zip(pairs, finite):
            inputs = [_all_finite(values[i].tensor_list[p], devices[p]) for p in group]
            with tf.device(host):
                overflown.append(
                    tf.logical_and(tf.reduce_all(tf.stack(inputs)), tf.logical_not(sum_finite))
                )
        with tf.device(host):
            number = tf.reduce_sum(tf.cast(tf.stack(overflown), tf.int32))
            return tf.cond(number > 0, lambda: _say(number, len(pairs)), lambda: False)

    with tf.name_scope("overflow"), tf.device(host):
        with control_flow_v1():
            check = tf.cond(tf.reduce_all(tf.stack(finite)), lambda: False, look_closer)
    tied = []
    for result in results:
        slices = list(result.tensor_list)
        with tf.device(devices[0]), tf.control_dependencies([check]):
            slices[0] = tf.identity(slices[0])
        tied.append(mesh_impl.LaidOutTensor(slices))
    return tied


def _all_finite(x: tf.Tensor, device: str) -> tf.Tensor:
    with tf.device(device):
        return tf.reduce_all(tf.math.is_finite(x))


def _say(number: tf.Tensor, total: int) -> tf.Tensor:
    said = tf.print(
        "mtf_gradsync: float16 overflow:",
        number,
        f"of {total} sums over the mesh are infinite or NaN although all summed values are "
        "finite. Give CompressedAllReduce a smaller prescale or wire_dtype='bfloat16'.",
        output_stream=sys.stderr,
    )
    with tf.control_dependencies([said]):
        return tf.constant(True)
