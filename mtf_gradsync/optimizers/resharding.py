"""How state of wrappers is read from a checkpoint of another mesh, or of another stack."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Sequence

import numpy as np

from mtf_gradsync._private.libraries import tf

# The last part of an accumulator's name.
ACCUMULATOR = "gradient_accumulator"
# The collection of `StateNote`s in a tf graph. It is not exported, as its key is not a string.
STATE_COLLECTION = ("mtf_gradsync state",)


class StateNote(NamedTuple):
    """How a wrapper's variable is read from a checkpoint of another run.

    Attributes:
      name: the variable's name.
      num_shard_dims: how many of its first dims number the shards; 0 if shards share it.
      is_share: whether each shard's value is 1/num_shards of its own, as in the gradient of a mean
        over all shards.
      fill: the value for every shard if the checkpoint has other shards, a number or the name of a
        scalar variable; None for sums, which keep their total.
      start: the value if the checkpoint does not have the variable: a number, or the name of a
        variable of its shape or of a scalar.
      counter: the variable that counts additions, or None. A checkpoint without it has the sums of
        another wrapper.
      is_mean: whether every shard gets the mean over the shards if the checkpoint has others.
    """

    name: str
    num_shard_dims: int = 0
    is_share: bool = False
    fill: float | str | None = None
    start: float | str = 0
    counter: str | None = None
    is_mean: bool = False


def reshard(value: np.ndarray, num_shard_dims: int, new_shape: Sequence[int]) -> np.ndarray:
    """Distributes values of S shards over T shards, so that their sum stays the same.

    Shards are numbered in row-major order over the shard dims; the values of shard j go to shard
    j * T // S and are added up there. On fewer shards each one gets a contiguous group. On more,
    some shards get zeros and no value is changed, so that nothing is rounded.

    `value` has the shape `[shard dims...] + rest`, where a reduced sum has no shard dims, and
    `new_shape` has shard dims of any number and sizes and the same rest, or it is a ValueError. The
    dtype does not change.
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
    """A variable of a wrapper that a checkpoint has in another shape or dtype, or not at all.

    Attributes:
      saved_shape: the shape in the checkpoint; None if it is missing, or another wrapper's.
      num_shard_dims: how many dims of the saved value number the shards; None if it differs in
        more than its shards.
      shape: the shape in the graph.
      dtype: the dtype in the graph.
      note: the graph's note on the variable.
    """

    saved_shape: tuple[int, ...] | None
    num_shard_dims: int | None
    shape: tuple[int, ...]
    dtype: tf.DType
    note: StateNote

    @property
    def fits(self) -> bool:
        """Whether the variable can be restored."""
        return self.saved_shape is None or self.num_shard_dims is not None


def changes(path: str, graph: tf.Graph | None = None) -> dict[str, Change]:
    """Finds state of wrappers that a checkpoint has in another shape, or not at all, by name.

    The state is that of `graph`; None takes the default one.
    """
    graph = graph or tf.get_default_graph()
    notes = {note.name: note for note in graph.get_collection(STATE_COLLECTION)}
    if not notes:
        return {}
    reader = tf.train.load_checkpoint(path)
    saved, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    found = {}
    for variable in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES):
        name, shape = variable.op.name, tuple(variable.shape.as_list())
        if name not in notes:
            continue
        dtype, note = variable.dtype.base_dtype, notes[name]
        if name not in saved or (note.counter and note.counter not in saved):
            found[name] = Change(None, None, shape, dtype, note)
        elif tuple(saved[name]) != shape or dtypes[name] != dtype:
            saved_shape, rest = tuple(saved[name]), shape[note.num_shard_dims :]
            dims = len(saved_shape) - len(rest)
            fits = dims >= 0 and saved_shape[dims:] == rest
            found[name] = Change(saved_shape, dims if fits else None, shape, dtype, note)
    return found


def value_for(reader: Any, name: str, changed: dict[str, Change]) -> np.ndarray:
    """Returns the value of a variable for a graph that a checkpoint is adapted to."""
    change = changed.get(name)
    if change is None:
        return reader.get_tensor(name)
    if change.saved_shape is None:
        return _filled(change.note.start, reader, change, changed)
    if change.note.fill is not None:
        return _filled(change.note.fill, reader, change, changed)
    assert change.num_shard_dims is not None  # or it would not fit
    if change.note.is_mean:
        over = tuple(range(change.num_shard_dims))
        mean = np.asarray(reader.get_tensor(name), np.float64).mean(over)
        return np.broadcast_to(mean.astype(change.dtype.as_numpy_dtype), change.shape)
    value = reshard(reader.get_tensor(name), change.num_shard_dims, change.shape)
    value = value.astype(change.dtype.as_numpy_dtype, copy=False)
    if change.note.is_share:
        saved = math.prod(change.saved_shape[: change.num_shard_dims])
        shards = math.prod(change.shape[: change.note.num_shard_dims])
        value = (value * (saved / shards)).astype(value.dtype)
    return value


def _filled(
    what: float | str, reader: Any, change: Change, changed: dict[str, Change]
) -> np.ndarray:
    value: Any = what
    if isinstance(what, str):
        counts = [x for x in reader.get_variable_to_shape_map() if x.endswith("/update_step")]
        # It is of another wrapper, or of one with another name.
        name = counts[0] if what == "global_step" and len(counts) == 1 else what
        is_known = name in changed or reader.has_tensor(name)
        value = value_for(reader, name, changed) if is_known else 0
    dtype = change.dtype.as_numpy_dtype
    return np.broadcast_to(np.asarray(value).astype(dtype), change.shape)
