"""Small programs with one wrong line each, as public reports describe them, and without it."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import numpy as np

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf

D, H = mtf.Dimension("d", 4), mtf.Dimension("h", 8)
ROWS = 16
MESH = {"mesh_shape": "batch:4;model:2", "layout": "batch:batch;h:model;experts:batch"}
STEPS = 2


def batches():
    """Batches of examples, each with the weights of its tokens, of which some have few."""
    rng = np.random.RandomState(0)
    while True:
        weights = np.ones(ROWS, "f")
        weights[rng.randint(4, ROWS - 2) :] = 0.0
        yield {"x": rng.randn(ROWS, D.size).astype("f"), "weights": weights}


class AllReduceAgain(mtf.Operation):
    """Sums over mesh axes what every processor has already."""

    def __init__(self, x: mtf.Tensor, axis: str):
        super().__init__([x], name="all_reduce_again")
        self._axis = axis
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def lower(self, lowering):
        mesh_impl = lowering.mesh_impl(self)
        axis = [d.name for d in mesh_impl.shape.dims].index(self._axis)
        whole = lowering.tensors[self.inputs[0]].to_laid_out_tensor()
        done = mesh_impl.allreduce(whole, [axis], "SUM")
        lowering.set_tensor_lowering(self.outputs[0], done)


class AssignOnFirstDevice(mtf.Operation):
    """Adds to the copy of a variable on one device."""

    def __init__(self, variable: mtf.Variable, after: list[mtf.Operation]):
        super().__init__([variable.value], mesh=variable.mesh, name="assign_on_first")
        self._variable, self._after = variable, after
        self._outputs = []

    def lower(self, lowering):
        (first, *_) = lowering.variables[self._variable].laid_out_tensor.tensor_list
        with tf.control_dependencies([lowering.operations[op] for op in self._after]):
            lowering.operations[self] = tf.assign_add(first, tf.ones_like(first)).op


def model(mesh, inputs, rows=None):
    """The errors of examples, and their weights; the last gradient is of "w", then comes "v"."""
    x, weights = inputs["x"], inputs["weights"]
    batch = mtf.Dimension("batch", int(x.shape[0]))
    x = mtf.import_tf_tensor(mesh, x, mtf.Shape([batch, D]))
    w, v = variable(mesh, "w", D, H), variable(mesh, "v", H)
    out = mtf.einsum([mtf.relu(mtf.einsum([x, w], mtf.Shape([batch, H]))), v], mtf.Shape([batch]))
    return mtf.square(out - 1.0), mtf.import_tf_tensor(mesh, weights, mtf.Shape([batch]))


def variable(mesh, name, *dims):
    return mtf.get_variable(
        mesh, name, mtf.Shape(list(dims)), initializer=tf.random_normal_initializer(stddev=0.5)
    )


def sgd():
    return mtf.optimize.SgdOptimizer(0.1)


def gradients(loss, mesh):
    variables = mesh.graph.trainable_variables
    return mtf.gradients([loss], [v.value for v in variables]), variables


def accumulated(opt, params, average=True):
    return gs.GradientAccumulationOptimizer(
        opt,
        STEPS,
        average_aggregated_gradients=average,
        mesh_shape=params["mesh_shape"],
        layout=params["layout"],
    )


def along(params, axis):
    sizes = {d.name: d.size for d in mtf.convert_to_shape(params["mesh_shape"]).dims}
    return sizes.get(axis, 1)


def placement_mesh(params):
    """Mesh-TensorFlow's own, on the first CPU devices."""
    shape = mtf.convert_to_shape(params["mesh_shape"])
    layout = mtf.convert_to_layout_rules(params["layout"])
    devices = [f"/device:CPU:{number}" for number in range(shape.size)]
    return mtf.placement_mesh_impl.PlacementMeshImpl(shape, layout, devices)


def lowered_spec(lowering, mode, loss, updates):
    train_op = tf.group(*(lowering.lowered_operation(op) for op in updates))
    return tf.estimator.EstimatorSpec(
        mode, loss=lowering.export_to_tf_tensor(loss), train_op=train_op
    )


def loss_per_shard(mesh, inputs, params, wrong):
    each, _ = model(mesh, inputs)
    (batch,) = each.shape.dims
    shards = mtf.Dimension("batch", along(params, "batch"))
    rows = mtf.Dimension("rows", batch.size // shards.size)
    of_shards = mtf.reduce_mean(mtf.reshape(each, mtf.Shape([shards, rows])), reduced_dim=rows)
    loss = mtf.reduce_sum(of_shards) if wrong else mtf.reduce_mean(of_shards)
    return loss, gs.CrossShardOptimizer(sgd()).apply_grads(*gradients(loss, mesh))


def sum_of_shards(mesh, inputs, params, wrong):
    each, _ = model(mesh, inputs)
    (batch,) = each.shape.dims
    shards = mtf.Dimension("batch", 4)
    rows = mtf.Dimension("rows", batch.size // shards.size)
    of_shards = mtf.reduce_mean(mtf.reshape(each, mtf.Shape([shards, rows])), reduced_dim=rows)
    reduction = tf.losses.Reduction.SUM if wrong else tf.losses.Reduction.MEAN
    return of_shards, gs.CrossShardOptimizer(sgd(), reduction=reduction).minimize(of_shards)


def mean_of_means(mesh, inputs, params, wrong):
    each, weights = model(mesh, inputs)
    tokens = mtf.reduce_sum(weights)
    loss = mtf.reduce_sum(each * weights) / tokens
    opt = accumulated(gs.CrossShardOptimizer(sgd()), params)
    return loss, opt.minimize(loss, weights=None if wrong else tokens)


def experts(mesh, inputs, params, wrong):
    each, _ = model(mesh, inputs)
    gate = variable(mesh, "experts", mtf.Dimension("experts", 4))
    loss = mtf.reduce_mean(each) * mtf.reduce_sum(mtf.square(gate))
    grads, variables = gradients(loss, mesh)
    if wrong:
        shards = along(params, "batch")
        grads = [g / shards if v.name == "experts" else g for g, v in zip(grads, variables)]
    return loss, gs.CrossShardOptimizer(sgd()).apply_grads(grads, variables)


def clipped_each_step(mesh, inputs, params, wrong):
    loss = mtf.reduce_mean(model(mesh, inputs)[0])
    grads, variables = gradients(loss, mesh)
    if wrong:
        grads, _ = gs.clip_by_global_norm(grads, 0.1)
        return loss, accumulated(gs.CrossShardOptimizer(sgd()), params).apply_grads(
            grads, variables
        )
    opt = accumulated(gs.ClipByGlobalNormOptimizer(sgd(), 0.1), params)
    return loss, opt.apply_grads(grads, variables)


def not_divided_by_k(mesh, inputs, params, wrong):
    loss = mtf.reduce_mean(model(mesh, inputs)[0])
    return loss, accumulated(gs.CrossShardOptimizer(sgd()), params, not wrong).minimize(loss)


def named_like_the_batch(mesh, inputs, params, wrong):
    each, _ = model(mesh, inputs)
    slots = mtf.Dimension("batch" if wrong else "slots", 8)
    memory = variable(mesh, "memory", slots)
    read = mtf.reduce_sum(mtf.square(mtf.rename_dimension(memory, slots.name, "read")))
    loss = mtf.reduce_mean(each * read)
    return loss, gs.CrossShardOptimizer(sgd()).apply_grads(*gradients(loss, mesh))


def dropped_at_the_end(mesh, inputs, params, wrong):
    rows = int(inputs["x"].shape[0])
    size = params["microbatch"] if wrong else rows
    starts = list(range(0, rows - size + 1, size))
    losses = []
    for start in starts:
        with tf.variable_scope("", reuse=tf.AUTO_REUSE):
            part = {k: x[start : start + size] for k, x in inputs.items()}
            losses.append(mtf.reduce_mean(model(mesh, part)[0]))
    loss = mtf.add_n(losses) / len(losses)
    return loss, gs.CrossShardOptimizer(sgd()).apply_grads(*gradients(loss, mesh))


def stale_copy(features, labels, mode, params, wrong):
    """A model_fn, whose mesh is Mesh-TensorFlow's own: ours shares copies, and refuses this."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    loss = mtf.reduce_mean(model(mesh, features)[0])
    updates = gs.CrossShardOptimizer(sgd()).minimize(loss)
    if wrong:
        (v,) = (v for v in graph.trainable_variables if v.name == "v")
        updates = [*updates, AssignOnFirstDevice(v, updates)]
    return lowered_spec(mtf.Lowering(graph, {mesh: placement_mesh(params)}), mode, loss, updates)


class Fault(NamedTuple):
    """A program with a wrong line, and what `verify` has to find.

    Attributes:
      program: makes the loss and the update, with or without the wrong line.
      variable: the first that differs, in the order of the backward pass.
      brought_in_by: the wrapper or axis.
      cause: a part of the cause that is named.
      factor: the number that its gradient is multiplied by; None if it is no number.
      of_factor: what that number is.
      what: what differs of the variable.
      params: settings of more divisions.
      runtime: of all divisions.
      error: the error, where it is no number.
    """

    program: Callable[..., Any]
    variable: str
    brought_in_by: str
    cause: str
    factor: float | None = None
    of_factor: str = ""
    what: str = "gradient"
    params: tuple[dict[str, Any], ...] = ()
    runtime: str = "cpu_replicas"
    error: float | None = None


ACCUMULATION, CROSS_SHARD = "GradientAccumulationOptimizer", "CrossShardOptimizer"
BATCH_AXIS, MODEL_AXIS = "mesh axis batch", "mesh axis model"
SHARDS, CORES = "number of shards", "cores along "
FAULTS = {
    "a loss per shard that is summed": Fault(
        loss_per_shard, "v", BATCH_AXIS, "mean is meant", 4.0, SHARDS
    ),
    "the sum of losses of shards": Fault(
        sum_of_shards, "v", CROSS_SHARD, "reduction=SUM", 4.0, SHARDS
    ),
    "a mean of means": Fault(mean_of_means, "v", ACCUMULATION, "give weights="),
    "experts divided by the shards": Fault(
        experts, "experts", BATCH_AXIS, "as of experts", 0.25, f"1 over the {SHARDS}"
    ),
    "clipped by the norm of each microbatch": Fault(
        clipped_each_step, "v", ACCUMULATION, "each microbatch's own norm"
    ),
    "K without division": Fault(
        not_divided_by_k, "v", ACCUMULATION, "average_aggregated_gradients=True",
        2.0, "K, the microbatch steps",
    ),
    "a dimension called like the batch": Fault(
        named_like_the_batch, "memory", CROSS_SHARD, "called like the batch's"
    ),
    "a dropped microbatch": Fault(
        dropped_at_the_end, "v", "params microbatch", "dropped",
        params=({"microbatch": ROWS}, {"microbatch": 12}),
    ),
    "a stale copy of a slice": Fault(
        stale_copy, "v", "", "copies of one slice", what="copies", runtime="placement_mesh"
    ),
}  # fmt: skip
