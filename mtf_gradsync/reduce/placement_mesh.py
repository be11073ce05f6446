"""A placement mesh on which a strategy makes all sums, also those of activations."""

from __future__ import annotations

import functools
from typing import Any, Callable, Sequence

import gin

from mtf_gradsync._common import check_flag
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.axes import (
    LayoutLike,
    MeshShapeLike,
    ProcessorGroups,
    as_layout,
    as_mesh_shape,
)
from mtf_gradsync.mesh.devices import SharedVariable, canonical_device, memories, slicewise
from mtf_gradsync.reduce.strategy import FusedAllReduce, Strategy, check_strategy

_EXTREMES = {"MAX": tf.maximum, "MIN": tf.minimum}


@gin.configurable(module="mtf_gradsync")
def placement_mesh_impl(
    shape: MeshShapeLike,
    layout: LayoutLike,
    devices: Sequence[str],
    reducer: Strategy | None = None,
    share_copies: bool = True,
) -> PlacementMeshImpl:
    """Makes a placement mesh on which all sums are reduced by a strategy.

    Use this function in place of ``mtf.placement_mesh_impl.PlacementMeshImpl(shape, layout,
    devices)``. Optimizer wrappers reduce gradients by their own strategy; the strategy of this mesh
    reduces everything else: activations split over the model's dimensions, the loss, and sums that
    an optimizer itself makes over split dimensions, such as Adafactor's means of squares.

    Args:
      shape: an input to `mtf.convert_to_shape`, for example "batch:4;model:2".
      layout: an input to `mtf.convert_to_layout_rules`, for example "batch:batch;heads:model".
      devices: a device string for each processor of the mesh.
      reducer: the reduction strategy; None takes `FusedAllReduce()`, which adds up on one device,
        the devices taking turns.
      share_copies: whether CPU devices of one process share slices of variables that are equal, and
        tensors that they would all compute from the same tensors. A variable that is split along
        one of two mesh axes is then updated once for each of its slices, and not once for each
        processor. False keeps a copy for each processor, as on other kinds of devices.

    Returns:
      The mesh implementation.

    Raises:
      ValueError: there are more or fewer devices than processors, or a string names no device.
      TypeError: devices is not a list of strings, or reducer is not a strategy.

    Examples:
      >>> devices = [f"/device:CPU:{i}" for i in range(4)]
      >>> mesh_impl = gs.placement_mesh_impl("rows:2;cols:2", "batch:rows", devices)
      >>> mesh_impl.slice_shape(mtf.Shape([mtf.Dimension("batch", 16)]))
      [8]
    """
    return PlacementMeshImpl(shape, layout, devices, reducer, share_copies)


class PlacementMeshImpl(mtf.placement_mesh_impl.PlacementMeshImpl):
    """Mesh-TF's placement mesh with collectives that use shared memory.

    The collectives of Mesh-TF's placement mesh pass tensors around rings of devices. CPU devices of
    one process share a memory, in which this mesh computes a result once for all of these devices.

    - Sums are made by the strategy. This package's strategies sum bfloat16 and float16 in float32.
    - MAX, MIN and allconcat are computed once in each memory; the devices that share the memory
      take turns. If no two devices of a group share a memory, Mesh-TF's ring is used.
    - alltoall sends directly from each processor to every other processor.
    - Coordinates of processors are Python numbers.
    - If `share_copies` is true, processors share copies of equal slices.

    All other methods are those of Mesh-TF's placement mesh. `placement_mesh_impl` makes objects of
    this class, and describes the arguments of the constructor.
    """

    def __init__(
        self,
        shape: MeshShapeLike,
        layout: LayoutLike,
        devices: Sequence[str],
        reducer: Strategy | None = None,
        share_copies: bool = True,
    ):
        if not isinstance(devices, (list, tuple)) or not all(isinstance(d, str) for d in devices):
            raise TypeError(f"devices must be a list of device strings, got {devices!r}.")
        for device in filter(None, devices):
            canonical_device(device, "A device of devices")
        share_copies = check_flag("share_copies", share_copies)
        on, layout = as_mesh_shape(shape), as_layout(layout)
        if len(devices) != on.size:
            raise ValueError(
                f"devices must name one device for each of the {on.size} processors of the "
                f"mesh {on.to_string}, got {len(devices)}."
            )
        self.reducer: Strategy = FusedAllReduce() if reducer is None else check_strategy(reducer)
        super().__init__(on, layout, list(devices))
        self._share_copies = share_copies
        # One processor may use the master itself, as Mesh-TF's variables do.
        if share_copies and self.size > 1:
            self.LaidOutVariable = SharedVariable
        self._turn = 0

    def slicewise(self, fn: Callable[..., Any], *inputs: Any) -> Any:
        """Calls a function with each processor's slices of the inputs; returns the results.

        If slices are shared (`share_copies`), CPU devices that hold the same slices call `fn` once
        and share the result.

        Args:
          fn: a function of tf tensors that returns a tf tensor or a tuple of tf tensors.
          *inputs: LaidOutTensors, pending sums, or values that are the same for all processors.

        Returns:
          A LaidOutTensor, or a tuple of them.
        """
        if not self._share_copies:
            return super().slicewise(fn, *inputs)
        results = slicewise(
            self,
            fn,
            [
                x.tensor_list if isinstance(x, self.LaidOutTensor) else [x] * self.size
                for x in mtf.convert_args_to_laid_out_tensors(inputs)
            ],
        )
        if isinstance(results[0], tuple):
            return tuple(self.LaidOutTensor(list(one)) for one in zip(*results))
        return self.LaidOutTensor(results)

    def allreduce(self, x: Any, mesh_axes: Sequence[int], reduction_fn_string: str) -> Any:
        """Sums slices, or takes maxima or minima, over processors that differ only along mesh_axes.

        Args:
          x: a LaidOutTensor, or a pending sum.
          mesh_axes: numbers of mesh axes; if there are none, x is returned.
          reduction_fn_string: "SUM", "MAX" or "MIN".

        Returns:
          A LaidOutTensor with the slice shape of x.
        """
        if not mesh_axes:
            return x
        if reduction_fn_string == "SUM":
            groups = ProcessorGroups.along(self, mesh_axes)
            # The same order in all groups: processors that hold the same values add them up alike,
            # so that copies of a tensor stay equal to the bit.
            start = self.next_turn() % groups.group_size
            turned = [group[start:] + group[:start] for group in groups.groups]
            value = x.to_laid_out_tensor()
            return self.reducer.all_reduce(
                self, [value], ProcessorGroups(turned, groups.mesh_axes)
            )[0]
        if reduction_fn_string not in _EXTREMES:
            return super().allreduce(x, mesh_axes, reduction_fn_string)
        combine = functools.partial(functools.reduce, _EXTREMES[reduction_fn_string])
        ring = functools.partial(
            mtf.placement_mesh_impl.allreduce_ring, reduction_fn_string=reduction_fn_string
        )

        def extreme(xs: list[tf.Tensor], devices: list[str]) -> list[tf.Tensor]:
            sharing = memories(devices)
            if len(sharing) == len(devices):
                return ring(xs, devices)
            # One tensor is sent from one memory to another, not one for each device.
            partial = self._once_per_memory(
                devices, lambda members: combine([xs[i] for i in members])
            )
            if len(sharing) == 1:
                return partial
            firsts = [partial[members[0]] for members in sharing]
            return self._once_per_memory(devices, lambda members: combine(firsts))

        return self._run_in_groups(extreme, x, mesh_axes)

    def allconcat(self, x: Any, mesh_axis: int, concat_axis: int) -> Any:
        """Gives each processor the concatenated slices of all processors of its group.

        A group is all processors that differ only along `mesh_axis`.

        Args:
          x: a LaidOutTensor, or a pending sum.
          mesh_axis: number of the mesh axis.
          concat_axis: the axis of the slices along which they are concatenated.

        Returns:
          A LaidOutTensor.
        """

        def concat(xs: list[tf.Tensor], devices: list[str]) -> list[tf.Tensor]:
            if len(memories(devices)) == len(devices):
                return mtf.placement_mesh_impl.allconcat_ring(xs, devices, concat_axis)
            return self._once_per_memory(devices, lambda members: tf.concat(xs, concat_axis))

        return self._run_in_groups(concat, x, [mesh_axis])

    def alltoall(self, x: Any, mesh_axis: int, split_axis: int, concat_axis: int) -> Any:
        """Sends each processor of a group a part of every slice; concatenates what it receives.

        A group is all processors that differ only along `mesh_axis`. Each of them splits its slice
        into as many parts as the group has processors. The i-th processor of the group gets the
        i-th part of each slice.

        Args:
          x: a LaidOutTensor, or a pending sum.
          mesh_axis: number of the mesh axis.
          split_axis: the axis along which slices are split.
          concat_axis: the axis along which received parts are concatenated.

        Returns:
          A LaidOutTensor.
        """
        # The name is misspelled in Mesh-TF 0.1.21.
        straight = functools.partial(
            mtf.placement_mesh_impl.alltoall_pointtwise,
            split_axis=split_axis,
            concat_axis=concat_axis,
        )
        return self._run_in_groups(straight, x, [mesh_axis])

    def laid_out_pcoord(self, mesh_axis: int) -> Any:
        """Returns each processor's coordinate along the mesh axis with the number `mesh_axis`.

        The result is a LaidOutTensor whose slices are Python integers.
        """
        coordinates = [
            mtf.pnum_to_processor_coordinates(self.shape, pnum)[mesh_axis]
            for pnum in range(self.size)
        ]
        return self.LaidOutTensor(coordinates)

    def _run_in_groups(
        self,
        collective: Callable[[list[tf.Tensor], list[str]], list[tf.Tensor]],
        x: Any,
        mesh_axes: Sequence[int],
    ) -> Any:
        """Calls `collective` for each group of processors; returns a LaidOutTensor of the results.

        A group is all processors that differ only along `mesh_axes` (numbers). `collective` gets
        the members' slices of `x` and their devices, and returns a tensor for each member.
        """
        slices = x.to_laid_out_tensor().tensor_list
        result: list[Any] = [None] * self.size
        for group in ProcessorGroups.along(self, mesh_axes).groups:
            outputs = collective([slices[p] for p in group], [self.devices[p] for p in group])
            for processor, output in zip(group, outputs):
                result[processor] = output
        return self.LaidOutTensor(result)

    def _once_per_memory(
        self, devices: Sequence[str], compute: Callable[[list[int]], tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns a value for each device, computed once for all devices that share a memory.

        `compute` is called once for each memory, with the positions in `devices` of the devices
        that share this memory. One of these devices runs the operations that `compute` makes.
        """
        turn = self.next_turn()
        result: list[Any] = [None] * len(devices)
        for members in memories(devices):
            with tf.device(devices[members[turn % len(members)]]):
                value = compute(members)
            for member in members:
                result[member] = value
        return result

    def next_turn(self) -> int:
        """Returns a number that is one higher at each call, by which devices take turns to work."""
        self._turn += 1
        return self._turn - 1
