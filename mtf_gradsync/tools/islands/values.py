"""The values of a program's variables in this process, on each kind of session."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import numpy as np

from mtf_gradsync.extension import Beginnings, StepPlan, counted, did_you_mean, mtf, tf, warn_once
from mtf_gradsync.runtimes.simd.session import ReplicaSession, VariableAccess, lowerings_in
from mtf_gradsync.tools.islands.folder import Spec


class Values:
    """Reads and writes the variables that islands exchange: masters, with the slices behind them.

    Make it when the step is built: for sessions of TensorFlow it adds operations to the graph.

    Args:
      lowering: of the step, or several of them, for sessions of TensorFlow (a placement mesh); a
        `ReplicaSession` knows its own.
      variables: names of the variables; default all trainable ones of the graph.

    Raises:
      ValueError: there are no such variables, or islands of `OuterOptimizer` hold them.
    """

    def __init__(self, lowering: Any = None, variables: Sequence[str] | None = None):
        self._graph = tf.get_default_graph()
        there = {v.op.name: v for v in tf.global_variables()}
        # Mesh-TF's slices are trainable too, and no global variables.
        trainable = [v.op.name for v in tf.trainable_variables() if v.op.name in there]
        chosen = trainable if variables is None else variables
        unknown = [name for name in chosen if name not in there]
        if unknown or not chosen:
            missing = "no trainable variables"
            if unknown:
                missing = f"no variable {unknown[0]!r}{did_you_mean(unknown[0], there)}".rstrip("?")
            raise ValueError(
                f"The graph has {missing}. It has: {counted(sorted(there), 'variable')}. Make an "
                "island when the step has been built and lowered."
            )
        inside = [name for name in chosen if f"{name}/island" in there]
        if inside:
            raise ValueError(
                f"{inside[0]!r} is held by islands of OuterOptimizer: islands that exchange values "
                "through a folder take their place. Remove OuterOptimizer from the stack."
            )
        self.specs = {
            name: Spec(tuple(there[name].shape.as_list()), there[name].dtype.base_dtype.name)
            for name in sorted(chosen)
        }
        whole = [name for name, spec in self.specs.items() if not _is_float(spec)]
        if whole:
            raise ValueError(
                f"{whole[0]!r} is of {self.specs[whole[0]].dtype}: islands exchange numbers of "
                "floating point. Give the names of those that they shall as variables=."
            )
        self._lowerings: list[mtf.Lowering] = lowerings_in(lowering)
        self._tensors = {name: there[name] for name in self.specs}
        self._access: VariableAccess | None = None
        if self._lowerings:
            _warn_of_races(self._lowerings)
            self._to_masters = tf.group(*(x.copy_slices_to_masters() for x in self._lowerings))
            self._to_slices = tf.group(*(x.copy_masters_to_slices() for x in self._lowerings))
            self._reads = {name: v.read_value() for name, v in self._tensors.items()}
            self._access = VariableAccess(self._graph)
            self._beginnings = Beginnings(self._graph)
        self._is_joined = False

    def read(self, session: Any) -> dict[str, np.ndarray]:
        """Returns the values of all variables by name."""
        replicas = _replica_session(session)
        if replicas is not None:
            everything = replicas.variables()
            return {name: everything[name] for name in self.specs}
        self._check(session)
        session.run(self._to_masters)
        return session.run(self._reads)

    def write(self, session: Any, values: Mapping[str, np.ndarray]) -> None:
        """Sets the values of some variables, in masters and slices."""
        replicas = _replica_session(session)
        if replicas is not None:
            replicas.write(values)
            return
        self._check(session)
        # The slices of the others are newer than their masters.
        session.run(self._to_masters)
        assert self._access is not None
        if not self._is_joined:
            # An island joins before its first step: what wrappers derive begins with these values.
            are_equal = session.run(self._beginnings.are_equal)
            values = {**self._beginnings.marks(are_equal, values), **values}
        self._is_joined = True
        self._access.set(session, values.items())
        session.run(self._to_slices)

    def _check(self, session: Any) -> None:
        if self._access is None:
            raise ValueError(
                "The island has no lowering: give the step's, Island(..., lowering=lowering), to "
                f"train in a session of TensorFlow; got {session!r}."
            )


def _warn_of_races(lowerings: Sequence[mtf.Lowering]) -> None:
    for lowering in lowerings:
        is_placement = any(
            isinstance(impl, mtf.placement_mesh_impl.PlacementMeshImpl)
            for impl in lowering.mesh_to_impl.values()
        )
        plan = StepPlan.of_graph(lowering.graph)
        if is_placement and not (plan and plan.orders_updates):
            warn_once(
                "an island that races",
                "Nothing orders the updates of this island's step after the reads of its variables,"
                " so that a replay may end in other bits: on a placement mesh an optimizer of "
                "Mesh-TensorFlow needs a wrapper, as gs.CrossShardOptimizer(optimizer).",
            )
            return


def _is_float(spec: Spec) -> bool:
    return tf.as_dtype(spec.dtype).is_floating


def _replica_session(session: Any) -> ReplicaSession | None:
    inner = getattr(session, "session", None)
    found = inner if isinstance(inner, ReplicaSession) else session
    return found if isinstance(found, ReplicaSession) else None
