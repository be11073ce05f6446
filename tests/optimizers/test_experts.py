"""Variables that the layout splits over the batch's own axis, where shards are skipped.

Each of these variables is a slice for each shard, whose gradient is made of all shards' examples.
What a skipped shard has must not be in it. Everything is compared with numpy in float64.
"""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models, reference
from tests.programs import mixture

KINDS = ["shared", "placement", "simd"]
LAYOUT = "batch:batch;experts:batch"
MESHES = {"one axis": "batch:2", "a second axis": "model:2;batch:2"}
ROWS, D, EXPERTS, RATE, PENALTY = 4, 3, 2, 0.01, 0.25
SESSIONS = 6


def sgd(rate=RATE):
    return mtf.optimize.SgdOptimizer(rate)


def train(kind, mesh, build, feeds):
    """Variables after each step, in each session."""
    made = harness.built(kind, MESHES[mesh], LAYOUT, build, feeds[0], autostack=False)
    assert not made.races()
    sessions = SESSIONS if (kind, mesh) == ("shared", "a second axis") else 1
    return [made.after_each(feeds) for _ in range(sessions)]


@pytest.mark.parametrize(
    ("kind", "mesh", "by_factors"),
    [*((kind, mesh, False) for kind in KINDS for mesh in MESHES), ("simd", "one axis", True)],
)
@pytest.mark.mostly_slow
def test_a_masked_shard_s_examples_reach_no_expert(kind, mesh, by_factors):
    """An input that is split as experts are, a factor for each of them, is no shard's data."""

    def build(of, inputs):
        batch, experts = mtf.Dimension("batch", 2), mtf.Dimension("experts", 2)
        x = mtf.import_tf_tensor(of, inputs["x"], mtf.Shape([batch]))
        w = mtf.get_variable(of, "w", mtf.Shape([experts]), initializer=tf.zeros_initializer())
        ones = mtf.import_tf_tensor(of, tf.ones([2]), mtf.Shape([experts]))
        factors = w * ones if by_factors else w
        loss = mtf.reduce_mean(x * mtf.reduce_sum(factors))
        opt = gs.SyncReplicasOptimizer(
            sgd(1.0), 1, contributes=inputs["ok"], mesh_shape=MESHES[mesh], layout=LAYOUT
        )
        return opt.minimize(loss, tf.train.get_or_create_global_step()), {}

    feeds = [
        {"x": np.array(x, "f"), "ok": np.array(ok)}
        for x, ok in (
            ([1, 5], [True, False]),
            ([1, 1], [True, True]),
            ([np.nan, 3], [True, True]),
            ([np.nan, np.nan], [True, True]),
            ([np.inf, 2], [False, True]),
        )
    ]
    for after in train(kind, mesh, build, feeds):
        assert [values["w"].tolist() for values in after] == [[-v, -v] for v in (1, 2, 5, 5, 7)]


START = {
    "w": np.random.RandomState(0).randn(EXPERTS, D),
    "v": np.random.RandomState(1).randn(EXPERTS),
    "q": np.random.RandomState(2).randn(D),
}


def squared_error(of, inputs):
    """Experts by whose sum each shard multiplies its examples, with a penalty on their weights."""
    batch, d = mtf.Dimension("batch", ROWS), mtf.Dimension("d", D)
    experts = mtf.Dimension("experts", EXPERTS)
    dims = {"w": [experts, d], "v": [experts], "q": [d]}
    w, v, q = (
        mtf.get_variable(of, k, mtf.Shape(dims[k]), initializer=tf.constant_initializer(START[k]))
        for k in START
    )
    x = mtf.import_tf_tensor(of, inputs["x"], mtf.Shape([batch, d]))
    y = mtf.import_tf_tensor(of, inputs["y"], mtf.Shape([batch]))
    made = mtf.einsum([x, mtf.einsum([w, v], [d]) + q], [batch])
    return mtf.reduce_mean(mtf.square(made - y)) + PENALTY * mtf.reduce_sum(mtf.square(w))


def gradients_of(values, x, y):
    """The gradients of that loss by hand, of some examples."""
    w, v, q = (values[k] for k in START)
    of_sum = 2 * ((x @ (v @ w + q)) - y) @ x / len(x)
    return {"w": np.outer(v, of_sum) + 2 * PENALTY * w, "v": w @ of_sum, "q": of_sum}


def feeds_of(number):
    rng = np.random.RandomState(3)
    return [
        {"x": rng.randn(ROWS, D).astype("f"), "y": rng.randn(ROWS).astype("f")}
        for _ in range(number)
    ]


def shards_of(values, feed):
    parts = zip(*(np.split(feed[k].astype(float), 2) for k in ("x", "y")))
    return [gradients_of(values, x, y) for x, y in parts]


@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("to_aggregate", [1, 3])
@pytest.mark.mostly_slow
def test_sync_replicas_averages_the_gradients_of_those_that_contribute(kind, mesh, to_aggregate):
    def build(of, inputs):
        opt = gs.SyncReplicasOptimizer(
            sgd(), to_aggregate, contributes=inputs["ok"], mesh_shape=MESHES[mesh], layout=LAYOUT
        )
        step = tf.train.get_or_create_global_step()
        return opt.minimize(squared_error(of, inputs), step), {}

    masks = [[1, 1], [1, 0], [0, 1], [1, 1], [0, 0], [1, 1]]
    feeds = [{**f, "ok": np.array(m, bool)} for f, m in zip(feeds_of(len(masks)), masks)]
    feeds[2]["x"][0, 0] = np.inf  # of the masked one
    feeds[3]["y"][3] = np.nan  # which is skipped
    values, waiting = START, []
    for feed in feeds:
        with np.errstate(invalid="ignore"):
            found = shards_of(values, feed)
        fresh = [reference.is_finite(one) for one in found]
        waiting += [one for one, ok, may in zip(found, feed["ok"], fresh) if ok and may]
        if len(waiting) >= to_aggregate:
            mean = {k: np.mean([one[k] for one in waiting], 0) for k in values}
            values, waiting = {k: v - RATE * mean[k] for k, v in values.items()}, []
    for after in train(kind, mesh, build, feeds):
        # Some thirty roundings a step, of numbers of a few units.
        reference.assert_close(after[-1], values, atol=200 * 2.0**-23)


@pytest.mark.mostly_slow
def test_activations_in_bfloat16_and_a_penalty(mesh_kind):
    """Sums and penalty are joined in the dtype in which the model computes gradients."""

    def build(of, inputs):
        batch, d = mtf.Dimension("batch", 2), mtf.Dimension("d", D)
        experts = mtf.Dimension("experts", EXPERTS)
        narrow = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)
        ones = tf.ones_initializer()
        w = mtf.get_variable(of, "w", mtf.Shape([experts, d]), narrow, initializer=ones)
        x = mtf.import_tf_tensor(of, inputs["x"], mtf.Shape([batch, d]))
        loss = mtf.reduce_mean(mtf.cast(x, tf.bfloat16) * mtf.reduce_sum(w, reduced_dim=experts))
        loss += mtf.reduce_sum(mtf.square(w)) * PENALTY
        opt = gs.SyncReplicasOptimizer(
            sgd(0.5), 1, contributes=inputs["ok"], mesh_shape=MESHES["one axis"], layout=LAYOUT
        )
        return opt.minimize(loss, tf.train.get_or_create_global_step()), {}

    x, value = np.array([[1, 2, 3], [4, 5, 6]], "f"), np.ones(D)
    masks = [[True, True], [True, False]]
    feeds = [{"x": x, "ok": np.array(mask)} for mask in masks]
    for mask in masks:
        value = value - 0.5 * (x[mask].mean(0) / D + 2 * PENALTY * value)
    found = harness.run(mesh_kind, MESHES["one axis"], LAYOUT, build, feeds).variables["w"]
    # Two steps with some four roundings to bfloat16, of numbers up to 2.
    np.testing.assert_allclose(found, [value] * EXPERTS, rtol=0, atol=8 * 2.0**-8)


MIXTURE = "rows:2;cols:2", mixture.STYLE.layout
AXES = gs.ReplicaAxes(*MIXTURE)
# What skips a shard, or treats each shard by itself.
NEED_SHARDS = {
    "replicas": lambda grads, variables: gs.SyncReplicasOptimizer(
        sgd(), 1, contributes=[True, False], axes=AXES
    ).apply_grads(grads, variables),
    "scaled replicas": lambda grads, variables: gs.LossScaleOptimizer(
        gs.SyncReplicasOptimizer(sgd(), 1, axes=AXES)
    ).apply_grads(grads, variables),
    "islands": lambda grads, variables: gs.OuterOptimizer(
        sgd(), 2, leave_out_not_finite=True, mesh_shape=MIXTURE[0], layout=MIXTURE[1]
    ).apply_grads(grads, variables),
    "shards": lambda grads, variables: gs.per_shard(grads, AXES),
    "clipping": lambda grads, variables: gs.clip_by_shard_norm(grads, 1.0, AXES),
}


@pytest.mark.parametrize("what", list(NEED_SHARDS))
def test_experts_that_get_the_examples_of_all_shards_are_refused(what):
    """After an exchange of examples nobody can tell which shard's data a gradient is of."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    with tf.Graph().as_default():
        inputs = {k: tf.constant(v) for k, v in mixture.feed(np.random.RandomState(0)).items()}
        loss = mtf.reduce_mean(mixture.loss(mesh, inputs))
        grads, variables = models.gradients(loss)
        with harness.unchanged(mesh.graph), pytest.raises(ValueError, match="'experts_in'"):
            NEED_SHARDS[what](grads, variables)


def own_experts(of, inputs):
    """Each shard's examples meet the shard's own expert: nothing is exchanged."""
    batch, d = mtf.Dimension("batch", ROWS), mtf.Dimension("d", D)
    experts, each = mtf.Dimension("experts", EXPERTS), mtf.Dimension("each", ROWS // EXPERTS)
    w, q = (
        mtf.get_variable(of, k, mtf.Shape(dims), initializer=tf.constant_initializer(START[k]))
        for k, dims in (("w", [experts, d]), ("q", [d]))
    )
    x = mtf.import_tf_tensor(of, inputs["x"], mtf.Shape([batch, d]))
    y = mtf.import_tf_tensor(of, inputs["y"], mtf.Shape([batch]))
    at_experts = mtf.reshape(x, mtf.Shape([experts, each, d]))
    made = mtf.reshape(mtf.reduce_sum(at_experts * w, reduced_dim=d), mtf.Shape([batch]))
    made += mtf.einsum([x, q], [batch])
    return mtf.reduce_mean(mtf.square(made - y))


@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_norms_of_shards_are_of_each_shard_s_own_term(kind):
    def build(of, inputs):
        opt = gs.CrossShardOptimizer(sgd(), mesh_shape=MESHES["one axis"], layout=LAYOUT)
        opt.minimize(own_experts(of, inputs))
        return [], {"norms": gs.reported(opt)["gradient_norm/of_shards"]}

    (feed,) = feeds_of(1)
    made = harness.built(kind, MESHES["one axis"], LAYOUT, build, feed)
    (found,) = made.run([feed]).fetched
    expected = []
    for number, (x, y) in enumerate(zip(*(np.split(feed[k].astype(float), 2) for k in ("x", "y")))):
        term = 2 * (x @ (START["w"][number] + START["q"]) - y) @ x / ROWS
        expected.append(np.sqrt(2) * np.linalg.norm(term))  # of its expert, and of q
    np.testing.assert_allclose(found["norms"], expected, rtol=32 * 2**-24)


@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_norms_of_shards_are_of_their_terms_of_the_sums_that_gradients_are_made_of(kind, mesh):
    def build(of, inputs):
        opt = gs.CrossShardOptimizer(sgd(), mesh_shape=MESHES[mesh], layout=LAYOUT)
        opt.minimize(squared_error(of, inputs))
        return [], {"norms": gs.reported(opt)["gradient_norm/of_shards"]}

    (feed,) = feeds_of(1)
    (found,) = harness.built(kind, MESHES[mesh], LAYOUT, build, feed).run([feed]).fetched
    terms = [{k: g / 2 for k, g in one.items()} for one in shards_of(START, feed)]
    expected = [reference.norm(one) for one in terms]
    np.testing.assert_allclose(found["norms"], expected, rtol=32 * 2**-24)


def exchanged(of, inputs):
    return mtf.reduce_mean(mixture.loss(of, inputs))


def gathered(of, inputs):
    """As data parallel variables that are split over the batch's axis: terms as large as they."""
    batch, d = mtf.Dimension("batch", ROWS), mtf.Dimension("experts", EXPERTS)
    whole = mtf.Dimension("whole", EXPERTS)
    x = mtf.import_tf_tensor(of, inputs["x"][:, :EXPERTS], mtf.Shape([batch, whole]))
    w = mtf.get_variable(of, "w", mtf.Shape([d]), initializer=tf.zeros_initializer())
    return mtf.reduce_mean(mtf.einsum([x, mtf.reshape(w, mtf.Shape([whole]))], [batch]))


@pytest.mark.parametrize("loss", [gathered, exchanged])
@pytest.mark.parametrize("make", [gs.CrossShardOptimizer, gs.LossScaleOptimizer])
def test_norms_of_shards_that_nobody_knows_or_that_cost_too_much_are_told_of_in_the_log(
    loss, make, caplog
):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    where = MESHES["one axis"], LAYOUT
    given = feeds_of(1)[0]
    if loss is exchanged:
        where, given = MIXTURE, mixture.feed(np.random.RandomState(0))
    with tf.Graph().as_default():
        opt = make(sgd(), axes=gs.ReplicaAxes(*where))
        opt.minimize(loss(mesh, {k: tf.constant(v) for k, v in given.items()}))
        found = gs.reported(opt)
    assert "gradient_norm/applied" in found
    assert "gradient_norm/of_shards" not in found
    (line,) = [x.getMessage() for x in caplog.records if "Norms of shards" in x.getMessage()]
    assert "are not reported" in line
    assert "'w'" in line or "experts_in" in line
