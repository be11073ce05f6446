"""What importing the package puts back into TensorFlow, and what it leaves alone."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import textwrap
import types

import pytest
import tensorflow as tf2
from tensorflow.python.framework import ops

import mtf_gradsync
from mtf_gradsync._private import estimator_stand_ins, libraries
from mtf_gradsync._private.estimator_stand_ins import EstimatorRemovedError
from mtf_gradsync._private.libraries import ESTIMATOR_AVAILABLE, mtf, tf
from tests.runtimes.cluster.processes import Processes

TF_VERSION = tuple(int(part) for part in tf2.__version__.split(".")[:2])

needs_estimator = pytest.mark.skipif(
    not ESTIMATOR_AVAILABLE,
    reason=f"TensorFlow {tf2.__version__} has no Estimator (it left after 2.15)",
)
without_estimator = pytest.mark.skipif(
    ESTIMATOR_AVAILABLE, reason=f"TensorFlow {tf2.__version__} still has Estimator"
)


def run_fresh(code: str) -> dict:
    """Runs code where only TensorFlow is imported and returns the dict that it prints as JSON."""
    with Processes() as processes:
        process = processes.fork("-c", textwrap.dedent(code))
        return json.loads(processes.wait(process).splitlines()[-1])


def test_estimator_available_matches_version():
    assert (TF_VERSION <= (2, 15)) == ESTIMATOR_AVAILABLE


def test_mesh_tensorflow_and_tf_v1_are_exported():
    assert mtf.Graph is importlib.import_module("mesh_tensorflow").Graph
    assert tf is importlib.import_module("tensorflow.compat.v1")
    assert mtf_gradsync._private.libraries is libraries


def test_import_defines_things_and_changes_no_behaviour():
    state = run_fresh("""
        import json, sys
        import tensorflow.compat.v1 as tf
        before = [tf.executing_eagerly(), tf.resource_variables_enabled(),
                  tf.control_flow_v2_enabled()]
        import mtf_gradsync
        from absl import flags
        print(json.dumps({
            "before": before,
            "after": [tf.executing_eagerly(), tf.resource_variables_enabled(),
                      tf.control_flow_v2_enabled()],
            "flags_parsed": flags.FLAGS.is_parsed(),
            "operations": len(tf.get_default_graph().get_operations()),
            "transformer": "mesh_tensorflow.transformer" in sys.modules,
            "datasets": "tensorflow_datasets" in sys.modules,
        }))
    """)
    assert state["before"] == state["after"]
    assert state["flags_parsed"] is False
    assert state["operations"] == 0
    assert state["transformer"] is False
    assert state["datasets"] is False


@needs_estimator
def test_what_tensorflow_has_is_untouched():
    state = run_fresh("""
        import json
        import tensorflow as tf2
        import tensorflow.compat.v1 as tf
        from tensorflow.python.tpu import tpu_config, tpu_estimator
        # TensorFlow 2.12 swaps its lazy tf.estimator for the loaded one, so compare what is in it.
        before = [tf2.estimator.Estimator, tf.estimator.Estimator, tpu_config, tpu_estimator]
        import mtf_gradsync
        from tensorflow.python.tpu import tpu_config as config, tpu_estimator as estimator
        after = [tf2.estimator.Estimator, tf.estimator.Estimator, config, estimator]
        print(json.dumps({"same": [a is b for a, b in zip(before, after)]}))
    """)
    assert state["same"] == [True] * 4


def test_an_estimator_that_someone_else_put_there_is_untouched():
    state = run_fresh("""
        import json, types
        import tensorflow as tf2
        import tensorflow.compat.v1 as tf
        mine = types.SimpleNamespace(
            SessionRunHook=tf.train.SessionRunHook,
            CheckpointSaverListener=tf.train.CheckpointSaverListener,
            __name__="mine")
        tf.estimator = mine
        import mtf_gradsync
        print(json.dumps({"same": tf.estimator is mine}))
    """)
    assert state["same"] is True


def test_conversion_function_is_the_one_of_tensorflow():
    if TF_VERSION >= (2, 13):
        from tensorflow.python.framework import tensor_conversion_registry

        assert (
            ops.register_tensor_conversion_function
            is tensor_conversion_registry.register_tensor_conversion_function
        )
    existing = types.SimpleNamespace(register_tensor_conversion_function="existing")
    libraries._restore_tensor_conversion(existing)
    assert existing.register_tensor_conversion_function == "existing"


def test_only_modules_without_estimator_get_the_stand_in():
    has = types.SimpleNamespace(estimator="existing")
    first, second = types.SimpleNamespace(), types.SimpleNamespace()
    estimator_stand_ins.restore_estimator([has, first, second])
    assert has.estimator == "existing"
    assert first.estimator is second.estimator
    assert first.estimator.SessionRunHook is tf.train.SessionRunHook
    assert first.estimator.CheckpointSaverListener is tf.train.CheckpointSaverListener


def test_every_alias_has_the_same_hooks():
    from tensorflow.compat.v1 import estimator

    aliases = [tf2, tf, sys.modules["tensorflow._api.v2.compat.v1"]]
    for module in aliases:
        assert module.estimator.SessionRunHook is tf.train.SessionRunHook
        assert module.estimator.ModeKeys.TRAIN == "train"
    assert (estimator.ModeKeys.EVAL, estimator.ModeKeys.PREDICT) == ("eval", "infer")


def test_gin_tf_imports():
    gin_tf = pytest.importorskip("gin.tf")
    assert issubclass(gin_tf.GinConfigSaverHook, tf.train.SessionRunHook)


def test_reload_keeps_the_answer():
    state = run_fresh("""
        import importlib, json
        import mtf_gradsync._private.libraries as compat
        first = compat.ESTIMATOR_AVAILABLE, compat.tf.estimator
        importlib.reload(compat)
        print(json.dumps({"same": [first[0] == compat.ESTIMATOR_AVAILABLE,
                                   first[1] is compat.tf.estimator]}))
    """)
    assert state["same"] == [True, True]


@without_estimator
@pytest.mark.parametrize("name", ["Estimator", "EvalSpec", "train_and_evaluate"])
def test_estimator_classes_explain_themselves_when_used(name):
    stand_in = getattr(tf.estimator, name)
    with pytest.raises(EstimatorRemovedError, match=rf"estimator\.{name}.*left\s+TensorFlow") as e:
        stand_in("train", loss=None)
    assert tf2.__version__ in str(e.value)
    assert "tensorflow<2.16" in str(e.value)
    assert "mtf_gradsync.estimator.Estimator" in str(e.value)


@without_estimator
def test_tpu_modules_explain_themselves_when_used():
    from tensorflow.python.tpu import tpu_config, tpu_estimator

    assert tpu_config.InputPipelineConfig.BROADCAST == 4
    with pytest.raises(EstimatorRemovedError, match="tpu_estimator"):
        tpu_estimator.TPUEstimator(model_fn=None)


@without_estimator
def test_specs_and_configs_are_data():
    from tensorflow.python.tpu import tpu_config, tpu_estimator

    config = tpu_config.RunConfig(
        model_dir="runs", tpu_config=tpu_config.TPUConfig(100, num_shards=8)
    )
    assert (config.model_dir, config.save_checkpoints_secs) == ("runs", 600)
    assert (config.tpu_config.iterations_per_loop, config.tpu_config.num_shards) == (100, 8)
    assert tf.estimator.RunConfig(save_checkpoints_steps=5).save_checkpoints_secs is None
    spec = tpu_estimator.TPUEstimatorSpec("train", loss=1, train_op=2)
    assert spec == tf.estimator.tpu.TPUEstimatorSpec("train", loss=1, train_op=2)
    assert spec.training_hooks == ()
    with pytest.raises(ValueError, match="EstimatorSpec of mode 'train' needs train_op"):
        tf.estimator.EstimatorSpec("train", loss=1)
    with pytest.raises(ValueError, match="mode of EstimatorSpec must be one of"):
        tf.estimator.EstimatorSpec("predict")


@without_estimator
def test_probing_and_subclassing_a_stand_in_is_harmless():
    assert not hasattr(tf.estimator, "DNNClassifier")
    with pytest.raises(AttributeError, match=r"Estimator left TensorFlow after 2\.15"):
        _ = tf.estimator.experimental

    class Mine(tf.estimator.Exporter):
        pass

    assert not isinstance(object(), tf.estimator.EstimatorSpec)
    with pytest.raises(EstimatorRemovedError):
        Mine()


@pytest.mark.parametrize(
    "module",
    ["transformer", "utils", "transformer_layers", "dataset", "learning_rate_schedules"],
)
def test_transformer_modules_import(module):
    pytest.importorskip("tensorflow_datasets", reason="mesh_tensorflow.transformer needs [train]")
    assert importlib.import_module(f"mesh_tensorflow.transformer.{module}")


@without_estimator
def test_model_fn_without_estimator_says_so(monkeypatch):
    pytest.importorskip("tensorflow_datasets", reason="mesh_tensorflow.transformer needs [train]")
    from mesh_tensorflow.transformer import utils

    monkeypatch.setattr(utils, "build_model", lambda **kwargs: None)
    parameters = inspect.signature(utils.get_estimator).parameters
    given = {
        **{name: None for name, one in parameters.items() if one.default is one.empty},
        "model_type": "lm",
        "vocabulary": types.SimpleNamespace(vocab_size=8),
        "mesh_shape": mtf.Shape([]),
        "layout_rules": "",
        "model_dir": "unused",
        "batch_size": 1,
        "sequence_length": 4,
        "autostack": True,
        "learning_rate_schedule": 0.1,
        "keep_checkpoint_max": 1,
        "save_checkpoints_steps": 1,
        "iterations_per_loop": 1,
    }
    with pytest.raises(EstimatorRemovedError, match="TPUEstimator"):
        utils.get_estimator(**given)
