"""All-reduce in two levels."""

from __future__ import annotations

import functools
import itertools
from typing import Any, List, Literal, NamedTuple, Sequence, Tuple, Union

import gin

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.axes import is_simd
from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.reduce.checks import check_count, check_values
from mtf_gradsync.reduce.levels import (
    Axis,
    check_outer_axes,
    level_groups,
    outer_axis_numbers,
    placement_two_levels,
    simd_two_levels,
)
from mtf_gradsync.reduce.one_level import warn_algorithm_on_simd
from mtf_gradsync.reduce.packs import Packer, Packs, packed_all_reduce, split_pack
from mtf_gradsync.reduce.strategy import Strategy
from mtf_gradsync.reduce.sums import (
    ALGORITHMS,
    SumFn,
    all_reduce_fn,
    check_algorithm,
    group_sum_dtype,
    simd_wire_dtype,
)

#: One algorithm for whole groups, or two: for inner groups, and then over them.
Levels = Literal["add_n", "ring", "add_n/add_n", "add_n/ring", "ring/add_n", "ring/ring"]


class AllReduceSpec(NamedTuple):
    """The algorithm for tensors of a range of sizes.

    Attributes:
      algorithm: "a" sums a group at once by a; "a/b" sums inner groups by a and then over them by
        b. Algorithms are "add_n" and "ring".
      shards: the number of parts that a tensor (or pack of tensors) is cut into, which different
        devices sum at the same time.
      limit: the largest tensors of the range, in bytes per processor; -1 or None for no limit.
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


@gin.configurable(module="mtf_gradsync")
class HierarchicalAllReduce(Strategy):
    """Sums in two levels: within inner groups first, then over the slow links between them.

    An inner group is the processors of one process if the mesh's devices are in several processes,
    otherwise those that differ only along the inner mesh axes. On a placement mesh only one member
    of each inner group sends and receives over the slow links; the others read its sum.

    A SIMD mesh has one algorithm, and all its cores take part in the outer sum. All tensors of a
    range of sizes are summed at one level before the next begins; the sums of a level are one group
    (see `FusedAllReduce`), unless packs are asked for. With shards > 1
    each core of an inner group sums a part of the tensor over the outer axes; that takes another
    sum along the inner axes, and pays where the outer axes are slower. The number of parts is then
    that of the cores, whatever shards is.

    bfloat16 and float16 are summed in float32 on each level of a placement mesh, and rounded
    after each.

    References:
      TensorFlow 1's `MultiWorkerAllReduce`, for the form of the specification.
    """

    def __init__(
        self,
        spec: Spec = "add_n/add_n",
        num_packs: int = 0,
        agg_small_grads_max_bytes: int = 0,
        agg_small_grads_max_group: int = 10,
        outer_axes: Axis | Sequence[Axis] | None = None,
    ):
        """Sets the algorithms and the levels.

        Args:
          spec: a list of `AllReduceSpec`s or of tuples (algorithm, shards, limit) with rising
            limits, the last one unlimited: the first entry that a tensor fits applies. One tuple or
            the name of an algorithm stands for a list of one; shards default to 1 and limits to
            -1. [("ring", 1, 1024), ("add_n/add_n", 2, -1)] sums tensors of up to 1 KiB by
            Mesh-TF's ring and others in two levels, cut in halves.
          num_packs: as for `AllReduce`, within each range of sizes.
          agg_small_grads_max_bytes: as for `AllReduce`, within each range of sizes.
          agg_small_grads_max_group: as for `AllReduce`, within each range of sizes.
          outer_axes: mesh axes with slow links, by name or number, or names separated by commas.
            None takes the boundaries between processes if there are any, else the first mesh axis
            that a sum over several axes runs along.

        Raises:
          ValueError: spec is not such a list, or a number is negative or not whole.
        """
        self.spec = check_spec(spec)
        self.packer = Packer(num_packs, agg_small_grads_max_bytes, agg_small_grads_max_group)
        self.outer_axes = check_outer_axes(outer_axes)

    def all_reduce(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> list[Any]:
        """See `Strategy.all_reduce`.

        Raises:
          ValueError: an outer axis is not on the mesh.
        """
        self.check(mesh_impl, groups)
        check_values(values)
        results = list(values)
        left = list(range(len(results)))
        turns = itertools.count()
        for entry in self.spec:
            mine = [i for i in left if _fits(values[i], entry.limit)]
            left = [i for i in left if i not in mine]
            if mine:
                summed = packed_all_reduce(
                    mesh_impl,
                    [values[i] for i in mine],
                    groups,
                    self._sum_fn(mesh_impl, entry),
                    functools.partial(self._plan, shards=1 if is_simd(mesh_impl) else entry.shards),
                    turns,
                )
                for index, value in zip(mine, summed):
                    results[index] = value
        return results

    def check(self, mesh_impl: Any, groups: ProcessorGroups) -> None:
        """See `Strategy.check`."""
        super().check(mesh_impl, groups)
        outer_axis_numbers(mesh_impl.shape, self.outer_axes or ())

    def wire_dtype(self, mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
        """See `Strategy.wire_dtype`."""
        dtypes = []
        for entry in self.spec:
            names = entry.algorithm.split("/")
            if not is_simd(mesh_impl):
                dtypes += [group_sum_dtype(ALGORITHMS[name], dtype) for name in names]
                continue
            levels: tuple[ProcessorGroups, ...] | None = None
            if len(names) == 2:
                levels = level_groups(mesh_impl, groups, self.outer_axes)
            if levels is None or any(level.group_size == 1 for level in levels):
                levels = (groups,)
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
    """Returns the entries of a specification, with defaults; raises ValueError if it is invalid."""
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
    check_count("shards in spec", entry.shards, "a number of parts", least=1)
    if entry.limit is None or entry.limit == -1:
        return entry._replace(limit=-1)
    check_count("A limit in spec", entry.limit, "a number of bytes, or -1 for no limit")
    return entry


def _fits(value: Any, limit: int | None) -> bool:
    dtype = value.tensor_list[0].dtype
    return limit is None or limit == -1 or mtf.list_product(value.slice_shape) * dtype.size <= limit
