"""CrossShardOptimizer around TensorFlow's optimizers: in programs for TPUs, and without a TPU."""

import logging

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import tf
from tests import reference
from tests.compat_v1 import optimizers

CORES = 4
INNER = {
    "momentum": lambda: tf.train.MomentumOptimizer(0.05, 0.9),
    "adam": lambda: tf.train.AdamOptimizer(0.02, epsilon=1e-3),
}


def session(runtime, program):
    if runtime == "XLA devices":
        return xla.session(program, cache_dir=None)
    return program.session()


def shares(feed):
    """Each core's part of a batch."""
    return [
        {name: np.split(value, CORES)[core] for name, value in feed.items()}
        for core in range(CORES)
    ]


def cores_train(runtime, make, feeds, scale=1.0):
    """Trains in a program for TPUs, each core on its part; returns the variables."""
    with tf.Graph().as_default():
        parts = shares(feeds[0])
        inputs = [
            {n: tf.placeholder(tf.float32, value.shape) for n, value in part.items()}
            for part in parts
        ]
        step = tf.train.get_or_create_global_step()
        with simd.tpu_program(f"all:{CORES}", "") as program:
            mine = {n: program.per_replica([given[n] for given in inputs]) for n in parts[0]}
            loss, variables = optimizers.plain_model(mine)
            update = make().minimize(loss * scale, step, variables)
        with session(runtime, program) as cores:
            for feed in feeds:
                values = {}
                for given, part in zip(inputs, shares(feed)):
                    values.update({given[n]: value for n, value in part.items()})
                cores.run(update, values)
            return cores.variables()


@pytest.mark.parametrize(
    ("runtime", "inner", "reduction"),
    [
        ("CPU replicas", "momentum", "weighted_mean"),
        ("CPU replicas", "adam", "weighted_sum"),
        ("XLA devices", "momentum", "weighted_sum"),
        ("XLA devices", "adam", "weighted_mean"),
    ],
)
def test_cores_train_as_one_device_does_on_the_whole_batch(runtime, inner, reduction):
    assert reduction in (tf.losses.Reduction.MEAN, tf.losses.Reduction.SUM)
    feeds = optimizers.batches(10)

    def make():
        optimizer = gs.CrossShardOptimizer(INNER[inner](), reduction)
        assert isinstance(optimizer, tf.tpu.CrossShardOptimizer)
        return optimizer

    scale = 1.0 if reduction == "weighted_mean" else 1.0 / CORES
    found = cores_train(runtime, make, feeds, scale)
    optimizers.assert_close(found, optimizers.plain_training(INNER[inner], feeds), 10)


@pytest.mark.parametrize("runtime", ["CPU replicas", "XLA devices"])
@pytest.mark.mostly_slow
def test_around_accumulation_in_a_program_for_tpus(runtime):
    feeds = optimizers.batches(8)
    doubled = [
        {n: np.concatenate([first[n], second[n]]) for n in first}
        for first, second in zip(feeds[::2], feeds[1::2])
    ]

    def make():
        inner = gs.GradientAccumulationOptimizer(
            INNER["adam"](), 2, average_aggregated_gradients=True
        )
        return gs.CrossShardOptimizer(inner)

    found = cores_train(runtime, make, feeds)
    expected = optimizers.plain_training(INNER["adam"], doubled)
    assert found.pop("global_step") == 8
    del expected["global_step"]
    optimizers.assert_close(found, expected, 10)


def test_sums_of_single_cores_are_refused():
    def make():
        return gs.GradientAccumulationOptimizer(gs.CrossShardOptimizer(INNER["adam"]()), 2)

    with pytest.raises(ValueError, match=r"CrossShardOptimizer\(GradientAccumulationOptimizer"):
        cores_train("CPU replicas", make, optimizers.batches(1))


class Handing(tf.train.Optimizer):
    """A wrapper of somebody else's."""

    def __init__(self, inner):
        super().__init__(False, "Handing")
        self._optimizer = inner

    def apply_gradients(self, *arguments, **keywords):
        return self._optimizer.apply_gradients(*arguments, **keywords)


def test_they_are_refused_inside_other_wrappers_too():
    def make():
        inner = Handing(gs.CrossShardOptimizer(INNER["adam"]()))
        return gs.GradientAccumulationOptimizer(inner, 2)

    with pytest.raises(ValueError, match="all cores share the variables"):
        cores_train("CPU replicas", make, optimizers.batches(1))


def test_without_a_tpu_it_is_the_plain_optimizer_and_says_so(caplog):
    feeds = optimizers.batches(5)
    logging.getLogger("tensorflow").propagate = True
    with caplog.at_level(logging.WARNING, logger="tensorflow"):
        found = optimizers.plain_training(lambda: gs.CrossShardOptimizer(INNER["adam"]()), feeds)
    assert "Assuming 1" in caplog.text
    expected = optimizers.plain_training(INNER["adam"], feeds)
    reference.assert_equal(found, expected)


def test_groups_need_their_shards():
    optimizer = gs.CrossShardOptimizer(INNER["adam"](), group_assignment=[[0, 1], [2, 3]])
    w = tf.get_variable("w", [3], use_resource=True)
    with pytest.raises(ValueError, match="group_assignment"):
        optimizer.minimize(tf.reduce_sum(w))
