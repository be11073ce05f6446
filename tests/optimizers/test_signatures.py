"""Names, order and defaults of every wrapper's arguments, for Python, gin and the command."""

import functools
import inspect

import gin
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.compat_v1 import NOT_GIVEN
from mtf_gradsync.optimizers import Wrapper
from mtf_gradsync.tools._private.gin import registered

SHARED = [
    ("learning_rate", NOT_GIVEN),
    ("axes", None),
    ("mesh_shape", None),
    ("layout", None),
    ("batch_dims", ("batch",)),
    ("reducer", None),
]
OPT = ("opt", inspect.Parameter.empty)
# Public arguments: programs give them by position, and gin files by name.
SIGNATURES = {
    "AverageOptimizer": [
        OPT,
        ("decay", 0.999),
        ("variables_to_average", None),
        ("name", "AverageOptimizer"),
        *SHARED,
        ("num_updates", None),
        ("zero_debias", False),
    ],
    "ClipByGlobalNormOptimizer": [
        OPT,
        ("clip_norm", gin.REQUIRED),
        ("name", "ClipByGlobalNormOptimizer"),
        *SHARED,
    ],
    "CrossShardOptimizer": [
        OPT,
        ("reduction", "weighted_mean"),
        ("name", "CrossShardOptimizer"),
        ("group_assignment", None),
        *SHARED,
    ],
    "GradientAccumulationOptimizer": [
        OPT,
        ("backward_passes_per_step", gin.REQUIRED),
        ("average_aggregated_gradients", False),
        ("should_skip_update_fn", None),
        ("accumulator_dtype", None),
        ("checkpoint_accumulators", True),
        ("accumulate", None),
        ("sparse_as_dense", False),
        ("allreduce_fn", None),
        ("name", "GradientAccumulationOptimizer"),
        *SHARED,
        ("reduce_dtype", None),
        ("max_steps_without_update", None),
        ("flush", None),
    ],
    "LossScaleOptimizer": [
        OPT,
        ("loss_scale", "dynamic"),
        ("initial_scale", 2.0**15),
        ("growth_steps", 2000),
        ("multiplier", 2.0),
        ("min_scale", 1.0),
        ("max_scale", 2.0**24),
        ("name", "LossScaleOptimizer"),
        *SHARED,
        ("max_steps_without_update", None),
    ],
    "OuterOptimizer": [
        OPT,
        ("inner_steps", gin.REQUIRED),
        ("outer_learning_rate", 0.7),
        ("outer_momentum", 0.5),
        ("nesterov", True),
        ("fragments", 1),
        ("outer_dims", None),
        ("leave_out_not_finite", False),
        ("name", "OuterOptimizer"),
        *SHARED,
        ("max_steps_without_update", None),
    ],
    "ShardedUpdateOptimizer": [
        OPT,
        ("min_size", None),
        ("name", "ShardedUpdateOptimizer"),
        *SHARED,
    ],
    "SyncReplicasOptimizer": [
        OPT,
        ("replicas_to_aggregate", gin.REQUIRED),
        ("total_num_replicas", None),
        ("variable_averages", None),
        ("variables_to_average", None),
        ("use_locking", False),
        ("name", "sync_replicas"),
        ("contributes", None),
        ("local_steps", None),
        ("max_steps_without_update", None),
        ("accept_summed", False),
        *SHARED,
        ("reduce_dtype", None),
    ],
}
by_name = pytest.mark.parametrize("name", SIGNATURES)


def test_every_wrapper_is_listed():
    wrappers = [x for x in vars(gs).values() if isinstance(x, type) and issubclass(x, Wrapper)]
    assert sorted(x.__name__ for x in wrappers) == sorted(SIGNATURES)


@by_name
def test_names_order_and_defaults(name):
    parameters = inspect.signature(getattr(gs, name)).parameters.values()
    assert [(p.name, p.default) for p in parameters] == SIGNATURES[name]
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@by_name
def test_arguments_by_position(name):
    given = {
        "opt": mtf.optimize.SgdOptimizer,
        "learning_rate": 0.5,
        "mesh_shape": "shards:2",
        "layout": "examples:shards",
        "batch_dims": "examples",
        "clip_norm": 1.0,
        "inner_steps": 2,
        "replicas_to_aggregate": 1,
        "backward_passes_per_step": 2,
    }
    wrapper = getattr(gs, name)(*(given.get(key, default) for key, default in SIGNATURES[name]))
    assert (wrapper.axes.num_shards, wrapper.axes.batch_dims) == (2, ("examples",))
    assert wrapper.name == dict(SIGNATURES[name])["name"]
    assert wrapper.opt.lr == 0.5 if hasattr(wrapper.opt, "lr") else wrapper.opt is not None


@by_name
def test_wrong_arguments_are_named(name):
    wrapper, opt = getattr(gs, name), mtf.optimize.SgdOptimizer(0.1)
    required = {key: 1 for key, default in SIGNATURES[name] if default is gin.REQUIRED}
    with pytest.raises(TypeError, match=rf"{name}.*'batch_dim'"):
        wrapper(opt, batch_dim="batch", **required)
    with pytest.raises(TypeError, match=rf"{name}.*'name'"):
        wrapper(*[opt] * len(SIGNATURES[name]), name="twice")
    with pytest.raises(TypeError, match=rf"{name}.*positional argument"):
        wrapper(*[opt] * (len(SIGNATURES[name]) + 1))


@by_name
def test_gin_knows_the_arguments(name):
    with gin.unlock_config():
        gin.bind_parameter(f"{name}.batch_dims", ("rows",))
        try:
            assert gin.query_parameter(f"mtf_gradsync.{name}.batch_dims") == ("rows",)
            with pytest.raises(ValueError, match="batch_dim"):
                gin.bind_parameter(f"{name}.batch_dim", ("rows",))
        finally:
            gin.clear_config()
    assert registered()[f"mtf_gradsync.{name}"] == [key for key, _ in SIGNATURES[name]]


def outer(**given):
    return gs.OuterOptimizer(mtf.optimize.SgdOptimizer(0.1), 4, outer_dims=(), **given)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (outer, "outer_learning_rate", 1e39),
        (outer, "outer_learning_rate", 1e-46),
        (outer, "outer_learning_rate", float("inf")),
        (outer, "outer_momentum", 1 - 1e-9),  # 1 in float32
        (outer, "outer_momentum", 1e-46),
        (lambda learning_rate: gs.AdamWOptimizer(learning_rate), "learning_rate", 1e39),
        (functools.partial(gs.AdamWOptimizer, 0.1), "weight_decay_rate", 1e39),
        (functools.partial(gs.AdamWOptimizer, 0.1), "epsilon", 1e-46),
        (functools.partial(gs.ClipByGlobalNormOptimizer, outer()), "clip_norm", 1e-46),
        (gs.skip_large_updates, "max_norm", 1e-46),
        (functools.partial(gs.LossScaleOptimizer, outer()), "loss_scale", 1e39),
        (functools.partial(gs.LossScaleOptimizer, outer()), "multiplier", 1e39),
        (functools.partial(gs.reduce.CompressedAllReduce, None, "bfloat16"), "prescale", 1e39),
        (functools.partial(gs.adafactor_decay_rate_per_update, 4), "exponent", 1e39),
    ],
)
def test_numbers_that_float32_does_not_hold_are_refused(make, name, value):
    with pytest.raises(ValueError, match=rf"{name} must be .*, got {value!r}".replace("+", r"\+")):
        make(**{name: value})


def test_limits_beyond_float32_are_no_limits():
    assert gs.skip_large_updates(1e39).max_norm == 1e39
    assert gs.ClipByGlobalNormOptimizer(outer(), 1e39)
