"""What an outer optimizer cannot do is an error before the graph changes."""

import contextlib

import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models

FOUR = {"mesh_shape": "all:4", "layout": "batch:all"}
TWO_LEVELS = {
    "mesh_shape": "a:2;b:2",
    "layout": "outer:a;batch:b",
    "batch_dims": ("outer", "batch"),
}


def sgd():
    return mtf.optimize.SgdOptimizer(0.1)


def test_averages_inside_an_optimizer_of_another_library_are_refused():
    class Other(mtf.optimize.Optimizer):
        opt = gs.AverageOptimizer(sgd(), 0.9)

    with pytest.raises(ValueError, match="put AverageOptimizer directly inside OuterOptimizer"):
        gs.OuterOptimizer(Other(), 4, **FOUR)


def test_updates_are_split_over_an_island_and_a_wrapper_keeps_its_axes():
    class Fails(mtf.optimize.Optimizer):
        def apply_grads(self, grads, variables):
            seen.append(grads[0].shape.to_string)
            assert len(variables) > 1, "fails"
            return [mtf.assign_sub(v, g) for g, v in zip(grads, variables)]

    class Other(mtf.optimize.Optimizer):
        def __init__(self, opt):
            self.opt = opt

        def apply_grads(self, grads, variables):
            return self.opt.apply_grads(grads, variables)

    for around in (lambda opt: opt, Other):
        seen, given = [], gs.ReplicaAxes(**TWO_LEVELS)
        inner = gs.ShardedUpdateOptimizer(Fails(), min_size=1, axes=given)
        outer = gs.OuterOptimizer(around(inner), 2, outer_dims="outer", axes=given)
        for opt, count in ((outer, 1), (outer, 3), (inner, 3)):
            with tf.Graph().as_default():
                loss, variables = model()
                fails = pytest.raises(AssertionError) if count == 1 else contextlib.nullcontext()
                with fails:
                    opt.minimize(loss, var_list=variables[:count])
            assert inner.axes is given
        # The dimensions that replicas split have the names of the axes.
        island, alone = "Shape[batch=6, hidden=8]", "Shape[outer=6, batch=8]"
        assert seen == [island, island, alone]


def model():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    batch = {k: tf.constant(v) for k, v in models.mlp_batches(1)[0].items()}
    loss = models.mlp_loss(mesh, batch)
    return loss, mesh.graph.trainable_variables


@pytest.mark.parametrize(
    ("arguments", "change", "error"),
    [
        (
            {"fragments": 8},
            lambda grads: grads,
            "fragments=8 variables with gradients, but got 3",
        ),
        (
            {"fragments": 2},
            lambda grads: [*grads[:1], None, None],
            "at least fragments=2 variables with gradients, but got 1",
        ),
        ({}, lambda grads: gs.clip_by_global_norm(grads, 1.0)[0], "NEEDS_SUM|needs the sum over"),
        (
            {"layout": "batch:all;hidden:all"},
            lambda grads: grads,
            "'w1' of shape .* over an axis of the islands",
        ),
    ],
)
def test_gradients_that_islands_cannot_have(arguments, change, error):
    loss, variables = model()
    grads = change(mtf.gradients([loss], [v.value for v in variables]))
    opt = gs.OuterOptimizer(sgd(), 8, **{**FOUR, **arguments})
    with harness.unchanged(loss.graph), pytest.raises(ValueError, match=error):
        opt.apply_grads(grads, variables)


def test_gradients_are_applied_once_in_a_graph():
    loss, variables = model()
    opt = gs.OuterOptimizer(sgd(), 8, **FOUR)
    grads = mtf.gradients([loss], [v.value for v in variables])
    assert opt.apply_grads([None] * len(grads), variables) == []
    opt.apply_grads(grads, variables)
    with pytest.raises(ValueError, match="has applied a gradient of 'w1' in this graph"):
        opt.apply_grads(grads, variables)


def test_variables_are_stacked_after_their_gradients_are_applied():
    loss, _ = model()
    hidden = mtf.Dimension("hidden", 8)
    more = [mtf.get_variable(loss.mesh, f"layer_{i}", mtf.Shape([hidden])) for i in range(2)]
    loss = loss + mtf.reduce_sum(more[0] * more[1])
    loss.graph.rewrite_stack_variables()
    with pytest.raises(ValueError, match="is a stack of variables: apply gradients before"):
        gs.OuterOptimizer(sgd(), 8, **FOUR).minimize(loss)


def test_an_optimizer_inside_that_fails_leaves_the_graph_as_it_was():
    class Fails(mtf.optimize.Optimizer):
        def apply_grads(self, grads, variables):
            mtf.get_variable(grads[0].mesh, "slot", mtf.Shape([]), trainable=False)
            raise RuntimeError("fails")

    loss, variables = model()
    grads = mtf.gradients([loss], [v.value for v in variables])
    with harness.unchanged(loss.graph, tensorflow=False), pytest.raises(
        RuntimeError, match="fails"
    ):
        gs.OuterOptimizer(Fails(), 2, **FOUR).apply_grads(grads, variables)
