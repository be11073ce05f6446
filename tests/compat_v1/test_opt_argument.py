"""Which optimizer a wrapper makes of which, by hand and by gin."""

import gin
import pytest

import mtf_gradsync as gs
from mtf_gradsync import compat_v1
from mtf_gradsync._private.libraries import mtf, tf

MESH = {"mesh_shape": "all:4", "layout": "batch:all"}


def test_each_wrapper_makes_its_counterpart():
    adam = tf.train.AdamOptimizer(0.1)
    cross = gs.CrossShardOptimizer(adam, **MESH)
    assert type(cross) is compat_v1.CrossShardOptimizer
    assert cross.opt is adam
    gathered = gs.GradientAccumulationOptimizer(cross, 3, **MESH)
    assert type(gathered) is compat_v1.GradientAccumulationOptimizer
    assert gathered.opt is cross
    sync = gs.SyncReplicasOptimizer(adam, 2, 3, variable_averages=0.9, variables_to_average=[])
    assert isinstance(sync, tf.train.SyncReplicasOptimizer)
    assert type(gs.CrossShardOptimizer(gs.MeshOptimizer(adam))) is gs.CrossShardOptimizer


def test_classes_and_factories_of_them():
    for opt in (
        tf.train.GradientDescentOptimizer,
        lambda learning_rate: tf.train.MomentumOptimizer(learning_rate, 0.9),
    ):
        made = gs.CrossShardOptimizer(opt, learning_rate=0.25)
        assert isinstance(made.opt, tf.train.Optimizer)
        with pytest.raises(ValueError, match="give learning_rate"):
            gs.CrossShardOptimizer(opt)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("contributes", [True]), ("local_steps", [0]), ("max_steps_without_update", 3)],
)
def test_what_tensorflow_has_not_is_refused(argument, value):
    with pytest.raises(ValueError, match=f"{argument} goes with mesh optimizers"):
        gs.SyncReplicasOptimizer(tf.train.AdamOptimizer(0.1), 2, **{argument: value})


def test_clipping_takes_mesh_optimizers_only():
    with pytest.raises(TypeError, match=r"ClipByGlobalNormOptimizer\(gs.MeshOptimizer"):
        gs.ClipByGlobalNormOptimizer(tf.train.AdamOptimizer(0.1), 1.0)


def test_an_optimizer_around_itself_is_an_error():
    adam = tf.train.AdamOptimizer(0.1)
    adam._opt = adam
    with pytest.raises(ValueError, match="contains itself: AdamOptimizer > AdamOptimizer "):
        gs.GradientAccumulationOptimizer(adam, 2)


@pytest.mark.parametrize(
    ("keras", "instead"),
    [("SGD", "MomentumOptimizer"), ("Adam", "AdamOptimizer"), ("Nadam", "AdamOptimizer")],
)
def test_keras_optimizers_are_refused_with_the_class_to_use(keras, instead):
    fake = type(keras, (type("OptimizerV2", (), {"__module__": "keras.optimizer_v2"}),), {})()
    for wrapper in (gs.CrossShardOptimizer, gs.MeshOptimizer):
        with pytest.raises(TypeError, match=rf"tf\.compat\.v1\.train\.{instead}\(\.\.\.\)"):
            wrapper(fake)


GIN = """
GradientAccumulationOptimizer.opt = @CrossShardOptimizer
GradientAccumulationOptimizer.backward_passes_per_step = 4
mtf_gradsync.CrossShardOptimizer.opt = @{inner}
CrossShardOptimizer.mesh_shape = "all:4"
CrossShardOptimizer.layout = "batch:all"
"""


@pytest.mark.parametrize("inner", ["test/Adam", "AdamWeightDecayOptimizer", "test/MeshAdam"])
def test_one_gin_file_serves_pipelines_with_a_mesh_and_without(inner):
    inner = inner.replace("test/", "test_wrappers.")
    with gin.unlock_config():
        gin.clear_config()
        try:
            gin.parse_config(GIN.format(inner=inner))
            optimizer = gs.GradientAccumulationOptimizer(learning_rate=0.1)
        finally:
            gin.clear_config()
    has_mesh = "Mesh" in inner or "Decay" in inner
    assert isinstance(optimizer, mtf.optimize.Optimizer) == has_mesh
    assert isinstance(optimizer, tf.train.Optimizer) != has_mesh
    assert isinstance(optimizer.opt, gs.CrossShardOptimizer) == has_mesh
    assert isinstance(optimizer.opt, tf.tpu.CrossShardOptimizer) != has_mesh


gin.external_configurable(tf.train.AdamOptimizer, "Adam", module="test_wrappers")


@gin.configurable("MeshAdam", module="test_wrappers")
def mesh_adam(learning_rate):
    return gs.MeshOptimizer(tf.train.AdamOptimizer, learning_rate)
