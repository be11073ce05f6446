"""A program wrapped in a line is compared with the bare one on one processor."""

from __future__ import annotations

import collections
import functools
import zlib
from typing import Any, Callable, NamedTuple

import numpy as np

import mtf_gradsync as gs
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness

SHAPE = "rows:2;cols:2"
SHARDS, ROWS, STEPS = 2, 4, 4
NORM = 0.2
# Of float32: some dozen layers' terms, with Adam's quotients of small numbers.
TOLERANCE = STEPS * 2.0**9 * np.finfo(np.float32).eps


def at_once(optimizer, grads, variables):
    """As most programs apply gradients."""
    return optimizer.apply_grads(grads, variables)


class Style(NamedTuple):
    """A program.

    Attributes:
      layout: of the mesh `SHAPE`.
      loss: makes the loss of each example from the mesh and the inputs, of which each begins with
        the examples.
      feed: makes the inputs of a step from random numbers and the number of examples.
      optimizer: makes the bare optimizer.
      apply: applies gradients to variables by an optimizer.
      exchanged: the relative error of what its model exchanges on SIMD meshes.
    """

    layout: str
    loss: Callable[[mtf.Mesh, dict[str, tf.Tensor]], mtf.Tensor]
    feed: Callable[[np.random.RandomState, int], dict[str, np.ndarray]]
    optimizer: Callable[[], Any]
    apply: Callable[..., list[mtf.Operation]] = at_once
    exchanged: float = 0.0


class ClippedByHand:
    """What the reference does in place of the wrapper."""

    def __init__(self, opt):
        self.opt = opt

    def apply_grads(self, grads, variables):
        norm = mtf.sqrt(mtf.add_n([mtf.reduce_sum(mtf.square(g)) for g in grads]))
        factor = NORM / mtf.maximum(norm, NORM)
        return self.opt.apply_grads([g * factor for g in grads], variables)


class Wrapper(NamedTuple):
    """A wrapper.

    Attributes:
      wrap: makes it around an optimizer; takes the replica axes.
      micro_steps: how many steps make an update.
      nan: what becomes of a NaN in a shard's examples: "shard" or "step" is skipped, "" for all.
      reference: what the reference has around its optimizer.
    """

    wrap: Callable[[Any, Any], Any]
    micro_steps: int = 1
    nan: str = ""
    reference: Callable[[Any], Any] = lambda opt: opt


WRAPPERS = {
    "cross_shard": Wrapper(lambda opt, axes: gs.CrossShardOptimizer(opt)),
    "local": Wrapper(
        lambda opt, axes: gs.GradientAccumulationOptimizer(
            opt, 2, True, gs.skip_not_finite, axes=axes
        ),
        2, "step",
    ),
    "synced": Wrapper(
        lambda opt, axes: gs.GradientAccumulationOptimizer(opt, 2, True, accumulate="synced"), 2
    ),
    "sync_replicas": Wrapper(
        lambda opt, axes: gs.SyncReplicasOptimizer(opt, 1, axes=axes), nan="shard"
    ),
    "clip": Wrapper(
        lambda opt, axes: gs.ClipByGlobalNormOptimizer(opt, NORM), reference=ClippedByHand
    ),
    "loss_scale": Wrapper(
        lambda opt, axes: gs.LossScaleOptimizer(gs.CrossShardOptimizer(opt), axes=axes), 1, "step"
    ),
}  # fmt: skip


def variable(mesh, name, *dims):
    """A variable whose first value is known by its name."""
    rng = np.random.RandomState(zlib.crc32(name.encode()))
    value = rng.uniform(-0.5, 0.5, [d.size for d in dims])
    start = tf.constant_initializer(value)
    return mtf.get_variable(mesh, name, mtf.Shape(list(dims)), initializer=start)


def imported(mesh, tensor, *dims):
    """An input; its first dimension is the batch."""
    batch = mtf.Dimension("batch", tensor.shape.as_list()[0])
    return mtf.import_tf_tensor(mesh, tensor, mtf.Shape([batch, *dims]))


def normed(x, dim, name):
    """A layer norm."""
    x -= mtf.reduce_mean(x, reduced_dim=dim)
    x *= mtf.rsqrt(mtf.reduce_mean(mtf.square(x), reduced_dim=dim) + 1e-3)
    return x * (1.0 + variable(x.mesh, f"{name}/scale", dim)) + variable(x.mesh, f"{name}/b", dim)


def mixed(query, memory, d, heads, size, name, mask=None):
    """Attention of one sequence to another, whose length is called "memory"."""
    mesh, per_head = query.mesh, [heads, size]
    q, k, v = (
        mtf.einsum([x, variable(mesh, f"{name}/{n}", d, *per_head)], reduced_dims=[d])
        for n, x in (("q", query), ("k", memory), ("v", memory))
    )
    scores = mtf.einsum([q, k], reduced_dims=[size])
    scores = scores if mask is None else scores + mask
    length = next(x for x in scores.shape.dims if x.name == "memory")
    out = mtf.einsum([mtf.softmax(scores, length), v], reduced_dims=[length])
    return mtf.einsum([out, variable(mesh, f"{name}/o", d, *per_head)], reduced_dims=per_head)


def build(style, wrapped):
    """A `harness.Build` of a training step."""

    def made(mesh, inputs):
        each = style.loss(mesh, inputs)
        loss = mtf.reduce_mean(each * imported(mesh, inputs["weights"]))
        variables = list(mesh.graph.trainable_variables)
        grads = mtf.gradients([loss], [v.value for v in variables])
        return style.apply(wrapped(style.optimizer()), grads, variables), {"loss": loss}

    return made


def feeds(style, number):
    """Inputs; all examples count alike."""
    rng = np.random.RandomState(0)
    return [{**style.feed(rng, ROWS), "weights": np.ones(ROWS, "f")} for _ in range(number)]


def with_nan(feed):
    """The same with a NaN in the last shard."""
    weights = feed["weights"].copy()
    weights[-1] = np.nan
    return {**feed, "weights": weights}


def given_and_expected(style, wrapper):
    """Inputs of the wrapped program, and of the reference, one a step and one an update."""
    given = feeds(style, STEPS)
    several = range(0, STEPS, wrapper.micro_steps)
    expected = [
        {k: np.concatenate([f[k] for f in given[i : i + wrapper.micro_steps]]) for k in given[0]}
        for i in several
    ]
    if wrapper.nan == "step":
        given.insert(1, with_nan(given[0]))
    elif wrapper.nan == "shard":
        # The mean over the examples of the other shard.
        others = np.where(np.arange(ROWS) < ROWS // SHARDS, SHARDS, 0).astype("f")
        expected[-1] = {**given[-1], "weights": others}
        given[-1] = with_nan(given[-1])
    return given, expected


@functools.lru_cache(maxsize=None)
def on_one(style, wrapper):
    """Losses and variables of the bare program on one core, which reads each variable once."""
    _, inputs = given_and_expected(style, wrapper)
    found = harness.run("simd", *harness.ONE, build(style, wrapper.reference), inputs)
    return [step["loss"] for step in found.fetched], found.variables


def sums(made):
    """Of a program: the groups of sums over the shards that reach variables, and their bytes."""
    rows = simd.list_collectives(made.program, lowering=made.lowering).rows
    groups = collections.Counter()
    for row in rows:
        is_sum = row.operation == "CrossReplicaSum" and "rows" in row.group.split("+")
        if row.variables and is_sum:
            groups[row.together or row.name] += row.bytes_per_core
    return groups


def gradient_bytes(lowering):
    """The bytes of all gradients that shards have parts of, on a core."""
    (mesh_impl,) = lowering.mesh_to_impl.values()
    shapes = [v.shape for v in lowering.graph.trainable_variables]
    axes = [[mesh_impl.tensor_dimension_to_mesh_axis(d) for d in s.dims] for s in shapes]
    return sum(4 * mesh_impl.slice_size(s) for s, of in zip(shapes, axes) if 0 not in of)


def check(style, name, kind, groups=0):
    """Trains the wrapped program, twice, and the reference.

    Args:
      style: the program.
      name: of the wrapper.
      kind: as for `harness.run`.
      groups: how many groups of sums over the shards reach variables, in SIMD programs.
    """
    wrapper = WRAPPERS[name]
    given, _ = given_and_expected(style, wrapper)
    axes = gs.ReplicaAxes(SHAPE, style.layout)
    wrapped = build(style, lambda opt: wrapper.wrap(opt, axes))
    made = harness.built(kind, SHAPE, style.layout, wrapped, given[0])
    if kind == "placement":
        assert not made.races()
        first, second = made.runs(given, 2)
    else:
        first, second = made.run(given), made.run(given)
        found = sums(made)
        assert len(found) == groups, found
        wanted = gradient_bytes(made.lowering)
        assert max(found.values()) == wanted, (found, wanted)
    tolerance = TOLERANCE + (style.exchanged if kind != "placement" else 0.0)
    losses, variables = on_one(style, wrapper)
    got = np.array([step["loss"] for step in first.fetched if np.isfinite(step["loss"])])
    if wrapper.nan != "shard":
        got = got.reshape(-1, wrapper.micro_steps).mean(1)
    np.testing.assert_allclose(got, losses[: len(got)], rtol=tolerance)
    for key, value in variables.items():
        np.testing.assert_allclose(
            first.variables[key], value, rtol=tolerance, atol=tolerance, err_msg=key
        )
    for key, value in first.variables.items():
        assert np.array_equal(value, second.variables[key]), key
