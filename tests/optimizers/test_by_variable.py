"""ByVariable against numpy in float64, where each group has an optimizer of its own."""

import copy
import functools
import logging

import gin
import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.runtimes import saving
from mtf_gradsync.runtimes.checkpoints import write_changed
from tests import harness, models, reference, wrappers
from tests.reference import AdamW, Sgd
from tests.sessions import session_of, train

SHAPE, LAYOUT, _ = harness.MESHES["2x2"]
AXES = {"mesh_shape": SHAPE, "layout": LAYOUT}
ADAMW = functools.partial(gs.AdamWOptimizer, learning_rate=0.01, epsilon=1e-3)


class Groups:
    """The reference: each variable is updated by the optimizer of the first pattern in its name."""

    def __init__(self, of):
        self.of = of

    def __call__(self, values, grads):
        made = dict(values)
        for names, update in self.of.items():
            some = {k: v for k, v in values.items() if k in names}
            made.update(update(some, {k: grads[k] for k in some}) if update else {})
        return made


def grouped():
    """The matrix decays and is clipped, its bias is not, and the scalar has another optimizer."""
    return gs.ByVariable(
        ADAMW,
        [
            ("b1", {"weight_decay_rate": 0.0}),
            (lambda variable: not variable.shape.dims, mtf.optimize.SgdOptimizer(0.1)),
            ("w1", {"clip_norm": 0.05}),
        ],
    )


def expected_groups():
    return Groups(
        {
            ("b1",): AdamW(0.01, 0.0, epsilon=1e-3),
            ("scale",): Sgd(0.1),
            ("w1",): reference.Clipped(AdamW(0.01, 0.01, epsilon=1e-3), 0.05),
        }
    )


KINDS = ["placement", "simd", "xla"]


@pytest.mark.parametrize(("kind", "wrapper"), harness.pairs(KINDS, wrappers.ALIKE))
@pytest.mark.mostly_slow(every=5)
def test_in_every_wrapper(kind, wrapper):
    passes = wrappers.passes(wrapper)
    feeds = models.mlp_batches(2 * passes)
    build = models.train(lambda: wrappers.wrap(wrapper, grouped(), AXES))
    values = harness.run(kind, SHAPE, LAYOUT, build, feeds).variables
    update = expected_groups()
    expected = reference.train(reference.Accumulation(update, passes, average=True), feeds)
    assert update.of[("w1",)].clipped == 2
    for name, value in expected.items():
        # A gradient's error of some 1e-7 moves an update by less than 0.01 / 1e-3 times as much.
        np.testing.assert_allclose(values[name], value, rtol=0, atol=2e-6, err_msg=name)
        slots = {key for key in values if key.startswith(f"{name}/adam_")}
        held = "/island" if wrapper == "one island" else ""
        assert (f"{name}/adam_m{held}" in slots) == bool(slots) == (name != "scale")
        if slots:  # one update of each variable counts one, whatever the number of steps
            assert values[f"{name}/adam_t{held}"] == 2
            assert values[f"{name}/adam_m{held}"].shape == value.shape


@pytest.mark.parametrize(
    ("kind", "wrapper"),
    [
        ("placement", "cross_shard"),
        ("simd", "sharded"),
        ("placement", "local(sharded)"),
        ("simd", "local(sharded)"),
        ("simd", "one island"),
    ],
)
@pytest.mark.mostly_slow(keep="simd")
def test_what_stays_as_it_is_has_no_slots_and_is_not_reduced(kind, wrapper):
    passes = wrappers.passes(wrapper)
    feeds = models.mlp_batches(2 * passes)

    def made(groups):
        build = models.train(lambda: wrappers.wrap(wrapper, gs.ByVariable(ADAMW, groups), AXES))
        return harness.built(kind, SHAPE, LAYOUT, build, feeds[0])

    frozen = made([("^b1$", None)])
    values = frozen.run(feeds).variables
    np.testing.assert_array_equal(values["b1"], models.mlp_values()["b1"])
    assert [name for name in values if name.startswith("b1/")] == []
    update = Groups({("b1",): None, ("w1", "scale"): AdamW(0.01, 0.01, epsilon=1e-3)})
    expected = reference.train(reference.Accumulation(update, passes, average=True), feeds)
    reference.assert_close(values, expected, atol=2e-6)
    if kind == "simd":
        sent, all_sent = (
            sum(row.bytes_per_core for row in b.collectives().rows) for b in (frozen, made([]))
        )
        assert sent < all_sent


@pytest.mark.parametrize("minimizes", [True, False])
def test_a_loss_scale_sums_no_gradients_of_what_stays_as_it_is(minimizes):
    def build(mesh, inputs):
        loss = models.mlp_loss(mesh, inputs)
        opt = gs.LossScaleOptimizer(gs.ByVariable(ADAMW, [("w1", None)]))
        if minimizes:
            return opt.minimize(loss), {}
        pairs = opt.compute_gradients(loss)
        assert all(g is not None for g, _ in pairs)
        return opt.apply_gradients(pairs), {}

    built = harness.built("simd", "all:2", "batch:all", build, models.mlp_batches(1)[0])
    shapes = [row.shape for row in built.collectives().rows]
    assert (models.HIDDEN,) in shapes
    assert (models.INPUTS, models.HIDDEN) not in shapes


RATES = {
    "number": lambda mesh: 0.02,
    "tensor": lambda mesh: tf.constant(0.04) * 0.5,
    "variable": lambda mesh: models.variable(mesh, "rate", [], 0.02, trainable=False).operation,
    "schedule": lambda mesh: mtf.rsqrt(mtf.cast(gs.get_update_step(mesh), tf.float32) + 1.0) * 0.02,
}


@pytest.mark.parametrize(("kind", "rate"), harness.pairs(KINDS, RATES))
def test_groups_multiply_one_learning_rate(kind, rate):
    """Of the same optimizer, and of another one, which is one of TensorFlow."""
    sgd = functools.partial(gs.MeshOptimizer, tf.train.GradientDescentOptimizer)
    groups = [
        ("b1", {"learning_rate_factor": 0.1, "weight_decay_rate": 0.0}),
        ("scale", {"optimizer": sgd, "learning_rate_factor": 5}),
    ]

    def build(mesh, inputs):
        given = RATES[rate](mesh)
        adamw = functools.partial(gs.AdamWOptimizer, epsilon=1e-3)
        opt = lambda: gs.CrossShardOptimizer(  # noqa: E731
            gs.ByVariable(adamw, groups, learning_rate=given)
        )
        return models.train(opt)(mesh, inputs)

    def at(factor):
        return lambda t: factor * 0.02 / (t + 1) ** 0.5 if rate == "schedule" else factor * 0.02

    of_groups = Groups(
        {
            ("b1",): AdamW(at(0.1), 0.0, epsilon=1e-3),
            ("scale",): SgdAt(at(5)),
            ("w1",): AdamW(at(1), 0.01, epsilon=1e-3),
        }
    )
    feeds = models.mlp_batches(3)
    values = harness.run(kind, SHAPE, LAYOUT, build, feeds).variables
    reference.assert_close(values, reference.train(of_groups, feeds), atol=4e-6)


class SgdAt:
    """Gradient descent at a rate that depends on the number of earlier updates."""

    def __init__(self, rate):
        self.rate, self.t = rate, 0

    def __call__(self, values, grads):
        self.t += 1
        return Sgd(self.rate(self.t - 1))(values, grads)


def test_a_factor_is_of_the_rate_of_opt_wherever_that_is_given():
    groups = [
        ("a", {"learning_rate_factor": 0.5}),
        ("b", {"learning_rate_factor": 3, "optimizer": gs.MuonOptimizer, "momentum": 0.5}),
        ("c", {"optimizer": gs.MuonOptimizer(0.25), "clip_norm": 1.0}),
    ]
    opt = gs.ByVariable(ADAMW, groups)
    a, b, c, _ = (group.opt for group in opt._all)
    assert (a.learning_rate, a.epsilon) == (0.005, 1e-3)
    assert (type(b), b.learning_rate, b.momentum) == (gs.MuonOptimizer, 0.03, 0.5)
    assert c is groups[2][1]["optimizer"]
    assert [line.what for line in gs.describe(opt).lines] == [
        "update by AdamW, learning_rate_factor 0.5: a",
        "update by Muon, learning_rate_factor 3, momentum 0.5: b",
        "update by Muon, clip_norm 1.0: c",
        "update by AdamW: the others",
    ]
    v1 = functools.partial(gs.MeshOptimizer, tf.train.GradientDescentOptimizer)
    of_function = gs.ByVariable(v1, groups[:1], learning_rate=lambda: 0.5)
    assert of_function._all[0].opt.opt._learning_rate() == 0.25


def test_adafactor_updates_matrices_and_sgd_the_rest(mesh_kind):
    """In parts, of which each replica has one."""

    def make():
        matrices = [(lambda variable: variable.shape.ndims == 2, models.OPTIMIZERS["adafactor"]())]
        opt = gs.ByVariable(mtf.optimize.SgdOptimizer(0.1), matrices)
        return gs.ShardedUpdateOptimizer(opt, min_size=1, **AXES)

    feeds = models.mlp_batches(3)
    values = harness.run(mesh_kind, SHAPE, LAYOUT, models.train(make), feeds).variables
    groups = Groups({("w1",): reference.Adafactor(), ("b1", "scale"): Sgd(0.1)})
    reference.assert_close(values, reference.train(groups, feeds), atol=1e-6)
    assert {"w1_slot_vc", "w1_slot_vr"} <= set(values)


def test_a_group_is_clipped_by_its_own_norm(mesh_kind):
    def make():
        groups = [("1$", {"clip_norm": 0.01})]
        sgd = functools.partial(mtf.optimize.SgdOptimizer, 0.1)
        return gs.CrossShardOptimizer(gs.ByVariable(sgd, groups))

    feeds = models.mlp_batches(2)
    values = harness.run(mesh_kind, SHAPE, LAYOUT, models.train(make), feeds).variables
    clipped = reference.Clipped(Sgd(0.1), 0.01)
    expected = reference.train(Groups({("w1", "b1"): clipped, ("scale",): Sgd(0.1)}), feeds)
    assert clipped.clipped == len(feeds)
    reference.assert_close(values, expected, atol=1e-6)


def test_an_optimizer_of_several_groups_makes_one_update_of_them():
    """As it may count its updates, or know the state of all variables."""
    calls = []

    class Counting(mtf.optimize.SgdOptimizer):
        def apply_grads(self, grads, variables):
            calls.append([v.name for v in variables])
            return super().apply_grads(grads, variables)

    sgd = Counting(0.1)
    inside = gs.ByVariable(sgd, [("a", {"clip_norm": 1.0})])
    opt = gs.ByVariable(sgd, [("a", inside), ("b", {"clip_norm": 2.0})])
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    made = [mtf.get_variable(mesh, n, mtf.Shape([])).operation for n in "cba"]
    assert opt.apply_grads([mtf.ones(mesh, mtf.Shape([]))] * 3, made)
    assert calls == [["c", "b", "a"]]


def test_groups_inside_a_group_are_known():
    inner = gs.ByVariable(mtf.optimize.SgdOptimizer(0.1), [("a$", None)])
    opt = gs.ByVariable(ADAMW, [("^x", inner)])
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    made = [mtf.get_variable(mesh, n, mtf.Shape([])).operation for n in ("xa", "xb", "ya")]
    xa, xb, ya = (opt.optimizer_of(v) for v in made)
    assert (xa, opt.optimizers) == (None, (xb, ya))
    assert type(xb) is mtf.optimize.SgdOptimizer
    assert gs.ByVariable(xb, [("^x", inner)]).optimizers == (xb,)
    assert [line.what for line in gs.describe(opt).lines] == [
        "leave variables as they are: a$ of ^x",
        "update by Sgd: the others of ^x",
        "update by AdamW: the others",
    ]
    assert [line.what for line in gs.describe(opt, variables=made[1:]).lines] == [
        "update 1 variable by Sgd: the others of ^x",
        "update 1 variable by AdamW: the others",
    ]


def test_slots_have_the_names_of_each_group_s_optimizer():
    inner = gs.ByVariable(ADAMW, [("a", gs.MeshOptimizer(tf.train.AdamOptimizer(0.1)))])
    opt = gs.CrossShardOptimizer(inner)
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    a, b = (mtf.get_variable(mesh, n, mtf.Shape([])).operation for n in "ab")
    opt.apply_grads([mtf.ones(mesh, mtf.Shape([]))] * 2, [a, b])
    assert opt.get_slot_names() == ["m", "v", "adam_m", "adam_t", "adam_v"]
    found = [opt.get_slot(v, name) for v in (a, b) for name in ("m", "adam_m")]
    assert [slot and slot.name for slot in found] == ["a/Adam", None, None, "b/adam_m"]
    assert [v.name for v in inner.variables()] == ["a/Adam", "a/Adam_1", *POWERS]
    assert sorted(v.name for v in opt.variables()) == sorted(
        ["a/Adam", "a/Adam_1", *POWERS, "b/adam_m", "b/adam_t", "b/adam_v"]
    )


POWERS = ["beta1_power", "beta2_power"]


def test_a_copy_has_the_groups_and_the_rate_of_the_graph():
    rate = tf.constant(0.5)
    factory = functools.partial(gs.AdamWOptimizer, learning_rate=rate)
    groups = [("a", {"clip_norm": 1.0}), ("b", {"weight_decay_rate": 0.0})]
    opt = gs.CrossShardOptimizer(gs.ByVariable(factory, groups))
    copied = copy.deepcopy(opt).opt
    a, b, others = (group.opt for group in copied._all)
    assert a is others
    assert others is not opt.opt._others.opt
    assert a.learning_rate is b.learning_rate is rate


def test_a_training_of_nothing_is_told(caplog):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    w = mtf.get_variable(mesh, "w", mtf.Shape([])).operation
    for name, apply in (
        ("applied", lambda opt: opt.apply_grads([mtf.ones(mesh, w.shape)], [w])),
        ("minimized", lambda opt: opt.minimize(mtf.square(w.value))),
    ):
        assert apply(gs.CrossShardOptimizer(gs.ByVariable(ADAMW, [("", None)]), name=name)) == []
        line = f"{name} trains nothing: by the groups of ByVariable, nothing updates variable w."
        assert line in caplog.messages


def test_the_first_group_that_has_a_variable_has_it():
    opt = gs.ByVariable(ADAMW, [("w1", {"weight_decay_rate": 0.5}), ("w", None)])
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    w1, w2, b = (mtf.get_variable(mesh, n, mtf.Shape([])).operation for n in ("w1", "w2", "b"))
    assert opt.optimizer_of(w1).weight_decay_rate == 0.5
    assert opt.optimizer_of(w2) is None
    assert opt.optimizer_of(b).weight_decay_rate == 0.01


def test_a_group_that_is_clipped_needs_all_gradients_at_once():
    opt = gs.ByVariable(ADAMW, [("w", {"clip_norm": 1.0})])
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    w, b = (mtf.get_variable(mesh, n, mtf.Shape([])).operation for n in "wb")
    with pytest.raises(ValueError, match="'w' alone: call apply_grads"):
        opt.apply_grad(w.value, w)
    with pytest.raises(ValueError, match="'w' alone: call apply_grads"):
        gs.ByVariable(ADAMW, [(".", opt)]).apply_grad(w.value, w)
    assert opt.apply_grad(b.value, b)


def test_a_checkpoint_of_one_optimizer_goes_on_in_groups():
    feeds = models.mlp_batches(1)

    def names(make):
        values = harness.run("placement", SHAPE, LAYOUT, models.train(make), feeds).variables
        return {name: value.shape for name, value in values.items()}

    one = names(lambda: gs.CrossShardOptimizer(ADAMW()))
    groups = [("b", {"weight_decay_rate": 0.0})]
    assert names(lambda: gs.CrossShardOptimizer(gs.ByVariable(ADAMW, groups))) == one


FROZEN, MUON = [("w1", None)], [("w1", gs.MuonOptimizer(0.02))]


def islands(opt):
    return gs.OuterOptimizer(opt, 4, **AXES)


@pytest.mark.parametrize(
    ("kind", "wrapper", "before", "after", "new"),
    [
        ("placement", gs.CrossShardOptimizer, FROZEN, [], {"w1/adam_m", "w1/adam_v"}),
        ("simd", gs.CrossShardOptimizer, FROZEN, MUON, {"w1/muon_m"}),
        ("placement", gs.CrossShardOptimizer, [], MUON, {"w1/muon_m"}),
        ("simd", gs.CrossShardOptimizer, [], FROZEN, set()),
        ("simd", islands, FROZEN, [], {"w1/adam_m/island", "w1/adam_v/island"}),
        ("placement", islands, [], MUON, {"w1/muon_m/island"}),
    ],
    ids=[
        "trained again",
        "by Muon now",
        "from AdamW to Muon",
        "frozen",
        "trained again in islands",
        "to Muon in islands",
    ],
)
@pytest.mark.mostly_slow(keep="by Muon now")
def test_a_variable_changes_its_group_in_a_restart(
    kind, wrapper, before, after, new, tmp_path, caplog
):
    """What the checkpoint has goes on; slots that it does not have begin as in a new run."""
    feeds = models.mlp_batches(2)
    first, then = (
        harness.built(
            kind,
            SHAPE,
            LAYOUT,
            models.train(lambda groups=groups: wrapper(gs.ByVariable(ADAMW, groups))),
            feeds[0],
        )
        for groups in (before, after)
    )
    with session_of(first) as session:
        train(first, session, feeds[:1])
        path = session.save(str(tmp_path / "model"))
        saved = session.variables()
    with session_of(then) as session:
        session.restore(path)
        for name, value in session.variables().items():
            expected = saved.get(name, saved.get(name.replace("/island", ""), 0))
            expected = 0 if name in new else expected
            np.testing.assert_array_equal(value, np.broadcast_to(expected, value.shape), name)
        train(then, session, feeds[1:])
        assert not new or any(session.variables()[name].any() for name in new)
    assert all(name in caplog.text for name in new)
    assert "another optimizer, or none" in caplog.text or not new


def test_a_checkpoint_without_any_slot_is_another_runs(tmp_path):
    feed = models.mlp_batches(1)[0]
    sgd, adamw = (
        harness.built("placement", SHAPE, LAYOUT, models.train(make), feed)
        for make in (models.OPTIMIZERS["sgd"], lambda: gs.CrossShardOptimizer(ADAMW()))
    )
    with session_of(sgd) as session:
        path = session.save(str(tmp_path / "model"))
    with session_of(adamw) as session, pytest.raises(tf.errors.NotFoundError):
        session.restore(path)


@pytest.mark.parametrize("lacks", ["w1/adam_v", "w1/adam_m"])
def test_a_slot_does_not_begin_anew_beside_others_of_its_variable(lacks, tmp_path):
    """With t of the checkpoint and v of zeros, updates would be 31 times as large."""
    feed = models.mlp_batches(1)[0]
    build = models.train(lambda: gs.CrossShardOptimizer(ADAMW()))
    made = harness.built("placement", SHAPE, LAYOUT, build, feed)
    with session_of(made) as session:
        train(made, session, [feed])
        path, cut = session.save(str(tmp_path / "model")), str(tmp_path / "cut")
        names = set(session.variables()) - {lacks}
        write_changed(path, cut, {}, names)
        with pytest.raises(tf.errors.NotFoundError, match=lacks):
            session.restore(cut)


@pytest.mark.parametrize(
    ("before", "slots", "others"),
    [
        (gs.ByVariable(ADAMW, FROZEN), {"w1/adam_m", "w1/adam_v", "w1/adam_t"}, set()),
        (
            mtf.optimize.SgdOptimizer(0.1),
            {f"{name}/adam_t" for name in ("w1", "b1", "scale")},
            {f"{name}/adam_{slot}" for name in ("w1", "b1", "scale") for slot in "mv"},
        ),
    ],
    ids=["trained again", "trained by AdamW now"],
)
def test_train_says_that_slots_begin_anew(before, slots, others, tmp_path):
    """And their counts with them; what wrappers derive from the checkpoint is something else."""
    feed = models.mlp_batches(1)[0]
    first, then = (
        harness.built("placement", SHAPE, LAYOUT, models.train(make), feed)
        for make in (
            lambda: gs.CrossShardOptimizer(before),
            lambda: gs.CrossShardOptimizer(ADAMW()),
        )
    )
    with session_of(first) as session:
        path = session.save(str(tmp_path / "model"))
    with then.graph.as_default():
        found = saving.differences(path, tf.global_variables())
    assert found == saving.Differences((), tuple(sorted(slots | others)), (), (*sorted(slots),), ())
    (says, *names) = saving.describe_differences(found).splitlines()
    assert "begin as in a new run" in says
    assert {name.strip() for name in names} == slots | others


def test_a_group_changes_to_an_optimizer_of_tensorflow_in_a_restart(tmp_path):
    """Its powers, which belong to no variable, begin with its slots, and never without them."""
    feed = models.mlp_batches(1)[0]
    adam = [("w1", gs.MeshOptimizer(tf.train.AdamOptimizer(0.01)))]
    first, then = (
        harness.built(
            "placement",
            SHAPE,
            LAYOUT,
            models.train(
                lambda groups=groups: gs.CrossShardOptimizer(gs.ByVariable(ADAMW, groups))
            ),
            feed,
        )
        for groups in ([], adam)
    )
    with session_of(first) as session:
        path = session.save(str(tmp_path / "model"))
    with session_of(then) as session:
        session.restore(path)
        train(then, session, [feed])
        (power,) = [name for name in session.variables() if name.endswith("beta1_power")]
        np.testing.assert_allclose(session.variables()[power], 0.9**2, rtol=1e-6)
        path, cut = session.save(str(tmp_path / "model")), str(tmp_path / "cut")
        write_changed(path, cut, {}, set(session.variables()) - {power})
        with pytest.raises(tf.errors.NotFoundError, match=power):
            session.restore(cut)


def test_bare_groups_of_two_optimizers_do_not_share_slots(caplog):
    graph = mtf.Graph()
    mesh, dim = mtf.Mesh(graph, "mesh"), mtf.Dimension("in", 4)
    with tf.Graph().as_default():
        w = mtf.get_variable(mesh, "w", [dim]).operation
        for _ in range(2):
            gs.ByVariable(ADAMW, []).apply_grads([mtf.ones(mesh, w.shape)], [w])
    assert "would share its slot" in caplog.text


def test_without_a_wrapper_updates_wait_for_the_gradients_of_all_groups():
    build = models.train(lambda: gs.ByVariable(ADAMW, MUON))
    feed = models.mlp_batches(1)[0]
    assert harness.built("placement", SHAPE, LAYOUT, build, feed, may_race=True).races() == []


def test_hints_and_warnings_look_into_groups(caplog):
    """An Adafactor with a rate by position, and one whose decay rate counts microbatch steps."""
    with tf.Graph().as_default(), caplog.at_level(logging.INFO, "mtf_gradsync"):
        tf.train.get_or_create_global_step()
        adafactor = mtf.optimize.AdafactorOptimizer(0.01)
        opt = gs.ByVariable(ADAMW, [("w1", {"clip_norm": 1.0}), ("b1", None), ("", adafactor)])
        gs.GradientAccumulationOptimizer(opt, 2)
    positional, counts = (r.getMessage() for r in caplog.records)
    assert "multiply_by_parameter_scale=0.01" in positional
    assert "learning_rate of AdafactorOptimizer" in counts
    assert opt.optimizers == (opt.optimizer_of(mtf_variable("w1")), adafactor)


def mtf_variable(name):
    with tf.Graph().as_default():
        return mtf.get_variable(mtf.Mesh(mtf.Graph(), "mesh"), name, mtf.Shape([])).operation


@pytest.mark.parametrize("wrapper", ["sharded", "local(sharded)"])
def test_functions_see_variables_as_the_model_has_them(wrapper):
    """Not the parts of sharded updates, of which dimensions have other names."""
    seen = set()

    def which(variable):
        seen.add(tuple(d.name for d in variable.shape.dims))
        return False

    build = models.train(
        lambda: wrappers.wrap(wrapper, gs.ByVariable(ADAMW, [(which, None)]), AXES)
    )
    made = harness.built("simd", SHAPE, LAYOUT, build, models.mlp_batches(1)[0])
    graph = made.lowering.graph
    assert seen == {tuple(d.name for d in v.shape.dims) for v in graph.trainable_variables}


def test_a_group_without_a_variable_is_told(caplog):
    build = models.train(
        lambda: gs.CrossShardOptimizer(gs.ByVariable(ADAMW, [("layernorm_of_nothing", None)]))
    )
    harness.built("simd", SHAPE, LAYOUT, build, models.mlp_batches(1)[0])
    assert "no variable is in the group 'layernorm_of_nothing'" in caplog.text


def test_a_group_whose_variables_are_all_in_earlier_groups_is_told(caplog):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    w1, b = (mtf.get_variable(mesh, n, mtf.Shape([])).operation for n in ("w1", "b"))
    opt = gs.ByVariable(ADAMW, [("w", None), ("1", {"weight_decay_rate": 0.0})])
    opt.apply_grads([None, mtf.ones(mesh, b.shape)], [w1, b])
    (record,) = caplog.records
    assert "group '1', because groups before it have all" in record.getMessage()


@pytest.mark.parametrize(
    ("opt", "groups", "error", "says"),
    [
        (ADAMW, ["bias"], TypeError, "a group is a pair"),
        (ADAMW, None, TypeError, "groups must be"),
        (ADAMW, [("(", None)], ValueError, "no regular expression"),
        (ADAMW, [(3, None)], TypeError, "a regular expression or a function"),
        (ADAMW, [("b", {"decay": 1})], TypeError, "decay"),
        (
            functools.partial(gs.AdamWOptimizer, 0.1),
            [("b", {"learning_rate": 1})],
            TypeError,
            "by name",
        ),
        (ADAMW, [("b", {"clip_norm": -1.0})], ValueError, "clip_norm"),
        (lambda: ADAMW(), [("b", gs.CrossShardOptimizer(ADAMW()))], TypeError, "around"),
        (ADAMW, [("b", tf.train.AdamOptimizer(0.1))], TypeError, "gs.MeshOptimizer"),
        (tf.train.AdamOptimizer(0.1), [], TypeError, "gs.MeshOptimizer"),
        (ADAMW(), [("b", {"weight_decay_rate": 0.0})], TypeError, "functools.partial"),
        (gs.AdamWOptimizer, [], ValueError, "learning_rate"),
        (ADAMW, [("b", {"learning_rate_factor": -1})], ValueError, "learning_rate_factor must be"),
        (
            ADAMW,
            [("b", {"learning_rate_factor": 2, "learning_rate": 1.0})],
            TypeError,
            "no learning_rate of its own",
        ),
        (lambda: ADAMW(), [("b", {"learning_rate_factor": 2})], TypeError, "that of opt is given"),
        (ADAMW, [("b", {"optimizer": None})], ValueError, "got None"),
        (ADAMW, [("b", {"optimizer": ADAMW(), "beta_1": 0.5})], TypeError, "arguments are set"),
    ],
)
def test_what_it_does_not_take(opt, groups, error, says):
    with pytest.raises(error, match=says):
        gs.ByVariable(opt, groups)


def test_gin_gives_groups_and_a_wrapper_the_rate():
    gin.parse_config("""
        CrossShardOptimizer.opt = @ByVariable
        ByVariable.opt = @AdamWOptimizer
        ByVariable.groups = [
            ("bias", {"weight_decay_rate": 0.0}),
            ("embedding", None),
            (@is_hidden_matrix, @MuonOptimizer),
            ("slow", {"learning_rate_factor": 0.5}),
        ]
    """)
    try:
        opt = gs.CrossShardOptimizer(learning_rate=0.25).opt
    finally:
        gin.clear_config()
    assert type(opt) is gs.ByVariable
    assert [g.opt and (g.opt.learning_rate, g.opt.weight_decay_rate) for g in opt._all] == [
        (0.25, 0.0), None, (0.25, 0.0), (0.125, 0.01), (0.25, 0.01)
    ]  # fmt: skip
    assert type(opt._all[2].opt) is gs.MuonOptimizer
    assert opt._all[2].name == "is_hidden_matrix"


def test_describe_has_a_line_for_each_group():
    groups = [("bias|norm", {"weight_decay_rate": 0.0}), ("embedding", None)]
    opt = gs.CrossShardOptimizer(gs.ByVariable(ADAMW, groups))
    assert str(gs.describe(opt)).splitlines() == [
        "every step  reduce over the replica axes: fused                (CrossShardOptimizer)",
        "            update by AdamW, weight_decay_rate 0.0: bias|norm",
        "            leave variables as they are: embedding",
        "            update by AdamW: the others",
    ]


def test_describe_counts_no_bytes_of_what_stays_as_it_is():
    """Before the step is built, and after it."""
    said = []

    def build(mesh, inputs):
        batch, wide = mtf.Dimension("batch", 4), mtf.Dimension("wide", 8)
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, wide]))
        kept, moved = (mtf.get_variable(mesh, n, mtf.Shape([wide])) for n in ("kept", "moved"))
        sgd = mtf.optimize.SgdOptimizer(0.1)
        opt = gs.ByVariable(sgd, [("kept", None)])
        opt = gs.OuterOptimizer(opt, 1, 1.0, 0.0, outer_dims=(), **AXES)
        both = [kept.operation, moved.operation]
        said.append(str(gs.describe(opt, SHAPE, LAYOUT, both)))
        updates = opt.minimize(mtf.reduce_mean(x * kept * moved))
        said.append(str(gs.describe(opt)))
        return updates, {}

    harness.built("simd", SHAPE, LAYOUT, build, {"x": np.ones([4, 8], "f")})
    before, after = said
    assert before == after
    assert [line.split("  (")[0].rstrip() for line in before.splitlines()] == [
        "every step    reduce over batch, 2 shards: fused, 32 bytes in 1 group",
        "              leave 1 variable as it is: kept",
        "              update 1 variable by Sgd: the others",
        "every update  outer step of the values: learning rate 1",
    ]
