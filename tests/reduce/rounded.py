"""A strategy with state, and the model and the arithmetic that it is proved with.

All numbers are multiples of 2**-11 below 2**12: float32 holds every sum of them, in any order.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Sequence

import numpy as np

from mtf_gradsync import reduce
from mtf_gradsync._private.libraries import mtf, tf
from tests import models
from tests.reduce import exact

BATCH, INPUTS, HIDDEN = 8, 3, 4
RATE = 0.5
STEP = 8.0  # gradients are sent in multiples of 1 / STEP
batches = functools.partial(exact.batches, BATCH, INPUTS, HIDDEN)


class Errors(NamedTuple):
    """What the cores have not sent yet, for each gradient."""

    of: tuple[mtf.Variable, ...]


class RoundedAllReduce(reduce.GradientStrategy):
    """Sends gradients rounded to multiples of 1/8; each core keeps what it could not send.

    State, by name: `<variable>/rounding_error` for each variable.

    Attributes:
      calls: for each lowered reduction of gradients how many there were, and the group size.
    """

    def __init__(self, reducer: Any = None):
        super().__init__(reducer)
        self.calls: list[tuple[int, int]] = []

    def gradient_state(self, gradients: Sequence[Any], maker: Any) -> Errors:
        names = [f"{g.name}/rounding_error" for g in gradients]
        return Errors(
            tuple(
                maker.variable(name, g.shape, g.dtype, g.shard_dims)
                for name, g in zip(names, gradients)
            )
        )

    def reduce_gradients(
        self, mesh_impl: Any, values: Sequence[Any], groups: Any, state: Errors
    ) -> tuple[list[Any], Errors]:
        self.calls.append((len(values), groups.group_size))

        def send(x: tf.Tensor, error: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            wanted = tf.cast(x, error.dtype) + error
            sent = tf.cast(tf.floor(wanted * STEP + 0.5) / STEP, x.dtype)
            return sent, wanted - tf.cast(sent, error.dtype)

        pairs = [mesh_impl.slicewise(send, x, error) for x, error in zip(values, state.of)]
        sums = self.reducer.all_reduce(mesh_impl, [sent for sent, _ in pairs], groups)
        return sums, Errors(tuple(error for _, error in pairs))


def loss(mesh: mtf.Mesh, inputs: dict[str, tf.Tensor]) -> mtf.Tensor:
    """A loss that is linear in all variables, so that gradients are products of inputs.

    They are pending over the batch's axis; that of "gain" over the axis of "hidden", too.
    """
    dims = {k: mtf.Dimension(k, n) for k, n in (("batch", BATCH), ("in", INPUTS))}
    batch, features, hidden = dims["batch"], dims["in"], mtf.Dimension("hidden", HIDDEN)
    x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, features]))
    y = mtf.import_tf_tensor(mesh, inputs["y"], mtf.Shape([batch, hidden]))

    def variable(name: str, *shape: mtf.Dimension) -> mtf.Tensor:
        return models.variable(mesh, name, shape, 1)

    terms = [
        mtf.einsum([x, variable("w", features, hidden), y], []),
        mtf.einsum([y, variable("b", hidden)], []),
        mtf.einsum([x, variable("c", features)], []),
        mtf.reduce_sum(y) * variable("gain"),
    ]
    return mtf.add_n(terms)


def gradients(feed: dict[str, np.ndarray], shards: int) -> dict[str, np.ndarray]:
    """The gradients of each shard by hand, float64, `[shards, ...]`."""
    x, y = (feed[k].astype(float).reshape(shards, BATCH // shards, -1) for k in ("x", "y"))
    return {
        "w": np.einsum("sbi,sbh->sih", x, y),
        "b": y.sum(1),
        "c": x.sum(1),
        "gain": y.sum((1, 2)),
    }


class Reference:
    """SGD with rounded gradients and error feedback, in float64.

    Attributes:
      values: of the variables.
      errors: of each shard, `[shards, ...]`.
    """

    def __init__(self, shards: int):
        zeros = {k: 0 * g for k, g in gradients(batches(1)[0], shards).items()}
        self.values = {k: z[0] + 1 for k, z in zeros.items()}
        self.errors, self.shards = zeros, shards

    def send(self, *feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The reduced gradients of some steps, added up on each shard before."""
        sums = {}
        for name, error in self.errors.items():
            wanted = error + sum(gradients(feed, self.shards)[name] for feed in feeds)
            sent = np.floor(wanted * STEP + 0.5) / STEP
            self.errors[name] = wanted - sent
            sums[name] = sent.sum(0)
        return sums

    def apply(self, *sums: dict[str, np.ndarray], divisor: float = 1) -> None:
        """One update with the sum of some reduced gradients, divided."""
        for name, value in self.values.items():
            self.values[name] = value - RATE * sum(x[name] for x in sums) / divisor

    def move(self, shards: int) -> None:
        """Goes on with another number of shards: contiguous groups, or some with zeros."""
        for name, error in self.errors.items():
            moved = np.zeros([shards, *error.shape[1:]])
            for shard, part in enumerate(error):
                moved[shard * shards // self.shards] += part
            self.errors[name] = moved
        self.shards = shards

    def check(self, found: dict[str, np.ndarray]) -> None:
        """Asserts that masters are these variables and errors, exactly."""
        for name, value in self.values.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)
            error = found[f"{name}/rounding_error"]
            expected = self.errors[name].reshape(error.shape)
            np.testing.assert_array_equal(error, expected, err_msg=name)
