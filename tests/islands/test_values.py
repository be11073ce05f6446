"""Values that are written into a session, on every kind of session and on a second mesh axis."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.islands.values import Values
from tests import harness, models, reference
from tests.islands.conftest import Program, batches

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
