"""Writes scalars of a training step as TensorBoard summaries, on every kind of mesh."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import tensorflow as tf2

from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers import split_by_shard, traits_of
from mtf_gradsync.simd.traffic import has_calls

# The metadata of `tf.summary.scalar`, which needs TensorBoard; TensorFlow 2.21 does not install it.
_SCALAR = tf.SummaryMetadata(
    plugin_data=tf.SummaryMetadata.PluginData(plugin_name="scalars"), data_class=1
)


def scalars_to_write(lowering: mtf.Lowering, values: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Returns float32 scalars by name: of mtf or tf values, and those of `mtf.scalar_summary`.

    A value with one number for each shard becomes that many scalars.
    """
    exported = {
        name: lowering.export_to_tf_tensor(x) if isinstance(x, mtf.Tensor) else x
        for name, x in values.items()
    }
    scalars = dict(tf.get_collection(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY))
    scalars.update(split_by_shard(exported))
    return {name: tf.cast(tf.reshape(x, []), tf.float32) for name, x in scalars.items()}


def traffic_of_devices(
    fetches: Sequence[Any], mesh_impl: mtf.MeshImpl, optimizer: Any
) -> dict[str, float]:
    """Returns the bytes that devices receive in a step, by name; none where they are not known."""
    skips = traits_of(optimizer).schedules_updates
    if skips and has_calls(tf.get_default_graph()):
        return {}
    try:
        return simd.list_transfers(fetches, mesh_impl).scalars()
    except (simd.UnsupportedProgramError, ValueError):
        return {}


def traffic_of_program(program: simd.Program, spec: Any) -> dict[str, float]:
    """Returns the bytes that each core of a program sends in collectives in a step, by name."""
    try:
        return simd.list_collectives(program, lowering=spec).scalars()
    except (simd.UnsupportedProgramError, TypeError, ValueError):
        return {}


def write_in_graph(scalars: Mapping[str, tf.Tensor]) -> None:
    """Adds summaries to the graph, for a `tf.train.SummarySaverHook`."""
    for name, value in scalars.items():
        tf.summary.scalar(name, value)


def write_on_host(
    scalars: Mapping[str, tf.Tensor], model_dir: str | None
) -> tuple[Callable[..., Any], list[tf.Tensor]] | None:
    """Returns a host_call that writes summaries of the float32 scalars of a TPU program.

    It is None where there is nothing to write, since TPUEstimator would wait for it.
    """
    if not scalars or not model_dir:
        return None
    names = list(scalars)

    def write(step: tf.Tensor, *values: tf.Tensor) -> Any:
        # A host gets the values of all its cores in a row; they are the same.
        with tf2.summary.create_file_writer(model_dir).as_default():
            for name, value in zip(names, values):
                tf2.summary.write(name, value[0], tf.cast(step[0], tf.int64), _SCALAR)
            return tf.summary.all_v2_summary_ops()

    # TPUs have no int64 outfeed.
    step = tf.reshape(tf.cast(tf.train.get_global_step(), tf.int32), [1])
    return write, [step] + [tf.reshape(scalars[name], [1]) for name in names]
