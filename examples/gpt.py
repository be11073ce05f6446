"""Trains a small GPT on Python's documentation, written as users of GPT-Neo write theirs.

The model computes in bfloat16 and in microbatches (`mtf.serialize_training_step`). Its
`get_optimizer(mesh, loss, params, ...)` casts the gradients, clips them and gives the optimizer a
learning rate that is an mtf scalar. One line wraps the optimizer: where
`tf.tpu.CrossShardOptimizer` around a Mesh-TensorFlow optimizer is a TypeError, this one works on
every mesh.

    python examples/gpt.py
"""

import argparse

import numpy as np
from tqdm import trange

import mtf_gradsync as gs
from mtf_gradsync.tools.train.data.texts import read_python_topics as read_python_topics

# isort: split
# After mtf_gradsync, which makes it importable on TensorFlow 2.13 and later.
import mesh_tensorflow as mtf
import tensorflow.compat.v1 as tf

PARAMS = {
    "n_ctx": 64,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_vocab": 256,  # bytes
    "train_batch_size": 16,
    "num_microbatches": 2,
    "lr": 3e-3,
    "warmup_steps": 20,
    "train_steps": 200,
    "gradient_clipping": 1.0,
    "mesh_shape": "x:4,y:2",
    "layout": "batch:x,memory_length:y,embd:y",
}


def norm(x, name, dtype):
    """Layer normalization."""
    dim = x.shape.dims[-1]
    with tf.variable_scope(name):
        g = mtf.get_variable(x.mesh, "g", [dim], dtype, initializer=tf.ones_initializer())
        b = mtf.get_variable(x.mesh, "b", [dim], dtype, initializer=tf.zeros_initializer())
        x -= mtf.reduce_mean(x, reduced_dim=dim)
        variance = mtf.reduce_mean(mtf.square(x), reduced_dim=dim)
        return x * mtf.rsqrt(variance + 1e-5) * g + b


def linear(x, name, dims_in, dims_out, dtype):
    """Multiplies by a weight, each side of which may have several dimensions."""
    scale = np.prod([d.size for d in dims_in]) ** -0.5
    w = mtf.get_variable(
        x.mesh, name, [*dims_in, *dims_out], dtype,
        initializer=tf.random_normal_initializer(stddev=scale),
    )  # fmt: skip
    return mtf.einsum([x, w], [d for d in x.shape.dims if d not in dims_in] + dims_out)


def block(x, name, params, dtype):
    """Attention and a feed-forward pair, each with layer normalization and a residual sum."""
    embd, length = x.shape.dims[-1], x.shape.dims[-2]
    heads = mtf.Dimension("heads", params["n_head"])
    key = mtf.Dimension("key", params["n_embd"] // params["n_head"])
    hidden = mtf.Dimension("hidden", 4 * params["n_embd"])
    memory = mtf.Dimension("memory_length", length.size)
    with tf.variable_scope(name):
        h = norm(x, "norm_1", dtype)
        q, k, v = (linear(h, n, [embd], [heads, key], dtype) for n in ("q", "k", "v"))
        k, v = (mtf.rename_dimension(t, length.name, memory.name) for t in (k, v))
        batch = x.shape.dims[0]
        scores = mtf.einsum([q, k], [batch, heads, length, memory]) * key.size**-0.5
        seen = mtf.greater_equal(
            mtf.range(x.mesh, length, tf.int32), mtf.range(x.mesh, memory, tf.int32)
        )
        scores += (1.0 - mtf.cast(seen, scores.dtype)) * -1e4
        a = mtf.einsum([mtf.softmax(scores, memory), v], [batch, length, heads, key])
        x += linear(a, "o", [heads, key], [embd], dtype)
        h = mtf.gelu(linear(norm(x, "norm_2", dtype), "up", [embd], [hidden], dtype))
        return x + linear(h, "down", [hidden], [embd], dtype)


def model(features, params, dtype):
    """The loss of a batch."""
    tokens, targets = features["inputs"], features["targets"]
    mesh, length = tokens.mesh, tokens.shape.dims[-1]
    embd = mtf.Dimension("embd", params["n_embd"])
    vocab = mtf.Dimension("vocab", params["n_vocab"])
    normal = tf.random_normal_initializer(stddev=1.0)
    wte = mtf.get_variable(mesh, "wte", [vocab, embd], dtype, initializer=normal)
    wpe = mtf.get_variable(mesh, "wpe", [length, embd], dtype, initializer=normal)
    x = mtf.gather(wte, tokens, vocab) * 0.1 + wpe * 0.1
    for layer in range(params["n_layer"]):
        x = block(x, f"h{layer}", params, dtype)
    logits = mtf.einsum([norm(x, "norm_f", dtype), wte], [*tokens.shape.dims, vocab])
    logits = mtf.cast(logits, tf.float32) * params["n_embd"] ** -0.5
    losses = mtf.layers.softmax_cross_entropy_with_logits(
        logits, mtf.one_hot(targets, vocab), vocab
    )
    # Losses of microbatches are summed: their sum must be the mean over the batch.
    return mtf.reduce_mean(losses) / params["num_microbatches"]


def clip_by_global_norm(grads, clip_norm):
    """Scales gradients so that their norm is at most clip_norm."""
    squares = mtf.add_n([mtf.reduce_sum(mtf.square(g)) for g in grads])
    multiplier = clip_norm / mtf.maximum(mtf.sqrt(squares), clip_norm)
    return [g * multiplier for g in grads]


def get_optimizer(mesh, loss, params, inp_var_grads=None):
    """The learning rate and the update operations."""
    variables = mesh.graph.trainable_variables
    grads = inp_var_grads or mtf.gradients([loss], [v.outputs[0] for v in variables])
    step = tf.cast(tf.train.get_or_create_global_step(), tf.float32)
    warm = tf.minimum(1.0, (step + 1) / params["warmup_steps"])
    lr = warm * tf.train.cosine_decay(params["lr"], step, params["train_steps"], alpha=0.1)
    lr = mtf.import_fully_replicated(mesh, lr, mtf.Shape([]), name="learning_rate")
    optimizer = mtf.optimize.AdamWeightDecayOptimizer(learning_rate=lr, beta_2=0.95)
    optimizer = gs.CrossShardOptimizer(optimizer)  # the line to add
    grads = [mtf.cast(g, tf.float32) for g in grads]
    clip_norm = mtf.constant(mesh, params["gradient_clipping"], dtype=tf.float32)
    grads = clip_by_global_norm(grads, clip_norm)
    return lr, optimizer.apply_grads(grads, variables)


def train(params, steps):
    """Trains, and returns the loss of every step."""
    text = np.frombuffer(b"\n".join(read_python_topics().values()), np.uint8)
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        shape = [params["train_batch_size"], params["n_ctx"]]
        inputs = {name: tf.placeholder(tf.int32, shape) for name in ("inputs", "targets")}
        mesh_shape = mtf.convert_to_shape(params["mesh_shape"])
        mesh_impl = mtf.placement_mesh_impl.PlacementMeshImpl(
            mesh_shape,
            mtf.convert_to_layout_rules(params["layout"]),
            [f"/device:CPU:{i}" for i in range(mesh_shape.size)],
        )
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        batch = mtf.Dimension("batch", shape[0])
        dims = [batch, mtf.Dimension("length", shape[1])]
        features = {n: mtf.import_fully_replicated(mesh, x, dims) for n, x in inputs.items()}
        dtype = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)
        grads, outputs = mtf.serialize_training_step(
            features,
            lambda part: {"loss": model(part, params, dtype)},
            batch,
            params["num_microbatches"],
        )
        _, updates = get_optimizer(mesh, outputs["loss"], params, inp_var_grads=grads)
        lowering = mtf.Lowering(graph, {mesh: mesh_impl})
        loss = lowering.export_to_tf_tensor(outputs["loss"])
        update = [lowering.lowered_operation(op) for op in updates]
        with tf.control_dependencies(update):  # updates read the step for the learning rate
            update.append(tf.assign_add(tf.train.get_or_create_global_step(), 1))
        losses = []
        copy_masters = lowering.copy_masters_to_slices()
        with tf.Session(config=gs.session_config(num_cpu_devices=mesh_shape.size)) as session:
            session.run(tf.global_variables_initializer())
            session.run(copy_masters)
            progress = trange(steps)
            for step in progress:
                begins = np.random.RandomState(step).randint(0, len(text) - shape[1] - 1, shape[0])
                words = np.stack([text[b : b + shape[1] + 1] for b in begins])
                feed = {inputs["inputs"]: words[:, :-1], inputs["targets"]: words[:, 1:]}
                losses.append(session.run([loss, update], feed)[0])
                progress.set_postfix(loss=f"{losses[-1]:.2f}", refresh=False)
    return losses


def main(steps):
    """Trains, and prints the losses."""
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    tf.enable_resource_variables()  # ref variables race on a mesh
    losses = train(PARAMS, steps)
    last = losses[-max(1, len(losses) // 10) :]
    print(f"loss of the first step: {losses[0]:.2f}, of the last tenth: {np.mean(last):.2f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=PARAMS["train_steps"])
    main(parser.parse_args().steps)
