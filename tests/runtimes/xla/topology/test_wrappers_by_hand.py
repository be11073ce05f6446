"""The steps by hand in JAX, whose cost the benchmark compares with the wrappers', compute the same.

The very functions that `benchmarks.wrappers_by_hand` compiles for a TPU run on CPU devices.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Sequence

import jax
import numpy as np
import pytest

import mtf_gradsync as gs
from benchmarks import lm_by_hand, models, wrappers_by_hand
from mtf_gradsync._private.libraries import mtf
from tests import harness
from tests.reference import Adam

SHARDS, LAYERS, WIDTH, BATCH = 8, 2, 4, 16
BARE, ACCUMULATION, SYNC_REPLICAS, LOSS_SCALE = wrappers_by_hand.KINDS
UPDATE, SKIP = True, False
Values = dict[str, np.ndarray]


def batches(steps: int) -> list[np.ndarray]:
    rng = np.random.RandomState(1)
    return [rng.randn(BATCH, WIDTH).astype("f") for _ in range(steps)]


def with_inf_in_shard(batch: np.ndarray, shard: int) -> np.ndarray:
    batch = batch.copy()
    batch[shard * BATCH // SHARDS] = np.inf
    return batch


def dense_values() -> Values:
    rng = np.random.RandomState(0)
    weights = {f"w{i}": (rng.randn(WIDTH, WIDTH) / 2).astype("f") for i in range(LAYERS)}
    return {**weights, **{f"b{i}": np.zeros(WIDTH, "f") for i in range(LAYERS)}}


def dense_gradients(values: Values, x: np.ndarray) -> Values:
    """Of the mean of the squared outputs, in float64."""
    inputs, grads = [np.float64(x)], {}
    for i in range(LAYERS):
        inputs.append(np.tanh(inputs[-1] @ values[f"w{i}"] + values[f"b{i}"]))
    back = 2 * inputs[-1] / inputs[-1].size
    for i in reversed(range(LAYERS)):
        back = back * (1 - inputs[i + 1] ** 2)
        grads[f"w{i}"], grads[f"b{i}"] = inputs[i].T @ back, back.sum(0)
        back = back @ values[f"w{i}"].T
    return grads


def of_shards(values: Values, x: np.ndarray) -> Values:
    """Each shard's term of the gradient, along a first dimension of shards."""
    parts = [dense_gradients(values, part) for part in np.split(x, SHARDS)]
    return {k: np.stack([part[k] for part in parts]) / SHARDS for k in values}


def adam_of(values: Values) -> Adam:
    adam = Adam(1e-3, decay=0.0)
    adam.m, adam.v = ({k: np.zeros_like(v, float) for k, v in values.items()} for _ in range(2))
    return adam


class ByHand:
    """A run by the compiled functions: parameters, slots and state, written anew by each step."""

    def __init__(
        self,
        kind: str,
        values: Values,
        model: Any = None,
        optimizer: Any = None,
        mesh_shape: tuple[int, int] = (SHARDS, 1),
        **state: Any,
    ):
        devices = np.array(jax.devices()[:8]).reshape(mesh_shape)
        mesh = jax.sharding.Mesh(devices, ("batch", "model"))
        model = model or wrappers_by_hand.dense_model(LAYERS, WIDTH)
        optimizer = optimizer or wrappers_by_hand.adam()
        made = {
            condition: wrappers_by_hand.make_step(mesh, model, optimizer, kind, condition)
            for condition in (UPDATE, SKIP)
        }
        self._steps = {condition: step for condition, (step, _) in made.items()}
        self._shapes = made[UPDATE][1]
        zeros = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), self._shapes[2])
        state = {k: np.asarray(v, zeros[k].dtype) for k, v in state.items()}
        self._all = (values, jax.tree.map(np.asarray, optimizer.init(values)), {**zeros, **state})

    values = property(lambda self: self._all[0])
    slots = property(lambda self: self._all[1])
    state = property(lambda self: self._all[2])

    def step(self, condition: bool, x: np.ndarray) -> None:
        given = jax.tree.map(lambda v, s: jax.device_put(v, s.sharding), self._all, self._shapes)
        after = self._steps[condition](*given, x)
        for shape, value in zip(jax.tree.leaves(self._shapes), jax.tree.leaves(after)):
            assert (shape.shape, shape.dtype) == (value.shape, value.dtype)
            assert shape.sharding.is_equivalent_to(value.sharding, value.ndim)
        self._all = jax.tree.map(np.asarray, after)

    def check(self, values: Values, slots: Adam, sums: Values | None = None, **state: Any) -> None:
        """Compares with the reference: parameters, both averages of Adam, and all of the state."""
        assert_close(self.values, values)
        assert_close(self.slots[0], slots.m)
        assert_close(self.slots[1], slots.v)
        if sums is not None:
            assert_close(self.state["sums"], sums)
        assert {*state, *(() if sums is None else ("sums",))} == set(self.state)
        for k, value in state.items():
            np.testing.assert_array_equal(self.state[k], value, err_msg=k)


def assert_close(actual: Any, expected: Any) -> None:
    """To a few float32 roundings of the largest numbers: sums of many signs cancel in part."""
    assert set(expected) <= set(actual)
    for k, value in expected.items():
        atol = 1e-5 * np.max(np.abs(value))
        np.testing.assert_allclose(actual[k], value, rtol=1e-5, atol=atol, err_msg=k)


def test_bare():
    values, run = dense_values(), ByHand(BARE, dense_values())
    adam = adam_of(values)
    for x in batches(3):
        run.step(UPDATE, x)
        values = adam(values, dense_gradients(values, x))
        run.check(values, adam)


def test_accumulation():
    values, run = dense_values(), ByHand(ACCUMULATION, dense_values())
    adam, micro_step, updates = adam_of(values), 0, 0
    nothing = {k: np.zeros((SHARDS, *v.shape)) for k, v in values.items()}
    sums = nothing
    for x, condition in zip(batches(5), (SKIP, SKIP, UPDATE, SKIP, UPDATE)):
        run.step(condition, x)
        sums = {k: sums[k] + g for k, g in of_shards(values, x).items()}
        micro_step += 1
        if condition:
            values = adam(values, {k: s.sum(0) for k, s in sums.items()})
            sums, micro_step, updates = nothing, 0, updates + 1
        run.check(values, adam, sums=sums, micro_step=micro_step, updates=updates)


def test_sync_replicas():
    """Two updates from all shards, then two steps without: a shard is late, another has an inf."""
    values, run = dense_values(), ByHand(SYNC_REPLICAS, dense_values())
    adam, made, dropped = adam_of(values), np.zeros(SHARDS, int), np.zeros(SHARDS, int)
    sums = {k: np.zeros((SHARDS, *v.shape)) for k, v in values.items()}
    for number, x in enumerate(batches(2)):
        run.step(UPDATE, x)
        values = adam(values, dense_gradients(values, x))
        made += 1
        steps = {"update_step": number + 1, "local_step": [number + 1] * SHARDS}
        run.check(values, adam, sums=sums, count=0, made=made, dropped=dropped, **steps)

    local_step = np.int32([2, 2, 2, 1, 2, 2, 2, 2])
    run.state["local_step"] = local_step
    count = 0
    for x in batches(2):
        x = with_inf_in_shard(x, shard=6)
        run.step(SKIP, x)
        fresh = np.array([True, True, True, False, True, True, False, True])
        with np.errstate(invalid="ignore"):
            terms = of_shards(values, x)
        for k in sums:
            sums[k][fresh] += terms[k][fresh]
        made, dropped, count = made + fresh, dropped + ~fresh, count + fresh.sum()
        steps = {"update_step": 2, "local_step": local_step}
        run.check(values, adam, sums=sums, count=count, made=made, dropped=dropped, **steps)


def test_loss_scale():
    """The scale doubles after 2,000 finite steps, and an inf halves it and makes no update."""
    run = ByHand(LOSS_SCALE, dense_values(), scale=1024.0, good_steps=1998)
    values = dense_values()
    adam, (first, second, third) = adam_of(values), batches(3)
    for x, scale, good_steps in ((first, 1024, 1999), (second, 2048, 0)):
        run.step(UPDATE, x)
        values = adam(values, dense_gradients(values, x))
        run.check(values, adam, scale=scale, good_steps=good_steps, skipped=0)
    run.step(SKIP, with_inf_in_shard(third, shard=6))
    run.check(values, adam, scale=1024, good_steps=0, skipped=1)
    run.step(UPDATE, third)
    values = adam(values, dense_gradients(values, third))
    run.check(values, adam, scale=1024, good_steps=1, skipped=1)


WHERE = {"mesh_shape": "all:8", "layout": "batch:all"}
WRAPPED = {
    ACCUMULATION: (
        lambda inner: gs.GradientAccumulationOptimizer(inner, 2, **WHERE),
        (SKIP, UPDATE, SKIP, UPDATE),
    ),
    SYNC_REPLICAS: (
        lambda inner: gs.SyncReplicasOptimizer(inner, SHARDS, **WHERE),
        (UPDATE, UPDATE, UPDATE),
    ),
    LOSS_SCALE: (
        lambda inner: gs.LossScaleOptimizer(inner, initial_scale=1024.0, **WHERE),
        (UPDATE, SKIP, UPDATE),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRAPPED)
def test_by_hand_updates_as_the_wrapper(kind):
    """On the benchmark's dense model, with its values and its optimizer."""
    wrap, conditions = WRAPPED[kind]
    model = models.dense(LAYERS, WIDTH, BATCH)
    inputs = [
        with_inf_in_shard(x, 6) if kind == LOSS_SCALE and condition is SKIP else x
        for x, condition in zip(batches(4), conditions)
    ]

    def build(mesh: Any, placeholders: Any) -> tuple[Sequence[Any], dict[str, Any]]:
        loss = model.make_loss(mesh, placeholders["x"])
        optimizer, variables = wrap(model.make_optimizer()), mesh.graph.trainable_variables
        if kind == LOSS_SCALE:
            grads = [g for g, _ in optimizer.compute_gradients(loss, variables)]
        else:
            grads = mtf.gradients([loss], [v.value for v in variables])
        return optimizer.apply_grads(grads, variables), {"loss": loss}

    made = harness.built("simd", *WHERE.values(), build, {"x": inputs[0]})
    theirs = made.after_each([{"x": x} for x in inputs])
    run = ByHand(kind, dense_values(), **({"scale": 1024.0} if kind == LOSS_SCALE else {}))
    for condition, x, expected in zip(conditions, inputs, theirs):
        run.step(condition, x)
        for name, mine in (("", run.values), ("/adam_m", run.slots[0]), ("/adam_v", run.slots[1])):
            assert_close(mine, {k: expected[k + name] for k in run.values})


VOCABULARY, LENGTH, GROUPS = lm_by_hand.VOCABULARY, 4, 4
DESCENT = wrappers_by_hand.Optimizer(
    lambda p: (), lambda grads, slots, p: (jax.tree.map(lambda g: -g, grads), slots)
)


def lm_loss(p: Values, tokens: np.ndarray) -> float:
    """The language model of one layer in float64: the mean of the tokens' cross entropies."""

    def normalized(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    def softmax(x: np.ndarray) -> np.ndarray:
        exponents = np.exp(x - x.max(-1, keepdims=True))
        return exponents / exponents.sum(-1, keepdims=True)

    p = {k: np.float64(v) for k, v in p.items()}
    total = 0.0
    for sequence in tokens:
        x = p["embedding"][[0, *sequence[:-1]]] + p["position"]
        h = normalized(x, p["0/attention_norm"])
        for head in range(lm_by_hand.HEADS):
            q, k, v = (h @ p[f"0/{name}"][:, head] for name in ("query", "key", "value"))
            scores = np.where(np.tri(LENGTH) > 0, q @ k.T, -np.inf)
            x = x + softmax(scores) @ v @ p["0/output"][head]
        h = normalized(x, p["0/dense_norm"])
        x = x + np.maximum(h @ p["0/wide"], 0) @ p["0/narrow"]
        logits = normalized(x, p["norm"]) / np.sqrt(x.shape[-1]) @ p["embedding"].T
        total -= np.log(softmax(logits)[np.arange(LENGTH), sequence]).sum()
    return total / tokens.size


def lm(d_model: int) -> tuple[Any, Values, list[np.ndarray]]:
    """The model of one layer, values and two batches."""
    model = lm_by_hand.language_model(1, d_model, LENGTH)
    rng = np.random.RandomState(0)
    values = {k: (rng.randn(*shape) / 2).astype("f") for k, (shape, _) in model[0].items()}
    return model, values, [rng.randint(1, VOCABULARY, (8, LENGTH)).astype("i") for _ in range(2)]


def assert_gradients(grads: Values, values: Values, tokens: np.ndarray, scale: float) -> None:
    """Each tensor's derivative along its own direction is that of the loss in float64."""
    for k, grad in grads.items():
        direction = np.sign(grad) + np.random.RandomState(2).randn(*grad.shape)
        direction *= 1e-5 / np.linalg.norm(direction)
        ends = [lm_loss({**values, k: values[k] + s * direction}, tokens) for s in (0.5, -0.5)]
        expected = (ends[0] - ends[1]) * scale / 1e-5
        size = np.linalg.norm(grad)
        np.testing.assert_allclose(np.sum(grad * direction) / 1e-5, expected, atol=1e-5 * size)


@pytest.mark.slow
@pytest.mark.parametrize("kind", wrappers_by_hand.KINDS)
def test_language_model(kind):
    """Split over an axis of its own. With steps of plain descent, which show the gradients."""
    if kind == SYNC_REPLICAS and not hasattr(jax, "shard_map"):
        pytest.skip("jax before 0.6.1 has no axis_index where XLA splits a step over more axes")
    model, values, (first, second) = lm(d_model=8)
    state = {"scale": 1024.0} if kind == LOSS_SCALE else {}

    def started() -> ByHand:
        return ByHand(kind, values, model, DESCENT, mesh_shape=(GROUPS, 2), **state)

    run = started()
    run.step(UPDATE, first)
    total = {k: values[k] - run.values[k] for k in values}
    assert_gradients(total, values, first, scale=1.0)
    if kind not in (ACCUMULATION, SYNC_REPLICAS):
        return
    run = started()
    run.step(SKIP, second)
    assert_close(run.values, values)
    for number, tokens in enumerate(np.split(second, GROUPS)):
        grads = {k: s[number] for k, s in run.state["sums"].items()}
        assert_gradients(grads, values, tokens, scale=1 / GROUPS)
    if kind == ACCUMULATION:
        sums = {k: s.sum(0) + total[k] for k, s in run.state["sums"].items()}
        run.step(UPDATE, first)
        assert_close(run.values, {k: values[k] - sums[k] for k in values})


@pytest.mark.skipif(importlib.util.find_spec("optax") is None, reason="Adafactor is optax's")
def test_adafactor():
    """Two updates, with factored statistics where two dimensions have 128 numbers or more."""
    import optax

    model, values, inputs = lm(d_model=128)
    run = ByHand(BARE, values, model, optax.adafactor(0.01), mesh_shape=(GROUPS, 2))
    statistics: dict[str, Any] = {k: 0.0 for k in values}
    for number, tokens in enumerate(inputs):
        shown = ByHand(ACCUMULATION, values, model, DESCENT, mesh_shape=(GROUPS, 2))
        shown.step(SKIP, tokens)
        run.step(UPDATE, tokens)
        decay = 1 - (number + 1) ** -0.8
        for k, value in values.items():
            grad = shown.state["sums"][k].sum(0, dtype=float)
            square = grad**2 + 1e-30
            if min(value.shape) >= 128 and value.ndim == 2:
                rows, columns = statistics[k] or (0.0, 0.0)
                rows = decay * rows + (1 - decay) * square.mean(1)
                columns = decay * columns + (1 - decay) * square.mean(0)
                statistics[k] = rows, columns
                change = grad / np.sqrt(np.outer(rows, columns) / rows.mean())
            else:
                statistics[k] = decay * statistics[k] + (1 - decay) * square
                change = grad / np.sqrt(statistics[k])
            change /= max(1.0, np.sqrt(np.mean(change**2)))
            size = max(1e-3, np.sqrt(np.mean(np.float64(value) ** 2)))
            values = {**values, k: (value - 0.01 * size * change).astype("f")}
        assert_close(run.values, values)
