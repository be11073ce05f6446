"""Interfaces for the state of strategies: descriptions of gradients, and their variables."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf, tf


class GradientOfCores(NamedTuple):
    """The description of a gradient that is the sum of parts on all cores.

    Attributes:
      name: the name of its variable, a prefix for names of state.
      shape: the shape of the gradient, `mtf.Shape`.
      shard_dims: a dimension for each mesh axis that it is to be reduced over, of the axis's size
        and laid out over it; a variable with these dimensions in front has a value for each core.
        Empty on a mesh of one shard whose layout has no axis for the batch.
      dtype: the dtype of the parts.
      slice_shape: the shape of a core's part, where the layout splits the gradient's dimensions.
    """

    name: str
    shape: mtf.Shape
    shard_dims: tuple[mtf.Dimension, ...]
    dtype: tf.DType
    slice_shape: tuple[int, ...]


class Compression(NamedTuple):
    """The bytes that a strategy saves on an optimizer's gradients, for one core.

    Attributes:
      given: bytes of the gradients in their own dtypes.
      sent: size of an all-reduce that would send as much as the strategy sends.
      whole: names of gradients that the strategy does not compress: those too small for it, for
        example. They count in `given` and in `sent`.
    """

    given: int
    sent: int
    whole: tuple[str, ...] = ()


class StateMaker(abc.ABC):
    """Makes the variables of a strategy's state for the gradients of one optimizer.

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
          shard_dims: the shard dims of a gradient, for a variable with a value for each core. A
            checkpoint restored on another mesh keeps the sum over the cores. Empty for a variable
            that all replicas share: each has to compute the same new value.
          start: the value in a new run, and after a checkpoint without the variable.
          begins_anew: what happens if a checkpoint has the variable in another shape, because it
            was saved on another mesh for example. If true, the variable is set to `start`; if
            false, restoring fails. Only for variables without shard dims.

        Returns:
          The variable, of shape `[shard_dims...] + shape`.

        Raises:
          ValueError: the graph has a variable of that name already.
        """

    @abc.abstractmethod
    def report(self, compression: Compression) -> None:
        """Takes the bytes that are saved on the gradients; a strategy calls it once."""


#: A nested structure (NamedTuple, tuple, list or dict) of variables or Nones; while a graph is
#: lowered it holds `LaidOutTensor`s in place of variables.
State = Any
