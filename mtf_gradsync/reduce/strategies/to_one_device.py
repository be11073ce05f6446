"""Sums on one device of the mesh, from which the others read them."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import gin

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._warn import warn_once
from mtf_gradsync.mesh.devices import canonical_device, place_of
from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.mesh.kind import is_simd
from mtf_gradsync.reduce.packs.packed import packed_all_reduce
from mtf_gradsync.reduce.strategy import Strategy
from mtf_gradsync.reduce.sums.algorithms import sum_on_one_device
from mtf_gradsync.reduce.sums.one_level import all_reduce_fn


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
