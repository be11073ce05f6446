"""The numpy models: their gradients are those of their losses, and Mesh-TF's on one processor."""

import numpy as np
import pytest

from mtf_gradsync._private.libraries import tf
from tests import harness
from tests.properties.models import small_models, tape, training, uses


@pytest.mark.parametrize("use", list(uses.ALL))
def test_gradients_are_slopes(use):
    model = uses.ALL[use]
    (feed,) = small_models.batches(1)
    values = {k: v.astype(np.float64) for k, v in model.values().items()}

    def loss(changed):
        leaves = {k: tape.Tensor(v, list(model.variables[k])) for k, v in changed.items()}
        return model.loss(tape, leaves, small_models.in_numpy(feed)).value

    step = 1e-5
    for name, grad in training.numpy_gradients(model, values, feed).items():
        slopes = np.zeros_like(grad)
        for index in np.ndindex(*grad.shape):
            moved = np.zeros_like(grad)
            moved[index] = step
            ahead = loss({**values, name: values[name] + moved})
            behind = loss({**values, name: values[name] - moved})
            slopes[index] = (ahead - behind) / (2 * step)
        # The difference is off by its third derivative times the step's square, and by rounding.
        np.testing.assert_allclose(grad, slopes, atol=1e-8 * max(1.0, np.max(np.abs(slopes))))


@pytest.mark.slow
def test_mesh_tf_has_the_same_gradients_on_one_processor():
    (feed,) = small_models.batches(1)

    def build(mesh, inputs):
        fetches = {}
        for number, (use, model) in enumerate(uses.ALL.items()):
            if model.microbatches > 1:
                continue  # their gradients are those of all trainable variables of the graph
            with tf.variable_scope(f"model_{number}"):
                grads, _ = training.gradients_on(model, mesh, inputs, ("batch",))
            fetches.update({f"{use}/{k}": g for k, g in zip(model.variables, grads)})
        return [], fetches

    found = harness.run("placement", *harness.ONE, build, [feed]).fetched[0]
    for use, model in uses.ALL.items():
        if model.microbatches > 1:
            continue
        expected = training.numpy_gradients(model, model.values(), feed)
        for name, value in expected.items():
            size = max(1.0, np.max(np.abs(value)))
            actual = found[f"{use}/{name}"].astype(np.float64)
            np.testing.assert_allclose(actual, value, atol=16 * model.eps * size, err_msg=use)


def test_a_batch_is_the_mean_of_its_parts():
    (feed,) = small_models.batches(1)
    for use, model in uses.ALL.items():
        shards = training.shard_gradients(model, model.values(), feed, (2, 2))
        for name, value in training.numpy_gradients(model, model.values(), feed).items():
            mean = np.mean([g[name] for g in shards], 0)
            np.testing.assert_allclose(mean, value, atol=1e-12, err_msg=use)
