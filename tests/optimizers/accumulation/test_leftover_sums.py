"""Sums that no update has taken: at the end of a training, and where K changes at a restart."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness
from tests.sessions import session_of, step

MESH, LAYOUT = "rows:2", "batch:rows"
AXES = {"mesh_shape": MESH, "layout": LAYOUT}
KINDS = pytest.mark.parametrize("kind", ["placement", "simd", "xla"])
# The gradients of microbatch steps; sums of some of them are exact in float32.
GRADIENTS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
NAN = float("nan")


def accumulation(passes, **given):
    inner = mtf.optimize.SgdOptimizer(1.0)
    return gs.GradientAccumulationOptimizer(inner, passes, **given, **AXES)


def program(kind, make):
    """A scalar w of 0, whose gradient is the mean of the inputs; `make` gets the input "flush"."""

    def build(mesh, inputs):
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([mtf.Dimension("batch", 2)]))
        w = mtf.get_variable(mesh, "w", [], initializer=tf.zeros_initializer())
        grads = mtf.gradients([mtf.reduce_mean(x * w)], [w])
        return make(inputs["flush"]).apply_grads(grads, [w.operation]), {}

    feed = {"x": np.zeros([2], "f"), "flush": np.zeros([], bool)}
    return harness.built(kind, MESH, LAYOUT, build, feed)


def run(made, gradients, restore=None, save=None, flush=(), **saver):
    """Makes a step for each gradient; returns w after each, and all variables at the end."""
    after = []
    with session_of(made, **saver) as session:
        if restore:
            session.restore(restore)
        for number, gradient in enumerate(gradients):
            feed = {"x": np.full([2], gradient, "f"), "flush": number in flush}
            variables = step(made, session, feed)
            after.append(variables["w"])
        if save:
            session.save(save)
    return after, variables


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Makes a checkpoint of a kind of mesh and a K, once, after six microbatch steps."""
    made = {}

    def path(kind, passes):
        if (kind, passes) not in made:
            directory = tmp_path_factory.mktemp("saved")
            made[kind, passes] = str(directory / "model.ckpt")
            before = program(kind, lambda flush: accumulation(passes))
            run(before, GRADIENTS[:6], save=made[kind, passes])
        return made[kind, passes]

    return path


@KINDS
def test_a_flush_applies_what_is_there_with_the_step_s_own(kind):
    made = program(
        kind, lambda flush: accumulation(4, average_aggregated_gradients=True, flush=flush)
    )
    after, values = run(made, GRADIENTS[:6], flush=[5])
    first, last = np.mean(GRADIENTS[:4]), np.mean(GRADIENTS[4:6])
    np.testing.assert_array_equal(after, [0, 0, 0, -first, -first, -first - last])
    assert values["GradientAccumulationOptimizer/mini_step"] == 0
    assert values["GradientAccumulationOptimizer/update_step"] == 2
    # An accumulation begins anew after it; a flush of an update that is due changes nothing.
    after, _ = run(made, [2.0] * 5, flush=[0, 4])
    np.testing.assert_array_equal(after, [-2, -2, -2, -2, -4])


def test_a_flush_on_a_skipped_step_applies_the_steps_before(mesh_kind):
    def make(flush):
        return accumulation(4, should_skip_update_fn=gs.skip_not_finite, flush=flush)

    made = program(mesh_kind, make)
    after, values = run(made, [1.0, 2.0, NAN, NAN, 4.0], flush=[2, 3])
    np.testing.assert_array_equal(after, [0, 0, -3, -3, -3])
    found = {
        name: values[f"GradientAccumulationOptimizer/{name}"]
        for name in ("mini_step", "update_step", "skipped")
    }
    assert found == {"mini_step": 1, "update_step": 1, "skipped": 2}


@pytest.mark.parametrize("flush", [1, "yes", lambda: tf.constant([True]), lambda: tf.constant(1)])
def test_a_flush_is_a_boolean_scalar(flush):
    flush = flush() if callable(flush) else flush
    with pytest.raises(TypeError, match="flush must be a boolean scalar"):
        accumulation(2, flush=flush)


# K after the restart, and the sums that updates take then, by the number of the step: of the six
# steps of K = 4 before, the last two are in the sums.
KEPT = {
    "one as a function": (lambda step: 1, {1: GRADIENTS[4:7], 2: GRADIENTS[7:8]}),
    "fewer": (2, {1: GRADIENTS[4:7]}),
    "more": (5, {}),
    "the same": (4, {2: GRADIENTS[4:8]}),
}


@pytest.mark.parametrize(
    ("kind", "name"), [*harness.on_both(zip(KEPT), zip(KEPT)), ("xla", "one as a function")]
)
@pytest.mark.mostly_slow(every=3)
def test_sums_stay_where_k_changes(name, kind, saved):
    passes, sums = KEPT[name]
    made = program(kind, lambda flush: accumulation(passes))
    after, values = run(made, GRADIENTS[6:8], restore=saved(kind, 4))
    w, expected = -np.sum(GRADIENTS[:4]), []
    for number in (1, 2):
        w -= np.sum(sums.get(number, ()))
        expected.append(w)
    np.testing.assert_array_equal(after, expected)
    left = 4 - sum(map(len, sums.values()))
    assert values["GradientAccumulationOptimizer/mini_step"] == left


@KINDS
def test_a_k_of_one_refuses_to_lose_sums(kind, saved, tmp_path):
    path = saved(kind, 4)
    made = program(kind, lambda flush: accumulation(1))
    text = r"2 microbatch steps.*Optimizer/mini_step\).*passes_per_step=lambda step: 1.*drop_sums"
    with session_of(made) as session, pytest.raises(ValueError, match=text):
        session.restore(path)
    if kind == "xla":
        return
    with made.graph.as_default():
        adapted = gs.adapt_checkpoint(path, str(tmp_path), drop_sums=True)
    after, _ = run(made, GRADIENTS[6:8], restore=adapted)
    np.testing.assert_array_equal(after, -np.sum(GRADIENTS[:4]) - np.cumsum(GRADIENTS[6:8]))
    # Nor are there sums that a later run could take up.
    reader = tf.train.load_checkpoint(adapted)
    assert not reader.get_tensor("w/gradient_accumulator").any()
    assert reader.get_tensor("GradientAccumulationOptimizer/mini_step") == 0
    # A checkpoint without sums, and a graph that does not train, are restored as they are.
    complete = str(tmp_path / "complete")
    run(program(kind, lambda flush: accumulation(4)), GRADIENTS[:4], save=complete)
    after, _ = run(made, GRADIENTS[4:5], restore=complete)
    np.testing.assert_array_equal(after, [-np.sum(GRADIENTS[:5])])


def test_tensorflows_own_saver_refuses_what_it_would_lose_or_lacks(saved):
    plain = {"make_saver": tf.train.Saver}
    losing = program("placement", lambda flush: accumulation(1))
    words = "sums of 2 microbatch steps"
    with session_of(losing, **plain) as session, pytest.raises(ValueError, match=words):
        session.restore(saved("placement", 4))
    path, lacking = saved("placement", 1), program("placement", lambda flush: accumulation(3))
    text = r"does not have .*mini_step.*gs\.ReshardingSaver.*gs\.adapt_checkpoint"
    missing = pytest.raises(tf.errors.NotFoundError, match=text)
    with session_of(lacking, **plain) as session, missing:
        session.restore(path)
    # What it can restore it does restore, and what is no wrapper's state is TensorFlow's to tell.
    saved_sums = saved("placement", 4)
    same = program("placement", lambda flush: accumulation(4))
    after, _ = run(same, GRADIENTS[6:8], restore=saved_sums, **plain)
    np.testing.assert_array_equal(
        after, -np.cumsum([np.sum(GRADIENTS[:4]), np.sum(GRADIENTS[4:8])])
    )
    with tf.Graph().as_default(), tf.Session() as session:
        saver = tf.train.Saver([tf.get_variable("of_no_wrapper", [])])
        with pytest.raises(tf.errors.NotFoundError, match="of_no_wrapper not found in checkpoint"):
            saver.restore(session, saved_sums)
        with pytest.raises(ValueError, match="nothing"):
            saver.restore(session, "nothing")


@KINDS
def test_a_run_with_a_k_of_one_goes_on_with_more(kind, saved):
    path = saved(kind, 1)
    made = program(kind, lambda flush: accumulation(3))
    after, values = run(made, [1.0, 1.0, 1.0], restore=path)
    before = -np.sum(GRADIENTS[:6])
    np.testing.assert_array_equal(after, [before, before, before - 3])
    assert values["GradientAccumulationOptimizer/update_step"] == 1
