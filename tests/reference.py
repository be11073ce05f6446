"""The model of `tests.models` and Mesh-TF's optimizers in numpy float64."""

from __future__ import annotations

import re
from typing import Callable, Dict

import numpy as np

from tests import models

Values = Dict[str, np.ndarray]


def mlp_grads(values: Values, x: np.ndarray, y: np.ndarray) -> Values:
    """Gradients of the mean squared error over a batch, by hand."""
    w1, b1, scale = (values[k] for k in ("w1", "b1", "scale"))
    h = np.tanh(x @ w1 + b1)
    decoded = h @ w1.T
    out = decoded * scale
    d_out = 2 * (out - y) / out.size
    d_decoded = d_out * scale
    d_pre = (d_decoded @ w1) * (1 - h**2)
    return {
        "w1": x.T @ d_pre + d_decoded.T @ h,
        "b1": d_pre.sum(0),
        "scale": np.sum(d_out * decoded),
    }


def norm(grads: Values) -> float:
    """The norm of all numbers of all gradients."""
    return np.sqrt(sum(np.sum(np.square(g)) for g in grads.values()))


def clipped(grads: Values, limit: float) -> Values:
    """Gradients, scaled down together where their norm is larger than a limit."""
    # np.maximum keeps NaN: what has no norm has no gradient.
    factor = limit / np.maximum(norm(grads), limit)
    return {k: g * factor for k, g in grads.items()}


def assert_close(
    found: Values, expected: Values, rtol: float = 0.0, atol: float | None = None
) -> None:
    """Compares what is expected, by name; `atol` is `rtol` if nothing else is said."""
    assert expected, "nothing is compared"
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=rtol, atol=rtol if atol is None else atol, err_msg=name
        )


def assert_equal(found: Values, expected: Values) -> None:
    """Compares what is expected, by name, to the bit."""
    assert expected, "nothing is compared"
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def is_finite(values: Values) -> bool:
    return all(np.isfinite(value).all() for value in values.values())


def _rms(x: np.ndarray) -> float:
    return np.sqrt(np.mean(np.square(x)))


class Sgd:
    def __init__(self, rate: float = 0.1) -> None:
        self.rate = rate

    def __call__(self, values: Values, grads: Values) -> Values:
        return {k: values[k] - self.rate * grads[k] for k in values}


class Momentum:
    """Reads the velocity of the step before, as Mesh-TF's program does on a SIMD mesh."""

    def __init__(self) -> None:
        self.v: dict[str, np.ndarray] = {}

    def __call__(self, values: Values, grads: Values) -> Values:
        old = {k: self.v.get(k, 0.0) for k in values}
        self.v = {k: grads[k] * 0.05 + old[k] * 0.9 for k in values}
        return {k: values[k] - old[k] for k in values}


class Adam:
    """Adam with decoupled weight decay, by default as Mesh-TF's optimizer has it.

    Args:
      rate: a number, or a function from the number of earlier updates to one.
      decay: the weight decay.
      betas: decays of the averages of gradients and of their squares.
      epsilon: what is added to the root.
      spared: patterns in names of variables that do not decay.
    """

    corrects_bias = False

    def __init__(self, rate=0.01, decay=0.01, betas=(0.9, 0.999), epsilon=1e-6, spared=()):
        self.rate, self.decay, self.betas, self.epsilon = rate, decay, betas, epsilon
        self.spared, self.t, self.m, self.v = spared, 0, {}, {}

    def __call__(self, values: Values, grads: Values) -> Values:
        (b1, b2), new = self.betas, dict(values)
        rate = self.rate(self.t) if callable(self.rate) else self.rate
        self.t += 1
        for k, g in grads.items():
            m = self.m[k] = b1 * self.m.get(k, 0.0) + (1 - b1) * g
            v = self.v[k] = b2 * self.v.get(k, 0.0) + (1 - b2) * g**2
            if self.corrects_bias:
                m, v = m / (1 - b1**self.t), v / (1 - b2**self.t)
            decay = 0.0 if any(re.search(part, k) for part in self.spared) else self.decay
            new[k] = values[k] - rate * (m / (np.sqrt(v) + self.epsilon) + decay * values[k])
        return new


class AdamW(Adam):
    """Algorithm 2 of the paper, with the learning rate as the schedule multiplier."""

    corrects_bias = True

    def __init__(self, rate, decay=0.0, betas=(0.9, 0.999), epsilon=1e-8, spared=()):
        super().__init__(rate, decay, betas, epsilon, spared)


class Adafactor:
    def __init__(self) -> None:
        self.state: dict[str, list[np.ndarray]] = {}

    def __call__(self, values: Values, grads: Values) -> Values:
        new = {}
        for k, g in grads.items():
            square = g**2 + 1e-30
            if g.ndim == 2:
                row, column = self.state.get(k, [0.0, 0.0])
                row = row * 0.8 + square.mean(0) * 0.2
                column = column * 0.8 + square.mean(1) * 0.2
                self.state[k] = [row, column]
                update = g / np.sqrt(np.outer(column, row) / row.mean())
            else:
                v = self.state.get(k, [0.0])[0] * 0.8 + square * 0.2
                self.state[k] = [v]
                update = g / np.sqrt(v)
            update = update / max(1.0, _rms(update))
            new[k] = values[k] - update * max(_rms(values[k]), 1e-3) * 0.05
        return new


OPTIMIZERS: dict[str, Callable[[], Callable[[Values, Values], Values]]] = {
    "sgd": Sgd,
    "momentum": Momentum,
    "adam": Adam,
    "adafactor": Adafactor,
}


def train(
    optimizer: str | Callable[[Values, Values], Values], feeds: list[dict[str, np.ndarray]]
) -> Values:
    """The variables after a step on each feed, by an optimizer or its name."""
    values = {k: np.asarray(v, np.float64) for k, v in models.mlp_values().items()}
    update = OPTIMIZERS[optimizer]() if isinstance(optimizer, str) else optimizer
    for feed in feeds:
        feed = {k: v.astype(np.float64) for k, v in feed.items()}
        values = update(values, mlp_grads(values, feed["x"], feed["y"]))
    return values


class Clipped:
    """An update behind clipping by the norm of all gradients.

    Attributes:
      clipped: on how many steps the norm was larger.
    """

    def __init__(self, update, norm):
        self.update, self.norm, self.clipped = update, norm, 0

    def __call__(self, values: Values, grads: Values) -> Values:
        self.clipped += norm(grads) > self.norm
        return self.update(values, clipped(grads, self.norm))


class Accumulation:
    """What Horovod's helper and optax.MultiSteps do with the gradients of microbatch steps.

    Horovod: the sum (or mean) of every `passes` gradients goes to the optimizer, which does
    nothing in between. optax: the same for the mean, `passes` may be a function of the update
    step, and a microbatch step that `skip` rejects does not count.
    """

    def __init__(self, update, passes, average=False, skip=None):
        self.update = update
        self.passes = passes if callable(passes) else lambda step: passes
        self.average, self.skip = average, skip
        self.sum, self.mini_step, self.update_step, self.skipped = {}, 0, 0, 0

    def __call__(self, values: Values, grads: Values) -> Values:
        if self.skip and self.skip(grads):
            self.skipped += 1
            return values
        self.sum = {k: self.sum.get(k, 0.0) + g for k, g in grads.items()}
        self.mini_step += 1
        if self.mini_step < self.passes(self.update_step):
            return values
        scale = 1 / self.mini_step if self.average else 1
        values = self.update(values, {k: g * scale for k, g in self.sum.items()})
        self.sum, self.mini_step = {}, 0
        self.update_step += 1
        return values
