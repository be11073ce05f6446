"""A transformer with a mixture of experts over the axis of the batch: it exchanges tokens."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import xla
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.tools.train.config import transformer_models
from tests import harness
from tests.sessions import session_of

pytestmark = [pytest.mark.slow, pytest.mark.xla]
# Four cores for the TPU compiler's smallest topology; tokens are exchanged between two, too.
MESH, FOUR, LAYOUT = "batch:2", "batch:4", "batch:batch;experts:batch"
BATCH, LENGTH, VOCAB, STEPS = 8, 8, 32, 4
# A loss adds up 64 logarithms of sums of 32 exponentials, and a step adds the gradient's roundings.
TOLERANCE = STEPS * 64 * np.finfo(np.float32).eps
# SimdMeshImpl (0.1.21) exchanges float32 as bfloat16, with an error of up to 2**-9 for each
# activation; a loss averages many.
EXCHANGED = 2.0**-9


def batch():
    return np.random.RandomState(0).randint(1, VOCAB, (BATCH, LENGTH)).astype(np.int32)


def program(kind, mesh_shape=MESH):
    """A training step of the model, which fetches its loss."""

    def build(mesh, inputs):
        transformer = transformer_models()
        from mesh_tensorflow.transformer import moe, transformer_layers

        layers = [
            transformer_layers.SelfAttention(num_heads=2, key_value_size=8, dropout_rate=0.0),
            moe.MoE1D(
                num_experts=4,
                hidden_size=32,
                group_size=16,
                moe_gating="top_2",
                second_policy_train="all",
            ),
        ]
        for number, layer in enumerate(layers):
            layer.set_name(f"layer_{number:03d}")
        model = transformer.Unitransformer(
            layer_stack=transformer.LayerStack(
                layers,
                sublayers_initial=[],
                sublayers_per_layer=[
                    transformer.sublayer_rms_norm,
                    transformer.sublayer_call_layer,
                    transformer.sublayer_residual,
                ],
                sublayers_final=[transformer.sublayer_rms_norm],
            ),
            d_model=16,
            input_vocab_size=VOCAB,
            output_vocab_size=VOCAB,
            autoregressive=True,
            max_length=LENGTH,
            shared_embedding_and_softmax_weights=True,
            layout=mtf.convert_to_layout_rules(LAYOUT),
            mesh_shape=mtf.convert_to_shape(mesh_shape),
            loss_denominator=BATCH * LENGTH,
        )
        shape = mtf.Shape([mtf.Dimension("batch", BATCH), mtf.Dimension("length", LENGTH)])
        targets = mtf.import_fully_replicated(mesh, inputs["x"], shape)
        _, loss = model.call_simple(
            inputs=transformer.autoregressive_inputs(targets),
            targets=targets,
            compute_loss=True,
            mode="train",
            variable_dtype=mtf.VariableDType(),
            sequence_id=mtf.ones(mesh, shape, tf.int32),
            position=mtf.range(mesh, shape.dims[1], tf.int32),
        )
        updates = gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.1)).minimize(loss)
        return updates, {"loss": loss}

    return harness.built(kind, mesh_shape, LAYOUT, build, {"x": batch()})


def losses(made, session):
    fetches, feed = [made.fetched, made.updates], {made.inputs["x"]: batch()}
    return [session.run(fetches, feed)[0]["loss"] for _ in range(STEPS)]


def test_it_trains_on_every_runtime_as_on_a_placement_mesh(tmp_path):
    checkpoint, found = str(tmp_path / "start"), []
    placed, made = program("placement"), program("simd")
    with session_of(placed) as session:
        session.save(checkpoint)
        expected = losses(placed, session)
    assert expected[-1] < expected[0]
    for kind in ("simd", "xla"):
        with session_of(made._replace(kind=kind)) as session:
            session.restore(checkpoint)
            found.append(losses(made, session))
        np.testing.assert_allclose(found[-1], expected, rtol=EXCHANGED)
    np.testing.assert_allclose(*found, rtol=TOLERANCE)


@pytest.mark.tpu
@pytest.mark.skipif(bool(xla.why_no_tpu_compiler()), reason=xla.why_no_tpu_compiler())
def test_the_tpu_compiler_takes_it_with_its_exchanges():
    made = program("simd", FOUR)
    compiled = xla.compile_for_tpu(made.program, topology="v5e:2x2")
    assert compiled.accepted, compiled.error
    for found in (compiled.before, compiled.after):
        assert {"all-to-all", "all-reduce"} <= {collective.operation for collective in found}
