"""ReplicaSession: the interface of every session that runs a SIMD program."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from mtf_gradsync._names import counted
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.simd.masters import MasterOps

_Session = TypeVar("_Session", bound="ReplicaSession")


class ReplicaSession(abc.ABC):
    """A session on the cores of a SIMD program. Use it as a context manager.

    Running any tensor or operation of a program runs the whole program on all cores, updates
    included, as a TPU does. After each step it logs what optimizers have skipped, and raises
    `NoUpdateError` where there were too many steps without an update.
    """

    # Hooks that watch steps leave it to the session.
    looks_at_steps = True

    def __init__(self, session: tf.Session, ops: MasterOps):
        """Begins a session; the graph of `session` holds these operations under their names."""
        self._session = session
        self._ops = ops

    def __enter__(self: _Session) -> _Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the session; the values of its variables are lost."""
        self._session.close()

    @property
    def tf_session(self) -> tf.Session:
        """The ``tf.Session`` underneath, on a graph made from the user's."""
        return self._session

    @abc.abstractmethod
    def run(
        self, fetches: Any, feed_dict: dict[Any, Any] | None = None, per_replica: bool = False
    ) -> Any:
        """Runs the program once.

        Args:
          fetches: a tensor, operation or name of the user's graph, inside or outside the program,
            or a nested structure of them.
          feed_dict: tensors of the user's graph outside the program -> values.
          per_replica: whether a tensor of the program gives the list of its values on all cores
            (in physical order) in place of its value on core 0.

        Returns:
          The same structure, with values in place of tensors and None in place of operations.

        Raises:
          ValueError: when a fetch or feed is no part of the graph, or not reachable there.
        """

    def variables(self) -> dict[str, np.ndarray]:
        """Returns the values of all global variables by name, assembled from their slices.

        Variables that Mesh-TF stacked appear under their own names.
        """
        self._bring_masters_up_to_date()
        return self._session.run(self._ops.masters)

    def read(self, variable: str | mtf.Variable | tf.Variable) -> np.ndarray:
        """Returns the value of a variable, which may be given by name, assembled from its slices.

        Raises:
          ValueError: when there is no such global variable.
        """
        name = variable if isinstance(variable, str) else variable.name
        name = name.split(":")[0]
        if name not in self._ops.masters:
            raise ValueError(
                f"The graph has no global variable {name!r}. It has: "
                f"{counted(sorted(self._ops.masters), 'variable')}."
            )
        self._bring_masters_up_to_date()
        return self._session.run(self._ops.masters[name])

    def save(
        self, path: str, saver: tf.train.Saver | None = None, global_step: int | None = None
    ) -> str:
        """Writes a checkpoint of the variables, and returns the path to give to `restore`.

        Any program with the same variables can read it: on another mesh, on another runtime or
        without a mesh.

        Args:
          path: prefix of the checkpoint's files.
          saver: a saver that was made in the program's graph before the session, to count
            checkpoints, delete old ones and write the state file; without it none of that is done.
          global_step: a number to add to the path, as for ``tf.train.Saver.save``.

        Raises:
          ValueError: when the graph has no variables.
        """
        self._ops.check_has_variables()
        self._bring_masters_up_to_date()
        return self._write(path, saver, global_step)

    def restore(self, path: str) -> None:
        """Restores a checkpoint of `save`, or of any ``tf.train.Saver`` of the same variables.

        Values that each shard holds for itself (sums of accumulated gradients) are resharded where
        the checkpoint is of another mesh.

        Raises:
          ValueError: when there is no such checkpoint, or the graph has no variables.
        """
        self._read(path)
        self._take_masters()

    def _write(self, path: str, saver: tf.train.Saver | None, global_step: int | None) -> str:
        """Writes the masters as they are, and returns the path."""
        return (saver or self._ops.saver(self._session.graph)).save(
            self._session,
            path,
            global_step=global_step,
            write_meta_graph=False,
            write_state=saver is not None,
        )

    def _read(self, path: str) -> None:
        """Reads the masters from a checkpoint."""
        self._ops.restore(self._session, path)

    @abc.abstractmethod
    def _is_inside(self, name: str) -> bool:
        """Returns whether an operation or tensor of the user's graph belongs to a program.

        It raises KeyError if the graph did not have it when the session was made.
        """

    def _feed(self, key: Any) -> str:
        """Returns the name of a tensor to feed."""
        name = self._name_of(key)
        if self._is_inside(name):
            raise ValueError(
                f"{name!r} cannot be fed: it is inside the TPU program. Feed the tensor outside "
                "that it is made from."
            )
        return name

    def _name_of(self, element: Any) -> str:
        """Returns the name of a tensor or operation; for a variable, that of its value."""
        try:
            name = self._ops.graph.as_graph_element(element).name
            self._is_inside(name)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{element!r} is no tensor or operation of the program's graph as it was when the "
                "session was made; make the session after the whole graph is built."
            ) from error
        return name

    def _bring_masters_up_to_date(self) -> None:
        """Copies the slices into the masters."""
        self._session.run(self._ops.to_masters)

    def _take_masters(self) -> None:
        """Copies the masters into the slices."""
        self._session.run(self._ops.to_slices)
