"""Finds the fastest division of a training (mesh, layout and wrappers) that fits into memory."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any, Callable, NamedTuple, Sequence

from tqdm import tqdm

from mtf_gradsync.extension import mtf
from mtf_gradsync.runtimes._tables import text_table, wrapped
from mtf_gradsync.tools.planning.costs import Predicted, Predictor, StepCosts
from mtf_gradsync.tools.planning.machines import Machine, shapes_of
from mtf_gradsync.tools.planning.search import rules_of
from mtf_gradsync.tools.planning.stacks import StackSettings, stacks_of

# In all measurements the compiler's bytes were at least this share of the predicted bytes. So a
# division whose predicted bytes, times this share, exceed the budget is not compiled.
_LEAST_SHARE = 0.75
#: Up to so many rules of a layout are tried in all combinations; of more, only all together.
MOST_RULES = 6
_SHOWN = 5


class Choice(NamedTuple):
    """A division of a training over cores, with its predicted cost.

    Attributes:
      mesh_shape: the mesh shape, such as "batch:4;model:2".
      layout: the layout rules, such as "batch:batch;heads:model".
      stack: the settings of the wrappers.
      predicted: the predicted cost of an update.
    """

    mesh_shape: str
    layout: str
    stack: StackSettings
    predicted: Predicted

    @property
    def name(self) -> str:
        """The mesh shape, layout and stack as one line of text."""
        return f"{self.mesh_shape}, {self.layout}, {self.stack}"


class Checked(NamedTuple):
    """The compiler's answer for a division.

    Attributes:
      bytes_per_core: the memory that a core needs. If a model with fewer layers was compiled, this
        is the prediction for all layers, multiplied by a ratio. The ratio is the compiler's bytes
        for the smaller model, divided by the predicted bytes for the smaller model.
      seconds: the time of an update. If a model with fewer layers was compiled, it is computed in
        the same way as `bytes_per_core`.
      how: what was compiled, as text for users.
      refused: why the compiler refuses the division; "" if it does not.
    """

    bytes_per_core: float = 0.0
    seconds: float = 0.0
    how: str = ""
    refused: str = ""


Check = Callable[[Choice], Checked]


@dataclasses.dataclass(frozen=True)
class Best:
    """The best division of a training: it fits into memory and has the shortest predicted update.

    Attributes:
      machine: the topology, such as "v5e:4x4".
      cores: the number of the topology's cores.
      budget: bytes of memory that a core may use; None for no limit.
      chosen: the division; None if none fits.
      checked: the compiler's answer for the chosen division; None if the compiler was not asked.
      choices: all possible divisions, sorted by predicted time, the shortest first.
      tried: the divisions that the compiler was asked about before the chosen one, and that do not
        fit or were refused, each with the compiler's answer.
    """

    machine: str
    cores: int
    budget: float | None
    chosen: Choice | None
    checked: Checked | None
    choices: tuple[Choice, ...]
    tried: tuple[tuple[Choice, Checked], ...] = ()

    @property
    def nearest(self) -> tuple[Choice, float] | None:
        """The division that needs the least memory, and its bytes for a core.

        Divisions that the compiler refused do not count. The value is None if no division is
        possible.
        """
        said = dict(self.tried)
        possible = [c for c in self.choices if not (c in said and said[c].refused)]
        bytes_of = {c: said[c].bytes_per_core if c in said else c.predicted.bytes_per_core
                    for c in possible}  # fmt: skip
        least = min(possible, key=lambda c: bytes_of[c], default=None)
        return None if least is None else (least, bytes_of[least])

    def __str__(self) -> str:
        stacks = len({choice.stack for choice in self.choices})
        meshes = len({choice[:2] for choice in self.choices})
        lines = [
            f"{self.machine}, {self.cores} cores: {len(self.choices):,} divisions, of {meshes} "
            f"meshes with a layout and {stacks} stacks."
        ]
        if self.chosen is None:
            return "\n".join(wrapped([*lines, *self._said_of_tried(), self._why_none()]))
        first = self.choices.index(self.chosen)
        shown = self.choices[first : first + _SHOWN]
        rows = [_cells(choice) for choice in shown]
        lines += ["", *text_table(list(rows[0]), [list(r.values()) for r in rows], set(_TEXTS))]
        lines += ["The first is chosen; the others are the next ones by predicted time."]
        lines += self._said_of_tried()
        if self.checked is not None:
            lines.append(
                f"The TPU compiler, {self.checked.how}: {1e3 * self.checked.seconds:,.4g} ms and "
                f"{self.checked.bytes_per_core / 1e9:,.4g} GB a core, of a budget of "
                f"{_gigabytes(self.budget)}."
            )
        return "\n".join(wrapped(lines))

    def _said_of_tried(self) -> list[str]:
        return [
            f"Before it, {choice.name}: "
            + (checked.refused or f"{checked.bytes_per_core:,.0f} bytes a core do not fit.")
            for choice, checked in self.tried
        ]

    def _why_none(self) -> str:
        nearest = self.nearest
        if nearest is None:
            return "No division is possible: each of them is refused."
        choice, size = nearest
        needs = "needs" if choice in dict(self.tried) else "is predicted to need"
        return (
            f"None fits into {self.budget or 0:,.0f} bytes a core. The nearest is {choice.name}: "
            f"it {needs} {size:,.0f} bytes."
        )

    def to_json(self) -> str:
        """Returns the result as JSON text; of all `choices`, it has the five fastest."""

        def plain(choice: Choice | None) -> Any:
            if choice is None:
                return None
            parts = {"stack": choice.stack._asdict(), "predicted": choice.predicted._asdict()}
            return {**choice._asdict(), **parts}

        nearest = self.nearest
        content = {
            "machine": self.machine,
            "cores": self.cores,
            "budget": self.budget,
            "chosen": plain(self.chosen),
            "name": self.chosen and str(self.chosen.stack),
            "checked": self.checked and self.checked._asdict(),
            "nearest": nearest and {**plain(nearest[0]), "bytes_per_core": nearest[1]},
            "divisions": len(self.choices),
            "first": [plain(choice) for choice in self.choices[:_SHOWN]],
            "tried": [{**plain(choice), **checked._asdict()} for choice, checked in self.tried],
        }
        return json.dumps(content, indent=2)


_TEXTS = ("mesh", "layout", "stack")


def _cells(choice: Choice) -> dict[str, str]:
    predicted = choice.predicted
    of_update = {
        "update ms": predicted.seconds,
        "operations": predicted.compute_seconds,
        "model's links": predicted.model_seconds,
        "gradients' links": predicted.sync_seconds,
    }
    return {
        "mesh": choice.mesh_shape,
        "layout": choice.layout,
        "stack": str(choice.stack),
        **{name: f"{1e3 * seconds:,.4g}" for name, seconds in of_update.items()},
        "GB/core": f"{predicted.bytes_per_core / 1e9:,.3g}",
    }


def _gigabytes(size: float | None) -> str:
    return "any size" if size is None else f"{size / 1e9:,.4g} GB"


def all_choices(
    costs: StepCosts,
    machine: Machine,
    axes: Sequence[str],
    layouts: Sequence[str],
    steps: Sequence[int],
    inner_steps: Sequence[int] = (),
    mesh_shapes: Sequence[str] = (),
    progress: bool = False,
) -> tuple[list[Choice], dict[str, str]]:
    """Returns every possible division of a training on a machine, with its predicted cost.

    Args:
      costs: the facts of the training step, as `read_costs` returns them.
      machine: the machine.
      axes: names of the mesh axes.
      layouts: the layouts to consider, such as "batch:batch;heads:model". Each is also tried
        without some of the rules that split the model.
      steps: the numbers of microbatch steps in an update to consider. A number is not tried on
        meshes where it does not divide the batch of a shard.
      inner_steps: numbers of steps between two outer steps (DiLoCo) to consider; () considers no
        outer steps.
      mesh_shapes: mesh shapes to consider; () for all factorizations of the machine's cores.
      progress: whether to show a progress bar on terminals.

    Returns:
      Two values. The first is the list of divisions, sorted by predicted time and then memory, the
      least first. The second is a dictionary from each impossible mesh and layout, as one text, to
      the reason why it is impossible.
    """
    shapes = mesh_shapes or shapes_of(machine.cores, axes, machine.slices)
    pairs = [(shape, rules) for shape in shapes for layout in layouts
             for rules in _with_fewer_rules(layout, shape, costs.batch_dims)]  # fmt: skip
    found, why = [], {}
    hidden = None if progress else True  # tqdm shows bars on terminals only where that is None
    for shape, layout in tqdm(
        dict.fromkeys(pairs), desc="predicting", unit="mesh", leave=False, disable=hidden
    ):
        try:
            predictor = Predictor(costs, machine, shape, layout)
        except ValueError as error:
            why[f"{shape}, {layout}"] = str(error)
            continue
        # The batch of a step is divided among the shards.
        fitting = [k for k in steps if costs.batch_size % (k * predictor.batch_parts) == 0]
        if not fitting:
            why[f"{shape}, {layout}"] = (
                f"{costs.batch_dims[-1]} = {costs.batch_size} cannot be divided among "
                f"{predictor.batch_parts} shards in {' or '.join(map(str, steps))} microbatch steps"
            )
        for stack in stacks_of(fitting, predictor.shards, len(predictor.replica_axes), inner_steps):
            found.append(Choice(shape, layout, stack, predictor.predict(stack)))
    found.sort(key=sort_key)
    return found, why


def sort_key(choice: Choice) -> tuple[Any, ...]:
    """Returns a key of the division `choice`, by which the best of several divisions comes first.

    The division with the shorter predicted time comes first. If the times are equal, it is the
    division with less memory. If memory is equal, too, it is the division whose stack has the
    shorter name. If the names are equally long, it is the division with the longer layout.
    """
    predicted, stack = choice.predicted, choice.stack
    return (predicted.seconds, predicted.bytes_per_core, len(str(stack)), -len(choice.layout))


def _with_fewer_rules(layout: str, mesh_shape: str, batch_dims: Sequence[str]) -> list[str]:
    """Returns a layout, and its variants without some of the rules that split the model.

    All variants keep the layout's rules for mesh axes of size 1, and the rules that split the
    batch. If the layout has more than six other rules, it is returned without variants.

    Args:
      layout: the layout rules, such as "batch:batch;heads:model".
      mesh_shape: the mesh shape, such as "batch:4;model:2".
      batch_dims: names of the batch's dimensions.

    Returns:
      The layouts as text, with the most rules first.
    """
    sizes = {dim.name: dim.size for dim in mtf.convert_to_shape(mesh_shape).dims}
    rules = rules_of(layout)
    some = [rule for rule in rules if sizes.get(rule[-1], 1) > 1 and rule[0] not in batch_dims]
    if len(some) > MOST_RULES:
        some = []
    found = []
    for count in range(len(some), -1, -1):
        for kept in itertools.combinations(some, count):
            chosen = [rule for rule in rules if rule in kept or rule not in some]
            found.append(";".join(":".join(rule) for rule in chosen))
    return found


def best_of(
    choices: Sequence[Choice], machine: Machine, budget: float | None, check: Check | None = None
) -> Best:
    """Returns the division that has the shortest predicted time of all that fit into memory.

    Args:
      choices: the possible divisions, sorted by predicted time, as `all_choices` returns them.
      machine: the machine.
      budget: bytes of memory that a core may use; None for no limit.
      check: a function that asks the compiler what a division needs. If it is None, a division fits
        into memory if its predicted memory is within the budget.

    Returns:
      A `Best` with the best division and the compiler's answers; its `chosen` is None if no
      division fits into memory. A larger `budget` never leads to a division with a longer predicted
      time. To ensure this, only two things decide whether the compiler is asked about a division:
      the division's prediction, and the compiler's answers for earlier divisions that are predicted
      to need no more memory than this division.
    """
    tried: list[tuple[Choice, Checked]] = []
    chosen, found = None, None
    for choice in choices:
        size = choice.predicted.bytes_per_core
        limit = float("inf") if budget is None else budget
        if size > (limit if check is None else limit / _LEAST_SHARE):
            continue
        # A stack that is refused in the same words on several meshes does not suit the optimizer.
        refused = [
            (x.mesh_shape, said.refused) for x, said in tried
            if said.refused and _without_steps(x.stack) == _without_steps(choice.stack)
            and x.predicted.bytes_per_core <= size
        ]  # fmt: skip
        if len(set(refused)) > 1 and len({why for _, why in refused}) == 1:
            continue
        if check is None:
            chosen = choice
            break
        said = check(choice)
        if not said.refused and said.bytes_per_core <= limit:
            chosen, found = choice, said
            break
        tried.append((choice, said))
    return Best(machine.name, machine.cores, budget, chosen, found, tuple(choices), tuple(tried))


def _without_steps(stack: StackSettings) -> tuple[Any, ...]:
    """Returns the settings of a stack except the numbers of steps, to find stacks of one kind."""
    return stack.sums, stack.sharded_updates, stack.reducer, bool(stack.inner_steps)
