"""All-reduce on one level: by sums of Mesh-TensorFlow, by parts, or by collectives."""

from __future__ import annotations

import itertools
import random
import zlib
from typing import Any, Callable, Iterator, Sequence

import gin

from mtf_gradsync._common import check_whole_number, is_number, warn_once
from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.tensorflow import collective_sum, control_flow_context
from mtf_gradsync.mesh.axes import is_simd
from mtf_gradsync.mesh.devices import canonical_device, full_name, kind_of, place_of
from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.reduce.packs import (
    Cuts,
    Packer,
    Packs,
    one_memory,
    packed_all_reduce,
    packs_of_groups,
    plan_buckets,
)
from mtf_gradsync.reduce.scatter_gather import SIMD_BUCKET_BYTES, reduce_scatter
from mtf_gradsync.reduce.strategy import Strategy
from mtf_gradsync.reduce.sums import (
    ALGORITHMS,
    NARROW_FLOATS,
    Algorithm,
    GroupSum,
    add_n,
    all_reduce_fn,
    check_algorithm,
    check_values,
    group_sum_dtype,
    ring,
    sum_on_one_device,
)


@gin.configurable(module="mtf_gradsync")
class AllReduce(Strategy):
    """All-reduces packs of tensors by one algorithm.

    On a placement mesh the algorithms are "add_n" (one device adds up a pack and the others read
    it; the devices take turns) and "ring" (Mesh-TF's). A SIMD mesh always uses the all-reduce of
    its compiler, with packs, or in one group without packs (see `FusedAllReduce`); a warning says
    so if an algorithm was given.

    One pack is TensorFlow 1's default, and the fastest where messages are slow. With "add_n" one
    device then does all the work: as many packs as processors spread it evenly.

    References:
      TensorFlow 1's `AllReduceCrossTowerOps`, whose arguments these are; its algorithms are for
      GPUs.
    """

    def __init__(
        self,
        algorithm: Algorithm | None = None,
        num_packs: int = 1,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
    ):
        """Sets the algorithm and the way to pack: the first one below that is not 0.

        Args:
          algorithm: "add_n" or "ring"; None takes the mesh's own on a SIMD mesh, "add_n" elsewhere.
          num_packs: the number of equal packs that all tensors, laid end to end, are split into;
            the last one takes the rest.
          agg_small_grads_max_bytes: the largest tensor, in bytes per processor, that is packed with
            others; larger ones are not packed.
          agg_small_grads_max_group: most tensors in such a pack; 0 packs none.

        Raises:
          ValueError: there is no such algorithm, or a number is negative or not whole.
        """
        self.algorithm = None if algorithm is None else check_algorithm(algorithm)
        self.packer = Packer(num_packs, agg_small_grads_max_bytes, agg_small_grads_max_group)

    def all_reduce(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> list[Any]:
        """See `Strategy.all_reduce`."""
        self.check(mesh_impl, groups)
        if self.algorithm is not None and is_simd(mesh_impl):
            warn_algorithm_on_simd(self.algorithm)
        sum_fn = all_reduce_fn(mesh_impl, self._group_sum, one_group=not self.packer.packs_tensors)
        return packed_all_reduce(mesh_impl, values, groups, sum_fn, self.packer)

    def wire_dtype(self, mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
        """See `Strategy.wire_dtype`."""
        if is_simd(mesh_impl):
            return super().wire_dtype(mesh_impl, dtype, groups)
        return group_sum_dtype(self._group_sum, dtype)

    @property
    def _group_sum(self) -> GroupSum:
        return add_n if self.algorithm is None else ALGORITHMS[self.algorithm]


def warn_algorithm_on_simd(algorithm: str) -> None:
    """Warns once that a SIMD mesh has no choice of algorithms."""
    warn_once(
        f"algorithm {algorithm} on SIMD",
        "algorithm=%r is for placement meshes; on a SIMD mesh the all-reduce of its compiler is "
        "used instead.",
        algorithm,
    )


@gin.configurable(module="mtf_gradsync")
class RingAllReduce(Strategy):
    """Sums each tensor as Mesh-TensorFlow does without this package.

    On a placement mesh that is a ring in which every device talks to two neighbours; no link and
    no device carries more than the others. On a SIMD mesh it is one CrossReplicaSum a tensor.
    Unlike Mesh-TF's own, the ring adds up bfloat16 and float16 in float32.
    """

    def all_reduce(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> list[Any]:
        """See `Strategy.all_reduce`."""
        self.check(mesh_impl, groups)
        return packed_all_reduce(mesh_impl, values, groups, all_reduce_fn(mesh_impl, ring))

    def wire_dtype(self, mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
        """See `Strategy.wire_dtype`."""
        if is_simd(mesh_impl):
            return super().wire_dtype(mesh_impl, dtype, groups)
        return group_sum_dtype(ring, dtype)


@gin.configurable(module="mtf_gradsync")
class ReductionToOneDevice(Strategy):
    """Adds up each tensor on one device, from which all others read the sum.

    On a SIMD mesh each tensor is summed by the mesh's all-reduce instead, with a warning.

    References:
      TensorFlow 1's `ReductionToOneDeviceCrossTowerOps`, whose arguments these are.
    """

    def __init__(
        self,
        reduce_to_device: str | None = None,
        accumulation_fn: Callable[[Sequence[tf.Tensor]], tf.Tensor] = tf.add_n,
    ):
        """Sets the device and the function that adds up.

        Args:
          reduce_to_device: one of the mesh's devices, such as "/device:GPU:0", which adds up for
            every group of processors. None lets the devices of a group take turns.
          accumulation_fn: adds up a list of tensors of one shape and dtype, bfloat16 and float16
            as float32. Its sums must be repeatable, as those of tf.add_n are if the function
            returns them directly.

        Raises:
          ValueError: reduce_to_device is not a device string.
          TypeError: accumulation_fn is not callable.
        """
        if reduce_to_device is not None:
            canonical_device(reduce_to_device, "reduce_to_device")
        if not callable(accumulation_fn):
            raise TypeError(
                f"accumulation_fn must be a function of a list of tensors, such as tf.add_n, got "
                f"{accumulation_fn!r}."
            )
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn

    def all_reduce(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> list[Any]:
        """See `Strategy.all_reduce`.

        Raises:
          ValueError: reduce_to_device is not on the mesh.
        """
        self.check(mesh_impl, groups)
        if is_simd(mesh_impl):
            warn_once(
                "one device on SIMD",
                "ReductionToOneDevice: a SIMD mesh runs one program on all cores and cannot sum "
                "on one of them; its own all-reduce is used instead.",
            )
            return packed_all_reduce(mesh_impl, values, groups, all_reduce_fn(mesh_impl))
        device = None if self.reduce_to_device is None else self._device_on(mesh_impl)

        def group_sum(slices: Sequence[Any], devices: Sequence[str], root: int) -> list[Any]:
            total = sum_on_one_device(slices, device or devices[root], self.accumulation_fn)
            return [total] * len(slices)

        return packed_all_reduce(mesh_impl, values, groups, all_reduce_fn(mesh_impl, group_sum))

    def check(self, mesh_impl: Any, groups: ProcessorGroups) -> None:
        """See `Strategy.check`."""
        super().check(mesh_impl, groups)
        if self.reduce_to_device is not None and not is_simd(mesh_impl):
            self._device_on(mesh_impl)

    def _device_on(self, mesh_impl: Any) -> str:
        assert self.reduce_to_device is not None  # checked by the callers
        wanted = place_of(self.reduce_to_device)
        for device in mesh_impl.devices:
            if device and place_of(device) == wanted:
                return device
        raise ValueError(
            f"reduce_to_device must be on the mesh, got {self.reduce_to_device!r}; the mesh has "
            f"the devices {list(mesh_impl.devices)}."
        )


# Measured by `python -m benchmarks.bucket_size` and `benchmarks.reductions`: between CPU devices of
# one process a sum sends no bytes but packing copies twice, so only tensors that cost less to copy
# than to launch are packed; a bucket has room for at least four.
PLACEMENT_BUCKET_BYTES = 64 * 1024
PLACEMENT_PACKED_BYTES = 16 * 1024


@gin.configurable(module="mtf_gradsync")
class FusedAllReduce(Strategy):
    """Reduces tensors together: in one group on SIMD meshes, in buckets on placement meshes.

    On a SIMD mesh each tensor has a CrossReplicaSum of its own, and those of one call are marked as
    one group. The compilers of TPUs and GPUs combine them without copies; for CPUs the package
    packs them when it compiles the program. With a size given, and on placement meshes, tensors of
    one dtype are packed into buckets: on a SIMD mesh each bucket is one CrossReplicaSum, on a
    placement mesh one device adds it up, the devices taking turns.
    """

    def __init__(self, bucket_bytes: int | None = None, packed_bytes: int | None = None):
        """Sets the size of buckets.

        Args:
          bucket_bytes: most bytes per processor in a bucket of several tensors; larger tensors are
            alone, and 0 packs nothing. None takes a default: measured on a placement mesh, 32 MiB
            on a SIMD mesh if packed_bytes is given; otherwise a SIMD mesh has no buckets but one
            group.
          packed_bytes: the largest tensor, in bytes per processor, that shares a bucket. None
            packs all that fit if bucket_bytes is given, else takes a measured default on a
            placement mesh.

        Raises:
          ValueError: a number is negative or not whole.
        """
        for argument, value in (("bucket_bytes", bucket_bytes), ("packed_bytes", packed_bytes)):
            if value is not None:
                check_whole_number(argument, value, 0, "None takes a default.", most=None)
        self.bucket_bytes = bucket_bytes
        self.packed_bytes = packed_bytes

    def all_reduce(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> list[Any]:
        """See `Strategy.all_reduce`."""
        self.check(mesh_impl, groups)
        bucket_bytes, packed_bytes = self.bucket_bytes, self.packed_bytes
        if is_simd(mesh_impl) and bucket_bytes is None and packed_bytes is None:
            return packed_all_reduce(mesh_impl, values, groups, all_reduce_fn(mesh_impl))
        if bucket_bytes is None:
            bucket_bytes = SIMD_BUCKET_BYTES if is_simd(mesh_impl) else PLACEMENT_BUCKET_BYTES
            if packed_bytes is None and not is_simd(mesh_impl):
                packed_bytes = PLACEMENT_PACKED_BYTES

        def buckets(sizes: Sequence[int], itemsize: int) -> Packs:
            num_bytes = [size * itemsize for size in sizes]
            return packs_of_groups(plan_buckets(num_bytes, bucket_bytes, packed_bytes), sizes)

        sum_fn = all_reduce_fn(mesh_impl, one_group=False)
        return packed_all_reduce(mesh_impl, values, groups, sum_fn, buckets)

    def reduce_scatter(
        self,
        mesh_impl: Any,
        values: Sequence[Any],
        groups: ProcessorGroups,
        cuts: Sequence[Cuts],
    ) -> list[Any]:
        """See `Strategy.reduce_scatter`.

        Where devices of a placement mesh have one memory, one device sums and cuts; otherwise each
        device adds up its own part, in buckets for which packed_bytes does not count.
        """
        self.check(mesh_impl, groups)
        check_values(values)
        if is_simd(mesh_impl) or one_memory(mesh_impl):
            return super().reduce_scatter(mesh_impl, values, groups, cuts)
        bucket_bytes = PLACEMENT_BUCKET_BYTES if self.bucket_bytes is None else self.bucket_bytes
        return reduce_scatter(mesh_impl, values, groups, cuts, bucket_bytes)


# The dtypes of TensorFlow's operation, read on 2.12 to 2.21; float16 and bfloat16 are sent as
# float32.
_DTYPES = (tf.float32, tf.float64, tf.int32, tf.int64)


def _instance_keys_of_a_client() -> Iterator[int]:
    """Gives instance keys that no other collective on the workers has, of any graph or client."""
    # A worker refuses another collective of a key, even after the client that used it has ended.
    # Random without a seed of the program's: two runs of it must not draw the same keys.
    return itertools.count(random.SystemRandom().randrange(1, 1 << 30))


_instance_keys = _instance_keys_of_a_client()


@gin.configurable(module="mtf_gradsync")
class CollectiveAllReduce(Strategy):
    """All-reduces on TensorFlow's collective operations: ring on CPUs, NCCL on GPUs that have it.

    The devices of all processors, in one or several processes, share the work equally. The
    processes of a cluster have to know their collective group leader: start each `tf.train.Server`
    with ``session_config(collective_group_leader=...)``. Without it they wait for each other for
    ever, without a message.

    Collectives that two devices start in different orders can wait for each other for ever. So all
    collectives of a graph (or of one branch, or loop, of it) run one after the other, in the order
    in which they were built, and a reader of a sum waits for all members. A session that fetches
    one sum therefore runs those built before it as well.

    The processes of a cluster remember each other: after a restart of one of them, or a failed
    collective, every later one fails with an error until all are restarted. Take another strategy
    for a run that has to survive the loss of a process.

    On SIMD meshes, and inside tf functions of a session (the update of
    `GradientAccumulationOptimizer` on one process), there are no collectives: sums are those of
    `FusedAllReduce`, unpacked, with a warning. So are those of dtypes that collectives do not
    have, without a warning.

    References:
      TensorFlow 1's `CollectiveAllReduce`, for `all_reduce_merge_scope`. There it only names
      groups of gradients for the runtime to merge if it can; here they are merged.
    """

    def __init__(self, merge_scope: int = 32, timeout_seconds: float = 0.0):
        """Sets the merging and the timeout.

        Args:
          merge_scope: most tensors of one dtype in one collective; 1 merges nothing.
          timeout_seconds: the seconds of waiting after which a collective fails with
            DeadlineExceededError; 0 waits for ever. Use it to find what hangs, not to train:
            TensorFlow starts two threads for each member of each collective, which sleep that long
            in any case, and a training soon has more of them than the system allows.

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

    def all_reduce(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> list[Any]:
        """See `Strategy.all_reduce`.

        Raises:
          ValueError: two processors of a group have the same device, or devices of two kinds.
        """
        self.check(mesh_impl, groups)
        if is_simd(mesh_impl):
            warn_once(
                "collectives on SIMD",
                "CollectiveAllReduce: a SIMD mesh has no TensorFlow collectives; its own "
                "all-reduce is used instead.",
            )
            return packed_all_reduce(mesh_impl, values, groups, all_reduce_fn(mesh_impl))
        check_values(values)
        sum_fn = all_reduce_fn(mesh_impl, self._group_sum)
        if tf.get_default_graph().building_function:
            warn_once(
                "collectives in functions",
                "CollectiveAllReduce: a session cannot run TensorFlow's collectives inside a "
                "function; sums on one device are used there instead.",
            )
            sum_fn = all_reduce_fn(mesh_impl)
        return packed_all_reduce(mesh_impl, values, groups, sum_fn, self._plan)

    def check(self, mesh_impl: Any, groups: ProcessorGroups) -> None:
        """See `Strategy.check`."""
        super().check(mesh_impl, groups)
        if not is_simd(mesh_impl):
            _check_devices(mesh_impl, groups)

    def wire_dtype(self, mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
        """See `Strategy.wire_dtype`."""
        if not is_simd(mesh_impl) and dtype in NARROW_FLOATS:
            return tf.float32
        return super().wire_dtype(mesh_impl, dtype, groups)

    def _plan(self, sizes: Sequence[int], itemsize: int) -> Packs:
        del itemsize
        numbers, step = list(range(len(sizes))), self.merge_scope
        return packs_of_groups([numbers[i : i + step] for i in range(0, len(numbers), step)], sizes)

    def _group_sum(self, slices: Sequence[Any], devices: Sequence[str], root: int) -> Sequence[Any]:
        """Sums by one collective; a `GroupSum`."""
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
                f"collectives are of one kind; got {devices}. FusedAllReduce sums over any."
            )


def _last_collectives() -> dict[Any, tf.Operation]:
    """Returns an operation after the last collective of each device, in this branch or loop."""
    graph = tf.get_default_graph()
    # Kept on the graph, to be freed with it.
    if not hasattr(graph, "_mtf_gradsync_collectives"):
        graph._mtf_gradsync_collectives = {}
    return graph._mtf_gradsync_collectives.setdefault(control_flow_context(graph), {})
