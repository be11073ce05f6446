"""The table of orders: it says what the wrappers do, and the page shows it."""

import importlib.util
import pathlib
import re

import numpy as np
import pytest

from mtf_gradsync._private.libraries import tf
from tests import harness, models

ROOT = pathlib.Path(__file__).resolve().parents[3]
_SPEC = importlib.util.spec_from_file_location("order_table", ROOT / "docs/write_order_table.py")
order_table = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(order_table)
SHAPE, LAYOUT, BATCH_DIMS = order_table.MESH.values()
TABLE = order_table.table()


def test_the_page_is_what_the_wrappers_declare():
    assert (ROOT / "docs" / "order.md").read_text(encoding="utf-8") == order_table.page()


def build(outer, inner):
    make = order_table.WRAPPERS

    def model(mesh, inputs):
        loss = models.mlp_loss(mesh, inputs, BATCH_DIMS)
        opt = make[outer](make[inner](order_table.plain()))
        return opt.minimize(loss, tf.train.get_or_create_global_step()), {"loss": loss}

    return model


@pytest.mark.parametrize(("outer", "inner"), sorted(p for p, why in TABLE.items() if why))
def test_what_the_table_refuses_is_refused_in_its_words(outer, inner):
    make = order_table.WRAPPERS
    one = make[inner](order_table.plain())
    names = {"outer": outer.split(",")[0], "inner": inner.split(",")[0]}
    reason = TABLE[outer, inner].format(**names, or_else=one.traits.or_else)
    with pytest.raises(ValueError, match=re.escape(reason)):
        make[outer](one)


WORKS = sorted(p for p, why in TABLE.items() if not why)


@pytest.mark.parametrize(("outer", "inner"), WORKS)
def test_what_the_table_allows_is_built(outer, inner, mesh_kind):
    (feed,) = models.mlp_batches(1)
    built = harness.built(mesh_kind, SHAPE, LAYOUT, build(outer, inner), feed)
    assert built.updates


PASSES = {"accumulation": 2, "skipping": 2, "synced": 2}


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ("AverageOptimizer", "GradientAccumulationOptimizer, local"),
        ("GradientAccumulationOptimizer, local", "AverageOptimizer"),
        ("LossScaleOptimizer", "AverageOptimizer"),
        ("SyncReplicasOptimizer", "AverageOptimizer"),
        ("AverageOptimizer", "ShardedUpdateOptimizer"),
    ],
)
def test_averages_move_with_each_update_from_the_new_values(outer, inner, mesh_kind):
    """`average -= (1 - decay) * (average - value)`, in float64, from the variables of each step."""
    steps = 4
    feeds = models.mlp_batches(steps)
    built = harness.built(mesh_kind, SHAPE, LAYOUT, build(outer, inner), feeds[0])
    passes = 2 if "Accumulation" in outer + inner else 1
    expected = None
    for count in range(0, steps + 1, passes):
        found = built.run(feeds[:count]).variables if count else models.mlp_values()
        values = {n: np.asarray(found[n], np.float64) for n in models.mlp_values()}
        if expected is None:
            expected = dict(values)
            continue
        for name, value in values.items():
            expected[name] -= 0.1 * (expected[name] - value)
            average = found[f"{name}/ExponentialMovingAverage"]
            # Each of up to four updates rounds a difference, a product and a sum in float32.
            largest = np.abs(expected[name]).max() + 1e-3
            np.testing.assert_allclose(average, expected[name], rtol=0, atol=12 * 2**-24 * largest)
