"""The base class of strategies that compress gradients, and a strategy that sends fewer bits."""

from __future__ import annotations

import abc
import sys
from typing import Any, Callable, Literal, Protocol, Sequence, Union, get_args

import gin

from mtf_gradsync._common import is_number, warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import control_flow_v1
from mtf_gradsync.mesh.axes import ProcessorGroups
from mtf_gradsync.reduce.parts import Cuts
from mtf_gradsync.reduce.strategy import (
    FusedAllReduce,
    GradientOfCores,
    State,
    StateMaker,
    Strategy,
    check_strategy,
    has_gradient_reduction,
    reduce_scatter_by,
)
from mtf_gradsync.reduce.sums import check_values


class GradientStrategy(Strategy):
    """A base class of strategies that reduce an optimizer's gradients in a way of their own.

    The gradients are reduced by `reduce_gradients`. All other sums, such as those of norms, of
    flags and of the model itself, are made by `reducer`. So these sums stay exact even if the
    reduction of gradients rounds. A subclass defines `reduce_gradients`. It also defines
    `gradient_state` if it keeps variables, such as compression errors, from step to step.

    Attributes:
      reducer: the strategy of all sums that are not gradients of an optimizer.
    """

    def __init__(self, reducer: Strategy | None = None):
        """Sets the strategy of all sums that are not gradients of an optimizer.

        Args:
          reducer: the strategy of all sums that are not gradients; None takes `FusedAllReduce()`.

        Raises:
          TypeError: reducer is not a strategy.
        """
        self.reducer = FusedAllReduce() if reducer is None else check_strategy(reducer)

    @property
    def has_gradient_reduction(self) -> bool:
        return True

    @abc.abstractmethod
    def reduce_gradients(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups, state: State
    ) -> tuple[list[Any], State]:
        """Sums an optimizer's gradients over each group; returns the sums and the new state.

        `values` are `LaidOutTensor`s of each core's terms of the gradients. `groups` are the
        processors that sum with each other. `state` is the structure that `gradient_state`
        returned, in which a `LaidOutTensor` of the variable's values on the cores replaces each
        variable. The new state has the same structure.
        """

    def all_reduce(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> list[Any]:
        return self.reducer.all_reduce(mesh_impl, values, groups)

    def reduce_scatter(
        self,
        mesh_impl: Any,
        values: Sequence[Any],
        groups: ProcessorGroups,
        cuts: Sequence[Cuts],
    ) -> list[Any]:
        return reduce_scatter_by(self.reducer, mesh_impl, values, groups, cuts)

    def check(self, mesh_impl: Any, groups: ProcessorGroups) -> None:
        getattr(self.reducer, "check", super().check)(mesh_impl, groups)

    def wire_dtype(self, mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
        """Returns the dtype in which the attribute `reducer`, a strategy, sends values of `dtype`.

        `groups` are the groups of processors that sum with each other. An optimizer's gradients may
        be sent in fewer bits than the returned dtype has. All other values are sent in the returned
        dtype.
        """
        return getattr(self.reducer, "wire_dtype", super().wire_dtype)(mesh_impl, dtype, groups)


def add_errors(mesh_impl: Any, values: Sequence[Any], errors: Sequence[Any]) -> list[Any]:
    """Adds their compression errors to values; returns the sums, in float32.

    A compression error is what earlier steps rounded away and did not send. `values` and `errors`
    are `LaidOutTensor`s, one error for each value. A value whose error is None is returned as it
    is, in its own dtype.
    """

    def plus(x: tf.Tensor, error: tf.Tensor) -> tf.Tensor:
        return tf.cast(x, tf.float32) + error

    return [
        x if error is None else mesh_impl.slicewise(plus, x, error)
        for x, error in zip(values, errors)
    ]


def zero_errors(mesh_impl: Any, errors: Sequence[Any]) -> list[Any]:
    """Returns zeros of the shape and dtype of each compression error, as `LaidOutTensor`s.

    Where `errors` has None, the result has None.
    """
    return [None if e is None else mesh_impl.slicewise(tf.zeros_like, e) for e in errors]


def cast_like(mesh_impl: Any, value: Any, other: Any) -> Any:
    """Returns the `LaidOutTensor` `value`, cast to the dtype of the `LaidOutTensor` `other`."""
    dtype = other.tensor_list[0].dtype.base_dtype
    if value.tensor_list[0].dtype.base_dtype == dtype:
        return value
    return mesh_impl.slicewise(lambda x: tf.cast(x, dtype), value)


class DType(Protocol):
    """A type that `tf.DType` satisfies, for type checkers that do not know TensorFlow's types."""

    @property
    def as_datatype_enum(self) -> Any:
        """The dtype's number in TensorFlow's enumeration of dtypes."""


_Narrow = Literal["bfloat16", "float16"]
WireDtype = Union[_Narrow, DType]
_WIRE_DTYPES = get_args(_Narrow)
# The normal numbers of float32: any other prescale would make all values 0, infinite or NaN.
_SMALLEST_PRESCALE, _LARGEST_PRESCALE = 2.0**-126, 2.0**127


@gin.configurable(module="mtf_gradsync")
class CompressedAllReduce(Strategy):
    """A strategy that sends float32 and float64 values as bfloat16 or float16.

    Another strategy, `reducer`, makes the sums. Each processor multiplies its values by `prescale`
    and rounds them to the wire dtype (the dtype of messages). The values are summed in float32. The
    sum is rounded to the wire dtype, sent, cast back to the values' dtype and divided by
    `prescale`. Values of other dtypes are sent as they are.

    **Error.** On a placement mesh, the sum of values x_i is off by at most

        ((1 + u)**(L + 1) * (1 + v)**(n + 1) - 1) * sum |x_i| + (L * n + 1) * t / prescale.

    This bound of the error is about (L + 1) * u * sum |x_i|, because each value is rounded once,
    and each sum once at each level. The letters stand for these numbers:

    - u is the unit roundoff of the wire dtype: 2**-8 for bfloat16, and 2**-11 for float16.
    - v is the unit roundoff of float32, 2**-24.
    - t is the smallest number above 0 that the wire dtype has: 2**-24 for float16, and 2**-126 for
      bfloat16, whose subnormal numbers may become 0.
    - n is the number of processors in a group.
    - L is the number of levels: 2 for `HierarchicalAllReduce` with two levels, and 1 otherwise.

    A SIMD mesh adds up bfloat16 as bfloat16. In the bound for such a mesh, n + 1 takes the place of
    L + 1. float16 has three more bits than bfloat16 and a small range. Below 2**-14 neighbouring
    float16 numbers are 2**-24 apart: this makes the second term of the bound, which a prescale
    above 1 reduces. Numbers beyond 65504 become infinite in float16. bfloat16 has float32's range.
    The bound does not hold outside of float32's range: numbers below 2**-126, before or after
    scaling, may become 0, and numbers beyond 3.4e38 may become infinite.

    **Overflow.** If a sum of finite values becomes infinite or NaN in float16, the session prints a
    message to the standard error each time. The sum is not changed. The check reads each sum once,
    and reads the values only after an overflow.

    **No effect.** Over a SIMD mesh Mesh-TF sends float16 as float32, and in groups of more than 8
    cores it also sends bfloat16 as float32. On a placement mesh Mesh-TF's ring and
    `CollectiveAllReduce` send both dtypes as float32. Compression would save nothing in these
    cases: values are sent as they are, with a warning.

    Examples:
      >>> reducer = gs.reduce.CompressedAllReduce()
      >>> opt = gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.1), reducer=reducer)
      >>> print(gs.describe(opt))
      every step  reduce over the replica axes: fused, sent in bfloat16  (CrossShardOptimizer)
                  update by Sgd
    """

    def __init__(
        self,
        reducer: Strategy | None = None,
        wire_dtype: WireDtype | None = "bfloat16",
        prescale: float = 1.0,
    ):
        """Sets the strategy that makes the sums, and how values are rounded for messages.

        Args:
          reducer: the strategy that makes the sums; None takes `FusedAllReduce()`.
          wire_dtype: the dtype of messages: "bfloat16", "float16", or the tf dtype; None compresses
            nothing.
          prescale: the factor that values are multiplied by before they are rounded. Sums are
            divided by it. A power of two adds no rounding.

        Raises:
          TypeError: reducer is not a strategy.
          ValueError: wire_dtype is none of these dtypes, or prescale is not a number from 2**-126
            to 2**127.
        """
        self.reducer = check_strategy(FusedAllReduce() if reducer is None else reducer)
        self.compressed_dtype: tf.DType | None = _check_wire_dtype(wire_dtype)
        if not is_number(prescale) or not _SMALLEST_PRESCALE <= prescale <= _LARGEST_PRESCALE:
            raise ValueError(
                "prescale must be a number from 2**-126 to 2**127, which float32 holds, got "
                f"{prescale!r}."
            )
        self.prescale = float(prescale)

    def all_reduce(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> list[Any]:
        narrow, restore = self._compress(mesh_impl, values, groups)
        return restore(self.reducer.all_reduce(mesh_impl, narrow, groups))

    def reduce_scatter(
        self,
        mesh_impl: Any,
        values: Sequence[Any],
        groups: ProcessorGroups,
        cuts: Sequence[Cuts],
    ) -> list[Any]:
        """Sums each tensor over each group, and gives each processor its part of the sum.

        Messages are in the wire dtype, and the returned parts have the dtypes of `values`. `groups`
        are the processors that sum with each other. `cuts` has, for each value, the axes of its
        slices that are split into parts, and the mesh axes over which they are split.
        """
        narrow, restore = self._compress(mesh_impl, values, groups, in_parts=True)
        return restore(reduce_scatter_by(self.reducer, mesh_impl, narrow, groups, cuts))

    @property
    def has_gradient_reduction(self) -> bool:
        """Whether the strategy that makes the sums has a `reduce_gradients` of its own."""
        return has_gradient_reduction(self.reducer)

    def gradient_state(self, gradients: Sequence[GradientOfCores], maker: StateMaker) -> State:
        """Makes, by `maker`, the variables in which `reducer` keeps its state for `gradients`."""
        return self.reducer.gradient_state(gradients, maker)

    def reduce_gradients(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups, state: State
    ) -> tuple[list[Any], State]:
        """Sums gradients in the wire dtype by `reducer`; returns the sums and the new state.

        `reducer` is then a strategy with a `reduce_gradients` of its own, and `state` is this
        strategy's state. `groups` are the processors that sum with each other. The sums have the
        dtypes of `values`.
        """
        narrow, restore = self._compress(mesh_impl, values, groups)
        sums, state = self.reducer.reduce_gradients(mesh_impl, narrow, groups, state)
        return restore(sums), state

    def _compress(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups, in_parts: bool = False
    ) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
        """Returns values as they are sent, and a function that restores their sums over `groups`.

        Values (`LaidOutTensor`s) are sent scaled, and cast to the wire dtype. Not compressed are
        values of other dtypes than float32 and float64, and values without elements. No value is
        compressed if groups have one processor, or if `reducer` would not send the wire dtype.

        The function that restores sums casts them back to the dtypes of `values`, and divides them
        by `prescale`. Sums of values that were not compressed stay as they are. If `in_parts` is
        true, each processor has only its part of every sum. If sums are in float16, a check for
        overflows is added.
        """
        self.check(mesh_impl, groups)
        check_values(values)
        wide = [
            i
            for i, value in enumerate(values)
            if value.tensor_list[0].dtype.base_dtype in (tf.float32, tf.float64)
            and mtf.list_product(value.slice_shape) > 0
        ]
        if groups.group_size == 1 or not wide or not self._narrows(mesh_impl, groups):
            return list(values), list

        def compress(x: tf.Tensor) -> tf.Tensor:
            return tf.cast(x if self.prescale == 1 else x * self.prescale, self.compressed_dtype)

        def restore(sums: Sequence[Any]) -> list[Any]:
            results = {}
            for i in wide:
                dtype = values[i].tensor_list[0].dtype.base_dtype

                def widen(x: tf.Tensor, dtype: tf.DType = dtype) -> tf.Tensor:
                    x = tf.cast(x, dtype)
                    return x if self.prescale == 1 else x / self.prescale

                results[i] = mesh_impl.slicewise(widen, sums[i])
            if self.compressed_dtype == tf.float16:
                given, narrow = ([some[i] for i in wide] for some in (values, sums))
                said = say_where_sums_overflow(
                    mesh_impl, given, narrow, list(results.values()), groups, in_parts
                )
                results = dict(zip(wide, said))
            return [results.get(i, x) for i, x in enumerate(sums)]

        narrow = {i: mesh_impl.slicewise(compress, values[i]) for i in wide}
        return [narrow.get(i, x) for i, x in enumerate(values)], restore

    def check(self, mesh_impl: Any, groups: ProcessorGroups) -> None:
        """Raises an error if this strategy or `reducer` cannot sum over `groups` on this mesh."""
        super().check(mesh_impl, groups)
        # A strategy from outside of this package may lack the method.
        getattr(self.reducer, "check", super().check)(mesh_impl, groups)

    def wire_dtype(self, mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
        inner = self._sent_as(mesh_impl, dtype, groups)
        if self.compressed_dtype is None or dtype not in (tf.float32, tf.float64):
            return inner
        compressed = self._sent_as(mesh_impl, self.compressed_dtype, groups)
        return compressed if compressed == self.compressed_dtype else inner

    def _sent_as(self, mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
        # A strategy from outside of this package may not tell what it sends.
        wire_dtype = getattr(self.reducer, "wire_dtype", lambda mesh_impl, dtype, groups: dtype)
        return wire_dtype(mesh_impl, dtype, groups)

    def _narrows(self, mesh_impl: Any, groups: ProcessorGroups) -> bool:
        wire = self.compressed_dtype
        if wire is None:
            return False
        sent = self._sent_as(mesh_impl, wire, groups)
        if sent != wire:
            warn_once(
                f"{wire.name} sent as {sent.name} by {type(self.reducer).__name__}",
                "wire_dtype=%r has no effect: %s sends %s as %s on this mesh, in groups of %d "
                "processors. The values are sent as they are.",
                wire.name,
                type(self.reducer).__name__,
                wire.name,
                sent.name,
                groups.group_size,
            )
        return sent == wire


def _check_wire_dtype(wire_dtype: Any) -> tf.DType | None:
    if wire_dtype is None:
        return None
    try:
        dtype = tf.as_dtype(wire_dtype)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in _WIRE_DTYPES:
        raise ValueError(f"wire_dtype must be one of {_WIRE_DTYPES} or None, got {wire_dtype!r}.")
    return dtype


def say_where_sums_overflow(
    mesh_impl: Any,
    values: Sequence[Any],
    sums: Sequence[Any],
    results: Sequence[Any],
    groups: ProcessorGroups,
    in_parts: bool = False,
) -> list[Any]:
    """Returns `results`, changed so that reading them prints a message if a sum has overflowed.

    A sum has overflowed if it is infinite or NaN although all values are finite.

    Args:
      mesh_impl: a placement mesh, or another mesh that has the attribute `devices`.
      values: the values before rounding. These values are read only if a sum is not finite.
      sums: the sum of each value over each group, in the wire dtype.
      results: what the caller returns for each value; each of them waits for the check.
      groups: the groups of processors that summed with each other.
      in_parts: whether each processor of a group has only its part of every sum.
    """
    devices = mesh_impl.devices
    pairs = [(i, group) for i in range(len(values)) for group in groups.groups]
    finite = []
    for i, group in pairs:
        holders = group if in_parts else group[:1]
        found = [_all_finite(sums[i].tensor_list[p], devices[p]) for p in holders]
        with tf.device(devices[group[0]]):
            finite.append(tf.reduce_all(tf.stack(found)) if in_parts else found[0])
    host = tf.DeviceSpec.from_string(devices[0]).replace(device_type="CPU", device_index=0)
    host = host.to_string()

    def look_closer() -> tf.Tensor:
        overflown = []
        for (i, group), sum_finite in zip(pairs, finite):
            inputs = [_all_finite(values[i].tensor_list[p], devices[p]) for p in group]
            with tf.device(host):
                overflown.append(
                    tf.logical_and(tf.reduce_all(tf.stack(inputs)), tf.logical_not(sum_finite))
                )
        with tf.device(host):
            number = tf.reduce_sum(tf.cast(tf.stack(overflown), tf.int32))
            return tf.cond(number > 0, lambda: _print_overflow(number, len(pairs)), lambda: False)

    with tf.name_scope("overflow"), tf.device(host):
        with control_flow_v1():
            check = tf.cond(tf.reduce_all(tf.stack(finite)), lambda: False, look_closer)
    tied = []
    for result in results:
        slices = list(result.tensor_list)
        with tf.device(devices[0]), tf.control_dependencies([check]):
            slices[0] = tf.identity(slices[0])
        tied.append(mesh_impl.LaidOutTensor(slices))
    return tied


def _all_finite(x: tf.Tensor, device: str) -> tf.Tensor:
    with tf.device(device):
        return tf.reduce_all(tf.math.is_finite(x))


def _print_overflow(number: tf.Tensor, total: int) -> tf.Tensor:
    said = tf.print(
        "mtf_gradsync: float16 overflow:",
        number,
        f"of {total} sums over the mesh are infinite or NaN although all summed values are "
        "finite. Give CompressedAllReduce a smaller prescale or wire_dtype='bfloat16'.",
        output_stream=sys.stderr,
    )
    with tf.control_dependencies([said]):
        return tf.constant(True)
