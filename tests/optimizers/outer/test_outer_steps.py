"""Outer steps against the same algorithm in numpy float64, on every runtime."""

import functools

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models
from tests.optimizers.outer import outer_reference
from tests.optimizers.outer.outer_programs import (
    THREE_OF_SLICES,
    TWO_OF_SLICES,
    assert_as_reference,
    batches,
)

# Many steps for each runtime once; elsewhere some rounds.
MANY, SOME = 100, 24
ALL = outer_reference.ALL
# A core has 48 + 8 + 1 numbers, or 24 + 4 + 1 on the mesh with a model axis: "w1" is cut.
TWO, THREE = outer_reference.cut(8, 29, 48), outer_reference.cut(8, 19, 38, 48)


def outer(opt, mesh, inner_steps, **arguments):
    shape, layout, dims = harness.MESHES[mesh]
    where = {"mesh_shape": shape, "layout": layout, "batch_dims": dims, "outer_dims": dims[:1]}
    return gs.OuterOptimizer(models.OPTIMIZERS[opt](), inner_steps, **arguments, **where)


def run(kind, mesh, make, steps):
    shape, layout, dims = harness.MESHES[mesh]
    return harness.run(kind, shape, layout, models.train(make, dims), batches(steps))


# kind, mesh, steps, inner optimizer, inner_steps, nesterov, fragments
CASES = [
    ("simd", "4", SOME, "sgd", 1, True, ALL),
    ("simd", "4", MANY, "momentum", 5, False, ALL),
    ("simd", "2x2x2", SOME, "adam", 4, True, TWO_OF_SLICES),
    ("simd", "2x2x2", SOME, "sgd", 3, False, THREE_OF_SLICES),
    ("placement", "4", MANY, "momentum", 6, True, THREE),
    ("shared", "2x2x2", SOME, "adam", 3, True, THREE_OF_SLICES),
    pytest.param("xla", "4", MANY, "momentum", 4, True, TWO, marks=pytest.mark.xla),
]


@pytest.mark.parametrize(
    ("kind", "mesh", "steps", "opt", "inner_steps", "nesterov", "fragments"), CASES
)
@pytest.mark.mostly_slow(keep="simd")
def test_outer_steps_are_those_of_numpy(kind, mesh, steps, opt, inner_steps, nesterov, fragments):
    def make():
        return outer(opt, mesh, inner_steps, outer_momentum=0.5, nesterov=nesterov,
                     fragments=len(fragments))  # fmt: skip

    found = run(kind, mesh, make, steps).variables
    islands = 4 if mesh == "4" else 2
    expected = outer_reference.train(
        opt, batches(steps), islands, inner_steps, 0.7, 0.5, nesterov, fragments
    )
    assert_as_reference(found, expected, steps)


@pytest.mark.parametrize(
    ("mesh_kind", "opt"),
    [("placement", "momentum"), ("simd", "adafactor")],
    indirect=["mesh_kind"],
)
@pytest.mark.mostly_slow
def test_one_step_a_round_at_rate_one_is_the_mean_of_the_islands_updates(opt, mesh_kind):
    def make():
        return outer(opt, "2", 1, outer_learning_rate=1.0, outer_momentum=0.0)

    (feed,) = batches(1)
    found = run(mesh_kind, "2", make, 1).variables
    alone = []
    for x, y in zip(np.split(feed["x"], 2), np.split(feed["y"], 2)):
        expected = outer_reference.train(opt, [{"x": x, "y": y}], 1, 2, 1, 0, False, ALL)
        alone.append(expected.islands[0])
    for name in models.mlp_values():
        mean = np.mean([island[name] for island in alone], axis=0)
        np.testing.assert_allclose(found[name], mean, rtol=0, atol=32 * 2**-24)
        assert f"{name}/outer_momentum" not in found


@pytest.mark.mostly_slow
def test_the_model_reads_the_islands_values_and_programs_see_the_outer_ones(mesh_kind):
    """The loss of the second step is that of islands that have moved, before an outer step."""
    shape, layout, _ = harness.MESHES["2"]
    opt = outer("sgd", "2", 4)

    def build(mesh, inputs):
        loss = models.mlp_loss(mesh, inputs)
        w1 = mesh.graph.trainable_variables[0]
        updates = opt.minimize(loss)
        return updates, {"loss": loss, "outer": opt.outer_value(w1).value}

    feeds = models.mlp_batches(2)
    result = harness.run(mesh_kind, shape, layout, build, feeds)
    expected = outer_reference.train("sgd", feeds[:1], 2, 4, 0.7, 0.9, True, ALL)
    losses = []
    parts = zip(np.split(feeds[1]["x"], 2), np.split(feeds[1]["y"], 2))
    for values, (x, y) in zip(expected.islands, parts):
        h = np.tanh(x @ values["w1"] + values["b1"])
        out = (h @ values["w1"].T) * values["scale"]
        losses.append(np.mean((out - y) ** 2))
    np.testing.assert_allclose(result.fetched[1]["loss"], np.mean(losses), rtol=64 * 2**-24)
    start = models.mlp_values()["w1"]
    np.testing.assert_array_equal(result.fetched[1]["outer"], start)
    np.testing.assert_array_equal(result.variables["w1"], start)


@pytest.mark.slow
def test_slots_are_found_by_the_variable():
    shape, layout, _ = harness.MESHES["4"]
    opt = outer("adam", "4", 2)

    def build(mesh, inputs):
        updates = opt.minimize(models.mlp_loss(mesh, inputs))
        w1 = mesh.graph.trainable_variables[0]
        assert opt.get_slot(w1, "adam_m").name == "w1/adam_m"
        assert opt.get_slot(w1, "outer_momentum").shape == w1.shape
        assert opt.get_slot(w1, "island").shape.to_integer_list == [4, 6, 8]
        assert isinstance(opt.outer_value(w1), mtf.Variable)
        return updates, gs.reported(opt)

    result = harness.run("simd", shape, layout, build, models.mlp_batches(3))
    assert [f["outer/step"] for f in result.fetched] == [0, 1, 1]


def test_ref_variables_are_refused():
    """With them an update overtakes reads of the same step: momentum trains on wrong values."""
    previous = tf.resource_variables_enabled()
    tf.disable_resource_variables()
    try:
        make = functools.partial(outer, "momentum", "2", 2, outer_momentum=0.5)
        with pytest.raises(ValueError, match=r"w1.* ref variable.*enable_resource_variables"):
            run("placement", "2", make, 1)
    finally:
        if previous:
            tf.enable_resource_variables()
