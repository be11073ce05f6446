"""Records the slots that an optimizer made for each variable."""

from __future__ import annotations

import contextlib
from typing import Any, Collection, Iterator, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.step import Part, PartLowering


class SlotBook:
    """Records slots of optimizers without `get_slot`, such as Mesh-TF's.

    A slot is a variable named after the one that it belongs to: "w/adam_m" and "w_slot_v" are the
    slots "adam_m" and "slot_v" of "w".
    """

    def __init__(self) -> None:
        self._slots: dict[tuple[mtf.Variable, str], mtf.Variable] = {}
        self._variables: list[mtf.Variable] = []

    def record(
        self, created: Sequence[mtf.Variable], variables: Sequence[mtf.Variable], scope: str = ""
    ) -> None:
        """Adds the variables that an update of `variables` created in a variable scope."""
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
        """Forgets what was recorded when the block raises."""
        before = dict(self._slots), list(self._variables)
        try:
            yield
        except BaseException:
            self._slots, self._variables = before
            raise

    def get(self, variable: mtf.Variable, name: str) -> mtf.Variable | None:
        """The slot of a variable, or None."""
        return self._slots.get((variable, name))

    def names(self) -> list[str]:
        """Names of all slots, sorted."""
        return sorted({name for _, name in self._slots})

    def variables(self) -> list[mtf.Variable]:
        """Every variable that was recorded, slot or not, in the order of creation."""
        return list(self._variables)


class SlotOwners(Part):
    """Which optimizer or wrapper keeps each slot of a graph.

    Slots are found by their names, so that two optimizers with one variable would share them.
    """

    def __init__(self) -> None:
        self._keepers: dict[mtf.Variable, Any] = {}

    def begin(self, lowering: mtf.Lowering) -> PartLowering:
        """See `Part.begin`."""
        del lowering
        return PartLowering()

    def check(
        self, keeper: Any, slots: Sequence[mtf.Variable], variables: Sequence[mtf.Variable]
    ) -> None:
        """Raises ValueError if another keeper has one of the slots of `variables` already.

        Args:
          keeper: the optimizer or wrapper that writes them.
          slots: the variables that it writes besides `variables`.
          variables: the variables that it updates.
        """
        owners = {v.name for v in variables}
        scope = tf.get_variable_scope().name
        for slot in slots:
            owner = owner_of(_without_scope(slot.name, scope), owners)
            if owner is not None and self._keepers.get(slot, keeper) is not keeper:
                raise ValueError(
                    f"Two optimizers of one graph update {owner!r} and would share its slot "
                    f"{slot.name!r}, which is found by its name, so that each would train on the "
                    "other's values. Call apply_grads of each in a tf.variable_scope of its own, "
                    "or use one optimizer for both."
                )
        self._keepers = {**dict.fromkeys(slots, keeper), **self._keepers}


def _without_scope(name: str, scope: str) -> str:
    return name[len(scope) + 1 :] if scope and name.startswith(scope + "/") else name


def owner_of(name: str, owners: Collection[str]) -> str | None:
    """Returns the longest of the owners' names that `name` extends by a "/" or "_"."""
    for end in range(len(name) - 1, 0, -1):
        if name[end] in "/_" and name[:end] in owners:
            return name[:end]
    return None
