"""Programs of Mesh-TF's operations, drawn at random, with shapes that models do not have."""

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf

BATCH, HIDDEN = mtf.Dimension("batch", 4), mtf.Dimension("hidden", 4)
ODD, TWO, ONE = mtf.Dimension("odd", 3), mtf.Dimension("two", 2), mtf.Dimension("one", 1)
TOP = mtf.Dimension("top", 2)
# As large as the first two, and not split.
LIKE_BATCH, LIKE_HIDDEN = mtf.Dimension("like_batch", 4), mtf.Dimension("like_hidden", 4)
DIMS = [BATCH, HIDDEN, ODD, TWO, ONE]
RENAMED = [(BATCH, LIKE_BATCH), (LIKE_BATCH, BATCH), (HIDDEN, LIKE_HIDDEN), (HIDDEN, LIKE_BATCH)]
WEIGHTS = {"w": [ODD, HIDDEN], "u": [HIDDEN], "v": [ODD], "k": [TWO], "s": [], "b": [LIKE_BATCH]}
INPUTS = {"x": [BATCH, ODD], "y": [BATCH, HIDDEN], "z": [BATCH]}
F64 = tf.float64


class Program:
    """Operations chosen by whole numbers; each takes some of the tensors so far.

    Attributes:
      tensors: variables, inputs, and what was made of them.
      kinds: names of the classes of operations that were made.
    """

    def __init__(self, choices, mesh, inputs):
        self._choices, self._mesh = iter(choices), mesh
        self.weights = [
            mtf.get_variable(
                mesh, name, mtf.Shape(dims), F64, initializer=tf.constant_initializer(0.75)
            )
            for name, dims in WEIGHTS.items()
        ]
        self.tensors = [
            *self.weights,
            *(mtf.import_tf_tensor(mesh, inputs[n], mtf.Shape(d)) for n, d in INPUTS.items()),
        ]

    def pick(self, options):
        return options[next(self._choices, 0) % len(options)]

    def one(self, *dims):
        """A tensor that has some dimensions; the newest first, so that there are chains."""
        return self.pick([t for t in self.tensors if set(dims) <= set(t.shape.dims)][::-1])

    def some(self, dims):
        return [d for d in dims if self.pick([True, False])]

    def grow(self, steps):
        """Adds operations, and returns all tensors that were made but those of the batch."""
        makers = [
            self.einsum, self.einsum, self.einsum, self.reduce, self.binary, self.unary,
            self.unary, self.along_odd, self.renamed, self.conv, self.loop, self.recomputed,
            self.gradient, self.gradient,
        ]  # fmt: skip
        for _ in range(steps):
            made = self.pick(makers)()
            if made.shape.ndims <= 4:
                self.tensors.append(made)
        start = len(WEIGHTS) + len(INPUTS)
        return [t for t in self.tensors[start:] if BATCH not in t.shape.dims]

    def einsum(self):
        """Of one to three tensors, to any dimensions of theirs and one that none of them has."""
        xs = [self.one() for _ in range(self.pick([1, 2, 3]))]
        known = list(dict.fromkeys(d for x in xs for d in x.shape.dims))
        new = [d for d in DIMS if d not in known]
        return mtf.einsum(xs, mtf.Shape(self.some(known) + self.some(new)[:1]))

    def reduce(self):
        x = self.one()
        kind = self.pick([mtf.reduce_sum, mtf.reduce_mean, mtf.reduce_max])
        return kind(x, output_shape=mtf.Shape(self.some(x.shape.dims)))

    def binary(self):
        x, y = self.one(), self.one()
        kind = self.pick([mtf.add, mtf.sub, mtf.multiply, mtf.maximum])
        if kind is mtf.maximum and x.shape != y.shape:  # its gradient takes equal shapes
            kind = mtf.add
        dims = dict.fromkeys([*x.shape.dims, *y.shape.dims])
        return kind(x, y, output_shape=mtf.Shape(list(dims)))

    def unary(self):
        x = self.one()
        new = [d for d in DIMS if d not in x.shape.dims]
        return self.pick(
            [
                lambda: -x,
                lambda: 0.5 * x,
                lambda: x + 1.0,
                lambda: mtf.relu(x),
                lambda: mtf.tanh(x),
                lambda: mtf.cwise(lambda t: t / 3.0, [x]),
                lambda: mtf.stop_gradient(x),
                lambda: mtf.broadcast(x, mtf.Shape([*new[:1], *x.shape.dims])),
                lambda: mtf.transpose(x, mtf.Shape(x.shape.dims[::-1])),
                lambda: mtf.unstack(mtf.stack([x, 2.0 * x], "pair"), mtf.Dimension("pair", 2))[1],
                lambda: mtf.add_n([x, x, 2.0 * x]),
                lambda: mtf.where(mtf.greater(x, 0.5), x, mtf.zeros_like(x)),
            ]
        )()

    def along_odd(self):
        x = self.one(ODD)
        number = mtf.constant(self._mesh, 1, mtf.Shape([]), tf.int32)
        return self.pick(
            [
                lambda: mtf.shift(x, 1, ODD, wrap=False),
                lambda: mtf.slice(mtf.pad(x, [1, 0], "odd"), 0, 3, "odd"),
                lambda: mtf.cumsum(x, ODD),
                lambda: mtf.concat(mtf.split(x, ODD, [1, 2])[::-1], "odd"),
                lambda: mtf.add_n(mtf.unstack(x, ODD)),
                lambda: mtf.gather(x, number, ODD),
                lambda: mtf.reduce_sum(mtf.top_k(x, ODD, TOP)[0], reduced_dim=TOP),
            ]
        )()

    def renamed(self):
        """Split in another way, or not any more."""
        old, new = self.pick(RENAMED)
        fitting = [t for t in self.tensors if old in t.shape.dims and new not in t.shape.dims]
        # No tensor has two dimensions on one axis of the mesh.
        return mtf.rename_dimension(self.pick(fitting[::-1]), old.name, new.name)

    def conv(self):
        y = mtf.reduce_sum(self.one(BATCH, HIDDEN), output_shape=mtf.Shape([BATCH, HIDDEN]))
        sides = [mtf.Dimension("height", 2), mtf.Dimension("width", 2)]
        image = mtf.broadcast(y, mtf.Shape([BATCH, *sides, HIDDEN]))
        of_filter = [mtf.Dimension("fh", 1), mtf.Dimension("fw", 1), HIDDEN, ODD]
        u = mtf.broadcast(self.weights[1], mtf.Shape(of_filter))
        out = mtf.Conv2dOperation(image, u, [1, 1, 1, 1], "SAME").outputs[0]
        return mtf.reduce_sum(out, output_shape=mtf.Shape([BATCH, ODD]))

    def loop(self):
        """A sum that a loop carries, and one that it accumulates."""
        x = mtf.stop_gradient(self.one())  # loops have no gradients
        shape = mtf.Shape(self.some(x.shape.dims))

        def body(turn, carried):
            total = mtf.reduce_sum(x, output_shape=shape)
            return [turn + 1, total - 0.5 * carried if carries else total, 0.5 * total]

        carries = self.pick([True, False])
        start = [mtf.constant(self._mesh, 0, mtf.Shape([]), tf.int32)]
        start.append(mtf.zeros(self._mesh, shape, F64))
        _, carried, added = mtf.while_loop(
            lambda turn, _: mtf.less(turn, 2), body, start, has_accumulators=True
        )
        return mtf.stop_gradient(self.pick([carried, added]))

    def recomputed(self):
        def layer(x):
            return mtf.tanh(0.5 * x) * 2.0

        return mtf.recompute_grad(layer, [self.one()], control_dependencies=False)

    def gradient(self):
        """The gradient of a variable, as models make it."""
        loss = mtf.reduce_sum(mtf.square(self.one()))
        grads = mtf.gradients([loss], self.weights)
        return self.pick([g for g in grads if g is not None] or [loss])


def feeds(shards):
    """Inputs, and the same with NaNs in those of all shards but the first."""
    rng = np.random.RandomState(0)
    clean = {name: rng.randn(*[d.size for d in dims]) for name, dims in INPUTS.items()}
    broken = {name: value.copy() for name, value in clean.items()}
    for value in broken.values():
        value[BATCH.size // shards :] = np.nan
    return [clean, broken]
