"""All-reduces in two levels: within fast groups, then between them."""

from __future__ import annotations

import functools
import itertools
from typing import Any, Callable, List, Literal, NamedTuple, Sequence, Tuple, Union

from mtf_gradsync._common import (
    INT32_MAX,
    check_whole_number,
    elements,
    grouped,
    is_whole_number,
    warn_once,
)
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.patches import late_configurable
from mtf_gradsync.mesh.axes import ProcessorGroups, axis_number, is_simd
from mtf_gradsync.mesh.devices import process_of
from mtf_gradsync.reduce.one_level import Packer, split_pack, warn_algorithm_on_simd
from mtf_gradsync.reduce.strategy import Strategy
from mtf_gradsync.reduce.sums import (
    ALGORITHMS,
    GroupSum,
    Packs,
    SumFn,
    all_reduce_fn,
    check_algorithm,
    check_values,
    group_sum_dtype,
    packed_all_reduce,
    placement_sum_fn,
    positions_in_groups,
    simd_all_reduce,
    simd_wire_dtype,
)

Axis = Union[int, str]  # a mesh axis by name or number


def check_outer_axes(outer_axes: Any) -> tuple[Axis, ...] | None:
    """Returns outer axes (mesh axes with slow links) as a tuple of names and numbers.

    `outer_axes` is a list or tuple of names and numbers of mesh axes, or a string of names,
    separated by commas. For None, which asks for the default, the result is None. Raises ValueError
    for anything else.
    """
    if outer_axes is None:
        return None
    if isinstance(outer_axes, str):
        outer_axes = [name.strip() for name in outer_axes.split(",") if name.strip()]
    axes = elements(outer_axes)
    if axes is None or not all(isinstance(a, str) or is_whole_number(a, -INT32_MAX) for a in axes):
        raise ValueError(
            f"outer_axes must be names or numbers of mesh axes, such as ('rows',), or None for a "
            f"default, got {outer_axes!r}."
        )
    return tuple(axes)


def outer_axis_numbers(shape: mtf.Shape, outer_axes: Sequence[Axis]) -> list[int]:
    """Returns the number of each mesh axis in `outer_axes`, which are names or numbers.

    `shape` is the mesh's shape. Raises ValueError if an axis is not on the mesh.
    """
    return [axis_number(shape, axis, "outer_axes") for axis in outer_axes]


def inner_groups(
    mesh_impl: Any, group: Sequence[int], outer_axes: Sequence[Axis] | None
) -> list[list[int]]:
    """Splits a group of processor numbers into inner groups, whose members have fast links.

    Members of an inner group have the same coordinates along `outer_axes`. If `outer_axes` is None,
    a group on a mesh over several processes is split by process. On other meshes a group is split
    by the coordinate along the first mesh axis over which the group extends, as Mesh-TF's first
    axes have the slowest links. If the group extends over a single axis, it stays one inner group.
    Each inner group keeps the order of `group`.
    """
    key = _inner_group_key(mesh_impl, group, outer_axes)
    return list(grouped(group, [key(processor) for processor in group]).values())


def level_groups(
    mesh_impl: Any, groups: ProcessorGroups, outer_axes: Sequence[Axis] | None
) -> list[ProcessorGroups]:
    """Returns the inner groups and the outer groups of a sum in two levels on a SIMD mesh.

    Each group is split into inner groups, whose members have fast links, by `inner_groups`.
    `outer_axes` are the mesh axes with slow links; None lets `inner_groups` find slow links. The
    first members of all inner groups of a group make one outer group. The second members make
    another outer group, and so on. The result is `groups` alone, for a sum in one level, if one of
    the levels has nothing to sum, or, with a warning, if inner groups differ in size.
    """
    split = [inner_groups(mesh_impl, group, outer_axes) for group in groups.groups]
    if len({len(inner) for inners in split for inner in inners}) > 1:
        warn_once(
            "uneven levels on SIMD",
            "The groups %s have inner groups of different sizes, which a SIMD mesh cannot sum; "
            "they are summed in one level.",
            groups.groups,
        )
        return [groups]
    inner = [inner for inners in split for inner in inners]
    outer = [list(members) for inners in split for members in zip(*inners)]
    levels = [_as_processor_groups(mesh_impl, x, groups.mesh_axes) for x in (inner, outer)]
    return [groups] if any(level.group_size == 1 for level in levels) else levels


def _as_processor_groups(
    mesh_impl: Any, level: list[list[int]], axes: Sequence[int] | None
) -> ProcessorGroups:
    """Returns groups of processors as `ProcessorGroups`, with the mesh axes they run along.

    `level` has the groups of one level, as lists of processor numbers. If these are the groups of
    all processors that differ only along some of the mesh axes `axes` (numbers), the result names
    these mesh axes. Otherwise, or if `axes` is None, the result names no mesh axes.
    """
    if axes is not None:
        coordinates = [mtf.pnum_to_processor_coordinates(mesh_impl.shape, p) for p in level[0]]
        split_axes = [a for a in axes if len({c[a] for c in coordinates}) > 1]
        along = ProcessorGroups.along(mesh_impl, split_axes)
        if sorted(map(sorted, along.groups)) == sorted(map(sorted, level)):
            return along
    return ProcessorGroups(level)


def _inner_group_key(
    mesh_impl: Any, group: Sequence[int], outer_axes: Sequence[Axis] | None
) -> Callable[[int], Any]:
    """Returns a function from a processor of `group` to a key that identifies its inner group.

    Two processors are in one inner group exactly if their keys, which are hashable, are equal.
    `group` has the processor numbers of a group. `outer_axes` are mesh axes with slow links, by
    name or number; the keys are the coordinates along these axes. If `outer_axes` is None, the key
    of a processor is its process on a mesh over several processes. On other meshes it is the
    coordinate along the first mesh axis over which the group extends; if that is the only such
    axis, all keys are equal.
    """
    shape = mesh_impl.shape

    def coordinates(processor: int) -> list[int]:
        return mtf.pnum_to_processor_coordinates(shape, processor)

    if outer_axes is not None:
        outer = outer_axis_numbers(shape, outer_axes)
        return lambda processor: tuple(coordinates(processor)[a] for a in outer)
    devices = getattr(mesh_impl, "devices", None)
    if devices is not None and len({process_of(device) for device in devices}) > 1:
        return lambda processor: process_of(devices[processor])
    varying = [a for a in range(shape.ndims) if len({coordinates(p)[a] for p in group}) > 1]
    if len(varying) < 2:
        return lambda processor: ()
    return lambda processor: coordinates(processor)[varying[0]]


def placement_two_levels(
    mesh_impl: Any, inner_sum: GroupSum, outer_sum: GroupSum, outer_axes: Sequence[Axis] | None
) -> SumFn:
    """Returns a function (values, groups, turns) that sums in two levels on a placement mesh.

    The returned function is a `SumFn`: `values` are `LaidOutTensor`s, `groups` are the groups of
    processors that sum with each other, and `turns` has a whole number for each value. It sums
    within each inner group by `inner_sum`, and adds up these sums over the inner groups by
    `outer_sum`. Only one member of each inner group takes part in the outer sum; the value's number
    in `turns` selects this member. All other members read the outer sum from it.

    `outer_axes` are mesh axes with slow links: members of an inner group differ along none of them.
    If `outer_axes` is None, `inner_groups` finds the slow links.
    """

    def sum_group(value: Any, group: list[int], turn: int) -> list[Any]:
        inners = inner_groups(mesh_impl, group, outer_axes)
        roots = [turn % len(inner) for inner in inners]
        sums = []
        for inner, root in zip(inners, roots):
            members = [value.tensor_list[p] for p in inner]
            devices = [mesh_impl.devices[p] for p in inner]
            sums.append(members if len(inner) == 1 else inner_sum(members, devices, root))
        if len(inners) > 1:
            partial = [s[root] for s, root in zip(sums, roots)]
            devices = [mesh_impl.devices[inner[root]] for inner, root in zip(inners, roots)]
            totals = outer_sum(partial, devices, turn % len(inners))
            sums = []
            for total, device, inner in zip(totals, devices, inners):
                if len(inner) > 1:
                    # All members of the inner group read this copy: one message on the slow link.
                    with tf.device(device):
                        total = tf.identity(total)
                sums.append([total] * len(inner))
        total_of = {p: x for inner, xs in zip(inners, sums) for p, x in zip(inner, xs)}
        return [total_of[p] for p in group]

    return placement_sum_fn(mesh_impl, sum_group)


def simd_two_levels(
    mesh_impl: Any, outer_axes: Sequence[Axis] | None, scatter: bool, one_group: bool
) -> SumFn:
    """Returns a function (values, groups, turns) that sums in two levels on a SIMD mesh.

    The returned function is a `SumFn`: `values` are `LaidOutTensor`s, and `groups` are the groups
    of processors that sum with each other; `turns` is not used. It sums along the inner axes and
    then along the outer ones. All values are summed at one level before the next level begins.

    Args:
      mesh_impl: the SIMD mesh.
      outer_axes: names or numbers of mesh axes with slow links; None for the default of
        `inner_groups`.
      scatter: whether each core sums only its part of a tensor over the outer axes. If so, a third
        sum, along the inner axes, puts the parts together. Tensors with fewer elements than an
        inner group has cores are summed whole.
      one_group: whether the sums of a level are marked as one group of sums, which the compiler
        combines.
    """

    def sum_fn(values: Sequence[Any], groups: ProcessorGroups, turns: Sequence[int]) -> list[Any]:
        del turns
        levels = level_groups(mesh_impl, groups, outer_axes)
        if len(levels) == 1:
            return simd_all_reduce(mesh_impl, values, groups, one_group)
        inner, outer = levels
        sums = simd_all_reduce(mesh_impl, values, inner, one_group)
        shapes = [x.slice_shape for x in sums]
        cut = [
            i
            for i, shape in enumerate(shapes)
            if scatter and mtf.list_product(shape) >= inner.group_size
        ]
        at = positions_in_groups(mesh_impl, inner) if cut else None
        for i in cut:
            sums[i] = _take_part_of_core(mesh_impl, sums[i], inner.group_size, at)
        sums = simd_all_reduce(mesh_impl, sums, outer, one_group)
        placed = [_put_among_zeros(mesh_impl, sums[i], inner.group_size, at) for i in cut]
        for i, x in zip(cut, simd_all_reduce(mesh_impl, placed, inner, one_group)):
            sums[i] = _joined(mesh_impl, x, shapes[i])
        return sums

    return sum_fn


def _take_part_of_core(mesh_impl: Any, value: Any, parts: int, at: Any) -> Any:
    """Returns each core's part of a value, as a vector.

    The value's elements are split into `parts` parts of equal length, the last one padded with
    zeros. A core takes the part whose number is the core's position in its group. `at` holds this
    position, an int32 scalar. `value`, `at` and the result are `LaidOutTensor`s.
    """
    size = mtf.list_product(value.slice_shape)
    part = -(-size // parts)

    def take(x: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
        padded = tf.pad(tf.reshape(x, [-1]), [[0, part * parts - size]])
        return tf.slice(padded, [position * part], [part])

    return mesh_impl.slicewise(take, value, at)


def _put_among_zeros(mesh_impl: Any, value: Any, parts: int, at: Any) -> Any:
    """Returns a matrix on each core: one of its `parts` rows is the core's part, all others are 0.

    `value` is the core's part, a vector. `at` is the core's position in its group, which is also
    the number of the row. The sum of the matrices over the group has all parts as its rows.
    `value`, `at` and the result are `LaidOutTensor`s.
    """

    def put(x: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
        # tf.where and not a product, as an infinity times zero would be NaN in the other parts.
        here = tf.expand_dims(tf.equal(tf.range(parts), position), 1)
        return tf.where_v2(here, tf.expand_dims(x, 0), tf.zeros([parts, *x.shape], x.dtype))

    return mesh_impl.slicewise(put, value, at)


def _joined(mesh_impl: Any, value: Any, shape: Sequence[int]) -> Any:
    size = mtf.list_product(shape)
    return mesh_impl.slicewise(
        lambda x: tf.reshape(tf.slice(tf.reshape(x, [-1]), [0], [size]), shape), value
    )


#: One algorithm for whole groups, or two: for inner groups, and then over them.
Levels = Literal["add_n", "ring", "add_n/add_n", "add_n/ring", "ring/add_n", "ring/ring"]


class AllReduceSpec(NamedTuple):
    """The algorithm that sums tensors of a range of sizes.

    Attributes:
      algorithm: "a" sums a whole group by algorithm a. "a/b" sums within inner groups by a, and
        then over the inner groups by b. Algorithms are "add_n" and "ring".
      shards: the number of parts that a tensor (or pack of tensors) is cut into, which different
        devices sum at the same time.
      limit: the size of the largest tensors in the range, in bytes per processor; -1 or None if
        there is no limit.
    """

    algorithm: Levels
    shards: int = 1
    limit: int | None = -1


_Entry = Union[
    Levels,
    AllReduceSpec,
    Tuple[Levels],
    Tuple[Levels, int],
    Tuple[Levels, int, Union[int, None]],
]
#: The types of `HierarchicalAllReduce`'s spec.
Spec = Union[_Entry, List[_Entry]]


@late_configurable(module="mtf_gradsync")
class HierarchicalAllReduce(Strategy):
    """A strategy of two levels: within inner groups, then over the slow links between them.

    If the mesh's devices are in several processes, the processors of each process are an inner
    group. Otherwise, the processors that differ only along mesh axes with fast links are an inner
    group (see `outer_axes`). On a placement mesh only one member of each inner group sends and
    receives over the slow links; all other members read the sum from this member.

    A SIMD mesh has only the algorithm of its compiler, and all cores take part in the outer sum.
    All tensors of a range of sizes are summed at one level before the next level begins. The sums
    of a level are one group of sums (see `FusedAllReduce`), unless packs are asked for. With
    shards > 1 each core of an inner group sums only a part of the tensor over the outer axes, and
    another sum along the inner axes puts the parts together. That saves time if the outer axes are
    slower than the inner ones. The number of parts is the number of cores in an inner group, for
    any value of shards above 1.

    On a placement mesh bfloat16 and float16 are summed in float32 on each level, and the sum of
    each level is rounded.

    References:
      TensorFlow 1's `MultiWorkerAllReduce`, for the form of the specification.

    Examples:
      >>> reducer = gs.reduce.HierarchicalAllReduce(outer_axes="islands")
      >>> opt = gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.1), reducer=reducer)
      >>> print(gs.describe(opt))
      every step  reduce over the replica axes: by HierarchicalAllReduce  (CrossShardOptimizer)
                  update by Sgd
    """

    def __init__(
        self,
        spec: Spec = "add_n/add_n",
        num_packs: int = 0,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
        outer_axes: Axis | Sequence[Axis] | None = None,
    ):
        """Sets the algorithm of each level, how tensors are packed, and which links are slow.

        Args:
          spec: a list of `AllReduceSpec`s or of tuples (algorithm, shards, limit). Limits rise from
            entry to entry, and the last one is -1 (no limit); a tensor is summed by the first entry
            whose limit it does not exceed. A single tuple, or the name of an algorithm, stands for
            a list of one entry. Shards default to 1 and limits to -1. For example,
            [("ring", 1, 1024), ("add_n/add_n", 2, -1)] sums tensors of up to 1 KiB by Mesh-TF's
            ring. Larger tensors are cut in halves, and summed in two levels.
          num_packs: the number of equal packs that the tensors of an entry, laid end to end, are
            split into. 0 packs only small tensors.
          agg_small_grads_max_bytes: used if num_packs is 0: the size of the largest tensor that is
            packed with others of its entry, in bytes per processor.
          agg_small_grads_max_group: the largest number of tensors in a pack of small tensors; 0
            packs none.
          outer_axes: mesh axes with slow links, by name or number, or names separated by commas.
            None takes the boundaries between processes if there are any, else the first mesh axis
            that a sum over several axes runs along.

        Raises:
          ValueError: spec has none of these forms, or a number is negative or not whole.
        """
        self.spec = check_spec(spec)
        self.packer = Packer(num_packs, agg_small_grads_max_bytes, agg_small_grads_max_group)
        self.outer_axes = check_outer_axes(outer_axes)

    def all_reduce(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> list[Any]:
        """Sums each tensor over each group, level by level; all members of a group get the sum.

        `values` are `LaidOutTensor`s, and so are the sums. `groups` are the groups of processors
        that sum with each other.

        Raises:
          ValueError: an outer axis is not on the mesh.
        """
        self.check(mesh_impl, groups)
        check_values(values)
        results = list(values)
        left = list(range(len(results)))
        turns = itertools.count()
        for entry in self.spec:
            sizes = {
                i: mtf.list_product(values[i].slice_shape) * values[i].tensor_list[0].dtype.size
                for i in left
            }
            in_range = [i for i in left if entry.limit in (None, -1) or sizes[i] <= entry.limit]
            left = [i for i in left if i not in in_range]
            if in_range:
                summed = packed_all_reduce(
                    mesh_impl,
                    [values[i] for i in in_range],
                    groups,
                    self._sum_fn(mesh_impl, entry),
                    functools.partial(self._plan, shards=1 if is_simd(mesh_impl) else entry.shards),
                    turns,
                )
                for index, value in zip(in_range, summed):
                    results[index] = value
        return results

    def check(self, mesh_impl: Any, groups: ProcessorGroups) -> None:
        super().check(mesh_impl, groups)
        outer_axis_numbers(mesh_impl.shape, self.outer_axes or ())

    def wire_dtype(self, mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
        dtypes = []
        for entry in self.spec:
            names = entry.algorithm.split("/")
            if not is_simd(mesh_impl):
                dtypes += [group_sum_dtype(ALGORITHMS[name], dtype) for name in names]
                continue
            levels = [groups]
            if len(names) == 2:
                levels = level_groups(mesh_impl, groups, self.outer_axes)
            dtypes += [simd_wire_dtype(mesh_impl, dtype, level) for level in levels]
        return min(dtypes, key=lambda d: d.size)

    def _sum_fn(self, mesh_impl: Any, entry: AllReduceSpec) -> SumFn:
        names = entry.algorithm.split("/")
        if is_simd(mesh_impl):
            one_group = not self.packer.packs_tensors
            for name in names:
                if name != "add_n":
                    warn_algorithm_on_simd(name)
            if len(names) == 1:
                return all_reduce_fn(mesh_impl, one_group=one_group)
            scatter = entry.shards > 1
            return simd_two_levels(mesh_impl, self.outer_axes, scatter, one_group)
        algorithms = [ALGORITHMS[name] for name in names]
        if len(names) == 1:
            return all_reduce_fn(mesh_impl, algorithms[0])
        return placement_two_levels(mesh_impl, algorithms[0], algorithms[1], self.outer_axes)

    def _plan(self, sizes: Sequence[int], itemsize: int, shards: int) -> Packs:
        packs = self.packer(sizes, itemsize)
        return [part for pack in packs for part in split_pack(pack, shards)]


def check_spec(spec: Any) -> tuple[AllReduceSpec, ...]:
    """Returns the entries of `HierarchicalAllReduce`'s `spec`, one for each range of sizes.

    In the result each entry has all three fields. If an entry of `spec` lacks the number of shards,
    the number is 1. If it has no limit, or the limit None, the limit is -1. Raises ValueError if an
    entry is invalid, or if the limits do not rise from entry to entry and end with -1.
    """
    entries = spec if isinstance(spec, list) else [spec]
    if not entries:
        raise ValueError(f"spec must have an entry, such as ('add_n/add_n', 1, -1), got {spec!r}.")
    checked = tuple(_check_entry(entry) for entry in entries)
    limits = [-1 if entry.limit is None else entry.limit for entry in checked]
    rising = all(low < high for low, high in zip(limits[:-1], limits[1:-1]))
    if limits[-1] != -1 or -1 in limits[:-1] or not rising:
        raise ValueError(
            "The limits of spec must rise from entry to entry and end with -1 (no limit), got "
            f"{limits} in {spec!r}."
        )
    return checked


def _check_entry(entry: Any) -> AllReduceSpec:
    if isinstance(entry, str):
        entry = (entry,)
    if not isinstance(entry, tuple) or not 1 <= len(entry) <= 3:
        raise ValueError(
            "An entry of spec must be a tuple (algorithm, shards, limit) of one to three "
            f"elements, such as ('add_n/add_n', 2, -1), or the name of an algorithm, got {entry!r}."
        )
    entry = AllReduceSpec(*entry)
    names = entry.algorithm.split("/") if isinstance(entry.algorithm, str) else [entry.algorithm]
    if len(names) > 2:
        raise ValueError(
            f"An algorithm of spec has two levels at most, 'inner/outer', got {entry.algorithm!r}."
        )
    for name in names:
        check_algorithm(name, "An algorithm of spec")
    check_whole_number("shards in spec", entry.shards)
    if entry.limit is None or entry.limit == -1:
        return entry._replace(limit=-1)
    more = "-1 is no limit."
    check_whole_number("A limit in spec, in bytes,", entry.limit, 0, more, most=None)
    return entry
