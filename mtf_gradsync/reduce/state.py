"""What a strategy is told of the gradients that it reduces, and how it makes variables for them."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf, tf


class GradientOfCores(NamedTuple):
    """A gradient of which each core has its part, and the parts add up to the gradient.

    Attributes:
      name: the name of its variable, which names of state begin with.
      shape: of the gradient, `mtf.Shape`.
      shard_dims: one dimension for each mesh axis that it is to be reduced over, of the axis's
        size and laid out over it; in front of a shape they make one that gives each core its own.
        Empty on a mesh of one shard whose layout has no axis for the batch.
      dtype: of the parts.
      slice_shape: of what a core holds of it, where the layout splits its dimensions.
    """

    name: str
    shape: mtf.Shape
    shard_dims: tuple[mtf.Dimension, ...]
    dtype: tf.DType
    slice_shape: tuple[int, ...]


class Compression(NamedTuple):
    """What a strategy saves on the gradients of one optimizer; bytes are those of one core.

    Attributes:
      given: bytes of the gradients in their own dtypes.
      sent: bytes that take their place: what an all-reduce of so many bytes would send.
      whole: names of gradients that are reduced as they are.
    """

    given: int
    sent: int
    whole: tuple[str, ...] = ()


class StateMaker(abc.ABC):
    """Makes the variables of a strategy's state for the gradients of one optimizer in one graph.

    Attributes:
      name: what the names of variables begin with that are about no single gradient.
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
        """Makes a variable that does not train and is saved in checkpoints.

        Args:
          name: its whole name, a checkpoint format: `<gradient's name>/<what it is>`, or
            `<name of this maker>/<what it is>`.
          shape: what a core holds of it: laid out as the program's layout says.
          dtype: its dtype.
          shard_dims: those of a gradient, for a variable of which each core has its own. On
            another mesh the sum over the cores stays. Empty for one that all replicas share: each
            has to compute the same new value.
          start: what it begins with, in a new run and after a checkpoint that does not have it.
          begins_anew: whether it begins with `start` after a checkpoint that has it in another
            shape, without shard_dims; else that is an error.

        Returns:
          The variable, of shape `[shard_dims...] + shape`.

        Raises:
          ValueError: the graph has a variable of that name already.
        """

    @abc.abstractmethod
    def report(self, compression: Compression) -> None:
        """Says what is saved on the gradients that the state is made for, once."""


#: A NamedTuple, tuple, list or dict, nested as one likes, of variables or Nones; while a graph is
#: lowered it holds `LaidOutTensor`s in their places.
State = Any
