"""Sessions of all runtimes by one interface."""

import contextlib
import functools

import numpy as np

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import tf

_resharding_saver = functools.partial(gs.ReshardingSaver, max_to_keep=None)


@contextlib.contextmanager
def session_of(made, make_saver=_resharding_saver, first=None):
    """One interface for all runtimes: run, save, restore, variables, read, write.

    On a placement mesh the saver is that of `make_saver`. `first` are values by name that
    variables begin with, as programs give them.
    """
    with made.graph.as_default(), made._session() as session:
        if made.program is None:
            yield _OfPlacement(made, session, make_saver, first or {})
            return
        if first:
            session.write(first)
        yield session


class _OfPlacement:
    def __init__(self, made, session, make_saver, first):
        self._made, self._session, self._make_saver = made, session, make_saver
        self._masters = {v.op.name: v for v in tf.global_variables()}
        self.run = session.run
        session.run(made.init)
        self._set(first)

    @functools.cached_property
    def _saver(self):
        return self._make_saver()

    def restore(self, path):
        self._saver.restore(self._session, path)
        self._session.run(self._made.restore)

    def variables(self):
        self._session.run(self._made.collect)
        return self._session.run(self._masters)

    def read(self, name):
        return self.variables()[name]

    def write(self, values):
        self._session.run(self._made.collect)  # the slices of others are newer than their masters
        self._set(values)

    def _set(self, values):
        """Sets masters, from which slices are then copied."""
        for name, value in values.items():
            # Copies: TensorFlow may keep a slice of what it is fed as a variable, and write to it.
            self._masters[name].load(np.array(value), self._session)
        self._session.run(self._made.restore)

    def save(self, path):
        self._session.run(self._made.collect)
        return self._saver.save(self._session, path, write_meta_graph=False)


def train(made, session, feeds):
    """Makes a step for each feed."""
    for feed in feeds:
        session.run(made.updates, {made.inputs[name]: x for name, x in feed.items()})


def step(made, session, feed):
    """Makes a step; returns the variables after it."""
    train(made, session, [feed])
    return session.variables()


def ran(made, feeds, restore=None, save=None, make_saver=_resharding_saver):
    """Makes steps, perhaps from a checkpoint and to one; returns the variables at the end."""
    with session_of(made, make_saver) as session:
        if restore:
            session.restore(str(restore))
        train(made, session, feeds)
        if save:
            session.save(str(save))
        return session.variables()


def assert_same_bits(found, expected):
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def saved_variables(checkpoint):
    """Values by name of a checkpoint, or of the newest in a directory."""
    reader = tf.train.load_checkpoint(str(checkpoint))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
