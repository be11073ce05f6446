"""Mesh-TensorFlow's own loss counts each token alike, without weights: it divides by a constant."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness

ROWS, LENGTH, VOCAB = 4, 8, 16


def loss_of(mesh, tokens):
    from mesh_tensorflow.transformer import transformer, transformer_layers

    layer = transformer_layers.DenseReluDense(hidden_size=16, dropout_rate=0.0)
    layer.set_name("layer_0")
    model = transformer.Unitransformer(
        transformer.LayerStack([layer], dropout_rate=0.0, norm_epsilon=1e-6),
        d_model=8,
        input_vocab_size=VOCAB,
        output_vocab_size=VOCAB,
        autoregressive=True,
        max_length=LENGTH,
    )
    dims = [mtf.Dimension("batch", tokens.shape.as_list()[0]), mtf.Dimension("length", LENGTH)]
    targets = mtf.import_tf_tensor(mesh, tokens, mtf.Shape(dims))
    _, loss = model.call_simple(
        inputs=targets,
        targets=targets,
        compute_loss=True,
        mode=tf.estimator.ModeKeys.TRAIN,
        variable_dtype=mtf.VariableDType(),
    )
    return loss


def program(wrap):
    def build(mesh, inputs):
        opt = wrap(mtf.optimize.SgdOptimizer(1.0))
        return opt.minimize(loss_of(mesh, inputs["tokens"])), {}

    return build


@pytest.mark.slow
def test_microbatches_of_unequally_many_tokens_train_as_one_batch(mesh_kind):
    pytest.importorskip("tensorflow_datasets", reason="mesh_tensorflow.transformer needs it")
    rng, feeds = np.random.RandomState(0), []
    for counts in ([8, 1, 3, 2], [1, 1, 2, 1]):
        mask = np.arange(LENGTH) < np.asarray(counts)[:, None]
        feeds.append({"tokens": (rng.randint(1, VOCAB, [ROWS, LENGTH]) * mask).astype(np.int32)})

    def accumulating(opt):
        axes = {"mesh_shape": "all:4", "layout": "batch:all"}
        return gs.GradientAccumulationOptimizer(opt, 2, True, **axes)

    found = harness.run(mesh_kind, "all:4", "batch:all", program(accumulating), feeds).variables
    joined = {"tokens": np.concatenate([feed["tokens"] for feed in feeds])}
    whole, half = (
        harness.run("placement", *harness.ONE, program(gs.CrossShardOptimizer), [feed]).variables
        for feed in (joined, feeds[0])
    )
    assert len(whole) > 3
    for name, value in whole.items():
        # Sums of up to 64 terms, of values below 4.
        np.testing.assert_allclose(found[name], value, rtol=0, atol=64 * 2.0**-22, err_msg=name)
    far = [np.abs(half[name] - value).max() for name, value in whole.items()]
    assert max(far) > 0.05
