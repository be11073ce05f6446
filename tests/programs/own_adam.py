"""Two towers, trained by an Adam of the program's own at a fixed loss scale."""

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from tests.programs import style
from tests.programs.style import imported, variable

D, H = mtf.Dimension("d", 4), mtf.Dimension("h", 4)
SCALE = 128.0


class Adam:
    """An Adam of no class of Mesh-TF's, which divides gradients by what the loss is scaled by."""

    def __init__(self, rate, epsilon=1e-3):
        self.rate, self.epsilon = rate, epsilon

    def apply_grads(self, grads, variables, grad_scale):
        return [op for g, v in zip(grads, variables) for op in self.apply_grad(g, v, grad_scale)]

    def apply_grad(self, grad, var, grad_scale):
        zeros = tf.zeros_initializer()
        first, second = (
            mtf.get_variable(
                var.mesh, f"{var.name}/{name}", var.shape, initializer=zeros, trainable=False
            )
            for name in ("first", "second")
        )
        grad /= grad_scale
        new_first, new_second = 0.9 * first + 0.1 * grad, 0.99 * second + 0.01 * mtf.square(grad)
        move = new_first / (mtf.sqrt(new_second) + self.epsilon) * self.rate
        return [
            mtf.assign_sub(var, move),
            mtf.assign(first, new_first),
            mtf.assign(second, new_second),
        ]


def moves():
    adam = style.adam(0.01, betas=(0.9, 0.99))()
    return lambda values, grads, feed: adam(values, {k: g / SCALE for k, g in grads.items()}, feed)


def tower(x, name):
    return mtf.tanh(mtf.einsum([x, variable(x.mesh, f"tower/{name}", D, H)], reduced_dims=[D]))


def loss(mesh, inputs):
    left, right = (tower(imported(mesh, inputs[name], D), name) for name in ("left", "right"))
    temperature = mtf.exp(variable(mesh, "temperature"))
    score = mtf.reduce_sum(left * right, reduced_dim=H) * temperature
    wanted = imported(mesh, inputs["wanted"])
    return SCALE * (mtf.softplus(score) - wanted * score)


def feed(rng):
    towers = {name: rng.randn(style.ROWS, D.size).astype("f") for name in ("left", "right")}
    return {**towers, "wanted": rng.randint(2, size=style.ROWS).astype(np.float32)}


def at_a_scale(optimizer, grads, variables):
    return optimizer.apply_grads(grads, variables, SCALE)


STYLE = style.Style(
    loss,
    feed,
    lambda mesh, inputs: Adam(0.01),
    moves,
    "batch:rows;h:cols",
    apply=at_a_scale,
)
