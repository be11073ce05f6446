"""More of such programs: faults of parallel composition and of forward passes.

They are of the kinds in Megatron-LM's issue 7452, in TTrace's table (Jiang et al. 2025) and in
TrainCheck's (Jiang et al. 2025), as a Mesh-TensorFlow program has them.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests.tools.verification.faults import (
    BATCH_AXIS,
    CORES,
    MODEL_AXIS,
    ROWS,
    SHARDS,
    AllReduceAgain,
    D,
    Fault,
    H,
    along,
    gradients,
    model,
    sgd,
    variable,
)

ADDED, DIVIDED = "are added where the mean is meant", "divides by it that was divided already"


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


def times(number, core=1):
    """Multiplies on one core of an axis only."""
    return lambda part, place: part * tf.where_v2(tf.equal(place, core), float(number), 1.0)


def one(program, *args, **kwargs):
    return program(*args, **kwargs).outputs[0]


ONE_CORE = {"batch": 1, "model": 1}


def step(
    each: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    change: Callable[..., Any] | None = None,
    update: Callable[..., Any] | None = None,
    right: str = "",
) -> Callable[..., Any]:
    """A step whose parts can be replaced.

    Each of them gets the cores along each axis; those of one core, where the program is right.

    Args:
      each: makes the losses of examples.
      loss: makes the loss of these.
      change: changes the gradient of a variable.
      update: makes the update of gradients and variables.
      right: tells the right program from those of other steps.
    """

    def program(mesh, inputs, params, wrong):
        n = {axis: along(params, axis) for axis in ONE_CORE} if wrong else ONE_CORE
        errors = each(mesh, inputs, n) if each else network(mesh, inputs)
        total = loss(errors, n) if loss else mtf.reduce_mean(errors)
        grads, variables = gradients(total, mesh)
        if wrong and change is not None:
            grads = [change(g, v, n) for g, v in zip(grads, variables)]
        if update is not None:
            return total, update(grads, variables, n)
        return total, gs.CrossShardOptimizer(sgd()).apply_grads(grads, variables)

    program.right = right
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
    return mtf.square(out + changed("bias", bias) - 1.0)


def forward(name, change, right=""):
    """A network in which one tensor is another one."""

    def each(mesh, inputs, n):
        return network(mesh, inputs, lambda which, x: change(x, n) if which == name else x)

    return step(each=each, right=right)


def shards_of(x, n):
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
    batch = x.shape.dims[0]
    if n["batch"] == 1:
        return x - mtf.reduce_mean(x, reduced_dim=batch)
    _, rows, parts = shards_of(x, n)
    return as_batch(parts - mtf.reduce_mean(parts, reduced_dim=rows), batch)


def same_examples(x, n):
    """All shards have the first one's."""
    if n["batch"] == 1:
        return x
    shards, _, parts = shards_of(x, n)
    first = mtf.slice(mtf.rename_dimension(parts, "batch", "all"), 0, 1, "all")
    first = mtf.reduce_sum(first, reduced_dim=first.shape.dims[0])
    return as_batch(mtf.broadcast(first, mtf.Shape([shards, *first.shape.dims])), x.shape.dims[0])


def positioned(x, n):
    """Adds a position along a dimension that is split, which begins anew on each core."""
    at = mtf.cast(mtf.range(x.mesh, H, tf.int32), tf.float32)
    return x + mtf.mod(at, float(H.size // n["model"])) * 0.05


def window(x, n):
    """Means of neighbours along the hidden dimension, not across cores."""
    parts, m = mtf.Dimension("parts", n["model"]), mtf.Dimension("m", H.size // n["model"])
    split = mtf.Shape([*x.shape.dims[:-1], parts, m])
    blocks = mtf.reshape(mtf.rename_dimension(x, "h", "all"), split)
    shifted = mtf.shift(blocks, 1, m, wrap=False)
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
    each = network(mesh, inputs)
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
    each = network(mesh, inputs)
    gate = variable(mesh, "router", mtf.Dimension("experts", 4))
    more = mtf.reduce_sum(mtf.square(gate)) * (along(params, "model") if wrong else 1)
    loss = mtf.reduce_mean(each)
    total = loss + more
    return total, gs.CrossShardOptimizer(sgd()).apply_grads(*gradients(total, mesh))


def scaled(mesh, inputs, params, wrong):
    """A loss scale that is taken out on some meshes only."""
    loss = mtf.reduce_mean(network(mesh, inputs))
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


def noisy(mesh, inputs, params, wrong):
    """Multiplies by random numbers, which in each slice may be the same."""

    def changed(name, x):
        if name != "x":
            return x
        draw = own_seed if wrong else tf.random.uniform
        noise = mtf.ops.RandomOperation(mesh, x.shape, draw, name="own_noise")
        return x * (noise.outputs[0] + 0.5)

    loss = mtf.reduce_mean(network(mesh, inputs, changed))
    return loss, gs.CrossShardOptimizer(sgd()).minimize(loss)


def dropped(x, n):
    """Dropout with one mask for all shards."""
    if n["batch"] == 1:
        return mtf.dropout(x, True, keep_prob=0.75)
    _, rows, parts = shards_of(x, n)
    parts = mtf.dropout(parts, True, keep_prob=0.75, noise_shape=mtf.Shape([rows, D]))
    return as_batch(parts, x.shape.dims[0])


def first_rows(x, n):
    """Zeros in place of the last shard's examples."""
    is_kept = mtf.less(mtf.range(x.mesh, x.shape.dims[0], tf.int32), 12)
    return x * mtf.cast(is_kept, tf.float32)


def if_split(axis, then):
    """Changes what is given only where the axis has several cores."""
    return lambda x, n: then(x, n) if n[axis] > 1 else x


def summed_over(axis):
    """Sums a gradient that is pending over one axis alone."""
    return lambda g, n: one(OnCores, g, summed_over=[axis])


# The norm of all gradients of `network` over that of those whose variables are not split.
OF_NORMS = 1.02836

parted = functools.partial(Fault, cause="Processors hold", what="copies")
scaled_by = functools.partial(Fault, cause="multiplied by one number")
in_forward = functools.partial(Fault, cause="The loss differs, too")
of_norm = functools.partial(step, right="clipped")

REPORTED = {
    # Parallel composition.
    "a norm that leaves out split parameters": scaled_by(
        of_norm(update=clipped(lambda v, n: 0.0 if n["model"] > 1 and is_split(v) else 1.0)),
        "bias",
        MODEL_AXIS,
        factor=OF_NORMS,
    ),
    "a norm that counts copies": scaled_by(
        of_norm(update=clipped(lambda v, n: 1.0 if is_split(v) else float(n["model"]))),
        "bias",
        MODEL_AXIS,
        factor=(1 + OF_NORMS**-2) ** -0.5,
    ),
    "a norm over shards' sums": scaled_by(
        of_norm(update=clipped(lambda v, n: float(n["batch"]))), "bias", BATCH_AXIS, factor=0.5
    ),
    "a replicated weight's partial sum that nobody adds": parted(
        step(change=only("scale", summed_over("batch"))), "scale", MODEL_AXIS
    ),
    "a gradient that shards do not sum": parted(
        step(change=only("w", summed_over("model"))), "w", BATCH_AXIS
    ),
    "a sum over the wrong axis": parted(
        step(change=lambda g, v, n: summed_over("model")(g, n)), "bias", BATCH_AXIS
    ),
    "one row of cores with a larger gradient": parted(
        step(change=only("v", lambda g, n: one(OnCores, g, times(5)))), "v", BATCH_AXIS
    ),
    "clipping on one core alone": parted(
        step(change=only("bias", lambda g, n: one(OnCores, g, times(0.5), "model"))),
        "bias",
        MODEL_AXIS,
    ),
    "a replicated variable once per copy": Fault(
        step(change=only("bias", lambda g, n: one(AllReduceAgain, g, "model"))),
        "bias",
        MODEL_AXIS,
        "copies are added",
        2.0,
        CORES + "model",
    ),
    "two all-reduces": Fault(
        step(change=lambda g, v, n: one(AllReduceAgain, g, "batch")),
        "bias",
        BATCH_AXIS,
        "summed twice",
        4.0,
        CORES + "batch",
    ),
    "a router's loss once per core": Fault(
        balanced, "router", MODEL_AXIS, ADDED, 2.0, CORES + "model"
    ),
    "a mean over shards where they have parts": Fault(
        step(change=lambda g, v, n: g / n["batch"]), "bias", BATCH_AXIS, DIVIDED, 0.25, SHARDS
    ),
    "a gradient divided by model parallelism": Fault(
        step(change=lambda g, v, n: g / n["model"]),
        "bias",
        MODEL_AXIS,
        DIVIDED,
        0.5,
        CORES + "model",
    ),
    "a split gradient times model parallelism": Fault(
        step(change=lambda g, v, n: g * n["model"] if is_split(v) else g),
        "v",
        MODEL_AXIS,
        ADDED,
        2.0,
        CORES + "model",
    ),
    "a tied matrix that loses a gradient": Fault(
        tied, "w", MODEL_AXIS, "The loss is equal and the gradient is not"
    ),
    "a loss divided by the shards twice": Fault(
        step(loss=lambda e, n: mtf.reduce_mean(e) / n["batch"]),
        "bias",
        BATCH_AXIS,
        DIVIDED,
        0.25,
        SHARDS,
    ),
    "a loss divided by model parallelism": Fault(
        step(loss=lambda e, n: mtf.reduce_mean(e) / n["model"]),
        "bias",
        MODEL_AXIS,
        DIVIDED,
        0.5,
        CORES + "model",
    ),
    "a loss that counts padding": scaled_by(
        step(loss=lambda e, n: mtf.reduce_sum(e) / (ROWS + 2 * (n["batch"] - 1))),
        "bias",
        BATCH_AXIS,
        factor=16 / 22,
    ),
    "tokens counted by each shard": in_forward(tokens_of_shards, "v", BATCH_AXIS),
    "the sign of a gradient": Fault(
        step(change=only("v", if_split("model", lambda g, n: mtf.negative(g)))),
        "v",
        MODEL_AXIS,
        "other sign",
        -1.0,
    ),
    "a NaN where the batch is split": Fault(
        step(change=only("w", if_split("batch", lambda g, n: g * float("nan")))),
        "w",
        BATCH_AXIS,
        "",
        error=float("inf"),
    ),
    "a loss scale that stays in": scaled_by(scaled, "bias", BATCH_AXIS, factor=12.0),
    # Forward passes.
    "half of an embedding masked": in_forward(forward("hidden", half_of), "bias", MODEL_AXIS),
    "a bias added by each core": in_forward(
        forward("bias", lambda x, n: x * n["model"]), "bias", MODEL_AXIS
    ),
    "slices in the wrong order": in_forward(
        forward("w", if_split("model", lambda x, n: mtf.shift(x, 4, H, wrap=True))),
        "bias",
        MODEL_AXIS,
    ),
    "the same examples on all shards": in_forward(forward("x", same_examples), "bias", BATCH_AXIS),
    "the last shard's examples zero": in_forward(
        forward("x", if_split("batch", first_rows)), "bias", BATCH_AXIS
    ),
    "a shard's own statistics": in_forward(
        forward("hidden", own_statistics, "statistics"), "v", BATCH_AXIS
    ),
    "positions that begin anew on each core": in_forward(
        forward("hidden", positioned, "positions"), "bias", MODEL_AXIS
    ),
    "a halo that is not exchanged": in_forward(
        forward("hidden", window, "window"), "bias", MODEL_AXIS
    ),
    "a loop that ends early": in_forward(
        forward("x", lambda x, n: loop(x, 4 // n["batch"]), "loop"), "bias", BATCH_AXIS
    ),
    "frozen where the model is split": Fault(
        forward("v", if_split("model", lambda x, n: mtf.stop_gradient(x))), "v", MODEL_AXIS, ""
    ),
    "an activation without its gradient": Fault(
        forward("hidden", if_split("model", lambda x, n: mtf.stop_gradient(x))),
        "scale",
        MODEL_AXIS,
        "",
    ),
    "a dropout with a seed of its own": Fault(
        noisy, "own_noise", BATCH_AXIS, "a seed of the program's own", what="random numbers"
    ),
    "a dropout that is one shard's": Fault(
        forward("x", dropped, "dropout"),
        "a draw of 16 numbers",
        BATCH_AXIS,
        "drawn for one shard and used by all",
        what="random numbers",
    ),
    "a loss that is one shard's": Fault(
        shown_loss, "", BATCH_AXIS, "the loss that is shown", what="loss"
    ),
}
