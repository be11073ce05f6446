"""Replica axes are found out where the batch is not called "batch"."""

import collections
import logging

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models

ROWS, INNER, OUTER = (mtf.Dimension(*x) for x in (("rows", 8), ("inner", 2), ("outer", 4)))
LENGTH, D, HIDDEN = (mtf.Dimension(*x) for x in (("length", 4), ("d", 3), ("hidden", 8)))
IN = mtf.Dimension("in", 3)
EXPERTS, CAPACITY = mtf.Dimension("experts", 4), mtf.Dimension("capacity", 2)
ALL, TWO_AXES = "all:4", "a:2;b:2"
BLOCKS = 2


def sgd():
    return mtf.optimize.SgdOptimizer(0.1)


def cross_shard(**kwargs):
    return gs.CrossShardOptimizer(sgd(), **kwargs)


def data(mesh, *dims):
    shape = mtf.Shape([*dims, D])
    return mtf.import_tf_tensor(mesh, tf.ones(shape.to_integer_list), shape)


def laid_out(mesh, *dims):
    """As an infeed's, of the mesh that the program has made."""
    whole = data(mesh, *dims)
    (mesh_impl,) = tf.get_collection(("mtf_gradsync meshes",))
    value = mesh_impl.import_tf_tensor(whole, tf.ones(whole.shape.to_integer_list))
    return mtf.import_laid_out_tensor(mesh, value.to_laid_out_tensor(), whole.shape)


def replicated(mesh, *dims):
    shape = mtf.Shape([*dims, D])
    return mtf.import_fully_replicated(mesh, tf.ones(shape.to_integer_list), shape)


def variable(mesh, name, *dims):
    return models.variable(mesh, name, dims, 1)


def blocks(x):
    """Blocks of a norm and a feed-forward layer; each variable's gradient is a sum of its own."""
    mesh, dims = x.mesh, x.shape.dims[:-1]
    for i in range(BLOCKS):
        y = x * mtf.rsqrt(mtf.reduce_mean(mtf.square(x), reduced_dim=D) + 1e-6)
        y = mtf.einsum([y * variable(mesh, f"s{i}", D), variable(mesh, f"w{i}", D, HIDDEN)])
        x += mtf.einsum([mtf.relu(y), variable(mesh, f"u{i}", HIDDEN, D)], [*dims, D])
    return x


def loss_of(x):
    return mtf.reduce_mean(mtf.square(blocks(x)))


def microbatches(mesh):
    def model(features):
        return {"loss": loss_of(features["x"])}

    return mtf.serialize_training_step({"x": data(mesh, ROWS)}, model, ROWS, 2)[0]


def cut_after_a_layer(mesh):
    x = mtf.einsum([data(mesh, ROWS), variable(mesh, "first", D, IN)], [ROWS, IN])
    x = mtf.rename_dimension(x, "in", "d")
    return loss_of(mtf.reshape(x, mtf.Shape([OUTER, INNER, D])))


def with_experts(mesh):
    x = data(mesh, ROWS)
    y = mtf.reshape(x * variable(mesh, "gate", D), mtf.Shape([EXPERTS, CAPACITY, D]))
    y = mtf.einsum([y, variable(mesh, "expert", EXPERTS, D, HIDDEN)], [EXPERTS, CAPACITY, HIDDEN])
    y = mtf.reduce_sum(mtf.tanh(y), reduced_dim=HIDDEN)
    y = mtf.reshape(y, mtf.Shape([ROWS]))
    return loss_of(x + y)


def with_positions(mesh):
    return loss_of(data(mesh, ROWS, LENGTH) + variable(mesh, "positions", LENGTH, D))


PROGRAMS = {
    "rows": (lambda mesh: loss_of(data(mesh, ROWS)), ALL, "rows:all", ["rows"]),
    "laid out": (lambda mesh: loss_of(laid_out(mesh, ROWS)), ALL, "rows:all", ["rows"]),
    "replicated": (lambda mesh: loss_of(replicated(mesh, ROWS)), ALL, "rows:all", ["rows"]),
    "a layout of others": (
        lambda mesh: loss_of(data(mesh, ROWS)),
        TWO_AXES,
        "batch:a;rows:b",
        ["rows"],
    ),
    "two dimensions": (
        lambda mesh: loss_of(data(mesh, OUTER, INNER)),
        TWO_AXES,
        "outer:a;inner:b",
        ["outer", "inner"],
    ),
    "cut on the way": (cut_after_a_layer, TWO_AXES, "outer:a;inner:b", ["outer", "inner"]),
    "sequences": (
        lambda mesh: loss_of(data(mesh, ROWS, LENGTH)),
        TWO_AXES,
        "rows:a;length:b",
        ["rows", "length"],
    ),
    "positions": (with_positions, TWO_AXES, "rows:a;length:b", ["rows"]),
    "model parallel": (
        lambda mesh: loss_of(data(mesh, ROWS)),
        TWO_AXES,
        "rows:a;hidden:b",
        ["rows"],
    ),
    "experts": (with_experts, ALL, "rows:all;experts:all", ["rows"]),
    "microbatches": (microbatches, ALL, "rows:all", ["rows"]),
    "no split": (lambda mesh: loss_of(data(mesh, ROWS)), ALL, "", ["rows"]),
}


def sums(make_loss, mesh_shape, layout, make):
    """Groups of the sums of gradients of a step: their shapes, and who sums."""

    def build(mesh, inputs):
        grads = make_loss(mesh)
        variables = mesh.graph.trainable_variables
        if isinstance(grads, mtf.Tensor):
            grads = mtf.gradients([grads], [v.value for v in variables])
        return make().apply_grads(grads, variables), {}

    groups = collections.defaultdict(list)
    for row in harness.built("simd", mesh_shape, layout, build, {}).collectives().rows:
        if np.prod(row.shape) >= 3:
            groups[row.together or row.name].append((row.shape, row.group))
    return sorted(sorted(group) for group in groups.values())


@pytest.mark.parametrize("what", list(PROGRAMS))
@pytest.mark.mostly_slow(every=3)
def test_a_batch_of_any_name_is_summed_as_one_that_was_named(what):
    make_loss, mesh, layout, names = PROGRAMS[what]
    named = sums(make_loss, mesh, layout, lambda: cross_shard(batch_dims=names))
    assert sums(make_loss, mesh, layout, cross_shard) == named


def test_a_dimension_of_the_batch_that_a_variable_has_too():
    assert len(sums(with_positions, ALL, "length:all", cross_shard)) == 1


WRAPPERS = {
    "CrossShardOptimizer": cross_shard,
    "ClipByGlobalNormOptimizer": lambda: gs.ClipByGlobalNormOptimizer(sgd(), 1.0),
    "synced": lambda: gs.GradientAccumulationOptimizer(sgd(), 2),
}


@pytest.mark.parametrize("wrapper", list(WRAPPERS))
def test_one_sum_and_one_warning_that_names_the_dimensions(wrapper, caplog):
    make_loss, mesh, layout, _ = PROGRAMS["rows"]
    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        assert len(sums(make_loss, mesh, layout, WRAPPERS[wrapper])) == 1
    (record,) = [r for r in caplog.records if "batch_dims" in r.getMessage()]
    assert "['batch']" in record.getMessage()
    assert "('rows',)" in record.getMessage()


def test_a_batch_that_was_said_not_to_be_split_is_not_looked_for(caplog):
    make_loss, mesh, layout, _ = PROGRAMS["rows"]
    sums(make_loss, mesh, layout, lambda: cross_shard(batch_dims=()))
    assert not [r for r in caplog.records if "batch_dims" in r.getMessage()]


def other_axes():
    return gs.ReplicaAxes(TWO_AXES, "batch:a;rows:b")


PROMISES = {
    "SyncReplicasOptimizer": lambda g, v: gs.SyncReplicasOptimizer(
        sgd(), 2, axes=other_axes()
    ).apply_grads(g, v),
    "accept_summed": lambda g, v: gs.SyncReplicasOptimizer(
        sgd(), 2, axes=other_axes(), accept_summed=True
    ).apply_grads(g, v),
    "local": lambda g, v: gs.GradientAccumulationOptimizer(sgd(), 2, axes=other_axes()).apply_grads(
        g, v
    ),
    "per_shard": lambda g, v: gs.per_shard(g, other_axes()),
    "clip_by_shard_norm": lambda g, v: gs.clip_by_shard_norm(g, 1.0, other_axes()),
}


@pytest.mark.parametrize("what", list(PROMISES))
def test_a_batch_of_another_name_is_an_error_where_shards_matter(what):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    loss = loss_of(data(mesh, ROWS))
    grads, variables = models.gradients(loss)
    words = r"\['batch'\] of batch_dims.*\['rows'\]"
    with harness.unchanged(mesh.graph), pytest.raises(ValueError, match=words):
        PROMISES[what](grads, variables)


def test_each_mesh_of_a_graph_has_replica_axes_of_its_own(monkeypatch):
    """One program's batch is called "batch", and the other's is not."""
    graph = mtf.Graph()
    meshes = {name: mtf.Mesh(graph, name) for name in ("first", "second")}
    operations = []
    for (name, mesh), dim in zip(meshes.items(), (mtf.Dimension("batch", 8), ROWS)):
        with tf.variable_scope(name):
            loss = loss_of(data(mesh, dim))
        variables = [v for v in graph.trainable_variables if v.mesh is mesh]
        grads = mtf.gradients([loss], [v.value for v in variables])
        operations += cross_shard(name=name).apply_grads(grads, variables)
    impls = [harness.placement("all:2", f"{name}:all") for name in ("batch", "rows")]
    alone = []
    for impl in impls:  # whose own sums do not cross with others

        def one(x, *how, made=impl.allreduce):
            alone.append(np.prod(x.slice_shape))
            return made(x, *how)

        monkeypatch.setattr(impl, "allreduce", one)
    lowering = mtf.Lowering(graph, dict(zip(meshes.values(), impls)))
    for op in operations:
        lowering.lowered_operation(op)
    assert set(alone) == {1}, "the losses"
