"""Reading and writing the variables that islands exchange, in each kind of session."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from mtf_gradsync.extension import (
    ACCUMULATOR,
    AVERAGE,
    STATE_COLLECTION,
    SlotOwners,
    StepPlan,
    counted,
    did_you_mean,
    mtf,
    owner_of,
    tf,
    warn_once,
)
from mtf_gradsync.runtimes.simd.replica_session import MeshVariables, inner_session, lowerings_in
from mtf_gradsync.tools.islands.changes import MEAN
from mtf_gradsync.tools.islands.tensor_files import TensorSpec

# Endings of the names of counters: of gradients accumulated for the next update, and of steps whose
# gradients are never applied.
_WAITING = ("/mini_step", "/count")
_SKIPPED = ("/skipped", "/without_data")


class StepCounts(NamedTuple):
    """The counts of a session's optimizers at the end of a step.

    Attributes:
      waiting: how many steps' gradients are accumulated and not applied yet.
      skipped: how many steps were skipped, so that no update has applied their gradients.
    """

    waiting: int = 0
    skipped: int = 0


class Values:
    """A reader and writer, in a session, of the variables that islands exchange.

    Islands exchange the trained variables, and floating-point variables that are averaged and not
    trained, such as means over batches and moving averages. In the names that `Values` takes and
    returns, `changes.MEAN` comes before the name of an averaged variable. If a variable is written,
    both its master (the whole variable, as in checkpoints) and its slices (the parts that
    processors hold) are written.

    Create `Values` after the step has been built and lowered: for sessions of TensorFlow it adds
    operations to the graph.

    Args:
      lowering: the step's lowering, or several. Sessions of TensorFlow (placement meshes) need it,
        and so do all sessions of optimizers that accumulate or skip steps.
      variables: names of the trained variables to exchange. By default all trainable variables of
        the graph are exchanged, and all averaged variables of the model.

    Attributes:
      specs: a dictionary from the names of the exchanged variables to their shapes and dtypes.
      follows: a dictionary from each counter that schedules follow to the name of its variable. The
        counters are "step" (the global step) and counts of updates.

    Raises:
      ValueError: the graph lacks one of `variables` or has no trainable variables, a variable has
        no floating-point dtype, `OuterOptimizer` holds a value of a variable for each of its
        islands, or the lowering is missing.
    """

    def __init__(self, lowering: Any = None, variables: Sequence[str] | None = None):
        self._graph = tf.get_default_graph()
        there = {v.op.name: v for v in tf.global_variables()}
        # Mesh-TF's slices are trainable variables, too, but not global ones.
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
                f"OuterOptimizer holds a value of {inside[0]!r} for each of its own islands. "
                "Islands that exchange values through a folder take the place of OuterOptimizer: "
                "remove it from the stack."
            )
        self._lowerings: list[mtf.Lowering] = lowerings_in(lowering)
        state = {note.name for note in self._graph.get_collection(STATE_COLLECTION)}
        means = [f"{x}/{AVERAGE}" for x in chosen if f"{x}/{AVERAGE}" in there]
        if variables is None:
            means += self._averaged_variables(there, trainable, state)
        self._variables = {name: there[name] for name in chosen}
        self._variables |= {f"{MEAN}{name}": there[name] for name in means}
        self.specs = {
            name: TensorSpec(tuple(v.shape.as_list()), v.dtype.base_dtype.name)
            for name, v in sorted(self._variables.items())
        }
        whole = [name for name, v in self._variables.items() if not v.dtype.is_floating]
        if whole:
            raise ValueError(
                f"{whole[0]!r} has the dtype {self.specs[whole[0]].dtype}, and islands exchange "
                "only floating-point numbers. Name the variables to exchange in the argument "
                "variables=, without this variable."
            )
        # Variables that are reset when values are not finite: all that are not exchanged.
        exchanged = {v.op.name for v in self._variables.values()}
        self._state = {name: v for name, v in there.items() if name not in exchanged}
        self._trainable = trainable
        step = tf.train.get_global_step()
        follows = {} if step is None else {"step": step.op.name}
        follows |= {name: name for name in sorted(state) if name.endswith("/update_step")}
        self.follows = {
            key: name
            for key, name in follows.items()
            if getattr(there.get(name), "handle", None) is not None  # those that can be set
        }
        self._counters = self._reads_of_counters(
            [name for name in state if name.endswith((*_WAITING, *_SKIPPED))]
        )
        self._counted_in: Any = None  # session of `_count`
        self._on_mesh: MeshVariables | None = None
        if self._lowerings:
            _warn_of_races(self._lowerings)
            self._on_mesh = MeshVariables(self._graph, self._lowerings)
        self._is_joined = False

    def _averaged_variables(
        self, variables: Mapping[str, Any], trainable: Sequence[str], wrapper_state: set[str]
    ) -> list[str]:
        """Returns the names of the model's own floating-point variables that are not trained.

        Batch normalization's moving mean is an example. No optimizer changes such a variable, so
        the merger sets it to the mean of the islands' values. Slots and the state of wrappers are
        not variables of the model.

        Args:
          variables: a dictionary from names to variables, for all variables of the graph.
          trainable: the names of the trainable variables.
          wrapper_state: the names of the variables in which wrappers hold state.
        """
        found = {v for low in self._lowerings for v in low.graph.all_variables}
        plans = [StepPlan.of_graph(low.graph) for low in self._lowerings]
        slots = {v.name for plan in plans if plan for v in plan.extension(SlotOwners).slots()}
        names = {name for v in found for name in getattr(v, "original_names", [v.name])}
        return sorted(
            name
            for name in (names & set(variables)) - set(trainable) - wrapper_state - slots
            if variables[name].dtype.is_floating and owner_of(name, trainable) is None
        )

    def _reads_of_counters(self, names: Sequence[str]) -> dict[str, tf.Tensor]:
        """Adds operations to the graph that read and add up the optimizers' counters.

        Counters are added up in the graph, since each tensor that is fetched costs time after each
        step.

        Args:
          names: the names of the counters' variables.

        Returns:
          A dictionary from fields of `StepCounts`, "waiting" and "skipped", to tf scalars (int64)
          with their values. A field for which the optimizers have no counters is left out.

        Raises:
          ValueError: there are counters, and no lowering was given.
        """
        if names and not self._lowerings:
            raise ValueError(
                f"Optimizers of this step count applied steps in {sorted(names)[0]!r}, and islands "
                "need these counts for the weights of contributions: give the step's lowering, "
                "Island(..., lowering=lowering)."
            )
        reads = {}
        for lowering in self._lowerings:
            for variable, laid_out in lowering.variables.items():
                own = list(getattr(variable, "original_names", [variable.name]))
                for name in set(own) & set(names):
                    value = laid_out.laid_out_tensor.all_slices[0].read_value()
                    reads[name] = tf.reshape(value, [-1])[own.index(name)]
        totals = {}
        for field, endings in (("waiting", _WAITING), ("skipped", _SKIPPED)):
            found = [tf.cast(x, tf.int64) for name, x in reads.items() if name.endswith(endings)]
            if found:
                totals[field] = tf.add_n(found)
        return totals

    def counts(self, session: Any) -> StepCounts:
        """Reads how many steps are accumulated for the next update, and how many were skipped.

        Both counts are zero if no optimizer accumulates or skips steps. `session` is the session
        that trains: a session of TensorFlow, or of one of this package's runtimes.
        """
        if not self._counters:
            return StepCounts()
        if session is not self._counted_in:
            # Calling a callable takes half the time of `session.run`.
            is_plain = isinstance(session, tf.Session)
            self._count = (
                session.make_callable(self._counters)
                if is_plain
                else lambda: session.run(self._counters)
            )
            self._counted_in = session
        return StepCounts(**{field: int(total) for field, total in self._count().items()})

    def read(self, session: Any) -> dict[str, np.ndarray]:
        """Returns the present values of exchanged variables, and of the counters in `follows`.

        The result is a dictionary from the names of variables and counters to arrays. `session` is
        the session that trains.
        """
        return self._read(
            session, {**self._variables, **{n: self._state[n] for n in self.follows.values()}}
        )

    def _read(self, session: Any, variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
        replicas = inner_session(session)
        names = {name: v.op.name for name, v in variables.items()}
        if replicas is None:
            found = self._checked(session).read(session, names.values())
        else:
            found = replicas.variables()
        return {name: found[of_graph] for name, of_graph in names.items()}

    def write(self, session: Any, values: Mapping[str, Any]) -> None:
        """Sets variables of a session to new values, in masters and in slices.

        The first call has to come before the session's first step. A derived variable, such as an
        average, begins anew if this call sets the variable from which it is derived.

        Args:
          session: the session that trains.
          values: a dictionary from names to new values. Names may be keys of `specs`, names of
            counters' variables in `follows`, and names that `slots_to_reset` returns.
        """
        everything = {**self._state, **self._variables}
        variables = {name: everything[name] for name in values}
        wanted = {
            v.op.name: np.asarray(values[name]).astype(v.dtype.base_dtype.as_numpy_dtype)
            for name, v in variables.items()
        }
        replicas = inner_session(session)
        if replicas is not None:
            replicas.write(wanted)
            return
        # An island joins before its first step.
        self._checked(session).write(session, wanted, begins=not self._is_joined)
        self._is_joined = True

    def slots_to_reset(self, session: Any) -> dict[str, np.ndarray]:
        """Returns the slots to reset, because a NaN or an infinity is in them.

        The result is a dictionary from the names of slots to their initial values. If one slot of a
        variable is not finite, the result has all slots of this variable; it is {} if all slots are
        finite. The method changes nothing: its caller passes the result to `write`.
        """
        now = self._read(session, self._state)
        bad = {
            name
            for name, v in self._state.items()
            if v.dtype.is_floating and not np.isfinite(now[name].astype(np.float64)).all()
        }
        owners = {owner_of(name, self._trainable) for name in bad} - {None}
        bad |= {
            name
            for name in self._state
            if owner_of(name, self._trainable) in owners and not name.endswith(ACCUMULATOR)
        }
        initial = {name: self._state[name].initial_value.name for name in bad}
        replicas = inner_session(session)
        return (session if replicas is None else replicas.tf_session).run(initial)

    def _checked(self, session: Any) -> MeshVariables:
        if self._on_mesh is None:
            raise ValueError(
                "The island has no lowering: give the step's, Island(..., lowering=lowering), to "
                f"train in a session of TensorFlow; got {session!r}."
            )
        return self._on_mesh


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
