"""What a model_fn builds for a TPU, up to where one is needed."""

import pytest

from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import ESTIMATOR_AVAILABLE, tf
from mtf_gradsync.runtimes.simd.program import made_up_device_assignment
from tests.tools.estimator import digits
from tests.tools.estimator.runs import tpu_run_config

# isort: split
from tensorflow.python.tpu import tpu_estimator


class GraphIsBuilt(Exception):
    """All is there but the TPU."""


class Look(tf.train.SessionRunHook):
    """Stops before a session is made."""

    def begin(self):
        raise GraphIsBuilt([op.type for op in tf.get_default_graph().get_operations()])


@pytest.fixture
def four_cores(monkeypatch):
    """A TPU with four cores, as far as TPUEstimator asks for one before it begins a session."""
    from tensorflow_estimator.python.estimator.tpu import tpu_context

    task = "/job:worker/replica:0/task:0"
    metadata = tf.tpu.experimental.TPUSystemMetadata(
        num_cores=4,
        num_hosts=1,
        num_of_cores_per_host=4,
        topology=made_up_device_assignment(4).topology,
        devices=[tf.config.LogicalDevice(f"{task}/device:TPU:{i}", "TPU") for i in range(4)],
    )
    monkeypatch.setattr(
        tpu_context.tpu_system_metadata_lib,
        "_query_tpu_system_metadata",
        lambda *args, **kwargs: metadata,
    )


@pytest.mark.skipif(not ESTIMATOR_AVAILABLE, reason="this TensorFlow has no TPUEstimator")
@pytest.mark.parametrize("optimizer", ["cross_shard", "local", "sync_replicas"])
@pytest.mark.mostly_slow
def test_tpu_estimator_builds_its_whole_graph(optimizer, four_cores, tmp_path):
    config = tpu_run_config(tmp_path, master="grpc://nowhere:8470", save_checkpoints_steps=2)
    runs = tpu_estimator.TPUEstimator(
        digits.model_fn, config=config, params={"optimizer": optimizer}, use_tpu=True,
        train_batch_size=digits.BATCH, eval_batch_size=digits.BATCH,
    )  # fmt: skip

    def input_fn(params):
        assert params["batch_size"] == digits.BATCH
        return digits.input_fn(tf.estimator.ModeKeys.TRAIN)

    # Its check for a sum over the cores comes before its hooks begin.
    with pytest.raises(GraphIsBuilt) as built:
        runs.train(input_fn, hooks=[Look()], max_steps=4)
    types = built.value.args[0]
    assert {"CrossReplicaSum", "TPUCompileSucceededAssert"} & set(types)
    assert "CrossReplicaSum" in types


def training_spec(num_cores, optimizer):
    """The model_fn's program for a number of cores."""
    tf.train.get_or_create_global_step()
    images = tf.placeholder(tf.float32, [digits.BATCH, 64])
    labels = tf.placeholder(tf.int32, [digits.BATCH])
    with simd.tpu_program(f"all:{num_cores}", "") as program:
        params = {"context": program.tpu_context, "optimizer": optimizer, "cores": num_cores}
        spec = digits.model_fn({"image": images}, labels, "train", params, None)
    return program, spec


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.skipif(bool(xla.why_no_tpu_compiler()), reason=xla.why_no_tpu_compiler())
def test_the_tpu_compiler_takes_the_program():
    program, spec = training_spec(8, "local")
    compiled = xla.compile_for_tpu(program, [spec.loss], topology="v5e:2x4")
    assert compiled.accepted, compiled.error
    assert any(c.is_conditional for c in compiled.after)
