"""All-reduces by TensorFlow's collective operations."""

from __future__ import annotations

import itertools
import random
import zlib
from typing import Any, Iterator, Sequence

from mtf_gradsync._common import check_whole_number, is_number, warn_once
from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.patches import late_configurable
from mtf_gradsync._private.tensorflow import collective_sum, control_flow_context
from mtf_gradsync.mesh.axes import ProcessorGroups, is_simd
from mtf_gradsync.mesh.devices import full_name, kind_of, place_of
from mtf_gradsync.reduce.strategy import OneLevel
from mtf_gradsync.reduce.sums import (
    NARROW_FLOATS,
    GroupSum,
    Packs,
    Planner,
    add_n,
    packs_of_groups,
    plan_unpacked,
)

# The dtypes of TensorFlow's operation, read on 2.12 to 2.21; float16 and bfloat16 are sent as
# float32.
_DTYPES = (tf.float32, tf.float64, tf.int32, tf.int64)


def _instance_keys_of_a_client() -> Iterator[int]:
    """Yields instance keys, which identify collectives: consecutive numbers after a random one.

    Because the first number is random, another program is unlikely to have used the same keys on
    the same workers.
    """
    # A worker refuses a second collective with the same key, even after the client that used the
    # key has ended. The first key is random, without the program's seed, because two runs of a
    # program must not use the same keys.
    return itertools.count(random.SystemRandom().randrange(1, 1 << 30))


_instance_keys = _instance_keys_of_a_client()


@late_configurable(module="mtf_gradsync")
class CollectiveAllReduce(OneLevel):
    """A strategy of TensorFlow's collectives: rings on CPUs, NCCL on GPUs that have it.

    The devices of all processors, in one or several processes, share the work equally. The
    processes of a cluster have to know their collective group leader: start each `tf.train.Server`
    with ``session_config(collective_group_leader=...)``. Without this setting, the
    processes wait for each other for ever, without a message.

    Two devices that start two collectives in different orders can wait for each other for ever. So
    all collectives of a graph (or of one branch or loop of a graph) run one after the other, in the
    order in which they were built. An operation that reads a sum waits until all members of the
    group have the sum. A session that fetches one sum therefore also runs all sums that were built
    before this one.

    After a restart of one process of a cluster, or after a failed collective, every later
    collective fails with an error until all processes are restarted. Take another strategy for a
    run that has to survive the loss of a process.

    TensorFlow has no collectives on SIMD meshes, nor inside tf functions of a session (the update
    of `GradientAccumulationOptimizer` on one process). In these places, this strategy sums as
    `FusedAllReduce` does without buckets, and logs a warning. Values of dtypes that collectives do
    not support are summed in the same way, without a warning.

    References:
      TensorFlow 1's `CollectiveAllReduce`, for the argument `all_reduce_merge_scope`. In TensorFlow
      1 the argument only marks gradients that the runtime may merge; this class merges them.
    """

    def __init__(self, merge_scope: int = 32, timeout_seconds: float = 0.0):
        """Sets how many tensors one collective sums, and how long a collective waits.

        Args:
          merge_scope: the largest number of tensors (of one dtype) that are summed by one
            collective; 1 merges nothing.
          timeout_seconds: the seconds of waiting after which a collective fails with
            DeadlineExceededError; 0 waits for ever. Use a timeout to find what hangs, not to train:
            TensorFlow starts two threads for each member of each collective. These threads sleep
            for that time in any case, so that a training soon has more threads than the system
            allows.

        Raises:
          ValueError: merge_scope is not a whole number of 1 or more, or timeout_seconds is not a
            number of 0 or more.
        """
        self.merge_scope = check_whole_number("merge_scope", merge_scope)
        if not is_number(timeout_seconds) or not timeout_seconds >= 0:
            raise ValueError(
                f"timeout_seconds must be a number of seconds of 0 or more, got "
                f"{timeout_seconds!r}."
            )
        self.timeout_seconds = float(timeout_seconds)

    def check(self, mesh_impl: Any, groups: ProcessorGroups) -> None:
        """Raises an error if this strategy cannot sum over `groups` on this mesh.

        A SIMD mesh may have any devices, as it runs no collectives.

        Raises:
          TypeError: mesh_impl is not a mesh, or groups is not a `ProcessorGroups`.
          ValueError: the groups are not of this mesh, or two processors of a group on a placement
            mesh have the same device, or devices of two kinds.
        """
        super().check(mesh_impl, groups)
        if not is_simd(mesh_impl):
            _check_devices(mesh_impl, groups)

    def wire_dtype(self, mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
        if not is_simd(mesh_impl) and dtype in NARROW_FLOATS:
            return tf.float32
        return super().wire_dtype(mesh_impl, dtype, groups)

    def _planner(self, mesh_impl: Any) -> Planner:
        def by_number(sizes: Sequence[int], itemsize: int) -> Packs:
            del itemsize
            numbers, step = list(range(len(sizes))), self.merge_scope
            groups = [numbers[i : i + step] for i in range(0, len(numbers), step)]
            return packs_of_groups(groups, sizes)

        return plan_unpacked if is_simd(mesh_impl) else by_number

    def _group_sum(self, mesh_impl: Any) -> GroupSum:
        if is_simd(mesh_impl):
            warn_once(
                "collectives on SIMD",
                "CollectiveAllReduce: a SIMD mesh has no TensorFlow collectives; its own "
                "all-reduce is used instead.",
            )
            return add_n
        if tf.get_default_graph().building_function:
            warn_once(
                "collectives in functions",
                "CollectiveAllReduce: a session cannot run TensorFlow's collectives inside a "
                "function; sums on one device are used there instead.",
            )
            return add_n
        return self._sum_by_collective

    def _sum_by_collective(
        self, slices: Sequence[Any], devices: Sequence[str], root: int
    ) -> Sequence[Any]:
        """Returns the sum of a group's slices for each member, made by one collective.

        `slices[i]` is the slice of the i-th member, a tf tensor on `devices[i]`, and the i-th
        result is on the same device. `root` is the index of the device that waits until all members
        have the sum. If collectives do not support the dtype, the device of `root` adds the slices
        up in place of a collective.
        """
        dtype = slices[0].dtype.base_dtype
        wire = tf.float32 if dtype in NARROW_FLOATS else dtype
        if wire not in _DTYPES:
            return add_n(slices, devices, root)
        names = [full_name(device) for device in devices]
        group_key = zlib.crc32(",".join(sorted(names)).encode()) & 0x7FFFFFFF
        instance_key = next(_instance_keys)
        sent = []
        for x, device in zip(slices, devices):
            with tf.device(device):
                sent.append(tf.cast(x, wire))
        sums = []
        places = [place_of(device) for device in devices]
        before = _last_collectives()
        with tf.control_dependencies(
            list(dict.fromkeys(before[place] for place in places if place in before))
        ):
            for x, device in zip(sent, devices):
                with tf.device(device):
                    sums.append(
                        collective_sum(
                            x, len(devices), group_key, instance_key, self.timeout_seconds
                        )
                    )
        with tf.device(devices[root]):
            barrier = tf.group(*[x.op for x in sums])
        before.update(dict.fromkeys(places, barrier))
        results = []
        for x, device in zip(sums, devices):
            with tf.device(device), tf.control_dependencies([barrier]):
                results.append(tf.cast(tf.identity(x), dtype))
        return results


def _check_devices(mesh_impl: Any, groups: ProcessorGroups) -> None:
    for group in groups.groups:
        devices = [mesh_impl.devices[processor] for processor in group]
        if len({place_of(device) for device in devices}) < len(devices):
            raise ValueError(
                "CollectiveAllReduce needs a device of its own for each processor of a group: "
                f"collectives on one device would wait for each other. Got {devices}; on one "
                "host, make virtual devices with session_config(num_cpu_devices=...)."
            )
        if len({kind_of(device) for device in devices}) > 1:
            raise ValueError(
                "CollectiveAllReduce needs devices of one kind in each group, because TensorFlow's "
                f"collectives are of one kind; got {devices}. FusedAllReduce sums over all kinds."
            )


def _last_collectives() -> dict[Any, tf.Operation]:
    """Returns, for each device, the operation that its next collective has to wait for.

    The result is a dictionary, whose keys are devices as `place_of` returns them. The default graph
    has one such dictionary for each branch and loop; the result is that of the branch or loop that
    is being built. The caller stores the last operation of each new collective in it.
    """
    graph = tf.get_default_graph()
    # Kept on the graph, to be freed with it.
    if not hasattr(graph, "_mtf_gradsync_collectives"):
        graph._mtf_gradsync_collectives = {}
    return graph._mtf_gradsync_collectives.setdefault(control_flow_context(graph), {})
