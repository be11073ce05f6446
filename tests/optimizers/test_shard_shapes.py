"""Which dimensions of losses and gradients are shards, as the wrappers of a stack know them."""

import logging

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness

SUM = tf.losses.Reduction.SUM
SIZES = {"outer": 2, "batch": 3, "rows": 5}


def sgd(rate=0.1):
    return mtf.optimize.SgdOptimizer(rate)


def axes(*names):
    rules = [f"{name}:{name}" for name in names]
    shape = ";".join(f"{name}:1" for name in names)
    return {"mesh_shape": shape, "layout": ";".join(rules), "batch_dims": names}


def average(opt, **where):
    return gs.AverageOptimizer(opt, 0.9, **where)


def accumulation(opt, **where):
    return gs.GradientAccumulationOptimizer(opt, 1, **where)


class OwnSum(gs.optimizers.Wrapper):
    """A user's wrapper, which says how losses are joined."""

    loss_reduction = SUM

    def __init__(self, opt):
        self._wrap(opt, gs.optimizers.CommonArguments("own"))


def cross_shard(opt, **where):
    return gs.CrossShardOptimizer(opt, **where)


# A stack, the dims of its loss, and those of which the mean is taken; of the others it is the sum.
OF_NAMES = {
    "the default": (gs.LossScaleOptimizer, "batch", "batch"),
    "others than the default": (gs.LossScaleOptimizer, "outer batch rows", "batch"),
    "some of the shard dims": (
        lambda o: cross_shard(o, **axes("outer", "batch")), "outer", "outer",
    ),
    "named inside": (
        lambda o: gs.LossScaleOptimizer(cross_shard(o, batch_dims="rows")), "rows batch", "rows",
    ),
    "named outside": (
        lambda o: average(cross_shard(o), batch_dims=("outer", "rows")), "outer rows", "outer rows",
    ),
    "known in the middle": (
        lambda o: average(accumulation(gs.LossScaleOptimizer(o), **axes("rows"))),
        "rows batch",
        "rows",
    ),
    "each knows one": (
        lambda o: accumulation(cross_shard(o, batch_dims="rows"), **axes("outer")),
        "outer batch rows",
        "outer rows",
    ),
    "not split": (lambda o: average(cross_shard(o, batch_dims=())), "batch", ""),
    "own sum": (lambda o: average(OwnSum(o)), "batch", ""),
    "own sum around": (lambda o: OwnSum(gs.LossScaleOptimizer(o)), "batch", ""),
    "the same reductions": (
        lambda o: gs.CrossShardOptimizer(gs.CrossShardOptimizer(o, SUM), SUM), "batch", "",
    ),
}  # fmt: skip


def test_which_dimensions_of_a_loss_are_shards():
    def build(mesh, inputs):
        updates = []
        for number, (make_opt, dims, _) in enumerate(OF_NAMES.values()):
            w = mtf.get_variable(mesh, f"w{number}", [], initializer=tf.zeros_initializer())
            opt = make_opt(sgd(1.0))
            for wrapper in opt._wrappers():
                wrapper.name += str(number)
            shape = mtf.Shape([mtf.Dimension(name, SIZES[name]) for name in dims.split()])
            loss = mtf.import_tf_tensor(mesh, tf.ones(shape.to_integer_list), shape) * w
            updates += opt.minimize(loss, var_list=[w.operation])
        return updates, {}

    found = harness.run("placement", *harness.ONE, build, [{}]).variables
    for number, (name, (_, dims, means)) in enumerate(OF_NAMES.items()):
        summed = np.prod([SIZES[d] for d in dims.split() if d not in means.split()])
        # A mean of 15 ones: their rounded 15th parts are added up.
        np.testing.assert_allclose(found[f"w{number}"], -summed, rtol=2**-22, err_msg=name)


def a_loss(*names):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    name = f"w{len(tf.global_variables())}"
    w = mtf.get_variable(mesh, name, [], initializer=tf.zeros_initializer())
    shape = mtf.Shape([mtf.Dimension(name, SIZES[name]) for name in names])
    return mtf.import_tf_tensor(mesh, tf.ones(shape.to_integer_list), shape) * w


def test_reductions_that_contradict_each_other_are_an_error():
    opt = gs.CrossShardOptimizer(gs.CrossShardOptimizer(sgd(), SUM), name="outer")
    opt = average(opt)
    loss = a_loss("batch")
    before = list(loss.graph.operations), len(tf.get_default_graph().get_operations())
    with pytest.raises(
        ValueError, match=r"outer has 'weighted_mean' and CrossShard.*'weighted_sum'"
    ):
        opt.compute_gradients(loss)
    after = list(loss.graph.operations), len(tf.get_default_graph().get_operations())
    assert after == before
    assert opt.compute_gradients(a_loss()), "a scalar has nothing to join"


class OfAnotherLibrary(mtf.optimize.Optimizer):
    """Passes gradients on to the optimizer inside."""

    def __init__(self, opt):
        self.opt = opt

    def apply_grads(self, grads, variables):
        return self.opt.apply_grads(grads, variables)


@pytest.mark.parametrize(
    ("around", "between", "is_refused"),
    [
        ({}, lambda opt: opt, False),
        ({"group_assignment": [[1, 2, 0]]}, gs.LossScaleOptimizer, False),
        ({"group_assignment": [[0], [1], [2]]}, gs.LossScaleOptimizer, True),
        ({"batch_dims": "outer"}, lambda opt: opt, True),
        ({}, OfAnotherLibrary, True),
    ],
)
def test_copies_of_a_variable_are_summed_in_one_way(around, between, is_refused):
    inner = gs.CrossShardOptimizer(sgd(), group_assignment=[[2, 0, 1]], name="inner")
    opt = gs.CrossShardOptimizer(between(inner), name="around", **around)
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    shape = mtf.Shape([mtf.Dimension(name, SIZES[name]) for name in ("batch", "outer")])
    w = mtf.get_variable(mesh, "w", shape, initializer=tf.zeros_initializer())
    (grad,) = mtf.gradients([mtf.square(w)], [w])
    for call in (
        lambda: opt.compute_gradients(mtf.square(w)),
        lambda: opt.apply_grads([grad], [w.operation]),
    ):
        if is_refused:
            with pytest.raises(ValueError, match=r"around and inner inside it would both.*'w'"):
                call()
        else:
            assert call()


def warnings_of(caplog, opt, loss):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        opt.compute_gradients(loss)
    return [r.getMessage() for r in caplog.records if "the loss of shape" in r.getMessage()]


def test_warnings_of_losses_whose_dimensions_nobody_knows(caplog):
    opt = gs.ClipByGlobalNormOptimizer(sgd(), 1.0)
    (warning,) = warnings_of(caplog, opt, a_loss("rows"))
    assert warning.startswith("ClipByGlobalNormOptimizer")
    assert "['batch']" in warning
    assert "name it in batch_dims" in warning
    assert not warnings_of(caplog, opt, a_loss("outer", "batch"))
    harness.placement("rows:2", "outer:rows")
    (warning,) = warnings_of(caplog, opt, a_loss("outer", "batch"))
    assert "along ['batch'], and is summed along ['outer']" in warning


def test_a_scalar_is_warned_of_only_where_a_reduction_was_asked_for(caplog):
    local = accumulation(sgd(), **axes("rows"))
    assert not warnings_of(caplog, local, a_loss())
    around = average(cross_shard(sgd(), **axes("rows")))
    assert len(warnings_of(caplog, around, a_loss())) == 1


def test_gradients_per_shard_pass_through_wrappers_that_do_not_know_the_shards(mesh_kind):
    where = {"mesh_shape": "all:2", "layout": "rows:all", "batch_dims": "rows"}
    grads = np.random.RandomState(0).randn(2, 3).astype("f")

    def build(mesh, inputs):
        rows, feature = mtf.Dimension("rows", 2), mtf.Dimension("in", 3)
        grad = mtf.import_tf_tensor(mesh, inputs["g"], mtf.Shape([rows, feature]))
        w = mtf.get_variable(mesh, "w", [feature], initializer=tf.zeros_initializer())
        opt = average(gs.ClipByGlobalNormOptimizer(cross_shard(sgd(), **where), 99.0))
        return opt.apply_gradients([(grad, w.operation)]), {}

    found = harness.run(mesh_kind, where["mesh_shape"], where["layout"], build, [{"g": grads}])
    right = -0.1 * grads.astype(np.float64).sum(0)
    np.testing.assert_allclose(found.variables["w"], right, rtol=0, atol=4 * 2.0**-24)
