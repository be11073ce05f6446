"""When a loss that is not finite ends training."""

import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.tools.train.loop import Patience

NAN = float("nan")


def optimizer(skip_fn):
    kwargs = {"mesh_shape": "b:2", "layout": "batch:b"}
    inner = gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.1))
    return gs.GradientAccumulationOptimizer(inner, 2, should_skip_update_fn=skip_fn, **kwargs)


def stack(opt):
    return [opt, *(opt.inner_stack() if hasattr(opt, "inner_stack") else [])]


@pytest.mark.parametrize(
    "opt", [mtf.optimize.SgdOptimizer(0.1), optimizer(None), optimizer(lambda grads: grads)]
)
def test_ends_at_once_where_nothing_is_skipped(opt):
    patience = Patience(stack(opt))
    assert patience.add(1.0, 0)
    assert not patience.add(NAN, 1)


@pytest.mark.parametrize("skip_fn", [gs.skip_not_finite, gs.skip_large_updates(1.0)])
def test_ends_after_steps_without_an_update_where_some_are_skipped(skip_fn):
    patience = Patience(stack(optimizer(skip_fn)))
    assert all(patience.add(NAN, step) for step in range(300))
    assert all(patience.add(float("inf"), 299) for _ in range(99))
    assert patience.add(1.0, 299)
    assert all(patience.add(NAN, 299) for _ in range(100))
    assert not patience.add(NAN, 299)
