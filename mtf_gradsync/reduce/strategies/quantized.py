"""Gradients sent as quantized blocks."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import gin

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.groups import ProcessorGroups
from mtf_gradsync.reduce.checks import check_count, check_values
from mtf_gradsync.reduce.compression.blocks import (
    Blocks,
    decode,
    encode,
    in_blocks,
    out_of_blocks,
    rows_of_part,
)
from mtf_gradsync.reduce.compression.exchange import all_gather, all_to_all
from mtf_gradsync.reduce.state import Compression, GradientOfCores, State, StateMaker
from mtf_gradsync.reduce.strategies.by_gradient import (
    GradientStrategy,
    in_dtype_of,
    no_errors,
    plus_errors,
)
from mtf_gradsync.reduce.strategy import Strategy
from mtf_gradsync.reduce.sums.one_level import positions

_BITS = (4, 8)


class QuantizationErrors(NamedTuple):
    """For each gradient the part that cores have not sent; None if it is not quantized."""

    of: tuple[Any, ...]


@gin.configurable(module="mtf_gradsync")
class QuantizedAllReduce(GradientStrategy):
    """Sends gradients as quantized blocks: about a quarter of the bytes of float32.

    Each core cuts its gradients into blocks of `block_size` numbers and sends them as whole numbers
    of `bits` bits, with a bfloat16 scale for each block. A core receives its part of all gradients
    from each member of its group (all-to-all), adds the parts up in float32, quantizes the sum in
    the same way and sends it to all (all-gather). So all replicas have the same sums, to the bit.
    With 8 bits and blocks of 256 that is 258 bytes where float32 takes 1024: 0.252 of them.

    **Error.** A number is off by at most half a scale, which is 1 / 127 of the largest absolute
    value in its block (8 bits; 1 / 7 with 4), rounded by up to 2**-8 of itself. This happens once
    to each core's gradient, and once to the sum. With `error_feedback` a core adds the error to its
    next gradient, that of the sum included: so all gradients are applied in the end.

    **Not finite.** A block with a NaN or an infinity is NaN everywhere in the sum, and no error of
    it is kept.

    **Not quantized**, but reduced by `reducer`: gradients that blocks would not make half as large,
    such as vectors of up to `block_size` / 2 numbers, and those that are not floats. Sizes are
    those of a core's slice. `reported` has the rate that is reached, the log the names.

    On XLA devices the messages are an all-to-all and an all-gather of int8 and bfloat16. Programs
    for TPUs by TensorFlow have no all-gather and use an all-to-all of the same bytes.
    `ShardedUpdateOptimizer` cuts its parts from the sums. float64 is sent with float32's precision.

    State, by name: `<variable>/quantization_error`, a value for each core.

    References:
      ZeRO++ (Wang et al. 2023) and EQuARX (2025) for the two exchanges; Seide et al. 2014, 1-bit
      Adam (Tang et al. 2021) for the errors of both.
    """

    def __init__(
        self,
        bits: int = 8,
        block_size: int = 256,
        error_feedback: bool = True,
        reducer: Strategy | None = None,
    ):
        """Sets the quantization.

        Args:
          bits: bits of a number, 8 or 4.
          block_size: numbers that share a scale; even with 4 bits.
          error_feedback: whether a core keeps the error of quantization, a float32 tensor of the
            gradient's size, and adds it to its next gradient.
          reducer: the strategy of all other sums; None takes `FusedAllReduce()`.

        Raises:
          TypeError: reducer is not a strategy, or error_feedback is not a bool.
          ValueError: bits or block_size is anything else.
        """
        super().__init__(reducer)
        if isinstance(bits, bool) or bits not in _BITS:
            raise ValueError(f"bits must be one of {_BITS}, got {bits!r}.")
        check_count("block_size", block_size, "how many numbers share a scale", least=1)
        if block_size * bits % 8:
            raise ValueError(
                f"block_size must be even with bits={bits}, of which two numbers share a byte, got "
                f"{block_size!r}."
            )
        if not isinstance(error_feedback, bool):
            raise TypeError(f"error_feedback must be True or False, got {error_feedback!r}.")
        self.bits, self.block_size, self.error_feedback = bits, block_size, error_feedback

    def gradient_state(self, gradients: Sequence[GradientOfCores], maker: StateMaker) -> State:
        """See `Strategy.gradient_state`."""
        maker.report(self._compression(gradients))

        def error(gradient: GradientOfCores) -> mtf.Variable | None:
            # Decided by the whole gradient, as slices on any mesh are smaller.
            if not (self.error_feedback and self._sends(gradient.dtype, gradient.shape.size)):
                return None
            name = f"{gradient.name}/quantization_error"
            return maker.variable(name, gradient.shape, shard_dims=gradient.shard_dims)

        return QuantizationErrors(tuple(error(g) for g in gradients))

    def reduce_gradients(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups, state: State
    ) -> tuple[list[Any], State]:
        """See `Strategy.reduce_gradients`."""
        self.check(mesh_impl, groups)
        check_values(values)
        wanted = plus_errors(mesh_impl, values, state.of)
        errors = no_errors(mesh_impl, state.of)
        sent = [
            i
            for i, x in enumerate(values)
            if groups.group_size > 1
            and self._sends(x.tensor_list[0].dtype, mtf.list_product(x.slice_shape))
        ]
        whole = [i for i in range(len(values)) if i not in sent]
        sums = list(values)
        as_given = [in_dtype_of(mesh_impl, wanted[i], values[i]) for i in whole]
        for i, total in zip(whole, self.reducer.all_reduce(mesh_impl, as_given, groups)):
            sums[i] = total
        if sent:
            totals, left = self._exchange(mesh_impl, [wanted[i] for i in sent], groups)
            for i, total, error in zip(sent, totals, left):
                sums[i] = in_dtype_of(mesh_impl, total, values[i])
                if errors[i] is not None:
                    errors[i] = error
        return sums, QuantizationErrors(tuple(errors))

    def _exchange(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Returns sums of values, and each core's error of quantization; float32."""
        blocks, parts = self._blocks, groups.group_size
        shapes = [x.slice_shape for x in values]

        def pack_and_encode(*xs: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return encode(in_blocks([tf.cast(x, tf.float32) for x in xs], blocks, parts), blocks)

        def add_and_encode(numbers: tf.Tensor, scales: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return encode(tf.reduce_sum(decode(numbers, scales, blocks), 0), blocks)

        def unpack(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return out_of_blocks(x, shapes, blocks)

        def decode_and_unpack(numbers: tf.Tensor, scales: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return unpack(decode(numbers, scales, blocks))

        def plus_own(left: tf.Tensor, of_sum: tf.Tensor, position: Any) -> tuple[tf.Tensor, ...]:
            # A core keeps the error of the sum of its own part.
            here = tf.reshape(tf.equal(tf.range(parts), position), [parts, 1, 1])
            return unpack(left + tf.where_v2(here, of_sum[tf.newaxis], 0.0))

        *of_cores, left = mesh_impl.slicewise(pack_and_encode, *values)
        received = [all_to_all(mesh_impl, x, groups) for x in of_cores]
        *of_part, of_sum = mesh_impl.slicewise(add_and_encode, *received)
        gathered = [all_gather(mesh_impl, x, groups) for x in of_part]
        totals = mesh_impl.slicewise(decode_and_unpack, *gathered)
        if not self.error_feedback:
            return totals, [None] * len(values)
        at = positions(mesh_impl, groups)
        return totals, mesh_impl.slicewise(plus_own, left, of_sum, at)

    @property
    def _blocks(self) -> Blocks:
        return Blocks(self.bits, self.block_size)

    def _sends(self, dtype: tf.DType, size: int) -> bool:
        """Whether a gradient, or a core's slice of one, is quantized."""
        return dtype.is_floating and size > 0 and self._blocks.pay(size)

    def _compression(self, gradients: Sequence[GradientOfCores]) -> Compression:
        blocks = self._blocks
        parts = mtf.Shape(gradients[0].shard_dims).size
        given = as_they_are = count = 0
        whole = []
        for gradient in gradients:
            size = mtf.list_product(gradient.slice_shape)
            given += size * gradient.dtype.size
            if self._sends(gradient.dtype, size):
                count += blocks.count(size)
            else:
                as_they_are += size * gradient.dtype.size
                whole.append(gradient.name)
        in_parts = parts * rows_of_part(count, parts) * blocks.bytes
        return Compression(given, in_parts + as_they_are, tuple(whole))
