"""`verify`: compares each way to divide a program over cores with one core, and explains faults."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np
from tqdm import tqdm

from mtf_gradsync.extension import tf
from mtf_gradsync.runtimes.sessions import RuntimeName, choose_runtime
from mtf_gradsync.tools.verification import divisions as kinds
from mtf_gradsync.tools.verification.causes import narrow_dtypes, random_operations
from mtf_gradsync.tools.verification.divisions import Division
from mtf_gradsync.tools.verification.engine import CannotBeDivided, Engine, Outcome
from mtf_gradsync.tools.verification.program_patches import DROPS
from mtf_gradsync.tools.verification.programs import Batch, NotOnCoresError, UserProgram
from mtf_gradsync.tools.verification.recorded_program import Changes
from mtf_gradsync.tools.verification.verdicts import CANNOT_BE, DivisionResult, Verification
from mtf_gradsync.tools.verification.verifier import REFERENCE, Verifier


def verify(
    program: Callable[..., Any],
    input_fn: Any,
    params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    meshes: Sequence[str] | None = None,
    *,
    steps: int = 1,
    divisions: Sequence[str] | None = None,
    without: Sequence[str] = (),
    runtime: RuntimeName = "cpu_replicas",
    own_values: bool = False,
    progress: bool = False,
) -> Verification:
    """Shows whether a program's update is the same however it is divided over cores, or why not.

    A division is a way to divide the training: a mesh and layout, a runtime, or microbatch steps.
    `verify` makes an update on one core without wrappers (the reference), and an update from the
    same values and batches in each division. It compares the gradients that reach the innermost
    optimizer, the new values of all variables on all cores, and the losses.

    Some parts of a model cannot be the same in all divisions, and are removed first. They are
    random numbers, capacities (limits to how many examples an expert takes), and, for divisions
    with microbatches or masked shards, statistics over the batch. A model in bfloat16 or float16 is
    run in float32. Where the program leaves the kind of its variables to TensorFlow, they are
    resource variables.

    Args:
      program: a model_fn `(features, labels, mode, params[, config])` that returns a spec, or a
        function `(mesh, inputs, params)` that returns a loss and the mtf operations of an update.
        Its argument `inputs` has placeholders in the structure of a batch. The program has to read
        the mesh from `params["mesh_shape"]` and `params["layout"]`, and the batch's size from its
        inputs or from `params["batch_size"]`.
      input_fn: the batches: an iterable, or a function that returns an iterable or a
        `tf.data.Dataset`. The function is called with `params` if it has an argument of this name.
        A batch is a structure of arrays (for a model_fn features, or features and labels), with the
        examples as first dimension; a number without dimensions is for all examples.
      params: the program's settings; "mesh_shape" and "layout" (as strings) are among them. It may
        also be a list of several such dictionaries: each of them makes a division, and the
        reference uses the first.
      meshes: mesh shapes to try, each as a division; None for none.
      steps: number of updates.
      divisions: which kinds of further divisions to try: "batch" and "model" (all cores along one
        mesh axis), "order" (mesh axes in the reverse order), "microbatches" (added accumulation),
        "wrappers" (without one wrapper), "masked" (without the gradients of one shard), "runtimes"
        (other runtimes).
        "mesh" is the program as it is, which is always tried. None tries all kinds if `meshes` is
        None, and no further division if `meshes` is given.
      without: what to remove from the model before its first run: "dropout", "random" (all random
        numbers), or "capacity" (limits to how many examples an expert takes).
      runtime: the runtime of all divisions but those of the kind "runtimes": "placement_mesh",
        "cpu_replicas" or "xla".
      own_values: whether variables begin with exactly the initial values that the program gives
        them. If False, small random numbers are added to these values, so that a layer of zeros
        hides no fault.
      progress: whether to show a progress bar on terminals.

    Returns:
      The verification: a table of the divisions with explanations, which can be printed.

    Raises:
      ValueError: an argument is out of range, or the batches end.
      TypeError: params is no mapping.
    """
    settings = [params] if isinstance(params, Mapping) else list(params)
    _check(settings, steps, divisions, without, runtime)
    shape, layout = str(settings[0]["mesh_shape"]), str(settings[0]["layout"])
    base = Division("as configured", shape, layout, runtime, Changes(drops=tuple(without)))
    engine = Engine(
        UserProgram(program, settings[0]), _batches(input_fn, settings[0]), steps, not own_values
    )
    try:
        try:
            outcome = engine.begin(base)
        except NotOnCoresError:
            base = dataclasses.replace(base, runtime="placement_mesh")
            outcome = engine.begin(base)
    except CannotBeDivided as error:
        line = DivisionResult(
            base.name, base.mesh_shape, base.layout, base.runtime, CANNOT_BE, cause=str(error)
        )
        only = dataclasses.replace(line, is_asked=True)
        return Verification((only,), REFERENCE, "nothing", steps, (1,), 0)
    base, out = _remove_dependent_parts(base, outcome)
    chosen = kinds.KINDS if divisions is None and meshes is None else tuple(divisions or ())
    every = [base]
    every += [
        dataclasses.replace(base, name=f"mesh {shape}", mesh_shape=shape) for shape in meshes or ()
    ]
    every += [_with_params(base, more, number) for number, more in enumerate(settings[1:], 2)]
    asked = {division.name for division in every}
    of_stack = engine.steps_per_update
    every += kinds.default_divisions(base, outcome.recorded, chosen, of_stack)
    every = list({division.key: division for division in reversed(every)}.values())[::-1]
    verifier = Verifier(engine, base, outcome, out)
    lines: list[DivisionResult] = []
    hidden = None if progress else True  # tqdm shows bars on terminals only where that is None
    with tqdm(every, desc="verifying", unit="division", leave=False, disable=hidden) as bar:
        for division in bar:
            bar.set_postfix_str(division.name)
            line = verifier.result_of(division)
            lines.append(dataclasses.replace(line, is_asked=division.name in asked))
    if outcome.recorded.island_wrappers:
        first = lines[0]
        names = ", ".join(outcome.recorded.island_wrappers)
        why = f"{names} trains islands apart between outer steps; all lines are without it"
        lines[0] = dataclasses.replace(first, cause=first.cause or why)
    reference = REFERENCE
    if base.precision:
        narrow = " and ".join(narrow_dtypes(outcome.recorded.losses))
        reference += f", all in {base.precision} in place of {narrow}"
    return Verification(
        tuple(lines),
        reference,
        verifier.source,
        steps,
        tuple(map(len, engine.groups)),
        len(outcome.recorded.variables),
        outcome.recorded.sees_gradients,
    )


def _remove_dependent_parts(base: Division, outcome: Outcome) -> tuple[Division, tuple[str, ...]]:
    """Returns the program's own division without parts whose results depend on the division.

    The parts that depend on the division are random numbers, capacities (limits to how many
    examples an expert takes), and wrappers whose islands train without exchanging gradients. All
    divisions are compared without these parts.

    Args:
      base: the program's own division.
      outcome: the results of running the program in `base`, which say which of these parts it has.

    Returns:
      A pair: a copy of `base` that removes these parts, in float32 if the model has narrower
      dtypes; and the names of the removed parts for the user, such as "random numbers".
    """
    recorded, changes = outcome.recorded, base.changes
    out, drops = [], list(changes.drops)
    if recorded.island_wrappers:
        changes = changes._replace(without=recorded.island_wrappers)
    if random_operations(recorded.losses):
        out.append("random numbers")
        drops += ["dropout", "random"]
    if recorded.has_experts and "capacity" not in drops:
        out.append("a limit to the examples of experts")
        drops.append("capacity")
    changes = changes._replace(drops=tuple(dict.fromkeys(drops)))
    precision = "float32" if narrow_dtypes(recorded.losses) else ""
    return dataclasses.replace(base, changes=changes, precision=precision), tuple(out)


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
    """Yields the batches of `verify`'s argument `input_fn`, as structures of NumPy arrays.

    If `input_fn` is a function with an argument `params`, it is called with the program's settings,
    `params`.
    """
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
    ):
        wrong = [name for name in given if name not in known]
        if wrong:
            raise ValueError(f"{kind} must be among {', '.join(known)}; got {wrong[0]!r}.")
    choose_runtime(runtime)
