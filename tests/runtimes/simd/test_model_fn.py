"""A model_fn as it was written for TPUEstimator, Mesh-TensorFlow's own included."""

import numpy as np
import pytest

import mtf_gradsync
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import ESTIMATOR_AVAILABLE, mtf, tf

from .programs import EPS

BATCH, LENGTH, VOCABULARY, STEPS = 8, 8, 32, 3


class Vocabulary:
    vocab_size = VOCABULARY


def in_order(learning_rate):
    """Adafactor without what races on a placement mesh.

    Bare, it may read what it has just written; and its default decay rate reads the global step,
    which the model_fn advances beside it.
    """
    inner = mtf.optimize.AdafactorOptimizer(learning_rate=learning_rate, decay_rate=0.9)
    return mtf_gradsync.CrossShardOptimizer(inner)


def transformer_model_fn(mesh_shape, use_tpu):
    """Mesh-TensorFlow's model_fn around a transformer of one attention and one dense layer."""
    pytest.importorskip("tensorflow_datasets", reason="mesh_tensorflow.transformer needs it")
    from mesh_tensorflow.transformer import transformer, transformer_layers, utils

    layers = [
        transformer_layers.SelfAttention(num_heads=2, key_value_size=4, dropout_rate=0.0),
        transformer_layers.DenseReluDense(hidden_size=32, dropout_rate=0.0),
    ]
    for number, layer in enumerate(layers):
        layer.set_name(f"layer_{number}")
    stack = transformer.LayerStack(
        layers,
        sublayers_initial=[],
        sublayers_per_layer=[
            transformer.sublayer_rms_norm,
            transformer.sublayer_call_layer,
            transformer.sublayer_residual,
        ],
        sublayers_final=[],
    )
    model = transformer.Unitransformer(
        stack,
        d_model=16,
        input_vocab_size=VOCABULARY,
        output_vocab_size=VOCABULARY,
        autoregressive=True,
        max_length=LENGTH,
    )
    return utils.tpu_estimator_model_fn(
        model_type="lm",
        transformer_model=model,
        vocabulary=Vocabulary(),
        model_dir="unused",
        use_tpu=use_tpu,
        mesh_shape=mtf.convert_to_shape(mesh_shape),
        layout_rules=mtf.convert_to_layout_rules(
            "batch:batch,d_ff:model,heads:model,vocab:model" if use_tpu else ""
        ),
        mesh_devices=None if use_tpu else [""],
        batch_size=BATCH,
        sequence_length={"targets": LENGTH},
        autostack=True,
        keep_checkpoint_max=1,
        save_checkpoints_steps=100,
        learning_rate_schedule=0.01,
        optimizer=in_order,
        outer_batch_size=0,
        tpu_summaries=False,
    )


@pytest.mark.slow
@pytest.mark.skipif(not ESTIMATOR_AVAILABLE, reason="this TensorFlow has no TPUEstimatorSpec")
def test_mesh_tensorflows_own_model_fn(tmp_path, monkeypatch):
    from mesh_tensorflow.transformer import utils

    monkeypatch.setattr(utils, "serialize_num_microbatches", lambda *args: 1)
    tokens = np.random.RandomState(0).randint(1, VOCABULARY, [STEPS, BATCH, LENGTH])
    tf.train.get_or_create_global_step()
    x = tf.placeholder(tf.int32, [BATCH, LENGTH])
    with simd.tpu_program("batch:4;model:2", "") as program:
        spec = transformer_model_fn("batch:4;model:2", use_tpu=True)(
            {"targets": x}, None, "train", params={"context": program.tpu_context}
        )
    with program.session(spec) as session:
        path = session.save(str(tmp_path / "start"))
        losses = [session.run([spec.loss, spec.train_op], {x: t})[0] for t in tokens]
        assert session.read("global_step") == STEPS
    report = simd.list_collectives(program, lowering=spec)
    assert {"batch", "model"} <= set(report.by_group())
    assert any("transformer/embedding" in r.variables for r in report.rows)

    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        x = tf.placeholder(tf.int32, [BATCH, LENGTH])
        spec = transformer_model_fn("all:1", use_tpu=False)(
            {"targets": x}, None, "train", params={}
        )
        (lowering,) = (
            h._lowering for h in spec.training_chief_hooks if isinstance(h, mtf.MtfRestoreHook)
        )
        to_slices = lowering.copy_masters_to_slices()
        with tf.Session(config=simd.cpu_config()) as session:
            tf.train.Saver(tf.global_variables()).restore(session, path)
            session.run(to_slices)
            wanted = [session.run([spec.loss, spec.train_op], {x: t})[0] for t in tokens]
    # Some thousand roundings a step; weights move by about the learning rate times their scale.
    np.testing.assert_allclose(losses, wanted, rtol=STEPS * 16 * VOCABULARY * EPS)


def test_context_describes_the_cores():
    with simd.tpu_program("batch:4;model:2", "") as program:
        context = program.tpu_context
    assert context.num_replicas == 8
    assert context.num_hosts == 1
    assert context.tpu_host_placement_function(host_id=0) == "/device:CPU:0"
    assert list(context.device_assignment.topology.mesh_shape) == [2, 2, 1, 2]
    # Mesh-TF's own choice of a core order accepts it.
    order = mtf.simd_mesh_impl.auto_logical_to_physical_tpu(
        [4, 2], [2, 2, 1, 2], device_assignment=context.device_assignment
    )
    assert sorted(order) == list(range(8))


@pytest.mark.parametrize("cores", [1, 2, 3, 6, 16, 32])
def test_any_number_of_cores_has_a_device_each(cores):
    with simd.tpu_program(f"all:{cores}", "") as program:
        assignment = program.tpu_context.device_assignment
    devices = {assignment.tpu_device(replica=core) for core in range(cores)}
    assert len(devices) == cores


def test_session_wants_a_lowering():
    with simd.tpu_program("all:2", "") as program:
        tf.constant(1.0)
    with pytest.raises(TypeError, match=r"mtf\.Lowering.*got 'lowering'"):
        program.session("lowering")
