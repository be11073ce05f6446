"""Per-shard gradients are recoverable, however the model uses a variable."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, reference
from tests.optimizers.sync_replicas.sync_replicas_reference import SyncReplicas
from tests.properties.models import small_models, training, uses
from tests.properties.sync_replicas_schedules import parts

RATE = 0.1
BROKEN = 1
SHARD_SIZES = {"2x2": (2,), "2x2x2": (2, 2), "two axes": (2, 2)}
# As many replicas as 2x2x2 has, on half as many devices.
MESHES = {**harness.MESHES, "two axes": ("a:2;b:2", "outer:a;batch:b", ("outer", "batch"))}
# On two replica axes the sum over the batch may be made in two operations, one axis in each.
ON_TWO_AXES = [
    "-w",
    "w * s",
    "transpose of two",
    "broadcast over the batch",
    "shared",
    "microbatches",
    "pending over two sets of axes",
    "regularizer",
]
# What needs a step of its own.
ALONE = [k for k, m in uses.ALL.items() if m.microbatches > 1 or m.dtype is uses.NARROW]
GROUPS = {
    name: {k: m for k, m in group.items() if k not in ALONE} for name, group in uses.GROUPS.items()
}


def masked_on(mesh):
    """Which replica the mask leaves out: 0 of two and 2 of four."""
    return int(np.prod(SHARD_SIZES[mesh])) - 2


def feeds_for(mesh):
    """Two steps: a mask leaves out a replica, whose data are large; another one's hold NaNs."""
    feeds = small_models.batches(2)
    number, masked = int(np.prod(SHARD_SIZES[mesh])), masked_on(mesh)
    rows = parts(np.arange(len(feeds[0]["x"])), SHARD_SIZES[mesh])
    for feed in feeds:
        feed["contributes"] = np.ones(number, bool)
    feeds[0]["contributes"][masked] = False
    feeds[0]["x"][rows[masked]] *= 2
    feeds[0]["y"][rows[masked]] += 3
    feeds[1]["y"][rows[BROKEN]] = np.nan
    return feeds


# Shard by shard.

NOT_FINITE = 2.0**20


def no_nan(x):
    """NOT_FINITE for what is not: a SIMD mesh gathers by sums, which spread a NaN."""
    good = tf.math.is_finite(x)
    return tf.where_v2(good, x, tf.cast(NOT_FINITE, x.dtype))


def check_shards(kind, mesh, model, eps_of=None):
    """Compares `gs.per_shard` with numpy on two steps; the variables stand still."""
    eps_of = eps_of or (lambda name: model.eps)
    mesh_shape, layout, batch_dims = MESHES[mesh]
    axes = gs.ReplicaAxes(mesh_shape, layout, batch_dims)
    feeds = feeds_for(mesh)

    def build(mesh, inputs):
        grads, variables = training.gradients_on(model, mesh, inputs, batch_dims)
        shards = gs.per_shard(grads, axes)
        return [], {v.name: mtf.cwise(no_nan, [g]) for v, g in zip(variables, shards)}

    result = harness.run(kind, mesh_shape, layout, build, feeds)
    for step, (feed, found) in enumerate(zip(feeds, result.fetched)):
        shards = training.shard_gradients(model, model.values(), feed, SHARD_SIZES[mesh])
        for name in model.variables:
            # The loss is the mean over the shards' losses.
            expected = np.stack([g[name] for g in shards]) / axes.num_shards
            actual = np.reshape(found[name].astype(np.float64), expected.shape)
            whole = [i for i in range(axes.num_shards) if step == 0 or i != BROKEN]
            size = max(1.0, np.max(np.abs(expected[whole])))
            np.testing.assert_allclose(
                actual[whole], expected[whole], atol=16 * eps_of(name) * size, err_msg=name
            )
            if np.any(np.isnan(expected)):
                assert np.any(actual[BROKEN] == NOT_FINITE), name


def together(models):
    """One model of all, and what rounds each of its variables."""
    eps = {f"{number}_": model.eps for number, model in enumerate(models.values())}
    eps_of = lambda name: next(e for k, e in eps.items() if name.startswith(k))  # noqa: E731
    return small_models.together(models), eps_of


@pytest.mark.parametrize(
    ("kind", "group"),
    harness.on_both([(group,) for group in GROUPS], [(group,) for group in list(GROUPS)[::2]]),
)
@pytest.mark.mostly_slow
def test_shards_of_many_uses_are_recoverable(kind, group):
    check_shards(kind, "2x2", *together(GROUPS[group]))


@pytest.mark.parametrize("use", ALONE)
def test_shards_of_a_step_of_its_own_are_recoverable(mesh_kind, use):
    check_shards(mesh_kind, "2x2", uses.ALL[use])


@pytest.mark.slow
def test_shards_of_two_axes_are_recoverable(mesh_kind):
    several = {use: uses.ALL[use] for use in ON_TWO_AXES if use not in ALONE}
    check_shards(mesh_kind, "two axes", *together(several))
    check_shards(mesh_kind, "two axes", uses.ALL["microbatches"])


# Synchronous replicas: what those that contribute make of it.


sgd = reference.Sgd(RATE)


class Expected:
    """Two steps of a model in numpy.

    Attributes:
      states: values after each step.
      atol: for each variable, how far rounding may take the mesh from them: that of the narrowest
        dtype, in numbers as large as the variable and as its gradients times the learning rate.
      replicas: the `SyncReplicas`.
    """

    def __init__(self, model, feeds, mesh, eps_of):
        number = int(np.prod(SHARD_SIZES[mesh]))
        self.replicas = SyncReplicas(sgd, number, number - 1, model.values())
        self.states, self.atol = [], {}
        for feed in feeds:
            before = self.replicas.values
            grads = training.shard_gradients(model, before, feed, SHARD_SIZES[mesh])
            assert self.replicas.step(grads, feed["contributes"])
            self.states.append(dict(self.replicas.values))
            for name, value in before.items():
                change = RATE * np.nanmax(np.abs([g[name] for g in grads]))
                atol = 16 * (
                    eps_of(name) * change + small_models.FLOAT32 * np.max(np.abs(value), initial=1)
                )
                self.atol[name] = max(self.atol.get(name, 0), atol)
            if feed is feeds[0]:
                # Whatever gets by the mask is seen.
                everyone = sgd(before, {k: np.mean([g[k] for g in grads], 0) for k in before})
                for k, v in self.replicas.values.items():
                    depends_on_data = np.any(grads[masked_on(mesh)][k] != grads[BROKEN][k])
                    seen = np.max(np.abs(everyone[k] - v)) > 2 * self.atol[k]
                    assert seen or not depends_on_data, k


def check_replicas(kind, mesh, model, feeds=None, eps_of=None):
    mesh_shape, layout, batch_dims = MESHES[mesh]
    axes = gs.ReplicaAxes(mesh_shape, layout, batch_dims)
    feeds = feeds or feeds_for(mesh)
    expected = Expected(model, feeds, mesh, eps_of or (lambda name: model.eps))

    def apply(grads, variables, inputs):
        opt = gs.SyncReplicasOptimizer(
            mtf.optimize.SgdOptimizer(RATE),
            axes.num_shards - 1,
            axes=axes,
            contributes=inputs["contributes"],
        )
        return opt.apply_grads(grads, variables)

    build = training.step(model, batch_dims, apply)
    result = harness.run(kind, mesh_shape, layout, build, feeds)
    found = [*result.fetched[1:], result.variables]
    wrong = []
    for step, (state, actual) in enumerate(zip(expected.states, found), 1):
        for name, value in state.items():
            off = np.max(np.abs(actual[name].astype(np.float64) - value))
            # What is fetched is rounded to the dtype of the activations.
            rounded = model.eps if model.dtype is uses.NARROW and step < len(found) else 0
            if not off <= expected.atol[name] + 2 * rounded:
                wrong.append(f"{name} is off by {off:.3g} after step {step}")
    assert not wrong
    for name in ("made", "dropped"):
        actual = result.variables[f"sync_replicas/{name}"].reshape(-1)
        np.testing.assert_array_equal(actual, getattr(expected.replicas, name), err_msg=name)


# Shard by shard, all uses were seen on both kinds of mesh: what is made of shards is the same.
@pytest.mark.slow
def test_replicas_that_are_skipped_have_no_part_in_the_update():
    model, eps_of = together(GROUPS["layers"])
    check_replicas("simd", "2x2", model, eps_of=eps_of)


@pytest.mark.parametrize(("kind", "use"), harness.pairs(["simd", "placement"], ALONE))
@pytest.mark.mostly_slow
def test_replicas_that_skip_a_step_of_its_own(kind, use):
    check_replicas(kind, "2x2", uses.ALL[use])


@pytest.mark.slow
def test_replicas_of_two_axes_that_are_skipped():
    model, eps_of = together({use: uses.ALL[use] for use in ON_TWO_AXES[:4]})
    check_replicas("simd", "2x2x2", model, eps_of=eps_of)


# Mesh-TF adds a sum of gradients, made tiny, to the explicit inputs: recomputation then waits for
# them. A NaN of one replica would be in that sum, and reach them all.


def recomputed(explicit):
    def loss(m, v, d):
        tensors = {**v, "x": d["x"]}

        def layer(*some):
            now = {**tensors, **dict(zip(explicit, some))}
            u = m.tanh(now["w"]) * m.square(now["w"])
            return small_models.predict(m, u, {**d, "x": now["x"]})

        h = m.recompute_grad(layer, [tensors[name] for name in explicit])
        return small_models.squared_error(m, h, d["y"])

    return small_models.Model({"w": uses.W}, loss)


@pytest.mark.parametrize("explicit", [["x"], ["w", "x"]])
@pytest.mark.mostly_slow
def test_recomputation_after_its_gradients(mesh_kind, explicit):
    check_replicas(mesh_kind, "2x2", recomputed(explicit))


def test_recomputation_of_a_variable_alone_mixes_replicas_into_it():
    with pytest.raises(ValueError, match="'w'"):
        check_replicas("placement", "2x2", recomputed(["w"]), feeds_for("2x2")[:1])
