"""Steps that are skipped: lines about some of them, and an end to a training that only skips."""

import logging

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models
from tests.sessions import session_of

MESH, LAYOUT = "rows:2;cols:2", "batch:rows"
AXES = {"mesh_shape": MESH, "layout": LAYOUT}
LIMIT = 5
NAN = float("nan")


def sgd():
    return mtf.optimize.SgdOptimizer(1.0)


def accumulation(inner=None, passes=2, **more):
    how = {"should_skip_update_fn": gs.skip_not_finite, "max_steps_without_update": LIMIT}
    return gs.GradientAccumulationOptimizer(inner or sgd(), passes, **{**how, **more})


def loss_scale(inner=None, **more):
    how = {"initial_scale": 4.0, "max_steps_without_update": LIMIT}
    return gs.LossScaleOptimizer(inner or sgd(), **{**how, **more})


def outer(inner=None, **more):
    how = {"leave_out_not_finite": True, "max_steps_without_update": LIMIT}
    return gs.OuterOptimizer(inner or sgd(), 2, **{**how, **more, **AXES})


BEGIN = {
    "GradientAccumulationOptimizer": "microbatch step skipped, gradients that are not finite: ",
    "LossScaleOptimizer": "step skipped, gradients that are not finite: ",
    "OuterOptimizer": "outer step without islands whose loss or values are not finite: ",
}
SO_FAR = "skipped so far; the next line is at twice as many."
FLOOR = " The scale cannot go below min_scale=1, where it is now."
V = "v (shard 1)."
# What makes a stack, and its lines: what they name, and what else they say.
STACKS = {
    "local": (lambda: accumulation(**AXES), [(V, ""), (V, ""), (V, "")]),
    "synced": (lambda: accumulation(accumulate="synced"), [(V, ""), (V, ""), (V, "")]),
    # 8, 4, 2, then 1, the floor, on the third step.
    "scaled": (lambda: loss_scale(initial_scale=8.0), [(V, ""), (V, ""), (V, FLOOR), (V, FLOOR)]),
    "fixed scale": (lambda: loss_scale(loss_scale=2.0, **AXES), [(V, ""), (V, ""), (V, "")]),
    "outer": (outer, [("0, 1.", ""), ("0, 1.", "")]),
}


def program(make):
    """Two vectors of zeros, whose gradients are means over the batch of two inputs."""

    def build(mesh, inputs):
        batch, dim = mtf.Dimension("batch", 2), mtf.Dimension("dim", 3)
        loss = None
        for name in ("u", "v"):
            x = mtf.import_tf_tensor(mesh, inputs[f"of_{name}"], mtf.Shape([batch, dim]))
            w = mtf.get_variable(mesh, name, [dim], initializer=tf.zeros_initializer())
            term = mtf.reduce_mean(x * w, output_shape=mtf.Shape([dim]))
            loss = mtf.reduce_sum(term) if loss is None else loss + mtf.reduce_sum(term)
        grads, variables = models.gradients(loss)
        return make().apply_grads(grads, variables), {"loss": loss}

    return build


def feed(bad=()):
    """Ones, with a NaN for v in some rows of the batch."""
    values = {f"of_{name}": np.ones([2, 3], "f") for name in ("u", "v")}
    values["of_v"][list(bad), 1] = NAN
    return values


GOOD = feed()


def train(built, feeds, caplog, capfd, fetches=None):
    """Returns the number of the step that raised an error, that error or None, and the lines."""
    error, number = None, 0
    begin = tuple(f"{owner}: {text}" for owner, text in BEGIN.items())
    caplog.clear()
    capfd.readouterr()
    with session_of(built) as session:
        for values in feeds:
            number += 1
            fed = {built.inputs[name]: value for name, value in values.items()}
            try:
                session.run([built.fetched, built.updates] if fetches is None else fetches, fed)
            except (gs.NoUpdateError, tf.errors.InvalidArgumentError) as raised:
                error = raised
                break
    told = [record.getMessage() for record in caplog.records]
    told += capfd.readouterr().err.splitlines()
    return number, error, [line for line in told if line.startswith(begin)]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("simd", name) for name in STACKS),
        # Of each wrapper one, where the graph prints and ends the run.
        *(("placement", name) for name in ("synced", "scaled", "outer")),
        ("xla", "local"),
    ],
)
@pytest.mark.mostly_slow
def test_a_nan_on_every_step_is_named_and_ends_the_training(kind, name, caplog, capfd):
    make, named = STACKS[name]
    bad = feed([0, 1] if name == "outer" else [1])
    built = harness.built(kind, MESH, LAYOUT, program(make), bad)
    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        number, error, lines = train(built, [bad] * 10, caplog, capfd)
    assert number == LIMIT + 1
    owner = type(make()).__name__
    begin = f"{owner}: {BEGIN[owner]}"
    counts = [1, 2, 3, 4] if name == "scaled" else [1, 2, 4]
    so_far = {1: "", 2: f" 2 {SO_FAR}", 3: " 3 skipped so far.", 4: f" 4 {SO_FAR}"}
    assert lines == [
        begin + what + so_far[count] + more for count, (what, more) in zip(counts, named)
    ]
    text = f"{owner}: no update for more than max_steps_without_update={LIMIT} steps. Not finite in"
    if name == "outer":
        text += " the last outer step that skipped islands: v (island 0), the loss (island 0), v "
        text += "(island 1), the loss (island 1)."
    else:
        text += f" the last step that was skipped: {V}" + (FLOOR if name == "scaled" else "")
    if kind == "placement":
        assert f"[{text}]" in str(error)  # TensorFlow's words around it
    else:
        assert str(error) == text
        assert isinstance(error, gs.NoUpdateError)
        assert (error.limit, error.replicas) == (LIMIT, [0, 1] if name == "outer" else [1])


def clip(inner):
    return gs.ClipByGlobalNormOptimizer(inner, 1.0)


LOCAL, SYNCED = {"accumulate": "local", **AXES}, {"accumulate": "synced", **AXES}
NOT_KNOWN = "v (shard unknown)."
# Stacks in which one shard's NaN is checked in another form, or after another stage has spread it.
ORDERS = {
    "of sums that were added up": (
        lambda: accumulation(loss_scale(), **NO_SKIPS, **SYNCED),
        NOT_KNOWN,
    ),
    "after a clip": (lambda: clip(loss_scale(**AXES)), V),
    "after a clip of a local sum": (
        lambda: accumulation(clip(loss_scale()), **NO_SKIPS, **LOCAL),
        V,
    ),
    "in an island": (lambda: outer(loss_scale(**NO_LIMIT)), V),
    "in an island's microbatch": (lambda: outer(accumulation()), V),
}
NO_LIMIT = {"max_steps_without_update": None}
NO_SKIPS = {"should_skip_update_fn": None, **NO_LIMIT}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("simd", name) for name in ORDERS),
        pytest.param("placement", "in an island", marks=pytest.mark.slow),
    ],
)
@pytest.mark.mostly_slow
def test_one_shard_s_nan_is_named_as_that_shard_s_in_every_order(kind, name, caplog, capfd):
    make, named = ORDERS[name]
    built = harness.built(kind, MESH, LAYOUT, program(make), GOOD)
    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        *_, lines = train(built, [feed([1])] * 2, caplog, capfd)
    of_scale = [line for line in lines if "LossScale" in line] or lines
    assert of_scale[0].endswith(f"not finite: {named}")


def test_shards_of_islands_are_numbered_over_the_whole_mesh(caplog, capfd):
    axes = {"mesh_shape": MESH, "layout": "outer:cols;batch:rows", "batch_dims": ["outer", "batch"]}

    def build(mesh, inputs):
        dims = [mtf.Dimension("outer", 2), mtf.Dimension("batch", 2)]
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape(dims))
        v = mtf.get_variable(mesh, "v", [], initializer=tf.zeros_initializer())
        opt = gs.OuterOptimizer(loss_scale(), 2, outer_dims="outer", **axes)
        return opt.minimize(mtf.reduce_mean(x * v)), {}

    bad = {"x": np.array([[1, 1], [NAN, 1]], "f")}
    built = harness.built("simd", MESH, axes["layout"], build, bad)
    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        *_, (line,) = train(built, [bad], caplog, capfd)
    assert line.endswith("not finite: v (shard 2).")


@pytest.mark.parametrize(
    ("mesh_kind", "name"), [("placement", "local"), ("simd", "scaled")], indirect=["mesh_kind"]
)
def test_an_update_begins_the_count_anew(name, mesh_kind, caplog, capfd):
    """Five skipped steps are not too many; the accumulation's update needs two steps."""
    bad, passes = feed([1]), {"local": 2, "scaled": 1}[name]
    built = harness.built(mesh_kind, MESH, LAYOUT, program(STACKS[name][0]), bad)
    skipped = LIMIT - passes + 1
    feeds = [*[bad] * skipped, *[GOOD] * passes] * 2 + [bad] * LIMIT + [bad]
    number, error, _ = train(built, feeds, caplog, capfd)
    assert number == len(feeds)
    assert error is not None


def test_sync_replicas_names_what_is_not_finite_beside_who_is_missing(mesh_kind, caplog, capfd):
    def make():
        return gs.SyncReplicasOptimizer(sgd(), 2, max_steps_without_update=2, **AXES)

    both = feed([0, 1])
    built = harness.built(mesh_kind, MESH, LAYOUT, program(make), both)
    number, error, _ = train(built, [both] * 5, caplog, capfd)
    assert number == 3
    assert "Not finite in the last step: v (shard 0), v (shard 1)." in str(error)
    assert (
        "These replicas (shards, row by row) did not contribute in the last step: [0, 1]."
        in str(error)
    )


@pytest.mark.mostly_slow
def test_inside_accumulation_steps_of_the_loss_scale_are_updates(mesh_kind, caplog, capfd):
    bad = feed([1])

    def make():
        return gs.GradientAccumulationOptimizer(loss_scale(**AXES), 2, **AXES)

    built = harness.built(mesh_kind, MESH, LAYOUT, program(make), bad)
    number, error, lines = train(built, [bad] * 20, caplog, capfd)
    assert number == 2 * (LIMIT + 1)
    assert "LossScaleOptimizer: no update" in str(error)
    assert len(lines) == 3


def test_a_step_that_was_large_says_so(caplog, capfd):
    def make():
        return accumulation(should_skip_update_fn=gs.skip_large_updates(0.1), **AXES)

    built = harness.built("simd", MESH, LAYOUT, program(make), GOOD)
    _, error, lines = train(built, [GOOD], caplog, capfd)
    assert error is None
    (line,) = lines
    assert line.endswith("none, but should_skip_update_fn skip_large_updates says so.")


@pytest.mark.slow
def test_a_program_that_fetches_nothing_hears_of_it_a_few_steps_later(caplog, capfd):
    """XLA devices run ahead of the host."""
    bad = feed([1])
    built = harness.built("xla", MESH, LAYOUT, program(STACKS["local"][0]), bad)
    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        number, error, lines = train(built, [bad] * 20, caplog, capfd, fetches=built.updates)
        assert number == LIMIT + 1 + 4
        assert isinstance(error, gs.NoUpdateError)
        assert len(lines) == 3
        # Before values of variables leave the devices, and at the end of the session.
        with built.graph.as_default(), built._session() as session:
            fed = {built.inputs[name]: value for name, value in bad.items()}
            for _ in range(LIMIT + 1):
                session.run(built.updates, fed)
            with pytest.raises(gs.NoUpdateError):
                session.variables()
        number, error, lines = train(built, [bad] * 3, caplog, capfd, fetches=built.updates)
        assert (number, error) == (3, None)


def test_the_limit_around_accumulation_belongs_to_it():
    with pytest.raises(ValueError, match="give this limit to GradientAccumulationOptimizer"):
        loss_scale(accumulation(**AXES))


def test_without_a_limit_there_is_no_variable_for_it():
    for make, names in (
        (lambda: accumulation(max_steps_without_update=None, **AXES), []),
        (lambda: accumulation(**AXES), ["GradientAccumulationOptimizer/waiting"]),
        (lambda: accumulation(should_skip_update_fn=None, **AXES), []),
        (lambda: loss_scale(max_steps_without_update=None), []),
        (loss_scale, ["LossScaleOptimizer/waiting"]),
        (outer, ["OuterOptimizer/updated_at"]),
        (lambda: outer(leave_out_not_finite=False), []),
    ):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        with tf.Graph().as_default():
            inputs = {name: tf.constant(value) for name, value in GOOD.items()}
            program(make)(mesh, inputs)
            found = [v.op.name for v in tf.global_variables()]
        ends = ("/waiting", "/updated_at")
        assert [name for name in found if name.endswith(ends)] == names
