"""Right programs in other people's styles: nothing may be said against them.

The styles of `tests/programs` (GPT, T5's encoder and decoder, BERT, experts, fields with halos,
loops of one's own, ...) are verified by ``test_programs.py``; these are more.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import numpy as np

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import models
from tests.tools.verification.faults import (
    ROWS,
    D,
    H,
    accumulated,
    batches,
    gradients,
    sgd,
    variable,
)
from tests.tools.verification.reported_faults import network

MESH = {"mesh_shape": "batch:2;model:2", "layout": "batch:batch;h:model;heads:model;experts:batch"}
LENGTH, VOCAB = mtf.Dimension("length", 4), mtf.Dimension("vocab", 8)
# The layout splits "h" already.
HEADS = mtf.Dimension("own_heads", 2)
Wrap = Callable[[Any, Any], Any]


def tokens():
    rng = np.random.RandomState(0)
    while True:
        ids = rng.randint(1, VOCAB.size, [ROWS, LENGTH.size]).astype("i")
        yield {"ids": ids, "x": rng.randn(ROWS, D.size).astype("f")}


def cross_shard(opt, params):
    return gs.CrossShardOptimizer(opt)


def local(opt, params):
    return accumulated(gs.CrossShardOptimizer(opt), params)


def axes_of(params):
    return {"mesh_shape": params["mesh_shape"], "layout": params["layout"]}


def trains(loss_of, make=sgd, wrap: Wrap = cross_shard):
    """A step by the loss of each example."""

    def program(mesh, inputs, params):
        loss = mtf.reduce_mean(loss_of(mesh, inputs))
        opt = wrap(make(), params)
        return loss, opt.apply_grads(*gradients(loss, mesh))

    return program


def verified(program, data=batches, divisions=("batch",), **more):
    return functools.partial(gs.verify, program, data, MESH, divisions=divisions, **more)


in_microbatches = functools.partial(verified, divisions=("microbatches",))


def imported(mesh, inputs, *dims, name="x"):
    x = inputs[name]
    return mtf.import_tf_tensor(
        mesh, x, mtf.Shape([mtf.Dimension("batch", int(x.shape[0])), *dims])
    )


def embedded(mesh, inputs):
    ids = imported(mesh, inputs, LENGTH, name="ids")
    table = variable(mesh, "table", VOCAB, H)
    return ids, table, mtf.gather(table, ids, VOCAB)


def predicted(x, ids, table):
    logits = mtf.einsum([x, table], reduced_dims=[H])
    return mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(ids, VOCAB), VOCAB)


def mnist(mesh, inputs):
    """As Mesh-TensorFlow's example: dense layers with bias, by its own layers."""
    x = imported(mesh, inputs, D)
    hidden = mtf.layers.dense(x, H, activation=mtf.relu, name="hidden1")
    hidden = mtf.layers.dense(hidden, mtf.Dimension("h2", 6), activation=mtf.relu, name="hidden2")
    logits = mtf.layers.dense(hidden, VOCAB, name="logits")
    labels = mtf.mod(mtf.range(mesh, x.shape.dims[0], tf.int32), VOCAB.size)
    return mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(labels, VOCAB), VOCAB)


def language_model(mesh, inputs):
    """An embedding that is used twice, and a layer norm."""
    ids, table, x = embedded(mesh, inputs)
    x = mtf.layers.layer_norm(x, H, name="norm")
    return predicted(x, ids, table)


def attention(mesh, inputs):
    ids, table, x = embedded(mesh, inputs)
    size = mtf.Dimension("d_k", 4)
    q, k, v = (
        mtf.einsum([x, variable(mesh, name, H, HEADS, size)], reduced_dims=[H]) for name in "qkv"
    )
    memory = mtf.Dimension("memory", LENGTH.size)
    k, v = (mtf.rename_dimension(y, "length", "memory") for y in (k, v))
    scores = mtf.softmax(mtf.einsum([q, k], reduced_dims=[size]), memory)
    out = mtf.einsum([scores, v], reduced_dims=[memory])
    out = mtf.einsum([out, variable(mesh, "o", H, HEADS, size)], reduced_dims=[HEADS, size])
    return predicted(x + out, ids, table)


def masked_tokens(mesh, inputs):
    ids, table, x = embedded(mesh, inputs)
    return predicted(x, ids, table) * mtf.cast(mtf.greater(ids, 0), tf.float32)


def two_losses(mesh, inputs):
    each = network(mesh, inputs)
    penalty = mtf.add_n(
        [mtf.reduce_sum(mtf.square(v.value)) for v in mesh.graph.trainable_variables]
    )
    return each + penalty * 0.01


def teacher(mesh, inputs):
    x = imported(mesh, inputs, D)
    w, frozen = variable(mesh, "w", D, H), variable(mesh, "frozen", D, H)
    out, target = (mtf.tanh(mtf.einsum([x, y], reduced_dims=[D])) for y in (w, frozen))
    return mtf.reduce_mean(mtf.square(out - mtf.stop_gradient(target)), reduced_dim=H)


def looped(mesh, inputs):
    """A while loop over the activations, without a variable in it."""
    x = imported(mesh, inputs, D)

    def body(i, y):
        return [i + 1, y * 0.9 + 0.1]

    zero = mtf.zeros(mesh, mtf.Shape([]), tf.int32)
    _, x = mtf.while_loop(lambda i, y: mtf.less(i, 3), body, [zero, x])
    w = variable(mesh, "w", D, H)
    return mtf.reduce_mean(mtf.square(mtf.einsum([x, w], reduced_dims=[D])), reduced_dim=H)


def recomputed(mesh, inputs):
    x = imported(mesh, inputs, D)
    w, v = variable(mesh, "w", D, H), variable(mesh, "v", H)

    def layer(y):
        return mtf.tanh(mtf.einsum([y, w], reduced_dims=[D]))

    return mtf.square(mtf.einsum([mtf.recompute_grad(layer, [x]), v], reduced_dims=[H]) - 1.0)


def shifted(mesh, inputs):
    """A causal convolution by shifts along the length."""
    ids, table, x = embedded(mesh, inputs)
    x = x + mtf.shift(x, 1, LENGTH, wrap=False) * variable(mesh, "before", H)
    return predicted(x, ids, table)


def halo(mesh, inputs):
    """Neighbours' edges along a dimension that the mesh splits."""
    x = imported(mesh, inputs, D)
    blocks, block = mtf.Dimension("heads", 2), mtf.Dimension("block", D.size // 2)
    x = mtf.reshape(x, mtf.Shape([x.shape.dims[0], blocks, block]))
    x = mtf.halo_exchange(x, blocks, block, 1)
    wide = x.shape.dims[-1]
    w = variable(mesh, "w", wide, mtf.Dimension("out", 3))
    out = mtf.einsum([x, w], reduced_dims=[wide])
    return mtf.reduce_mean(mtf.square(out - 1.0), output_shape=mtf.Shape([x.shape.dims[0]]))


def gated(mesh, inputs):
    """Experts that lie along the mesh's axis of the batch, and that all examples go to."""
    x = imported(mesh, inputs, D)
    experts, everywhere = mtf.Dimension("experts", 4), mtf.Dimension("choices", 4)
    gates = mtf.einsum([x, variable(mesh, "gate", D, everywhere)], reduced_dims=[D])
    w, v = variable(mesh, "w", experts, D, H), variable(mesh, "v", experts, H)
    # Each expert sees the whole batch, and each example then the answers of all.
    whole = mtf.rename_dimension(x, "batch", "whole")
    hidden = mtf.relu(mtf.einsum([whole, w], reduced_dims=[D]))
    out = mtf.einsum([hidden, v], reduced_dims=[H])
    out = mtf.rename_dimension(mtf.rename_dimension(out, "experts", "choices"), "whole", "batch")
    mixed = mtf.reduce_sum(out * mtf.softmax(gates, everywhere), reduced_dim=everywhere)
    return mtf.square(mixed - 1.0)


def concatenated(mesh, inputs):
    x = imported(mesh, inputs, D)
    w = variable(mesh, "w", D, H)
    hidden = mtf.einsum([x, w], reduced_dims=[D])
    wide = [mtf.rename_dimension(f(hidden), "h", "both") for f in (mtf.tanh, mtf.sigmoid)]
    both = mtf.concat(wide, "both")
    return mtf.reduce_mean(mtf.square(both - 0.5), reduced_dim=both.shape.dims[-1])


def soft(mesh, inputs):
    """Activations that bare placement meshes cannot take after a product that is split."""
    x = imported(mesh, inputs, D)
    x = mtf.einsum([mtf.softplus(mtf.einsum([x, variable(mesh, "w", D, H)], reduced_dims=[D])),
                    variable(mesh, "v", H, mtf.Dimension("out", 3))], reduced_dims=[H])  # fmt: skip
    return mtf.reduce_mean(mtf.softplus(x), reduced_dim=x.shape.dims[-1])


def smoothed(mesh, inputs):
    ids, table, x = embedded(mesh, inputs)
    logits = mtf.einsum([x, table], reduced_dims=[H])
    right = mtf.one_hot(ids, VOCAB) * 0.9 + 0.1 / VOCAB.size
    return mtf.layers.softmax_cross_entropy_with_logits(logits, right, VOCAB, z_loss=1e-3)


def token_mean(mesh, inputs, params):
    """A mean over tokens; microbatches say how many they have."""
    each = network(mesh, inputs)
    weights = imported(mesh, inputs, name="weights") + 0.1
    count = mtf.reduce_sum(weights)
    loss = mtf.reduce_sum(each * weights) / count
    return loss, local(sgd(), params).minimize(loss, weights=count)


def masked_mean(mesh, inputs, params):
    """The same, with the division inside of the sum."""
    each = network(mesh, inputs)
    weights = imported(mesh, inputs, name="weights") + 0.1
    loss = mtf.reduce_sum(each * (weights / mtf.reduce_sum(weights)))
    return loss, cross_shard(sgd(), params).minimize(loss)


def own_clipping(mesh, inputs, params):
    loss = mtf.reduce_mean(network(mesh, inputs))
    grads, variables = gradients(loss, mesh)
    norm = mtf.sqrt(mtf.add_n([mtf.reduce_sum(mtf.square(g)) for g in grads]))
    grads = [g * (0.1 / mtf.maximum(norm, 0.1)) for g in grads]
    return loss, cross_shard(sgd(), params).apply_grads(grads, variables)


def gpt_neo(mesh, inputs, params):
    """Gradients are cast, and clipped by value, before the optimizer gets them."""
    loss = mtf.reduce_mean(language_model(mesh, inputs))
    grads, variables = gradients(loss, mesh)
    grads = [mtf.minimum(mtf.maximum(mtf.cast(g, tf.float32), -1.0), 1.0) for g in grads]
    return loss, models.OPTIMIZERS["adam"]().apply_grads(grads, variables)


def in_float16(mesh, inputs, params):
    """Activations of float16 and a loss scale."""
    x = mtf.cast(imported(mesh, inputs, D), tf.float16)
    w, v = (mtf.cast(variable(mesh, *of), tf.float16) for of in (("w", D, H), ("v", H)))
    out = mtf.einsum([mtf.tanh(mtf.einsum([x, w], reduced_dims=[D])), v], reduced_dims=[H])
    loss = mtf.reduce_mean(mtf.square(mtf.cast(out, tf.float32) - 1.0))
    opt = gs.LossScaleOptimizer(cross_shard(sgd(), params), initial_scale=128.0)
    return loss, opt.minimize(loss)


def counted(mesh, inputs, params):
    """A moving mean and a count of the program's own."""
    each = network(mesh, inputs)
    loss = mtf.reduce_mean(each)
    updates = cross_shard(sgd(), params).minimize(loss)
    for name, new in (("mean", lambda old: old * 0.9 + loss), ("count", lambda old: old + 1.0)):
        kept = mtf.get_variable(
            mesh, name, mtf.Shape([]), initializer=tf.zeros_initializer(), trainable=False
        )
        updates.append(mtf.assign(kept.operation, new(kept)))
    return loss, updates


def serialized(mesh, inputs, params):
    """Microbatches in a loop of Mesh-TensorFlow's."""
    x = imported(mesh, inputs, D)
    batch = x.shape.dims[0]
    w = variable(mesh, "w", D, H)

    def loss_of(part):
        return {
            "loss": mtf.reduce_sum(mtf.square(mtf.einsum([part["x"], w], reduced_dims=[D])))
            / batch.size
        }

    grads, outputs = mtf.serialize_training_step({"x": x}, loss_of, batch, 2)
    return outputs["loss"], cross_shard(sgd(), params).apply_grads(
        grads, mesh.graph.trainable_variables
    )


def by_hand(mesh, inputs, params):
    """No optimizer: gradients that are assigned."""
    loss = mtf.reduce_mean(network(mesh, inputs))
    grads, variables = gradients(loss, mesh)
    grads = gs.sum_shards(grads)
    return loss, [mtf.assign(v, v.value - g * 0.1) for g, v in zip(grads, variables)]


def of_tensorflow(mesh, inputs, params):
    loss = mtf.reduce_mean(network(mesh, inputs))
    opt = gs.MeshOptimizer(tf.train.RMSPropOptimizer(0.01, momentum=0.9))
    return loss, gs.CrossShardOptimizer(opt).minimize(loss)


def averaged(opt, params):
    return gs.AverageOptimizer(gs.CrossShardOptimizer(opt), 0.9)


def sharded(opt, params):
    return local(gs.ShardedUpdateOptimizer(opt, min_size=1, **axes_of(params)), params)


def replicas(opt, params):
    return gs.SyncReplicasOptimizer(opt, 1, **axes_of(params))


def clipped(opt, params):
    return gs.ClipByGlobalNormOptimizer(opt, 0.1)


def own(mesh_of):
    """A model_fn, which makes its mesh and its spec itself."""

    def model_fn(features, labels, mode, params):
        build = gs.estimator.SpecBuilder(mode, params, **axes_of(params))
        loss = mtf.reduce_mean(mesh_of(build.mesh, features))
        opt = gs.CrossShardOptimizer(sgd())
        return build.train(loss, opt.minimize(loss), opt)

    return model_fn


RIGHT: dict[str, Callable[[], Any]] = {
    "mnist": verified(trains(mnist), divisions=("batch", "wrappers")),
    "mnist by Adafactor": in_microbatches(trains(mnist, models.OPTIMIZERS["adafactor"])),
    "language model": verified(trains(language_model, models.OPTIMIZERS["adam"]), tokens),
    "attention over heads": in_microbatches(trains(attention), tokens),
    "tokens that are masked": verified(trains(masked_tokens), tokens),
    "label smoothing and z loss": in_microbatches(trains(smoothed), tokens),
    "shifts along the length": verified(trains(shifted), tokens),
    "halo exchange": verified(trains(halo)),
    "soft experts": in_microbatches(trains(gated)),
    "concatenated halves": verified(trains(concatenated)),
    "softplus of split products": verified(
        trains(soft), divisions=("batch", "wrappers", "runtimes")
    ),
    "penalty of weights": in_microbatches(trains(two_losses)),
    "a teacher that is frozen": verified(trains(teacher)),
    "a while loop": in_microbatches(trains(looped)),
    "recomputed layer": verified(trains(recomputed)),
    "microbatches in a loop": verified(serialized, divisions=("wrappers",)),
    "mean over tokens": verified(token_mean, divisions=("batch", "wrappers")),
    "masked mean": verified(masked_mean, divisions=("batch", "wrappers")),
    "own clipping": verified(own_clipping, divisions=("batch", "wrappers")),
    "GPT-Neo's gradients": verified(gpt_neo, tokens, divisions=("batch", "runtimes")),
    "float16 with a loss scale": verified(in_float16, divisions=("batch", "wrappers")),
    "state of the program's own": verified(counted, divisions=("batch",)),
    "no optimizer": verified(by_hand, divisions=("batch",)),
    "an optimizer of TensorFlow": verified(of_tensorflow, divisions=("batch",)),
    "momentum, two updates": verified(
        trains(network, models.OPTIMIZERS["momentum"], local), steps=2, divisions=("batch",)
    ),
    "averages": verified(trains(network, sgd, averaged), divisions=("microbatches", "wrappers")),
    "sharded updates": verified(
        trains(network, models.OPTIMIZERS["adam"], sharded), divisions=("wrappers",)
    ),
    "replicas": verified(trains(network, sgd, replicas), divisions=("masked", "wrappers")),
    "clipping in the stack": verified(
        trains(network, sgd, clipped), divisions=("batch", "microbatches", "wrappers")
    ),
    "a model_fn": verified(own(network), divisions=("batch", "runtimes")),
}
