"""What LossScaleOptimizer refuses, and how it says so."""

import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import models


def sgd():
    return mtf.optimize.SgdOptimizer(0.1)


def model():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    dim = mtf.Dimension("d", 4)
    x, y = (
        mtf.get_variable(mesh, name, mtf.Shape([dim]), initializer=tf.ones_initializer())
        for name in ("x", "y")
    )
    return mtf.reduce_sum(x * y), graph.trainable_variables


def test_gradients_have_to_come_from_a_loss():
    loss, variables = model()
    operations = list(loss.graph.operations)
    with pytest.raises(ValueError, match="'x' does not come from"):
        gs.LossScaleOptimizer(sgd()).apply_grads([v.value for v in variables], variables)
    assert loss.graph.operations == operations


def halved(grads, values):
    return [g * 0.5 for g in grads]


def cast(grads, values):
    return [mtf.cast(mtf.cast(g, tf.float16), tf.float32) for g in grads]


def summed(grads, values):
    return gs.sum_shards(grads)


def shown(grads, values):
    return [mtf.stop_gradient(mtf.Print(g, [g], "gradient")) for g in grads]


def by_a_factor(grads, values):
    return [mtf.einsum([g, mtf.reduce_sum(v)], g.shape) for g, v in zip(grads, values)]


@pytest.mark.parametrize("change", [halved, cast, summed, shown, by_a_factor])
def test_gradients_may_be_changed_linearly_before(change):
    loss, variables = model()
    values = [v.value for v in variables]
    grads = change(mtf.gradients([loss], values), values)
    assert gs.LossScaleOptimizer(sgd()).apply_grads(grads, variables)


def clipped(grads, values):
    return gs.clip_by_global_norm(grads, 1.0)[0]


def decayed(grads, values):
    return [g + 0.1 * v for g, v in zip(grads, values)]


def squared(grads, values):
    return [mtf.square(g) for g in grads]


def raised(grads, values):
    return [g + 1.0 for g in grads]


@pytest.mark.parametrize("change", [clipped, decayed, squared, raised])
def test_other_changes_need_gradients_without_the_scale(change):
    loss, variables = model()
    values = [v.value for v in variables]
    grads = change(mtf.gradients([loss], values), values)
    operations = list(loss.graph.operations)
    with pytest.raises(ValueError, match="before the scale was taken out"):
        gs.LossScaleOptimizer(sgd()).apply_grads(grads, variables)
    assert loss.graph.operations == operations
    # The scale is out of what compute_gradients returns.
    optimizer = gs.LossScaleOptimizer(sgd())
    computed = [g for g, _ in optimizer.compute_gradients(loss)]
    assert optimizer.apply_grads(change(computed, values), variables)


def test_one_loss_has_one_scale():
    loss, variables = model()
    grads = mtf.gradients([loss], [v.value for v in variables])
    gs.LossScaleOptimizer(sgd(), name="first").apply_grads(grads[:1], variables[:1])
    with pytest.raises(ValueError, match="second and first would both scale"):
        gs.LossScaleOptimizer(sgd(), name="second").apply_grads(grads[1:], variables[1:])


@pytest.mark.parametrize("scaled_first", [True, False])
def test_other_optimizers_do_not_get_the_scale(scaled_first):
    loss, variables = model()
    grads = mtf.gradients([loss], [v.value for v in variables])
    stacks = [gs.LossScaleOptimizer(sgd()), gs.CrossShardOptimizer(sgd())]
    first, second = stacks if scaled_first else stacks[::-1]
    first.apply_grads(grads[:1], variables[:1])
    with pytest.raises(ValueError, match="whose losses LossScaleOptimizer scales"):
        second.apply_grads(grads[1:], variables[1:])


def test_a_gradient_in_a_loss_is_not_scaled_twice():
    loss, variables = model()
    values = [v.value for v in variables]
    first = mtf.gradients([loss], values)
    penalty = mtf.reduce_sum(mtf.square(first[0]))
    (second,) = mtf.gradients([penalty], values[1:])
    optimizer = gs.LossScaleOptimizer(sgd())
    with pytest.raises(ValueError, match="would be scaled twice"):
        optimizer.apply_grads([first[0], first[1] + second], variables)
    whole = mtf.gradients([loss + penalty], values)
    assert optimizer.apply_grads(whole, variables)


def test_gradients_of_another_optimizer():
    loss, _ = model()
    pairs = gs.LossScaleOptimizer(sgd(), name="first").compute_gradients(loss)
    with pytest.raises(ValueError, match="give it to the optimizer that computed it"):
        gs.LossScaleOptimizer(sgd(), name="second").apply_gradients(pairs)


def test_all_variables_at_once():
    loss, _ = model()
    optimizer = gs.LossScaleOptimizer(sgd())
    (first, second) = optimizer.compute_gradients(loss)
    optimizer.apply_grads(*zip(first))
    with pytest.raises(ValueError, match="all of them at once"):
        optimizer.apply_grads(*zip(second))


def test_nothing_to_apply():
    _, variables = model()
    assert gs.LossScaleOptimizer(sgd()).apply_grads([None, None], variables) == []


def test_slots_and_variables():
    loss, variables = model()
    optimizer = gs.LossScaleOptimizer(models.OPTIMIZERS["momentum"]())
    assert optimizer.scale is None
    assert optimizer.skipped is None
    optimizer.minimize(loss)
    names = {v.name for v in optimizer.variables()}
    state = {f"LossScaleOptimizer/{x}" for x in ("scale", "good_steps", "skipped")}
    assert state < names
    assert optimizer.get_slot(variables[0], "momentum_v").name in names
    assert optimizer.scale.name == "LossScaleOptimizer/scale"


def test_a_fixed_scale_is_a_number():
    loss, _ = model()
    optimizer = gs.LossScaleOptimizer(sgd(), loss_scale=128)
    optimizer.minimize(loss)
    assert optimizer.scale == 128
    assert optimizer.good_steps is None
    assert [v.name for v in optimizer.variables()] == ["LossScaleOptimizer/skipped"]
