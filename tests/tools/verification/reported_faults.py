"""More of such programs: faults of parallel composition and of forward passes.

They are of the kinds in Megatron-LM's issue 7452, in TTrace's table (Jiang et al. 2025) and in
TrainCheck's (Jiang et al. 2025), as a Mesh-TensorFlow program has them.
"""

from __future__ import annotations

from typing import Any, Callable

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests.tools.verification.faults import (
    ROWS,
    D,
    Fault,
    H,
    along,
    gradients,
    model,
    sgd,
    variable,
)

BATCH_AXIS, MODEL_AXIS = "mesh axis batch", "mesh axis model"
ADDED, DIVIDED = "are added where the mean is meant", "divides by it that was divided already"
FORWARD, PARTED = "The loss differs, too", "Processors hold"
ONE_NUMBER = "multiplied by one number"
SHARDS, CORES = "number of shards", "number of cores along "


class OnCores(mtf.Operation):
    """Changes a core's slice of a tensor by its place along a mesh axis.

    With `summed_over`, a gradient that is pending is only summed over these mesh axes.
    """

    def __init__(self, x, change=lambda part, place: part, axis="batch", summed_over=None):
        super().__init__([x], name="on_cores")
        self._change, self._axis, self._over = change, axis, summed_over
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def lower(self, lowering):
        mesh_impl, x = lowering.mesh_impl(self), lowering.tensors[self.inputs[0]]
        names = mesh_impl.shape.dimension_names
        if self._over is not None and isinstance(x, mtf.LazyAllreduceSum):
            axes = [names.index(name) for name in self._over]
            axes = [axis for axis in axes if axis in x.mesh_axes]
            part = x.laid_out_input.to_laid_out_tensor()
            x = mesh_impl.allreduce(part, axes, "SUM") if axes else part
        place = mesh_impl.laid_out_pcoord(names.index(self._axis))
        done = mesh_impl.slicewise(self._change, x.to_laid_out_tensor(), place)
        lowering.set_tensor_lowering(self.outputs[0], done)


def times(number):
    """On the last core of an axis only."""
    return lambda part, place: part * tf.where_v2(tf.equal(place, 1), float(number), 1.0)


def one(program, *args, **kwargs):
    return program(*args, **kwargs).outputs[0]


# A step whose parts can be replaced: the loss of each example, the loss, its gradients, the
# optimizer, and what follows the update. Replacements get `n`, the cores along each axis, and
# are used where the program is wrong.
def step(
    each: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    change: Callable[..., Any] | None = None,
    update: Callable[..., Any] | None = None,
    right_update: Callable[..., Any] | None = None,
    make: Callable[..., Any] = model,
) -> Callable[..., Any]:
    def program(mesh, inputs, params, wrong):
        n = {axis: along(params, axis) for axis in ("batch", "model")}
        if wrong and each is not None:
            errors = each(mesh, inputs, n)
        else:
            errors, _ = make(mesh, inputs)
        total = loss(errors, n) if wrong and loss is not None else mtf.reduce_mean(errors)
        grads, variables = gradients(total, mesh)
        if wrong and change is not None:
            grads = [change(g, v, n) for g, v in zip(grads, variables)]
        apply = update if wrong and update is not None else right_update
        if apply is not None:
            return total, apply(grads, variables, n)
        return total, gs.CrossShardOptimizer(sgd()).apply_grads(grads, variables)

    program.right = make, right_update
    return program


def only(name, change):
    """Changes the gradient of one variable."""
    return lambda g, v, n: change(g, n) if v.name == name else g


def network(mesh, inputs, changed=lambda name, x: x):
    """A model with variables that are split and that are not; each tensor can be changed."""
    x = inputs["x"]
    batch = mtf.Dimension("batch", int(x.shape[0]))
    x = changed("x", mtf.import_tf_tensor(mesh, x, mtf.Shape([batch, D])))
    w, v = variable(mesh, "w", D, H), variable(mesh, "v", H)
    scale, bias = variable(mesh, "scale"), variable(mesh, "bias")
    hidden = mtf.tanh(mtf.einsum([x, changed("w", w)], mtf.Shape([batch, H])))
    # Its gradient is a sum over both axes.
    hidden = hidden * (changed("scale", scale) + 1.0)
    out = mtf.einsum([changed("hidden", hidden), changed("v", v)], mtf.Shape([batch]))
    return mtf.square(out + changed("bias", bias) - 1.0), None


def forward(name, change):
    """A network in which one tensor is another one."""

    def each(mesh, inputs, n):
        def changed(which, x):
            return change(x, n) if which == name else x

        return network(mesh, inputs, changed)[0]

    return step(each=each, make=network)


def shards_of(x, n, dims=()):
    batch = x.shape.dims[0]
    shards = mtf.Dimension("batch", n["batch"])
    rows = mtf.Dimension("rows", batch.size // shards.size)
    return shards, rows, mtf.reshape(x, mtf.Shape([shards, rows, *x.shape.dims[1:]]))


def as_batch(x, batch):
    return mtf.reshape(x, mtf.Shape([batch, *x.shape.dims[2:]]))


def half_of(x, n):
    """Without what the second core along the model axis has."""
    if n["model"] == 1:
        return x
    keep = mtf.cast(mtf.less(mtf.range(x.mesh, H, tf.int32), H.size // 2), tf.float32)
    return x * keep


def own_statistics(x, n):
    """Less the mean of the own shard, not of the batch."""
    _, rows, parts = shards_of(x, n)
    return as_batch(parts - mtf.reduce_mean(parts, reduced_dim=rows), x.shape.dims[0])


def centered(mesh, inputs, changed=lambda name, x: x):
    return network(
        mesh, inputs, lambda name, x: x - mtf.reduce_mean(x, reduced_dim=x.shape.dims[0])
        if name == "hidden" else changed(name, x),
    )  # fmt: skip


def same_examples(x, n):
    """All shards have the first one's."""
    if n["batch"] == 1:
        return x
    shards, _, parts = shards_of(x, n)
    first = mtf.slice(mtf.rename_dimension(parts, "batch", "all"), 0, 1, "all")
    first = mtf.reduce_sum(first, reduced_dim=first.shape.dims[0])
    return as_batch(mtf.broadcast(first, mtf.Shape([shards, *first.shape.dims])), x.shape.dims[0])


def positioned(n):
    """Adds a position along a dimension that is split, which with `n` begins anew on each core."""

    def changed(name, x):
        if name != "hidden":
            return x
        at = mtf.cast(mtf.range(x.mesh, H, tf.int32), tf.float32)
        return x + (at if n is None else mtf.mod(at, float(H.size // n["model"]))) * 0.05

    return changed


def window(x, n):
    """Means of neighbours along the hidden dimension; with n, not across cores."""
    parts = 1 if n is None else n["model"]
    size = H.size // parts
    split = mtf.Shape([*x.shape.dims[:-1], mtf.Dimension("parts", parts), mtf.Dimension("m", size)])
    blocks = mtf.reshape(mtf.rename_dimension(x, "h", "all"), split)
    shifted = mtf.shift(blocks, 1, split.dims[-1], wrap=False)
    return mtf.reshape((blocks + shifted) * 0.5, x.shape)


def loop(x, steps):
    def body(i, y):
        return [i + 1, y * 0.9 + 0.05]

    zero = mtf.zeros(x.mesh, mtf.Shape([]), tf.int32)
    return mtf.while_loop(lambda i, y: mtf.less(i, steps), body, [zero, x])[1]


def norm_of(grads, weights):
    squares = [mtf.reduce_sum(mtf.square(g)) * w for g, w in zip(grads, weights) if w]
    return mtf.sqrt(mtf.add_n(squares))


def clipped(weight):
    """Clips by a norm in which each variable counts `weight(variable, n)` times."""

    def update(grads, variables, n):
        norm = norm_of(grads, [weight(v, n) for v in variables])
        clipped = [g * (0.05 / norm) for g in grads]
        return gs.CrossShardOptimizer(sgd()).apply_grads(clipped, variables)

    return update


def is_split(v):
    return H in v.shape.dims


def shown_loss(mesh, inputs, params, wrong):
    """The loss that is logged is the first shard's, and the gradients are those of all."""
    each, _ = network(mesh, inputs)
    loss = mtf.reduce_mean(each)
    updates = gs.CrossShardOptimizer(sgd()).minimize(loss)
    if wrong and along(params, "batch") > 1:
        _, _, parts = shards_of(each, {"batch": along(params, "batch")})
        first = mtf.slice(mtf.rename_dimension(parts, "batch", "all"), 0, 1, "all")
        loss = mtf.reduce_mean(first)
    return loss, updates


def tokens_of_shards(mesh, inputs, params, wrong):
    """A mean over each shard's own tokens, and then over shards."""
    each, weights = model(mesh, inputs)
    weights = weights + 0.1
    total = mtf.reduce_sum(each * weights) / mtf.reduce_sum(weights)
    if wrong:
        n = {"batch": along(params, "batch")}
        _, rows, parts = shards_of(each * weights, n)
        _, _, counts = shards_of(weights, n)
        of_shards = mtf.reduce_sum(parts, reduced_dim=rows) / mtf.reduce_sum(
            counts, reduced_dim=rows
        )
        total = mtf.reduce_mean(of_shards)
    return total, gs.CrossShardOptimizer(sgd()).minimize(total)


def balanced(mesh, inputs, params, wrong):
    """A loss for a router beside that of the model, which each core along "model" adds."""
    each, _ = network(mesh, inputs)
    gate = variable(mesh, "router", mtf.Dimension("experts", 4))
    more = mtf.reduce_sum(mtf.square(gate)) * (along(params, "model") if wrong else 1)
    loss = mtf.reduce_mean(each)
    total = loss + more
    return total, gs.CrossShardOptimizer(sgd()).apply_grads(*gradients(total, mesh))


def scaled(mesh, inputs, params, wrong):
    """A loss scale that is taken out on some meshes only."""
    loss = mtf.reduce_mean(network(mesh, inputs)[0])
    grads, variables = gradients(loss * 12.0, mesh)
    out = 1.0 if wrong and along(params, "batch") > 1 else 12.0
    return loss, gs.CrossShardOptimizer(sgd()).apply_grads([g / out for g in grads], variables)


def tied(mesh, inputs, params, wrong):
    """A matrix that is used twice, of which one gradient is lost where the model is split."""
    x = mtf.import_tf_tensor(
        mesh, inputs["x"], mtf.Shape([mtf.Dimension("batch", int(inputs["x"].shape[0])), D])
    )
    w = variable(mesh, "w", D, H)
    again = mtf.stop_gradient(w) if wrong and along(params, "model") > 1 else w
    hidden = mtf.tanh(mtf.einsum([x, w], mtf.Shape([x.shape.dims[0], H])))
    out = mtf.einsum([hidden, again], x.shape)
    loss = mtf.reduce_mean(mtf.square(out - x))
    return loss, gs.CrossShardOptimizer(sgd()).minimize(loss)


def own_seed(shape, seed=None, **kwargs):
    """Numbers that are the same in each slice of this shape."""
    return tf.random.stateless_uniform(shape, seed=[1, 2], **kwargs)


def noisy(mesh, inputs, draw=tf.random.uniform):
    def changed(name, x):
        if name != "x":
            return x
        noise = mtf.ops.RandomOperation(mesh, x.shape, draw, name="own_noise")
        return x * (noise.outputs[0] + 0.5)

    return network(mesh, inputs, changed)


def dropped(mesh, inputs, n=None):
    """Dropout, and with `n` one mask for all shards."""

    def changed(name, x):
        if name != "x" or n is None:
            return mtf.dropout(x, True, keep_prob=0.75) if name == "x" else x
        _, rows, parts = shards_of(x, n)
        parts = mtf.dropout(parts, True, keep_prob=0.75, noise_shape=mtf.Shape([rows, D]))
        return as_batch(parts, x.shape.dims[0])

    return network(mesh, inputs, changed)


def if_split(axis, then):
    """Changes what is given only where the axis has several cores."""
    return lambda x, n: then(x, n) if n[axis] > 1 else x


CLIPPED = clipped(lambda v, n: 1.0)
# The norm of all gradients of `network` over that of those whose variables are not split.
OF_NORMS = 1.02836

REPORTED = {
    # Parallel composition.
    "a norm that leaves out split parameters": Fault(
        step(
            make=network,
            right_update=CLIPPED,
            update=clipped(lambda v, n: 0.0 if n["model"] > 1 and is_split(v) else 1.0),
        ),
        "bias",
        OF_NORMS,
        "",
        MODEL_AXIS,
        ONE_NUMBER,
    ),
    "a norm that counts copies": Fault(
        step(
            make=network,
            right_update=CLIPPED,
            update=clipped(lambda v, n: 1.0 if is_split(v) else float(n["model"])),
        ),
        "bias",
        (1 + OF_NORMS**-2) ** -0.5,
        "",
        MODEL_AXIS,
        ONE_NUMBER,
    ),
    "a norm over shards' sums": Fault(
        step(
            make=network,
            right_update=CLIPPED,
            update=clipped(lambda v, n: float(n["batch"])),
        ),
        "bias",
        0.5,
        "",
        BATCH_AXIS,
        ONE_NUMBER,
    ),
    "a replicated weight's partial sum that nobody adds": Fault(
        step(
            make=network, change=only("scale", lambda g, n: one(OnCores, g, summed_over=["batch"]))
        ),
        "scale",
        None,
        "",
        MODEL_AXIS,
        PARTED,
        "copies",
    ),
    "a gradient that shards do not sum": Fault(
        step(make=network, change=only("w", lambda g, n: one(OnCores, g, summed_over=["model"]))),
        "w",
        None,
        "",
        BATCH_AXIS,
        PARTED,
        "copies",
    ),
    "a sum over the wrong axis": Fault(
        step(make=network, change=lambda g, v, n: one(OnCores, g, summed_over=["model"])),
        "bias",
        None,
        "",
        BATCH_AXIS,
        PARTED,
        "copies",
    ),
    "one row of cores with a larger gradient": Fault(
        step(make=network, change=only("v", lambda g, n: one(OnCores, g, times(5)))),
        "v",
        None,
        "",
        BATCH_AXIS,
        PARTED,
        "copies",
    ),
    "clipping on one core alone": Fault(
        step(make=network, change=only("bias", lambda g, n: one(OnCores, g, times(0.5), "model"))),
        "bias",
        None,
        "",
        MODEL_AXIS,
        PARTED,
        "copies",
    ),
    "a router's loss once per core": Fault(
        balanced, "router", 2.0, CORES + "model", MODEL_AXIS, ADDED
    ),
    "a mean over shards where they have parts": Fault(
        step(make=network, change=lambda g, v, n: g / n["batch"]),
        "bias",
        0.25,
        SHARDS,
        BATCH_AXIS,
        DIVIDED,
    ),
    "a gradient divided by model parallelism": Fault(
        step(make=network, change=lambda g, v, n: g / n["model"]),
        "bias",
        0.5,
        CORES + "model",
        MODEL_AXIS,
        DIVIDED,
    ),
    "a split gradient times model parallelism": Fault(
        step(make=network, change=lambda g, v, n: g * n["model"] if is_split(v) else g),
        "v",
        2.0,
        CORES + "model",
        MODEL_AXIS,
        ADDED,
    ),
    "a tied matrix that loses a gradient": Fault(
        tied, "w", None, "", MODEL_AXIS, "The loss is equal and the gradient is not"
    ),
    "a loss divided by the shards twice": Fault(
        step(make=network, loss=lambda e, n: mtf.reduce_mean(e) / n["batch"]),
        "bias",
        0.25,
        SHARDS,
        BATCH_AXIS,
        DIVIDED,
    ),
    "a loss divided by model parallelism": Fault(
        step(make=network, loss=lambda e, n: mtf.reduce_mean(e) / n["model"]),
        "bias",
        0.5,
        CORES + "model",
        MODEL_AXIS,
        DIVIDED,
    ),
    "a loss that counts padding": Fault(
        step(make=network, loss=lambda e, n: mtf.reduce_sum(e) / (ROWS + 2 * (n["batch"] - 1))),
        "bias",
        16 / 22,
        "",
        BATCH_AXIS,
        ONE_NUMBER,
    ),
    "tokens counted by each shard": Fault(tokens_of_shards, "v", None, "", BATCH_AXIS, FORWARD),
    "the sign of a gradient": Fault(
        step(make=network, change=only("v", if_split("model", lambda g, n: mtf.negative(g)))),
        "v",
        -1.0,
        "",
        MODEL_AXIS,
        "other sign",
    ),
    "a NaN where the batch is split": Fault(
        step(make=network, change=only("w", if_split("batch", lambda g, n: g * float("nan")))),
        "w",
        None,
        "",
        BATCH_AXIS,
        "",
        error=float("inf"),
    ),
    "a loss scale that stays in": Fault(scaled, "bias", 12.0, "", BATCH_AXIS, ONE_NUMBER),
    # Forward passes.
    "half of an embedding masked": Fault(
        forward("hidden", half_of), "bias", None, "", MODEL_AXIS, FORWARD
    ),
    "a bias added by each core": Fault(
        forward("bias", lambda x, n: x * n["model"]),
        "bias",
        None,
        "",
        MODEL_AXIS,
        FORWARD,
    ),
    "slices in the wrong order": Fault(
        forward("w", if_split("model", lambda x, n: mtf.shift(x, 4, H, wrap=True))),
        "bias",
        None,
        "",
        MODEL_AXIS,
        FORWARD,
    ),
    "the same examples on all shards": Fault(
        forward("x", same_examples), "bias", None, "", BATCH_AXIS, FORWARD
    ),
    "the last shard's examples zero": Fault(
        forward(
            "x",
            if_split(
                "batch",
                lambda x, n: (
                    x
                    * mtf.cast(
                        mtf.less(mtf.range(x.mesh, x.shape.dims[0], tf.int32), 12), tf.float32
                    )
                ),
            ),
        ),
        "bias",
        None,
        "",
        BATCH_AXIS,
        FORWARD,
    ),
    "a shard's own statistics": Fault(
        step(
            make=centered,
            each=lambda mesh, inputs, n: network(
                mesh, inputs, lambda k, x: own_statistics(x, n) if k == "hidden" else x
            )[0],
        ),
        "v",
        None,
        "",
        BATCH_AXIS,
        FORWARD,
    ),
    "positions that begin anew on each core": Fault(
        step(
            make=lambda mesh, inputs: network(mesh, inputs, positioned(None)),
            each=lambda mesh, inputs, n: network(mesh, inputs, positioned(n))[0],
        ),
        "bias",
        None,
        "",
        MODEL_AXIS,
        FORWARD,
    ),
    "a halo that is not exchanged": Fault(
        step(
            make=lambda mesh, inputs: network(
                mesh, inputs, lambda k, x: window(x, None) if k == "hidden" else x
            ),
            each=lambda mesh, inputs, n: network(
                mesh, inputs, lambda k, x: window(x, n) if k == "hidden" else x
            )[0],
        ),
        "bias",
        None,
        "",
        MODEL_AXIS,
        FORWARD,
    ),
    "a loop that ends early": Fault(
        forward("x", lambda x, n: loop(x, 4 // n["batch"])),
        "bias",
        None,
        "",
        BATCH_AXIS,
        FORWARD,
    ),
    "frozen where the model is split": Fault(
        forward("v", if_split("model", lambda x, n: mtf.stop_gradient(x))),
        "v",
        None,
        "",
        MODEL_AXIS,
        "",
    ),
    "an activation without its gradient": Fault(
        forward("hidden", if_split("model", lambda x, n: mtf.stop_gradient(x))),
        "scale",
        None,
        "",
        MODEL_AXIS,
        "",
    ),
    "a dropout with a seed of its own": Fault(
        step(make=noisy, each=lambda mesh, inputs, n: noisy(mesh, inputs, own_seed)[0]),
        "own_noise",
        None,
        "",
        BATCH_AXIS,
        "a seed of the program's own",
        "random numbers",
    ),
    "a dropout that is one shard's": Fault(
        step(make=dropped, each=lambda mesh, inputs, n: dropped(mesh, inputs, n)[0]),
        "a draw of 16 numbers",
        None,
        "",
        BATCH_AXIS,
        "drawn for one shard and used by all",
        "random numbers",
    ),
    "a loss that is one shard's": Fault(
        shown_loss, "", None, "", BATCH_AXIS, "the loss that is shown", "loss"
    ),
}
