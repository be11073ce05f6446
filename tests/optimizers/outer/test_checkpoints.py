"""Checkpoints of outer steps: any step of a round, other islands, runs without islands."""

import functools

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models, reference
from tests.optimizers.outer import outer_reference
from tests.optimizers.outer.outer_programs import MESHES, ROUND, batches, built
from tests.optimizers.outer.outer_reference import ALL
from tests.sessions import assert_same_bits, ran, session_of, train


@functools.lru_cache(maxsize=None)
def plain(kind):
    """Rounds of four islands, for the sessions of several tests."""
    return built(kind, "4")


def sharded(opt, mesh):
    shape, layout, dims = MESHES[mesh]
    return gs.ShardedUpdateOptimizer(
        opt, min_size=1, mesh_shape=shape, layout=layout, batch_dims=dims
    )


STACKS = {
    "plain": {},
    "fragments": {"mesh": "2", "inner_steps": 3, "fragments": 3},
    "accumulation": {
        "mesh": "2x2",
        "inside": lambda opt, mesh: gs.GradientAccumulationOptimizer(
            opt, 2, mesh_shape=MESHES[mesh][0], layout=MESHES[mesh][1], batch_dims=MESHES[mesh][2]
        ),
    },
    "sharded": {"mesh": "2x2", "inside": sharded, "opt": "adafactor"},
}


@pytest.mark.parametrize(
    ("kind", "stack"),
    [*(("simd", stack) for stack in STACKS), ("placement", "accumulation")],
)
@pytest.mark.mostly_slow
def test_a_restart_at_any_step_of_a_round_ends_in_the_same_bits(kind, stack, tmp_path):
    made = built(kind, **STACKS[stack]) if STACKS[stack] else plain(kind)
    steps = 6 if stack == "accumulation" else 4
    feeds = batches(steps + 1)
    paths = []
    with session_of(made) as session:
        for number, feed in enumerate(feeds):
            paths.append(session.save(str(tmp_path / f"step_{number}")))
            train(made, session, [feed])
        expected = session.variables()
    # In a session with the state of the end, of which nothing may stay.
    with session_of(made) as session:
        train(made, session, feeds)
        for number, path in enumerate(paths):
            session.restore(path)
            train(made, session, feeds[number:])
            assert_same_bits(session.variables(), expected)


@pytest.mark.slow
@pytest.mark.xla
def test_every_runtime_continues_the_others(tmp_path):
    feeds, path, saved = batches(4), None, None
    for number, kind in enumerate(("simd", "placement", "xla", "simd")):
        made = plain(kind)
        with session_of(made) as session:
            if path:
                session.restore(path)
                assert_same_bits(session.variables(), saved)
            train(made, session, feeds[number : number + 1])
            saved = session.variables()
            path = session.save(str(tmp_path / str(number)))
    expected = outer_reference.train("momentum", feeds, 4, ROUND, 0.7, 0.5, True, ALL)
    reference.assert_close(saved, expected.outer, atol=4 * 32 * 2.0**-24)


@pytest.mark.parametrize("mesh", ["8", "2x2"])
@pytest.mark.mostly_slow
def test_another_number_of_islands_goes_on_where_a_round_has_ended(mesh, tmp_path):
    """Variables go on as they are; slots begin with the mean over the islands of before."""
    path = tmp_path / "round"
    saved = ran(plain("simd"), batches(ROUND), save=path)
    other = built("simd", mesh)
    with session_of(other) as session:
        session.restore(str(path))
        found = session.variables()
        train(other, session, batches(ROUND))
        assert session.variables()["OuterOptimizer/inner_step"] == 2 * ROUND
    for name, value in saved.items():
        if not name.endswith("/island"):
            if name != "OuterOptimizer/skipped":
                np.testing.assert_array_equal(found[name], value)
            continue
        mean = np.asarray(value, np.float64).mean(0).astype("f")
        for island in found[name]:
            np.testing.assert_array_equal(island, mean)
        if name.removesuffix("/island") in saved:
            np.testing.assert_array_equal(mean, saved[name.removesuffix("/island")])


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("reducer", "mesh"),
    [(gs.QuantizedAllReduce(4), "2"), (gs.LowRankAllReduce(1, start_step=0), "8")],
    ids=["4 bits", "rank 1"],
)
def test_errors_of_the_reducer_keep_their_mean_on_other_islands(reducer, mesh, tmp_path):
    """An outer step is the mean of what islands send, so that their errors are part of a mean."""

    def wide(mesh):
        shape, layout, dims = MESHES[mesh]

        def build(mesh, inputs):
            batch, rows, columns = (mtf.Dimension(*x) for x in (("batch", 8), ("i", 64), ("o", 64)))
            x = mtf.import_tf_tensor(mesh, inputs["x"], [batch, rows])
            w = mtf.get_variable(mesh, "w", [rows, columns], initializer=tf.ones_initializer())
            y = mtf.einsum([x, w], [batch, columns])
            loss = mtf.reduce_mean(mtf.square(y) * mtf.range(mesh, columns, tf.float32))
            opt = gs.OuterOptimizer(
                mtf.optimize.SgdOptimizer(0.001), 1, reducer=reducer, mesh_shape=shape,
                layout=layout, batch_dims=dims, outer_dims=dims,
            )  # fmt: skip
            return opt.minimize(loss), {}

        return harness.built("simd", shape, layout, build, feed)

    feed = {"x": np.random.RandomState(0).uniform(-1, 1, [8, 64]).astype("f")}
    path = tmp_path / "round"
    saved = ran(wide("4"), [feed], save=path)
    found = ran(wide(mesh), [], path)
    (name,) = [name for name in saved if name.endswith("error")]
    assert np.abs(saved[name]).max() > 0
    assert found[name].shape == (int(mesh), 64, 64)
    new, old = (x[name].mean(0, dtype="d") for x in (found, saved))
    np.testing.assert_allclose(new, old, rtol=0, atol=2**-22 * np.abs(saved[name]).max())


def test_a_checkpoint_of_a_plain_run_starts_all_islands(mesh_kind, tmp_path):
    path = tmp_path / "alone"
    saved = ran(built("simd", "4", inner_steps=0), batches(2), save=path)
    found = ran(plain(mesh_kind), [], path)
    for name, value in saved.items():
        for island in found[f"{name}/island"]:
            np.testing.assert_array_equal(island, value)
    assert found["OuterOptimizer/inner_step"] == 0


@pytest.mark.parametrize("steps", [ROUND, ROUND + 1])
@pytest.mark.mostly_slow
def test_a_run_without_islands_has_the_mean_of_their_slots(steps, tmp_path, caplog):
    """In the middle of a round it is told that variables go on from the last outer step."""
    path = tmp_path / "islands"
    saved = ran(plain("simd"), batches(steps), save=path)
    found = ran(built("simd", "4", inner_steps=0), [], path)
    assert "w1_momentum_v" in found
    for name, value in found.items():
        right = saved[name] if name in saved else saved[f"{name}/island"].mean(0, dtype="d")
        np.testing.assert_allclose(value, right, rtol=2**-23, atol=0, err_msg=name)
    assert ("the middle of a round" in caplog.text) == (steps != ROUND)


def test_evaluation_reads_the_outer_values(tmp_path):
    path = tmp_path / "train"
    saved = ran(plain("simd"), batches(ROUND + 1), save=path)
    (feed,) = batches(1)
    shape, layout, _ = MESHES["2"]
    build = lambda mesh, inputs: ([], {"loss": models.mlp_loss(mesh, inputs)})  # noqa: E731
    evaluation = harness.built("placement", shape, layout, build, feed)
    found = ran(evaluation, [], path)
    assert sorted(found) == ["b1", "scale", "w1"]
    for name, value in found.items():
        np.testing.assert_array_equal(value, saved[name])
        assert np.abs(saved[f"{name}/island"] - value).max() > 0
