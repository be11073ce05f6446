"""One wrapper over the variables of several meshes, against numpy in float64."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models, reference
from tests.wrappers import KINDS, wrap

# The batch is split on the first mesh, on the second under another name, and a layer with it.
FIRST = "all:4", "batch:all;hidden:all"
SECOND = "rows:2;cols:2", "examples:rows;hidden:cols"
ROWS, STEPS, RATE, NORM = 4, 4, 0.5, 0.1
BATCH, D = mtf.Dimension("batch", ROWS), mtf.Dimension("d", 3)
EXAMPLES, INNER = mtf.Dimension("examples", ROWS), mtf.Dimension("inner", 4)
HIDDEN = mtf.Dimension("hidden", 2)
START = {
    "one": np.random.RandomState(1).uniform(-1, 1, (3, 4)).astype("f"),
    "two": np.random.RandomState(2).uniform(-1, 1, (4, 2)).astype("f"),
}
# Some dozen roundings of float32 a step.
CLOSE = {"rtol": STEPS * 2.0**-20, "atol": STEPS * 2.0**-22}


class Move(mtf.Operation):
    """An operation of a program's own: a tensor on another mesh, under other names."""

    def __init__(self, x, mesh, shape):
        super().__init__([x], mesh=mesh, name="move")
        self._outputs = [mtf.Tensor(self, shape, x.dtype)]

    def gradient(self, grad_ys):
        (x,) = self.inputs
        return Move(grad_ys[0], x.mesh, x.shape).outputs

    def lower(self, lowering):
        (x,), (result,) = self.inputs, self.outputs
        old, new = lowering.mesh_impl(x), lowering.mesh_impl(self)
        value = lowering.tensors[x].to_laid_out_tensor()
        for number, axis in enumerate(old.tensor_layout(x.shape)):
            value = value if axis is None else old.allconcat(value, axis, number)
        slices = list(value.tensor_list)
        count = len(getattr(new, "devices", slices[:1]))
        value = new.LaidOutTensor([slices[number % len(slices)] for number in range(count)])
        for number, axis in enumerate(new.tensor_layout(result.shape)):
            value = value if axis is None else new.allsplit(value, axis, number)
        lowering.set_tensor_lowering(result, value)


def feeds(bad=()):
    """`push` is added to the gradient of the second mesh's variable alone."""
    rng = np.random.RandomState(0)
    given = []
    for number in range(STEPS):
        push = np.full((4, 2), np.nan if number in bad else 0.1, "f")
        given.append({"x": rng.randn(ROWS, 3).astype("f"), "push": push})
    return given


def model(first, second, inputs):
    def weight(mesh, name, *dims):
        return models.variable(mesh, name, dims, START[name])

    x = mtf.import_tf_tensor(first, inputs["x"], mtf.Shape([BATCH, D]))
    h = mtf.tanh(mtf.einsum([x, weight(first, "one", D, INNER)], mtf.Shape([BATCH, INNER])))
    h = Move(h, second, mtf.Shape([EXAMPLES, INNER])).outputs[0]
    two = weight(second, "two", INNER, HIDDEN)
    out = mtf.einsum([h, two], mtf.Shape([EXAMPLES, HIDDEN]))
    push = mtf.import_tf_tensor(second, inputs["push"], two.shape)
    return mtf.reduce_mean(mtf.square(out)) + mtf.reduce_sum(push * two)


def gradients(values, feed):
    x, push = feed["x"].astype(float), feed["push"].astype(float)
    h = np.tanh(x @ values["one"])
    d_out = 2 * (h @ values["two"]) / (ROWS * 2)
    d_h = d_out @ values["two"].T * (1 - h**2)
    return {"one": x.T @ d_h, "two": h.T @ d_out + push}


def sgd_by_hand():
    return reference.Sgd(RATE)


def adam_by_hand():
    """TensorFlow's, which puts its correction of the averages' bias into the rate."""
    return reference.Adam(
        lambda step: RATE * np.sqrt(1 - 0.75 ** (step + 1)) / (1 - 0.5 ** (step + 1)),
        decay=0.0,
        betas=(0.5, 0.75),
        epsilon=0.1,
    )


def trained(given, update, passes=1, clips=False):
    """Values after each step, norms, and averages with a decay of one half."""
    values = {k: v.astype(float) for k, v in START.items()}
    update = reference.Clipped(update, NORM) if clips else update
    step = reference.Accumulation(
        update, passes, True, lambda grads: not reference.is_finite(grads)
    )
    averages, history = dict(values), []
    for feed in given:
        updates = step.update_step
        values = step(values, gradients(values, feed))
        if step.update_step > updates:
            averages = {k: (averages[k] + v) / 2 for k, v in values.items()}
        history.append(values)
    return history, averages


def sgd():
    return mtf.optimize.SgdOptimizer(RATE)


def adam():
    return gs.MeshOptimizer(tf.train.AdamOptimizer(RATE, 0.5, 0.75, 0.1))


def accumulated(opt, **how):
    return gs.GradientAccumulationOptimizer(opt, 2, True, **how)


# How to wrap, and what happens to the gradients; steps 1 or 2 have a NaN on the second mesh alone.
STACKS = {
    "cross_shard": (lambda: gs.CrossShardOptimizer(adam()), adam_by_hand, {}, ()),
    "clip": (lambda: gs.ClipByGlobalNormOptimizer(sgd(), NORM), sgd_by_hand, {"clips": True}, ()),
    "loss_scale": (
        lambda: gs.LossScaleOptimizer(
            gs.ClipByGlobalNormOptimizer(sgd(), NORM), max_steps_without_update=1
        ),
        sgd_by_hand,
        {"clips": True},
        (1,),
    ),
    "accumulation": (
        lambda: gs.AverageOptimizer(
            accumulated(
                gs.ClipByGlobalNormOptimizer(adam(), NORM),
                should_skip_update_fn=gs.skip_not_finite,
                max_steps_without_update=3,
                flush=tf.constant(False),
            ),
            0.5,
        ),
        adam_by_hand,
        {"clips": True, "passes": 2},
        (1, 2),
    ),
}


def build(make, apply=None, fetch=None):
    def made(first, second, inputs):
        loss = model(first, second, inputs)
        optimizer = make()
        operations = apply(optimizer, loss) if apply else optimizer.minimize(loss)
        return operations, {"loss": loss, **(fetch(optimizer) if fetch else {})}

    return made


def run(kind, made, given, second=SECOND):
    return harness.built(kind, *FIRST, made, given[0], more_meshes=[second]).after_each(given)


@pytest.mark.parametrize("stack", list(STACKS))
@pytest.mark.mostly_slow
def test_training_is_that_of_one_device(stack, mesh_kind, caplog, capfd):
    make, update, how, bad = STACKS[stack]
    given = feeds(bad)
    found = run(mesh_kind, build(make), given)
    history, averages = trained(given, update(), **how)
    for values, expected in zip(found, history):
        reference.assert_close(values, expected, **CLOSE)
    if stack == "accumulation":
        for name, value in averages.items():
            average = found[-1][f"{name}/ExponentialMovingAverage"]
            np.testing.assert_allclose(average, value, err_msg=name, **CLOSE)
        assert found[-1]["GradientAccumulationOptimizer/skipped"] == 2
    if stack == "loss_scale":
        assert found[-1]["LossScaleOptimizer/skipped"] == 1
        assert found[-1]["LossScaleOptimizer/scale"] == 2.0**14
    assert "differ after an update" not in caplog.text
    told = [record.getMessage() for record in caplog.records] + capfd.readouterr().err.splitlines()
    skipped = [line for line in told if "step skipped" in line]
    assert len(skipped) == len(bad)
    assert all("not finite: two (shard unknown)." in line for line in skipped)


NEVER = {
    "LossScaleOptimizer": lambda limit: gs.LossScaleOptimizer(
        sgd(), max_steps_without_update=limit
    ),
    "GradientAccumulationOptimizer": lambda limit: accumulated(
        sgd(), should_skip_update_fn=gs.skip_not_finite, max_steps_without_update=limit
    ),
}


@pytest.mark.parametrize("name", list(NEVER))
@pytest.mark.mostly_slow
def test_steps_without_an_update_end_the_training(name, mesh_kind):
    given = feeds(range(STEPS))
    with pytest.raises((gs.NoUpdateError, tf.errors.InvalidArgumentError)) as raised:
        run(mesh_kind, build(lambda: NEVER[name](2)), given)
    assert f"{name}: no update for more than max_steps_without_update=2" in str(raised.value)
    assert "skipped: two (shard unknown)." in str(raised.value)


def by_pairs(optimizer, loss):
    grads, variables = models.gradients(loss)
    return [op for g, v in zip(grads, variables) for op in optimizer.apply_grad(g, v)]


def counted(optimizer, loss):
    """The counters are on the second mesh."""
    counter = models.variable(loss.mesh, "count", [], dtype=tf.int32, trainable=False)
    assert gs.get_update_step(loss.mesh).mesh is loss.mesh
    return optimizer.minimize(loss, counter.operation)


def halves():
    return accumulated(gs.ClipByGlobalNormOptimizer(sgd(), NORM))


@pytest.mark.parametrize(
    ("mesh_kind", "apply"),
    [("placement", by_pairs), ("simd", counted)],
    indirect=["mesh_kind"],
)
def test_norms_and_counts_are_those_of_all(apply, mesh_kind):
    given = feeds()
    made = build(halves, apply, lambda optimizer: dict(gs.reported(optimizer)))
    built = harness.built(mesh_kind, *FIRST, made, given[0], more_meshes=[SECOND])
    result = built.run(given)
    history, _ = trained(given, sgd_by_hand(), passes=2, clips=True)
    start = {k: v.astype(float) for k, v in START.items()}
    one, two = (gradients(start, feed) for feed in given[:2])
    reported = result.fetched[1]
    norm = reference.norm({k: (one[k] + two[k]) / 2 for k in one})
    np.testing.assert_allclose(reported["gradient_norm/before_clipping"], norm, rtol=2.0**-20)
    np.testing.assert_allclose(reported["gradient_norm/applied"], NORM, rtol=2.0**-20)
    assert [step["update_step"] for step in result.fetched] == [0, 1, 1, 2]
    reference.assert_close(result.variables, history[-1], **CLOSE)
    if apply is counted:
        assert result.variables["count"] == STEPS
    assert mesh_kind == "simd" or not built.races()


def by_stages(optimizer, loss):
    """Without a wrapper: sums, a clip and assignments."""
    variables = loss.graph.trainable_variables
    grads = gs.sum_shards(mtf.gradients([loss], [v.value for v in variables]))
    clipped, norm = gs.clip_by_global_norm(grads, NORM)
    assert [g.mesh for g in clipped] == [v.mesh for v in variables]
    assert norm.mesh is variables[0].mesh
    return optimizer.apply_grads(clipped, variables)


@pytest.mark.parametrize("second", [SECOND, ("cols:2", "hidden:cols")])
def test_the_stages_without_a_wrapper(second, mesh_kind):
    if mesh_kind == "simd" and second != SECOND:
        pytest.skip("the meshes of a SIMD program have all of its cores")
    given = feeds()
    found = run(mesh_kind, build(sgd, by_stages), given, second)
    history, _ = trained(given, sgd_by_hand(), clips=True)
    reference.assert_close(found[-1], history[-1], **CLOSE)


def local_on_each(optimizer, loss):
    """One wrapper for the variables of each mesh, which is given its axes."""
    del optimizer
    grads, variables = models.gradients(loss)
    operations = []
    for grad, variable, mesh, dim in zip(grads, variables, (FIRST, SECOND), ("batch", "examples")):
        axes = gs.ReplicaAxes(*mesh, (dim,))
        wrapper = accumulated(sgd(), axes=axes, name=variable.name)
        operations += wrapper.apply_grads([grad], [variable])
    return operations


def test_a_wrapper_for_each_mesh_knows_its_shards(mesh_kind):
    given = feeds()
    found = run(mesh_kind, build(lambda: None, local_on_each), given)
    history, _ = trained(given, sgd_by_hand(), 2)
    for values, expected in zip(found, history):
        reference.assert_close(values, expected, **CLOSE)
    assert found[-1]["one/gradient_accumulator"].shape == (4, 3, 4)
    assert found[-1]["two/gradient_accumulator"].shape == (2, 4, 2)


def test_the_shards_of_one_mesh_cannot_be_told_from_a_sum_over_those_of_another():
    graph = mtf.Graph()
    first, second = mtf.Mesh(graph, "first"), mtf.Mesh(graph, "second")
    w = mtf.get_variable(first, "w", mtf.Shape([D]), initializer=tf.ones_initializer())
    x = mtf.import_tf_tensor(second, tf.ones([ROWS, 3]), mtf.Shape([EXAMPLES, D]))
    loss = mtf.reduce_sum(x * Move(w, second, w.shape).outputs[0])
    with pytest.raises(ValueError, match=r"(?s)not recoverable.*Move 'move"):
        gs.per_shard(mtf.gradients([loss], [w]), AXES)


@pytest.mark.mostly_slow
def test_weights_are_those_of_the_loss_of_all_meshes(mesh_kind):
    """Mean over four steps of which the last has no data, in two updates."""
    given, weights = feeds(), [1.0, 3.0, 5.0, 0.0]
    for feed, weight in zip(given, weights):
        feed["weight"] = np.float32(weight)

    def made(first, second, inputs):
        loss = model(first, second, inputs)
        weight = mtf.import_tf_tensor(second, inputs["weight"], mtf.Shape([]))
        optimizer = gs.ClipByGlobalNormOptimizer(sgd(), NORM)
        return accumulated(optimizer).minimize(loss, weights=weight), {"loss": loss}

    found = run(mesh_kind, made, given)
    values = {k: v.astype(float) for k, v in START.items()}
    for number in (0, 2):
        parts = [(n, gradients(values, x)) for n, x in zip(weights[number:], given[number:][:2])]
        total = sum(n for n, _ in parts)
        grads = {k: sum(n * g[k] for n, g in parts) / total for k in values}
        values = sgd_by_hand()(values, reference.clipped(grads, NORM))
        reference.assert_close(found[number + 1], values, **CLOSE)


def test_no_word_on_replicas_that_differ_where_a_tensor_goes_to_another_mesh(mesh_kind, caplog):
    """The batch is split on the first mesh alone."""
    given = feeds()
    found = run(
        mesh_kind, build(lambda: gs.CrossShardOptimizer(sgd())), given, ("r:2;c:2", "hidden:c")
    )
    history, _ = trained(given, sgd_by_hand())
    reference.assert_close(found[-1], history[-1], **CLOSE)
    assert "differ after an update" not in caplog.text


AXES = gs.ReplicaAxes(*FIRST)
# What its error names.
NEEDS_ONE = [
    *((name, k.name) for name, k in KINDS.items() if k.needs_mesh and "accumulate" not in k.given),
    ("local", "accumulate='synced'"),
    ("sharded sums", "accumulate='synced'"),
    ("cross_shard", "LowRankAllReduce"),
]


@pytest.mark.parametrize(("wrapper", "words"), NEEDS_ONE)
def test_what_needs_one_mesh_says_what_would_do(wrapper, words):
    graph = mtf.Graph()
    meshes = [mtf.Mesh(graph, name) for name in ("first", "second")]
    inputs = {name: tf.constant(value) for name, value in feeds()[0].items()}
    loss = model(*meshes, inputs)
    grads, variables = models.gradients(loss)
    before = list(graph.operations), list(graph.all_variables)
    given = {"reducer": gs.LowRankAllReduce()} if words == "LowRankAllReduce" else {}
    optimizer = wrap(wrapper, sgd(), {"axes": AXES}, **given)
    with pytest.raises(ValueError, match=r"'one'.*'two'.* on different meshes") as found:
        optimizer.apply_grads(grads, variables)
    assert words in str(found.value)
    assert before == (graph.operations, graph.all_variables)


@pytest.mark.parametrize(
    "stage", [gs.per_shard, lambda g, axes: gs.clip_by_shard_norm(g, 1.0, axes)]
)
def test_stages_by_shard_need_one_mesh(stage):
    graph = mtf.Graph()
    grads = [mtf.ones(mtf.Mesh(graph, name), mtf.Shape([D])) for name in ("first", "second")]
    with pytest.raises(ValueError, match="shards are of one mesh"):
        stage(grads, AXES)
