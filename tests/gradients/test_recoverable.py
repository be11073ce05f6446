"""Which shard's data gradients hold, where the layout splits more than the batch over its axis."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.flow import Cause
from mtf_gradsync.gradients.shards import Recoverability, mixed_gradients
from tests import models
from tests.programs import mixture

MESH, LAYOUT = "rows:2;cols:2", "batch:rows;experts:rows;copies:rows;part:rows;hidden:cols"
AXES = gs.ReplicaAxes(MESH, LAYOUT)
BATCH, D, EXPERTS = mtf.Dimension("batch", 4), mtf.Dimension("d", 2), mtf.Dimension("experts", 2)
COPIES, EACH = mtf.Dimension("copies", 2), mtf.Dimension("each", 2)
LENGTH, PART, ALL = mtf.Dimension("length", 2), mtf.Dimension("part", 2), mtf.Dimension("all", 4)


def variable(mesh, name, *dims):
    return mtf.get_variable(mesh, name, mtf.Shape(list(dims)))


def mean_square(x, *, over=None):
    return mtf.reduce_mean(mtf.square(x)) if over is None else mtf.reduce_sum(mtf.square(x)) / over


def summed(mesh, x):
    """A sum of all experts, which each shard multiplies by its own examples."""
    w, v = variable(mesh, "w", EXPERTS, D), variable(mesh, "v", EXPERTS)
    return mean_square(mtf.einsum([x, mtf.einsum([w, v], [D])], [BATCH]))


def gathered(mesh, x):
    """As with fully sharded parameters: each processor gathers all of a variable, and uses it."""
    w = variable(mesh, "w", EXPERTS, D)
    return mean_square(mtf.einsum([x, mtf.rename_dimension(w, "experts", "all")], reduced_dims=[D]))


def penalized(mesh, x):
    w = variable(mesh, "w", EXPERTS, D)
    return mean_square(x * variable(mesh, "q", D)) + 0.1 * mtf.reduce_sum(mtf.square(w))


def exchanged(mesh, x):
    """What experts share is used by the examples of all shards, as the experts are."""
    everyone = mtf.rename_dimension(x, "batch", "everyone")
    at_experts = mtf.broadcast(everyone, mtf.Shape([EXPERTS, *everyone.shape.dims]))
    made = at_experts * variable(mesh, "w", EXPERTS, D) + variable(mesh, "bias", D)
    return mean_square(made) + mean_square(x * variable(mesh, "q", D))


def sequence(mesh, x):
    """Examples are exchanged for parts of each sequence, and come back; no variable is split."""
    x = mtf.broadcast(x, mtf.Shape([BATCH, LENGTH, D])) * variable(mesh, "before", D)
    parts = mtf.reshape(x, mtf.Shape([ALL, PART, D])) * variable(mesh, "between", D)
    back = mtf.tanh(mtf.reshape(parts, x.shape))
    return mean_square(back * variable(mesh, "after", D))


def copied(mesh, x):
    """Each shard has its own copy, under another name than the batch's."""
    in_place = mtf.reshape(x, mtf.Shape([COPIES, EACH, D]))
    return mean_square(in_place * variable(mesh, "w", COPIES, D))


def copied_and_penalized(mesh, x):
    loss = copied(mesh, x)
    return loss + mtf.reduce_sum(mtf.square(mesh.graph.trainable_variables[0].value))


def mean_of_weights(mesh, x):
    """A number that is counted over the batch divides the loss."""
    count = mtf.reduce_sum(mtf.square(x))
    copies = mtf.reshape(x, mtf.Shape([COPIES, EACH, D])) * variable(mesh, "w", COPIES, D)
    return mean_square(copies, over=count) + mean_square(x * variable(mesh, "q", D), over=count)


def normalized(mesh, x):
    y = x * variable(mesh, "before", D)
    y -= mtf.reduce_mean(y, output_shape=mtf.Shape([D]))
    return mean_square(y * variable(mesh, "q", D))


def squared(mesh, x):
    """Not linear in the sum that is broadcast."""
    w = variable(mesh, "w", EXPERTS)
    return mtf.square(mtf.reduce_mean(x)) * mtf.reduce_sum(mtf.square(w))


# For each program what is said of each variable: an operation's cause; "made" again, or "shared",
# where stages that skip shards can do without them; or "own".
PROGRAMS = {
    "summed": (summed, {"w": "made", "v": "made"}),
    "gathered": (gathered, {"w": "made"}),
    "penalized": (penalized, {"w": "shared", "q": "own"}),
    "exchanged": (exchanged, {"w": Cause.GATHERS, "bias": Cause.GATHERS, "q": "own"}),
    "sequence": (sequence, {"before": "own", "between": Cause.GATHERS, "after": "own"}),
    "copied": (copied, {"w": "own"}),
    "copied and penalized": (copied_and_penalized, {"w": Cause.SPLIT}),
    "mean of weights": (mean_of_weights, {"w": "own", "q": "own"}),
    "normalized": (normalized, {"before": "own", "q": "own"}),
    "squared": (squared, {"w": Cause.NEEDS_SUM}),
}


def gradients_of(loss, axes=AXES):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.import_tf_tensor(mesh, tf.ones([BATCH.size, D.size]), mtf.Shape([BATCH, D]))
    variables = mesh.graph.trainable_variables
    loss = loss(mesh, x)
    return mtf.gradients([loss], [v.value for v in variables]), variables


def said_of(apart, number):
    if number in apart.from_sums:
        assert apart.mixed[number].cause is Cause.NEEDS_SUM
        return "made"
    if number in apart.mixed:
        return apart.mixed[number].cause
    return "shared" if number in apart.shared else "own"


@pytest.mark.parametrize("what", list(PROGRAMS))
def test_whose_data_a_gradient_holds(what):
    loss, expected = PROGRAMS[what]
    grads, variables = gradients_of(loss)
    apart = Recoverability(grads, AXES)
    assert {v.name: said_of(apart, i) for i, v in enumerate(variables)} == expected


def test_experts_that_get_the_examples_of_all_shards():
    """Variables before and behind the experts are those of an ordinary model."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    inputs = {k: tf.constant(v) for k, v in mixture.feed(np.random.RandomState(0)).items()}
    loss = mtf.reduce_mean(mixture.loss(mesh, inputs))
    grads, variables = models.gradients(loss)
    axes = gs.ReplicaAxes(MESH, mixture.STYLE.layout)
    apart = Recoverability(grads, axes)
    found = {v.name: said_of(apart, i) for i, v in enumerate(variables)}
    experts = {"experts_in": Cause.GATHERS, "experts_out": Cause.GATHERS}
    assert found == {"gate": "own", "out": "own", **experts}
    # What only adds up has no use for that.
    assert not mixed_gradients(grads, axes)
    with pytest.raises(ValueError, match="'experts_in'") as error:
        gs.clip_by_shard_norm(grads, 1.0, axes)
    assert "another mesh axis" in str(error.value)
    assert "'out'" not in str(error.value)


def test_two_dims_of_a_tensor_on_one_mesh_axis_are_told_first():
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(mesh, tf.zeros([4, 2]), mtf.Shape([BATCH, D]))
        both = mtf.tanh(mtf.broadcast(x, mtf.Shape([BATCH, COPIES, D])))
        loss = squared(mesh, x) + mean_square(both)
        grads = mtf.gradients([loss], [v.value for v in graph.trainable_variables])
        opt = mtf.optimize.SgdOptimizer(0.1)
        told = r"Two Tensor Dimensions may not map .*batch=4, copies=2.* this is the shape of '"
        for apply in (
            gs.SyncReplicasOptimizer(opt, 2, axes=AXES).apply_grads,
            lambda grads, _: gs.per_shard(grads, AXES),
        ):
            with pytest.raises(ValueError, match=told):
                apply(grads, graph.trainable_variables)
