"""Grappler in the sessions of tests.

Grappler rewrites a session's graph before its first step, which takes longer than the steps of
most tests. What a wrapper promises does not hang on it. So the sessions of tests go without, but
for tests that are marked ``grappler``: those about the bits of whole sessions, and some of each
way to train, which have it as a user's sessions do.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Iterator

from mtf_gradsync._private.libraries import tf

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


@contextlib.contextmanager
def as_users_have_it(wanted: bool = True) -> Iterator[None]:
    """Sessions that are made inside have the options that they are given, if this is wanted."""
    global _wanted
    before, _wanted = _wanted, _wanted or wanted
    try:
        yield
    finally:
        _wanted = before
