"""Two towers in half precision, trained by an Adam of the program's own at a fixed loss scale."""

import pytest

from mtf_gradsync._private.libraries import mtf, tf
from tests.programs import compared
from tests.programs.compared import imported, variable

D, H, OUT = mtf.Dimension("d", 4), mtf.Dimension("h", 4), mtf.Dimension("out", 3)
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


def tower(x, name):
    h = mtf.relu(mtf.einsum([x, variable(x.mesh, f"{name}/in", D, H)], reduced_dims=[D]))
    return mtf.einsum([h, variable(x.mesh, f"{name}/out", H, OUT)], reduced_dims=[H])


def loss(mesh, inputs):
    left, right = (tower(imported(mesh, inputs[name], D), name) for name in ("left", "right"))
    temperature = mtf.exp(variable(mesh, "temperature"))
    score = mtf.reduce_sum(left * right, reduced_dim=OUT) * temperature
    wanted = imported(mesh, inputs["wanted"])
    return SCALE * (mtf.softplus(score) - wanted * score)


def feed(rng, rows):
    towers = {name: rng.randn(rows, D.size).astype("f") for name in ("left", "right")}
    return {**towers, "wanted": rng.randint(2, size=rows).astype("f")}


def at_a_scale(optimizer, grads, variables):
    return optimizer.apply_grads(grads, variables, SCALE)


STYLE = compared.Style("batch:rows;h:cols", loss, feed, lambda: Adam(0.01), at_a_scale)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("islands", "simd"),
        ("synced replicas with clipped updates", "placement"),
        ("averages of clipped, sharded updates", "simd"),
        ("loss scale of accumulated, sharded updates", "placement"),
        pytest.param("synced", "xla", marks=pytest.mark.xla),
    ],
)
def test_it_trains_as_bare_on_one_core(name, kind):
    compared.check(STYLE, name, kind)
