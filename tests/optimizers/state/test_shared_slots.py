"""Two optimizers of one graph that share the slots of a variable give a warning."""

import re

import pytest

import mtf_gradsync as gs
from mtf_gradsync._common import reset_warnings
from mtf_gradsync._private.libraries import mtf, tf


def adam():
    return gs.CrossShardOptimizer(mtf.optimize.AdamWeightDecayOptimizer(0.1))


def sgd():
    return gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.1))


def accumulating(name):
    opt = mtf.optimize.SgdOptimizer(0.1)
    return gs.GradientAccumulationOptimizer(opt, 2, accumulate="synced", name=name)


def apply(opt, *variables):
    grads = mtf.gradients([mtf.reduce_sum(sum(mtf.square(v) for v in variables))], variables)
    return opt.apply_grads(grads, [v.operation for v in variables])


@pytest.fixture
def variables():
    reset_warnings()
    with tf.Graph().as_default():
        mesh, dim = mtf.Mesh(mtf.Graph(), "mesh"), mtf.Dimension("d", 3)
        zeros = tf.zeros_initializer()
        # "w" and "w_b": the slots of one must not be taken for those of the other.
        yield [mtf.get_variable(mesh, n, mtf.Shape([dim]), initializer=zeros) for n in ("w", "w_b")]


@pytest.mark.parametrize(
    ("make", "slot"),
    [(lambda name: adam(), "w/adam_m"), (accumulating, "w/gradient_accumulator")],
)
def test_sharing_warns_and_a_scope_is_a_cure(variables, make, slot, caplog):
    w, other = variables
    apply(make("a"), w, other)
    graph = w.mesh.graph
    assert not caplog.text
    apply(make("b"), w)
    assert re.search(f"update 'w' .* slot '{slot}'.*tf.variable_scope", caplog.text)
    caplog.clear()
    with tf.variable_scope("second"):
        apply(make("c"), w)
    assert not caplog.text
    assert f"second/{slot}" in {v.name for v in graph.all_variables}


def test_what_shares_nothing_gives_no_warning(variables, caplog):
    w, other = variables
    opt = adam()
    apply(opt, w)
    apply(opt, other)
    apply(opt, w)
    apply(sgd(), w)
    with tf.variable_scope("second"):
        apply(adam(), other)
    assert not caplog.text
