"""RunConfigs with strict placement and as many devices as the mesh has processors."""

from __future__ import annotations

from typing import Any

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.axes import MeshShapeLike
from mtf_gradsync.session import session_config


def run_config(
    model_dir: str | None = None,
    mesh_shape: MeshShapeLike | None = None,
    tpu_config: Any = None,
    **settings: Any,
) -> Any:
    """Returns a RunConfig whose sessions have a virtual CPU device for each processor of a mesh.

    Estimator's own sessions place softly: a device that is not there becomes another one without a
    word, and a mesh of eight CPU devices runs on one.

    Args:
      model_dir: directory of checkpoints and summaries.
      mesh_shape: Mesh-TF's mesh shape, of a mesh of virtual CPU devices; None for other devices.
      tpu_config: a TPUConfig, for TPUEstimator; None makes a RunConfig of Estimator's.
      **settings: more settings of RunConfig, such as save_checkpoints_steps. A session_config among
        them is taken as it is.

    Returns:
      A RunConfig of Estimator's, or with tpu_config of TPUEstimator's.
    """
    size = None if mesh_shape is None else mtf.convert_to_shape(mesh_shape).size
    settings.setdefault("session_config", session_config(num_cpu_devices=size))
    if tpu_config is None:
        return tf.estimator.RunConfig(model_dir=model_dir, **settings)
    return tf.estimator.tpu.RunConfig(model_dir=model_dir, tpu_config=tpu_config, **settings)


def with_model_dir(config: Any, model_dir: str) -> Any:
    """Returns a copy of a config with another model_dir."""
    if hasattr(config, "replace"):
        return config.replace(model_dir=model_dir)
    config.model_dir = model_dir
    return config
