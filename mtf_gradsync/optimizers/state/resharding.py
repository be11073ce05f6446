"""Reads checkpoints on another number of shards than they were written on.

What a wrapper keeps for each shard has a shape that follows the mesh: local accumulators, and what
SyncReplicasOptimizer knows of each replica. Everything else has the same shape on every mesh.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from typing import Any, NamedTuple, Sequence

import numpy as np

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.optimizers.state.variables import SHARDED_STATE_COLLECTION, ShardedState


def reshard(value: np.ndarray, num_shard_dims: int, new_shape: Sequence[int]) -> np.ndarray:
    """Lays values of S shards out over T shards, so that their sum stays the same.

    Shards are numbered in row-major order over the shard dims; the values of shard j go to shard
    j * T // S and are added up there. On fewer shards each one gets a contiguous group. On more,
    some shards get zeros and no value is changed, so that nothing is rounded.

    Args:
      value: array of shape `[shard dims...] + rest`.
      num_shard_dims: how many dims of value number the shards; 0 for a sum that is whole.
      new_shape: the shape to bring it to: shard dims of any number and sizes, and the same rest.

    Returns:
      An array of shape new_shape and of the dtype of value.

    Raises:
      ValueError: value does not have the rest that new_shape ends with.
    """
    value, new_shape = np.asarray(value), tuple(new_shape)
    rest = value.shape[num_shard_dims:]
    num_new_dims = len(new_shape) - len(rest)
    if (
        not 0 <= num_shard_dims <= value.ndim
        or num_new_dims < 0
        or new_shape[num_new_dims:] != rest
    ):
        raise ValueError(
            f"value has shape {value.shape}, of which {num_shard_dims} dims number the shards; "
            f"new_shape must end with the others, {rest}, got {new_shape}."
        )
    old_shards = math.prod(value.shape[:num_shard_dims])
    new_shards = math.prod(new_shape[:num_new_dims])
    # 2-byte floats are added up in float32, as on the mesh.
    narrow = value.dtype.itemsize < 4
    parts = value.reshape((old_shards, *rest))
    result = np.zeros((new_shards, *rest), np.float32 if narrow else value.dtype)
    for shard in range(old_shards):
        result[shard * new_shards // old_shards] += parts[shard].astype(result.dtype, copy=False)
    return result.astype(value.dtype, copy=False).reshape(new_shape)


class Change(NamedTuple):
    """State of shards whose shape in a checkpoint differs from the one in the graph.

    Attributes:
      num_shard_dims: how many dims of the saved value number the shards; None if it differs in
        more than its shards.
      saved_shape: the shape in the checkpoint.
      shape: the shape in the graph.
      note: what the graph says of the variable.
    """

    num_shard_dims: int | None
    saved_shape: tuple[int, ...]
    shape: tuple[int, ...]
    note: ShardedState


def changes(path: str, graph: tf.Graph | None = None) -> dict[str, Change]:
    """Finds state of shards that a checkpoint has in another shape.

    Args:
      path: a checkpoint.
      graph: the graph to restore into, with the optimizer's state in it; None is the default one.

    Returns:
      What differs, by variable name.
    """
    graph = graph or tf.get_default_graph()
    sharded = {note.name: note for note in graph.get_collection(SHARDED_STATE_COLLECTION)}
    if not sharded:
        return {}
    saved = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    found = {}
    for variable in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES):
        name, shape = variable.op.name, tuple(variable.shape.as_list())
        if name in sharded and tuple(saved.get(name, shape)) != shape:
            note, saved_shape = sharded[name], tuple(saved[name])
            rest = shape[note.num_shard_dims :]
            dims = len(saved_shape) - len(rest)
            fits = dims >= 0 and saved_shape[dims:] == rest
            found[name] = Change(dims if fits else None, saved_shape, shape, note)
    return found


def adapt_checkpoint(path: str, directory: str) -> str:
    """Makes a checkpoint restorable into the default graph, whose mesh has other shards.

    The sums that the shards hold are laid out anew by `reshard`, and every replica of a
    SyncReplicasOptimizer begins with the step of the last update; all other values are copied. The
    checkpoint itself is only read. Call it when the graph has its optimizer's state (after
    `apply_grads`), for programs that make their own Saver; `ReshardingSaver` does it by itself.

    Args:
      path: a checkpoint.
      directory: a local directory to write to, made if it is not there. The new checkpoint has the
        name of the old one there; in the directory of path itself, "<name>-resharded".

    Returns:
      The checkpoint to restore: path itself where everything fits, or the one that was written.

    Raises:
      ValueError: state of an optimizer differs in more than its shards. TensorFlow's own Saver
        restores a resource variable of another shape without a word.
    """
    changed = changes(path)
    if not changed:
        return path
    for name, change in sorted(changed.items()):
        if change.num_shard_dims is None:
            raise ValueError(
                f"{name} has the shape {list(change.saved_shape)} in the checkpoint {path} and "
                f"{list(change.shape)} here, which is more than another number of shards: the "
                "checkpoint is of another model."
            )
    name = os.path.basename(path)
    if os.path.abspath(directory) == os.path.dirname(os.path.abspath(path)):
        name += "-resharded"
    os.makedirs(directory, exist_ok=True)
    target = os.path.join(directory, name)
    temporary = tempfile.mkdtemp(dir=directory, prefix=".resharding-")
    try:
        _write(path, os.path.join(temporary, name), changed)
        # A checkpoint is there when its index is: it goes first and comes last.
        if os.path.exists(target + ".index"):
            os.unlink(target + ".index")
        for file in sorted(os.listdir(temporary), key=lambda file: file.endswith(".index")):
            os.replace(os.path.join(temporary, file), os.path.join(directory, file))
    finally:
        shutil.rmtree(temporary)
    return target


def _write(path: str, target: str, changed: dict[str, Change]) -> None:
    reader = tf.train.load_checkpoint(path)
    dtypes = reader.get_variable_to_dtype_map()
    copied = sorted(set(dtypes) - set(changed))
    resharded = sorted(changed)
    with tf.Graph().as_default():
        values = (
            list(
                tf.raw_ops.RestoreV2(
                    prefix=path,
                    tensor_names=copied,
                    shape_and_slices=[""] * len(copied),
                    dtypes=[dtypes[name] for name in copied],
                )
            )
            if copied
            else []
        )
        inputs = {name: tf.placeholder(dtypes[name], changed[name].shape) for name in resharded}
        save = tf.raw_ops.SaveV2(
            prefix=target,
            tensor_names=copied + resharded,
            shape_and_slices=[""] * len(dtypes),
            tensors=values + [inputs[name] for name in resharded],
        )
        feed = {
            inputs[name]: _on_new_shards(reader, name, change) for name, change in changed.items()
        }
        with tf.Session() as session:
            session.run(save, feed)


def _on_new_shards(reader: Any, name: str, change: Change) -> np.ndarray:
    note = change.note
    if note.fill is not None:
        by_name = isinstance(note.fill, str)
        fill = reader.get_tensor(note.fill) if by_name else note.fill
        return np.full(change.shape, fill, reader.get_variable_to_dtype_map()[name].as_numpy_dtype)
    value = reshard(reader.get_tensor(name), change.num_shard_dims, change.shape)
    if not note.is_share:
        return value
    saved = math.prod(change.saved_shape[: change.num_shard_dims])
    shards = math.prod(change.shape[: note.num_shard_dims])
    return (value * (saved / shards)).astype(value.dtype)


class ReshardingSaver(tf.train.Saver):
    """A `tf.train.Saver` that also restores what was written on another number of shards.

    Saves as its parent does. To restore a checkpoint of another mesh it writes an adapted copy to
    a directory for temporary files, which takes the checkpoint's size there for a moment.
    """

    def restore(self, sess: Any, save_path: str) -> None:
        """See `tf.train.Saver.restore`."""
        with sess.graph.as_default(), tempfile.TemporaryDirectory() as directory:
            super().restore(sess, adapt_checkpoint(save_path, directory))
