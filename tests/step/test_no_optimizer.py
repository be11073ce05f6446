"""A program without an optimizer: gradients by a loop of its own, updates by assignment."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import reduce
from mtf_gradsync._private.libraries import mtf
from tests import documents, harness, models, reference

SHAPE, LAYOUT, _ = harness.MESHES["2x2"]
EVERY, RATES = 2, (0.3, 0.1, 0.2, 0.05)
# As for CrossShardOptimizer's trajectories.
TOLERANCE = len(RATES) * 16 * np.finfo(np.float32).eps


class Counted(reduce.Strategy):
    """Notes the tensors of each call."""

    def __init__(self):
        self.inner, self.calls = gs.FusedAllReduce(), []

    def all_reduce(self, mesh_impl, values, groups):
        self.calls.append((groups.mesh_axes, len(values)))
        return self.inner.all_reduce(mesh_impl, values, groups)


@pytest.fixture(scope="module")
def names():
    return documents.run("docs/guides/no_optimizer.md")


def feeds():
    return [{**f, "rate": np.float32(r)} for f, r in zip(models.mlp_batches(len(RATES)), RATES)]


def build(names):
    def made(mesh, inputs):
        loss = models.mlp_loss(mesh, inputs)
        rate = mtf.import_tf_tensor(mesh, inputs["rate"], mtf.Shape([]))
        # Read by nothing that a gradient needs.
        norm = mtf.add_n(
            [mtf.reduce_sum(mtf.square(v.value)) for v in mesh.graph.trainable_variables]
        )
        return names["train_step"](loss, rate, EVERY), {"loss": loss, "norm": norm}

    return made


def expected():
    """Losses, norms of the weights and variables, in float64."""
    values = {k: np.asarray(v, np.float64) for k, v in models.mlp_values().items()}
    total, fetched = dict.fromkeys(values, 0.0), []
    for number, feed in enumerate(feeds(), 1):
        x, y = (feed[k].astype(np.float64) for k in "xy")
        h = np.tanh(x @ values["w1"] + values["b1"])
        out = h @ values["w1"].T * values["scale"]
        norm = sum(np.square(v).sum() for v in values.values())
        fetched.append({"loss": np.mean(np.square(out - y)), "norm": norm})
        grads = reference.mlp_grads(values, x, y)
        total = {k: total[k] + grads[k] for k in values}
        if number % EVERY == 0:
            values = {k: values[k] - float(feed["rate"]) * total[k] for k in values}
            total = dict.fromkeys(values, 0.0)
    return fetched, values


CASES = [(kind, autostack) for kind in ("placement", "simd") for autostack in (True, False)]
CASES.append(pytest.param("xla", True, marks=pytest.mark.xla))


@pytest.mark.parametrize(("kind", "autostack"), CASES)
@pytest.mark.mostly_slow
def test_it_trains_as_numpy_does_in_one_group_of_sums(kind, autostack, names, monkeypatch):
    counted = Counted()
    monkeypatch.setattr("mtf_gradsync.gradients.shards.FusedAllReduce", lambda: counted)
    made = harness.built(kind, SHAPE, LAYOUT, build(names), feeds()[0], autostack)
    assert counted.calls == [((0,), 3)]  # all three gradients, over the axis of the batch
    assert not made.races()
    results = made.runs(feeds(), 2) if kind == "placement" else [made.run(feeds())]
    steps, variables = expected()
    for result in results:
        for got, want in zip(result.fetched, steps):
            reference.assert_close(got, want, TOLERANCE, 0)
        for name, value in variables.items():
            got = result.variables[name]
            np.testing.assert_allclose(got, value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
            assert got.tobytes() == results[0].variables[name].tobytes()


def test_without_the_line_writes_race(names):
    bare = {**names, "gs": type("None", (), {"sum_shards": staticmethod(list)})}
    step = type(names["train_step"])(names["train_step"].__code__, bare)
    made = harness.built(
        "placement", SHAPE, LAYOUT, build({"train_step": step}), feeds()[0], False, may_race=True
    )
    assert made.races()


def test_a_write_before_the_sums_waits_for_the_reads():
    def build(mesh, inputs):
        loss = models.mlp_loss(mesh, inputs)
        seen = mtf.get_variable(mesh, "seen", mtf.Shape([]), trainable=False)
        early = mtf.assign(seen, seen * 0.9 + loss)
        variables = mesh.graph.trainable_variables
        grads = gs.sum_shards(mtf.gradients([loss], [v.value for v in variables]))
        updates = [mtf.assign(v, v.value - g * (0.1 + seen)) for g, v in zip(grads, variables)]
        return [early, *updates], {"loss": loss, "seen": seen * 1.0}

    assert not harness.built("placement", SHAPE, LAYOUT, build, feeds()[0], False).races()
