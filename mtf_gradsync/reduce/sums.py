"""Algorithms that sum slices over groups of processors, for both kinds of mesh."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Literal, Sequence, cast

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import bfloat16_group_size
from mtf_gradsync._private.tensorflow import summed_together, write_to_own_memory
from mtf_gradsync.mesh.axes import ProcessorGroups, is_simd
from mtf_gradsync.mesh.devices import first_alike


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
    """Returns `tf.add_n` that always adds in the order of the inputs, at no extra cost."""
    return add_in_order(tf.add_n(list(inputs)))


def add_in_order(total: tf.Tensor) -> tf.Tensor:
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
        total = add_in_order(accumulation_fn(wide))
        return tf.cast(total, dtype) if narrow else total


def add_n(slices: Sequence[Any], devices: Sequence[str], root: int) -> list[Any]:
    """Adds up on one member, whose sum the others read; a `GroupSum`."""
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


#: Sums values over groups: (`LaidOutTensor`s, groups, turns) -> `LaidOutTensor`s. Each value has a
#: turn; different turns spread the work over the devices.
SumFn = Callable[[Sequence[Any], ProcessorGroups, Sequence[int]], Sequence[Any]]


def simd_wire_dtype(mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
    """Returns the dtype in which Mesh-TF sends values over a SIMD mesh: float32 for most.

    bfloat16 is sent as it is in groups of at most 8 processors (an argument of `SimdMeshImpl`)
    along mesh axes. As float32, float64 loses precision, and integers are exact up to 2**24.
    """
    if dtype != tf.bfloat16 or groups.mesh_axes is None:
        return tf.float32
    return tf.bfloat16 if groups.group_size <= bfloat16_group_size(mesh_impl) else tf.float32


def simd_all_reduce(
    mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups, one_group: bool = True
) -> list[Any]:
    """Sums each value over groups by a CrossReplicaSum of its own, in `simd_wire_dtype`.

    With `one_group` these sums are marked as one group, which compilers combine: none of the values
    may depend on the sum of another.
    """

    def cross_replica_sum(x: tf.Tensor) -> tf.Tensor:
        wire = x if x.dtype == tf.float32 else tf.cast(x, tf.float32)
        return tf.cast(tf.tpu.cross_replica_sum(wire, physical), x.dtype)

    with summed_together() if one_group else contextlib.nullcontext():
        if groups.mesh_axes is not None:
            return [mesh_impl.allreduce(x, list(groups.mesh_axes), "SUM") for x in values]
        physical = physical_groups(mesh_impl, groups)
        return [mesh_impl.slicewise(cross_replica_sum, x) for x in values]


def in_turns(mesh_impl: Any, sum_group: Callable[[Any, list[int], int], Sequence[Any]]) -> SumFn:
    """Returns a function that sums on a placement mesh, by a function that sums a group.

    `sum_group` gets a value, the members of a group and the group's turn, and returns the slices
    for the members.
    """

    def sum_one(value: Any, groups: ProcessorGroups, turn: int) -> Any:
        def compute(number: int, group: list[int]) -> Sequence[Any]:
            return sum_group(value, group, turn + number)

        return in_groups(mesh_impl, value, groups, compute)

    return lambda values, groups, turns: [
        sum_one(x, groups, turn) for x, turn in zip(values, turns)
    ]


def in_groups(
    mesh_impl: Any,
    value: Any,
    groups: ProcessorGroups,
    compute: Callable[[int, list[int]], Sequence[Any]],
) -> Any:
    """Gives the members of each group the slices that compute(the group's number, members) returns.

    Groups whose slices of `value` are the same tensors in the same memories, as on a mesh that
    shares copies, share the result.
    """
    result: list[Any] = [None] * mesh_impl.size
    first = first_alike(mesh_impl, value.tensor_list, groups.groups)
    for number, group in enumerate(groups.groups):
        if first[number] is group:
            slices = compute(number, group)
        else:
            slices = [result[twin] for twin in first[number]]
        for processor, one in zip(group, slices):
            result[processor] = one
    return mesh_impl.LaidOutTensor(result)


def physical_groups(mesh_impl: Any, groups: ProcessorGroups) -> list[list[int]]:
    """Returns groups as the physical cores of a SIMD mesh, which its collectives take."""
    return [[mesh_impl.l2p(p) for p in group] for group in groups.groups]


def positions(mesh_impl: Any, groups: ProcessorGroups) -> Any:
    """Returns each processor's position in its group, a `LaidOutTensor` of int32 scalars."""
    at = [0] * mesh_impl.size
    for group in groups.groups:
        for position, processor in enumerate(group):
            at[processor] = position
    if not is_simd(mesh_impl):
        return mesh_impl.LaidOutTensor(at)
    return mesh_impl.slicewise(lambda p: tf.gather(at, p), mesh_impl.laid_out_pnum())


def all_reduce_fn(mesh_impl: Any, group_sum: GroupSum = add_n, one_group: bool = True) -> SumFn:
    """Returns the function that sums on a mesh.

    A SIMD mesh has one algorithm only, and `one_group` is as for `simd_all_reduce`.
    """
    if is_simd(mesh_impl):
        return lambda values, groups, turns: simd_all_reduce(mesh_impl, values, groups, one_group)

    def sum_group(value: Any, group: list[int], turn: int) -> Sequence[Any]:
        devices = [mesh_impl.devices[p] for p in group]
        return group_sum([value.tensor_list[p] for p in group], devices, turn % len(group))

    return in_turns(mesh_impl, sum_group)
