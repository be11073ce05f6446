"""What stands outside a program, for as long as its values are read or written."""

from __future__ import annotations

import contextlib
from typing import Any, Collection, Iterable, Iterator, Mapping

import numpy as np

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.simd.graph.facts import GraphFacts, split_input
from mtf_gradsync.simd.graph.refusals import check_can_be_emulated
from mtf_gradsync.simd.lowerings import lowerings_in
from mtf_gradsync.simd.masters import MasterOps
from mtf_gradsync.simd.program import Program
from mtf_gradsync.simd.session import ReplicaSession
from mtf_gradsync.simd.variable_access import VariableAccess
from mtf_gradsync.xla.devices.outside import Outside
from mtf_gradsync.xla.devices.session import host_config


class Host:
    """The part of a user's graph outside its program, with variables in TensorFlow.

    Attributes:
      facts: of the user's whole graph.
      graph: what stands outside.
      masters: names of the global variables that Mesh-TensorFlow copies into slices.
      counter: name of the variable that counts steps; None where the graph has none.
    """

    def __init__(self, program: Program, lowering: Any):
        """Cuts it out; needs no devices.

        Args:
          program: the program.
          lowering: as for `Program.session`.

        Raises:
          UnsupportedProgramError: when the graph holds what cannot run.
          TypeError: when lowering is of no known kind.
        """
        self.lowerings = lowerings_in(lowering)
        check_can_be_emulated(GraphFacts(program.graph.as_graph_def()))
        self._ops = MasterOps(program.graph, self.lowerings)
        self.facts = GraphFacts(program.graph.as_graph_def())
        self._outside = Outside(self.facts, program.graph, program.name)
        self.graph = self._outside.graph
        copied = self._outside.touched(self._ops.to_masters) if self.lowerings else None
        self.masters = copied.written if copied else frozenset()
        self._access = VariableAccess(self.graph)
        counter = tf.train.get_global_step(program.graph)
        is_known = counter is not None and counter.op.name in self._access.read
        self.counter = counter.op.name if is_known else None

    @contextlib.contextmanager
    def session(self, checkpoint: str | None = None) -> Iterator[tf.Session]:
        """Makes a session, with variables initialized and copied into slices.

        Args:
          checkpoint: path of a checkpoint to take them from; None for the initializers.

        Yields:
          The session.

        Raises:
          ValueError: when there is no such checkpoint.
        """
        with tf.Session(graph=self.graph, config=host_config()) as session:
            session.run(self._ops.initialize)
            if checkpoint is not None:
                self._saver(session).restore(session, checkpoint)
            session.run(self._ops.to_slices)
            yield session

    def values(
        self, names: Iterable[str], session: tf.Session | ReplicaSession
    ) -> dict[str, np.ndarray]:
        """Values of variables.

        Args:
          names: of variables, by their ``VarHandleOp``.
          session: one that `session` made, or on the cores of the program.

        Returns:
          name -> value.

        Raises:
          ValueError: when the session is of another program.
        """
        access = self._access
        if isinstance(session, ReplicaSession):
            session.variables()  # brings what is on the devices to TensorFlow
            session = session.tf_session
            access = VariableAccess(session.graph)
        unknown = sorted(set(names) - set(access.read))
        if unknown:
            raise ValueError(f"The session has no variables {unknown}; give one of this program.")
        return session.run({name: access.read[name] for name in names})

    def set(self, values: Mapping[str, np.ndarray], session: tf.Session) -> None:
        """Sets variables, by the names of their ``VarHandleOp``."""
        self._access.set(session, values.items())

    def save(self, session: tf.Session, path: str) -> str:
        """Writes a checkpoint of the masters, after copying the slices into them."""
        session.run(self._ops.to_masters)
        saver = self._saver(session)
        return saver.save(session, path, write_meta_graph=False, write_state=False)

    def others(self, held: Iterable[str]) -> list[str]:
        """The variables that a checkpoint needs besides those that the program holds.

        Args:
          held: the variables that the program holds.
        """
        return sorted(set(self._access.read) - self.masters - set(held))

    def is_counter(self, name: str) -> bool:
        """Whether a tensor outside the program is the step counter, as it is before the step."""
        if self.counter is None or self._outside.touched([name]).written:
            return False
        op = self.graph.get_operation_by_name(split_input(name)[0])
        while op.type in ("Identity", "ReadVariableOp", "Cast"):
            op = op.inputs[0].op
        return op.name == self.counter and not self._outside.is_after(name)

    def is_fixed(self, name: str, fed: Collection[str]) -> bool:
        """Whether a tensor outside the program is the same in every step.

        Args:
          name: of the tensor.
          fed: names of tensors that have a value.

        Returns:
          Whether it is made of constants and of what is fed alone.
        """
        pending, seen = [name], set()
        while pending:
            name = pending.pop()
            if name in seen or name in fed:
                continue
            seen.add(name)
            op = self.graph.get_operation_by_name(split_input(name)[0])
            # A variable's handle is stateful, too, so what reads a variable is not fixed.
            is_stateful = op.op_def is None or op.op_def.is_stateful
            if is_stateful or op.type.startswith("Placeholder") or self._outside.is_after(name):
                return False
            pending += [t.name for t in op.inputs] + [o.name for o in op.control_inputs]
        return True

    def _saver(self, session: tf.Session) -> tf.train.Saver:
        if self._ops.saver_def is None:
            raise ValueError("The graph has no variables to save or restore.")
        with session.graph.as_default():
            return tf.train.Saver(saver_def=self._ops.saver_def)
