"""Sessions of all runtimes by one interface."""

import contextlib
import functools

import numpy as np

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import tf

_resharding_saver = functools.partial(gs.ReshardingSaver, max_to_keep=None)


@contextlib.contextmanager
def session_of(made, make_saver=_resharding_saver):
    """One interface for all runtimes: run, save, restore, variables.

    On a placement mesh the saver is that of `make_saver`.
    """
    with made.graph.as_default(), made._session() as session:
        yield session if made.program else _OfPlacement(made, session, make_saver())


class _OfPlacement:
    def __init__(self, made, session, saver):
        self._made, self._session, self._saver = made, session, saver
        self.run = session.run
        session.run(made.init)
        session.run(made.restore)

    def restore(self, path):
        self._saver.restore(self._session, path)
        self._session.run(self._made.restore)

    def variables(self):
        self._session.run(self._made.collect)
        return self._session.run({v.op.name: v for v in tf.global_variables()})

    def save(self, path):
        self._session.run(self._made.collect)
        return self._saver.save(self._session, path, write_meta_graph=False)


def train(made, session, feeds):
    for feed in feeds:
        session.run(made.updates, {made.inputs[name]: x for name, x in feed.items()})


def ran(made, feeds, restore=None, save=None, make_saver=_resharding_saver):
    """Makes steps, perhaps from a checkpoint and to one; returns the variables at the end."""
    with session_of(made, make_saver) as session:
        if restore:
            session.restore(restore)
        train(made, session, feeds)
        if save:
            session.save(str(save))
        return session.variables()


def assert_same_bits(found, expected):
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
