"""The steps by hand in JAX, whose cost the benchmark compares with the wrappers', compute the same.

The very functions that `benchmarks.wrappers_by_hand` compiles for a TPU run on CPU devices.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Callable, NamedTuple, Sequence

import jax
import numpy as np
import pytest

import mtf_gradsync as gs
from benchmarks import lm_by_hand, models, wrappers_by_hand
from mtf_gradsync._private.libraries import mtf
from tests import harness

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


def assert_close(actual: Any, expected: Any) -> None:
    """To a few float32 roundings of the largest numbers: sums of many signs cancel in part."""
    assert set(expected) <= set(actual)
    for k, value in expected.items():
        atol = 1e-5 * np.max(np.abs(value))
        np.testing.assert_allclose(actual[k], value, rtol=1e-5, atol=atol, err_msg=k)


WHERE = {"mesh_shape": "all:8", "layout": "batch:all"}
FRESH, SHARD_3_IS_LATE = np.zeros(SHARDS, "i"), np.int32([2, 2, 2, 1, 2, 2, 2, 2])


class Case(NamedTuple):
    """Steps of one kind, and the wrapper that makes them, too.

    Attributes:
      wrap: wraps an optimizer; its second argument are the local steps of replicas.
      steps: of each, whether it updates, whether a shard has an inf, and the local steps.
      names: of the state by hand, what the wrapper calls it.
      begin: state by hand that does not begin with zeros.
    """

    wrap: Callable[[Any, Any], Any]
    steps: Sequence[tuple[bool, bool, np.ndarray]]
    names: dict[str, str] = {}  # noqa: RUF012
    begin: dict[str, Any] = {}  # noqa: RUF012


CASES = {
    BARE: Case(lambda inner, local_steps: inner, [(UPDATE, False, FRESH)] * 3),
    ACCUMULATION: Case(
        lambda inner, local_steps: gs.GradientAccumulationOptimizer(inner, 2, **WHERE),
        [(condition, False, FRESH) for condition in (SKIP, UPDATE, SKIP, UPDATE, SKIP)],
        {
            "micro_step": "GradientAccumulationOptimizer/mini_step",
            "updates": "GradientAccumulationOptimizer/update_step",
        },
    ),
    # Two updates from all shards, then a step without: a shard is late, another has an inf.
    SYNC_REPLICAS: Case(
        lambda inner, local_steps: gs.SyncReplicasOptimizer(
            inner, SHARDS, local_steps=local_steps, **WHERE
        ),
        [(UPDATE, False, FRESH), (UPDATE, False, FRESH + 1)] + [(SKIP, True, SHARD_3_IS_LATE)],
        {
            name: f"sync_replicas/{name}"
            for name in ("count", "update_step", "local_step", "made", "dropped")
        },
    ),
    # The scale doubles after 2,000 finite steps, and an inf halves it and makes no update.
    LOSS_SCALE: Case(
        lambda inner, local_steps: gs.LossScaleOptimizer(
            inner, initial_scale=1024.0, growth_steps=2, **WHERE
        ),
        [(UPDATE, False, FRESH)] * 2 + [(SKIP, True, FRESH), (UPDATE, False, FRESH)],
        {name: f"LossScaleOptimizer/{name}" for name in ("scale", "good_steps", "skipped")},
        {"scale": 1024.0},
    ),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.mostly_slow
def test_by_hand_updates_as_the_wrapper(kind, monkeypatch):
    """On the benchmark's dense model, with its values and its optimizer: values, slots, state."""
    assert wrappers_by_hand.GROWTH_STEPS == 2000
    monkeypatch.setattr(wrappers_by_hand, "GROWTH_STEPS", 2)
    case, model = CASES[kind], models.dense(LAYERS, WIDTH, BATCH)
    feeds = [
        {"x": with_inf_in_shard(x, 6) if has_inf else x, "local_steps": local_steps}
        for x, (_, has_inf, local_steps) in zip(batches(len(case.steps)), case.steps)
    ]

    def build(mesh: Any, placeholders: Any) -> tuple[Sequence[Any], dict[str, Any]]:
        loss = model.make_loss(mesh, placeholders["x"])
        optimizer = case.wrap(model.make_optimizer(), placeholders["local_steps"])
        variables = mesh.graph.trainable_variables
        if kind == LOSS_SCALE:
            grads = [g for g, _ in optimizer.compute_gradients(loss, variables)]
        else:
            grads = mtf.gradients([loss], [v.value for v in variables])
        return optimizer.apply_grads(grads, variables), {"loss": loss}

    made = harness.built("simd", *WHERE.values(), build, feeds[0])
    run = ByHand(kind, dense_values(), **case.begin)
    for (condition, _, _), feed, expected in zip(case.steps, feeds, made.after_each(feeds)):
        if kind == SYNC_REPLICAS:
            run.state["local_step"] = feed["local_steps"]
        run.step(condition, feed["x"])
        compared = {"": run.values, "/adam_m": run.slots[0], "/adam_v": run.slots[1]}
        if "sums" in run.state:
            compared["/gradient_accumulator"] = run.state["sums"]
        for name, mine in compared.items():
            assert_close(mine, {k: expected[k + name] for k in run.values})
        assert {*run.state} - {"sums"} == {*case.names}
        for name, theirs in case.names.items():
            np.testing.assert_array_equal(run.state[name], expected[theirs], err_msg=name)


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
