"""Wrappers chosen and built by gin alone, as T5's pipelines do."""

import gin
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.tools._private.gin import registered
from mtf_gradsync.tools.train import run, sampling  # noqa: F401 (they register more names)


@gin.configurable(module="tests.pipelines")
def pipeline(optimizer, learning_rate=0.25):
    """What mesh_tensorflow.transformer.utils does with its optimizer."""
    return optimizer(learning_rate=learning_rate)


@pytest.fixture(autouse=True)
def clean_gin():
    gin.clear_config()
    yield
    gin.clear_config()


@pytest.mark.parametrize("name", sorted(n for n in registered() if n.startswith("mtf_gradsync.")))
def test_a_parameter_that_is_not_there_is_refused_when_it_is_bound(name):
    with pytest.raises(ValueError, match="doesn't have a parameter named 'nothing'"):
        gin.parse_config(f"{name}.nothing = 1")


def test_an_unscoped_class():
    gin.parse_config("""
        pipeline.optimizer = @CrossShardOptimizer
        CrossShardOptimizer.opt = @SgdOptimizer
    """)
    made = pipeline()
    assert isinstance(made, gs.CrossShardOptimizer)
    assert isinstance(made.opt, mtf.optimize.SgdOptimizer)
    assert made.opt.lr == 0.25


def test_a_wrapper_in_itself_by_scopes():
    gin.parse_config("""
        pipeline.optimizer = @outer/CrossShardOptimizer
        outer/CrossShardOptimizer.opt = @inner/CrossShardOptimizer
        inner/CrossShardOptimizer.opt = @AdafactorOptimizer
        AdafactorOptimizer.beta1 = 0.5
    """)
    made = pipeline()
    assert isinstance(made.opt, gs.CrossShardOptimizer)
    assert isinstance(made.opt.opt, mtf.optimize.AdafactorOptimizer)


def test_axes_reducer_and_reduction():
    gin.parse_config("""
        pipeline.optimizer = @CrossShardOptimizer
        CrossShardOptimizer.opt = @SgdOptimizer
        CrossShardOptimizer.axes = @ReplicaAxes()
        CrossShardOptimizer.reducer = @FusedAllReduce()
        CrossShardOptimizer.reduction = "weighted_sum"
        ReplicaAxes.mesh_shape = "batch:4;model:2"
        ReplicaAxes.layout = "batch:batch;heads:model"
        FusedAllReduce.bucket_bytes = 1024
    """)
    made = pipeline()
    assert made.axes.num_shards == 4
    assert made.reducer.bucket_bytes == 1024


def test_parentheses_are_explained():
    gin.parse_config("""
        pipeline.optimizer = @CrossShardOptimizer
        CrossShardOptimizer.opt = @SgdOptimizer()
        SgdOptimizer.learning_rate = 0.5
    """)
    with pytest.raises(ValueError, match="without parentheses"):
        pipeline()
