"""A strategy that keeps state: rounded gradients with error feedback, exactly as by hand."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import xla
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.xla.portable.runner import Step
from tests import harness
from tests.reduce import rounded

KINDS = ["placement", "simd"] + ([] if xla.why_no_xla() else ["xla"])
MESHES = {
    "4": ("all:4", "batch:all"),
    "2x2": ("rows:2;cols:2", "batch:rows;hidden:cols"),
    "8": ("all:8", "batch:all"),
    "one": harness.ONE,
}
SHARDS = {"4": 4, "2x2": 2, "8": 8, "one": 1}
STEPS = 50
FEEDS = rounded.batches(STEPS)


def sgd():
    return mtf.optimize.SgdOptimizer(rounded.RATE)


class Program:
    """The model with an optimizer, on any runtime; sessions that go on from checkpoints."""

    def __init__(self, kind, mesh, make, reported=False):
        self.kind, self.mesh = kind, mesh
        shape, layout = MESHES[mesh]
        self.opt = None

        def build(mtf_mesh, inputs):
            loss = rounded.loss(mtf_mesh, inputs)
            self.opt = make(dict(mesh_shape=shape, layout=layout))
            operations = self.opt.apply_grads(*zip(*self.opt.compute_gradients(loss)))
            return operations, {"loss": loss, **(gs.reported(self.opt) if reported else {})}

        self.built = harness.built(kind, shape, layout, build, FEEDS[0])
        if self.built.program is None:
            with self.built.graph.as_default():
                self.saver = gs.ReshardingSaver(max_to_keep=None)

    def fetches(self, feeds):
        """What the steps fetch, from the start."""
        return self.built.run(feeds).fetched

    def run(self, feeds, restore=None, save=None):
        """Makes steps, from a checkpoint perhaps, and returns all masters."""
        made = self.built
        with made.graph.as_default(), made._session() as session:
            if made.program is None:
                session.run(made.init)
                if restore:
                    self.saver.restore(session, restore)
                session.run(made.restore)
            elif restore:
                session.restore(restore)
            for feed in feeds:
                feed = {made.inputs[name]: value for name, value in feed.items()}
                session.run([made.fetched, made.updates], feed)
            if made.program is None:
                session.run(made.collect)
                if save:
                    self.saver.save(session, save)
                return session.run({v.op.name: v for v in tf.global_variables()})
            if save:
                session.save(save)
            return session.variables()


def cross_shard(mesh):
    return gs.CrossShardOptimizer(sgd(), reducer=rounded.RoundedAllReduce(), **mesh)


@pytest.fixture(scope="module")
def programs():
    made = {}

    def program(kind, mesh):
        if (kind, mesh) not in made:
            made[kind, mesh] = Program(kind, mesh, cross_shard)
        return made[kind, mesh]

    return program


@pytest.mark.parametrize("kind", KINDS)
def test_fifty_steps_are_those_by_hand_and_restart_to_the_same_bits(kind, programs, tmp_path):
    reference = rounded.Reference(2)
    for feed in FEEDS:
        reference.apply(reference.send(feed))
    assert any(error.any() for error in reference.errors.values())
    program = programs(kind, "2x2")
    halfway = str(tmp_path / "halfway")
    program.run(FEEDS[:25], save=halfway)
    found = program.run(FEEDS[25:], restore=halfway)
    reference.check(found)
    whole = program.run(FEEDS)
    assert {k: v.tobytes() for k, v in found.items()} == {k: v.tobytes() for k, v in whole.items()}


def test_it_moves_between_meshes_and_runtimes_with_the_sum_of_what_was_not_sent(programs, tmp_path):
    reference, path = rounded.Reference(4), None
    stations = zip(["4", "2x2", "one", "4"], ["simd", "placement", "placement", KINDS[-1]])
    for number, (mesh, kind) in enumerate(stations):
        reference.move(SHARDS[mesh])
        feeds, before = FEEDS[10 * number :][:10], path
        path = str(tmp_path / f"{number}")
        for feed in feeds:
            reference.apply(reference.send(feed))
        found = programs(kind, mesh).run(feeds, restore=before, save=path)
        reference.check(found)
    # All that the gradients were was applied, or waits on a core.
    for name, value in reference.values.items():
        total = sum(rounded.gradients(feed, 1)[name][0] for feed in FEEDS[:40])
        applied = (1 - value) / rounded.RATE
        np.testing.assert_array_equal(applied + reference.errors[name].sum(0), total)


def test_a_run_without_it_goes_on_with_nothing_unsent(programs, tmp_path):
    plain = Program("simd", "2x2", lambda mesh: gs.CrossShardOptimizer(sgd(), **mesh))
    saved, reference = str(tmp_path / "saved"), rounded.Reference(2)
    plain.run(FEEDS[:2], save=saved)
    for feed in FEEDS[:2]:
        reference.apply({k: g[0] for k, g in rounded.gradients(feed, 1).items()})
    reference.apply(reference.send(FEEDS[2]))
    reference.check(programs("simd", "2x2").run(FEEDS[2:3], restore=saved))


@pytest.mark.parametrize("kind", KINDS)
def test_inside_accumulation_it_changes_with_updates_alone(kind, tmp_path):
    def make(mesh):
        inner = gs.CrossShardOptimizer(sgd(), reducer=rounded.RoundedAllReduce())
        strategy = rounded.RoundedAllReduce()
        return gs.GradientAccumulationOptimizer(inner, 4, reducer=strategy, **mesh)

    program = Program(kind, "2x2", make)
    reference = rounded.Reference(2)
    for start in range(0, 12, 4):
        reference.apply(reference.send(*FEEDS[start : start + 4]))
    reference.check(program.run(FEEDS[:12]))
    saved = str(tmp_path / "saved")
    reference.check(program.run(FEEDS[:14], save=saved))
    reference.apply(reference.send(*FEEDS[12:16]))
    reference.check(program.run(FEEDS[14:16], restore=saved))


def not_finite(feed):
    return {name: np.full_like(value, np.nan) for name, value in feed.items()}


def rounding():
    return rounded.RoundedAllReduce()


# All replicas of the second step are not finite: nothing of it is used, and no state of it kept.
# What the steps 0, 2, 3 and 4 make of the reference, where the 5th is in mid-accumulation.
def each_step(reference, feeds):
    for feed in feeds:
        reference.apply(reference.send(feed))


def two_reduced_steps(reference, feeds):
    for pair in (feeds[:2], feeds[2:]):
        reference.apply(*[reference.send(feed) for feed in pair])


def mean_of_two_steps(reference, feeds):
    for pair in (feeds[:2], feeds[2:]):
        reference.apply(reference.send(*pair), divisor=2)


def mean_of_two_reduced_steps(reference, feeds):
    for pair in (feeds[:2], feeds[2:]):
        reference.apply(*[reference.send(feed) for feed in pair], divisor=2)


STACKS = {
    "loss scale": (
        lambda mesh: gs.LossScaleOptimizer(
            gs.CrossShardOptimizer(sgd()), loss_scale=4.0, reducer=rounding(), **mesh
        ),
        each_step,
    ),
    "synced accumulation": (
        lambda mesh: gs.GradientAccumulationOptimizer(
            sgd(),
            2,
            accumulate="synced",
            should_skip_update_fn=gs.skip_not_finite,
            reducer=rounding(),
            **mesh,
        ),
        two_reduced_steps,
    ),
    "replicas": (
        lambda mesh: gs.SyncReplicasOptimizer(sgd(), 4, reducer=rounding(), **mesh),
        mean_of_two_steps,
    ),
    "around replicas": (
        lambda mesh: gs.ClipByGlobalNormOptimizer(
            gs.SyncReplicasOptimizer(sgd(), 4, accept_summed=True, **mesh),
            1e9,
            reducer=rounding(),
            **mesh,
        ),
        mean_of_two_reduced_steps,
    ),
    "loss scale inside accumulation": (
        lambda mesh: gs.GradientAccumulationOptimizer(
            gs.LossScaleOptimizer(sgd(), loss_scale=4.0, reducer=rounding()),
            2,
            reducer=rounding(),
            **mesh,
        ),
        # The first update is skipped with both of its steps; the fifth step waits.
        lambda reference, feeds: reference.apply(reference.send(*feeds[1:3])),
    ),
}


@pytest.mark.parametrize(
    ("kind", "stack"),
    harness.on_both([(name,) for name in STACKS], [("loss scale",), ("synced accumulation",)]),
)
def test_steps_that_are_skipped_leave_it(kind, stack):
    make, follow = STACKS[stack]
    feeds = [FEEDS[0], not_finite(FEEDS[1]), *FEEDS[2:5]]
    reference = rounded.Reference(2)
    follow(reference, [feeds[0], *feeds[2:]])
    reference.check(Program(kind, "2x2", make).run(feeds))


@pytest.mark.parametrize("kind", ["placement", "shared copies", "simd"])
def test_sharded_updates_inside_accumulation_get_parts_of_the_sums(kind, monkeypatch):
    def shared(mesh_shape, layout):
        return gs.placement_mesh_impl(mesh_shape, layout, [f"/device:CPU:{i}" for i in range(4)])

    if kind == "shared copies":
        monkeypatch.setattr(harness, "placement", shared)

    def make(mesh):
        opt = gs.ShardedUpdateOptimizer(sgd(), min_size=0, reducer=rounding(), **mesh)
        opt = gs.AverageOptimizer(opt, 0.5, **mesh)
        return gs.GradientAccumulationOptimizer(opt, 2, **mesh)

    reference = rounded.Reference(4)
    for pair in (FEEDS[:2], FEEDS[2:4]):
        reference.apply(reference.send(*pair))
    kind = "simd" if kind == "simd" else "placement"
    reference.check(Program(kind, "4", make).run(FEEDS[:5]))


@pytest.mark.parametrize("kind", KINDS[:2])
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


def test_compression_around_it_hands_it_on():
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


@pytest.mark.xla
def test_an_exported_folder_takes_it_along(programs, tmp_path):
    made, saved = programs("simd", "2x2").built, str(tmp_path / "saved")
    programs("simd", "2x2").run(FEEDS[:3], save=saved)
    with made.graph.as_default():
        fetches = {"loss": made.fetched["loss"]}
        xla.export(made.program, made.lowering, fetches, tmp_path / "step", checkpoint=saved)
    step = Step.load(str(tmp_path / "step"))
    for feed in FEEDS[3:6]:
        step(feed)
    reference = rounded.Reference(2)
    each_step(reference, FEEDS[:6])
    reference.check(step.variables())


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
    with pytest.raises(ValueError, match=r"Flat.reduce_gradients gave sums that are .*\[12, 1\]"):
        Program("simd", "4", lambda mesh: gs.CrossShardOptimizer(sgd(), reducer=Flat(), **mesh))


def test_a_strategy_that_another_wrapper_s_takes_the_place_of_is_warned_of(caplog):
    def make(mesh):
        return gs.LossScaleOptimizer(cross_shard(mesh), loss_scale=4.0, **mesh)

    Program("simd", "4", make)
    assert "No gradients go by RoundedAllReduce" in caplog.text
