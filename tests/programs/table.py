"""Which program goes with which wrapper on which runtime, and which of all these are tests."""

from __future__ import annotations

from typing import Iterator, NamedTuple

import pytest

from tests.programs import (
    bert,
    field,
    gpt,
    mixture,
    own_adam,
    own_loop,
    penalty,
    recomputed,
    seq2seq,
    spectral,
    two_meshes,
)
from tests.programs.style import Style
from tests.programs.wrappers import WRAPPERS

STYLES: dict[str, tuple[Style, ...]] = {
    "gpt": (gpt.STYLE,),
    "seq2seq": (seq2seq.STYLE,),
    "own_adam": (own_adam.STYLE,),
    "own_loop": (own_loop.STYLE,),
    "field": (field.STYLE,),
    "bert": (bert.STYLE,),
    "bert_not_clipped": (bert.NOT_CLIPPED,),
    "mixture": (mixture.STYLE,),
    "two_meshes": (two_meshes.ONE, two_meshes.OTHER),
    "recomputed": (recomputed.STYLE,),
    "penalty": (penalty.STYLE,),
    "spectral": (spectral.STYLE,),
}
RUNTIMES = ("placement", "simd", "xla")

_MIXED = "Per-shard gradients are not recoverable"
_NO_ISLAND = "so that no island has all of it"
# For each program the wrappers that it cannot have, and what the error says.
REFUSED = {
    "own_loop": {"loss_scale": r"the gradient of 'w' does not come from mtf\.gradients"},
    "field": {
        "replicas": "'field' of shape .* has the shard dims, a copy for each replica",
        "sharded": "nothing to split .*(\n.*)*'field' .* is split over the replica axes already",
        "islands": _NO_ISLAND,
    },
    "bert": {
        "replicas": _MIXED,
        "islands": _MIXED,
        "loss_scale": "changed the gradient of 'table' in a way that is not linear",
    },
    "mixture": {"islands": _NO_ISLAND, "replicas": _MIXED},
}


# What is right, and no use.
POINTLESS = {"seq2seq": {"sum_shards": "it is called for all gradients, not pair by pair"}}
# What programs without an optimizer are tested with as well.
BY_HAND = {"own_loop": ["sum_shards"], "field": ["sum_shards"]}
# What these are without a wrapper, on each runtime: the reference is of the program, too.
BARE = ("gpt", "seq2seq", "own_adam")
# Programs beyond those that have each wrapper in the tests, and what is theirs to try.
BEYOND = {
    "bert_not_clipped": ("islands", "replicas(clip)"),
    "recomputed": ("islands", "replicas(clip)", "cross_shard"),
    "penalty": ("local",),
    "spectral": ("replicas(clip)",),
}


class Cell(NamedTuple):
    """A test: names of a program, of what it is wrapped in, and of a runtime."""

    style: str
    wrapper: str
    runtime: str


def refused(style: str, wrapper: str) -> list[str]:
    """What the errors say, one of which is raised; none where the program can be wrapped so."""
    errors = REFUSED.get(style, {})
    return [errors[part] for part in WRAPPERS[wrapper].parts if part in errors]


def wrappers_of(style: str) -> list[str]:
    """Those that make sense."""
    names = [name for name in WRAPPERS if not refused(style, name)]
    return [name for name in names if name not in POINTLESS.get(style, {})]


def whole() -> Iterator[Cell]:
    """All cells; those of one program are neighbours."""
    for style in STYLES:
        for wrapper in wrappers_of(style):
            yield from (Cell(style, wrapper, runtime) for runtime in RUNTIMES)


def _few(style: str) -> list[str]:
    """As few wrappers around each other as have all that make sense in them."""
    names = [name for name in wrappers_of(style) if name != "bare" or style in BARE]
    found = list(BY_HAND.get(style, ()))
    left = {part for name in names for part in WRAPPERS[name].parts}
    while left:
        found.append(max(names, key=lambda name: len(left.intersection(WRAPPERS[name].parts))))
        left -= set(WRAPPERS[found[-1]].parts)
    return found


def selected() -> Iterator[Cell]:
    """Each program with each wrapper and on each runtime, and each wrapper on each runtime.

    Most are on CPU replicas, where they take the least.
    """
    for number, style in enumerate(STYLES):
        for place, wrapper in enumerate(BEYOND.get(style) or _few(style)):
            yield Cell(style, wrapper, ("simd", *RUNTIMES)[(number + place) % 4])


def marked(cell):
    marks = [pytest.mark.xla] * (cell.runtime == "xla")
    # What takes the longest to build.
    large = cell.wrapper in ("islands", "replicas", "loss_scale(local(sharded))")
    if "bert" in cell.style or (large and cell.style in ("gpt", "seq2seq", "two_meshes")):
        marks.append(pytest.mark.slow)
    return pytest.param(*cell, marks=marks)
