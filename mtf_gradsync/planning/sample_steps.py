"""Training steps in Mesh-TensorFlow, batch and model parallel, to measure a machine with."""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.cross_shard import CrossShardOptimizer
from mtf_gradsync.simd.program import Program, tpu_program

Mesh = tuple[int, int]
_HEADS = 4
_VOCAB = 256
_LAYOUT = "batch:batch;heads:model;hidden:model;vocab:model"


class Size(NamedTuple):
    """How large a step of a decoder-only transformer is."""

    layers: int  # blocks of attention and a dense part
    width: int  # of the vectors
    batch: int  # sequences of all cores together
    length: int  # tokens in a sequence


class Samples(NamedTuple):
    """Steps of about one length; their sizes differ in what takes most of the time.

    That is products, passes over memory, or new memory (see `Work.new_bytes`).
    """

    sizes: tuple[Size, ...]
    rounds: int  # how often each is measured


# Of about 0.1 s. What a shorter step takes is mostly what it costs to begin one.
_SHORT = Samples(
    (Size(2, 128, 32, 64), Size(1, 256, 16, 64), Size(2, 192, 16, 64), Size(3, 96, 16, 128)),
    rounds=8,
)
# Of about 3 s. Bytes cost more where neither caches nor the C library keep them from step to step.
_LONG = Samples((Size(1, 512, 64, 256), Size(2, 384, 48, 256)), rounds=2)
# Floating-point operations of all cores in the shorter one of these two.
_LONG_FLOPS = 2.8e11


class SampleStep(NamedTuple):
    """A step that was built."""

    program: Program
    lowering: mtf.Lowering
    loss: tf.Tensor  # the update runs with it
    feed: dict[tf.Tensor, np.ndarray]


def samples_like(flops: float) -> Samples:
    """The steps that tell most of one with so many floating-point operations of all cores."""
    return _LONG if flops >= _LONG_FLOPS else _SHORT


def choose(count: int, sizes: Sequence[Size]) -> list[tuple[Mesh, Size]]:
    """Meshes of batch and model, each with a size, of the steps to run on up to `count` devices.

    They are on few cores, on half of all and on all, each divided in every way that heads allow.
    """
    cores = sorted({n for n in (1, 2, 4, count // 2, count) if n and count % n == 0})
    meshes = [(n // model, model) for n in cores for model in (1, 2, _HEADS) if n % model == 0]
    return [(mesh, size) for size in sizes for mesh in meshes]


def build(mesh: Mesh, size: Size) -> SampleStep:
    """Builds a step in a graph of its own; a batch that the mesh does not divide is made larger."""
    # Every core has the same number of sequences.
    shape = (-(-size.batch // mesh[0]) * mesh[0], size.length)
    with tf.Graph().as_default():
        tokens = tf.placeholder(tf.int32, shape)
        with tpu_program(f"batch:{mesh[0]};model:{mesh[1]}", _LAYOUT) as program:
            loss = _loss(mtf.Mesh(mtf.Graph(), "mesh"), tokens, size)
            variables = loss.mesh.graph.trainable_variables
            grads = mtf.gradients([loss], [variable.outputs[0] for variable in variables])
            inner = mtf.optimize.AdafactorOptimizer(learning_rate=0.01)
            updates = CrossShardOptimizer(inner).apply_grads(grads, variables)
            lowering = mtf.Lowering(loss.mesh.graph, {loss.mesh: program.mesh_impl})
            loss = tf.cast(lowering.export_to_tf_tensor(loss), tf.float32)
            with tf.control_dependencies([lowering.lowered_operation(op) for op in updates]):
                loss = tf.identity(loss)
    batch = np.random.RandomState(0).randint(0, _VOCAB, shape)
    return SampleStep(program, lowering, loss, {tokens: batch.astype("i")})


def _loss(mesh: mtf.Mesh, tokens: tf.Tensor, size: Size) -> mtf.Tensor:
    """Predicts each token from those before it, by the embedding's transpose."""
    dims = [mtf.Dimension(*dim) for dim in zip(("batch", "length"), tokens.shape.as_list())]
    batch, length = dims
    before = mtf.Dimension("before", length.size)
    vocab, width = mtf.Dimension("vocab", _VOCAB), mtf.Dimension("width", size.width)
    heads, depth = mtf.Dimension("heads", _HEADS), mtf.Dimension("depth", size.width // _HEADS)
    hidden = mtf.Dimension("hidden", 4 * size.width)

    def weight(name: str, *dims: mtf.Dimension) -> mtf.Tensor:
        start = tf.random_normal_initializer(stddev=size.width**-0.5)
        return mtf.get_variable(mesh, name, mtf.Shape(dims), initializer=start)

    def normed(x: mtf.Tensor, name: str) -> mtf.Tensor:
        scale = weight(name, width) + 1.0
        return x * mtf.rsqrt(mtf.reduce_mean(mtf.square(x), reduced_dim=width) + 1e-6) * scale

    ids = mtf.import_tf_tensor(mesh, tokens, mtf.Shape(dims))
    embedding = weight("embedding", vocab, width)
    x = mtf.gather(embedding, ids, vocab)
    steps = [mtf.range(mesh, dim, tf.int32) for dim in (length, before)]
    later = mtf.cast(mtf.less(*steps, mtf.Shape([length, before])), tf.float32) * -1e9
    for layer in range(size.layers):
        with tf.variable_scope(f"layer_{layer}"):
            y = normed(x, "scale_attention")
            query, key, value = (
                mtf.einsum([y, weight(n, width, heads, depth)], [batch, length, heads, depth])
                for n in ("query", "key", "value")
            )
            key, value = (mtf.rename_dimension(t, "length", "before") for t in (key, value))
            scores = mtf.einsum([query, key], [batch, heads, length, before])
            shares = mtf.softmax(scores * depth.size**-0.5 + later, before)
            mixed = mtf.einsum([shares, value], [batch, length, heads, depth])
            x += mtf.einsum([mixed, weight("back", heads, depth, width)], [batch, length, width])
            y = normed(x, "scale_dense")
            y = mtf.relu(mtf.einsum([y, weight("in", width, hidden)], [batch, length, hidden]))
            x += mtf.einsum([y, weight("out", hidden, width)], [batch, length, width])
    logits = mtf.einsum([normed(x, "scale"), embedding], [batch, length, vocab])
    predicted = mtf.shift(ids, -1, length, wrap=True)
    losses = mtf.layers.softmax_cross_entropy_with_logits(
        logits, mtf.one_hot(predicted, vocab, dtype=tf.float32), vocab
    )
    return mtf.reduce_mean(losses)
