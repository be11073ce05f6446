"""What a wrapped program has to do, in float64: its gradients on one core, and all the rest."""

from __future__ import annotations

import functools
from typing import Callable, NamedTuple

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from tests import harness
from tests.programs.style import ROWS, STEPS, Feed, Style, Values, imported, made_in_float64
from tests.programs.wrappers import DECAY, INNER_STEPS, NORM, WRAPPERS, Wrapper
from tests.reference import clipped, is_finite

Gradients = Callable[[Values, Feed], "tuple[float, Values]"]


def feeds(styles) -> list[Feed]:
    """The inputs of some steps; all examples count alike."""
    drawn = [np.random.RandomState(0) for _ in styles]
    weights = {"weights": np.ones(ROWS, "f")}
    return [
        {k: v for s, rng in zip(styles, drawn) for k, v in s.feed(rng).items()} | weights
        for _ in range(STEPS)
    ]


def given(styles, names) -> list[Feed]:
    """The inputs of all steps; where wrappers skip a NaN, one step has it in the last shards."""
    steps, skipped = feeds(styles), {WRAPPERS[name].nan for name in names}
    if skipped == {""}:
        return steps
    spoilt = steps[1]["weights"].copy()
    spoilt[-1] = np.nan
    # Islands lose a step by it, where the others have one more.
    steps[1 : 2 if "island" in skipped else 1] = [{**steps[1], "weights": spoilt}]
    return steps


def loss_of(style, mesh, inputs):
    """The mean over all examples, by their weights."""
    weights = imported(mesh, inputs["weights"], examples=style.batch_dims[0])
    return mtf.reduce_mean(style.loss(mesh, inputs) * weights)


@functools.lru_cache(maxsize=None)
def on_one_core(style: Style) -> tuple[Values, Gradients]:
    """First values, and loss and gradients of given values and inputs."""
    (feed, *_) = feeds([style])
    with tf.Graph().as_default(), made_in_float64() as made:
        inputs = {k: tf.placeholder(tf.as_dtype(v.dtype), v.shape) for k, v in feed.items()}
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        loss = loss_of(style, mesh, inputs)
        grads = mtf.gradients([loss], [variable.value for variable in made.values()])
        lowering = mtf.Lowering(graph, {mesh: harness.placement(*harness.ONE)})
        fetched = [lowering.export_to_tf_tensor(x) for x in (loss, *grads)]
        session = tf.Session(config=harness.placement_config(1))

    def gradients(values, feed):
        placed = {inputs[k]: feed[k] for k in inputs}
        placed.update({variable.given: values[key] for key, variable in made.items()})
        found, *by_name = session.run(fetched, placed)
        return found, dict(zip(made, by_name))

    return {key: variable.first for key, variable in made.items()}, gradients


class Expected(NamedTuple):
    """Losses of all steps, and variables after the last."""

    losses: list[float]
    variables: Values


class _Island:
    """A copy of the variables, moved by the gradients of the examples that it has."""

    def __init__(self, style: Style, wrapper: Wrapper, share: np.ndarray):
        self.style, self.wrapper, self.share = style, wrapper, share
        self.values, self.gradients = on_one_core(style)
        self.restart(self.values)

    def restart(self, values: Values) -> None:
        self.values, self.move, self.waiting = values, self.style.moves(), []
        self.updates = 0

    def _of_shards(self, feed: Feed) -> Feed:
        """The examples of those shards that have no NaN count for all."""
        weights = feed["weights"].reshape(self.style.shards, -1)
        there = np.isfinite(weights).all(1, keepdims=True)
        return {**feed, "weights": np.where(there, weights / there.mean(), 0.0).ravel()}

    def step(self, feed: Feed) -> float:
        """Returns the loss."""
        weights = np.where(self.share > 0, feed["weights"] * self.share, 0.0)
        feed = {**feed, "weights": weights}
        loss, grads = self.gradients(self.values, feed)
        if self.wrapper.nan == "shard" and not is_finite(grads) and not self.style.mixes:
            grads = self.gradients(self.values, self._of_shards(feed))[1]
        if self.wrapper.nan in ("shard", "step") and not is_finite(grads):
            return loss
        self.waiting.append(clipped(grads, self.style.clip) if self.style.clip else grads)
        if len(self.waiting) == self.wrapper.micro_steps:
            mean = {k: np.mean([g[k] for g in self.waiting], 0) for k in grads}
            mean = clipped(mean, NORM) if "clip" in self.wrapper.parts else mean
            self.values, self.waiting = self.move(self.values, mean, feed), []
            self.updates += 1
        return loss


@functools.lru_cache(maxsize=None)
def expected(style: Style, name: str) -> Expected:
    """What a wrapper, by its name, makes of the program."""
    wrapper = WRAPPERS[name]
    islands, apart = [np.ones(ROWS)], wrapper.nan == "island"
    if apart:
        islands = np.repeat(np.eye(style.shards), ROWS // style.shards, 1) * style.shards
    islands = [_Island(style, wrapper, share) for share in islands]
    averages, losses, updates = dict(islands[0].values), [], 0
    for number, feed in enumerate(given([style], [name]), 1):
        losses.append(np.mean([island.step(feed) for island in islands]))
        if apart and number % INNER_STEPS == 0:
            there = [island.values for island in islands if is_finite(island.values)]
            mean = {k: np.mean([v[k] for v in there], 0) for k in averages}
            for island in islands:
                if not is_finite(island.values):
                    island.restart(mean)
                island.values = mean
        values = islands[0].values
        if islands[0].updates > updates:
            updates = islands[0].updates
            averages = {k: DECAY * v + (1 - DECAY) * values[k] for k, v in averages.items()}
    if "average" in wrapper.parts:
        values = values | {f"{k}/ExponentialMovingAverage": v for k, v in averages.items()}
    return Expected(losses, values)
