"""A program wrapped in a line is compared with the bare one on one processor."""

from __future__ import annotations

import collections
import contextlib
import functools
import zlib
from typing import Any, Callable, Iterator, NamedTuple
from unittest import mock

import numpy as np

import mtf_gradsync as gs
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness

SHAPE = "rows:2;cols:2"
SHARDS, ROWS, STEPS = 2, 4, 4
NORM, DECAY = 0.2, 0.5
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
      gradients: as `mtf.gradients`.
      mixes: whether each shard's gradients depend on the examples of all.
      exchanged: the relative error of what its model exchanges on SIMD meshes.
    """

    layout: str
    loss: Callable[[mtf.Mesh, dict[str, tf.Tensor]], mtf.Tensor]
    feed: Callable[[np.random.RandomState, int], dict[str, np.ndarray]]
    optimizer: Callable[[], Any]
    apply: Callable[..., list[mtf.Operation]] = at_once
    gradients: Callable[..., list[mtf.Tensor]] = mtf.gradients
    mixes: bool = False
    exchanged: float = 0.0


class ClippedByHand:
    """What the reference does in place of the wrapper."""

    def __init__(self, opt):
        self.opt = opt

    def apply_grads(self, grads, variables, *own):
        norm = mtf.sqrt(mtf.add_n([mtf.reduce_sum(mtf.square(g)) for g in grads]))
        factor = NORM / mtf.maximum(norm, NORM)
        return self.opt.apply_grads([g * factor for g in grads], variables, *own)


class SummedInALine:
    """What a program without an optimizer does."""

    def __init__(self, opt):
        self.opt = opt

    def apply_grads(self, grads, variables, *own):
        return self.opt.apply_grads(gs.sum_shards(grads), variables, *own)


class Wrapper(NamedTuple):
    """A wrapper, or some around each other.

    Attributes:
      wrap: makes it around an optimizer; takes the replica axes.
      micro_steps: how many steps make an update.
      nan: what becomes of a NaN in a shard's examples: "shard", "step" or "island" is skipped, ""
        for all.
      reference: what the reference has around its optimizer.
      averages: whether it averages the variables.
    """

    wrap: Callable[[Any, Any], Any]
    micro_steps: int = 1
    nan: str = ""
    reference: Callable[[Any], Any] = lambda opt: opt
    averages: bool = False


def local(opt, axes):
    return gs.GradientAccumulationOptimizer(opt, 2, True, gs.skip_not_finite, axes=axes)


def sharded(opt, axes):
    return gs.ShardedUpdateOptimizer(opt, min_size=1, axes=axes)


def clipped(opt, axes):
    return gs.ClipByGlobalNormOptimizer(sharded(opt, axes), NORM)


WRAPPERS = {
    "bare": Wrapper(lambda opt, axes: opt),
    "sum_shards": Wrapper(lambda opt, axes: SummedInALine(opt)),
    "cross_shard": Wrapper(lambda opt, axes: gs.CrossShardOptimizer(opt)),
    "synced": Wrapper(
        lambda opt, axes: gs.GradientAccumulationOptimizer(opt, 2, True, accumulate="synced"), 2
    ),
    "averages of clipped, sharded updates": Wrapper(
        lambda opt, axes: gs.AverageOptimizer(clipped(opt, axes), DECAY),
        reference=ClippedByHand,
        averages=True,
    ),
    "loss scale of accumulated, sharded updates": Wrapper(
        lambda opt, axes: gs.LossScaleOptimizer(local(sharded(opt, axes), axes)), 2, "step"
    ),
    "accumulated, sharded updates": Wrapper(
        lambda opt, axes: local(sharded(opt, axes), axes), 2, "step"
    ),
    "loss scale": Wrapper(
        lambda opt, axes: gs.LossScaleOptimizer(gs.CrossShardOptimizer(opt), axes=axes), 1, "step"
    ),
    "synced replicas": Wrapper(
        lambda opt, axes: gs.SyncReplicasOptimizer(opt, 1, axes=axes), nan="shard"
    ),
    "synced replicas with clipped updates": Wrapper(
        lambda opt, axes: gs.SyncReplicasOptimizer(
            gs.ClipByGlobalNormOptimizer(opt, NORM), 1, axes=axes
        ),
        nan="shard",
        reference=ClippedByHand,
    ),
    "islands": Wrapper(
        lambda opt, axes: gs.OuterOptimizer(
            opt, STEPS, 1.0, 0.0, leave_out_not_finite=True, axes=axes
        ),
        nan="island",
    ),
}


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


def build(style, wrapped, reads=False):
    """A `harness.Build` of a training step, which reads its variables before if asked to."""

    def made(mesh, inputs):
        each = style.loss(mesh, inputs)
        loss = mtf.reduce_mean(each * imported(mesh, inputs["weights"]))
        variables = list(mesh.graph.trainable_variables)
        grads = style.gradients([loss], [v.value for v in variables])
        fetches = {"loss": loss, **({v.name: v.value for v in variables} if reads else {})}
        return style.apply(wrapped(style.optimizer()), grads, variables), fetches

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


class OnOne(NamedTuple):
    """What a program on one core did.

    Attributes:
      losses: of each step.
      values: of each trainable variable, before each step and after the last.
      variables: all, after the last step.
    """

    losses: np.ndarray
    values: dict[str, list[np.ndarray]]
    variables: dict[str, np.ndarray]


def on_one(style, wrapper, inputs):
    """The bare program on one core, which reads each variable once."""
    found = harness.run("simd", *harness.ONE, build(style, wrapper.reference, True), inputs)
    values = {
        key: [*(step[key] for step in found.fetched), found.variables[key]]
        for key in found.fetched[0]
        if key != "loss"
    }
    return OnOne(np.array([step["loss"] for step in found.fetched]), values, found.variables)


@functools.lru_cache(maxsize=None)
def given_and_expected(style, wrapper):
    """Inputs of the wrapped program, and what it has to do with them, an entry an update."""
    given = feeds(style, STEPS)
    if wrapper.nan == "island":
        half = ROWS // SHARDS
        of_islands = [
            on_one(style, wrapper, [{k: v[half * i :][:half] for k, v in f.items()} for f in given])
            for i in range(SHARDS)
        ]
        given[-1] = with_nan(given[-1])
        # The others' mean.
        losses = np.mean([island.losses for island in of_islands], 0)
        values = {key: value[-1] for key, value in of_islands[0].values.items()}
        return given, OnOne(losses, {}, values)
    several = range(0, STEPS, wrapper.micro_steps)
    expected = [
        {k: np.concatenate([f[k] for f in given[i : i + wrapper.micro_steps]]) for k in given[0]}
        for i in several
    ]
    if wrapper.nan == "step" or (wrapper.nan and style.mixes):
        given.insert(1, with_nan(given[0]))
    elif wrapper.nan == "shard":
        # The mean over the examples of the other shard.
        others = np.where(np.arange(ROWS) < ROWS // SHARDS, SHARDS, 0).astype("f")
        expected[-1] = {**given[-1], "weights": others}
        given[-1] = with_nan(given[-1])
    return given, on_one(style, wrapper, expected)


@contextlib.contextmanager
def noted_sums() -> Iterator[collections.Counter]:
    """Notes the bytes of each group of sums over the shards that a placement mesh builds."""
    noted: collections.Counter = collections.Counter()
    fused, alone = gs.FusedAllReduce.all_reduce, mtf.placement_mesh_impl.PlacementMeshImpl.allreduce

    def note(mesh_axes, tensors):
        if 0 in mesh_axes:
            sizes = [t.shape.num_elements() * t.dtype.size for t in tensors]
            noted[f"sum {len(noted)}"] = sum(sizes)

    def all_reduce(self, mesh_impl, values, groups):
        note(groups.mesh_axes, [x.tensor_list[0] for x in values])
        return fused(self, mesh_impl, values, groups)

    def allreduce(self, x, mesh_axes, *args):
        note(mesh_axes, [x.tensor_list[0]])
        return alone(self, x, mesh_axes, *args)

    placement = mtf.placement_mesh_impl.PlacementMeshImpl
    with mock.patch.object(gs.FusedAllReduce, "all_reduce", all_reduce):
        with mock.patch.object(placement, "allreduce", allreduce):
            yield noted


def sums(made):
    """Of a SIMD program: groups of sums over the shards that reach variables, and their bytes."""
    rows = simd.list_collectives(made.program, lowering=made.lowering).rows
    groups = collections.Counter()
    for row in rows:
        is_sum = row.operation == "CrossReplicaSum" and row.variables
        if "rows" in row.group.split("+") and (is_sum or row.operation == "XlaReduceScatter"):
            groups[row.together or row.name] += row.bytes_per_core
    return groups


def gradient_bytes(lowering):
    """The bytes of all gradients that shards have parts of, on a core."""
    (mesh_impl,) = lowering.mesh_to_impl.values()
    shapes = [v.shape for v in lowering.graph.trainable_variables]
    axes = [[mesh_impl.tensor_dimension_to_mesh_axis(d) for d in s.dims] for s in shapes]
    return sum(4 * mesh_impl.slice_size(s) for s, of in zip(shapes, axes) if 0 not in of)


def check_sums(found, wanted, number, name):
    """Checks that a bare program has a sum for each gradient, and a wrapped one a group for all.

    Args:
      found: the groups of sums, in bytes.
      wanted: the bytes of all gradients.
      number: how many gradients there are.
      name: of the wrapper.
    """
    if name == "bare":
        assert len(found) > 1
        assert sum(found.values()) == wanted, found
        return
    # Parts of variables are scattered, those of the rest are summed.
    groups, others = (3 if "sharded" in name else 1), []
    left = wanted
    for size in sorted(found.values(), reverse=True):
        if groups and size <= left:
            left, groups = left - size, groups - 1 if size < left else 0
        else:
            others.append(size)
    assert not left, (found, wanted)
    # A number of each shard for each gradient: flags.
    assert all(size <= 4 * SHARDS * number for size in others), found


def check(style, name, kind):
    """Trains the wrapped program, twice, and the reference.

    Args:
      style: the program.
      name: of the wrapper.
      kind: as for `harness.run`.
    """
    wrapper = WRAPPERS[name]
    given, expected = given_and_expected(style, wrapper)
    axes = gs.ReplicaAxes(SHAPE, style.layout)
    wrapped = build(style, lambda opt: wrapper.wrap(opt, axes))
    with noted_sums() as noted:
        made = harness.built(kind, SHAPE, style.layout, wrapped, given[0])
    if kind == "placement":
        assert name == "bare" or not made.races()
        first, second = made.runs(given, 2)
    else:
        first, second = made.run(given), made.run(given)
    number = len(expected.values or expected.variables)
    found = noted if kind == "placement" else sums(made)
    check_sums(found, gradient_bytes(made.lowering), number, name)
    tolerance = TOLERANCE + (style.exchanged if kind != "placement" else 0.0)
    got = np.array([step["loss"] for step in first.fetched if np.isfinite(step["loss"])])
    if wrapper.micro_steps > 1:
        got = got.reshape(-1, wrapper.micro_steps).mean(1)
    np.testing.assert_allclose(got, expected.losses[: len(got)], rtol=tolerance)
    wanted = dict(expected.variables)
    if wrapper.averages:
        for key, (average, *values) in expected.values.items():
            for value in values:
                average = average + (1 - DECAY) * (value - average)
            wanted[f"{key}/ExponentialMovingAverage"] = average
    for key, value in wanted.items():
        np.testing.assert_allclose(
            first.variables[key], value, rtol=tolerance, atol=tolerance, err_msg=key
        )
    for key, value in first.variables.items():
        assert np.array_equal(value, second.variables[key]), key
