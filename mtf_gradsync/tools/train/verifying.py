"""The training step of a config as a program for `mtf_gradsync.verify`."""

from __future__ import annotations

import contextlib
from typing import Any, Generator, NamedTuple, Sequence

import numpy as np

from mtf_gradsync.extension import tf
from mtf_gradsync.runtimes._common import ConfigError, mesh_text
from mtf_gradsync.runtimes.sessions import RuntimeName
from mtf_gradsync.tools._private.gin import bound
from mtf_gradsync.tools.train import gin_files
from mtf_gradsync.tools.train.errors import raised_as
from mtf_gradsync.tools.train.model import MeshModel, TrainingJob, resolve_job
from mtf_gradsync.tools.train.train_graph import model_and_optimizer
from mtf_gradsync.tools.verification import Verification, verify

# The first step of long runs, past those of a schedule that warms up. Most numbers of microbatch
# steps divide it, so that an update begins there.
_STEP = 960


class _StepSpec(NamedTuple):
    """The result of the model_fn that `verify_config` gives to `mtf_gradsync.verify`."""

    loss: tf.Tensor
    train_op: tf.Operation


def verify_config(
    meshes: Sequence[str] | None = None,
    steps: int = 1,
    divisions: Sequence[str] | None = None,
    without: Sequence[str] = (),
    runtime: RuntimeName = "cpu_replicas",
    own_values: bool = False,
) -> Verification:
    """Verifies the training step that gin's configuration describes, on its training data.

    Args:
      meshes: mesh shapes to try, each as a division; None for none.
      steps: number of updates.
      divisions: which kinds of further divisions to try, such as "batch" (all cores along the mesh
        axis that splits the batch). If both `divisions` and `meshes` are None, all kinds are tried.
        If only `meshes` is given, the config's mesh and `meshes` are tried, and no more.
      without: names of parts to remove from the model before its first run: "dropout", "random"
        (all random numbers), or "capacity" (limits to how many examples an expert takes).
      runtime: the runtime of the divisions: "placement_mesh", "cpu_replicas" or "xla". Only the
        divisions of the kind "runtimes" have others.
      own_values: whether variables begin with exactly the initial values that the config gives
        them. If False, small random numbers are added to these values, so that a layer of zeros
        hides no fault.

    Returns:
      The result of `mtf_gradsync.verify`: the divisions, with the verdict on each and explanations.

    Raises:
      ConfigError: the configuration or an argument is wrong.
    """
    config = gin_files.bound_run_config()
    job = resolve_job(config)
    first = _STEP
    # A schedule that decays to the end of the run has a rate in its first half.
    while first > 1 and 2 * first > (config.total_run_steps or config.train_steps):
        first //= 2

    def model_fn(
        features: dict[str, tf.Tensor], mode: str, params: dict[str, Any], mesh_impl: Any
    ) -> _StepSpec:
        counter = tf.train.get_or_create_global_step()
        (size, *_) = {int(x.shape[0]) for x in features.values()}
        shape, layout = params["mesh_shape"], params["layout"]
        with bound(gin_files.mesh_lines(shape, layout)):
            divided = resolve_job(config.on_mesh(shape, layout, batch_size=size))
            model = MeshModel(divided.model, mesh_impl)
            step = tf.identity(counter.read_value()) + first
            loss, pairs, opt, _ = model_and_optimizer(divided, model, features, step)
            updates = opt.apply_grads([g for g, _ in pairs], [v for _, v in pairs])
            lowering = model.lower()
        with tf.control_dependencies([*map(lowering.lowered_operation, updates), step]):
            done = counter.assign_add(1, read_value=False)
        return _StepSpec(tf.cast(lowering.export_to_tf_tensor(loss), tf.float32), done)

    mesh = job.model.mesh
    params = {
        "mesh_shape": mesh_text(mesh.shape),
        "layout": ";".join(f"{name}:{axis}" for name, axis in mesh.rules),
    }
    with contextlib.closing(_batches(job)) as batches, raised_as(ConfigError, ValueError):
        return verify(
            model_fn,
            batches,
            params,
            meshes,
            steps=steps,
            divisions=divisions,
            without=without,
            runtime=runtime,
            own_values=own_values,
            progress=True,
        )


def _batches(job: TrainingJob) -> Generator[dict[str, np.ndarray], None, None]:
    """Yields a job's training batches from the first on, as arrays ``[batch_size, length]``.

    A batch is a dictionary from the name of each feature to the feature's array.
    """
    with job.batches() as source:
        with tf.Graph().as_default():
            feeds = source.placeholders()
        source.begin(0, 0)
        while True:
            fed = source.next()
            yield {name: fed[feed] for name, feed in feeds.items()}
