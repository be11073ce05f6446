"""Values that are written into a session, on every kind of session and on a second mesh axis."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.tools.islands.session_values import Values
from tests import harness, models, reference, sessions
from tests.tools.islands.conftest import Program, batches

D = mtf.Dimension("d", 6)
KINDS = ["placement", "shared", "simd", pytest.param("xla", marks=pytest.mark.xla)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.mostly_slow
def test_a_step_goes_on_from_what_was_written(kind, folder):
    feeds = batches(2)
    program = Program(kind, "2x2", "adam", feeds[0], folder, "one", 2)
    values = program.island._values
    with program.session() as session:
        program.step(session, feeds[0])
        before = values.read(session)
        written = {"w1": before["w1"] * 0.5, "scale": np.float32(0.25)}
        values.write(session, written)
        after = values.read(session)
        assert {k: v.tobytes() for k, v in after.items()} == {
            k: v.tobytes() for k, v in {**before, **written}.items()
        }
        program.step(session, feeds[1])
        found = values.read(session)
    # The slots are as they were after the first step.
    optimizer = reference.OPTIMIZERS["adam"]()
    first = models.mlp_values()
    optimizer(first, reference.mlp_grads(first, feeds[0]["x"], feeds[0]["y"]))
    now = {k: np.asarray(v, np.float64) for k, v in {**before, **written}.items()}
    expected = optimizer(now, reference.mlp_grads(now, feeds[1]["x"], feeds[1]["y"]))
    for name, value in expected.items():
        # As for steps without writing: a gradient and an update are rounded a few times.
        np.testing.assert_allclose(found[name], value, rtol=0, atol=2 * 32 * 2**-24)


@pytest.mark.parametrize(
    ("kind", "mesh"), [*((kind, "2") for kind in KINDS[:3]), ("placement", "1")]
)
def test_averages_of_an_island_that_joins_begin_with_the_values_that_it_takes(kind, mesh, folder):
    feeds = batches(2)
    shape, layout = harness.ONE if mesh == "1" else harness.MESHES[mesh][:2]

    def build(mesh, inputs):
        x = mtf.import_tf_tensor(mesh, inputs["x"], [mtf.Dimension("batch", 16), D])
        w = mtf.get_variable(mesh, "w", [D], initializer=tf.ones_initializer())
        loss = mtf.reduce_mean(mtf.square(x * w - 1.0))
        return gs.AverageOptimizer(mtf.optimize.SgdOptimizer(0.1), 0.5).minimize(loss), {}

    feed = {"x": feeds[0]["x"]}
    built = harness.built(kind, shape, layout, build, feed)
    average, joined = "w/ExponentialMovingAverage", np.full(6, 3.0, "f")
    with built.graph.as_default():
        values, again = Values(built.lowering), Values(built.lowering)
    with sessions.session_of(built) as session:
        values.read(session)
        values.write(session, {"w": joined})
        np.testing.assert_array_equal(session.variables()[average], joined)
        learned = sessions.step(built, session, feed)
        np.testing.assert_array_equal(learned[average], (joined + learned["w"]) / 2)
        # Merged values that come later are not what training began with.
        values.write(session, {"w": joined})
        np.testing.assert_array_equal(session.variables()[average], learned[average])
    # Of an island that comes back.
    with sessions.session_of(built, first=learned) as session:
        again.read(session)
        again.write(session, {"w": joined})
        np.testing.assert_array_equal(session.variables()[average], learned[average])


@pytest.mark.parametrize("kind", ["simd", pytest.param("xla", marks=pytest.mark.xla)])
def test_what_cannot_be_written(kind, folder):
    (feed,) = batches(1)
    program = Program(kind, "2", "sgd", feed, folder, "one", 2)
    with program.session() as session:
        before = session.variables()
        for values, message in (
            (
                {"b1": np.zeros(8, "f"), "v": 0.0},
                r"no global variable 'v'\. It has: 3 var",
            ),
            ({"b1": np.zeros(8, "f"), "w1": np.zeros((8, 6), "f")}, r"of shape \[6, 8\]; got a"),
        ):
            with pytest.raises(ValueError, match=message):
                session.write(values)
        assert {k: v.tobytes() for k, v in session.variables().items()} == {
            k: v.tobytes() for k, v in before.items()
        }


@pytest.mark.xla
def test_random_numbers_go_on_after_a_write():
    def build(mesh, inputs):
        loss = models.mlp_loss(mesh, inputs)
        shape = mtf.Shape([mtf.Dimension("batch", models.BATCH)])
        noise = mtf.reduce_mean(mtf.random_uniform(mesh, shape))
        variables = mesh.graph.trainable_variables
        grads = mtf.gradients([loss * noise], [v.value for v in variables])
        return models.OPTIMIZERS["sgd"]().apply_grads(grads, variables), {"noise": noise}

    feeds = batches(3)
    built = harness.built("xla", "all:2", "batch:all", build, feeds[0])
    seen = []
    for writes in (False, True):
        with built.graph.as_default(), built._session() as session:
            for feed in feeds:
                fed = {built.inputs[k]: v for k, v in feed.items()}
                found, _ = session.run([built.fetched["noise"], built.updates], fed)
                seen.append(float(found))
                if writes:
                    session.write({"w1": session.read("w1")})
    assert seen[:3] == seen[3:]
    assert len(set(seen)) == 3


@pytest.mark.parametrize("kind", ["placement", "shared", "simd"])
@pytest.mark.parametrize("is_bare", [True, False])
def test_a_step_whose_updates_race_is_told(kind, is_bare, caplog):
    (feed,) = batches(1)
    shape, layout, dims = harness.MESHES["2"]
    bare = models.OPTIMIZERS["sgd"]

    def make():
        return bare() if is_bare else gs.CrossShardOptimizer(bare())

    built = harness.built(kind, shape, layout, models.train(make, dims), feed, may_race=is_bare)
    races = is_bare and kind != "simd"
    assert bool(built.races()) == races
    with built.graph.as_default():
        Values(built.lowering)
    assert ("gs.CrossShardOptimizer(optimizer)" in caplog.text) == races
