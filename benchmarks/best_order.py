"""Whether the division that `mtf-gradsync plan --best` chooses is the best, by the TPU compiler."""

from __future__ import annotations

import itertools
import random
import sys
from typing import Iterator, Sequence

import numpy as np

from benchmarks import report
from mtf_gradsync import xla
from mtf_gradsync.tools.planning.costs import Predictor, StepCosts
from mtf_gradsync.tools.planning.machines import Machine, TpuMachine
from mtf_gradsync.tools.planning.search import rules_of
from mtf_gradsync.tools.planning.stacks import SUMS, StackSettings
from mtf_gradsync.tools.train import gin_files
from mtf_gradsync.tools.train.best_division import BestDivision

# Slices on which predictions are compared with the compiler's figures, for the LM of the README.
SLICES = ("v5e:2x4", "v5e:4x4")
FIRST = 5
# How much longer the chosen division may take than the fastest that was compiled.
WORSE = 1.1


def measure(options: report.Options) -> report.Table:
    """Compiles the best divisions of the README's LM by prediction, and some random ones."""
    missing = xla.why_no_tpu_compiler()
    if missing:
        raise SystemExit(f"There is no compiler for TPUs here: {missing}")
    rows: list[report.Row] = []
    notes, targets = [], []
    for chips in SLICES[:1] if options.quick else SLICES:
        mine, every, least = _order_on(chips, 1 if options.quick else options.settings["random"])
        rows += mine
        predicted, compiled = (
            [row[f"{by} us"] for row in mine] for by in ("predicted", "compiler")
        )
        worse = compiled[0] / min(compiled)
        correlation = np.corrcoef(*(np.argsort(np.argsort(x)) for x in (predicted, compiled)))[0, 1]
        notes.append(
            f"On {chips} the chosen division is predicted to take {predicted[0]:.4g} us, and the "
            f"fastest of all {every} divisions, each predicted without the search, {least:.4g} us. "
            f"By the compiler's figures the chosen division takes {worse:.3f} times as long as the "
            f"fastest of the {len(mine)} compiled divisions. The rank correlation (Spearman) of "
            f"the predicted times and the compiler's times is {correlation:.2f}."
        )
        targets.append(
            report.Target(f"time of the choice on {chips}, of the fastest", worse, WORSE)
        )
        targets.append(
            report.Target(
                f"predicted time of the choice on {chips}, of the least",
                predicted[0] / least,
                1 + 1e-9,
            )
        )
    return report.Table(
        "best_order",
        "Divisions of the README's LM by predicted time, beside the compiler's times",
        rows,
        notes,
        targets,
    )


def _order_on(chips: str, others: int) -> tuple[list[report.Row], int, float]:
    """Compiles the first divisions on a slice, and `others` random ones.

    Returns a row for each, the number of all divisions, and the least time that is predicted for
    any of them, in microseconds, without the search.
    """
    gin_files.load(["lm_cpu_mesh.gin"], [])
    config = gin_files.bound_run_config()
    layout = ";".join(str(config.layout_rules).split(","))
    best, machine = BestDivision([layout], 64), TpuMachine(chips, by_branches=True)
    costs, _ = best.step_costs()
    choices, _ = best.predict_choices(costs, machine, None)
    every = list(_each_division(costs, machine, layout, best.steps))
    chosen = choices[:FIRST] + random.Random(0).sample(choices[FIRST:], others)
    check = best.make_check(machine, costs)
    rows = []
    for choice in sorted(chosen, key=choices.index):
        said = check(choice)
        if said.refused:
            continue
        rows.append(
            {
                "chips": chips,
                "mesh": choice.mesh_shape,
                "split": ", ".join(r[0] for r in rules_of(choice.layout) if r[1] == "model"),
                "stack": str(choice.stack),
                "place": 1 + choices.index(choice),
                "predicted us": 1e6 * choice.predicted.seconds,
                "compiler us": 1e6 * said.seconds,
                "predicted MB": choice.predicted.bytes_per_core / 1e6,
                "compiler MB": said.bytes_per_core / 1e6,
            }
        )
    return rows, len(every), 1e6 * min(every)


def _each_division(
    costs: StepCosts, machine: Machine, layout: str, steps: Sequence[int]
) -> Iterator[float]:
    """Yields the predicted seconds of every division, found without the search's own functions."""
    rules = layout.split(";")
    for shape in ([a, machine.cores // a] for a in range(1, machine.cores + 1)):
        if shape[0] * shape[1] != machine.cores:
            continue
        mesh = f"batch:{shape[0]};model:{shape[1]}"
        free = [rule for rule in rules if rule.endswith(":model")] if shape[1] > 1 else []
        kept = [rule for rule in rules if rule not in free]
        for count in range(len(free) + 1):
            for some in itertools.combinations(free, count):
                try:
                    predictor = Predictor(costs, machine, mesh, ";".join([*kept, *some]))
                except ValueError:
                    continue
                for k, sums, shards in itertools.product(steps, ("", *SUMS), (False, True)):
                    alone = shape[0] == 1 and (shards or sums in ("synced", "sharded"))
                    if (
                        bool(sums) is (k > 1)
                        and not costs.batch_size % (k * shape[0])
                        and not alone
                    ):
                        yield predictor.predict(StackSettings(k, sums, shards)).seconds


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.best_order", settings={"random": 8}))
