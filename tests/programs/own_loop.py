"""A program that walks its operations in reverse and adds gradients up in buffers of its own."""

from mtf_gradsync._private.libraries import mtf, tf
from tests import reference
from tests.programs import style
from tests.programs.style import imported, variable

D, H, EVERY, RATE = mtf.Dimension("d", 4), mtf.Dimension("h", 6), 2, 0.1


def walked(losses, xs):
    """Gradients by the program's own walk."""
    found = {loss: mtf.ones(loss.mesh, loss.shape) for loss in losses}
    for operation in reversed(list(losses[0].graph.operations)):
        given = [found.get(output) for output in operation.outputs]
        if not operation.has_gradient or all(g is None for g in given):
            continue
        for x, grad in zip(operation.inputs, operation.gradient(given)):
            if grad is not None:
                found[x] = found[x] + grad if x in found else grad
    return [found[x] for x in xs]


class Buffers:
    """Moves the variables on each second step, by what its buffers have then."""

    def apply_grads(self, grads, variables):
        mesh, zeros = variables[0].mesh, tf.zeros_initializer()
        count = mtf.get_variable(mesh, "count", mtf.Shape([]), initializer=zeros, trainable=False)
        due = mtf.cast(mtf.equal(count, EVERY - 1.0), tf.float32)
        updates = [mtf.assign(count, (count + 1.0) * (1.0 - due))]
        for v, grad in zip(variables, grads):
            buffer = mtf.get_variable(
                mesh, f"{v.name}/buffer", v.shape, initializer=zeros, trainable=False
            )
            total = buffer + grad
            updates.append(mtf.assign(v, v.value - total * due * RATE))
            updates.append(mtf.assign(buffer, total * (1.0 - due)))
        return updates


def moves():
    update = reference.Accumulation(reference.Sgd(RATE), EVERY)
    return lambda values, grads, feed: update(values, grads)


def loss(mesh, inputs):
    """A layer that is used three times, so that its gradients are added up on the walk."""
    x = imported(mesh, inputs["x"], D)
    w, b = variable(mesh, "w", D, H), variable(mesh, "b", H)
    for _ in range(3):
        h = mtf.tanh(mtf.einsum([x, w], reduced_dims=[D]) + b)
        x += mtf.einsum([h, w], reduced_dims=[H])
    return mtf.reduce_mean(mtf.square(x * variable(mesh, "gain")), reduced_dim=D)


def feed(rng):
    return {"x": rng.randn(style.ROWS, D.size).astype("f")}


STYLE = style.Style(
    loss, feed, lambda mesh, inputs: Buffers(), moves, "batch:rows;h:cols", gradients=walked
)
