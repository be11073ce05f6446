"""Which sums go by a strategy with a way of its own for gradients, and what is refused."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness
from tests.optimizers.pipeline.rounded_programs import (
    FEEDS,
    MESHES,
    Program,
    cross_shard,
    rounding,
    sgd,
)
from tests.reduce import rounded


@pytest.mark.parametrize("kind", ["placement", "simd"])
@pytest.mark.slow
def test_norms_flags_and_the_model_s_own_sums_do_not_go_that_way(kind):
    plain = Noted()
    strategy = rounded.RoundedAllReduce(plain)

    def make(mesh):
        clip = gs.ClipByGlobalNormOptimizer(sgd(), 1e9, reducer=strategy, **mesh)
        return gs.LossScaleOptimizer(clip, loss_scale=4.0, reducer=strategy, **mesh)

    program = Program(kind, "2x2", make, reported=True)
    (fetched,) = program.fetches(FEEDS[:1])
    reference, shards = rounded.Reference(2), rounded.gradients(FEEDS[0], 2)
    sent = reference.send(FEEDS[0])
    # One reduction of all gradients; flags and norms, and "gain" over the axis of "hidden", went
    # by the plain strategy.
    assert strategy.calls == [(4, 2)]
    assert plain.numbers.count(4) == 1
    assert len(plain.numbers) > 3

    def norm(grads):
        return np.sqrt(sum(np.square(g).sum() for g in grads))

    eps = 64 * np.finfo(np.float32).eps  # sums of 20 squares, and a root
    np.testing.assert_allclose(
        fetched["gradient_norm/before_clipping"], norm(sent.values()), rtol=eps
    )
    total = {name: g.sum(0) for name, g in shards.items()}
    assert fetched["loss"] == sum(g.sum() for g in total.values())  # all variables are 1
    reference.apply(sent)
    reference.check(program.run(FEEDS[:1]))


class Noted(gs.FusedAllReduce):
    """Notes how many tensors each reduction has."""

    def __init__(self):
        super().__init__()
        self.numbers = []

    def all_reduce(self, mesh_impl, values, groups):
        self.numbers.append(len(values))
        return super().all_reduce(mesh_impl, values, groups)


def test_compression_around_it_passes_it_on():
    strategy = rounding()

    def make(mesh):
        return gs.CrossShardOptimizer(
            sgd(), reducer=gs.reduce.CompressedAllReduce(strategy), **mesh
        )

    found = Program("simd", "2x2", make).run(FEEDS[:5])
    assert strategy.calls == [(4, 2)]
    for name in rounded.gradients(FEEDS[0], 2):
        error = found[f"{name}/rounding_error"]
        # bfloat16 holds multiples of 1/8 up to 32: what is kept is what the strategy rounds.
        assert 0 < np.abs(error).max() <= 1 / 16


def test_what_the_layout_splits_over_replicas_is_reduced_over_the_others_alone():
    """Experts: one set has both shard dims, the other the one that is left."""
    experts, features = mtf.Dimension("experts", 2), mtf.Dimension("in", 3)
    outer, batch = mtf.Dimension("outer", 2), mtf.Dimension("batch", 4)
    shape, layout = "a:2;b:2", "outer:a;batch:b;experts:a"
    strategy, made = rounding(), []
    rng = np.random.RandomState(0)
    feed = {
        "x": (rng.randint(-32, 33, [2, 4, 3]) / 32).astype("f"),
        "z": (rng.randint(-32, 33, [4, 2]) / 32).astype("f"),
    }

    def build(mesh, inputs):
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([outer, batch, features]))
        z = mtf.import_tf_tensor(mesh, inputs["z"], mtf.Shape([batch, experts]))

        def variable(name, *dims):
            return mtf.get_variable(mesh, name, mtf.Shape(dims), initializer=tf.ones_initializer())

        c, e, alone = variable("c", features), variable("e", experts), variable("alone", experts)
        loss = mtf.einsum([x, c], []) + mtf.einsum([z, e], []) + mtf.reduce_sum(alone) * 0.3
        axes = gs.ReplicaAxes(shape, layout, ("outer", "batch"))
        made.append(
            gs.CrossShardOptimizer(sgd(), reducer=strategy, axes=axes, batch_dims=axes.batch_dims)
        )
        return made[0].minimize(loss), {}

    found = harness.run("simd", shape, layout, build, [feed]).variables
    assert strategy.calls == [(1, 4), (1, 2)]
    parts = {
        "c": feed["x"].reshape(2, 2, 2, 3).sum(2),
        "e": feed["z"].reshape(2, 2, 2).sum(1),
    }
    for name, part in parts.items():
        sent = np.floor(part * 8.0 + 0.5) / 8
        error = found[f"{name}/rounding_error"]
        np.testing.assert_array_equal(error, part - sent)
        total = sent.sum(tuple(range(sent.ndim - 1)))
        np.testing.assert_array_equal(found[name], 1 - rounded.RATE * total)
    # Nothing of the others crosses: they are as they were computed.
    np.testing.assert_array_equal(found["alone"], np.float32(1) - np.float32(0.3) / 2)
    assert "alone/rounding_error" not in found
    c = next(v for v in made[0].variables() if v.name == "c/rounding_error")
    assert c.shape.to_string == "Shape[outer=2, batch=2, in=3]"


def test_what_the_program_has_reduced_itself_is_not_sent_again():
    strategy, (shape, layout) = rounding(), MESHES["4"]

    def build(mesh, inputs):
        variables = mesh.graph.trainable_variables
        loss = rounded.loss(mesh, inputs)
        grads = mtf.gradients([loss], [v.value for v in variables])
        grads, _ = gs.clip_by_global_norm(grads, 1e9)
        opt = gs.CrossShardOptimizer(sgd(), reducer=strategy, mesh_shape=shape, layout=layout)
        return opt.apply_grads(grads, variables), {}

    found = harness.run("simd", shape, layout, build, FEEDS[:1]).variables
    assert strategy.calls == []
    for name, grad in rounded.gradients(FEEDS[0], 1).items():
        np.testing.assert_array_equal(found[name], 1 - rounded.RATE * grad[0])
        assert f"{name}/rounding_error" not in found


def test_it_is_a_slot_that_does_not_train():
    program = Program("simd", "4", cross_shard)
    (w,) = [v for v in program.built.lowering.graph.all_variables if v.name == "w"]
    slot = program.opt.get_slot(w, "rounding_error")
    assert slot.shape.to_string == "Shape[batch=4, in=3, hidden=4]"
    assert not slot.trainable
    assert slot in program.opt.variables()


class Forgets(rounded.RoundedAllReduce):
    """Makes variables that it does not return."""

    def gradient_state(self, gradients, maker):
        super().gradient_state(gradients, maker)
        return ()


class Flat(rounded.RoundedAllReduce):
    """Gives sums of another shape."""

    def reduce_gradients(self, mesh_impl, values, groups, state):
        sums, state = super().reduce_gradients(mesh_impl, values, groups, state)
        return [mesh_impl.slicewise(lambda x: tf.reshape(x, [-1, 1]), x) for x in sums], state


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda mesh: cross_shard({}), ValueError, "the cores that gradients are reduced over"),
        (
            lambda mesh: gs.CrossShardOptimizer(sgd(), reducer=Forgets(), **mesh),
            TypeError,
            r"Forgets.gradient_state must return the variables that its maker made",
        ),
    ],
)
def test_what_cannot_be_is_an_error_before_anything_is_built(make, error, message):
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        loss = rounded.loss(mesh, {k: tf.constant(v) for k, v in FEEDS[0].items()})
        opt = make(dict(mesh_shape="all:4", layout="batch:all"))
        before = list(graph.all_variables)
        with pytest.raises(error, match=message):
            opt.minimize(loss)
        assert graph.all_variables == before


def test_gradients_are_reduced_once():
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        loss = rounded.loss(mesh, {k: tf.constant(v) for k, v in FEEDS[0].items()})
        opt = cross_shard(dict(mesh_shape="all:4", layout="batch:all"))
        opt.minimize(loss)
        with pytest.raises(ValueError, match="a variable 'w/rounding_error' already"):
            opt.minimize(loss)


def test_sums_of_another_shape_are_an_error():
    with pytest.raises(ValueError, match=r"Flat.reduce_gradients returned sums of .*\[12, 1\]"):
        Program("simd", "4", lambda mesh: gs.CrossShardOptimizer(sgd(), reducer=Flat(), **mesh))


def test_a_strategy_that_another_wrapper_s_takes_the_place_of_is_warned_of(caplog):
    def make(mesh):
        return gs.LossScaleOptimizer(cross_shard(mesh), loss_scale=4.0, **mesh)

    Program("simd", "4", make)
    assert "No gradients are reduced by RoundedAllReduce" in caplog.text
