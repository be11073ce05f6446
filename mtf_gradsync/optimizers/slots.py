"""Slots of optimizers: each slot's variable, and the optimizer that keeps it."""

from __future__ import annotations

import contextlib
from typing import Any, Collection, Iterator, NamedTuple, Sequence

from mtf_gradsync._common import counted, warn_of_unmatched, warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import variable_patterns
from mtf_gradsync._private.patches import patch
from mtf_gradsync.compat_v1 import MeshOptimizer
from mtf_gradsync.gradients.rounding import STOCHASTIC, is_rounded
from mtf_gradsync.optimizers.state import SLOTS_COLLECTION, SlotNote, note_state
from mtf_gradsync.step.plan import PlanExtension, StepPlan


class SlotBook:
    """A record of the slots of optimizers without `get_slot`, such as Mesh-TF's.

    A slot is found by its name, which begins with the name of the variable that it belongs to:
    "w/adam_m" and "w_slot_v" are the slots "adam_m" and "slot_v" of the variable "w".
    """

    def __init__(self) -> None:
        self._slots: dict[tuple[mtf.Variable, str], mtf.Variable] = {}
        self._variables: list[mtf.Variable] = []

    def record(
        self, created: Sequence[mtf.Variable], variables: Sequence[mtf.Variable], scope: str = ""
    ) -> None:
        """Adds the variables that an update of `variables` created in variable scope `scope`.

        Variables in `created` that are recorded already are left as they are.
        """
        owners = {v.name: v for v in variables}
        for variable in created:
            if variable in self._variables:
                continue
            self._variables.append(variable)
            name = _without_scope(variable.name, scope)
            owner = owner_of(name, owners)
            if owner is not None:
                slot = name[len(owner) :].lstrip("/_")
                self._slots[(owners[owner], slot)] = variable

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Forgets what was recorded inside the block if the block raises an error."""
        before = dict(self._slots), list(self._variables)
        try:
            yield
        except BaseException:
            self._slots, self._variables = before
            raise

    def get(self, variable: mtf.Variable, name: str) -> mtf.Variable | None:
        """Returns the slot `name` of a variable, or None."""
        return self._slots.get((variable, name))

    def names(self) -> list[str]:
        """Returns the names of all slots, sorted."""
        return sorted({name for _, name in self._slots})

    def variables(self) -> list[mtf.Variable]:
        """Returns all variables that updates have created, in the order of their creation.

        Some of the returned variables are no slots: an optimizer may also create a counter of
        steps, for example, whose name does not begin with the name of an updated variable.
        """
        return list(self._variables)


def optimizer_of(opt: Any, variable: mtf.Variable) -> Any:
    """Returns the optimizer that updates a variable: `opt`, unless `opt` is a `ByVariable`.

    If `opt` is a `ByVariable`, the result is the optimizer of the variable's group; None for a
    variable that nothing updates.
    """
    of = getattr(opt, "optimizer_of", None)
    return opt if of is None else of(variable)


def optimizers_of(opt: Any) -> tuple[Any, ...]:
    """Returns the optimizers that update variables: those of the groups of a `ByVariable`.

    If `opt` is no `ByVariable`, the result is a tuple of `opt` alone.
    """
    return opt.optimizers if hasattr(type(opt), "optimizer_of") else (opt,)


_OF_ONE = (
    "Call apply_grads of each in a tf.variable_scope of its own, or use one optimizer for both"
)


class _Keeper(NamedTuple):
    """The optimizer that writes a slot; `is_bare` says that no wrapper is around it."""

    optimizer: Any
    is_bare: bool


class SlotOwners(PlanExtension):
    """A record of the keeper of each slot in a graph: the optimizer or wrapper that writes it.

    Mesh-TF finds slots by their names, so that two optimizers of the same variable would share
    slots.
    """

    def __init__(self) -> None:
        self._keepers: dict[mtf.Variable, _Keeper] = {}

    def slots(self) -> list[mtf.Variable]:
        """Returns all slots that have a keeper."""
        return list(self._keepers)

    def record_keeper(
        self,
        keeper: Any,
        slots: Sequence[mtf.Variable],
        variables: Sequence[mtf.Variable],
        cure: str = _OF_ONE,
        is_bare: bool = False,
    ) -> None:
        """Records the keeper of slots; raises ValueError if a slot has another keeper already.

        If neither a slot's new keeper nor the keeper that it has already has a wrapper of this
        package around it, a warning is logged, and no error is raised.

        Args:
          keeper: the optimizer or wrapper that writes the slots.
          slots: the variables that the keeper writes; slots of other variables than `variables` are
            not checked.
          variables: the variables that the keeper updates.
          cure: the remedy that the error names.
          is_bare: whether no wrapper is around the keeper.
        """
        owners = {v.name for v in variables}
        scope = tf.get_variable_scope().name
        for slot in slots:
            owner = owner_of(_without_scope(slot.name, scope), owners)
            other = self._keepers.get(slot)
            if owner is None or other is None or other.optimizer is keeper:
                continue
            text = (
                f"Two optimizers of one graph update {owner!r} and would share its slot "
                f"{slot.name!r}, because slots are found by their names. Each optimizer would "
                f"train on the other's values. {cure}."
            )
            if not (is_bare and other.is_bare):
                raise ValueError(text)
            warn_once("slots of two optimizers without wrappers", "%s", text)
        self._keepers = {**dict.fromkeys(slots, _Keeper(keeper, is_bare)), **self._keepers}


def record_bare_update(
    optimizer: Any, updates: Sequence[mtf.Operation], variables: Sequence[mtf.Variable]
) -> None:
    """Records an optimizer that has no wrapper as the keeper of the slots that its update writes.

    The optimizers of this package and of Mesh-TF call this function in `apply_grads`. `updates` are
    the operations with which `optimizer` updates `variables`. If a wrapper has called the
    optimizer, the function does nothing, because the wrapper records the keeper. Raises ValueError
    if a wrapper, or an optimizer inside a wrapper, is the keeper of one of the slots already. If
    another optimizer without a wrapper is the keeper, there is only a warning.
    """
    plan = StepPlan.of(variables[0].graph) if updates else None
    if plan is not None and not plan.needs_no_gate:  # or the wrapper checks itself
        written = written_by(updates)
        plan.extension(SlotOwners).record_keeper(optimizer, written, variables, is_bare=True)
        note_slots(written, variables)


def written_by(updates: Sequence[mtf.Operation]) -> list[mtf.Variable]:
    """Returns the variables that the operations of an update assign."""
    return [v for op in updates if isinstance(op, mtf.Assign) for v in op.variables]


def note_slots(written: Sequence[mtf.Variable], variables: Sequence[mtf.Variable]) -> None:
    """Notes, for the reading of checkpoints, which slots an update of `variables` writes.

    `written` are all variables that the update assigns. A checkpoint may be from a run with another
    optimizer. A slot that the checkpoint does not have then begins at its initial value, but only
    if the checkpoint has none of the slots that belong together with this slot. The note on a slot
    (`SlotNote`) has the names of the slots that belong together with the slot: those of the same
    variable, or those that the slot's attribute `begins_with` names. A slot that belongs to no
    variable belongs together with all slots of the update.
    """
    names, scope = {v.name for v in variables}, tf.get_variable_scope().name
    noted = {note.name for note in tf.get_collection(SLOTS_COLLECTION)}
    slots = [v for v in dict.fromkeys(written) if v.name not in names and not v.trainable]
    of = {v: owner_of(_without_scope(v.name, scope), names) for v in slots}
    # A count of roundings says nothing of the optimizer.
    telling = [v for v in slots if not getattr(v, "begins_at_zero", False)]
    for slot in slots:
        if slot.name in noted:
            continue
        if slot not in telling:
            note_state(slot)
        same = [v.name for v in telling if of[slot] is None or of[v] == of[slot]]
        siblings = frozenset([slot.name, *getattr(slot, "begins_with", same)])
        tf.add_to_collection(SLOTS_COLLECTION, SlotNote(slot.name, siblings))


def warn_of_names_and_dtypes(optimizer: Any, variables: Sequence[mtf.Variable]) -> None:
    """Warns once of patterns for names that match no variable, and of variables in narrow dtypes.

    Patterns are arguments of the optimizer such as exclude_from_weight_decay: regular expressions
    that are looked for in names of variables. `variables` are those that the optimizer updates.
    Variables stored in a dtype narrower than float32 lose small updates.
    """
    names = {v.name for v in (*variables, *variables[0].graph.trainable_variables)}
    for argument, patterns in variable_patterns(optimizer).items():
        what = f"{type(optimizer).__name__}: {argument}"
        if isinstance(patterns, str):
            text = (
                "%s=%r is no list, so that each of its letters is looked for in names: give [%r]."
            )
            warn_once(f"letters {what} {patterns}", text, what, patterns, patterns)
        else:
            warn_of_unmatched(what, patterns, names)
    narrow = [
        v
        for v in variables
        if v.slice_dtype.is_floating and v.slice_dtype.size < 4
        # Some variables stay as they are.
        if optimizer_of(optimizer, v) is not None and not _rounds_by_chance(optimizer, v)
    ]
    if narrow:
        dtype = narrow[0].slice_dtype
        warn_once(
            "narrow variables",
            "Stored in %s, so that updates of less than 1/%d of a value are lost: %s. Store "
            "variables in float32 and compute in %s: mtf.VariableDType(tf.float32, tf.float32, "
            "tf.%s), in gin utils.get_variable_dtype.slice_dtype = 'float32'%s.",
            dtype.name,
            2 ** (9 if dtype == tf.bfloat16 else 12),
            counted([v.name for v in narrow if v.slice_dtype == dtype], "variable"),
            dtype.name,
            dtype.name,
            "; or give gs.AdamWOptimizer or gs.MeshOptimizer rounding='stochastic'"
            if dtype == tf.bfloat16
            else "",
        )


def _rounds_by_chance(optimizer: Any, variable: mtf.Variable) -> bool:
    """Returns whether `optimizer` rounds new values of a variable up or down by chance."""
    rounding = getattr(optimizer_of(optimizer, variable), "rounding", None)
    return is_rounded(variable) and rounding == STOCHASTIC


def check_bare_optimizers() -> None:
    """Makes optimizers check, also without a wrapper, that no other optimizer has their slots.

    This function is called when the package is imported. It patches `apply_grads` of Mesh-TF's
    `Optimizer` and of `MeshOptimizer`. These optimizers then also note their slots for checkpoints,
    and warn as `warn_of_names_and_dtypes` does.
    """

    def check_and_apply(
        apply: Any, self: Any, grads: Any, variables: Any, *args: Any, **kwargs: Any
    ) -> list[mtf.Operation]:
        updates = apply(self, grads, variables, *args, **kwargs)
        if updates:
            warn_of_names_and_dtypes(self, variables)
        record_bare_update(self, updates, variables)
        return updates

    for kind in (mtf.optimize.Optimizer, MeshOptimizer):
        patch(kind, "apply_grads", check_and_apply)


def _without_scope(name: str, scope: str) -> str:
    return name[len(scope) + 1 :] if scope and name.startswith(scope + "/") else name


def owner_of(name: str, owners: Collection[str]) -> str | None:
    """Returns the name of the variable that a slot belongs to, by the slot's name.

    `name` is the name of the slot, and `owners` are names of variables. The result is the longest
    of `owners` that is followed by "/" or "_" at the beginning of `name`; None if there is none.
    """
    for end in range(len(name) - 1, 0, -1):
        if name[end] in "/_" and name[:end] in owners:
            return name[:end]
    return None
