"""ReplicaSession: the interface of every session that runs a SIMD program; its variables."""

from __future__ import annotations

import abc
import collections
import contextlib
import logging
import tempfile
from concurrent.futures import Future
from typing import Any, Callable, Iterable, Mapping, Sequence, TypeVar

import numpy as np

from mtf_gradsync.extension import WATCHED, Beginnings, counted, mtf, tf
from mtf_gradsync.runtimes._private.mesh_tensorflow import SLICES_COLLECTION, restored_lowering
from mtf_gradsync.runtimes.checkpoints import adapt_checkpoint

_logger = logging.getLogger("mtf_gradsync")


class MasterOps:
    """The operations for variables that every session needs; the constructor adds them to a graph.

    Attributes:
      graph: the graph.
      initialize: names of the operations that initialize all variables and slices.
      to_slices: names of the operations that copy masters to slices.
      to_masters: names of the operations that copy slices to masters.
      masters: the name of the tensor with each global variable's value, by the variable's name.
      saver_def: SaverDef of the global variables; None if there are none.
      are_equal: by the name of each derived variable, the name of the tensor that says whether the
        derived variable still equals the variable from which it is derived.
      beginnings: the variables whose initial values wrappers derive from other variables.
      watches: the object that reports after each step what optimizers have skipped.
    """

    def __init__(self, graph: tf.Graph, lowerings: Sequence[mtf.Lowering]):
        self.graph = graph
        with graph.as_default(), contextlib.ExitStack() as stack:
            # None: not inside whatever scope the caller happens to be in.
            stack.enter_context(tf.control_dependencies(None))
            stack.enter_context(tf.name_scope(None))
            slices = graph.get_collection(SLICES_COLLECTION)
            variables = tf.global_variables()
            self.initialize = [
                tf.variables_initializer(variables + tf.local_variables() + slices).name
            ]
            self.to_slices = [low.copy_masters_to_slices().name for low in lowerings]
            self.to_masters = [low.copy_slices_to_masters().name for low in lowerings]
            self.masters = {
                v.op.name: graph.as_graph_element(v, allow_operation=False).name for v in variables
            }
            self.beginnings = Beginnings(graph)
            self.are_equal = {n: x.name for n, x in self.beginnings.are_equal.items()}
            saver = tf.train.Saver(variables, max_to_keep=None) if variables else None
            self.saver_def = saver.as_saver_def() if saver else None
            self.watches = SkipWatches(graph)

    def check_has_variables(self) -> None:
        """Raises ValueError if the graph has no variables to save or restore."""
        if self.saver_def is None:
            raise ValueError("The graph has no variables to save or restore.")

    def saver(self, graph: tf.Graph) -> tf.train.Saver:
        """Returns a saver of all global variables, which saves by operations that `graph` has.

        `graph` is `self.graph` or a graph made from `self.graph`. Nothing is added to `graph`.
        Raises ValueError if there are no variables.
        """
        self.check_has_variables()
        with graph.as_default():
            return tf.train.Saver(saver_def=self.saver_def)

    def restore(self, session: tf.Session, path: str) -> None:
        """Reads the checkpoint `path`, written on any mesh, into the masters of a session.

        The session's graph is `self.graph` or a graph made from `self.graph`. Slices stay as they
        are.
        """
        saver = self.saver(session.graph)
        with self.graph.as_default(), tempfile.TemporaryDirectory() as directory:
            saver.restore(session, adapt_checkpoint(path, directory))


_Session = TypeVar("_Session", bound="ReplicaSession")


class ReplicaSession(abc.ABC):
    """A session on the cores of a SIMD program. Use it as a context manager.

    Running any tensor or operation of a program runs the whole program on all cores, including the
    program's updates, as a TPU does. After each step the session logs what optimizers have skipped,
    and raises `NoUpdateError` if there were too many steps without an update.
    """

    # Tells hooks that would look at skipped steps that this session does it.
    looks_at_steps = True

    def __init__(
        self, session: tf.Session, ops: MasterOps, share: Callable[[], None] = lambda: None
    ):
        """Wraps `session`, whose graph has the operations `ops`, and initializes its variables.

        `share` is called when the variables have their initial values, before masters are copied
        into slices.
        """
        self._session = session
        self._ops = ops
        self._access: VariableAccess | None = None
        self._is_stepped = False
        self._checks: list[Callable[[], None]] = []
        try:
            session.run(ops.initialize)
            share()
            session.run(ops.to_slices)
        except BaseException:
            session.close()
            raise

    def __enter__(self: _Session) -> _Session:
        return self

    def __exit__(self, *unused_exception: Any) -> None:
        self.close()

    def close(self) -> None:
        """Closes the session; the values of its variables are lost."""
        self._session.close()

    @property
    def tf_session(self) -> tf.Session:
        """The ``tf.Session`` that holds the variables, on a graph made from the user's graph."""
        return self._session

    @abc.abstractmethod
    def run(
        self, fetches: Any, feed_dict: dict[Any, Any] | None = None, per_replica: bool = False
    ) -> Any:
        """Runs the program once.

        Args:
          fetches: a tensor, operation or name of the user's graph, inside or outside the program,
            or a nested structure of them.
          feed_dict: the values to feed, by tensor; the tensors have to be in the user's graph and
            outside the program.
          per_replica: whether a tensor of the program is returned as the list of its values on all
            cores, in physical order; if False, as its value on core 0.

        Returns:
          The structure of `fetches`, with values in place of tensors and None in place of
          operations.

        Raises:
          ValueError: when a fetch or feed is not in the graph, or is in a part of the graph where
            it cannot be fetched or fed.
        """

    def variables(self) -> dict[str, np.ndarray]:
        """Returns the values of all global variables by name, assembled from their slices.

        If Mesh-TF has stacked several variables in one, each of them appears under its own name.
        """
        self._copy_slices_to_masters()
        return self._session.run(self._ops.masters)

    def checksums(self) -> dict[tuple[str, ...], list[Any]] | None:
        """Returns checksums of the values that each core holds, computed on the cores.

        Returns:
          A dictionary with an entry for each variable. The key of an entry has a name for each
          core, in physical order: the name of the tf variable that holds the core's slice. If
          TensorFlow has a variable only once, all cores have the same name. The value of an entry
          has a checksum for each core, in the same order. The result is None if TensorFlow holds
          the values, so that operations of the graph can read the values.
        """
        return None

    def copies_of(self, names: Sequence[str]) -> list[np.ndarray] | None:
        """Returns the values of tf variables that cores hold, in the order of `names`.

        `names` are the names of the tf variables. The result is None if TensorFlow holds the
        values, so that operations of the graph can read the values.
        """
        del names
        return None

    def check_before_save(self, check: Callable[[], None]) -> None:
        """Registers the function `check`, which is called before each save.

        If `check` raises an exception, no checkpoint is written.
        """
        self._checks.append(check)

    def read(self, variable: str | mtf.Variable | tf.Variable) -> np.ndarray:
        """Returns the value of a variable, which may be given by name, assembled from its slices.

        Raises:
          ValueError: when there is no such global variable.
        """
        name = variable if isinstance(variable, str) else variable.name
        master = self._master_tensor(name.split(":")[0])
        self._copy_slices_to_masters()
        return self._session.run(master)

    def save(
        self, path: str, saver: tf.train.Saver | None = None, global_step: int | None = None
    ) -> str:
        """Writes a checkpoint of the variables, and returns the path to give to `restore`.

        Any program with the same variables can read the checkpoint: on another mesh, on another
        runtime or without a mesh.

        Args:
          path: prefix of the checkpoint's files.
          saver: a saver that was made in the program's graph before the session. The saver counts
            checkpoints, deletes old checkpoints and writes the state file. Without a saver, none of
            this is done.
          global_step: a number to add to the path, after "-"; None adds nothing.

        Raises:
          ValueError: when the graph has no variables.
        """
        self._prepare_save()
        return self._write_checkpoint(path, saver, global_step)

    def begin_save(self, path: str, saver: Any, global_step: int) -> Future[str]:
        """Reads a checkpoint's values now, and writes them to files while later steps run.

        Args:
          path: prefix of the checkpoint's files.
          saver: a saver with a method `begin_save`: a `mtf_gradsync.runtimes.saving.TrainingSaver`.
          global_step: a number to add to the path.

        Returns:
          A future with the result or the error of `save`.
        """
        self._prepare_save()
        return saver.begin_save(self._session, path, global_step)

    def restore(self, path: str) -> None:
        """Restores the checkpoint `path`, which this package or any ``tf.train.Saver`` has written.

        If the checkpoint is from another mesh, values that each shard holds for itself (sums of
        accumulated gradients) are converted to this mesh's number of shards.

        Raises:
          ValueError: when there is no such checkpoint, or the graph has no variables.
        """
        self._read_masters(path)
        self._copy_masters_to_slices()

    def write(self, values: Mapping[str, Any]) -> None:
        """Sets variables by name; each core gets its slice of a variable's new value.

        `write` is the inverse of `read`. Variables that `values` does not name keep their values.

        Raises:
          ValueError: when there is no such global variable, or a value has another shape than its
            variable. Then no variable is set.
        """
        wanted = {name.split(":")[0]: np.asarray(value) for name, value in values.items()}
        tensors = {name: self._master_tensor(name) for name in wanted}
        for name, value in wanted.items():
            shape = self._ops.graph.as_graph_element(tensors[name]).shape
            if not shape.is_compatible_with(value.shape):
                raise ValueError(
                    f"The variable {name!r} is of shape {shape.as_list()}; got a value of shape "
                    f"{list(value.shape)}."
                )
        # The slices of variables that are not set are newer than their masters.
        self._copy_slices_to_masters()
        if self._access is None:
            self._access = VariableAccess(self._session.graph)
        if not self._is_stepped:
            # Values that wrappers derive from variables begin with the variables' values at step 1.
            are_equal = self._session.run(self._ops.are_equal)
            wanted = {**self._ops.beginnings.marks(are_equal, wanted), **wanted}
        self._set_masters(wanted.items())

    def _set_masters(self, values: Iterable[tuple[str, Any]]) -> None:
        """Sets masters to values, and then copies all masters into slices.

        `values` are pairs (name of a variable, value).
        """
        assert self._access is not None
        self._access.set(self._session, values)
        self._copy_masters_to_slices()

    def _master_tensor(self, name: str) -> str:
        """Returns the name of the tensor with the value of the variable `name`, a global variable.

        Raises ValueError if there is no such variable.
        """
        if name not in self._ops.masters:
            raise ValueError(
                f"The graph has no global variable {name!r}. It has: "
                f"{counted(sorted(self._ops.masters), 'variable')}."
            )
        return self._ops.masters[name]

    def _write_checkpoint(
        self, path: str, saver: tf.train.Saver | None, global_step: int | None
    ) -> str:
        """Writes a checkpoint of the masters' present values, and returns its path.

        The method `save` calls this method after it has copied slices into masters. `path` is the
        prefix of the checkpoint's files, to which `global_step` is added unless it is None. `saver`
        writes the checkpoint; None for a saver that neither deletes older checkpoints nor writes
        the state file.
        """
        return (saver or self._ops.saver(self._session.graph)).save(
            self._session,
            path,
            global_step=global_step,
            write_meta_graph=False,
            write_state=saver is not None,
        )

    def _read_masters(self, path: str) -> None:
        """Reads the masters from the checkpoint `path`; slices stay as they are."""
        self._ops.restore(self._session, path)

    @abc.abstractmethod
    def _is_inside(self, name: str) -> bool:
        """Returns whether the operation or tensor `name` of the user's graph is in a program.

        Raises KeyError if the graph did not have the operation when the session was made.
        """

    def _name_to_feed(self, key: Any) -> str:
        """Returns the name of a tensor to feed; ValueError if it cannot be fed.

        `key` is a tensor of the user's graph outside the program, or its name.
        """
        name = self._name_of(key)
        if self._is_inside(name):
            raise ValueError(
                f"{name!r} cannot be fed: it is inside the TPU program. Feed the tensor from "
                "which it is computed, outside the program."
            )
        return name

    def _name_of(self, element: Any) -> str:
        """Returns the name of a tensor or operation; for a variable, that of its value's tensor.

        `element` is a tensor, an operation, a variable or a name. Raises ValueError if the user's
        graph did not have `element` when the session was made.
        """
        try:
            name = self._ops.graph.as_graph_element(element).name
            self._is_inside(name)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{element!r} is no tensor or operation of the program's graph as it was when the "
                "session was made; make the session after the whole graph is built."
            ) from error
        return name

    def _prepare_save(self) -> None:
        """Checks that a checkpoint may be written, and copies the slices into the masters."""
        self._ops.check_has_variables()
        for check in self._checks:
            check()
        self._copy_slices_to_masters()

    def _copy_slices_to_masters(self) -> None:
        """Copies the slices into the masters."""
        self._session.run(self._ops.to_masters)

    def _copy_masters_to_slices(self) -> None:
        """Copies the masters into the slices."""
        self._session.run(self._ops.to_slices)


def inner_session(session: Any) -> ReplicaSession | None:
    """Returns the session on a SIMD program's cores: `session`, or the one that it wraps.

    The result is None if the session runs no SIMD program.
    """
    inside = session if isinstance(session, ReplicaSession) else getattr(session, "session", None)
    return inside if isinstance(inside, ReplicaSession) else None


def copy_array(value: Any) -> Any:
    """Returns a copy of `value` if it is an array; values of other types are returned unchanged.

    A copy is safe to feed. TensorFlow uses the memory of an aligned array that is fed. If a
    variable is set to a fed array, or to a part of it, later updates of the variable write into
    this array.
    """
    return np.array(value) if hasattr(value, "__array__") else value


class VariableAccess:
    """Operations that read and set a graph's variables, by the names of their ``VarHandleOp``."""

    def __init__(self, graph: tf.Graph):
        """Finds, for each variable of `graph`, the operations by which it is read and assigned.

        TensorFlow makes operations that read and assign a variable together with the variable, and
        these are found. Operations that the program itself adds later are not taken.
        """
        # For each variable, the name of a tensor that holds its value.
        self.read: dict[str, str] = _OfResourceVariables()
        self._exists: dict[str, str] = {}
        self._assign: dict[str, tuple[str, str]] = _OfResourceVariables()
        # Each variable is made with a read and an assignment; later ones are the program's.
        for op in graph.get_operations():
            if op.type == "ReadVariableOp" and op.inputs[0].op.type == "VarHandleOp":
                self.read.setdefault(op.inputs[0].op.name, op.outputs[0].name)
            elif op.type == "VarIsInitializedOp":
                self._exists.setdefault(op.inputs[0].op.name, op.outputs[0].name)
            elif op.type == "AssignVariableOp" and op.inputs[0].op.type == "VarHandleOp":
                self._assign.setdefault(op.inputs[0].op.name, (op.name, op.inputs[1].name))

    def read_all(self, session: tf.Session) -> dict[str, Any]:
        """Returns the value of each initialized variable, by the name of its ``VarHandleOp``.

        Variables that are not initialized are left out. `session` runs the constructor's graph, or
        a graph that has the same operations under the same names.
        """
        exists = session.run(self._exists)
        return session.run({n: x for n, x in self.read.items() if exists.get(n, True)})

    def set(self, session: tf.Session, values: Iterable[tuple[str, Any]]) -> None:
        """Sets variables in `session` to `values`: pairs of a variable's name and its new value.

        The session's graph is the constructor's graph, or a graph that has the same operations
        under the same names. Every value is copied, so that no later step writes into an array of
        the caller's.
        """
        # If variables share the tensor that initializes them, each run sets one of them.
        rounds: list[tuple[list[str], dict[str, Any]]] = []
        used: dict[str, int] = collections.Counter()
        for variable, value in values:
            operation, tensor = self._assign[variable]
            if used[tensor] == len(rounds):
                rounds.append(([], {}))
            operations, feed = rounds[used[tensor]]
            operations.append(operation)
            feed[tensor] = copy_array(value)
            used[tensor] += 1
        for operations, feed in rounds:
            session.run(operations, feed)


class _OfResourceVariables(dict[str, Any]):
    """A dictionary by the names of resource variables; it says why it has no ref variable."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(
            f"{name!r} is a TensorFlow ref variable, whose reads and writes race. It has to be a "
            "resource variable: call tf.compat.v1.enable_resource_variables() after "
            "tf.compat.v1.disable_v2_behavior(), and do not make it with use_resource=False."
        )


class MeshVariables:
    """Reads and sets the variables of a graph on placement meshes, in sessions of TensorFlow.

    A variable has a master (the whole variable, as in checkpoints) and slices (the parts that
    processors hold).

    Args:
      graph: the graph, to which the constructor adds operations. It is the default graph.
      lowerings: the graph's lowerings.

    Attributes:
      to_slices: the operation that copies masters into slices.
    """

    def __init__(self, graph: tf.Graph, lowerings: Sequence[mtf.Lowering]):
        self._to_masters = tf.group(*(x.copy_slices_to_masters() for x in lowerings))
        self.to_slices = tf.group(*(x.copy_masters_to_slices() for x in lowerings))
        self._access, self._beginnings = VariableAccess(graph), Beginnings(graph)

    def read(self, session: tf.Session, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns the values that variables have now, by name; ValueError for ref variables."""
        session.run(self._to_masters)
        return session.run({name: self._access.read[name] for name in names})

    def write(self, session: tf.Session, values: Mapping[str, Any], begins: bool) -> None:
        """Sets variables, by name, in masters and in slices.

        `begins` says whether the session has made no step: then values that wrappers derive from
        variables, such as averages, begin from the written values.
        """
        # The slices of variables that are not set are newer than their masters.
        session.run(self._to_masters)
        if begins:
            are_equal = session.run(self._beginnings.are_equal)
            values = {**self._beginnings.marks(are_equal, values), **values}
        self._access.set(session, values.items())
        session.run(self.to_slices)


_HOOKS = ("training_hooks", "training_chief_hooks", "evaluation_hooks", "prediction_hooks")


def lowerings_in(given: Any) -> list[mtf.Lowering]:
    """Returns the lowerings in `given`, which a user gave as an argument `lowering`.

    `given` may be a lowering, a sequence of lowerings, None (the result is then empty), or an
    ``EstimatorSpec`` or ``TPUEstimatorSpec`` whose hooks restore a lowering. Raises TypeError if
    `given` is something else.
    """
    if given is None:
        return []
    if isinstance(given, mtf.Lowering):
        return [given]
    if hasattr(given, "training_hooks"):
        hooks = [hook for name in _HOOKS for hook in getattr(given, name, ()) or ()]
        hooks = [h for h in hooks if isinstance(h, mtf.MtfRestoreHook)]
        found = [restored_lowering(hook) for hook in hooks]
        if found:
            return found
    elif isinstance(given, (list, tuple)) and all(isinstance(x, mtf.Lowering) for x in given):
        return list(given)
    raise TypeError(
        "lowering must be an mtf.Lowering, a list of them, or a spec that has an "
        f"mtf.MtfRestoreHook among its hooks, got {given!r}."
    )


class SkipWatches:
    """Reports, after each step of a SIMD program, what optimizers have skipped in the step.

    Attributes:
      counts: names of tensors of the programs; a session fetches them in each step, from any core,
        and gives their values to `report`.
    """

    def __init__(self, graph: tf.Graph):
        """Adds operations to `graph`, which holds the programs, that read what was skipped."""
        found = graph.get_collection(WATCHED)
        watches = {watched: watched.watch() for watched, _ in found}
        number = dict.fromkeys(watches, 0)
        self.counts: list[str] = []
        self._told: dict[str, tuple[Any, list[str]]] = {}
        for watched, name in found:
            records = watches[watched].records[number[watched]]
            number[watched] += 1
            self.counts.append(name)
            self._told[name] = watched, [x.name for x in records]

    def report(
        self, values: dict[str, Any], read: Callable[[list[str]], Any], logs: bool = True
    ) -> None:
        """Logs what a step has skipped; raises NoUpdateError if too many steps made no update.

        Args:
          values: values of the tensors in `counts`, by name.
          read: a function that takes names of tensors outside of programs, and returns their
            values.
          logs: whether to log what was skipped; exceptions are raised in any case.
        """
        errors: list[Exception] = []
        for name, record in values.items():
            watched, records = self._told[name]
            before, now = watched.split_counts(np.asarray(record))
            if not watched.is_due(before, now):
                continue
            for one in watched.find(before, now, read(records)):
                if isinstance(one, Exception):
                    errors.append(one)
                elif logs:
                    _logger.warning("%s", one)
        if errors:
            raise errors[0]
