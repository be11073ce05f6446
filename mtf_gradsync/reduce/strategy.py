"""What a strategy is: sums of laid-out tensors over groups of processors."""

from __future__ import annotations

import abc
from typing import Any, Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.mesh.groups import ProcessorGroups, check_groups, check_mesh
from mtf_gradsync.mesh.kind import is_simd
from mtf_gradsync.reduce.aggregation import check_aggregation, check_divisible, divide
from mtf_gradsync.reduce.checks import check_values
from mtf_gradsync.reduce.destinations import (
    check_destinations,
    check_pairs,
    check_value,
    copies,
    spread,
)
from mtf_gradsync.reduce.parts.cuts import Cuts, take_parts
from mtf_gradsync.reduce.parts.reduce_scatter import SIMD_BUCKET_BYTES, reduce_scatter
from mtf_gradsync.reduce.state import GradientOfCores, State, StateMaker
from mtf_gradsync.reduce.sums.one_level import simd_wire_dtype


class Strategy(abc.ABC):
    """How sums cross the mesh. Strategies hold settings only and can be shared by wrappers.

    A strategy may have a way of its own for the gradients of an optimizer, and variables for them:
    `GradientStrategy`.
    """

    @abc.abstractmethod
    def all_reduce(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> list[Any]:
        """Sums each tensor over each group of processors and leaves the sum on all of them.

        Args:
          mesh_impl: an `mtf.MeshImpl`, placement or SIMD.
          values: `LaidOutTensor`s of any shapes and dtypes; one slice a processor (SIMD: one
            slice that stands for all).
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
        """Sums each tensor over each group; each processor gets its part of the sum only.

        A SIMD mesh has one way for all strategies that send the dtypes that it does. Elsewhere a
        strategy without a way of its own sums whole tensors and cuts the sums: the same numbers.

        Args:
          mesh_impl: as for `all_reduce`.
          values: likewise.
          groups: the processors that sum with each other, along mesh axes.
          cuts: for each value how it is cut, along some of the axes of the groups.

        Returns:
          `LaidOutTensor`s of the dtypes of `values`, in the same order.
        """
        if is_simd(mesh_impl) and self._sends_as_simd_does(mesh_impl, values, groups):
            self.check(mesh_impl, groups)
            check_values(values)
            return reduce_scatter(mesh_impl, values, groups, cuts, SIMD_BUCKET_BYTES)
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
    def reduces_gradients_apart(self) -> bool:
        """Whether gradients of an optimizer go by `reduce_gradients`, apart from all other sums."""
        return False

    def gradient_state(self, gradients: Sequence[GradientOfCores], maker: StateMaker) -> State:
        """Makes the variables that this strategy keeps for gradients; called as a step is built.

        Args:
          gradients: gradients of one optimizer that are reduced over the same mesh axes.
          maker: makes variables.

        Returns:
          The variables, as `State` has them; none here.
        """
        del gradients, maker
        return ()

    def reduce_gradients(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups, state: State
    ) -> tuple[list[Any], State]:
        """Reduces gradients of an optimizer, where `reduces_gradients_apart`.

        The new state is written behind the gate of the step, only on steps that use the sums.

        Args:
          mesh_impl: as for `all_reduce`.
          values: the cores' parts of the gradients that `gradient_state` was told of, in order;
            in a narrower dtype where `CompressedAllReduce` stands around this strategy.
          groups: the processors that sum with each other, along mesh axes; of one processor each
            on a mesh of one shard.
          state: what `gradient_state` returned, with `LaidOutTensor`s in place of variables: what
            each core holds, without shard dims.

        Returns:
          The sums, of the shapes and dtypes of values, the same on all processors of a group; and
          the new state, in the form of the old one.
        """
        return self.all_reduce(mesh_impl, values, groups), state

    def check(self, mesh_impl: Any, groups: ProcessorGroups) -> None:
        """Checks, before anything is built, that this strategy can sum so.

        Args:
          mesh_impl: the mesh.
          groups: the processors that sum with each other.

        Raises:
          TypeError: mesh_impl is no mesh, or groups are no `ProcessorGroups`.
          ValueError: the groups are not those of the mesh, or what the strategy was told does
            not fit the mesh.
        """
        check_groups(mesh_impl, groups)

    def wire_dtype(self, mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
        """The dtype in which values of a dtype cross the mesh, the narrowest where levels differ.

        Args:
          mesh_impl: the mesh.
          dtype: of the values.
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
        """Sums or averages one value over processors and puts the result where it is wanted.

        Args:
          mesh_impl: an `mtf.MeshImpl`, placement or SIMD.
          aggregation: `tf.VariableAggregation.SUM` or `.MEAN`. A mean is the sum, divided once
            by the number of processors in a group.
          value: a `LaidOutTensor`: one slice a processor.
          destinations: a `LaidOutTensor` on the mesh (any: it says that every processor gets the
            result of its group); or devices: a device string, a list of them, or a tf variable,
            whose device is taken. Devices need not be on the mesh.
          groups: the processors that are summed; None for all in one group. Devices as
            destinations take the result of one group, so that there must not be several.

        Returns:
          A `LaidOutTensor` where destinations are one, else a dictionary from device to the
          result there, in the order of destinations.

        Raises:
          TypeError: mesh_impl is no mesh, or groups are no `ProcessorGroups`.
          ValueError: an argument is none of these, or a value is no dense tensor of numbers of
            known shape.

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
        """Does what `reduce` does for several values, which cross the mesh together.

        Args:
          mesh_impl: an `mtf.MeshImpl`.
          aggregation: as for `reduce`.
          value_destination_pairs: a list or tuple of tuples (value, destinations); destinations
            may differ.
          groups: as for `reduce`.

        Returns:
          A list of what `reduce` returns for each.

        Raises:
          ValueError: as for `reduce`, or value_destination_pairs are no such pairs.
        """
        check_mesh(mesh_impl)
        pairs = check_pairs(value_destination_pairs)
        is_mean = check_aggregation(aggregation)
        values = [check_value(mesh_impl, value) for value, _ in pairs]
        places = [check_destinations(mesh_impl, destinations) for _, destinations in pairs]
        check_values(values)
        if groups is None:
            groups = ProcessorGroups.along(mesh_impl, range(mesh_impl.shape.ndims))
        self.check(mesh_impl, groups)
        if len(groups.groups) > 1 and any(devices is not None for devices in places):
            raise ValueError(
                "destinations must be LaidOutTensors where groups has several groups, which have "
                f"as many results; got devices and {groups.groups}."
            )
        if is_mean:
            check_divisible(values)
        sums = self.all_reduce(mesh_impl, values, groups)
        if is_mean:
            sums = [divide(mesh_impl, x, groups.group_size) for x in sums]
        return [
            x if devices is None else copies(mesh_impl, x, devices)
            for x, devices in zip(sums, places)
        ]

    def broadcast(self, mesh_impl: Any, tensor: tf.Tensor, destinations: Any) -> Any:
        """Copies one tensor to destinations.

        Args:
          mesh_impl: an `mtf.MeshImpl`.
          tensor: a dense tf tensor. In a SIMD program it is the same on all cores already.
          destinations: as for `reduce`.

        Returns:
          A `LaidOutTensor` where destinations are one, else a dictionary from device to copy.

        Raises:
          TypeError: mesh_impl is no mesh.
          ValueError: an argument is none of these.
        """
        check_mesh(mesh_impl)
        if not isinstance(tensor, tf.Tensor):
            raise ValueError(f"tensor must be a dense tf.Tensor, got {tensor!r}.")
        devices = check_destinations(mesh_impl, destinations)
        if is_simd(mesh_impl):
            return mesh_impl.slicewise(tf.identity, mesh_impl.LaidOutTensor([tensor]))
        if devices is None:
            return mesh_impl.LaidOutTensor(spread(tensor, mesh_impl.devices))
        return dict(zip(devices, spread(tensor, devices)))


def reduce_scatter_by(
    strategy: Any,
    mesh_impl: Any,
    values: Sequence[Any],
    groups: ProcessorGroups,
    cuts: Sequence[Cuts],
) -> list[Any]:
    """What `Strategy.reduce_scatter` returns, also by a strategy that has `all_reduce` alone."""
    scatter = getattr(strategy, "reduce_scatter", None)
    if scatter is not None:
        return scatter(mesh_impl, values, groups, cuts)
    sums = strategy.all_reduce(mesh_impl, values, groups)
    return [take_parts(mesh_impl, x, cut) for x, cut in zip(sums, cuts)]


def check_strategy(reducer: Any) -> Any:
    """Returns the strategy that an argument named reducer gave, or raises TypeError if it is none.

    Anything that is no class and has a method `all_reduce` is taken for one.
    """
    if isinstance(reducer, type) or not callable(getattr(reducer, "all_reduce", None)):
        raise TypeError(
            "reducer must be a strategy such as mtf_gradsync.reduce.FusedAllReduce(), "
            f"got {reducer!r}."
        )
    return reducer
