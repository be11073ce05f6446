"""Verifies every planted fault and every right program, and prints the table of the docs.

    python -m tests.tools.verification.table [--repeat N] [name ...]

It ends with an error where a fault is missed, or a right program is said to be none, or where one
of several repetitions gives other figures. TF_CPP_MIN_LOG_LEVEL=3 keeps TensorFlow quiet.
"""

from __future__ import annotations

import argparse
import collections
import functools
import math
import sys
import time
from typing import Any, NamedTuple, Sequence

import mtf_gradsync.tools.verification as verification
from mtf_gradsync.runtimes.settings import enable_mesh_defaults
from tests.tools.verification.faults import FAULTS, MESH, Fault, batches
from tests.tools.verification.reported_faults import REPORTED
from tests.tools.verification.right_programs import RIGHT
from tests.tools.verification.update_faults import OF_UPDATES

ALL: dict[str, Fault] = {**FAULTS, **REPORTED, **OF_UPDATES}


def _right_program(fault: Fault) -> Any:
    """Returns what tells a fault's program without the wrong line from those of other faults."""
    return getattr(fault.program, "right", fault.program), str(fault.params), fault.runtime


# Of all faults with the same right program, one.
RIGHT_PROGRAMS = list({_right_program(ALL[name]): name for name in reversed(ALL)}.values())[::-1]


def verified(fault: Fault, wrong: bool) -> Any:
    """Verifies a program with its fault, or without."""
    return verification.verify(
        functools.partial(fault.program, wrong=wrong),
        batches,
        [{**MESH, **more} for more in fault.params or ({},)],
        divisions=(),
        runtime=fault.runtime,
    )


class Found(NamedTuple):
    """What was found of a fault.

    Attributes:
      is_found: whether it is said not to be the same.
      wrong: what of variable, factor, what brings it in, and cause is not as it must be.
      figures: what has to be the same each time.
    """

    is_found: bool
    wrong: tuple[str, ...]
    figures: tuple[Any, ...]


def judged(fault: Fault, found: Any) -> Found:
    """Compares an answer with what the fault is."""
    lines = [line for line in found.lines if line.verdict == "NOT EQUAL"]
    if not lines or found.is_equal:
        return Found(False, ("verdict",), tuple((x.verdict, x.cause) for x in found.lines))
    line = lines[0]
    wrong = []
    if (line.variable, line.what) != (fault.variable, fault.what):
        wrong.append(f"{line.what} of {line.variable}")
    if not _is_factor(line.factor, fault.factor):
        wrong.append(f"factor {line.factor}")
    if fault.factor is not None and fault.of_factor not in line.of_factor:
        wrong.append(f"factor: {line.of_factor!r}")
    if line.brought_in_by != fault.brought_in_by:
        wrong.append(f"by {line.brought_in_by!r}")
    if fault.cause not in line.cause:
        wrong.append(f"cause: {line.cause!r}")
    figures = line.division, line.variable, line.what, line.factor, line.brought_in_by, line.error
    return Found(True, tuple(wrong), figures)


def _is_factor(found: float | None, wanted: float | None) -> bool:
    if found is None or wanted is None:
        return found is None and wanted is None
    return math.isclose(found, wanted, rel_tol=1e-3, abs_tol=1e-6)


def main(arguments: Sequence[str]) -> int:
    """Prints the table; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args(arguments)
    enable_mesh_defaults()
    counts: collections.Counter[str] = collections.Counter()
    figures: dict[str, set[Any]] = collections.defaultdict(set)
    began = time.monotonic()
    for _ in range(given.repeat):
        for name, fault in ALL.items():
            if given.names and name not in given.names:
                continue
            start = time.monotonic()
            found = judged(fault, verified(fault, True))
            figures[name].add(repr(found.figures))
            counts["planted"] += 1
            counts["found"] += found.is_found
            counts["explained"] += found.is_found and not found.wrong
            said = "; ".join(found.wrong) or "variable, factor and cause"
            print(f"{name} | {'found' if found.is_found else 'MISSED'} | {said} | "
                  f"{time.monotonic() - start:.0f} s", flush=True)  # fmt: skip
        for name, right in RIGHT.items():
            if given.names and name not in given.names:
                continue
            start, answer = time.monotonic(), right()
            figures[name].add(repr([(x.verdict, x.error) for x in answer.lines]))
            counts["right"] += 1
            counts["falsely told"] += not answer.is_equal
            said = "" if answer.is_equal else str(answer)
            print(f"right: {name} | {answer.verdict} | {said} | "
                  f"{time.monotonic() - start:.0f} s", flush=True)  # fmt: skip
    unlike = [name for name, seen in figures.items() if len(seen) > 1]
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    print(f"{given.repeat} times in {time.monotonic() - began:.0f} s; other figures: {unlike}")
    missed = counts["planted"] - counts["found"]
    return int(bool(missed or counts["falsely told"] or unlike))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
