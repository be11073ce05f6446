"""Copies of wrappers, and subclasses with arguments of their own."""

import copy
import pickle

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness
from tests.wrappers import REGISTRY

SHAPE, LAYOUT, BATCH_DIMS = harness.MESHES["2"]
MESH = {"mesh_shape": SHAPE, "layout": LAYOUT, "batch_dims": BATCH_DIMS}
ARGUMENTS = {
    getattr(gs, name): {**entry.needs, **entry.telling, **MESH} for name, entry in REGISTRY.items()
}
every_wrapper = pytest.mark.parametrize("kind", ARGUMENTS, ids=lambda kind: kind.__name__)


def momentum(learning_rate=0.25):
    return mtf.optimize.MomentumOptimizer(learning_rate, 0.5)


def train(opt):
    def build(mesh, inputs):
        batch, features = mtf.Dimension("batch", 4), mtf.Dimension("d", 8)
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, features]))
        w = mtf.get_variable(mesh, "w", mtf.Shape([features]), initializer=tf.ones_initializer())
        loss = mtf.reduce_mean(mtf.square(mtf.einsum([x, w], mtf.Shape([batch]))))
        return opt.apply_grads(*zip(*opt.compute_gradients(loss))), {}

    return build


@every_wrapper
@pytest.mark.mostly_slow(every=7)
def test_a_copy_of_one_that_has_trained_trains_from_the_start(kind, mesh_kind):
    original, rng = kind(momentum(), **ARGUMENTS[kind]), np.random.RandomState(1)
    feeds = [{"x": rng.randn(4, 8).astype("f")} for _ in range(3)]
    expected = harness.run(mesh_kind, SHAPE, LAYOUT, train(original), feeds).variables
    made = [v.name for v in original.variables()]
    copied = copy.deepcopy(original)
    found = harness.run(mesh_kind, SHAPE, LAYOUT, train(copied), feeds).variables
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert [v.name for v in original.variables()] == made


@every_wrapper
def test_copies_have_the_settings_and_no_step(kind):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    w = mtf.get_variable(mesh, "w", mtf.Shape([mtf.Dimension("d", 8)]))
    rate = mtf.constant(mesh, 0.5, mtf.Shape([]))
    # Of the graph, as the rate is; what holds itself must not be walked for ever.
    inner = momentum(rate)
    inner.more = {w.operation: [tf.constant(1.0)]}
    inner.more["itself"] = inner.more
    arguments = dict(ARGUMENTS[kind])
    if kind is gs.AverageOptimizer:
        arguments["variables_to_average"] = [w.operation]
    original = kind(inner, **arguments)
    grads = mtf.gradients([mtf.reduce_sum(mtf.square(w))], [w])
    original.apply_grads(grads, [w.operation])
    assert original.step is not None
    assert original.get_slot(w.operation, "momentum_v") is not None
    for copied in (copy.copy(original), copy.deepcopy(original)):
        assert type(copied) is kind
        assert copied.step is None
        assert copied.times_applied == 0
        assert copied.variables() == []
        assert copied.get_slot(w.operation, "momentum_v") is None
        assert gs.reported(copied) == {}
        assert copied.name == original.name
        assert str(copied.axes) == str(original.axes)
        assert copied.opt._lr is rate
        assert copied.__dict__.keys() <= original.__dict__.keys()
    assert copy.copy(original).opt is inner
    deep = copy.deepcopy(original)
    assert deep.opt is not inner
    assert deep.opt.more is not inner.more
    assert deep.opt.more[w.operation][0] is inner.more[w.operation][0]
    if kind is gs.AverageOptimizer:
        assert deep._averaged == [w.operation]
    # The stack of a copy is one of its own.
    deep.opt.more.clear()
    assert inner.more


@every_wrapper
def test_settings_are_pickled(kind):
    loaded = pickle.loads(pickle.dumps(kind(momentum(), **ARGUMENTS[kind])))
    assert (type(loaded), loaded.opt._lr, loaded.variables()) == (kind, 0.25, [])


def test_a_copy_of_a_mesh_optimizer_has_no_step():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    w = mtf.get_variable(mesh, "w", mtf.Shape([mtf.Dimension("d", 8)]))
    original = gs.MeshOptimizer(tf.train.MomentumOptimizer(0.5, 0.5))
    original.apply_grads([mtf.ones(mesh, w.shape)], [w.operation])
    for copied in (copy.copy(original), copy.deepcopy(original)):
        assert copied.variables() == []
        copied.apply_grads([mtf.ones(mesh, w.shape)], [w.operation])
    assert [v.name for v in original.variables()] == ["w/Momentum"]


@every_wrapper
def test_subclasses_have_arguments_of_their_own(kind):
    class First(kind):
        def __init__(self, extra, opt, **kwargs):
            super().__init__(opt, **kwargs)
            self.extra = extra

    class ByName(kind):
        def __init__(self, *args, extra, **kwargs):
            super().__init__(*args, **kwargs)
            self.extra = extra

    class Without(kind):
        def __init__(self):
            super().__init__(momentum(), **ARGUMENTS[kind])
            self.extra = 3

    arguments = ARGUMENTS[kind]
    for made in (
        First(3, momentum(), **arguments),
        First(extra=3, learning_rate=0.25, opt=momentum, **arguments),
        ByName(momentum(), extra=3, **arguments),
        ByName(learning_rate=0.25, opt=mtf.optimize.SgdOptimizer, extra=3, **arguments),
        Without(),
    ):
        for one in (made, copy.copy(made), copy.deepcopy(made)):
            assert (type(one), one.extra, type(one.opt)) == (type(made), 3, type(made.opt))
    with pytest.raises(TypeError, match=r"ByName wraps Mesh-TensorFlow optimizers, got the Tens"):
        ByName(tf.train.AdamOptimizer(0.1), extra=3, **arguments)
