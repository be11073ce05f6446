"""Mesh-TF models as SIMD programs: same numbers as one processor and as float64."""

import functools
import itertools

import numpy as np
import pytest

import mtf_gradsync
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness

from . import programs
from .programs import EPS, MESHES, SGD, Regression

pytestmark = pytest.mark.usefixtures("runtime")

# A power of two: with it, two steps on small integers need no more than the 24 bits of float32.
RATE = 2.0**-4


@pytest.mark.parametrize(("mesh", "microbatches"), harness.pairs(MESHES, [1, 2]))
def test_equals_float64_exactly_where_float32_is_exact(mesh, microbatches):
    model = Regression(lambda: SGD(RATE), steps=2, microbatches=microbatches)
    losses, variables = model.on_simd(*MESHES[mesh])
    wanted_losses, wanted = model.in_numpy(RATE)
    np.testing.assert_array_equal(losses, wanted_losses)
    np.testing.assert_array_equal(variables["w"], wanted)


OPTIMIZERS = {
    "adam": mtf.optimize.AdamWeightDecayOptimizer,
    "adafactor": mtf.optimize.AdafactorOptimizer,
}


@functools.lru_cache(maxsize=None)
def one_processor(optimizer, rate):
    """A model, and what one processor makes of it."""
    # Behind a gate, because bare optimizers race with their own reads on a placement mesh.
    model = Regression(
        lambda: mtf_gradsync.CrossShardOptimizer(OPTIMIZERS[optimizer](learning_rate=rate)), steps=3
    )
    return model, *model.on_one_processor()


@pytest.mark.parametrize(("mesh", "optimizer"), harness.pairs(MESHES, OPTIMIZERS))
@pytest.mark.mostly_slow(every=3)
def test_equals_one_processor(mesh, optimizer):
    rate = 0.25
    model, wanted_losses, wanted = one_processor(optimizer, rate)
    losses, variables = model.on_simd(*MESHES[mesh])
    # Sums of BATCH * INPUTS products in another order; each step moves w by at most the rate.
    bound = 3 * programs.BATCH * programs.INPUTS * EPS
    np.testing.assert_allclose(losses, wanted_losses, rtol=bound)
    assert set(variables) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(
            variables[name], value, rtol=bound, atol=bound * rate, err_msg=name
        )


@pytest.mark.parametrize("mesh", ["8", "2x2x2"])
def test_bfloat16_activations(mesh):
    # One step: the products of small integers are exact in bfloat16's 8 bits, their sums are not.
    model = Regression(lambda: SGD(RATE), steps=1, dtype=tf.bfloat16)
    losses, variables = model.on_simd(*MESHES[mesh])
    wanted_losses, wanted = model.in_numpy(RATE)
    sums = programs.BATCH * programs.HIDDEN
    np.testing.assert_allclose(np.float64(losses), wanted_losses, rtol=sums * 2.0**-8)
    np.testing.assert_allclose(variables["w"], wanted, atol=sums * 2.0**-8 * RATE * 2)


def test_stacked_variables_keep_their_names(fresh_graph):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    dim = mtf.Dimension("hidden", 4)
    with simd.tpu_program("all:2", "hidden:all") as program:
        for name in "abc":
            mtf.get_variable(mesh, name, [dim], initializer=tf.ones_initializer())
        updates = [
            op
            for i, v in enumerate(list(graph.trainable_variables))
            for op in SGD(1.0).apply_grads([mtf.ones(mesh, [dim]) * float(i)], [v])
        ]
        updates = graph.combine_assignments(updates)
        lowering = mtf.Lowering(graph, {mesh: program.mesh_impl})
        updates = [lowering.lowered_operation(u) for u in updates]
    assert [v.name for v in graph.all_variables] == ["stacked/a"]
    with program.session(lowering) as session:
        session.run(updates)
        values = session.variables()
    assert {name: value.tolist() for name, value in values.items()} == {
        "a": [1.0] * 4,
        "b": [0.0] * 4,
        "c": [-1.0] * 4,
    }


def relayout(mesh, dims, values, dtype, new_names):
    """Imports values laid out by dims, and renames all dims."""
    shape = mtf.Shape([mtf.Dimension(*d) for d in dims])
    x = mtf.import_tf_tensor(mesh, tf.constant(values, dtype), shape)
    return mtf.reshape(x, mtf.Shape([mtf.Dimension(n, d.size) for n, d in zip(new_names, shape)]))


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.int32], ids=lambda d: d.name)
@pytest.mark.parametrize("order", [None, [3, 1, 4, 0, 5, 7, 2, 6]], ids=["straight", "shuffled"])
def test_relayout(fresh_graph, dtype, order):
    # Whole numbers below 256 survive the bfloat16 that Mesh-TF sends float32 through.
    values = np.arange(8 * 12).reshape(8, 12)
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    layout = "split_rows:rows;split_cols:cols"
    with simd.tpu_program("rows:4;cols:2", layout, order) as program:
        x = relayout(
            mesh, [("split_rows", 8), ("c", 12)], values, dtype, ["r", "split_cols"]
        )  # AllToAll cannot do this one: it goes through an all-gather
        x = mtf.reshape(x, [mtf.Dimension("split_cols", 8), mtf.Dimension("c", 12)])
        lowering_to = mtf.reshape(x, [mtf.Dimension("r", 8), mtf.Dimension("d", 12)])
        lowering = mtf.Lowering(graph, {mesh: program.mesh_impl})
        out = lowering.export_to_tf_tensor(lowering_to)
    kinds = {op.type for op in fresh_graph.get_operations()}
    assert {"AllToAll", "CrossReplicaSum"} <= kinds
    with program.session(lowering) as session:
        for value in session.run(out, per_replica=True):
            np.testing.assert_array_equal(value.astype(np.int64), values)


@pytest.mark.parametrize("wrap", [True, False])
def test_shift_between_neighbours(fresh_graph, wrap):
    values = np.arange(8.0)
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    with simd.tpu_program("all:4", "x:all", [2, 0, 3, 1]) as program:
        dim = mtf.Dimension("x", 8)
        x = mtf.import_tf_tensor(mesh, tf.constant(values, tf.float32), [dim])
        x = mtf.shift(x, 2, dim, wrap)
        whole = mtf.reshape(x, [mtf.Dimension("whole", 8)])
        lowering = mtf.Lowering(graph, {mesh: program.mesh_impl})
        out = lowering.export_to_tf_tensor(whole)
    assert "CollectivePermute" in {op.type for op in fresh_graph.get_operations()}
    wanted = np.roll(values, 2)
    if not wrap:
        wanted[:2] = 0
    with program.session(lowering) as session:
        np.testing.assert_array_equal(session.run(out), wanted)


AXES = [axes for n in (1, 2, 3) for axes in itertools.combinations(range(3), n)]


@pytest.mark.parametrize("order", [None, [5, 2, 7, 0, 3, 6, 1, 4]], ids=["straight", "shuffled"])
@pytest.mark.mostly_slow
def test_sums_and_maxima_over_every_choice_of_axes(order):
    shape = (2, 3, 2)
    order = order and [*order, 11, 8, 10, 9]
    feeds = [tf.placeholder(tf.float32, []) for _ in range(12)]
    with simd.tpu_program("a:2;b:3;c:2", "", order) as program:
        impl = program.mesh_impl
        mine = impl.LaidOutTensor([program.per_replica(feeds)])
        out = {
            (kind, axes): impl.allreduce(mine, list(axes), kind).one_slice
            for kind in ("SUM", "MAX")
            for axes in AXES
        }
    logical = np.random.RandomState(0).permutation(12).reshape(shape)
    physical = [logical.flat[impl.p2l(core)] for core in range(12)]
    with program.session() as session:
        values = session.run(out, dict(zip(feeds, physical)), per_replica=True)
    for (kind, axes), found in values.items():
        reduce = np.sum if kind == "SUM" else np.max
        wanted = np.broadcast_to(reduce(logical, axis=axes, keepdims=True), shape)
        assert [found[impl.l2p(core)] for core in range(12)] == list(wanted.flat), (kind, axes)
    groups = {row.group for row in simd.list_collectives(program).rows}
    assert groups == {"+".join("abc"[a] for a in axes) for axes in AXES}


def test_each_core_gets_its_own_input_in_physical_order(fresh_graph):
    feeds = [tf.placeholder(tf.float32, []) for _ in range(4)]
    with simd.tpu_program("rows:2;cols:2", "", [2, 0, 3, 1]) as program:
        mine = program.per_replica(feeds)
        logical = tf.identity(program.mesh_impl.pnum_tensor)
        total = program.mesh_impl.allreduce(
            program.mesh_impl.LaidOutTensor([mine]), [0], "SUM"
        ).one_slice
    with program.session() as session:
        out = session.run(
            [mine, logical, total], dict(zip(feeds, [1, 10, 100, 1000])), per_replica=True
        )
    assert out[0] == [1, 10, 100, 1000]
    assert out[1] == [1, 3, 0, 2]
    # Logical cores 0 and 2, and 1 and 3, differ along the first axis: physical 2, 3 and 0, 1.
    assert out[2] == [11, 11, 1100, 1100]


def test_random_operations_differ_between_cores_and_repeat_between_sessions(fresh_graph):
    tf.set_random_seed(1)
    with simd.tpu_program("all:4", "") as program:
        noise = tf.random_uniform([3])
    runs = []
    for _ in range(2):
        with program.session() as session:
            runs.append(np.array(session.run(noise, per_replica=True)))
    assert len(np.unique(runs[0])) == 12
    np.testing.assert_array_equal(runs[0], runs[1])


def test_mesh_random_agrees_where_a_tensor_is_replicated(fresh_graph):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    with simd.tpu_program("rows:2;cols:2", "x:rows") as program:
        noise = mtf.random_uniform(mesh, [mtf.Dimension("x", 4)])
        lowering = mtf.Lowering(graph, {mesh: program.mesh_impl})
        slices = lowering.tensors[noise].to_laid_out_tensor().one_slice
    with program.session(lowering) as session:
        first, second, third, fourth = (tuple(v) for v in session.run(slices, per_replica=True))
    assert first == second
    assert third == fourth
    assert first != third


def test_scalars_and_tensors_without_elements(fresh_graph):
    with simd.tpu_program("all:2", "") as program:
        impl = program.mesh_impl
        scalar, empty = (
            impl.allreduce(impl.LaidOutTensor([t]), [0], "SUM").one_slice
            for t in (tf.constant(3.0), tf.zeros([0, 4]))
        )
    with program.session() as session:
        out = session.run([scalar, empty])
    assert out[0] == 6
    assert out[1].shape == (0, 4)


def test_one_core(fresh_graph):
    model = Regression(lambda: SGD(RATE), steps=1)
    losses, _ = model.on_simd("one:1", "")
    np.testing.assert_array_equal(losses, model.in_numpy(RATE)[0])


def test_arguments_are_checked_before_the_graph_changes(fresh_graph):
    before = fresh_graph.version
    with pytest.raises(ValueError, match="permutation"), simd.tpu_program("all:2", "", [0, 0]):
        pass
    with pytest.raises(ValueError, match="repeated dim"), simd.tpu_program("all:2;all:2", "x:all"):
        pass
    assert fresh_graph.version == before


def test_per_replica_wants_one_alike_tensor_per_core(fresh_graph):
    with simd.tpu_program("all:2", "") as program:
        with pytest.raises(ValueError, match="1 tensors for 2 cores"):
            program.per_replica([tf.constant(1.0)])
    with simd.tpu_program("all:2", "") as program:
        with pytest.raises(ValueError, match="different dtypes or shapes"):
            program.per_replica([tf.zeros([1]), tf.zeros([2])])


def test_an_error_inside_leaves_the_graph_usable(fresh_graph):
    with pytest.raises(RuntimeError, match="stop"), simd.tpu_program("all:2", ""):
        raise RuntimeError("stop")
    assert simd_free(tf.constant(1.0).op)
    assert not tf.get_variable_scope().use_resource or tf.resource_variables_enabled()


def simd_free(op):
    return "_tpu_replicate" not in op.node_def.attr
