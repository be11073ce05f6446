"""Runs programs of several processes one after the other, in the order of their calls.

A collective finds its counterparts in other processes by its place in a sequence: gloo keeps one
sequence for each group of devices. Within a program XLA's CPU runtime keeps the order that it was
compiled with. Between two programs jaxlib 0.4 keeps none: it begins the second one beside the
first, unless the second takes results of the first. One process may then be in the first program's
sum while another is in the second's, and values are mixed up.
"""

from __future__ import annotations

import weakref
from typing import Callable, Sequence

from .devices import OnDevices

# For the program that was called last: a result to wait for, and all its results.
_last: OnDevices | None = None
_results: weakref.WeakSet[OnDevices] = weakref.WeakSet()


def run_in_turn(
    run: Callable[[Sequence[OnDevices]], list[OnDevices]], arguments: Sequence[OnDevices]
) -> list[OnDevices]:
    """Runs a program after those that were called before; may return before its results are ready.

    A program that takes results of the last one waits for them by itself, on the devices. Where
    this process has to wait for a program that has failed, that program's error is raised here.
    """
    global _last, _results
    if _results.isdisjoint(arguments):
        wait_for_turn()
    results = run(arguments)
    # One result is enough: all are ready at once, when all collectives are over.
    _last, _results = results[0], weakref.WeakSet(results)
    return results


def wait_for_turn() -> None:
    """Waits until the program that was called last has ended on all devices of this process.

    If that program has failed, its error is raised here.
    """
    global _last
    last, _last = _last, None
    if last is not None:
        import jax

        jax.block_until_ready(last.arrays_or_joined)
