"""Shards' values that nothing sums are reported, by every wrapper."""

import logging

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models

MESH, LAYOUT, _ = harness.MESHES["2x2"]
AXES = gs.ReplicaAxes(MESH, LAYOUT)
BATCH, VOCAB, D = mtf.Dimension("batch", 4), mtf.Dimension("vocab", 3), mtf.Dimension("d", 2)
SHARDS = mtf.Dimension("batch", AXES.num_shards)
IDS = np.array([0, 1, 1, 2], np.int32)
FEED = {"ids": IDS, "target": np.arange(8, dtype="f").reshape(4, 2)}


def lookup(table, ids):
    return tf.matmul(tf.one_hot(ids, VOCAB.size), table)


def scatter(ids, dy):
    return tf.math.unsorted_segment_sum(dy, ids, VOCAB.size)


def dropped(op, dy):
    """The gradient of a table by hand: of each processor's part of the batch alone."""
    _, ids = op.inputs
    shape, splittable = mtf.Shape([VOCAB, D]), [BATCH, D]
    return [mtf.slicewise(scatter, [ids, dy], shape, dy.dtype, splittable), None]


def summed(op, dy):
    """As the warning says."""
    _, ids = op.inputs
    rows = mtf.slicewise(
        lambda i, y: scatter(i, y)[None],
        [ids, dy],
        mtf.Shape([SHARDS, VOCAB, D]),
        dy.dtype,
        [BATCH, D],
    )
    return [mtf.reduce_sum(rows, reduced_dim=SHARDS), None]


class Scatter(mtf.Operation):
    """An operation of the program's own, which sums by itself, leaves that, or forgets it."""

    def __init__(self, ids, dy, sums):
        super().__init__([ids, dy], name="scatter")
        self._sums = sums
        self._outputs = [mtf.Tensor(self, mtf.Shape([VOCAB, D]), dy.dtype)]

    def lower(self, lowering):
        mesh_impl = lowering.mesh_impl(self)
        value = mesh_impl.slicewise(scatter, *[lowering.tensors[x] for x in self.inputs])
        if self._sums == "now":
            value = mesh_impl.allreduce(value, [0], "SUM")
        elif self._sums == "later":
            value = mtf.LazyAllreduceSum(mesh_impl, value, [0])
        lowering.set_tensor_lowering(self.outputs[0], value)


def by_operation(sums):
    return lambda op, dy: [Scatter(op.inputs[1], dy, sums).outputs[0], None]


# None is what TensorFlow makes of `lookup`: the gradient of each slice.
GRADIENTS = {
    "TensorFlow's": None,
    "dropped": dropped,
    "summed": summed,
    "forgotten": by_operation(None),
    "summed now": by_operation("now"),
    "summed later": by_operation("later"),
}
TOLD = ["TensorFlow's", "dropped", "forgotten"]


def gradients_on(mesh, inputs, gradient):
    table = models.variable(mesh, "table", [VOCAB, D], 1)
    ids = mtf.import_tf_tensor(mesh, inputs["ids"], mtf.Shape([BATCH]))
    target = mtf.import_tf_tensor(mesh, inputs["target"], mtf.Shape([BATCH, D]))
    rows = mtf.slicewise(
        lookup, [table, ids], mtf.Shape([BATCH, D]), tf.float32, [BATCH, D], gradient
    )
    scale = mtf.get_variable(mesh, "scale", mtf.Shape([D]), initializer=tf.ones_initializer())
    loss = mtf.reduce_sum(mtf.square(rows * scale - target))
    variables = mesh.graph.trainable_variables
    return mtf.gradients([loss], [v.value for v in variables]), variables


def step(gradient, opt):
    def build(mesh, inputs):
        return opt.apply_grads(*gradients_on(mesh, inputs, gradient)), {}

    return build


def cross_shard():
    return gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.25))


def updated():
    """The table and the scale after a step, in numpy."""
    table, scale = np.ones((VOCAB.size, D.size)), np.ones(D.size)
    off = 2 * (table[IDS] * scale - FEED["target"])
    grad = np.zeros_like(table)
    np.add.at(grad, IDS, off * scale)
    return table - 0.25 * grad, scale - 0.25 * np.sum(off * table[IDS], 0)


@pytest.mark.parametrize("what", list(GRADIENTS))
def test_what_nothing_sums_is_warned_of_once_by_variable_and_operation(what, caplog, mesh_kind):
    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        result = harness.run(mesh_kind, MESH, LAYOUT, step(GRADIENTS[what], cross_shard()), [FEED])
    said = [r.getMessage() for r in caplog.records if "nothing sums" in r.getMessage()]
    table, scale = updated()
    np.testing.assert_array_equal(result.variables["scale"], scale)  # small whole numbers
    if what in TOLD:
        (text,) = said
        kinds = dict(zip(TOLD, ("GenericGradOperation", "SlicewiseOperation", "Scatter")))
        for part in (kinds[what], "variable 'table'", "mtf.reduce_sum"):
            assert part in text
        return
    assert not said
    np.testing.assert_array_equal(result.variables["table"], table)


@pytest.mark.parametrize("what", ["TensorFlow's", "dropped"])
def test_errors_say_what_the_operation_does_and_what_to_do(what):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    inputs = {k: tf.constant(v) for k, v in FEED.items()}
    opt = gs.SyncReplicasOptimizer(mtf.optimize.SgdOptimizer(0.25), 2, axes=AXES)
    with pytest.raises(ValueError, match="drops a dimension that the slices are split") as error:
        opt.apply_grads(*gradients_on(mesh, inputs, GRADIENTS[what]))
    text = str(error.value)
    assert "variable 'table'" in text
    assert "mtf.reduce_sum" in text
    for other in ("'scale'", "norm", "accept_summed"):
        assert other not in text


def test_what_the_error_says_helps():
    opt = gs.SyncReplicasOptimizer(mtf.optimize.SgdOptimizer(0.5), 2, axes=AXES)
    result = harness.run("simd", MESH, LAYOUT, step(summed, opt), [FEED])
    table, scale = updated()
    # Of a sum of the shards' losses it takes the gradient of the mean over both.
    np.testing.assert_array_equal(result.variables["table"], table + (table - 1))
    np.testing.assert_array_equal(result.variables["scale"], scale + (scale - 1))


def test_the_error_of_a_reshape_speaks_of_gathering():
    """As a mixture of experts does that has no groups."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.import_tf_tensor(mesh, tf.ones([4, 2]), mtf.Shape([BATCH, D]))
    gate = mtf.get_variable(mesh, "gate", mtf.Shape([D]))
    y = mtf.get_variable(mesh, "before", mtf.Shape([D])) * x
    unsplit = mtf.rename_dimension(y, "batch", "batch_unsplit")
    loss = mtf.reduce_sum(mtf.square(mtf.einsum([unsplit, gate], unsplit.shape - D)))
    grads, _ = models.gradients(loss)
    with pytest.raises(ValueError, match="gathers the values of all shards") as error:
        gs.per_shard(grads, AXES)
    text = str(error.value)
    assert "ReshapeOperation" in text
    assert "mixture of experts" in text
    assert "norm" not in text.lower()
