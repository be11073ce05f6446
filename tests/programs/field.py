"""A field that lies over the whole mesh, moved by hand at a rate from a placeholder."""

import numpy as np

from mtf_gradsync._private.libraries import mtf
from tests.programs import style
from tests.programs.style import imported, variable

NX, NY, WEIGHT = mtf.Dimension("nx", style.ROWS), mtf.Dimension("ny", 4), 0.3


class ByHand:
    """What the program does with gradients, where a wrapper can stand around it."""

    def __init__(self, mesh, inputs):
        self.rate = mtf.import_tf_tensor(mesh, inputs["rate"], mtf.Shape([]))

    def apply_grads(self, grads, variables):
        return [mtf.assign(v, v.value - g * self.rate) for g, v in zip(grads, variables)]


def moves():
    return lambda values, grads, feed: {
        k: values[k] - float(feed["rate"]) * g for k, g in grads.items()
    }


def loss(mesh, inputs):
    """The squared difference to what is seen, of a field with its neighbours and a gain."""
    field, gain = variable(mesh, "field", NX, NY), variable(mesh, "gain")
    seen = imported(mesh, inputs["seen"], NY, examples="nx")
    smooth = field + WEIGHT * mtf.shift(field, 1, NX, wrap=True)
    return mtf.reduce_mean(mtf.square(smooth * gain - seen), reduced_dim=NY)


def feed(rng):
    seen = rng.randn(NX.size, NY.size).astype("f")
    return {"seen": seen, "rate": np.float32(rng.choice([0.05, 0.1, 0.2]))}


STYLE = style.Style(
    loss,
    feed,
    ByHand,
    moves,
    "nx:rows;ny:cols",
    batch_dims=("nx", "ny"),
    # A row's neighbour is on the other shard.
    mixes=True,
)
