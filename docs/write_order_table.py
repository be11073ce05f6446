"""Writes docs/order.md, which wrapper may stand around which: python docs/write_order_table.py."""

from __future__ import annotations

import pathlib
from typing import Any, Callable

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.optimizers import Wrapper
from mtf_gradsync.optimizers.pipeline.forms import PerShard
from mtf_gradsync.optimizers.pipeline.order import why_not
from mtf_gradsync.optimizers.pipeline.stack import stages_of
from mtf_gradsync.optimizers.pipeline.words import frequency_text

OUT = pathlib.Path(__file__).parent / "order.md"
MESH = {
    "mesh_shape": "rows:2;cols:2",
    "layout": "outer:rows;batch:cols",
    "batch_dims": ("outer", "batch"),
}

# Each wrapper, as it stands around another optimizer.
WRAPPERS: dict[str, Callable[[Any], Wrapper]] = {
    "AverageOptimizer": lambda opt: gs.AverageOptimizer(opt, 0.9),
    "LossScaleOptimizer": gs.LossScaleOptimizer,
    "GradientAccumulationOptimizer, local": lambda opt: gs.GradientAccumulationOptimizer(
        opt, 2, name="accumulation", **MESH
    ),
    "GradientAccumulationOptimizer, local, skip_not_finite": (
        lambda opt: gs.GradientAccumulationOptimizer(
            opt, 2, should_skip_update_fn=gs.skip_not_finite, name="skipping", **MESH
        )
    ),
    "GradientAccumulationOptimizer, synced": lambda opt: gs.GradientAccumulationOptimizer(
        opt, 2, accumulate="synced", name="synced"
    ),
    "GradientAccumulationOptimizer, sharded": lambda opt: gs.GradientAccumulationOptimizer(
        opt, 2, accumulate="sharded", name="sharded", **MESH
    ),
    "SyncReplicasOptimizer": lambda opt: gs.SyncReplicasOptimizer(opt, 2, **MESH),
    "CrossShardOptimizer": gs.CrossShardOptimizer,
    "ClipByGlobalNormOptimizer": lambda opt: gs.ClipByGlobalNormOptimizer(opt, 1.0),
    "ShardedUpdateOptimizer": lambda opt: gs.ShardedUpdateOptimizer(opt, min_size=1, **MESH),
    "OuterOptimizer": lambda opt: gs.OuterOptimizer(opt, 2, outer_dims=("outer",), **MESH),
    "OuterOptimizer, one island": lambda opt: gs.OuterOptimizer(opt, 2, outer_dims=(), **MESH),
}
_START = """\
# Which wrapper around which

Wrappers can be nested. Each row of the table on this page is for an outer wrapper, and each column
is for an inner wrapper. A cell is "✓" if the outer wrapper can be around the inner wrapper. A cell
with a number says that this order is refused; the reason has the same number below the table. A
refused order raises an error with the reason and the order to use instead. The command
`python docs/write_order_table.py` generates the table from the forms of gradients that the stages
of each wrapper take and give. A test trains a model with every pair of wrappers, and checks that
the pair is refused or accepted as the table says.

"""


def plain() -> mtf.optimize.Optimizer:
    """The optimizer in the middle."""
    return mtf.optimize.SgdOptimizer(0.1)


def table() -> dict[tuple[str, str], str | None]:
    """For each pair, outer and inner, the rule that refuses it; None for one that works."""
    made = {name: make(plain()) for name, make in WRAPPERS.items()}
    found: dict[tuple[str, str], str | None] = {}
    for outer in WRAPPERS:
        for inner in WRAPPERS:
            found[outer, inner] = why_not(stages_of(made[outer]), stages_of(made[inner]))
    return found


def page() -> str:
    """The text of the page."""
    pairs = table()
    letters = {name: chr(ord("A") + number) for number, name in enumerate(WRAPPERS)}
    lines = [_START.rstrip("\n"), ""]
    # Names in the table would make it wider than a phone.
    lines += [f"- {letter}: {name}" for name, letter in letters.items()]
    lines += ["", "| | " + " | ".join(letters.values()) + " |"]
    lines.append("|---" * (len(letters) + 1) + "|")
    reasons: list[str] = []
    for outer, letter in letters.items():
        cells = []
        for inner in letters:
            why = pairs[outer, inner]
            if why is not None and why not in reasons:
                reasons.append(why)
            cells.append("✓" if why is None else str(reasons.index(why) + 1))
        lines.append(f"| {letter} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "These are the reasons. OUTER is the outer wrapper, and INNER is the wrapper inside it:",
        "",
    ]
    generic = {
        "outer": "OUTER",
        "inner": "INNER",
        "or_else": "set the argument that its error names",
    }
    lines += [f"{number}. {why.format(**generic)}" for number, why in enumerate(reasons, 1)]
    lines += ["", "## The stages of each wrapper", ""]
    lines += [
        "A stage is one step of an update. If a stage takes gradients in another form than the "
        "stage before it gives, the package converts the gradients in between.",
        "",
    ]
    lines += ["| wrapper | stage | takes | gives | stages inside it run |", "|---|---|---|---|---|"]
    for name, make in WRAPPERS.items():
        made = make(plain())
        for stage in made.stages(made._place(None, (), None)):
            takes = "per shard" if isinstance(stage.takes, PerShard) else stage.takes
            takes = getattr(takes, "value", takes) or "as they are"
            gives = stage.gives.value if stage.gives else "what it took"
            when = frequency_text(stage.condition.when) if stage.condition else ""
            row = [name, f"`{type(stage).__name__}`", takes, gives, when or "every step"]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    OUT.write_text(page(), encoding="utf-8")
