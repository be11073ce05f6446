"""Strategies with state inside of islands, between them, and both at once."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf
from tests import harness, models, reference
from tests.optimizers.outer import outer_reference
from tests.optimizers.outer.outer_programs import batches, built, where
from tests.optimizers.pipeline.rounded_programs import rounding
from tests.sessions import assert_same_bits, ran

ROUND = 2


def rounded_inside(opt, mesh, knows_mesh):
    mesh = where(mesh) if knows_mesh else {"batch_dims": where(mesh)["batch_dims"]}
    return gs.CrossShardOptimizer(opt, reducer=rounding(), **mesh)


def state_names(values):
    return sorted(name for name in values if "rounding_error" in name)


@pytest.mark.parametrize(
    ("mesh_kind", "knows_mesh"), [("placement", True), ("simd", False)], indirect=["mesh_kind"]
)
@pytest.mark.slow
def test_inside_and_between_keep_state_apart_and_restart(knows_mesh, mesh_kind, tmp_path):
    made = built(
        mesh_kind, "2x2", ROUND, "sgd", lambda opt, mesh: rounded_inside(opt, mesh, knows_mesh),
        reducer=rounding(), outer_learning_rate=1.0,
    )  # fmt: skip
    feeds = batches(2 * ROUND)
    path = tmp_path / "round"
    first, expected = ran(made, feeds[:ROUND], save=path), ran(made, feeds)
    assert_same_bits(ran(made, feeds[ROUND:], path), expected)
    names = ["b1", "scale", "w1"]
    inside = [f"{name}/rounding_error/island" for name in names]
    between = [f"{name}/rounding_error/OuterOptimizer" for name in names]
    assert state_names(first) == sorted([*inside, *between])
    assert first["w1/rounding_error/island"].shape == (2, 2, 6, 8)
    assert first["w1/rounding_error/OuterOptimizer"].shape == (2, 6, 8)
    start, islands = expected_islands(feeds[:ROUND])
    for name, value in start.items():
        away = np.stack([value - island[name] for island in islands])
        sent = np.floor(away * 8 + 0.5) / 8
        left = first[f"{name}/rounding_error/OuterOptimizer"]
        np.testing.assert_allclose(left, away - sent, rtol=0, atol=64 * 2**-24)
        np.testing.assert_allclose(
            first[name], value - 1.5 * sent.mean(0), rtol=0, atol=64 * 2**-24
        )


# By rows of "w1": 24 + 5 numbers, and 24 + 3 + 1.
FIRST = {"w1": np.arange(48).reshape(6, 8) < 24, "b1": np.arange(8) < 5}
SECOND = {**{k: ~mask for k, mask in FIRST.items()}, "scale": True}


@pytest.mark.slow
def test_errors_of_a_variable_that_is_cut_are_the_variables(mesh_kind, tmp_path):
    """A checkpoint has the same errors for any number of fragments."""
    errors = {k: np.zeros([2, *np.shape(v)]) for k, v in models.mlp_values().items()}

    def mean(name, mask, parts):
        sent = np.floor((parts + errors[name]) * 8 + 0.5) / 8
        errors[name] = np.where(mask, parts + errors[name] - sent, errors[name])
        return sent.mean(0)

    feeds = batches(2 * ROUND + 1)
    expected = outer_reference.train(
        "sgd", feeds[:-1], 2, ROUND, 0.7, 0.5, True, [FIRST, SECOND], mean=mean
    )
    cut, whole = (
        built(mesh_kind, "2", ROUND, "sgd", reducer=rounding(), fragments=count) for count in (2, 1)
    )
    path = tmp_path / "cut"
    found, end = ran(cut, feeds[:-1], save=path), ran(cut, feeds)
    assert state_names(found) == [f"{k}/rounding_error" for k in sorted(errors)]
    for name, error in errors.items():
        tolerance = {"rtol": 0, "atol": 4 * 64 * 2**-24}
        np.testing.assert_allclose(found[name], expected.outer[name], **tolerance)
        np.testing.assert_allclose(found[f"{name}/rounding_error"], error, **tolerance)
    assert_same_bits(ran(cut, feeds[-1:], path), end)
    assert_same_bits(ran(whole, [], path), found)


def state_of(matrices, **arguments):
    """Names of the state of a strategy between four islands, for matrices of 16 columns."""

    def build(mesh, inputs):
        batch, inner = mtf.Dimension("batch", 8), mtf.Dimension("inner", 4)
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, inner]))
        loss = mtf.reduce_mean(mtf.square(x))
        for number, (name, rows) in enumerate(matrices.items()):
            dims = mtf.Dimension(f"rows{number}", rows), mtf.Dimension(f"columns{number}", 16)
            variable = mtf.get_variable(mesh, name, mtf.Shape(dims))
            loss += mtf.reduce_mean(x) * mtf.reduce_mean(mtf.square(variable))
        grads, variables = models.gradients(loss)
        opt = gs.OuterOptimizer(models.OPTIMIZERS["sgd"](), 6, **where("4"), **arguments)
        return opt.apply_grads(grads, variables), {}

    shape, layout, _ = harness.MESHES["4"]
    made = harness.built("simd", shape, layout, build, {"x": np.ones([8, 4], "f")})
    names = (v.op.name for v in made.graph.get_collection("variables"))
    return {name for name in names if "quantization" in name or "low_rank" in name}


def test_names_that_extend_the_name_of_a_variable_that_is_cut_are_of_other_variables():
    names = ["kernel", "kernel_1", "kernel/sub"]
    reducer = gs.QuantizedAllReduce(block_size=16)
    state = state_of(dict(zip(names, (64, 16, 16))), fragments=2, reducer=reducer)
    assert state == {f"{name}/quantization_error" for name in names}


@pytest.mark.slow
def test_each_fragment_has_a_state_of_the_wrapper():
    reducer = gs.LowRankAllReduce(rank=1, start_step=2)
    state = state_of(dict.fromkeys("abc", 16), fragments=3, reducer=reducer)
    steps = [name for name in state if name.startswith("OuterOptimizer/")]
    assert len(steps) == 3


@pytest.mark.slow
def test_pieces_are_matrices_for_low_rank_sums():
    reducer = gs.LowRankAllReduce(rank=1, min_compression_rate=1.5)
    made = built("simd", "4", ROUND, "sgd", reducer=reducer, fragments=2)
    found = made.run(batches(2 * ROUND)).variables
    factors = {k: v for k, v in found.items() if "low_rank_factor" in k}
    assert sorted(factors) == ["w1/low_rank_factor/0", "w1/low_rank_factor/1"]
    change = found["w1"].astype(float) - models.mlp_values()["w1"]
    assert found["w1/low_rank_error"].shape == (4, 6, 8)
    for rows in (np.s_[:3], np.s_[3:]):
        # Two outer steps and a momentum of them, of rank 1 each.
        sizes = np.linalg.svd(change[rows], compute_uv=False)
        assert sizes[1] > 1e-3 * sizes[0]
        assert sizes[2] < 64 * 2**-24 * sizes[0]
        assert np.abs(found["w1/low_rank_error"][:, rows]).max() > 1e-3


def expected_islands(feeds):
    """Where two islands of two replicas each begin and end, whose gradients are rounded sums."""
    start = {k: np.asarray(v, np.float64) for k, v in models.mlp_values().items()}
    ends = []
    for island in range(2):
        values, errors = start, [{k: 0 * v for k, v in start.items()} for _ in range(2)]
        for feed in feeds:
            sums = dict.fromkeys(start, 0.0)
            for replica, left in enumerate(errors):
                x, y = (
                    feed[k].astype(np.float64).reshape(2, 2, 2, 2, -1)[island, :, replica]
                    for k in ("x", "y")
                )
                grads = reference.mlp_grads(values, x.reshape(4, -1), y.reshape(4, -1))
                for name, grad in grads.items():
                    # Half of the island's mean.
                    wanted = grad / 2 + left[name]
                    sent = np.floor(wanted * 8 + 0.5) / 8
                    left[name] = wanted - sent
                    sums[name] = sums[name] + sent
            values = {k: v - 0.1 * sums[k] for k, v in values.items()}
        ends.append(values)
    return start, ends
