"""Checkpoints in mid-accumulation, restored on other meshes than they were written on."""

import functools
import os

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.optimizers import state
from mtf_gradsync.runtimes import checkpoints
from tests import harness, models
from tests.sessions import ran

EPS = np.finfo(np.float32).eps
K = 3
WRITTEN_AFTER = 2  # microbatch steps: mid-accumulation
STEPS = 2 * K
# Values are below 2; every microbatch step rounds a sum of at most 16 terms.
TOLERANCE = STEPS * 16 * EPS
MESHES = {
    "4": ("all:4", "batch:all", ("batch",)),
    "2": ("all:2", "batch:all", ("batch",)),
    "rows": ("rows:2;cols:2", "batch:cols;hidden:rows", ("batch",)),
    "2x2": ("a:2;b:2", "outer:a;batch:b", ("outer", "batch")),
    "one": (*harness.ONE, ("batch",)),
}

shapes = st.lists(st.integers(1, 5), max_size=3)


@hypothesis.given(old=shapes, new=shapes, rest=st.lists(st.integers(0, 3), max_size=2))
def test_reshard_keeps_the_sum(old, new, rest):
    # Whole numbers, so that sums in any order are exact.
    size = int(np.prod(old + rest))
    value = np.arange(size, dtype=np.float32).reshape(old + rest)
    result = checkpoints.reshard(value, len(old), new + rest)
    assert result.dtype == value.dtype
    assert result.shape == tuple(new + rest)
    np.testing.assert_array_equal(
        result.sum(tuple(range(len(new)))), value.sum(tuple(range(len(old))))
    )


@hypothesis.given(old=shapes, new=shapes)
def test_reshard_moves_no_bit_to_as_many_shards_or_more(old, new):
    value = np.random.RandomState(0).randn(*old, 4).astype("f")
    result = checkpoints.reshard(value, len(old), [*new, 4])
    rows, new_rows = value.reshape(-1, 4), result.reshape(-1, 4)
    if len(new_rows) >= len(rows):
        kept = new_rows[[j * len(new_rows) // len(rows) for j in range(len(rows))]]
        np.testing.assert_array_equal(kept, rows)
    if len(new_rows) % len(rows) == 0:
        back = checkpoints.reshard(result, len(new), [*old, 4])
        np.testing.assert_array_equal(back, value)


def test_fewer_shards_are_sums_of_contiguous_groups():
    value = np.array([[1, 2, 4, 8], [16, 32, 64, 128]], np.float32)
    np.testing.assert_array_equal(checkpoints.reshard(value, 2, [4]), [3, 12, 48, 192])
    np.testing.assert_array_equal(checkpoints.reshard(value, 2, [3]), [7, 56, 192])
    np.testing.assert_array_equal(checkpoints.reshard(value, 2, []), 255)


def test_narrow_floats_are_added_up_in_float32():
    # In float16, 2048 + 1 is 2048.
    value = np.array([2048, 1, 1, 1, 1], np.float16)
    result = checkpoints.reshard(value, 1, [])
    assert result.dtype == np.float16
    assert result == 2052


@pytest.mark.parametrize(("dims", "shape"), [(1, [4, 2]), (1, []), (0, [3]), (3, [4, 3])])
def test_reshard_refuses_other_variables(dims, shape):
    with pytest.raises(ValueError, match="new_shape must end with"):
        checkpoints.reshard(np.zeros([4, 3], "f"), dims, shape)


def built(mesh, place="local", kind="placement"):
    """The model with an accumulating optimizer on a mesh."""
    shape, layout, batch_dims = MESHES[mesh]
    where = {"mesh_shape": shape, "layout": layout, "batch_dims": batch_dims}

    def make():
        return gs.GradientAccumulationOptimizer(
            models.OPTIMIZERS["momentum"](), K, average_aggregated_gradients=True,
            **(where if place == "local" else {"accumulate": place}),
        )  # fmt: skip

    (feed,) = models.mlp_batches(1)
    return harness.built(kind, shape, layout, models.train(make, batch_dims), feed)


@pytest.fixture(scope="module")
def programs():
    """Programs by mesh, each built once."""
    return functools.lru_cache(maxsize=None)(built)


@pytest.fixture(scope="module")
def written(programs, tmp_path_factory):
    """A checkpoint of 4 shards in mid-accumulation, and where the run would have ended."""
    path = tmp_path_factory.mktemp("written") / "model.ckpt"
    feeds = models.mlp_batches(STEPS)
    ran(programs("4"), feeds[:WRITTEN_AFTER], save=path)
    return str(path), ran(programs("4"), feeds)


def without_sums(values):
    return {k: v for k, v in values.items() if "accumulator" not in k}


def assert_same_training(actual, expected):
    assert sorted(actual) == sorted(expected)
    for name, value in without_sums(expected).items():
        np.testing.assert_allclose(
            actual[name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
        )


def files(path):
    directory = os.path.dirname(path)
    contents = {}
    for name in os.listdir(directory):
        with open(os.path.join(directory, name), "rb") as file:
            contents[name] = file.read()
    return contents


@pytest.mark.parametrize("mesh", ["2", "rows", "2x2", "one"])
@pytest.mark.mostly_slow
def test_the_update_is_the_same_on_another_mesh(programs, written, mesh):
    path, expected = written
    before = files(path)
    actual = ran(programs(mesh), models.mlp_batches(STEPS)[WRITTEN_AFTER:], restore=path)
    assert_same_training(actual, expected)
    assert files(path) == before


@pytest.mark.slow
@pytest.mark.xla
@pytest.mark.parametrize(
    ("first", "then"), [("xla", "xla"), ("placement", "xla"), ("xla", "placement")]
)
def test_the_update_is_the_same_on_another_runtime(written, tmp_path, first, then):
    path, expected = written
    feeds = models.mlp_batches(STEPS)
    if first == "xla":
        path = str(tmp_path / "model.ckpt")
        ran(built("4", kind="xla"), feeds[:WRITTEN_AFTER], save=path)
    actual = ran(built("2x2", kind=then), feeds[WRITTEN_AFTER:], restore=path)
    assert_same_training(actual, expected)


def test_to_one_processor_and_back(programs, written, tmp_path):
    path, expected = written
    feeds = models.mlp_batches(STEPS)
    for number, mesh in enumerate(["one", "4"]):
        save = tmp_path / f"{number}.ckpt"
        ran(programs(mesh), feeds[WRITTEN_AFTER + number :][:1], restore=path, save=save)
        path = str(save)
    actual = ran(programs("one"), feeds[WRITTEN_AFTER + 2 :], restore=path)
    assert_same_training(actual, expected)


@pytest.mark.slow
def test_local_sums_go_on_as_synced_ones_and_back(programs, written, tmp_path):
    path, expected = written
    synced = programs("2x2", "synced")
    feeds = models.mlp_batches(STEPS)[WRITTEN_AFTER:]
    assert_same_training(ran(synced, feeds, restore=path), expected)
    saved = tmp_path / "synced.ckpt"
    ran(synced, [], restore=path, save=saved)
    assert_same_training(ran(programs("2"), feeds, restore=str(saved)), expected)


def test_the_same_mesh_restores_every_bit(programs, written, tmp_path):
    path, expected = written
    actual = ran(programs("4"), models.mlp_batches(STEPS)[WRITTEN_AFTER:], restore=path)
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
    with programs("4").graph.as_default():
        assert gs.adapt_checkpoint(path, str(tmp_path / "unused")) == path
    assert not (tmp_path / "unused").exists()


def test_adapted_checkpoints_restore_with_any_saver(programs, written, tmp_path):
    path, expected = written
    before = files(path)
    program = programs("2")
    with program.graph.as_default():
        adapted = gs.adapt_checkpoint(path, str(tmp_path))
        assert gs.adapt_checkpoint(adapted, str(tmp_path)) == adapted
        again = gs.adapt_checkpoint(path, str(tmp_path))
    assert adapted == again == str(tmp_path / "model.ckpt")
    feeds = models.mlp_batches(STEPS)[WRITTEN_AFTER:]
    actual = ran(program, feeds, restore=adapted, make_saver=tf.train.Saver)
    assert_same_training(actual, expected)
    assert files(path) == before
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_beside_the_original_it_gets_another_name(programs, written, tmp_path):
    path = str(tmp_path / "model.ckpt")
    ran(programs("4"), [], restore=written[0], save=path)
    before = files(path)
    with programs("2").graph.as_default():
        assert gs.adapt_checkpoint(path, str(tmp_path)) == f"{path}-resharded"
        link = tmp_path / "link"
        link.symlink_to(tmp_path, target_is_directory=True)
        assert gs.adapt_checkpoint(path, str(link)) == f"{link}/model.ckpt-resharded"
        link.unlink()
    after = files(path)
    assert {name: after[name] for name in before} == before


def test_another_variable_shape_is_still_an_error(written):
    saved = dict(tf.train.list_variables(written[0]))
    assert saved["w1/gradient_accumulator"] == [4, models.INPUTS, models.HIDDEN]
    shape = [2, models.INPUTS, models.HIDDEN + 1]
    with tf.Graph().as_default() as graph:
        tf.get_variable("w1/gradient_accumulator", shape)
        note = state.StateNote("w1/gradient_accumulator", num_shard_dims=1)
        tf.add_to_collection(state.STATE_COLLECTION, note)
        saver = gs.ReshardingSaver()
        with tf.Session(graph=graph) as session:
            with pytest.raises(ValueError, match=r"\[4, 6, 8\] in .* but \[2, 6, 9\] here"):
                saver.restore(session, written[0])
