"""A run of Mesh-TensorFlow's own pipeline goes on with a wrapper, and on another mesh."""

import numpy as np
import pytest

from mtf_gradsync._private.libraries import ESTIMATOR_AVAILABLE, tf

if not ESTIMATOR_AVAILABLE:
    pytest.skip("utils.run trains by Estimator", allow_module_level=True)
from tests.pipelines import utils_run
from tests.pipelines.test_utils_run import INNER, WRAPPERS

_, LOCAL = WRAPPERS["accumulated on each shard"]


def variables(folder, step):
    reader = tf.train.load_checkpoint(str(folder / f"model.ckpt-{step}"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def test_a_wrapper_is_added_on_another_mesh(tmp_path):
    # Every run writes what it restored before it makes a step.
    utils_run.run(tmp_path, INNER, train_steps=1)
    bare = variables(tmp_path, 1)
    utils_run.run(tmp_path, INNER, LOCAL, train_steps=3, mesh_shape="batch:4;model:1")
    added = variables(tmp_path, 1)
    for name, value in bare.items():
        np.testing.assert_array_equal(added[name], value, err_msg=name)
    new = {name: value for name, value in added.items() if name not in bare}
    assert any(name.endswith("gradient_accumulator") for name in new)
    for name, value in new.items():
        # The step of the bare run was an update.
        assert (value == (1 if name.endswith("update_step") else 0)).all(), name
    assert variables(tmp_path, 3)["GradientAccumulationOptimizer/update_step"] == 2
