"""How state of wrappers is read from a checkpoint of another mesh, or of another stack.

A value is read as `[islands..., shards...] + its own dims`. What the shards of an island have adds
up. What islands have stands for the whole batch each, so that one island goes on with their mean;
or it is theirs alone, as weights are and sums of gradients times weights, and adds up, too.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, Sequence

import numpy as np

from mtf_gradsync._private.libraries import tf

# The last part of an accumulator's name.
ACCUMULATOR = "gradient_accumulator"
# The last part of the name of a variable that has a value for each island.
ISLAND = "island"
# The collection of `StateNote`s in a tf graph. It is not exported, as its key is not a string.
STATE_COLLECTION = ("mtf_gradsync state",)
_MANY_UPDATES = 2**30


class StateNote(NamedTuple):
    """How a wrapper's variable is read from a checkpoint of another run.

    Attributes:
      name: the variable's name.
      num_shard_dims: how many of its dims number the shards, after those of islands; 0 if shards
        share it.
      num_island_dims: how many of its first dims number islands.
      held: the name of the variable of which it has a value for each island, or for the only one;
        None for any other variable.
      is_share: whether each shard's value is 1/num_shards of its own, as in the gradient of a mean
        over all shards. Where the sums have weights, it is not.
      is_total: whether the values of islands add up to that of the whole batch.
      one_shape: whether its dims in checkpoints are the same but for those of islands.
      fill: the value for every shard if the checkpoint has other shards, a number or the name of a
        scalar variable; None for sums, which keep their total.
      start: the value if the checkpoint does not have the variable: a number, or the name of a
        variable of its shape or of a scalar; None if only the program knows.
      follows: the variable without which, in the checkpoint, it begins at zero.
      counter: the variable that counts additions, or None. A checkpoint without it has the sums of
        another wrapper.
      weight: the variable with the weights of the additions, in a graph where they have some.
    """

    name: str
    num_shard_dims: int = 0
    num_island_dims: int = 0
    held: str | None = None
    is_share: bool = False
    is_total: bool = False
    one_shape: bool = False
    fill: float | str | None = None
    start: float | str | None = 0
    follows: str | None = None
    counter: str | None = None
    weight: str | None = None


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


class Saved:
    """A checkpoint: what it has, by name, and of how many islands."""

    def __init__(self, path: str):
        self._reader = tf.train.load_checkpoint(path)
        self.shapes = {n: tuple(s) for n, s in self._reader.get_variable_to_shape_map().items()}
        self.dtypes = self._reader.get_variable_to_dtype_map()
        self.read = functools.lru_cache(maxsize=1)(self._reader.get_tensor)
        # A trained variable has the outer values under its own name, and has one shape in all runs.
        self.held = [n for n in self.shapes if f"{n}/{ISLAND}" in self.shapes]
        self.islands: tuple[int, ...] = ()
        for name in self.held[:1]:
            of_islands = self.shapes[f"{name}/{ISLAND}"]
            self.islands = of_islands[: len(of_islands) - len(self.shapes[name])]

    def find(self, name: str, of_islands: bool = False) -> str | None:
        """Returns the name that a variable has in the checkpoint, with or without islands.

        `of_islands` says which of the two is preferred.
        """
        names = [name, f"{name}/{ISLAND}"]
        return next((n for n in names[:: -1 if of_islands else 1] if n in self.shapes), None)

    def islands_of(self, name: str) -> tuple[int, ...]:
        """Returns the first dims of a variable, those of islands."""
        return self.islands if name.endswith(f"/{ISLAND}") else ()

    def total(self, name: str | None) -> float:
        """Returns the sum of a scalar over the islands; 0.0 where it is missing."""
        found = name and self.find(name)
        return float(np.sum(self.read(found), dtype=np.float64)) if found else 0.0

    def updates(self) -> int | None:
        """Returns the number of updates of the innermost optimizer; None if nothing counts them."""
        for last in ("update_step", "inner_step"):
            ends = (f"/{last}", f"/{last}/{ISLAND}")
            counts = [int(np.max(self.read(n))) for n in self.shapes if n.endswith(ends)]
            if counts:  # wrappers inside of others make fewer
                return min(counts)
        return int(self.total("global_step")) if "global_step" in self.shapes else None


class Change(NamedTuple):
    """A variable of a wrapper that a checkpoint has in another form, or not at all.

    Attributes:
      saved_name: its name in the checkpoint; None if it is missing, or another wrapper's.
      saved_shape: its shape there.
      num_shard_dims: how many dims of the saved value, after those of islands, number the shards;
        None if it differs in more than its shards and islands.
      shape: the shape in the graph.
      dtype: the dtype in the graph.
      note: the graph's note on the variable.
      looks_alike: whether a saver that knows no wrappers would take the value as it is.
    """

    saved_name: str | None
    saved_shape: tuple[int, ...]
    num_shard_dims: int | None
    shape: tuple[int, ...]
    dtype: tf.DType
    note: StateNote
    looks_alike: bool = False

    @property
    def fits(self) -> bool:
        """Whether the variable can be restored."""
        return self.saved_name is None or self.num_shard_dims is not None


def changes(path: str, graph: tf.Graph | None = None) -> dict[str, Change]:
    """Finds what a checkpoint has in another form than the graph, or not at all, by name.

    This is the state of wrappers, and what a checkpoint has for each island. The graph is the
    default one if `graph` is None.
    """
    graph = graph or tf.get_default_graph()
    notes = {note.name: note for note in graph.get_collection(STATE_COLLECTION)}
    saved = Saved(path)
    found = {}
    for variable in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES):
        name = variable.op.name
        note = notes.get(name)
        if note is None and name not in saved.shapes and saved.find(name):
            note = StateNote(name, one_shape=True, start=None)
        change = note and _change(variable, note, saved)
        if change:
            found[name] = change
    return found


def _change(variable: Any, note: StateNote, saved: Saved) -> Change | None:
    """Returns how a checkpoint has a variable in another form; None if it has it as it is."""
    name, shape = variable.op.name, tuple(variable.shape.as_list())
    dtype = variable.dtype.base_dtype
    source = saved.find(note.held or name, of_islands=note.held is not None)
    if source is None or (note.counter and not saved.find(note.counter)):
        return None if note.start is None else Change(None, (), None, shape, dtype, note)
    saved_shape, islands = saved.shapes[source], saved.islands_of(source)
    rest = shape[note.num_island_dims + note.num_shard_dims :]
    dims = len(saved_shape) - len(islands) - len(rest)
    fits = dims >= 0 and saved_shape[len(islands) + dims :] == rest
    fits = fits and not (note.one_shape and dims)
    is_alike = source == name and saved_shape == shape and saved.dtypes[source] == dtype
    is_empty = note.counter is not None and not saved.total(note.counter)
    is_same_kind = is_empty or _had_weights(note, saved) == note.is_total
    if is_alike and islands == shape[: note.num_island_dims] and is_same_kind:
        return None
    looks_alike = is_alike and not is_empty
    return Change(source, saved_shape, dims if fits else None, shape, dtype, note, looks_alike)


def _had_weights(note: StateNote, saved: Saved) -> bool:
    """Whether what islands have in a checkpoint adds up: weights, and sums with weights."""
    return note.is_total if note.weight is None else saved.find(note.weight) is not None


def value_for(name: str, changed: dict[str, Change], saved: Saved) -> np.ndarray:
    """Returns the value that a variable of `changed` begins with."""
    change = changed[name]
    if change.saved_name is None:
        return _filled(change.note.start, change, changed, saved)
    if change.note.fill is not None:
        return _filled(change.note.fill, change, changed, saved)
    return _moved(change, saved)


def _filled(what: Any, change: Change, changed: dict[str, Change], saved: Saved) -> np.ndarray:
    note, value = change.note, what
    if isinstance(what, str):
        value = _value_of(what, changed, saved)
        if value is None:  # then a correction of the first steps is over
            value = _MANY_UPDATES if note.follows else 0
    if note.follows and not saved.find(note.follows):
        value = 0
    if note.is_total:
        value = value / math.prod(change.shape[: note.num_island_dims])
    return np.broadcast_to(np.asarray(value).astype(change.dtype.as_numpy_dtype), change.shape)


def _value_of(name: str, changed: dict[str, Change], saved: Saved) -> Any:
    """Returns the value of a variable for the graph; 0 if nothing is known of it.

    Of the global step that is the number of updates, None if nothing is known of it.
    """
    if name == "global_step":
        return saved.updates()
    if name in changed:
        return value_for(name, changed, saved)
    held = f"{name}/{ISLAND}"
    if held in changed:
        value, islands = value_for(held, changed, saved), changed[held].note.num_island_dims
    else:
        found = saved.find(name)
        value = saved.read(found) if found else np.zeros([])
        islands = len(saved.islands_of(found)) if found else 0
    return np.mean(value, tuple(range(islands)), np.float64) if islands else value


def is_derived(change: Change, saved: Saved) -> bool:
    """Whether a variable that a checkpoint lacks begins with a value of others, not as ever."""
    note = change.note
    return isinstance(note.start, str) and not (note.follows and not saved.find(note.follows))


def _moved(change: Change, saved: Saved) -> np.ndarray:
    """Returns a value of the checkpoint for the islands, shards and weights of the graph."""
    note, name, dims = change.note, change.saved_name, change.num_shard_dims
    assert name is not None
    assert dims is not None, "it does not fit"
    islands = saved.islands_of(name)
    old, new = math.prod(islands), math.prod(change.shape[: note.num_island_dims])
    of_island = change.shape[note.num_island_dims :]
    old_shards = math.prod(change.saved_shape[len(islands) : len(islands) + dims])
    new_shards = math.prod(of_island[: note.num_shard_dims])
    # To that which is alone in a batch and adds up, and from there to that of the graph.
    times, by = 1.0, 1.0
    had_weights = _had_weights(note, saved)
    if not had_weights:
        times, by = times * (old_shards if note.is_share else 1), by * old
    elif not note.is_total:  # the mean, as large as the sum of so many
        weight = saved.total(note.weight)
        times, by = times * (saved.total(note.counter) if weight else 1), by * (weight or 1)
    if not note.is_total:
        times, by = times * new, by * (new_shards if note.is_share else 1)
    value = saved.read(name)
    values = value.reshape((old, *value.shape[len(islands) :]))
    if old != new:
        values, by = values.sum(0, np.float64, keepdims=True), by * new
    if times != by:
        values = values.astype(np.float64) * times / by
    values = np.stack([reshard(x, dims, of_island) for x in values])
    values = values.astype(change.dtype.as_numpy_dtype, copy=False)
    return np.broadcast_to(values, (new, *of_island)).reshape(change.shape)


def weights_taken_out(changed: dict[str, Change], saved: Saved) -> set[str]:
    """Returns the weights of a checkpoint by which `value_for` has divided its sums."""
    names = {c.note.weight for c in changed.values() if c.note.weight and not c.note.is_total}
    return {n for name in names for n in (name, f"{name}/{ISLAND}") if n in saved.shapes}
