"""Records the slots that an optimizer made for each variable."""

from __future__ import annotations

import contextlib
from typing import Collection, Iterator, Sequence

from mtf_gradsync._private.libraries import mtf


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
            name = variable.name
            if scope and name.startswith(scope + "/"):
                name = name[len(scope) + 1 :]
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


def owner_of(name: str, owners: Collection[str]) -> str | None:
    """Returns the longest of the owners' names that `name` extends by a "/" or "_"."""
    for end in range(len(name) - 1, 0, -1):
        if name[end] in "/_" and name[:end] in owners:
            return name[:end]
    return None
