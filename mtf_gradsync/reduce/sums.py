"""Sums slices over groups of processors, on placement meshes and on SIMD meshes.

Tensors are summed one by one, or in packs, each of which is summed as one tensor.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any, Callable, Iterator, List, Literal, NamedTuple, Sequence, cast

from mtf_gradsync._common import grouped
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import bfloat16_group_size
from mtf_gradsync._private.tensorflow import summed_together, write_to_new_memory
from mtf_gradsync.mesh.axes import ProcessorGroups, is_simd
from mtf_gradsync.mesh.devices import first_alike, slicewise


def check_values(values: Sequence[Any]) -> None:
    """Raises ValueError unless `values` are `LaidOutTensor`s of slices that can be summed.

    The slices of each value have to be dense tf tensors of a numeric dtype. All slices of a value
    must have one dtype and one shape, which is known.
    """
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
    """Returns `tf.add_n(inputs)`, marked so that it adds in the order of the inputs in each run.

    An `AddN` with this mark takes no longer than one without the mark.
    """
    return add_in_order(tf.add_n(list(inputs)))


def add_in_order(total: tf.Tensor) -> tf.Tensor:
    """Makes the operation of a tensor add its inputs in their order; returns the same tensor.

    Without a call of `add_in_order`, an AddN may add its inputs in another order in each run (see
    `docs/races.md`). If `total` was made by another operation than an AddN, nothing is changed.
    """
    # Two inputs give the same sum either way round.
    if total.op.type == "AddN" and len(total.op.inputs) > 2:
        write_to_new_memory(total.op)
    return total


def sum_on_one_device(
    slices: Sequence[tf.Tensor], device: str, accumulation_fn: Callable[[Any], Any] = tf.add_n
) -> tf.Tensor:
    """Returns the sum of slices, added up on one device in their order.

    `accumulation_fn` is the function that adds up the list of slices. It gets bfloat16 and float16
    slices as float32, and the sum is cast back to the dtype of the slices.
    """
    dtype = slices[0].dtype
    narrow = dtype in NARROW_FLOATS
    with tf.device(device):
        wide = [tf.cast(x, tf.float32) if narrow else x for x in slices]
        total = add_in_order(accumulation_fn(wide))
        return tf.cast(total, dtype) if narrow else total


def add_n(slices: Sequence[Any], devices: Sequence[str], root: int) -> list[Any]:
    """Returns the sum of a group's slices for each member, added up on one member's device.

    `slices[i]` is the slice of the i-th member, which is on `devices[i]`. `root` is the index of
    the device that adds up. The result lists the same tensor once for each member.
    """
    return [sum_on_one_device(slices, devices[root])] * len(slices)


def ring(slices: Sequence[Any], devices: Sequence[str], root: int) -> list[Any]:
    """Returns the sum of a group's slices for each member, made by Mesh-TF's ring.

    `slices[i]` is the slice of the i-th member. It is on `devices[i]`, and so is the i-th result.
    `root` is not used. bfloat16 and float16 are summed as float32.
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
    """Returns the dtype in which the algorithm `group_sum` sends values of `dtype`.

    The result is float32 if the algorithm is `ring` and `dtype` is bfloat16 or float16, and `dtype`
    itself otherwise.
    """
    return tf.float32 if group_sum is ring and dtype in NARROW_FLOATS else dtype


def check_algorithm(name: Any, argument: str = "algorithm") -> Algorithm:
    """Returns `name` unchanged; raises ValueError if it is not one of `ALGORITHMS`.

    If `name` is an algorithm of another package, such as "nccl", the error says what to use in its
    place. `argument` is the name of the caller's argument, for the error.
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
    """Returns the dtype in which Mesh-TF sends values of `dtype` over a SIMD mesh.

    Most dtypes are sent as float32: float64 values lose precision, and integers are exact up to
    2**24. But bfloat16 values are sent as bfloat16 if groups run along mesh axes and have at most 8
    processors. (This limit is an argument of `SimdMeshImpl`.)
    """
    if dtype != tf.bfloat16 or groups.mesh_axes is None:
        return tf.float32
    return tf.bfloat16 if groups.group_size <= bfloat16_group_size(mesh_impl) else tf.float32


def simd_all_reduce(
    mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups, one_group: bool = True
) -> list[Any]:
    """Sums values over groups on a SIMD mesh: one CrossReplicaSum for each, in `simd_wire_dtype`.

    `values` and the sums are `LaidOutTensor`s. If `one_group` is true, the sums are marked as one
    group of sums, which compilers combine. No value may then depend on the sum of another value.
    """

    def cross_replica_sum(x: tf.Tensor) -> tf.Tensor:
        wire = x if x.dtype == tf.float32 else tf.cast(x, tf.float32)
        return tf.cast(tf.tpu.cross_replica_sum(wire, physical), x.dtype)

    with summed_together() if one_group else contextlib.nullcontext():
        if groups.mesh_axes is not None:
            return [mesh_impl.allreduce(x, list(groups.mesh_axes), "SUM") for x in values]
        physical = physical_groups(mesh_impl, groups)
        return [mesh_impl.slicewise(cross_replica_sum, x) for x in values]


def placement_sum_fn(
    mesh_impl: Any, sum_group: Callable[[Any, list[int], int], Sequence[Any]]
) -> SumFn:
    """Returns a function (values, groups, turns) that sums values over groups on a placement mesh.

    The returned function is a `SumFn`: `values` are `LaidOutTensor`s, `groups` are the groups of
    processors that sum with each other, and `turns` has a whole number for each value. It calls
    `sum_group` for each value and group. The arguments of `sum_group` are the value, the processor
    numbers of the group's members, and a number: the value's number in `turns` plus the number of
    the group. By this number `sum_group` chooses the device that adds up, so that devices share the
    work. `sum_group` returns the sum for each member, as a list of tf tensors.
    """

    def sum_one(value: Any, groups: ProcessorGroups, turn: int) -> Any:
        def compute(number: int, group: list[int]) -> Sequence[Any]:
            return sum_group(value, group, turn + number)

        return map_groups(mesh_impl, value, groups, compute)

    return lambda values, groups, turns: [
        sum_one(x, groups, turn) for x, turn in zip(values, turns)
    ]


def map_groups(
    mesh_impl: Any,
    value: Any,
    groups: ProcessorGroups,
    compute: Callable[[int, list[int]], Sequence[Any]],
) -> Any:
    """Calls `compute` for each group; returns a `LaidOutTensor` of the slices that it returns.

    `compute` gets the group's number and its members (processor numbers), reads their slices of
    `value`, and returns a slice for each member. `compute` is called only once for groups whose
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
    """Returns groups as lists of physical core numbers, for the collectives of a SIMD mesh."""
    return [[mesh_impl.l2p(p) for p in group] for group in groups.groups]


def positions_in_groups(mesh_impl: Any, groups: ProcessorGroups) -> Any:
    """Returns each processor's position in its group as a `LaidOutTensor` of scalars.

    Positions are Python integers on a placement mesh, and int32 tensors on a SIMD mesh.
    """
    at = [0] * mesh_impl.size
    for group in groups.groups:
        for position, processor in enumerate(group):
            at[processor] = position
    if not is_simd(mesh_impl):
        return mesh_impl.LaidOutTensor(at)
    return mesh_impl.slicewise(lambda p: tf.gather(at, p), mesh_impl.laid_out_pnum())


def all_reduce_fn(mesh_impl: Any, group_sum: GroupSum = add_n, one_group: bool = True) -> SumFn:
    """Returns a function (values, groups, turns) that sums values over groups on a mesh.

    The returned function is a `SumFn`: `values` are `LaidOutTensor`s, `groups` are the groups of
    processors that sum with each other, and `turns` has a whole number for each value. On a
    placement mesh it sums each group by `group_sum`, on a device that the value's number in `turns`
    selects. On a SIMD mesh it sums by `simd_all_reduce`, and does not use `turns`. `one_group` says
    whether all sums of one call are then marked as one group of sums.
    """
    if is_simd(mesh_impl):
        return lambda values, groups, turns: simd_all_reduce(mesh_impl, values, groups, one_group)

    def sum_group(value: Any, group: list[int], turn: int) -> Sequence[Any]:
        devices = [mesh_impl.devices[p] for p in group]
        return group_sum([value.tensor_list[p] for p in group], devices, turn % len(group))

    return placement_sum_fn(mesh_impl, sum_group)


def check_divisible(values: Sequence[Any]) -> None:
    """Raises ValueError if one of `values` (`LaidOutTensor`s) is of an integer dtype.

    Integers have no mean.
    """
    for value in values:
        dtype = value.tensor_list[0].dtype
        if dtype.is_integer:
            raise ValueError(
                f"There is no mean of {dtype.name} values: got {value!r}. Cast it to a float, or "
                "take the sum."
            )


def divide(mesh_impl: Any, value: Any, number: int) -> Any:
    """Returns the `LaidOutTensor` `value`, divided by `number`.

    A slice that several processors share is divided once, and they share the quotient.
    """
    if is_simd(mesh_impl):
        return mesh_impl.slicewise(lambda x: x / tf.cast(number, x.dtype), value)
    divided: dict[str, tf.Tensor] = {}
    for x in value.tensor_list:
        if x.name not in divided:
            with tf.device(x.device):
                divided[x.name] = x / tf.cast(number, x.dtype)
    return mesh_impl.LaidOutTensor([divided[x.name] for x in value.tensor_list])


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
    """Returns a list for each bucket: the indices of the bucket's tensors.

    `num_bytes` has the size of each tensor. Each tensor joins the first bucket in which it fits
    without exceeding `bucket_bytes`. A tensor that is larger than `bucket_bytes` or `packed_bytes`
    is alone in its bucket. A `packed_bytes` of None sets no limit, and a `bucket_bytes` of 0 leaves
    each tensor alone.
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
    """Returns one pack for each group of tensors.

    A pack is a list of `Piece`s, which are ranges of tensors' elements. Each group is a list of
    tensors' indices, and the group's pack has all elements of these tensors. `sizes` has the number
    of elements of each tensor.
    """
    return [[Piece(i, 0, sizes[i]) for i in group] for group in groups]


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns one tensor that holds the elements of several tensors of one dtype.

    The tensors are stacked if they have one shape. Otherwise they are flattened and concatenated.
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


def plan_unpacked(sizes: Sequence[int], itemsize: int) -> Packs:
    """Returns a list of packs in which each tensor has its own pack.

    `sizes` has the number of elements of each tensor; `itemsize` is not used. The function is a
    `Planner`: it can be given to `packed_all_reduce`.
    """
    del itemsize
    return packs_of_groups([[i] for i in range(len(sizes))], sizes)


def packed_all_reduce(
    mesh_impl: Any,
    values: Sequence[Any],
    groups: ProcessorGroups,
    sum_fn: SumFn,
    planner: Planner = plan_unpacked,
    turns: Iterator[int] | None = None,
) -> list[Any]:
    """Returns the sums of values over groups, made in packs of tensors of one dtype.

    Tensors without elements are returned as they are, and so are all values if groups have one
    processor.

    Args:
      mesh_impl: the mesh.
      values: `LaidOutTensor`s of any shapes and dtypes.
      groups: the groups of processors that sum with each other.
      sum_fn: the function that sums; one call gets all packs, as `LaidOutTensor`s.
      planner: the function that chooses the packs; it is called once for each dtype.
      turns: an iterator that yields whole numbers, one for each pack. By this number `sum_fn`
        chooses the device that adds up the pack, so that devices share the work. None counts from
        0. If several calls get the same iterator, they go on counting.
    """
    values = list(values)
    check_values(values)
    if groups.group_size == 1:
        return values
    turns = turns or itertools.count()
    # Collectives refuse empty tensors.
    sent = [i for i, value in enumerate(values) if mtf.list_product(value.slice_shape) > 0]
    by_dtype = grouped(sent, [values[i].tensor_list[0].dtype.base_dtype for i in sent])
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
    """Returns the sums of values over groups of processors, one `LaidOutTensor` for each value.

    Args:
      mesh_impl: the mesh.
      values: `LaidOutTensor`s.
      packs: lists of `Piece`s, which are ranges of the values' elements. The pieces of a pack are
        summed as one tensor. A value that is in no pack is returned as it is.
      groups: the groups of processors that sum with each other.
      sum_fn: the function that sums; it is called once, with all packs.
      turns: an iterator that yields whole numbers, one for each pack. By this number `sum_fn`
        chooses the device that adds up the pack, so that devices share the work.
    """
    all_pieces = [piece for pack in packs for piece in pack]
    pieces = grouped(all_pieces, [piece.tensor for piece in all_pieces])
    parts: dict[Piece, Any] = {}
    for index, some in pieces.items():
        parts.update(zip(some, _cut(mesh_impl, values[index], some)))
    packed = [_pack(mesh_impl, [parts[p] for p in pack]) for pack in packs]
    for pack, total in zip(packs, sum_fn(packed, groups, [next(turns) for _ in packs])):
        shapes = [parts[p].slice_shape for p in pack]
        several = len(shapes) > 1
        fn = functools.partial(unpack, shapes=shapes)
        own = _map_sums(mesh_impl, fn, [total], len(shapes)) if several else [total]
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

    return _map_sums(mesh_impl, join, parts, 1)[0]


def _map_sums(
    mesh_impl: Any,
    fn: Callable[..., tuple[tf.Tensor, ...]],
    sums: Sequence[Any],
    num_results: int,
) -> Sequence[Any]:
    """Calls `fn` with each processor's slices of `sums`; returns `LaidOutTensor`s of the results.

    `fn` returns a tuple of `num_results` tensors, and does no arithmetic: it unpacks a pack, for
    example. If the sums are small, `fn` is called for each processor. If they are large, it is
    called once for all processors that hold the same slices, which share the results.
    """
    itemsize = sums[0].tensor_list[0].dtype.size
    num_bytes = itemsize * sum(mtf.list_product(x.slice_shape) for x in sums)
    if is_simd(mesh_impl) or num_bytes < MESSAGE_BYTES * num_results:
        return mesh_impl.slicewise(fn, *sums)
    results = slicewise(mesh_impl, fn, [x.tensor_list for x in sums])
    return [mesh_impl.LaidOutTensor(list(slices)) for slices in zip(*results)]
