"""Sums slices over groups of processors, on placement meshes and on SIMD meshes.

Tensors are summed one by one, or in packs, each of which is summed as one tensor. A plan lists the
packs.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
from typing import Any, Callable, Iterator, List, Literal, NamedTuple, Sequence, cast

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import bfloat16_group_size
from mtf_gradsync._private.tensorflow import summed_together, write_to_own_memory
from mtf_gradsync.mesh.axes import ProcessorGroups, is_simd
from mtf_gradsync.mesh.devices import first_alike, slicewise


def check_values(values: Sequence[Any]) -> None:
    """Raises ValueError unless the slices of a value are dense, numeric and of one known shape."""
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


# Values of these dtypes are added up in float32.
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
    """Returns a tensor unchanged; if it is an AddN, makes it add its inputs in their order.

    Otherwise an AddN may add in another order in each run (see `docs/races.md`).
    """
    # Two inputs give the same sum either way round.
    if total.op.type == "AddN" and len(total.op.inputs) > 2:
        write_to_own_memory(total.op)
    return total


def sum_on_one_device(
    slices: Sequence[tf.Tensor], device: str, accumulation_fn: Callable[[Any], Any] = tf.add_n
) -> tf.Tensor:
    """Returns the sum of slices, added up on one device in their order.

    bfloat16 and float16 are added up in float32.
    """
    dtype = slices[0].dtype
    narrow = dtype in NARROW_FLOATS
    with tf.device(device):
        wide = [tf.cast(x, tf.float32) if narrow else x for x in slices]
        total = add_in_order(accumulation_fn(wide))
        return tf.cast(total, dtype) if narrow else total


def add_n(slices: Sequence[Any], devices: Sequence[str], root: int) -> list[Any]:
    """Returns the sum of a group's slices for each member, added up on the member `root`.

    All members read the same tensor. The function is a `GroupSum`, as algorithms are.
    """
    return [sum_on_one_device(slices, devices[root])] * len(slices)


def ring(slices: Sequence[Any], devices: Sequence[str], root: int) -> list[Any]:
    """Returns the sum of a group's slices for each member, made by Mesh-TF's ring.

    bfloat16 and float16 are summed as float32. The function is a `GroupSum`, as algorithms are.
    """
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
    """Returns the dtype in which the algorithm `group_sum` sends values of `dtype`."""
    return tf.float32 if group_sum is ring and dtype in NARROW_FLOATS else dtype


def check_algorithm(name: Any, argument: str = "algorithm") -> Algorithm:
    """Returns `name` unchanged; raises ValueError if it is not one of `ALGORITHMS`.

    If other classes of this package have the algorithm, the error says which. `argument` is the
    name of the caller's argument, for the error.
    """
    if not isinstance(name, str) or name not in ALGORITHMS:
        hint = _ELSEWHERE.get(name) if isinstance(name, str) else None
        raise ValueError(
            f"{argument} must be one of {sorted(ALGORITHMS)}, got {name!r}"
            + (f"; {hint}." if hint else ".")
        )
    return cast("Algorithm", name)


#: Sums values over groups: (`LaidOutTensor`s, groups, turns) -> `LaidOutTensor`s. Each value has a
#: number (its turn) that selects the device which adds up, so that devices share the work.
SumFn = Callable[[Sequence[Any], ProcessorGroups, Sequence[int]], Sequence[Any]]


def simd_wire_dtype(mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
    """Returns the dtype in which Mesh-TF sends values over a SIMD mesh.

    It is float32 for most dtypes: float64 loses precision, and integers are exact up to 2**24.
    bfloat16 is sent as it is in groups, along mesh axes, of at most 8 processors (an argument of
    `SimdMeshImpl`).
    """
    if dtype != tf.bfloat16 or groups.mesh_axes is None:
        return tf.float32
    return tf.bfloat16 if groups.group_size <= bfloat16_group_size(mesh_impl) else tf.float32


def simd_all_reduce(
    mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups, one_group: bool = True
) -> list[Any]:
    """Sums values over groups on a SIMD mesh: one CrossReplicaSum for each, in `simd_wire_dtype`.

    With `one_group` these sums are marked as one group, which compilers combine. No value may then
    depend on the sum of another value.
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
    """Returns a function that sums values over groups on a placement mesh.

    `sum_group` sums one value over one group. It gets the value, the members of the group, and a
    number by which devices take turns; it returns a slice for each member.
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
    """Returns a `LaidOutTensor` of the slices that `compute` returns for the members of each group.

    `compute` gets the group's number and its members. It is called only once for groups whose
    slices of `value` are the same tensors in the same memories, as on a mesh that shares copies.
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
    """Returns groups as lists of physical core numbers, as collectives of a SIMD mesh take them."""
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
    """Returns the function that sums values over groups on a mesh.

    `group_sum` is the algorithm on a placement mesh. A SIMD mesh has one algorithm only, for which
    `one_group` is as for `simd_all_reduce`.
    """
    if is_simd(mesh_impl):
        return lambda values, groups, turns: simd_all_reduce(mesh_impl, values, groups, one_group)

    def sum_group(value: Any, group: list[int], turn: int) -> Sequence[Any]:
        devices = [mesh_impl.devices[p] for p in group]
        return group_sum([value.tensor_list[p] for p in group], devices, turn % len(group))

    return in_turns(mesh_impl, sum_group)


# Tensors that are summed as one.


class Piece(NamedTuple):
    """A range of a tensor's elements in row-major order: from `start` to `stop`, not included.

    `tensor` is the tensor's position in a list.
    """

    tensor: int
    start: int
    stop: int


#: A plan: the pieces of each pack. Each element of each tensor is in one pack, and the pieces of a
#: tensor are in order.
Packs = List[List[Piece]]
#: Makes a plan from the sizes of tensors in elements and the bytes of an element.
Planner = Callable[[Sequence[int], int], Packs]


def plan_buckets(
    num_bytes: Sequence[int], bucket_bytes: int, packed_bytes: int | None = None
) -> list[list[int]]:
    """Returns the indices of the tensors in each bucket of at most bucket_bytes.

    Each tensor joins the first bucket with room for it. A tensor that is larger than a bucket, or
    than packed_bytes, is alone in its bucket.
    """
    buckets: list[list[int]] = []
    rooms: list[int] = []
    for index, size in enumerate(num_bytes):
        fitting = None
        packed = bucket_bytes > 0 and (packed_bytes is None or size <= packed_bytes)
        if packed:
            fitting = next((i for i, room in enumerate(rooms) if size <= room), None)
        if fitting is None:
            buckets.append([index])
            # -1 is less room than any tensor needs, so that nothing joins a tensor that is alone.
            rooms.append(bucket_bytes - size if packed else -1)
        else:
            buckets[fitting].append(index)
            rooms[fitting] -= size
    return buckets


def packs_of_groups(groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> Packs:
    """Returns one pack for each group of tensors, given by index, with all of their elements.

    `sizes` has the number of elements of each tensor.
    """
    return [[Piece(i, 0, sizes[i]) for i in group] for group in groups]


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns one tensor that holds several of one dtype.

    They are stacked if they have one shape; otherwise they are flattened and concatenated.
    """
    if _one_shape([t.shape.as_list() for t in tensors]):
        return tf.stack(tensors)
    flat = tf.constant([-1])
    return tf.concat([t if t.shape.rank == 1 else tf.reshape(t, flat) for t in tensors], 0)


def unpack(packed: tf.Tensor, shapes: Sequence[Sequence[int]]) -> tuple[tf.Tensor, ...]:
    """Returns the tensors that `pack` put into `packed`; `shapes` are their shapes."""
    if _one_shape(shapes):
        return tuple(tf.unstack(packed, len(shapes)))
    pieces = tf.split(packed, [tf.TensorShape(shape).num_elements() for shape in shapes])
    # One constant for each shape, as many tensors share few shapes.
    constants = {tuple(s): tf.constant(list(s), tf.int32) for s in shapes if len(s) != 1}
    return tuple(
        piece if len(shape) == 1 else tf.reshape(piece, constants[tuple(shape)])
        for piece, shape in zip(pieces, shapes)
    )


def _one_shape(shapes: Sequence[Sequence[int]]) -> bool:
    return all(list(shape) == list(shapes[0]) for shape in shapes)


# If devices share a memory, each can unpack a sum, or one unpacks it and sends the tensors to all.
# Measured on CPU devices: a message costs as much as copying this many bytes.
MESSAGE_BYTES = 32 * 1024


def alone(sizes: Sequence[int], itemsize: int) -> Packs:
    """Returns a plan in which each tensor is alone in its pack; the function is a `Planner`."""
    del itemsize
    return packs_of_groups([[i] for i in range(len(sizes))], sizes)


def packed_all_reduce(
    mesh_impl: Any,
    values: Sequence[Any],
    groups: ProcessorGroups,
    sum_fn: SumFn,
    planner: Planner = alone,
    turns: Iterator[int] | None = None,
) -> list[Any]:
    """Sums values over groups, in packs of one dtype.

    `planner` chooses the packs, and one call of `sum_fn` sums all of them. `turns` gives each pack
    a number, by which packs are spread over the devices. Tensors without elements are returned as
    they are, and so are all values if groups have one processor.
    """
    values = list(values)
    check_values(values)
    if groups.group_size == 1:
        return values
    turns = turns or itertools.count()
    by_dtype: dict[tf.DType, list[int]] = collections.OrderedDict()
    for index, value in enumerate(values):
        # Collectives refuse empty tensors.
        if mtf.list_product(value.slice_shape) > 0:
            by_dtype.setdefault(value.tensor_list[0].dtype.base_dtype, []).append(index)
    packs: Packs = []
    for dtype, indices in by_dtype.items():
        # Neighbours of one shape are stacked, not flattened.
        indices.sort(key=lambda i: tuple(values[i].slice_shape))
        sizes = [mtf.list_product(values[i].slice_shape) for i in indices]
        packs += [
            [piece._replace(tensor=indices[piece.tensor]) for piece in pack]
            for pack in planner(sizes, dtype.size)
        ]
    return _sum_packs(mesh_impl, values, packs, groups, sum_fn, turns) if packs else values


def _sum_packs(
    mesh_impl: Any,
    values: Sequence[Any],
    packs: Packs,
    groups: ProcessorGroups,
    sum_fn: SumFn,
    turns: Iterator[int],
) -> list[Any]:
    """Sums values in the given packs; returns values that are in no pack as they are."""
    pieces: dict[int, list[Piece]] = collections.defaultdict(list)
    for piece in itertools.chain.from_iterable(packs):
        pieces[piece.tensor].append(piece)
    parts: dict[Piece, Any] = {}
    for index, some in pieces.items():
        parts.update(zip(some, _cut(mesh_impl, values[index], some)))
    packed = [_pack(mesh_impl, [parts[p] for p in pack]) for pack in packs]
    for pack, total in zip(packs, sum_fn(packed, groups, [next(turns) for _ in packs])):
        shapes = [parts[p].slice_shape for p in pack]
        several = len(shapes) > 1
        fn = functools.partial(unpack, shapes=shapes)
        own = _on_sums(mesh_impl, fn, [total], len(shapes)) if several else [total]
        parts.update(zip(pack, own))
    results = list(values)
    for index, some in pieces.items():
        shape = values[index].slice_shape
        results[index] = _join(mesh_impl, [parts[p] for p in some], shape)
    return results


def _pack(mesh_impl: Any, members: Sequence[Any]) -> Any:
    if len(members) == 1:
        return members[0]
    return mesh_impl.slicewise(lambda *slices: pack(slices), *members)


def _cut(mesh_impl: Any, value: Any, pieces: Sequence[Piece]) -> Sequence[Any]:
    if len(pieces) == 1:
        return [value]
    sizes = [piece.stop - piece.start for piece in pieces]
    return mesh_impl.slicewise(lambda x: tuple(tf.split(tf.reshape(x, [-1]), sizes)), value)


def _join(mesh_impl: Any, parts: Sequence[Any], shape: Sequence[int]) -> Any:
    if len(parts) == 1:
        return parts[0]

    def join(*flat: tf.Tensor) -> tuple[tf.Tensor]:
        return (tf.reshape(tf.concat(flat, 0), shape),)

    return _on_sums(mesh_impl, join, parts, 1)[0]


def _on_sums(
    mesh_impl: Any,
    fn: Callable[..., tuple[tf.Tensor, ...]],
    sums: Sequence[Any],
    num_results: int,
) -> Sequence[Any]:
    """Applies `fn`, which only copies slices, to sums; processors may share the results."""
    itemsize = sums[0].tensor_list[0].dtype.size
    num_bytes = itemsize * sum(mtf.list_product(x.slice_shape) for x in sums)
    if is_simd(mesh_impl) or num_bytes < MESSAGE_BYTES * num_results:
        return mesh_impl.slicewise(fn, *sums)
    results = slicewise(mesh_impl, fn, [x.tensor_list for x in sums])
    return [mesh_impl.LaidOutTensor(list(slices)) for slices in zip(*results)]
