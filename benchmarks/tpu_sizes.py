"""What the compiler for TPUs expects of wrappers around language models of random sizes."""

from __future__ import annotations

import collections
import random
import statistics
import sys

from benchmarks import models, report, tpu_cost
from mtf_gradsync import xla

STEPS = (
    tpu_cost.BARE,
    tpu_cost.CLIPPED,
    "CrossShard",
    "CrossShard, reports",
    "SyncReplicas",
    "ShardedUpdate",
)
# Without an update, a step is not to be compared with the bare one.
_SKIPPED = ", skipped"


def measure(options: report.Options) -> report.Table:
    """Compiles every step of every model for every topology; nothing is run."""
    missing = xla.why_no_tpu_compiler()
    if missing:
        raise SystemExit(f"There is no compiler for TPUs here: {missing}")
    generator = random.Random(options.settings["seed"])
    ratios = collections.defaultdict(list)
    for _ in range(1 if options.quick else options.settings["models"]):
        size = {
            "layers": generator.choice([1, 2, 3, 4, 5]),
            "d_model": generator.choice([64, 96, 128, 160, 192, 256]),
            "batch": generator.choice([8, 16, 32]),
            "length": generator.choice([32, 48, 64, 96, 128]),
        }
        name = " ".join(f"{n} {k}" for k, n in size.items())
        for topology in options.only["topologies"]:
            made = [
                row
                for step in STEPS
                for row in tpu_cost.rows_of(models.lm(**size), name, step, topology)
            ]
            for step, row in tpu_cost.compare(made).items():
                if step not in STEPS[:2] and not step.endswith(_SKIPPED):
                    ratios[step, topology].append((row["us/bare"], row["core/bare"]))
    rows = []
    for (step, topology), found in sorted(ratios.items()):
        us, memory = zip(*found)
        rows.append(
            {
                "step": step,
                "topology": topology,
                "models": len(found),
                "us/bare, least": min(us),
                "median": statistics.median(us),
                "most": max(us),
                "memory/bare, least": min(memory),
                "median memory": statistics.median(memory),
                "most memory": max(memory),
            }
        )
    notes = (
        "The language models are trained by Adafactor on a mesh of 4x2, and have 1 to 5 layers of "
        "width 64 to 256, and batches of 8 to 32 sequences of 32 to 128 tokens.",
        "The times are estimates of the TPU compiler, as in the tables of benchmarks.tpu_cost. The "
        'rows "reports" are relative to a bare program that clips by hand, because such a program '
        "also computes the norm of the gradients.",
        "The memory of SyncReplicas is the memory of a program with both branches, the update and "
        "the skipped update, as in the tables of benchmarks.tpu_cost.",
    )
    title = "Wrappers on a TPU, the compiler's estimate for language models of random sizes"
    return report.Table("tpu_sizes", title, rows, notes)


if __name__ == "__main__":
    command = "python -m benchmarks.tpu_sizes"
    parts = {"topologies": tpu_cost.TOPOLOGIES}
    sys.exit(report.main([measure], command, parts, {"models": 4, "seed": 7}))
