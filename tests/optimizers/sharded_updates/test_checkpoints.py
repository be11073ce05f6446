"""Sharded and unsharded runs continue each other, on other meshes and other runtimes."""

import contextlib

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import tf
from tests.optimizers.sharded_updates import small_model
from tests.optimizers.sharded_updates.small_model import (
    OPTIMIZERS,
    assert_close,
    assert_same_bits,
    batches,
    sharded,
)

# Its factored statistics are the slots that are hardest to split.
OPTIMIZER = "adafactor"
# Means round differently on each mesh: by a few float32 ulp of values around 1 in each step.
ULPS = 16 * np.finfo(np.float32).eps


def built(kind, mesh, is_sharded):
    def make():
        opt = OPTIMIZERS[OPTIMIZER]()
        return sharded(opt, mesh) if is_sharded else gs.CrossShardOptimizer(opt)

    return small_model.built(kind, mesh, make, batches(1)[0], names=small_model.FEW)


class OfPlacement:
    """On a placement mesh, what sessions of SIMD programs have: by a plain saver."""

    def __init__(self, made, session, saver):
        self.made, self.session, self.saver = made, session, saver
        self.run = session.run

    def restore(self, path):
        self.saver.restore(self.session, path)
        self.session.run(self.made.restore)

    def variables(self):
        self.session.run(self.made.collect)
        return self.session.run({v.op.name: v for v in tf.global_variables()})

    def save(self, path):
        self.session.run(self.made.collect)
        return self.saver.save(self.session, path, write_meta_graph=False)


@contextlib.contextmanager
def session_of(made):
    with made.graph.as_default():
        saver = None if made.program else tf.train.Saver()
        with made._session() as session:
            if not made.program:
                session.run(made.init)
                session.run(made.restore)
            yield OfPlacement(made, session, saver) if saver else session


@pytest.mark.slow
@pytest.mark.parametrize(
    "runs",
    [
        [
            ("simd", "2x2x2", True),
            ("placement", "one", False),
            ("own memories", "2x2", True),
            ("simd", "4", False),
        ],
        pytest.param(
            [("xla", "4", True), ("placement", "2x2", False), ("xla", "2x2", True)],
            marks=pytest.mark.xla,
        ),
    ],
    ids=["cpu", "xla"],
)
def test_exactly_what_was_saved_is_restored_and_training_goes_on(
    runs, tmp_path, small_slots_in_parts
):
    path, saved, feeds = None, None, batches(len(runs))
    for number, run in enumerate(runs):
        made = built(*run)
        with session_of(made) as session:
            if path:
                session.restore(path)
                assert_same_bits(session.variables(), saved)
            feed = {made.inputs[name]: value for name, value in feeds[number].items()}
            session.run(made.updates, feed)
            saved = session.variables()
            path = session.save(str(tmp_path / f"step_{number}"))
    expected = small_model.on_one(OPTIMIZER, small_model.FEW).run(feeds).variables
    assert_close(saved, expected, len(runs) * ULPS)
