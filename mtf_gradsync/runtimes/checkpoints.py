"""Adapts checkpoints to a graph with another mesh, other islands, or another stack.

The value of a variable in a checkpoint has the dims `[islands..., shards...] + dims of the
variable`. The values of an island's shards are terms of a sum. The value of each island is an
estimate for the whole batch, so that a run with one island continues with the mean over islands.
But the weights of gradients, and sums of gradients times weights, belong to an island's own part of
the batch. These values are added up over islands.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import tempfile
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence

import numpy as np

from mtf_gradsync.extension import (
    ACCUMULATOR,
    AVERAGE,
    ISLAND,
    SLOTS_COLLECTION,
    STATE_COLLECTION,
    SUMS_NOT_KEPT,
    StateNote,
    is_marked,
    some_of,
    tf,
)

_logger = logging.getLogger(__name__)
_MANY_UPDATES = 2**30
# Operations whose outputs have no other elements than one of their inputs, and the input's number.
_COPIES = {"Fill": 1, "BroadcastTo": 0, "Cast": 0, "Identity": 0}


def reshard(value: np.ndarray, num_shard_dims: int, new_shape: Sequence[int]) -> np.ndarray:
    """Distributes the values of S shards over T shards, so that their sum stays the same.

    The number of old shards is S, and the number of new shards is T. Shards are numbered in
    row-major order over the shard dims. The value of old shard j goes to new shard j * T // S. A
    new shard to which several values go gets their sum. If T is less than S, each new shard gets
    the values of consecutive old shards. If T is greater than S, some new shards get zeros, and no
    value is changed, so that nothing is rounded.

    `value` has shard dims, followed by the dims of a variable. The number of its shard dims is
    `num_shard_dims`, which is 0 for a reduced sum. `new_shape` is the shape of the result: shard
    dims of any number and sizes, followed by the same dims of the variable. The result has the
    dtype of `value`. Raises ValueError if `new_shape` does not end with the dims of the variable.
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
            f"new_shape must end with the other dims, {rest}, got {new_shape}."
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
    """A difference: a graph's variable that a checkpoint has in another form, or not at all.

    Attributes:
      saved_name: the variable's name in the checkpoint; None if the checkpoint does not have the
        variable, or has one of this name that belongs to another wrapper.
      saved_shape: the variable's shape in the checkpoint.
      num_shard_dims: how many dims of the saved value, after those of islands, number the shards;
        None if the shapes differ in more than shards and islands.
      shape: the variable's shape in the graph.
      dtype: the variable's dtype in the graph.
      note: the note with which the wrapper has said how the variable's value is to be converted.
      looks_alike: whether name, shape and dtype are the same in the checkpoint and in the graph,
        although the value means something else. A plain saver would then restore a wrong value
        without an error.
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
        """Whether the variable can be restored from the checkpoint, or begin without it."""
        return self.saved_name is None or self.num_shard_dims is not None


class SavedCheckpoint:
    """A checkpoint that is compared with a graph; it converts the values that differ.

    Attributes:
      path: the path of the checkpoint.
      shapes: the shapes of the checkpoint's variables by name.
      dtypes: the dtypes of the checkpoint's variables by name.
      read: a function that takes a variable's name and returns the variable's value in the
        checkpoint.
      islands: the sizes of the dims that number islands in variables with a value for each island;
        () without islands.
    """

    def __init__(self, path: str, graph: tf.Graph | None = None):
        """Opens the checkpoint `path`, to compare it with `graph`; None for the default graph."""
        self.path, self._graph = path, graph or tf.get_default_graph()
        self._reader = tf.train.load_checkpoint(path)
        self.shapes = {n: tuple(s) for n, s in self._reader.get_variable_to_shape_map().items()}
        self.dtypes = self._reader.get_variable_to_dtype_map()
        self.read = functools.lru_cache(maxsize=1)(self._reader.get_tensor)
        # A trained variable has the outer values under its own name, and has one shape in all runs.
        self._held = [n for n in self.shapes if f"{n}/{ISLAND}" in self.shapes]
        self.islands: tuple[int, ...] = ()
        for name in self._held[:1]:
            of_islands = self.shapes[f"{name}/{ISLAND}"]
            self.islands = of_islands[: len(of_islands) - len(self.shapes[name])]

    def find(self, name: str | None, of_islands: bool = False) -> str | None:
        """Returns the name that a variable has in the checkpoint; None if it is missing.

        `name` is the variable's name in a graph without islands. The result is `name`, or
        `<name>/island` if the checkpoint has a value for each island. If the checkpoint has both
        names, `of_islands` says whether `<name>/island` is returned. If `name` is None, the result
        is None.
        """
        names = [name, f"{name}/{ISLAND}"]
        return next((n for n in names[:: -1 if of_islands else 1] if n in self.shapes), None)

    def describe_difference(self, variable: Any) -> str:
        """Returns a sentence on how a variable's shape or dtype differs in the checkpoint.

        `variable` is a tf variable of the graph; the checkpoint must have a variable of the same
        name. The result is "" if shape and dtype are the same.
        """
        name, shape, dtype = variable.op.name, variable.shape.as_list(), variable.dtype.base_dtype
        if list(self.shapes[name]) != shape:
            return (
                f"{name} has the shape {list(self.shapes[name])} in the checkpoint and {shape} in "
                "the graph"
            )
        if self.dtypes[name] != dtype:
            return (
                f"{name} has the type {self.dtypes[name].name} in the checkpoint and {dtype.name} "
                "in the graph"
            )
        return ""

    @functools.cached_property
    def changes(self) -> dict[str, Change]:
        """The graph's variables that the checkpoint has in another form, or not at all, by name.

        Only three kinds of the graph's variables are compared: the state of wrappers, slots, and
        variables with a value for each island.
        """
        notes = {note.name: note for note in self._graph.get_collection(STATE_COLLECTION)}
        found = {}
        for variable in self._graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES):
            name = variable.op.name
            note = notes.get(name)
            if note is None and name not in self.shapes and self.find(name):
                note = StateNote(name, one_shape=True, start=None)
            change = note and self._change(variable, note)
            if change:
                found[name] = change
        return {**self._new_slots, **found}

    @functools.cached_property
    def _new_slots(self) -> dict[str, Change]:
        """The slots of the graph that begin as in a new run, by name.

        A checkpoint that has only some of the graph's slots is from a run in which other
        optimizers, or none, updated some variables. If the checkpoint has no slot of a variable,
        all slots of the variable begin as in a new run. Slots whose elements have different initial
        values are left out. The result is {} if the checkpoint has no slots.
        """
        own: list[StateNote] = self._graph.get_collection(STATE_COLLECTION)
        state, held = {note.name for note in own}, {n.name: n.held for n in own if n.held}
        notes = self._graph.get_collection(SLOTS_COLLECTION)
        there = {x for note in notes for x in note.siblings if self.find(x)}
        if not there - state:
            return {}
        slots = {n.name for n in notes if n.name not in state and there.isdisjoint(n.siblings)}
        found = {}
        for variable in self._graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES):
            name, shape = variable.op.name, tuple(variable.shape.as_list())
            if held.get(name, name) not in slots:
                continue
            start = _initial_number(variable)
            if start is not None:
                dtype = variable.dtype.base_dtype
                found[name] = Change(None, (), None, shape, dtype, StateNote(name, start=start))
        return found

    @functools.cached_property
    def restarted_slots(self) -> set[str]:
        """The names of slots, and of counters of their updates, that begin as in a new run.

        All names in the result are keys of `changes`.
        """
        counts = {
            name
            for name, change in self.changes.items()
            if change.saved_name is None and change.note.follows
            if not self.find(change.note.follows)
        }
        return {*self._new_slots, *counts}

    def _change(self, variable: Any, note: StateNote) -> Change | None:
        """Returns how a variable differs in the checkpoint; None if it does not.

        `variable` is the graph's tf variable, and `note` is the note with which a wrapper has said
        how the variable's value is to be converted.
        """
        name, shape = variable.op.name, tuple(variable.shape.as_list())
        dtype = variable.dtype.base_dtype
        source = self._find_noted(note.held or name, note)
        if source is None or (note.counter and not self.find(note.counter)):
            return None if note.start is None else Change(None, (), None, shape, dtype, note)
        if note.ring:
            here = (*shape[: note.num_island_dims], note.ring.size)
            if self.shapes.get(self._find_noted(note.ring.values, note), here) == here:
                return None
            return Change(source, self.shapes[source], 0, shape, dtype, note, looks_alike=True)
        saved_shape, islands = self.shapes[source], self._islands_of(source, note)
        rest = shape[note.num_island_dims + note.num_shard_dims :]
        dims = len(saved_shape) - len(islands) - len(rest)
        fits = dims >= 0 and saved_shape[len(islands) + dims :] == rest
        fits = fits and not (note.one_shape and dims)
        is_alike = source == name and saved_shape == shape and self.dtypes[source] == dtype
        is_empty = note.counter is not None and not self._sum_over_islands(note.counter)
        is_same_kind = is_empty or self._adds_up_islands(note) == note.is_total
        if is_alike and islands == shape[: note.num_island_dims] and is_same_kind:
            return None
        looks_alike = is_alike and not is_empty
        return Change(source, saved_shape, dims if fits else None, shape, dtype, note, looks_alike)

    def _find_noted(self, name: str, note: StateNote) -> str | None:
        return self.find(name, of_islands=note.held is not None)

    def _ring_value(self, name: str, change: Change) -> np.ndarray:
        """Returns the value to restore for a variable `name` that belongs to a ring of values.

        A ring of values is two variables of the graph: one holds the newest values of a series, and
        the other counts how many values have been written. `change` says how the variable differs:
        the ring in the checkpoint has another size, or belongs to other islands. The result holds
        the newest values, as many as the graph's ring can hold, from the oldest to the newest. If
        `name` is the name of the counter, the result is the number of these values. If the ring in
        the checkpoint belongs to other islands than the graph's ring, the result is zeros.
        """
        note, ring = change.note, change.note.ring
        assert ring is not None
        islands = change.shape[: note.num_island_dims]
        values = self.read(self._find_noted(ring.values, note))
        counts = self.read(self._find_noted(ring.num_values, note))
        if values.shape[:-1] != islands or name not in ring[:2]:
            return np.zeros(change.shape, change.dtype.as_numpy_dtype)
        size, found = values.shape[-1], list[Any]()
        for some, count in zip(values.reshape(-1, size), counts.reshape(-1)):
            newest = np.roll(some, -(count % size)) if count >= size else some
            newest = newest[: min(count, size)][-ring.size :]
            padded = np.pad(newest, (0, ring.size - len(newest)))
            found.append(padded if name == ring.values else len(newest))
        return np.reshape(found, change.shape).astype(change.dtype.as_numpy_dtype)

    def _islands_of(self, name: str, note: StateNote | None = None) -> tuple[int, ...]:
        """Returns the sizes of those dims of a variable in the checkpoint that number islands.

        `name` is the variable's name in the checkpoint. `note` is the graph's note on the variable,
        if there is one. The result is () if no dims of the variable number islands.
        """
        is_own = note is not None and note.held is None and note.num_island_dims > 0
        return self.islands if is_own or name.endswith(f"/{ISLAND}") else ()

    def _adds_up_islands(self, note: StateNote) -> bool:
        """Returns True if the saved values of islands are added up, and False if they are averaged.

        `note` is the graph's note on the variable. Accumulated gradients are added up over the
        islands if the checkpoint has their weights (such as numbers of tokens), because they are
        then sums of gradients times weights. For other values, the note says whether they are added
        up.
        """
        return note.is_total if note.weight is None else self.find(note.weight) is not None

    def _sum_over_islands(self, name: str | None) -> float:
        """Returns the sum over the islands of the saved scalar `name`; 0.0 if it is missing."""
        found = name and self.find(name)
        return float(np.sum(self.read(found), dtype=np.float64)) if found else 0.0

    def _weights_of_islands(self, name: str | None, islands: int) -> np.ndarray | None:
        """Returns the weights of islands in the checkpoint: a float64 vector, one for each island.

        `name` is the name of the weights' variable, and `islands` is the number of islands. The
        result is None if the checkpoint does not have one weight for each island, or if all weights
        are 0.
        """
        if name not in self.shapes or math.prod(self.shapes[name]) != islands:
            return None
        weights = self.read(name).reshape(islands).astype(np.float64)
        return weights if weights.sum() > 0 else None

    def _count_updates(self) -> int | None:
        """Returns how many updates the innermost optimizer had made; None if it was not saved."""
        for last in ("update_step", "inner_step"):
            ends = (f"/{last}", f"/{last}/{ISLAND}")
            counts = [int(np.max(self.read(n))) for n in self.shapes if n.endswith(ends)]
            if counts:  # the innermost counter counts fewest
                return min(counts)
        return int(self._sum_over_islands("global_step")) if "global_step" in self.shapes else None

    def value(self, name: str) -> np.ndarray:
        """Returns the value to restore for the variable `name`, which is a key of `changes`."""
        change = self.changes[name]
        note = change.note
        if note.ring and change.saved_name is not None:
            return self._ring_value(note.held or name, change)
        if change.saved_name is not None and note.fill is None:
            return self._converted(change)
        value: Any = note.start if change.saved_name is None else note.fill
        if isinstance(value, str):
            value = self._value_of(value)
            if value is None:  # then no bias correction is needed any more
                value = _MANY_UPDATES if note.follows else 0
        if note.follows and not self.find(note.follows):
            value = 0
        if note.is_total:
            value = value / math.prod(change.shape[: note.num_island_dims])
        return np.broadcast_to(np.asarray(value).astype(change.dtype.as_numpy_dtype), change.shape)

    def _value_of(self, name: str) -> Any:
        """Returns the value in the checkpoint of the variable `name`, converted for the graph.

        If the variable has a value for each island, the result is the mean over islands. If the
        checkpoint does not have the variable, the result is 0. For the name "global_step" the
        result is the number of updates that were made, or None if no variable counts updates.
        """
        if name == "global_step":
            return self._count_updates()
        if name in self.changes:
            return self.value(name)
        held = f"{name}/{ISLAND}"
        if held in self.changes:
            value, islands = self.value(held), self.changes[held].note.num_island_dims
        else:
            found = self.find(name)
            value = self.read(found) if found else np.zeros([])
            islands = len(self._islands_of(found)) if found else 0
        return np.mean(value, tuple(range(islands)), np.float64) if islands else value

    def _converted(self, change: Change) -> np.ndarray:
        """Returns a saved value, converted to the islands, shards and weights of the graph.

        `change` describes how the variable differs in the checkpoint.
        """
        note, name, dims = change.note, change.saved_name, change.num_shard_dims
        assert name is not None
        assert dims is not None, "it does not fit"
        islands = self._islands_of(name, note)
        old, new = math.prod(islands), math.prod(change.shape[: note.num_island_dims])
        of_island = change.shape[note.num_island_dims :]
        old_shards = math.prod(change.saved_shape[len(islands) : len(islands) + dims])
        new_shards = math.prod(of_island[: note.num_shard_dims])
        # First to values that add up to the value of the batch, then to those of the graph.
        times, by = (new_shards, old_shards) if note.is_mean else (1.0, 1.0)
        if not self._adds_up_islands(note):
            times, by = times * (old_shards if note.is_share else 1), by * old
        elif not note.is_total:  # the weighted mean, times the number of additions
            weight = self._sum_over_islands(note.weight)
            times, by = (
                times * (self._sum_over_islands(note.counter) if weight else 1),
                by * (weight or 1),
            )
        if not note.is_total:
            times, by = times * new, by * (new_shards if note.is_share else 1)
        value = self.read(name)
        values = value.reshape((old, *value.shape[len(islands) :]))
        weights = self._weights_of_islands(note.mean_weight, old)
        if old != new and weights is not None:
            mean = np.tensordot(weights / weights.sum(), values.astype(np.float64), 1)
            values, times, by = mean[None], 1.0, 1.0
        elif old != new:
            values, by = values.sum(0, np.float64, keepdims=True), by * new
        if times != by:
            values = values.astype(np.float64) * times / by
        values = np.stack([reshard(x, dims, of_island) for x in values])
        values = values.astype(change.dtype.as_numpy_dtype, copy=False)
        return np.broadcast_to(values, (new, *of_island)).reshape(change.shape)

    def lost_sums(self) -> dict[str, tuple[int, str]]:
        """Finds sums of gradients in the checkpoint for which the graph has no accumulators.

        Returns a dictionary. Each key is the name of a variable that counts the microbatch steps in
        sums of gradients for which the graph has no accumulators. The key's value is a pair: the
        count that the checkpoint has, and a sentence on how to keep the sums. Counters that are 0
        are left out.
        """
        noted = self._graph.get_collection(SUMS_NOT_KEPT)
        counts = {c: (int(self.read(c)), remedy) for c, remedy in noted if c in self.shapes}
        return {counter: found for counter, found in counts.items() if found[0]}

    def check_sums_kept(self) -> None:
        """Raises ValueError if restoring into the graph would lose sums of gradients."""
        for counter, (count, remedy) in self.lost_sums().items():
            raise ValueError(
                f"The checkpoint {self.path} has the sums of {count} microbatch steps without an "
                f"update ({counter}), which this graph would lose. {remedy} To lose them, restore "
                "gs.adapt_checkpoint(path, directory, drop_sums=True)."
            )

    def warn_of_changes(self) -> None:
        """Logs warnings about state that the checkpoint lacks, and about values of islands.

        A graph without islands begins with the values that the variables had at the last outer
        step. What the islands of the checkpoint's run have learned since this step is lost.
        """
        if self._new_slots:
            _logger.warning(
                "The checkpoint %s has no %s: it is of a run in which another optimizer, or "
                "none, updated these variables. The slots begin as in a new run.",
                self.path,
                some_of(sorted(self._new_slots)),
            )
        lacking: dict[str, list[str]] = {
            "begin as in a new run": [],
            "begin from the checkpoint's variables and its number of updates": [],
        }
        as_new, derived = lacking.values()
        for name, change in sorted(self.changes.items()):
            if change.saved_name is None and name not in self._new_slots:
                follows = not change.note.follows or self.find(change.note.follows)
                is_derived = isinstance(change.note.start, str) and follows
                (derived if is_derived else as_new).append(name)
        for how, names in lacking.items():
            if names:
                _logger.warning(
                    "The checkpoint %s has no %s of this wrapper: it is of a run without the "
                    "wrapper or with other arguments. These variables %s.",
                    self.path,
                    some_of(names),
                    how,
                )
        if not self._held or any(change.note.held for change in self.changes.values()):
            return
        here = {v.op.name for v in self._graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)}
        trained = [n for n in self._held if n in here and f"{n}/{ISLAND}" not in here]
        if any((self.read(f"{n}/{ISLAND}") != self.read(n)).any() for n in trained):
            _logger.warning(
                "The checkpoint %s was written in the middle of a round of OuterOptimizer, which "
                "this graph does not have: variables begin with the values of the last outer step, "
                "and what islands have learned since then is lost. To keep it, go on with "
                "OuterOptimizer up to the end of the round.",
                self.path,
            )


def _initial_number(variable: Any) -> float | None:
    """Returns the initial value of all elements of a variable.

    The result is None if the elements have different initial values, or if the graph does not show
    these values.
    """
    value = variable.initial_value
    while value.op.type in _COPIES:
        value = value.op.inputs[_COPIES[value.op.type]]
    if value.op.type != "Const":
        return None
    found = np.unique(tf.get_static_value(value))
    return found[0] if len(found) == 1 else None


def adapt_checkpoint(path: str, directory: str, drop_sums: bool = False) -> str:
    """Makes a checkpoint of another run restorable into the default graph.

    The checkpoint itself is only read. This function writes a copy of the checkpoint, in which
    values are adapted to the graph:

    - If the other run had another mesh, the sums that its shards held are distributed by `reshard`
      over the graph's shards. Every replica of a SyncReplicasOptimizer begins with the step of the
      last update.
    - If the other run had other islands (`OuterOptimizer`), or none, accumulated sums of gradients
      are converted so that the mean gradient over the batch stays the same. Each new island's slots
      begin with the mean of the slots over the other run's islands.
    - If the other run had weights of gradients and the graph has none, each sum of gradients times
      weights becomes a sum without weights. Its value is the weighted mean of the gradients, times
      the number of gradients in the sum.
    - If the other run had no wrapper, sums and counts begin at zero, and moving averages begin with
      the values of their variables. Counters of updates begin with the number of updates that the
      other run had made.
    - All other values are copied.

    Call `adapt_checkpoint` after the optimizer has added its state to the graph (after
    `apply_grads`), in programs that make a Saver of their own. `ReshardingSaver` calls
    `adapt_checkpoint` itself.

    Args:
      path: a checkpoint.
      directory: a directory to write to, made if it is missing. The new checkpoint has the name of
        the old one, or "<name>-resharded" if `directory` is the directory of the old one.
      drop_sums: whether sums of gradients for which the graph has no accumulators are dropped: the
        copy has zeros in their place. If it is False, a checkpoint with such sums is refused by a
        ValueError.

    Returns:
      The path of the checkpoint to restore: `path` itself if everything in it fits the graph, else
      the path of the adapted copy.

    Raises:
      ValueError: when an optimizer's state in the checkpoint differs from the graph's in more than
        shards and islands. TensorFlow's own Saver would restore a resource variable of another
        shape without an error. A ValueError is also raised when the checkpoint has sums of
        microbatch steps, but the graph has no accumulators, because its backward_passes_per_step
        is 1.
    """
    saved = SavedCheckpoint(path)
    if not drop_sums:
        saved.check_sums_kept()
    changed, lost = saved.changes, saved.lost_sums()
    if not changed and not lost:
        return path
    for name, change in sorted(changed.items()):
        if not change.fits:
            raise ValueError(
                f"{name} has the shape {list(change.saved_shape)} in the checkpoint {path}, but "
                f"{list(change.shape)} here, which another number of shards or islands does not "
                "explain: the checkpoint is of another model. Restore one of this model."
            )
    saved.warn_of_changes()
    values = {name: saved.value(name) for name in sorted(changed)}
    if lost:
        kept = {v.op.name for v in tf.global_variables()}
        ends = (f"/{ACCUMULATOR}", f"/{ACCUMULATOR}/{ISLAND}")
        gone = [*lost, *(x for x in saved.shapes if x.endswith(ends) and x not in kept)]
        values.update((x, np.zeros_like(saved.read(x))) for x in gone)
    # Sums were divided by weights that the graph does not have.
    of = {c.note.weight for c in changed.values() if c.note.weight and not c.note.is_total}
    without = {n for name in of for n in (name, f"{name}/{ISLAND}")}
    name = os.path.basename(path)
    if os.path.realpath(directory) == os.path.realpath(os.path.dirname(path)):
        name += "-resharded"
    tf.io.gfile.makedirs(directory)
    target = os.path.join(directory, name)
    # A checkpoint exists if its index does, which TensorFlow writes last.
    if tf.io.gfile.exists(target + ".index"):
        tf.io.gfile.remove(target + ".index")
    try:
        write_changed(path, target, values, set(saved.shapes) - without)
    except BaseException:
        for file in tf.io.gfile.glob(f"{target}.*.tempstate*"):  # what TensorFlow was writing
            tf.io.gfile.remove(file)
        raise
    return target


def write_changed(
    path: str | None,
    target: str,
    new: Mapping[str, np.ndarray],
    only: Iterable[str] | None = None,
) -> None:
    """Writes a copy of a checkpoint, in which some variables have other values.

    Args:
      path: the path of the checkpoint; None for a new checkpoint that has the values in `new`.
      target: the path of the copy.
      new: the other values, by the names of their variables. Variables that the checkpoint does not
        have may be among them; the copy has them, too.
      only: the names of the variables whose values are copied from the checkpoint, unless they are
        in `new`; None copies all.
    """
    dtypes = tf.train.load_checkpoint(path).get_variable_to_dtype_map() if path else {}
    copied = sorted(set(dtypes if only is None else only) - set(new))
    with tf.Graph().as_default():
        values: Any = []
        if copied:
            values = tf.raw_ops.RestoreV2(
                prefix=path,
                tensor_names=copied,
                shape_and_slices=[""] * len(copied),
                dtypes=[dtypes[name] for name in copied],
            )
        inputs = {name: tf.placeholder(value.dtype, value.shape) for name, value in new.items()}
        save = tf.raw_ops.SaveV2(
            prefix=target,
            tensor_names=[*copied, *new],
            shape_and_slices=[""] * (len(copied) + len(new)),
            tensors=[*values, *inputs.values()],
        )
        with tf.Session() as session:
            session.run(save, {inputs[name]: value for name, value in new.items()})


class NoAveragesError(ValueError):
    """The error that a graph or a checkpoint has no moving averages of variables."""


def check_averages_kept() -> None:
    """Raises NoAveragesError if the training step in the default graph keeps no moving averages."""
    variables = tf.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    if not any(variable.op.name.endswith(f"/{AVERAGE}") for variable in variables):
        raise NoAveragesError(
            "evaluate_with_averages needs an optimizer that keeps moving averages, and none does: "
            "wrap it in mtf_gradsync.AverageOptimizer, or give SyncReplicasOptimizer "
            "variable_averages and variables_to_average."
        )


@contextlib.contextmanager
def averaged_checkpoint(path: str, variables: Sequence[Any]) -> Iterator[str]:
    """Yields the path of a temporary checkpoint with averages in place of the variables.

    The temporary checkpoint has only those of the tf variables `variables` that the checkpoint
    `path` has; a variable without an average keeps its own value. The temporary checkpoint has the
    file name of `path`, and is deleted when the block ends.

    Raises:
      NoAveragesError: when the checkpoint has no average of any of the variables.
    """
    saved = SavedCheckpoint(path)
    names = [variable.op.name for variable in variables if variable.op.name in saved.shapes]
    averages = {name: f"{name}/{AVERAGE}" for name in names if f"{name}/{AVERAGE}" in saved.shapes}
    if not averages:
        raise NoAveragesError(
            f"evaluate_with_averages: the checkpoint {path} has no moving averages of the model's "
            f"variables (<variable>/{AVERAGE}). mtf_gradsync.AverageOptimizer keeps them in "
            "training."
        )
    found = {name: saved.read(average) for name, average in averages.items()}
    values = {
        # Averages are wider than narrow variables. Before training they are the variables.
        name: average.astype(saved.dtypes[name].as_numpy_dtype)
        for name, average in found.items()
        if not is_marked(average)
    }
    with tempfile.TemporaryDirectory() as directory:
        target = os.path.join(directory, os.path.basename(path))
        write_changed(path, target, values, only=names)
        yield target
