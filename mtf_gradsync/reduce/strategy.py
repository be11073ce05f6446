"""The interface of reduction strategies, without and with state, and the default strategy."""

from __future__ import annotations

import abc
import math
from typing import Any, NamedTuple, Sequence

import gin

from mtf_gradsync._common import check_whole_number, grouped
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.axes import ProcessorGroups, check_groups, check_mesh, is_simd
from mtf_gradsync.mesh.devices import (
    broadcast_to_devices,
    check_destinations,
    check_value,
    copy_to_devices,
)
from mtf_gradsync.reduce.parts import (
    SIMD_BUCKET_BYTES,
    Cuts,
    reduce_scatter,
    share_one_memory,
    take_parts,
)
from mtf_gradsync.reduce.sums import (
    GroupSum,
    Packs,
    Planner,
    add_n,
    all_reduce_fn,
    check_divisible,
    check_values,
    divide,
    group_sum_dtype,
    packed_all_reduce,
    packs_of_groups,
    plan_buckets,
    plan_unpacked,
    simd_wire_dtype,
)


class GradientOfCores(NamedTuple):
    """The description of an unreduced gradient, of which each core has one term.

    Attributes:
      name: the name of the gradient's variable, a prefix for the names of a strategy's variables.
      shape: the shape of the gradient, `mtf.Shape`.
      shard_dims: a dimension for each mesh axis that the gradient is to be reduced over. The
        dimension has the axis's size, and the layout splits it over the axis. So a variable whose
        first dimensions are `shard_dims` has a value for each core. `shard_dims` is empty on a mesh
        of one shard whose layout has no axis for the batch.
      dtype: the dtype of the terms.
      slice_shape: the shape of a core's term. It is smaller than `shape` if the layout splits
        dimensions of the gradient.
    """

    name: str
    shape: mtf.Shape
    shard_dims: tuple[mtf.Dimension, ...]
    dtype: tf.DType
    slice_shape: tuple[int, ...]


class Compression(NamedTuple):
    """The bytes that a core sends for an optimizer's gradients if a strategy compresses them.

    Attributes:
      given: the size of the gradients in their own dtypes, in bytes.
      sent: the size, in bytes, of an all-reduce that would send as much as the strategy sends.
      whole: names of the gradients that the strategy does not compress, because they are too small,
        for example. They count in `given` and in `sent`.
    """

    given: int
    sent: int
    whole: tuple[str, ...] = ()


class StateMaker(abc.ABC):
    """A maker of variables for a strategy's state, for the gradients of one optimizer.

    Attributes:
      name: prefix for names of variables that belong to no single gradient.
    """

    name: str

    @abc.abstractmethod
    def variable(
        self,
        name: str,
        shape: mtf.Shape,
        dtype: tf.DType = tf.float32,
        shard_dims: Sequence[mtf.Dimension] = (),
        start: float = 0,
        begins_anew: bool = False,
    ) -> mtf.Variable:
        """Makes a variable that is not trained and is saved in checkpoints.

        Args:
          name: the full name, also in checkpoints: `<gradient's name>/<purpose>`, or
            `<name of this maker>/<purpose>`.
          shape: the shape without shard dims.
          dtype: the dtype.
          shard_dims: the shard dims of a gradient, for a variable with a value for each core. If a
            checkpoint is restored on another mesh, the sum of the values over the cores stays the
            same. Empty for a variable that all replicas share, for which each replica has to
            compute the same new value.
          start: the value in a new run, and after a checkpoint without the variable.
          begins_anew: what happens if a checkpoint has the variable in another shape, for example
            because it is from another mesh. If true, the variable is set to `start`; if false,
            restoring fails. It can be true only for variables without shard dims.

        Returns:
          The variable, of shape `[shard_dims...] + shape`.

        Raises:
          ValueError: the graph has a variable of that name already.
        """

    @abc.abstractmethod
    def report(self, compression: Compression) -> None:
        """Records how many bytes the strategy sends, for the log and for `mtf_gradsync.reported`.

        A strategy that compresses calls this method once for each optimizer, in `gradient_state`.
        `compression` has the numbers of bytes before and after the compression.
        """


#: A nested structure (NamedTuple, tuple, list or dict) of variables or Nones; while a graph is
#: lowered it holds `LaidOutTensor`s in place of variables.
State = Any


class Strategy(abc.ABC):
    """A method of summing tensors over groups of processors. Wrappers can share a strategy.

    A strategy with a special reduction for the gradients of an optimizer, or with variables for
    them, is a `GradientStrategy`.
    """

    @abc.abstractmethod
    def all_reduce(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> list[Any]:
        """Sums each tensor over each group of processors; all members of a group get the sum.

        Args:
          mesh_impl: an `mtf.MeshImpl`, placement or SIMD.
          values: `LaidOutTensor`s of any shapes and dtypes, with one slice for each processor
            (SIMD: one slice that stands for all).
          groups: the processors that sum with each other.

        Returns:
          `LaidOutTensor`s with the shapes and dtypes of `values`, in the same order.
        """

    def reduce_scatter(
        self,
        mesh_impl: Any,
        values: Sequence[Any],
        groups: ProcessorGroups,
        cuts: Sequence[Cuts],
    ) -> list[Any]:
        """Sums each tensor over each group, and gives each processor only its part of the sum.

        On a SIMD mesh all strategies that send the same dtypes use the same reduce-scatter. In
        other cases this base method all-reduces the tensors and takes each processor's part of the
        sums, with the same result.

        Args:
          mesh_impl: an `mtf.MeshImpl`, placement or SIMD.
          values: `LaidOutTensor`s of any shapes and dtypes, with one slice for each processor
            (SIMD: one slice that stands for all).
          groups: the processors that sum with each other, along mesh axes.
          cuts: for each value, the `Cut`s of its slices. A `Cut` has the number of an axis of the
            slices that is split into parts, and the number of the mesh axis over which it is split.
            This mesh axis is one of those along which the groups run.

        Returns:
          `LaidOutTensor`s of the dtypes of `values`, in the same order.
        """
        if is_simd(mesh_impl) and self._sends_as_simd_does(mesh_impl, values, groups):
            self.check(mesh_impl, groups)
            check_values(values)
            return reduce_scatter(mesh_impl, values, groups, cuts)
        sums = self.all_reduce(mesh_impl, values, groups)
        return [take_parts(mesh_impl, x, cut) for x, cut in zip(sums, cuts)]

    def _sends_as_simd_does(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> bool:
        dtypes = {x.tensor_list[0].dtype.base_dtype for x in values}
        return all(
            self.wire_dtype(mesh_impl, dtype, groups) == simd_wire_dtype(mesh_impl, dtype, groups)
            for dtype in dtypes
        )

    @property
    def has_gradient_reduction(self) -> bool:
        """Whether wrappers reduce gradients by `reduce_gradients`; if False, by `all_reduce`."""
        return False

    def gradient_state(self, gradients: Sequence[GradientOfCores], maker: StateMaker) -> State:
        """Makes the variables that this strategy keeps for gradients; called when a step is built.

        Args:
          gradients: gradients of one optimizer that are reduced over the same mesh axes.
          maker: the object that makes the variables.

        Returns:
          The strategy's `State`: a structure of the variables. It is empty in this base class,
          which makes no variables.
        """
        del gradients, maker
        return ()

    def reduce_gradients(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups, state: State
    ) -> tuple[list[Any], State]:
        """Reduces an optimizer's gradients; called if `has_gradient_reduction` is True.

        The new state is written when all gradients exist and all variables have been read, and only
        on steps that use the sums.

        Args:
          mesh_impl: an `mtf.MeshImpl`, placement or SIMD.
          values: each core's terms of the gradients that `gradient_state` was given, in order.
            Inside `CompressedAllReduce` these terms have a narrower dtype.
          groups: the processors that sum with each other, along mesh axes. On a mesh of one shard,
            each group has one processor.
          state: the structure that `gradient_state` returned, with `LaidOutTensor`s of each core's
            values, without shard dims, in place of variables.

        Returns:
          The sums, of the shapes and dtypes of values, the same on all processors of a group; and
          the new state, in the structure of the old one.
        """
        return self.all_reduce(mesh_impl, values, groups), state

    def check(self, mesh_impl: Any, groups: ProcessorGroups) -> None:
        """Raises an error, before anything is built, if this strategy cannot sum over groups.

        Args:
          mesh_impl: the mesh.
          groups: the processors that sum with each other.

        Raises:
          TypeError: mesh_impl is not a mesh, or groups is not a `ProcessorGroups`.
          ValueError: the groups are not of this mesh, or the strategy's settings do not fit it.
        """
        check_groups(mesh_impl, groups)

    def wire_dtype(self, mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
        """Returns the dtype in which values of a dtype are sent between processors.

        A strategy that sends values several times, in different dtypes, returns the narrowest one.

        Args:
          mesh_impl: the mesh.
          dtype: the dtype of the values.
          groups: the processors that sum with each other.

        Returns:
          The dtype of the messages.
        """
        return simd_wire_dtype(mesh_impl, dtype, groups) if is_simd(mesh_impl) else dtype

    def reduce(
        self,
        mesh_impl: Any,
        aggregation: Any,
        value: Any,
        destinations: Any,
        groups: ProcessorGroups | None = None,
    ) -> Any:
        """Sums or averages one value over processors and copies the result to destinations.

        Args:
          mesh_impl: an `mtf.MeshImpl`, placement or SIMD.
          aggregation: `tf.VariableAggregation.SUM` or `.MEAN`. A mean is the sum, divided once
            by the number of processors in a group.
          value: a `LaidOutTensor` with one slice for each processor.
          destinations: where the result is copied to. Any `LaidOutTensor` on the mesh stands for
            all processors, each of which gets the result of its group. Otherwise `destinations`
            names devices, which need not be on the mesh: a device string, a list of device strings,
            or a tf variable, which stands for its device.
          groups: the processors that are summed; None for all in one group. With devices as
            destinations there must be one group.

        Returns:
          A `LaidOutTensor` if destinations is one, else a dictionary from each device to the
          result on this device, in the order of destinations.

        Raises:
          TypeError: mesh_impl is not a mesh, or groups is not a `ProcessorGroups`.
          ValueError: another argument is not as described, or a value is not a dense numeric tensor
            of known shape.

        References:
          TensorFlow 1's `CrossTowerOps.reduce`.
        """
        pairs = [(value, destinations)]
        return self.batch_reduce(mesh_impl, aggregation, pairs, groups)[0]

    def batch_reduce(
        self,
        mesh_impl: Any,
        aggregation: Any,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        groups: ProcessorGroups | None = None,
    ) -> list[Any]:
        """Reduces several values together, each as `reduce` does.

        Args:
          mesh_impl: an `mtf.MeshImpl`.
          aggregation: `tf.VariableAggregation.SUM` or `.MEAN`. A mean is the sum, divided once
            by the number of processors in a group.
          value_destination_pairs: a list or tuple of tuples (value, destinations). Each value is a
            `LaidOutTensor`. Destinations are a `LaidOutTensor`, which stands for all processors, or
            name devices; they may differ between pairs.
          groups: the processors that are summed; None for all in one group.

        Returns:
          A list with the result of `reduce` for each pair.

        Raises:
          ValueError: an argument is not as described, or a value is not a dense numeric tensor of
            known shape.
        """
        check_mesh(mesh_impl)
        pairs = check_pairs(value_destination_pairs)
        if aggregation not in (tf.VariableAggregation.MEAN, tf.VariableAggregation.SUM):
            raise ValueError(
                "aggregation must be tf.VariableAggregation.SUM or tf.VariableAggregation.MEAN, "
                f"got {aggregation!r}."
            )
        is_mean = aggregation == tf.VariableAggregation.MEAN
        values = [check_value(mesh_impl, value) for value, _ in pairs]
        places = [check_destinations(mesh_impl, destinations) for _, destinations in pairs]
        check_values(values)
        if groups is None:
            groups = ProcessorGroups.along(mesh_impl, range(mesh_impl.shape.ndims))
        self.check(mesh_impl, groups)
        if len(groups.groups) > 1 and any(devices is not None for devices in places):
            raise ValueError(
                "destinations must be LaidOutTensors if there are several groups, each of which "
                f"has its own result; got devices for the groups {groups.groups}."
            )
        if is_mean:
            check_divisible(values)
        sums = self.all_reduce(mesh_impl, values, groups)
        if is_mean:
            sums = [divide(mesh_impl, x, groups.group_size) for x in sums]
        return [
            x if devices is None else copy_to_devices(mesh_impl, x, devices)
            for x, devices in zip(sums, places)
        ]

    def broadcast(self, mesh_impl: Any, tensor: tf.Tensor, destinations: Any) -> Any:
        """Copies one tensor to destinations.

        Args:
          mesh_impl: an `mtf.MeshImpl`.
          tensor: a dense tf tensor. In a SIMD program it is the same on all cores already.
          destinations: a `LaidOutTensor` on the mesh, which stands for all processors. Otherwise
            devices: a device string, a list of device strings, or a tf variable, which stands for
            its device.

        Returns:
          A `LaidOutTensor` if destinations is one, else a dictionary from each device to its copy.

        Raises:
          TypeError: mesh_impl is not a mesh.
          ValueError: tensor or destinations is not as described.
        """
        check_mesh(mesh_impl)
        if not isinstance(tensor, tf.Tensor):
            raise ValueError(f"tensor must be a dense tf.Tensor, got {tensor!r}.")
        devices = check_destinations(mesh_impl, destinations)
        if is_simd(mesh_impl):
            return mesh_impl.slicewise(tf.identity, mesh_impl.LaidOutTensor([tensor]))
        if devices is None:
            return mesh_impl.LaidOutTensor(broadcast_to_devices(tensor, mesh_impl.devices))
        return dict(zip(devices, broadcast_to_devices(tensor, devices)))


def reduce_scatter_by(
    strategy: Any,
    mesh_impl: Any,
    values: Sequence[Any],
    groups: ProcessorGroups,
    cuts: Sequence[Cuts],
) -> list[Any]:
    """Sums each tensor over each group, and gives each processor only its part of the sum.

    The method `reduce_scatter` of `strategy` does the work. An object that counts as a strategy but
    is no `Strategy` may lack this method: then its `all_reduce` makes the sums, and each processor
    takes its part of them.

    Args:
      strategy: the reduction strategy.
      mesh_impl: an `mtf.MeshImpl`, placement or SIMD.
      values: `LaidOutTensor`s.
      groups: the processors that sum with each other, along mesh axes.
      cuts: for each value, the axes of its slices that are split into parts, each with the mesh
        axis over which it is split.

    Returns:
      `LaidOutTensor`s of the parts, in the order and dtypes of `values`.
    """
    scatter = getattr(strategy, "reduce_scatter", None)
    if scatter is not None:
        return scatter(mesh_impl, values, groups, cuts)
    sums = strategy.all_reduce(mesh_impl, values, groups)
    return [take_parts(mesh_impl, x, cut) for x, cut in zip(sums, cuts)]


def has_gradient_reduction(strategy: Any) -> bool:
    """Returns whether a strategy reduces an optimizer's gradients by its own `reduce_gradients`.

    If `strategy` is an object of another class than `Strategy`, without the attribute
    `has_gradient_reduction`, the result is False.
    """
    return bool(getattr(strategy, "has_gradient_reduction", False))


def check_strategy(reducer: Any) -> Any:
    """Returns `reducer` unchanged; raises TypeError if it is not a strategy.

    An object counts as a strategy if it has a method `all_reduce` and is no class.
    """
    if isinstance(reducer, type) or not callable(getattr(reducer, "all_reduce", None)):
        raise TypeError(
            "reducer must be a strategy such as mtf_gradsync.reduce.FusedAllReduce(), "
            f"got {reducer!r}."
        )
    return reducer


def check_pairs(pairs: Any) -> list[tuple[Any, Any]]:
    """Returns `pairs` as a list; raises ValueError if it is no list or tuple of pairs.

    A pair is a tuple (value, destinations). Its elements are not checked.
    """
    if not isinstance(pairs, (list, tuple)):
        raise ValueError(
            "value_destination_pairs must be a list or tuple of tuples (value, destinations), got "
            f"{pairs!r}."
        )
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                "Each element of value_destination_pairs must be a tuple (value, destinations), "
                f"got {pair!r}."
            )
    return list(pairs)


class OneLevel(Strategy):
    """A base class of strategies that sum packs of tensors over a whole group at once.

    A subclass overrides `_group_sum` for another algorithm than `add_n`, and `_planner` to pack
    several tensors together.
    """

    def all_reduce(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> list[Any]:
        self.check(mesh_impl, groups)
        planner = self._planner(mesh_impl)
        sum_fn = all_reduce_fn(
            mesh_impl, self._group_sum(mesh_impl), one_group=planner is plan_unpacked
        )
        return packed_all_reduce(mesh_impl, values, groups, sum_fn, planner)

    def wire_dtype(self, mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
        if is_simd(mesh_impl):
            return super().wire_dtype(mesh_impl, dtype, groups)
        return group_sum_dtype(self._group_sum(mesh_impl), dtype)

    def count_groups(
        self, shapes: Sequence[Sequence[int]], dtypes: Sequence[tf.DType], mesh_impl: Any = None
    ) -> int:
        """Returns the number of groups of sums in which `all_reduce` sums tensors.

        `shapes` are the shapes of the tensors' slices, and `dtypes` are their dtypes. `mesh_impl`
        is the mesh, or None for any SIMD mesh.
        """
        planner = self._planner(mesh_impl)
        if planner is plan_unpacked and _is_simd(mesh_impl):
            return 1
        return sum(
            len(planner([math.prod(shape) for shape in sorted(map(tuple, some))], dtype.size))
            for dtype, some in grouped(shapes, dtypes).items()
        )

    def _group_sum(self, mesh_impl: Any) -> GroupSum:
        """Returns the function that sums a group's slices; only placement meshes use it."""
        del mesh_impl
        return add_n

    def _planner(self, mesh_impl: Any) -> Planner:
        """Returns the function that plans which tensors are packed together.

        The function (a `Planner`) is for tensors on the mesh `mesh_impl`. In this base class it is
        `plan_unpacked`, which packs nothing. If nothing is packed, a SIMD mesh marks all sums of a
        call as one group of sums, which the compiler combines.
        """
        del mesh_impl
        return plan_unpacked


def _is_simd(mesh_impl: Any | None) -> bool:
    return mesh_impl is None or is_simd(mesh_impl)


# Measured by `python -m benchmarks.bucket_size` and `benchmarks.reductions`: between CPU devices of
# one process a sum sends no bytes but packing copies twice, so only tensors that cost less to copy
# than to launch are packed; a bucket has room for at least four.
PLACEMENT_BUCKET_BYTES = 64 * 1024
PLACEMENT_PACKED_BYTES = 16 * 1024


@gin.configurable(module="mtf_gradsync")
class FusedAllReduce(OneLevel):
    """The default strategy, which sums many tensors in few messages.

    On a SIMD mesh each tensor has its own CrossReplicaSum, and the sums of one call are marked as
    one group of sums. The compilers of TPUs and GPUs combine the sums of a group without copies.
    For CPUs this package packs the sums when it compiles the program. If the size of buckets is
    given, a SIMD mesh has buckets: each bucket is one CrossReplicaSum.

    On a placement mesh tensors of one dtype are packed into buckets. One device adds up a bucket,
    and for each bucket it is another device, so that devices share the work.
    """

    def __init__(self, bucket_bytes: int | None = None, packed_bytes: int | None = None):
        """Sets the size of buckets.

        Args:
          bucket_bytes: the largest size of a bucket of several tensors, in bytes per processor. A
            larger tensor has its own bucket; 0 packs nothing. None takes a default. On a placement
            mesh this is a measured size. On a SIMD mesh it is 32 MiB if packed_bytes is given; if
            not, there are no buckets, and all sums are one group of sums.
          packed_bytes: the size of the largest tensor that shares a bucket, in bytes per processor.
            If packed_bytes is None and bucket_bytes is given, all tensors that fit share buckets.
            If both are None, a measured size is taken on a placement mesh.

        Raises:
          ValueError: a number is negative or not whole.
        """
        for argument, value in (("bucket_bytes", bucket_bytes), ("packed_bytes", packed_bytes)):
            if value is not None:
                check_whole_number(argument, value, 0, "None takes a default.", most=None)
        self.bucket_bytes = bucket_bytes
        self.packed_bytes = packed_bytes

    def _planner(self, mesh_impl: Any) -> Planner:
        bucket_bytes, packed_bytes = self.bucket_bytes, self.packed_bytes
        simd = _is_simd(mesh_impl)
        if simd and bucket_bytes is None and packed_bytes is None:
            return plan_unpacked
        if bucket_bytes is None:
            bucket_bytes = SIMD_BUCKET_BYTES if simd else PLACEMENT_BUCKET_BYTES
            if packed_bytes is None and not simd:
                packed_bytes = PLACEMENT_PACKED_BYTES

        def buckets(sizes: Sequence[int], itemsize: int) -> Packs:
            num_bytes = [size * itemsize for size in sizes]
            return packs_of_groups(plan_buckets(num_bytes, bucket_bytes, packed_bytes), sizes)

        return buckets

    def reduce_scatter(
        self,
        mesh_impl: Any,
        values: Sequence[Any],
        groups: ProcessorGroups,
        cuts: Sequence[Cuts],
    ) -> list[Any]:
        """Sums each tensor over each group, and gives each processor only its part of the sum.

        `values` and the results are `LaidOutTensor`s. `groups` are the processors that sum with
        each other. `cuts` has, for each value, the axes of its slices that are split into parts,
        and the mesh axes over which they are split.

        If all devices of a placement mesh share one memory, one device makes the whole sum and
        splits it. If not, each device of a placement mesh adds up its own part of each bucket.
        These buckets hold up to `bucket_bytes`, and `packed_bytes` does not limit the tensors in
        them.
        """
        self.check(mesh_impl, groups)
        check_values(values)
        if is_simd(mesh_impl) or share_one_memory(mesh_impl):
            return super().reduce_scatter(mesh_impl, values, groups, cuts)
        bucket_bytes = PLACEMENT_BUCKET_BYTES if self.bucket_bytes is None else self.bucket_bytes
        return reduce_scatter(mesh_impl, values, groups, cuts, bucket_bytes)
