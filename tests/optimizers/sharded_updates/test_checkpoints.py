"""Sharded and unsharded runs continue each other, on other meshes and other runtimes."""

import functools

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import tf
from tests import sessions
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


# On a placement mesh by a plain saver.
session_of = functools.partial(sessions.session_of, make_saver=tf.train.Saver)


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
