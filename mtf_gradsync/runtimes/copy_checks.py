"""Compares the copies of variables on cores during a training, which ends if copies differ.

Each core of a mesh has its own copy of all values that the mesh does not split: variables, slots,
counters. All copies get the same updates, and nothing in a step compares the copies. A copy that
becomes different from the others, because of a memory fault or a race, spoils every later gradient.
"""

from __future__ import annotations

import collections
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import numpy as np

from mtf_gradsync.extension import (
    HeldSlices,
    check_whole_number,
    counted,
    is_simd,
    lowerings_of,
    mtf,
    patch,
    tf,
    warn_once,
)
from mtf_gradsync.runtimes._private.mesh_tensorflow import variables_of_cores
from mtf_gradsync.runtimes.simd.replica_session import inner_session

# Key of the graph collection of hooks. As it is no string, the collection is not exported.
_COLLECTION = ("mtf_gradsync watched copies",)
_DOCS = "docs/guides/watch.md"
_VARIABLE = "variable"


class CopiesError(RuntimeError):
    """The error of a variable whose copies on several cores must be equal and are not.

    Attributes:
      variable: the variable's name.
      cores: the cores whose copy differs from the copy of most cores; all cores if there is no
        majority.
      step: the global step at which the difference was found; in a graph without a global step, the
        number of the session's runs.
    """

    def __init__(self, variable: str, cores: Sequence[int], step: int, text: str):
        super().__init__(text)
        self.variable, self.cores, self.step = variable, tuple(cores), step


def watch_copies(every: int = 100) -> CopiesHook:
    """Makes a session hook that compares the copies of each variable and slot on all cores.

    The hook compares checksums of bits, which each device computes from its own copy. So two equal
    NaNs are no difference, but -0.0 in place of 0.0 is a difference. State that belongs to one
    shard, such as accumulated gradients, is compared among the cores of this shard. Give the hook
    to `tf.train.MonitoredTrainingSession` or `Estimator.train`. A program without hooks calls the
    hook's `begin` before it opens the session, and `after_step` after each step.

    Args:
      every: the number of runs of the session between two comparisons. The copies are also compared
        before a `tf.train.Saver`, or a session of this package, writes a checkpoint, and at the end
        of the session.

    Returns:
      The hook. If copies differ, the hook raises a `CopiesError`, and no checkpoint with these
      copies is written.

    Raises:
      ValueError: when `every` is not a whole number of 1 or more.
    """
    return CopiesHook(check_whole_number("every", every))


class CopiesHook(tf.train.SessionRunHook):
    """A session hook that compares copies of variables between steps; `watch_copies` makes it."""

    def __init__(self, every: int):
        self.every = every
        self._runs = 0
        self._graph: tf.Graph | None = None
        self._copies: list[_Copies] = []
        self._sums: list[tuple[tf.Tensor, list[str]]] = []
        self._reads: dict[str, tf.Tensor] = {}
        self._step: tf.Tensor | None = None

    def begin(self) -> None:
        """Adds the comparison's operations to the default graph, which must hold the lowered step.

        Raises ValueError if the graph has no `mtf.Lowering`.
        """
        self._graph = graph = tf.get_default_graph()
        lowerings = lowerings_of(graph)
        if not lowerings:
            raise ValueError(
                "watch_copies finds no mtf.Lowering in the default graph: make the hook (or the "
                "session that uses it) after the step is lowered, within the graph."
            )
        with tf.control_dependencies(None), tf.name_scope(None), tf.name_scope("watch_copies"):
            by_device: dict[str, dict[str, tf.Tensor]] = {}
            for lowering in lowerings:
                for variable in lowering.variables:
                    for copies, slices in _copies_of(lowering, variable).items():
                        self._copies.append(copies)
                        for key, one in zip(copies.keys, slices):
                            with tf.device(one.device):
                                value = self._reads[key] = one.read_value()
                                by_device.setdefault(one.device, {})[key] = _checksum(value)
            for device, sums in by_device.items():
                with tf.device(device):
                    self._sums.append((tf.stack(list(sums.values())), list(sums)))
            step = tf.train.get_global_step(graph)
            self._step = None if step is None else step.read_value()
        if not self._copies:
            warn_once(
                "no copies to watch",
                "watch_copies has nothing to compare: no two cores hold separate copies of a "
                "variable, because processors with one memory share variables.",
            )
        graph.add_to_collection(_COLLECTION, self)
        patch(tf.train.Saver, "save", _save_checked_copies)

    def after_create_session(self, session: Any, coord: Any) -> None:
        del coord
        self._attach(session)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Counts a step of a session with hooks; compares the copies in every `every`-th step.

        A monitored session calls this method after each run. `run_context` is TensorFlow's object
        with the session; `run_values` is not used. Raises CopiesError if copies differ.
        """
        del run_values
        self.after_step(run_context.session)

    def end(self, session: Any) -> None:
        self.check(session)

    @property
    def has_run(self) -> bool:
        """Whether the session has made a step."""
        return self._runs > 0

    def after_step(self, session: Any) -> None:
        """Counts a step of a session without hooks; in every `every`-th step compares the copies.

        Raises CopiesError if copies differ.
        """
        if not self._runs:
            self._attach(session)
        self._runs += 1
        if self._runs % self.every == 0:
            self.check(session)

    def check(self, session: Any) -> None:
        """Compares the copies now; raises CopiesError for the first variable whose copies differ.

        Args:
          session: the session that runs the steps, a ``tf.Session`` or a session of this package.
        """
        parted = {
            copies: sums
            for copies, sums in self._copies_with_checksums(session)
            if len(set(sums)) > 1
        }
        if not parted:
            return
        first, sums = next(iter(parted.items()))
        apart, alike = _minority(sums)
        name, numbers = _describe_first_difference(
            first, self._values(session, first), apart[0], alike[0]
        )
        others = list(dict.fromkeys(copies.name for copies in parted if copies.name != first.name))
        if self._step is None:
            step, when = self._runs, f"after run {self._runs} of the session"
        else:
            step = int(np.asarray(session.run(self._step)))
            when = f"by global step {step}"
        cores, right = ([first.cores[number] for number in some] for some in (apart, alike))
        has = "has" if len(cores) == 1 else "have"
        text = f"{_cores(cores)} {has} other bits than {_cores(right)}"
        if len(cores) >= len(right):
            cores, text = sorted(first.cores), f"{text} (which of them is right cannot be told)"
        raise CopiesError(
            name,
            cores,
            step,
            f"The copies of variable {name!r} have become different {when}: {text}. {numbers}"
            f"{f'So have the copies of {counted(others, _VARIABLE)}. ' if others else ''}"
            "Copies were equal when they were compared last. The memory of a device may be "
            "damaged, two writes may race, or an operation may write one copy alone: go on from "
            f"the newest checkpoint ({_DOCS}).",
        )

    def _copies_with_checksums(self, session: Any) -> Iterator[tuple[_Copies, Sequence[bytes]]]:
        """Yields, for each slice that several cores hold, its copies and the checksum of each copy.

        Slices of all variables are yielded. The checksums, which the devices of `session` compute
        now, are `bytes` objects, in the order of the copies.
        """
        on_cores = inner_session(session)
        checksums = None if on_cores is None else on_cores.checksums()
        if checksums is None:
            found = session.run([tensor for tensor, _ in self._sums])
            by_name = {k: x for xs, (_, keys) in zip(found, self._sums) for k, x in zip(keys, xs)}
        else:
            by_name = {}
            # On XLA devices each core also copies variables that TensorFlow has once (counters).
            for names, of_cores in checksums.items():
                by_name.update(zip(names, of_cores))
                if len(set(names)) == 1 < len(names):
                    copies = _Copies(names[0], tuple(range(len(names))), names, None)
                    yield copies, [x.tobytes() for x in of_cores]
        for copies in self._copies:
            # Variables that no step has used are not on the devices.
            if all(name in by_name for name in copies.keys):
                yield copies, [by_name[name].tobytes() for name in copies.keys]

    def _values(self, session: Any, copies: _Copies) -> list[np.ndarray]:
        on_cores = inner_session(session)
        values = None if on_cores is None else on_cores.copies_of(copies.keys)
        if values is None:
            values = session.run([self._reads[key] for key in copies.keys])
        return [np.asarray(value) for value in values]

    def _attach(self, session: Any) -> None:
        """Makes `session`, if it runs a SIMD program, compare copies before each save."""
        on_cores = inner_session(session)
        if on_cores is not None:
            on_cores.check_before_save(lambda: self.check(on_cores))


class _Copies(NamedTuple):
    """The copies of one slice (part) of a variable, on different cores.

    Attributes:
      name: the name of the Mesh-TF variable.
      cores: the numbers of the cores that hold a copy.
      keys: the names of the tf variables that hold the copies, one per core.
      stacked: the names of the variables that Mesh-TF has stacked in this variable; None if it is a
        single variable.
    """

    name: str
    cores: tuple[int, ...]
    keys: tuple[str, ...]
    stacked: Sequence[str] | None


def _copies_of(lowering: mtf.Lowering, variable: mtf.Variable) -> dict[_Copies, list[Any]]:
    """Returns the copies of each slice of a variable, with the tf variables that hold the copies.

    `lowering` is the lowering that has the variable. The result is a dictionary from the copies of
    a slice to their tf variables, in the order of `_Copies.cores`. Slices that a single core holds
    are left out.
    """
    laid_out = lowering.variables[variable]
    if isinstance(laid_out, HeldSlices):  # the holder's slices
        return {}
    mesh_impl = lowering.mesh_impl(variable)
    slices, on_simd = laid_out.laid_out_tensor.all_slices, is_simd(mesh_impl)
    if on_simd:
        slices = variables_of_cores(slices[0])
    groups: dict[tuple[int, ...], dict[str, tuple[int, Any]]] = {}
    for core, one in enumerate(slices):
        logical = mesh_impl.p2l(core) if on_simd else core
        begin = tuple(mesh_impl.slice_begin(variable.shape, logical))
        # Processors that share a memory have one tf variable.
        groups.setdefault(begin, {}).setdefault(one.op.name, (core, one))
    names = getattr(variable, "original_names", None)
    stacked = None if names is None else tuple(names)
    found = {}
    for group in groups.values():
        if len(group) > 1:
            cores, variables = zip(*group.values())
            found[_Copies(variable.name, cores, tuple(group), stacked)] = list(variables)
    return found


def _bytes_of_numbers(value: np.ndarray) -> np.ndarray:
    """Returns the bytes of each number in `value`: a uint8 array ``[numbers, bytes]``."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).reshape(value.size, -1)


def _minority(copies: Sequence[bytes]) -> tuple[list[int], list[int]]:
    """Returns the indices of copies that differ from most copies, and the indices of all others.

    `copies` has the checksum of each copy.
    """
    most = collections.Counter(copies).most_common(1)[0][0]
    alike = [number for number, x in enumerate(copies) if x == most]
    return [number for number, x in enumerate(copies) if x != most], alike


def _describe_first_difference(
    copies: _Copies, values: Sequence[np.ndarray], one: int, other: int
) -> tuple[str, str]:
    """Returns the variable's name, and a sentence on where two copies of a slice differ.

    `values` are the values of all copies, and `one` and `other` are the indices of the two copies
    to compare. If Mesh-TF has stacked several variables in the variable, the returned name is that
    of the first stacked variable in which the two copies differ.
    """
    value = values[one]
    numbers = np.flatnonzero((_bytes_of_numbers(value) != _bytes_of_numbers(values[other])).any(1))
    if not len(numbers):
        return copies.name, "Read once more, the copies are equal. "
    place = [int(i) for i in np.unravel_index(numbers[0], value.shape)]
    name = copies.name if copies.stacked is None else copies.stacked[place[0]]
    shown = [f"{values[n].reshape(-1)[numbers[0]]} on core {copies.cores[n]}" for n in (one, other)]
    return name, (
        f"{len(numbers)} of the slice's {value.size} numbers differ; the first, at {place}, is "
        f"{' and '.join(shown)}. "
    )


# The length of rows in which numbers are added up: a large slice then needs few weights.
_ROW = 4096
_INTEGERS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


def _checksum(value: tf.Tensor) -> tf.Tensor:
    """Returns a checksum of the bits of `value`, as a uint8 tensor of 8 bytes.

    The checksum is computed on TensorFlow's current device.
    """
    # Slices of a TPU's program are read by its host.
    if tf.DeviceSpec.from_string(value.device).device_type != "GPU":
        return tf.fingerprint(tf.reshape(value, [1, -1]))[0]
    # A change of a single number always changes the sum, because weights are odd.
    dtype = value.dtype.base_dtype
    if dtype != tf.bool:
        value = tf.bitcast(value, _INTEGERS[min(dtype.size, 8)])
    bits = tf.reshape(tf.cast(value, tf.int64), [-1])
    size = int(bits.shape[0])
    row = min(_ROW, size)
    weights = np.random.RandomState(0).randint(-(2**62), 2**62, row) | 1
    rows = tf.reshape(tf.pad(bits, [[0, -size % row]]), [-1, row])
    sums = tf.reduce_sum(rows * weights, 1)
    of_rows = 2 * tf.range(-(-size // row), dtype=tf.int64) + 1
    return tf.bitcast(tf.reduce_sum(sums * of_rows), tf.uint8)


def _cores(cores: Sequence[int]) -> str:
    text = ", ".join(map(str, cores))
    return f"core {text}" if len(cores) == 1 else f"cores {text}"


def _save_checked_copies(
    save: Callable[..., Any], self: tf.train.Saver, sess: Any, *args: Any, **kwargs: Any
) -> Any:
    """Compares watched copies, and then saves; replaces `tf.train.Saver.save`.

    `save` is TensorFlow's own method, which is called if no copies differ. Watched copies are those
    for which `watch_copies` has made a hook in the session's graph.
    """
    graph = getattr(sess, "graph", None)
    hooks = () if graph is None else graph.get_collection(_COLLECTION)
    for hook in hooks:
        if hook.has_run:  # Slices may not be there yet.
            hook.check(sess)
    return save(self, sess, *args, **kwargs)
