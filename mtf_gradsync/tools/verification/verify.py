"""Proves that an update of a program does not depend on how it is divided."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np
from tqdm import tqdm

from mtf_gradsync.extension import ClipByGlobalNormOptimizer, mtf, tf
from mtf_gradsync.tools.verification import programs as kinds
from mtf_gradsync.tools.verification.causes import cause_of, dependences, name_of_factor
from mtf_gradsync.tools.verification.comparing import Difference
from mtf_gradsync.tools.verification.engine import (
    CannotBeDivided,
    Comparison,
    Engine,
    Outcome,
    Reference,
    compare_with,
    make_reference,
)
from mtf_gradsync.tools.verification.programs import RUNTIMES, Batch, Division, UserProgram
from mtf_gradsync.tools.verification.recording import DROPS
from mtf_gradsync.tools.verification.result import (
    CANNOT_BE,
    EQUAL,
    NOT_EQUAL,
    NOT_SHOWN,
    Line,
    Verification,
)


def verify(
    program: Callable[..., Any],
    input_fn: Any,
    params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    meshes: Sequence[str] | None = None,
    *,
    steps: int = 1,
    divisions: Sequence[str] | None = None,
    without: Sequence[str] = (),
    runtime: str = "cpu_replicas",
    progress: bool = False,
) -> Verification:
    """Whether an update is the same however a program is divided, and if not, what brings it in.

    From the same values and batches it makes an update on one core without wrappers, and in each
    division. It compares the gradients that reach the innermost optimizer, the new values and the
    losses.

    Args:
      program: a model_fn `(features, labels, mode, params[, config])` that returns a spec, or a
        function `(mesh, inputs, params)` that returns a loss and the mtf operations of an update,
        where `inputs` are placeholders in the structure of a batch. It has to read the mesh from
        `params["mesh_shape"]` and `params["layout"]`, and the batch's size from its inputs or
        `params["batch_size"]`.
      input_fn: batches: a function that returns a `tf.data.Dataset` or an iterable, called with
        params if it takes them; or the iterable. A batch is a structure of arrays (for a model_fn
        features, or features and labels), the examples their first dimension.
      params: the program's settings, "mesh_shape" and "layout" (as strings) among them; of
        several, the first are those of the reference, and each is a division.
      meshes: mesh shapes to try; None for the default set.
      steps: number of updates.
      divisions: which kinds of the default set: "mesh" (the program as it is, always there),
        "batch", "model", "order", "microbatches", "wrappers", "masked", "runtimes". None for all,
        or with `meshes` for none.
      without: what to take out of the model: "dropout", "random".
      runtime: the runtime of divisions that do not name one: "placement_mesh", "cpu_replicas" or
        "xla".
      progress: whether to show a progress bar on terminals.

    Returns:
      The verification; print it.

    Raises:
      ValueError: an argument is out of range, the program makes no update, or the batches end.
      TypeError: params is no mapping.
    """
    settings = [params] if isinstance(params, Mapping) else list(params)
    _check(settings, steps, divisions, without, runtime)
    base = kinds.own(
        str(settings[0]["mesh_shape"]), str(settings[0]["layout"]), tuple(without), runtime
    )
    engine = Engine(UserProgram(program, settings[0]), _batches(input_fn, settings[0]), steps)
    outcome = engine.begin(base)
    if outcome.recorded.islands:
        base = dataclasses.replace(
            base, changes=base.changes._replace(without=outcome.recorded.islands)
        )
    chosen = kinds.KINDS if divisions is None and meshes is None else tuple(divisions or ())
    every = [base]
    every += [
        dataclasses.replace(base, name=f"mesh {shape}", mesh_shape=shape) for shape in meshes or ()
    ]
    every += [_with_params(base, more, number) for number, more in enumerate(settings[1:], 2)]
    asked = {division.name for division in every}
    every += kinds.default_divisions(base, outcome.recorded, chosen, engine.steps_per_update)
    every = list({division.key: division for division in reversed(every)}.values())[::-1]
    verifier = _Verifier(engine, base, outcome)
    lines = []
    hidden = None if progress else True  # tqdm shows bars on terminals only where that is None
    with tqdm(every, desc="verifying", unit="division", leave=False, disable=hidden) as bar:
        for division in bar:
            bar.set_postfix_str(division.name)
            line = verifier.line(division)
            lines.append(dataclasses.replace(line, is_asked=division.name in asked))
    if outcome.recorded.islands:
        first = lines[0]
        names = ", ".join(outcome.recorded.islands)
        why = f"{names} trains islands apart between outer steps; all lines are without it"
        lines[0] = dataclasses.replace(first, cause=first.cause or why)
    return Verification(
        tuple(lines),
        "one core without wrappers",
        verifier.reference(base).source,
        steps,
        engine.steps_per_update,
        len(outcome.recorded.variables),
        outcome.recorded.sees_gradients,
    )


class _Verifier:
    """Makes a line of each division, and finds what brings a difference in."""

    def __init__(self, engine: Engine, base: Division, outcome: Outcome):
        self._engine, self._base, self._own = engine, base, outcome
        self._references: dict[Any, Reference] = {}
        self._found: list[tuple[str, float | None, str]] = []
        self.dependences = dependences(outcome.recorded.losses, outcome.recorded.batch_dims)

    def reference(self, of: Division) -> Reference:
        """Returns what a division is compared with."""
        division = kinds.reference(self._base)
        # What is left of the stack decides whether, and the mask of what, gradients are clipped.
        clips = [
            label
            for label in of.changes.without
            if isinstance(self._own.recorded.wrappers[label], ClipByGlobalNormOptimizer)
        ]
        changes = division.changes._replace(
            mask=of.changes.mask, without=(*division.changes.without, *clips)
        )
        division = dataclasses.replace(division, changes=changes)
        if division.key not in self._references:
            try:
                is_random = any(one.is_random for one in self.dependences)
                made = make_reference(self._engine, division, is_random)
                self._references[division.key] = made
            except CannotBeDivided as error:
                raise ValueError(f"The program does not run on one core: {error}") from error
        return self._references[division.key]

    def line(self, division: Division) -> Line:
        """Returns what is found of a division."""
        found = Line(
            division.name, division.mesh_shape, division.layout, division.runtime, CANNOT_BE
        )
        try:
            outcome = self._engine.run(division)
        except CannotBeDivided as error:
            return dataclasses.replace(found, cause=str(error))
        compared = self._compare(division, outcome)
        worst = compared.worst
        errors: dict[str, float] = {}
        for one in compared.gradients or compared.values:
            errors[one.variable] = max(one.error, errors.get(one.variable, 0.0))
        found = dataclasses.replace(
            found, verdict=EQUAL, error=worst.error, expected=worst.expected, errors=errors
        )
        what, first = _first(compared, outcome)
        if first is None:
            return found
        found = dataclasses.replace(found, error=first.error, expected=first.expected)
        other_steps = outcome.batches > 1 or division.changes.mask is not None
        natural = [x.text for x in self.dependences if other_steps or not x.by_steps]
        if natural and what in ("gradient", "value", "loss"):
            return dataclasses.replace(found, verdict=NOT_SHOWN, cause="; ".join(natural))
        culprit, factor = self._culprit(division, first), first.factor
        named = "" if factor is None else name_of_factor(factor, self._numbers(division, outcome))
        return dataclasses.replace(
            found,
            verdict=NOT_EQUAL,
            variable="" if what == "loss" else first.variable,
            what=what,
            factor=factor,
            of_factor=named,
            brought_in_by=culprit,
            cause=cause_of(what, culprit, factor, named, first.error),
        )

    def _compare(self, division: Division, outcome: Outcome) -> Comparison:
        return compare_with(self.reference(division), outcome, division.changes.mask is not None)

    def _is_equal(self, division: Division) -> bool:
        try:
            outcome = self._engine.run(division)
        except CannotBeDivided:
            return False
        return _first(self._compare(division, outcome), outcome)[1] is None

    def _culprit(self, division: Division, first: Difference) -> str:
        """Returns the wrapper, axis, or whatever else without which the division is equal."""
        simpler = list(self._simpler(division))
        # What was found once is tried first.
        known = [name for variable, factor, name in self._found if variable == first.variable]
        simpler.sort(key=lambda pair: pair[0] not in known)
        for name, other in simpler:
            if self._is_equal(other):
                self._found.append((first.variable, first.factor, name))
                return name
        return ""

    def _simpler(self, division: Division) -> Iterator[tuple[str, Division]]:
        """Gives a division with one thing taken away, and what that is."""
        changes = division.changes
        if changes.micro_steps > 1:
            more = changes._replace(micro_steps=1)
            yield "microbatch steps", dataclasses.replace(division, changes=more)
        if changes.mask is not None:
            yield "the mask", dataclasses.replace(division, changes=changes._replace(mask=None))
        for label in self._own.recorded.stack:
            if label not in changes.without:
                more = kinds.without(division, label)
                yield label, dataclasses.replace(division, changes=more)
        shape = mtf.convert_to_shape(division.mesh_shape)
        for dim in shape.dims:
            if dim.size > 1:
                dims = [d if d != dim else mtf.Dimension(d.name, 1) for d in shape.dims]
                yield (
                    f"mesh axis {dim.name}",
                    dataclasses.replace(division, mesh_shape=kinds.shape_text(dims)),
                )
        if division.params:
            names = ", ".join(name for name, _ in division.params)
            yield f"params {names}", dataclasses.replace(division, params=())
        for runtime in RUNTIMES[:2]:
            if runtime != division.runtime:
                yield f"runtime {division.runtime}", dataclasses.replace(division, runtime=runtime)

    def _numbers(self, division: Division, outcome: Outcome) -> dict[str, float]:
        """Returns the numbers that a factor may be, by what they are."""
        shape = mtf.convert_to_shape(division.mesh_shape)
        batch_axes = kinds.axes_of_batch(division.layout, outcome.recorded)
        shards = int(np.prod([d.size for d in shape.dims if d.name in batch_axes] or [1]))
        steps = max(self._engine.steps_per_update, division.changes.micro_steps)
        numbers: dict[str, float] = {
            "the number of shards": shards,
            "K, the microbatch steps": steps,
        }
        for dim in shape.dims:
            numbers[f"the number of cores along {dim.name}"] = dim.size
        numbers["the number of cores"] = shape.size
        for name, value in division.params:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                numbers[f"params {name}"] = value
        return {name: value for name, value in numbers.items() if value != 1}


def _first(compared: Comparison, outcome: Outcome) -> tuple[str, Difference | None]:
    """Returns what differs first, and how; None where nothing does."""
    # These two explain what differs in later steps.
    for what, names in (
        ("value before the update", outcome.changed_before),
        ("copies", outcome.apart),
    ):
        if names:
            return what, Difference(names[0], float("inf"), 0.0)
    for what, found in (("gradient", compared.gradients), ("value", compared.values)):
        first = next((x for x in found if not x.is_equal), None)
        if first is not None:
            return what, first
    return "loss", None if compared.loss.is_equal else compared.loss


def _with_params(base: Division, more: Mapping[str, Any], number: int) -> Division:
    changed = tuple(
        (name, value) for name, value in more.items() if name not in ("mesh_shape", "layout")
    )
    shape = str(more.get("mesh_shape", base.mesh_shape))
    layout = str(more.get("layout", base.layout))
    return dataclasses.replace(
        base, name=f"params {number}", mesh_shape=shape, layout=layout, params=changed
    )


def _batches(input_fn: Any, params: Mapping[str, Any]) -> Iterator[Batch]:
    """Gives batches of arrays."""
    graph = tf.Graph()
    with graph.as_default():
        given = input_fn
        if callable(input_fn):
            takes = "params" in inspect.signature(input_fn).parameters
            given = input_fn(params=dict(params)) if takes else input_fn()
        if isinstance(given, tf.data.Dataset):
            given = _read(tf.data.make_one_shot_iterator(given).get_next(), graph)
    for batch in given:
        yield tf.nest.map_structure(np.asarray, batch)


def _read(following: Any, graph: tf.Graph) -> Iterator[Batch]:
    session = tf.Session(graph=graph)
    with contextlib.closing(session), contextlib.suppress(tf.errors.OutOfRangeError):
        while True:
            yield session.run(following)


def _check(
    settings: Sequence[Any],
    steps: Any,
    divisions: Sequence[str] | None,
    without: Sequence[str],
    runtime: str,
) -> None:
    if not settings or not all(isinstance(one, Mapping) for one in settings):
        raise TypeError(f"params must be a mapping or a list of them, got {settings!r}.")
    missing = [name for name in ("mesh_shape", "layout") if name not in settings[0]]
    if missing:
        raise ValueError(f"params has no {' and no '.join(missing)}: got {sorted(settings[0])}.")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"steps must be a positive integer, got {steps!r}.")
    for kind, given, known in (
        ("divisions", divisions or (), kinds.KINDS),
        ("without", without, DROPS),
        ("runtime", [runtime], RUNTIMES),
    ):
        wrong = [name for name in given if name not in known]
        if wrong:
            raise ValueError(f"{kind} must be of {', '.join(known)}; got {wrong[0]!r}.")
