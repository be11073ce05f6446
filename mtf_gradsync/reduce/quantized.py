"""Sends gradients as quantized blocks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Sequence

import numpy as np

from mtf_gradsync._common import check_flag, check_whole_number, is_whole_number
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.patches import late_configurable
from mtf_gradsync._private.tensorflow import cross_replica_gather, cross_replica_rows
from mtf_gradsync.mesh.axes import ProcessorGroups, is_simd
from mtf_gradsync.mesh.devices import memories
from mtf_gradsync.reduce.compressed import GradientStrategy, add_errors, cast_like, zero_errors
from mtf_gradsync.reduce.strategy import Compression, GradientOfCores, State, StateMaker, Strategy
from mtf_gradsync.reduce.sums import (
    check_values,
    map_groups,
    physical_groups,
    positions_in_groups,
)

SCALE_BYTES = 2  # bfloat16
# A block whose largest number is smaller is sent as zeros, so that its scale, the scale's inverse
# and the quantization error stay well inside float32's range.
SMALLEST = 2.0**-100


class Blocks(NamedTuple):
    """The format of quantized numbers: blocks of `size` integers of 8 or 4 bits, with a scale."""

    bits: int
    size: int

    @property
    def bytes(self) -> int:
        """The number of bytes of a block, including its scale."""
        return self.size * self.bits // 8 + SCALE_BYTES

    @property
    def largest_integer(self) -> int:
        """The largest integer that is sent."""
        return 2 ** (self.bits - 1) - 1

    def count(self, size: int) -> int:
        """Returns how many blocks hold `size` numbers; the last block may be partly filled."""
        return -(-size // self.size)

    def halve_bytes(self, size: int) -> bool:
        """Returns whether blocks need at most half as many bytes for `size` numbers as float32."""
        return 2 * self.count(size) * self.bytes <= 4 * size


def encode(x: tf.Tensor, blocks: Blocks) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Quantizes blocks of numbers, a float32 tensor `x` of shape ``[..., numbers of a block]``.

    Returns three tensors. The first has the quantized numbers, int8 ``[..., bytes of a block's
    numbers]``. The second has the scales, bfloat16 ``[..., 1]``. The third has the quantization
    error, float32 of the shape of `x`: `x` minus what `decode` returns. The error is exact in
    float32 on every device, because a scale has only 8 bits. A block with an infinity or a NaN has
    the scale NaN and the error 0.
    """
    finite = tf.reduce_all(tf.math.is_finite(x), -1, keepdims=True)
    top = tf.reduce_max(tf.abs(x), -1, keepdims=True)
    scale = _to_eight_bits(top * np.float32(1 / blocks.largest_integer))
    scale = tf.minimum(scale, _largest_scale(blocks.largest_integer))
    scale = tf.where_v2(tf.logical_and(finite, top >= SMALLEST), scale, 0.0)
    inverse = 1 / tf.where_v2(scale > 0, scale, 1.0)
    rounded = tf.round(tf.where_v2(finite, x, 0.0) * inverse)
    rounded = tf.clip_by_value(rounded, -blocks.largest_integer, blocks.largest_integer)
    rounded = tf.where_v2(scale > 0, rounded, 0.0)
    left = tf.where_v2(finite, x - rounded * scale, 0.0)
    scales = tf.cast(tf.where_v2(finite, scale, math.nan), tf.bfloat16)
    return tf.cast(_pack_integers(rounded, blocks.bits), tf.int8), scales, left


def decode(numbers: tf.Tensor, scales: tf.Tensor, blocks: Blocks) -> tf.Tensor:
    """Undoes `encode`, up to rounding; returns a float32 tensor of blocks of numbers.

    `numbers` and `scales` are the first two results of `encode`. The result has the shape of the
    tensor that `encode` has quantized.
    """
    return _unpack_integers(tf.cast(numbers, tf.float32), blocks.bits) * tf.cast(scales, tf.float32)


def split_into_blocks(values: Sequence[tf.Tensor], blocks: Blocks, parts: int) -> tf.Tensor:
    """Returns one tensor with the numbers of all `values`, which have one dtype, in blocks.

    The result has the shape ``[parts, blocks of a part, numbers of a block]``: the blocks are
    divided equally into `parts` parts. Each value begins at the beginning of a block. The rest of
    its last block is filled with zeros, and so is the rest of the last part.
    """
    pieces, count = [], 0
    for x in values:
        size = x.shape.num_elements()
        own = blocks.count(size)
        pieces.append(tf.pad(tf.reshape(x, [-1]), [[0, own * blocks.size - size]]))
        count += own
    rows = blocks_per_part(count, parts)
    filling = (rows * parts - count) * blocks.size
    if filling:
        pieces.append(tf.zeros([filling], pieces[0].dtype))
    return tf.reshape(tf.concat(pieces, 0), [parts, rows, blocks.size])


def join_blocks(
    x: tf.Tensor, shapes: Sequence[Sequence[int]], blocks: Blocks
) -> tuple[tf.Tensor, ...]:
    """Returns the tensors whose numbers are in the blocks `x`; the inverse of `split_into_blocks`.

    `shapes` are the shapes of the returned tensors, in the same order.
    """
    flat, start, values = tf.reshape(x, [-1]), 0, []
    for shape in shapes:
        size = math.prod(shape)
        values.append(tf.reshape(flat[start : start + size], shape))
        start += blocks.count(size) * blocks.size
    return tuple(values)


def blocks_per_part(count: int, parts: int) -> int:
    """Returns how many blocks each part has if `count` blocks are divided into `parts` parts.

    All parts have the same number of blocks; the last parts may contain empty blocks.
    """
    return -(-count // parts)


def _to_eight_bits(x: tf.Tensor) -> tf.Tensor:
    """Rounds positive float32 numbers to 8 significant bits, as bfloat16 has; returns float32."""
    # By its bits, as XLA removes a cast to bfloat16 and back.
    bits = tf.bitcast(x, tf.int32) + 0x8000
    return tf.bitcast(tf.bitwise.bitwise_and(bits, -0x10000), tf.float32)


def _largest_scale(largest: int) -> np.float32:
    """Returns the largest scale of 8 significant bits whose product with `largest` is finite.

    `largest` is the largest integer that is sent (`Blocks.largest_integer`). The product has to be
    finite in float32.
    """
    mantissa, exponent = math.frexp(float(np.finfo(np.float32).max) / largest)
    return np.float32(math.ldexp(math.floor(mantissa * 2**8), exponent - 8))


def _pack_integers(rounded: tf.Tensor, bits: int) -> tf.Tensor:
    """Returns numbers of 8 bits unchanged, and packs each two numbers of 4 bits into one of 8 bits.

    `rounded` and the result are float tensors of whole numbers. The two numbers are neighbours in
    the last axis, so that packing halves the size of this axis.
    """
    if bits == 8:
        return rounded
    shape = rounded.shape.as_list()
    low, high = tf.unstack(tf.reshape(rounded, [*shape[:-1], shape[-1] // 2, 2]), axis=-1)
    return (low + 8) + 16 * (high + 8) - 128


def _unpack_integers(numbers: tf.Tensor, bits: int) -> tf.Tensor:
    if bits == 8:
        return numbers
    both = numbers + 128
    high = tf.floor(both / 16)
    pairs = tf.stack([both - 16 * high - 8, high - 8], axis=-1)
    shape = numbers.shape.as_list()
    return tf.reshape(pairs, [*shape[:-1], 2 * shape[-1]])


def all_to_all(mesh_impl: Any, value: Any, groups: ProcessorGroups) -> Any:
    """Exchanges rows of slices among the processors of each group in `groups`.

    `value` and the result are `LaidOutTensor`s with slices of shape ``[size of a group, ...]``. Row
    i of a processor's slice is sent to member i of its group. Row i of the processor's result is
    the row that it received from member i.
    """
    if is_simd(mesh_impl):
        physical = physical_groups(mesh_impl, groups)
        return mesh_impl.slicewise(lambda x: cross_replica_rows(x, physical), value)

    # Only the rows are copied between devices.
    def exchange(_: int, group: list[int]) -> list[Any]:
        rows = mtf.parallel(
            [mesh_impl.devices[p] for p in group],
            lambda x: tf.unstack(x, axis=0),
            [value.tensor_list[p] for p in group],
        )
        received = []
        for position, processor in enumerate(group):
            with tf.device(mesh_impl.devices[processor]):
                received.append(tf.stack([sent[position] for sent in rows]))
        return received

    return map_groups(mesh_impl, value, groups, exchange)


def gather_groups(mesh_impl: Any, value: Any, groups: ProcessorGroups) -> Any:
    """Gives each processor the slices of `value` of all members of its group.

    The result is a `LaidOutTensor` with slices of shape ``[size of a group, ...]``, stacked in the
    order of the group. On a SIMD mesh the exchange is one AllToAll, which XLA devices run as an
    all-gather.
    """
    if is_simd(mesh_impl):
        physical = physical_groups(mesh_impl, groups)
        shape = value.slice_shape

        def gather(x: tf.Tensor) -> tf.Tensor:
            rows = cross_replica_gather(tf.reshape(x, [1, -1]), physical, 0)
            return tf.reshape(rows, [groups.group_size, *shape])

        return mesh_impl.slicewise(gather, value)

    def stacked(_: int, group: list[int]) -> list[Any]:
        received: list[Any] = [None] * len(group)
        for members in memories([mesh_impl.devices[p] for p in group]):
            with tf.device(mesh_impl.devices[group[members[0]]]):
                rows = tf.stack([value.tensor_list[p] for p in group])
            for member in members:
                received[member] = rows
        return received

    return map_groups(mesh_impl, value, groups, stacked)


_BITS = (4, 8)


class QuantizationErrors(NamedTuple):
    """The state of `QuantizedAllReduce`: the quantization errors of gradients.

    The field `of` is a tuple with an element for each gradient: the differences between what cores
    had to send and what they have sent. The element is None if the gradient is not quantized.
    """

    of: tuple[Any, ...]


@late_configurable(module="mtf_gradsync")
class QuantizedAllReduce(GradientStrategy):
    """A strategy that sends gradients as quantized blocks: a quarter of float32's bytes.

    Each core cuts its gradients into blocks of `block_size` numbers and sends them as whole numbers
    of `bits` bits, with a bfloat16 scale for each block. A core receives its part of all gradients
    from each member of its group (an all-to-all), and adds the parts up in float32. It quantizes
    the sum in the same way, and sends it to all members (an all-gather). So all replicas have the
    same sums, to the bit. A block of 256 numbers of 8 bits takes 258 bytes, 0.252 of the 1024 bytes
    that float32 takes.

    **Error.** A number is off by at most half a scale. A scale is 1 / 127 of the largest absolute
    value in its block (with 8 bits; 1 / 7 with 4 bits). The scale is itself rounded, by up to 2**-8
    of its size. This error is made once in each core's gradient, and once in the sum. With
    `error_feedback` a core adds both errors to its next gradient, so that all gradients are applied
    in the end.

    **Not finite.** If a block has a NaN or an infinity, the sum of the whole block is NaN, and
    cores keep no error of this block.

    **Not quantized.** Some gradients are reduced by `reducer`: those that are not floats, and those
    that blocks would not make half as large, such as vectors of up to `block_size` / 2 numbers. The
    size that counts is that of a core's slice. `mtf_gradsync.reported(optimizer)` gives the
    compression rate that is reached, and the log names the gradients that are not quantized.

    On XLA devices the messages are an all-to-all and an all-gather of int8 and bfloat16. Programs
    that TensorFlow itself makes for TPUs have no all-gather, and send the same bytes by a second
    all-to-all. In a `ShardedUpdateOptimizer` each replica receives the whole sums and takes its
    parts of them. float64 is sent with float32's precision.

    The state is kept in variables `<variable>/quantization_error`, with a value for each core.

    References:
      ZeRO++ (Wang et al. 2023) and EQuARX (2025) for the two exchanges; Seide et al. 2014 and 1-bit
      Adam (Tang et al. 2021) for keeping the errors of both exchanges.

    Examples:
      >>> reducer = gs.QuantizedAllReduce(bits=8)
      >>> opt = gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.1), reducer=reducer)
      >>> print(gs.describe(opt))
      every step  reduce over the replica axes: quantized to 8 bits  (CrossShardOptimizer)
                  update by Sgd
    """

    def __init__(
        self,
        bits: int = 8,
        block_size: int = 256,
        error_feedback: bool = True,
        reducer: Strategy | None = None,
    ):
        """Sets the format of quantized numbers, and whether their errors are kept.

        Args:
          bits: the number of bits of a quantized number, 8 or 4.
          block_size: how many numbers share a scale; it has to be even with 4 bits.
          error_feedback: whether a core keeps the error of quantization, a float32 tensor of the
            gradient's size, and adds it to its next gradient.
          reducer: the strategy of all sums that are not quantized; None takes `FusedAllReduce()`.

        Raises:
          TypeError: reducer is not a strategy, or error_feedback is not a bool.
          ValueError: bits is neither 8 nor 4, or block_size is not a whole number of 1 or more, or
            is odd with 4 bits.
        """
        super().__init__(reducer)
        if not is_whole_number(bits) or bits not in _BITS:
            raise ValueError(f"bits must be one of {_BITS}, got {bits!r}.")
        block_size = check_whole_number("block_size", block_size)
        if block_size * bits % 8:
            raise ValueError(
                f"block_size must be even with bits={bits}, of which two numbers share a byte, got "
                f"{block_size!r}."
            )
        self.error_feedback = check_flag("error_feedback", error_feedback)
        self.bits, self.block_size = bits, block_size

    def gradient_state(self, gradients: Sequence[GradientOfCores], maker: StateMaker) -> State:
        maker.report(self._compression(gradients))

        def error(gradient: GradientOfCores) -> mtf.Variable | None:
            # Decided by the whole gradient, as slices on any mesh are smaller.
            if not (
                self.error_feedback and self._is_quantized(gradient.dtype, gradient.shape.size)
            ):
                return None
            name = f"{gradient.name}/quantization_error"
            return maker.variable(name, gradient.shape, shard_dims=gradient.shard_dims)

        return QuantizationErrors(tuple(error(g) for g in gradients))

    def reduce_gradients(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups, state: State
    ) -> tuple[list[Any], State]:
        self.check(mesh_impl, groups)
        check_values(values)
        wanted = add_errors(mesh_impl, values, state.of)
        errors = zero_errors(mesh_impl, state.of)
        sent = [
            i
            for i, x in enumerate(values)
            if groups.group_size > 1
            and self._is_quantized(x.tensor_list[0].dtype, mtf.list_product(x.slice_shape))
        ]
        whole = [i for i in range(len(values)) if i not in sent]
        sums = list(values)
        as_given = [cast_like(mesh_impl, wanted[i], values[i]) for i in whole]
        for i, total in zip(whole, self.reducer.all_reduce(mesh_impl, as_given, groups)):
            sums[i] = total
        if sent:
            totals, left = self._sum_quantized(mesh_impl, [wanted[i] for i in sent], groups)
            for i, total, error in zip(sent, totals, left):
                sums[i] = cast_like(mesh_impl, total, values[i])
                if errors[i] is not None:
                    errors[i] = error
        return sums, QuantizationErrors(tuple(errors))

    def _sum_quantized(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Sums values over groups by quantized messages; returns the sums and each core's errors.

        `values` are `LaidOutTensor`s, and `groups` are the processors that sum with each other.
        The first result has the sum of each value, and the second result has the error of each
        value: `LaidOutTensor`s of float32. A core's error is what quantization has rounded away
        from the core's value, and from the part of the sum that the core has quantized. Without
        `error_feedback`, each error is None.
        """
        blocks, parts = self._blocks, groups.group_size
        shapes = [x.slice_shape for x in values]

        def pack_and_encode(*xs: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return encode(
                split_into_blocks([tf.cast(x, tf.float32) for x in xs], blocks, parts), blocks
            )

        def add_and_encode(numbers: tf.Tensor, scales: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return encode(tf.reduce_sum(decode(numbers, scales, blocks), 0), blocks)

        def unpack(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return join_blocks(x, shapes, blocks)

        def decode_and_unpack(numbers: tf.Tensor, scales: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return unpack(decode(numbers, scales, blocks))

        def plus_own(left: tf.Tensor, of_sum: tf.Tensor, position: Any) -> tuple[tf.Tensor, ...]:
            # A core keeps the error of the sum of its own part.
            here = tf.reshape(tf.equal(tf.range(parts), position), [parts, 1, 1])
            return unpack(left + tf.where_v2(here, of_sum[tf.newaxis], 0.0))

        *of_cores, left = mesh_impl.slicewise(pack_and_encode, *values)
        received = [all_to_all(mesh_impl, x, groups) for x in of_cores]
        *of_part, of_sum = mesh_impl.slicewise(add_and_encode, *received)
        gathered = [gather_groups(mesh_impl, x, groups) for x in of_part]
        totals = mesh_impl.slicewise(decode_and_unpack, *gathered)
        if not self.error_feedback:
            return totals, [None] * len(values)
        at = positions_in_groups(mesh_impl, groups)
        return totals, mesh_impl.slicewise(plus_own, left, of_sum, at)

    @property
    def _blocks(self) -> Blocks:
        return Blocks(self.bits, self.block_size)

    def _is_quantized(self, dtype: tf.DType, size: int) -> bool:
        """Returns whether gradients of a dtype, with `size` numbers on a core, are quantized."""
        return dtype.is_floating and size > 0 and self._blocks.halve_bytes(size)

    def _compression(self, gradients: Sequence[GradientOfCores]) -> Compression:
        blocks = self._blocks
        parts = mtf.Shape(gradients[0].shard_dims).size
        given = as_they_are = count = 0
        whole = []
        for gradient in gradients:
            size = mtf.list_product(gradient.slice_shape)
            given += size * gradient.dtype.size
            if self._is_quantized(gradient.dtype, size):
                count += blocks.count(size)
            else:
                as_they_are += size * gradient.dtype.size
                whole.append(gradient.name)
        in_parts = parts * blocks_per_part(count, parts) * blocks.bytes
        return Compression(given, in_parts + as_they_are, tuple(whole))
