"""Two optimizers of one graph must not share the slots of a variable that both update."""

import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf

AXES = {"mesh_shape": "b:2", "layout": "batch:b"}


def adam():
    return mtf.optimize.AdamWeightDecayOptimizer(0.1)


def sgd():
    return mtf.optimize.SgdOptimizer(0.1)


def apply(opt, *variables):
    grads = mtf.gradients([mtf.reduce_sum(sum(mtf.square(v) for v in variables))], variables)
    return opt.apply_grads(grads, [v.operation for v in variables])


class OfAnotherLibrary(mtf.optimize.Optimizer):
    """An optimizer around one of this package, as other libraries may have."""

    def __init__(self, opt):
        self.opt = opt

    def apply_grads(self, grads, variables):
        return self.opt.apply_grads(grads, variables)


@pytest.fixture
def variables():
    with tf.Graph().as_default():
        mesh, dim = mtf.Mesh(mtf.Graph(), "mesh"), mtf.Dimension("d", 256)
        zeros = tf.zeros_initializer()
        # "w" and "w_b": the slots of one must not be taken for those of the other.
        yield [mtf.get_variable(mesh, n, mtf.Shape([dim]), initializer=zeros) for n in ("w", "w_b")]


MAKE = {
    "w/adam_m": lambda name: gs.CrossShardOptimizer(adam()),
    "w_momentum_v": lambda name: gs.ClipByGlobalNormOptimizer(
        mtf.optimize.MomentumOptimizer(0.1, 0.9), 1.0
    ),
    "w/gradient_accumulator": lambda name: gs.GradientAccumulationOptimizer(
        sgd(), 2, accumulate="synced", name=name
    ),
}


@pytest.mark.parametrize("slot", MAKE)
def test_sharing_is_an_error_and_a_scope_is_a_cure(variables, slot):
    w, other = variables
    make, graph = MAKE[slot], w.mesh.graph
    apply(make("a"), w, other)
    before = list(graph.all_variables)
    with pytest.raises(ValueError, match=f"update 'w' .* slot '{slot}'.*tf.variable_scope"):
        apply(make("b"), w)
    assert graph.all_variables == before
    with tf.variable_scope("second"):
        apply(make("c"), w)
    assert f"second/{slot}" in {v.name for v in graph.all_variables}


def test_other_wrappers_around_another_optimizer_share_as_well(variables):
    w, _ = variables
    apply(gs.CrossShardOptimizer(adam()), w)
    others = (gs.ShardedUpdateOptimizer(adam(), **AXES), OfAnotherLibrary(adam()))
    for opt in (others[0], gs.AverageOptimizer(others[1], 0.9)):
        with pytest.raises(ValueError, match=r"update 'w' .* slot 'w/adam_m'"):
            apply(opt, w)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("make", [adam, lambda: gs.AdamWOptimizer(0.1)])
def test_an_optimizer_without_a_wrapper_shares_as_well(variables, is_first, make):
    w, other = variables
    alone, wrapped = make(), gs.LossScaleOptimizer(make())
    first, second = (alone, wrapped) if is_first else (wrapped, alone)
    apply(first, w, other)
    with pytest.raises(ValueError, match=r"update 'w' .* slot 'w/adam_m'"):
        apply(second, w)


def test_two_optimizers_without_wrappers_are_warned_of(variables, caplog):
    w, other = variables
    inner = adam()
    for opt in (inner, inner, adam()):
        apply(opt, w)
    apply(sgd(), w)
    with tf.variable_scope("second"):
        apply(adam(), other)
    (line,) = [x.getMessage() for x in caplog.records if "Two optimizers" in x.getMessage()]
    assert "'w/adam_m'" in line


def test_a_variable_has_one_average(variables):
    w, other = variables
    opt = gs.AverageOptimizer(sgd(), 0.5)
    apply(opt, w)
    apply(opt, w)
    replicas = gs.SyncReplicasOptimizer(
        sgd(), 1, variable_averages=0.5, variables_to_average=[w.operation], **AXES
    )
    for second in (gs.AverageOptimizer(sgd(), 0.9, name="b"), replicas):
        with tf.variable_scope("second"):
            with pytest.raises(
                ValueError, match=r"'w/ExponentialMovingAverage'.*Average it in one"
            ):
                apply(second, w)
    apply(gs.AverageOptimizer(sgd(), 0.9, name="c"), other)


def test_what_shares_nothing_is_no_error(variables):
    w, other = variables
    inner = adam()
    opt = gs.CrossShardOptimizer(inner)
    apply(opt, w)
    apply(opt, other)
    apply(opt, w)
    # One optimizer keeps the slots, whichever wrappers are around it.
    apply(gs.ClipByGlobalNormOptimizer(inner, 1.0), w)
    apply(gs.CrossShardOptimizer(OfAnotherLibrary(gs.AverageOptimizer(inner, 0.5))), w)
    apply(gs.CrossShardOptimizer(sgd()), w)
    with tf.variable_scope("second"):
        apply(gs.CrossShardOptimizer(adam()), other)
