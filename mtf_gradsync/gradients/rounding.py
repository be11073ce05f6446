"""Rounds new values of bfloat16 variables by chance (stochastic rounding).

Rounding by chance goes up or down, more often to the nearer number. If values are rounded to
nearest, a change of less than half of the distance between two bfloat16 numbers is lost, however
often it is made. If values are rounded by chance, the mean of all roundings of a number is the
number itself. The random bits are a hash of the variable's name, the number of its update and the
number of the element in the whole variable. So equal values are rounded alike on every runtime, on
all copies of a variable, and after a restart. It does not matter whether the mesh splits the
variable.
"""

from __future__ import annotations

import zlib
from typing import Any, Collection, Sequence

from mtf_gradsync._common import mixed, warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.operations import GradientOperation, reduced_values
from mtf_gradsync.mesh.axes import is_simd

NEAREST, STOCHASTIC = "nearest", "stochastic"
# The last part of the name of a count of updates.
COUNT = "rounding_t"


def check_rounding(rounding: Any) -> str:
    """Returns `rounding` if it is "nearest" or "stochastic"; raises ValueError otherwise."""
    if rounding not in (NEAREST, STOCHASTIC):
        raise ValueError(f"rounding must be {NEAREST!r} or {STOCHASTIC!r}, got {rounding!r}.")
    return rounding


def check_not_float16(owner: str, variable: mtf.Variable) -> None:
    """Raises ValueError if a variable is stored or read in float16.

    New values of variables that are stored or read in float16 cannot be rounded by chance. `owner`
    is the name of the optimizer, for the error.
    """
    if tf.float16 in (variable.slice_dtype, variable.activation_dtype):
        raise ValueError(
            f'{owner}: rounding="stochastic" is for variables in bfloat16 or wider, and '
            f"{variable.name!r} is stored in {variable.slice_dtype.name} and read in "
            f"{variable.activation_dtype.name}: store the variable in bfloat16 or float32."
        )


def warn_if_nothing_is_rounded(owner: str, dtypes: Collection[Any]) -> None:
    """Warns once if rounding by chance changes nothing, because no bfloat16 is written.

    `dtypes` are the dtypes in which the variables and slots are stored that the optimizer writes.
    `owner` is the optimizer's name.
    """
    if tf.bfloat16 not in dtypes:
        warn_once(
            f"nothing is rounded {owner}",
            "%s: rounding='stochastic' changes nothing, because no variable and no slot has "
            "bfloat16 as its slice_dtype, in which steps write it. A master_dtype of bfloat16 only "
            "rounds checkpoints. To train in bfloat16, make variables with "
            "mtf.VariableDType(tf.bfloat16, tf.bfloat16, tf.bfloat16).",
            owner,
        )


def is_rounded(variable: mtf.Variable) -> bool:
    """Returns whether a variable is stored in bfloat16, so that writing it rounds new values."""
    return variable.slice_dtype == tf.bfloat16


def rounds_by_chance(rounding: str, *variables: mtf.Variable) -> bool:
    """Returns whether new values of one of the variables are rounded by chance.

    New values are rounded by chance if `rounding` is "stochastic" and a variable is stored in
    bfloat16. The optimizer then needs the number of the update, from which random bits are made.
    """
    return rounding == STOCHASTIC and any(map(is_rounded, variables))


def make_update_count(mesh: mtf.Mesh, name: str) -> mtf.Variable:
    """Makes an int32 scalar variable for the number of updates, which begins at 0.

    The variable is for optimizers that keep no count of updates. `name` is the variable's name.
    """
    count = mtf.get_variable(
        mesh,
        name,
        mtf.Shape([]),
        tf.int32,
        initializer=tf.zeros_initializer(),
        trainable=False,
    ).operation
    # It begins at 0 also after restoring a checkpoint of a run that rounded to nearest.
    count.begins_at_zero = True
    return count


def assign(variable: mtf.Variable, value: mtf.Tensor, count: mtf.Tensor | None) -> mtf.Operation:
    """Makes the operation that assigns a new value to a variable, rounded as asked for.

    Args:
      variable: the variable.
      value: its new value, in any dtype.
      count: the number of the update, an integer scalar. If it is given, a value for a bfloat16
        variable is rounded by chance, and the random bits depend on `count`. None rounds to
        nearest.
    """
    if count is not None and is_rounded(variable):
        value = _RoundByChance(mtf.cast(value, tf.float32), variable, count).outputs[0]
    return mtf.assign(variable, value)


def subtract(variable: mtf.Variable, change: mtf.Tensor, count: mtf.Tensor | None) -> mtf.Operation:
    """Makes the operation that subtracts the tensor `change` from a variable.

    `count` is the number of the update, an integer scalar. If it is given, the new value of a
    bfloat16 variable is rounded by chance, and the random bits depend on `count`. None rounds to
    nearest.
    """
    if count is not None and is_rounded(variable):
        change = mtf.cast(change, tf.float32)
        return assign(variable, mtf.cast(variable.value, tf.float32) - change, count)
    # Not `assign`, as the value may be in a narrower dtype than the variable.
    return mtf.assign_sub(variable, change)


class _RoundByChance(GradientOperation):
    """A rounding by chance to bfloat16 of float32 values of a variable or of a part of it."""

    def __init__(self, value: mtf.Tensor, variable: mtf.Variable, count: mtf.Tensor):
        self._key = hash_of_name(variable.name)
        super().__init__([value, count], [value.shape], "round_by_chance", [tf.bfloat16])

    def lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl = lowering.mesh_impl(self)
        shape = self.inputs[0].shape
        value, count = reduced_values(lowering, self.inputs)
        first = _first_elements(mesh_impl, shape)
        strides = [mtf.list_product(shape.to_integer_list[i + 1 :]) for i in range(shape.ndims)]

        def round_slice(x: tf.Tensor, count: tf.Tensor, first: Any) -> tf.Tensor:
            bits = _random_bits(x.shape.as_list(), strides, first, count, self._key)
            return round_by_bits(x, bits)

        self.set_outputs(lowering, [mesh_impl.slicewise(round_slice, value, count, first)])


def _first_elements(mesh_impl: Any, shape: mtf.Shape) -> Any:
    """Returns the number, in the whole tensor, of the first element of each processor's slice.

    `shape` is the shape of the whole tensor, whose elements are numbered in row-major order, modulo
    2**32. The result is a `LaidOutTensor` of these numbers, or 0 if all of them are 0.
    """
    sizes = shape.to_integer_list
    firsts = []
    for processor in range(mesh_impl.size):
        first = 0
        for begin, size in zip(mesh_impl.slice_begin(shape, processor), sizes):
            first = first * size + begin
        firsts.append(first % 2**32)
    if not any(firsts):
        return 0
    if is_simd(mesh_impl):
        # As int32, because TPUs cannot gather uint32.
        at = [first - 2**32 if first >= 2**31 else first for first in firsts]
        return mesh_impl.slicewise(lambda p: tf.gather(at, p), mesh_impl.laid_out_pnum())
    # One object for equal numbers: processors that share a memory then share the result.
    same = {first: first for first in firsts}
    return mesh_impl.LaidOutTensor([same[first] for first in firsts])


def hash_of_name(name: str) -> int:
    """Returns a 64-bit hash of a variable's name."""
    return mixed(zlib.crc32(name.encode()), len(name))


def _random_bits(
    sizes: Sequence[int], strides: Sequence[int], first: Any, count: tf.Tensor, key: int
) -> tf.Tensor:
    """Returns 16 random bits for each element of a slice, as uint32.

    Args:
      sizes: the slice's shape.
      strides: for each dimension, by how much the number of an element in the whole tensor grows
        from one position to the next.
      first: the number of the slice's first element in the whole tensor.
      count: the number of the update.
      key: the hash of the variable's name (see `hash_of_name`).
    """
    seed = _hashed(tf.cast(count, tf.uint32) + _word(key))
    second_seed = _hashed(seed + _word(key >> 32))
    index = seed + (tf.cast(first, tf.uint32) if isinstance(first, tf.Tensor) else _word(first))
    for axis, (size, stride) in enumerate(zip(sizes, strides)):
        # The last axis comes last, so that all tensors before the last addition are small.
        along = tf.reshape(tf.range(size), [size] + [1] * (len(sizes) - 1 - axis))
        index = index + tf.cast(along, tf.uint32) * _word(stride)
    return tf.bitwise.right_shift(_hashed(index, second_seed), _word(16))


def _hashed(x: tf.Tensor, seed: Any = 0) -> tf.Tensor:
    """Returns a uint32 hash of each word of a uint32 tensor; its upper 16 bits are the most random.

    The hash is "lowbias32" of Chris Wellons' hash-prospector, with a seed that is added midway. A
    seed at the beginning alone would give one update the bits of another, shifted by some elements.
    The seed is a uint32 tensor, or 0 for none.
    """
    x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, _word(16))) * _word(0x7FEB352D)
    x = x + seed if isinstance(seed, tf.Tensor) else x
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, _word(15))) * _word(0x846CA68B)


def _word(number: int) -> tf.Tensor:
    return tf.constant(number & 0xFFFFFFFF, tf.uint32)


def round_by_bits(x: tf.Tensor, bits: tf.Tensor) -> tf.Tensor:
    """Rounds a float32 tensor to bfloat16 up or down, depending on random bits.

    The nearer an element of `x` is to the next larger bfloat16 number (in magnitude), the more
    values of `bits` round it up to this number. NaN and infinity are kept. Values beyond the
    largest bfloat16 number are rounded to nearest: to this number or to infinity.

    Args:
      x: the tensor.
      bits: random uint32 numbers from 0 to 2**16 - 1, of the tensor's shape.
    """
    # bfloat16 is the upper 16 bits of float32, which are larger integers for larger magnitudes.
    upper = tf.bitwise.bitwise_and(tf.bitcast(x, tf.uint32) + bits, _word(0xFFFF0000))
    within = tf.abs(x) <= float(tf.bfloat16.max)
    return tf.cast(tf.where_v2(within, tf.bitcast(upper, tf.float32), x), tf.bfloat16)
