"""Runs the part of a graph outside its program, to read or write its values."""

from __future__ import annotations

import contextlib
from typing import Any, Collection, Iterable, Iterator

import numpy as np

from mtf_gradsync._names import counted
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.simd.facts import split_input
from mtf_gradsync.simd.program import Program
from mtf_gradsync.simd.session import ReplicaSession, VariableAccess, lowerings_in
from mtf_gradsync.xla.devices.prepared import parts_of
from mtf_gradsync.xla.devices.session import host_config


class Host:
    """The part of a user's graph outside its program, `graph`, with variables in TensorFlow.

    `facts` are those of the user's whole graph; `counter` names the variable that counts steps, or
    is None.
    """

    def __init__(self, program: Program, lowering: Any):
        self.lowerings = lowerings_in(lowering)
        self._ops, self.facts, self.outside = parts_of(program, self.lowerings)
        self.graph = self.outside.graph
        self._access = VariableAccess(self.graph)
        counter = tf.train.get_global_step(program.graph)
        is_known = counter is not None and counter.op.name in self._access.read
        self.counter = counter.op.name if is_known else None

    @contextlib.contextmanager
    def session(self, checkpoint: str | None = None) -> Iterator[tf.Session]:
        """Makes a session, with variables initialized, or restored, and copied into slices."""
        with tf.Session(graph=self.graph, config=host_config()) as session:
            session.run(self._ops.initialize)
            if checkpoint is not None:
                self._ops.restore(session, checkpoint)
            session.run(self._ops.to_slices)
            yield session

    def values(
        self, names: Iterable[str], session: tf.Session | ReplicaSession
    ) -> dict[str, np.ndarray]:
        """Returns the values of variables by the names of their ``VarHandleOp``.

        They are taken from a session that `session` made, or one on the cores of the program.
        """
        access = self._access
        if isinstance(session, ReplicaSession):
            session.variables()  # brings what is on the devices to TensorFlow
            session = session.tf_session
            access = VariableAccess(session.graph)
        unknown = sorted(set(names) - set(access.read))
        if unknown:
            raise ValueError(
                f"The session lacks {counted(unknown, 'variable')}; give one of this program."
            )
        return session.run({name: access.read[name] for name in names})

    def others(self, held: Collection[str]) -> list[str]:
        """Returns the global variables that a program lacks; `held` are those that it has."""
        return sorted(set(self._ops.masters) & set(self._access.read) - set(held))

    def is_counter(self, name: str) -> bool:
        """Returns whether a tensor outside is the step counter, as it is before the step."""
        if self.counter is None or self.outside.touched([name]).written:
            return False
        op = self.graph.get_operation_by_name(split_input(name)[0])
        while op.type in ("Identity", "ReadVariableOp", "Cast"):
            op = op.inputs[0].op
        return op.name == self.counter and not self.outside.is_after(name)
