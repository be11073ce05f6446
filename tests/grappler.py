"""Grappler in the sessions of tests, and LLVM's optimizations in what XLA compiles for them.

Grappler rewrites a session's graph before its first step, and LLVM goes over the machine code of
each program of XLA, which both take longer than the steps of most tests. What a wrapper promises
does not hang on them. So the sessions of tests go without, but for tests that are marked
``grappler``: those about the bits of whole sessions, and some of each way to train, which have both
as a user's sessions do.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Iterator, Mapping, Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.xla.runner import loaded_program
from mtf_gradsync.xla import executable

# As a flag of XLA's, for programs that have no `turn_off`.
XLA_FLAG = "--xla_backend_optimization_level=0"
_wanted = False


def turn_off() -> None:
    """Makes all sessions of this process go without, outside of `as_users_have_it`."""
    original = tf.Session.__init__

    @functools.wraps(original)
    def without(self: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
        if not _wanted:
            given, config = config, tf.ConfigProto()
            if given is not None:
                config.CopyFrom(given)
            config.graph_options.rewrite_options.disable_meta_optimizer = True
            # Nor what folds constants of each device's part of the graph.
            config.graph_options.optimizer_options.opt_level = tf.OptimizerOptions.L0
        original(self, target, graph, config)

    tf.Session.__init__ = without

    options_of, machine = loaded_program.compile_options, executable._describe_environment

    @functools.wraps(options_of)
    def with_quick_options(devices: Sequence[Any], options: Mapping[str, Any] | None = None) -> Any:
        if not _wanted and devices[0].platform == "cpu":
            options = {"xla_backend_optimization_level": 0, **(options or {})}
        return options_of(devices, options)

    loaded_program.compile_options = with_quick_options
    # What was compiled so is not taken from a cache by sessions that want it otherwise.
    executable._describe_environment = lambda devices: f"{machine(devices)} {_wanted}"


@contextlib.contextmanager
def as_users_have_it(wanted: bool = True) -> Iterator[None]:
    """Sessions that are made inside have the options that they are given, if this is wanted."""
    global _wanted
    before, _wanted = _wanted, _wanted or wanted
    try:
        yield
    finally:
        _wanted = before
