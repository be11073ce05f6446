"""The algorithms by which the devices of a placement mesh sum."""

from __future__ import annotations

from typing import Any, Callable, Literal, Sequence, cast

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import write_to_own_memory

# These are added up in float32.
NARROW_FLOATS = (tf.bfloat16, tf.float16)

#: Sums the slices of one group: (slices, their devices, root) -> the sum for each member. `root`
#: is the member that adds up, if only one does.
GroupSum = Callable[[Sequence[Any], Sequence[str], int], Sequence[Any]]

Algorithm = Literal["add_n", "ring"]

# Hints for names of algorithms in other packages.
_ELSEWHERE = {
    "nccl": "NCCL runs through TensorFlow's collective operations: use CollectiveAllReduce",
    "hierarchical_copy": "use HierarchicalAllReduce",
    "pscpu": "a sum on one device is 'add_n'",
    "psgpu": "a sum on one device is 'add_n'",
    "rechd": "use 'ring', or 'add_n' with several packs or shards",
    "xring": "the ring is 'ring'",
}


def ordered_add_n(inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    """Does what `tf.add_n` does, always in the order of the inputs, at no extra cost."""
    return in_order(tf.add_n(list(inputs)))


def in_order(total: tf.Tensor) -> tf.Tensor:
    """Makes an AddN add its inputs in their order (see `docs/races.md`); keeps other tensors."""
    # Two inputs give the same sum either way round.
    if total.op.type == "AddN" and len(total.op.inputs) > 2:
        write_to_own_memory(total.op)
    return total


def sum_on_one_device(
    slices: Sequence[tf.Tensor], device: str, accumulation_fn: Callable[[Any], Any] = tf.add_n
) -> tf.Tensor:
    """Adds up slices on one device, in their order; bfloat16 and float16 in float32."""
    dtype = slices[0].dtype
    narrow = dtype in NARROW_FLOATS
    with tf.device(device):
        wide = [tf.cast(x, tf.float32) if narrow else x for x in slices]
        total = in_order(accumulation_fn(wide))
        return tf.cast(total, dtype) if narrow else total


def add_n(slices: Sequence[Any], devices: Sequence[str], root: int) -> list[Any]:
    """Lets one member add up and the others read its sum; a `GroupSum`."""
    return [sum_on_one_device(slices, devices[root])] * len(slices)


def ring(slices: Sequence[Any], devices: Sequence[str], root: int) -> list[Any]:
    """Sums by Mesh-TF's ring, narrow floats as float32; a `GroupSum`."""
    del root  # every member adds
    dtype = slices[0].dtype
    devices = list(devices)
    if dtype not in NARROW_FLOATS:
        return mtf.placement_mesh_impl.allreduce_ring(list(slices), devices)
    wide = mtf.parallel(devices, lambda x: tf.cast(x, tf.float32), list(slices))
    sums = mtf.placement_mesh_impl.allreduce_ring(wide, devices)
    return mtf.parallel(devices, lambda x: tf.cast(x, dtype), list(sums))


#: The algorithms that sum a group on a placement mesh.
ALGORITHMS: dict[str, GroupSum] = {"add_n": add_n, "ring": ring}


def group_sum_dtype(group_sum: GroupSum, dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which an algorithm sends values of a dtype."""
    return tf.float32 if group_sum is ring and dtype in NARROW_FLOATS else dtype


def check_algorithm(name: Any, argument: str = "algorithm") -> Algorithm:
    """Returns name; raises ValueError if it is not one of `ALGORITHMS`.

    The error says what to take for an algorithm that other classes here have.
    """
    if not isinstance(name, str) or name not in ALGORITHMS:
        hint = _ELSEWHERE.get(name) if isinstance(name, str) else None
        raise ValueError(
            f"{argument} must be one of {sorted(ALGORITHMS)}, got {name!r}"
            + (f"; {hint}." if hint else ".")
        )
    return cast("Algorithm", name)
