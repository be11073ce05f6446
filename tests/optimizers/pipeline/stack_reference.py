"""Stacks of wrappers in numpy float64: what each does to gradients, variables and its state.

A gradient comes in parts: what the examples of a shard have as their mean, with their weight, which
is one where nothing else is said. Parts that are joined become the weighted mean of all of them.
Every layer is called with the variables and the parts, and gives the new values and the weight of
the update: zero for none.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from tests.reference import OPTIMIZERS, Values, clipped, is_finite

Part = tuple[Values, float]
Parts = list[Part]
Layer = Callable[[Values, Parts], "tuple[Values, float]"]

BATCH, INPUTS, HIDDEN = 8, 4, 4


class Spec(NamedTuple):
    """A wrapper of a stack.

    Attributes:
      kind: name of its class.
      arguments: those that the reference knows as well.
    """

    kind: str
    arguments: dict[str, Any]


def start(seed: int = 0) -> Values:
    """Values that the variables begin with."""
    rng = np.random.RandomState(seed)
    values = {"w": rng.randn(INPUTS, HIDDEN) * 0.5, "b": rng.randn(HIDDEN) * 0.5}
    return {name: value.astype("f").astype(np.float64) for name, value in values.items()}


def gradients_of_shards(values: Values, feed: Values, num_shards: int) -> Parts:
    """Each shard's gradient of `mean((x w + b - y)^2)`."""
    x, y = (feed[name].astype(np.float64) for name in ("x", "y"))
    difference = 2 * (x @ values["w"] + values["b"] - y) * num_shards / y.size
    return [
        ({"w": rows_of_x.T @ rows, "b": rows.sum(0)}, 1.0)
        for rows_of_x, rows in zip(np.split(x, num_shards), np.split(difference, num_shards))
    ]


def weighted_mean(parts: Sequence[tuple[np.ndarray, float]]) -> tuple[Any, float]:
    """The mean of arrays and the sum of their weights; None where nothing has a weight."""
    total = sum(weight for _, weight in parts)
    return (sum(g * n for g, n in parts if n) / total if total else None), total


def joined(parts: Parts) -> Part:
    """All in one part. What has no weight, say 0 / 0, does not count."""
    parts = [part for part in parts if part[1]]
    names = parts[0][0] if parts else ()
    means = {name: weighted_mean([(grads[name], n) for grads, n in parts])[0] for name in names}
    return means, sum(n for _, n in parts)


def _scaled(grads: Values, factor: float) -> Values:
    return {name: grad * factor for name, grad in grads.items()}


def _is_finite(parts: Parts) -> bool:
    return all(is_finite(grads) for grads, n in parts if n)


class CrossShardOptimizer:
    """Reduces gradients; `ShardedUpdateOptimizer` does no more, as far as values go."""

    def __init__(self, inside: Layer, **others: Any):
        self.inside = inside

    def __call__(self, values: Values, parts: Parts) -> tuple[Values, float]:
        return self.inside(values, [joined(parts)])


class ClipByGlobalNormOptimizer:
    """Reduces gradients, and scales them where their norm is larger than `clip_norm`."""

    def __init__(self, inside: Layer, clip_norm: float, **others: Any):
        self.inside, self.clip_norm = inside, clip_norm

    def __call__(self, values: Values, parts: Parts) -> tuple[Values, float]:
        grads, total = joined(parts)
        return self.inside(values, [(clipped(grads, self.clip_norm), total)])


class AverageOptimizer:
    """Moves averages with each update."""

    def __init__(self, inside: Layer, decay: float, **others: Any):
        self.inside, self.decay = inside, decay
        self.averages = start()

    def __call__(self, values: Values, parts: Parts) -> tuple[Values, float]:
        values, weight = self.inside(values, parts)
        if weight:
            for name, average in self.averages.items():
                self.averages[name] = average * self.decay + values[name] * (1 - self.decay)
        return values, weight

    def state(self, name: str) -> Values:
        return {f"{v}/ExponentialMovingAverage": x for v, x in self.averages.items()}


class LossScaleOptimizer:
    """Skips what is not finite, if nothing inside does so, and moves a scale."""

    def __init__(
        self,
        inside: Layer,
        inner_specs: Sequence[Spec],
        loss_scale: float | str,
        initial_scale: float,
        growth_steps: int,
        **others: Any,
    ):
        self.inside = inside
        self.is_dynamic = loss_scale == "dynamic"
        self.scale, self.growth_steps, self.good_steps = initial_scale, growth_steps, 0
        self.skipped = self.passed = 0
        self.inner_skips = any(skips_not_finite(spec) for spec in inner_specs)
        self.inner_needs_shards = any(needs_shards(spec) for spec in inner_specs)

    @property
    def is_gate(self) -> bool:
        return not self.inner_skips

    def __call__(self, values: Values, parts: Parts) -> tuple[Values, float]:
        if not any(n for _, n in parts):  # neither progress nor a number that is too large
            return self.inside(values, parts)
        skips_shards = _skips_shards(self.inside)
        if skips_shards is None:
            is_finite = _is_finite(parts)
        else:  # what a skipped shard has does not count
            result = self.inside(values, parts)
            is_finite = skips_shards.is_finite
        if is_finite:
            self.passed += 1
            self.good_steps += 1
            if self.good_steps == self.growth_steps:
                self.scale, self.good_steps = min(self.scale * 2, 2.0**24), 0
        else:
            self.skipped += 1
            self.scale, self.good_steps = max(self.scale / 2, 1.0), 0
            if not self.inner_skips:
                return values, 0.0
        if skips_shards is not None:
            return result
        if self.inner_skips and self.inner_needs_shards:
            return self.inside(values, parts)
        return self.inside(values, [joined(parts)])

    def state(self, name: str) -> Values:
        dynamic = {f"{name}/scale": self.scale, f"{name}/good_steps": self.good_steps}
        return {f"{name}/skipped": self.skipped, **(dynamic if self.is_dynamic else {})}


class GradientAccumulationOptimizer:
    """Adds up microbatch steps."""

    def __init__(
        self,
        inside: Layer,
        backward_passes_per_step: int,
        average_aggregated_gradients: bool,
        skips: bool,
        **others: Any,
    ):
        self.inside, self.passes = inside, backward_passes_per_step
        self.average, self.skips = average_aggregated_gradients, skips
        self.is_gate = self.passes > 1 or skips
        self.sums: Parts = []
        self.mini_step = self.update_step = self.skipped = 0

    def __call__(self, values: Values, parts: Parts) -> tuple[Values, float]:
        if not self.is_gate:
            return self.inside(values, parts)
        if self.skips and not _is_finite(parts):
            self.skipped += 1
            return values, 0.0
        self.sums += parts
        self.mini_step += 1
        if self.mini_step < self.passes:
            return values, 0.0
        grads, total = joined(self.sums)
        grads = _scaled(grads, 1 if self.average else self.mini_step)
        self.sums, self.mini_step = [], 0
        values, weight = self.inside(values, [(grads, total)])
        self.update_step += weight > 0
        return values, weight

    def state(self, name: str) -> Values:
        if not self.is_gate:
            return {}
        fields = ("mini_step", "update_step", "skipped")
        return {f"{name}/{field}": getattr(self, field) for field in fields}


class SyncReplicasOptimizer:
    """Averages what replicas contribute; the mask of each step is set from outside."""

    is_gate = True

    def __init__(
        self,
        inside: Layer,
        num_shards: int,
        replicas_to_aggregate: int,
        decay: float | None,
        **others: Any,
    ):
        self.inside = inside if decay is None else AverageOptimizer(inside, decay)
        self.num_shards, self.wanted, self.decay = num_shards, replicas_to_aggregate, decay
        self.mask = np.ones(num_shards, bool)
        self.made, self.dropped = np.zeros(num_shards, int), np.zeros(num_shards, int)
        self.sums: Parts = []
        self.passed = 0

    def __call__(self, values: Values, parts: Parts) -> tuple[Values, float]:
        if len(parts) == 1:  # reduced before: an equal share for each
            ((grads, total),) = parts
            parts = [(grads, total / self.num_shards)] * self.num_shards
        before = sum(self.made)
        for number, part in enumerate(parts):
            if self.mask[number] and _is_finite([part]):
                self.made[number] += 1
                self.sums += [part] if part[1] > 0 else []
            else:
                self.dropped[number] += 1
        self.is_finite = sum(self.made) > before or not np.any(self.mask)
        if len(self.sums) < self.wanted:
            return values, 0.0
        contributed, self.sums = joined(self.sums), []
        self.passed += 1
        return self.inside(values, [contributed])

    def state(self, name: str) -> Values:
        averages = self.inside.state(name) if self.decay is not None else {}
        return {
            **averages,
            f"{name}/made": self.made,
            f"{name}/dropped": self.dropped,
            f"{name}/count": len(self.sums),
            f"{name}/update_step": self.passed,
        }


def _skips_shards(layer: Any) -> SyncReplicasOptimizer | None:
    """Finds the layer that skips shards, if there is one."""
    while layer is not None and not isinstance(layer, SyncReplicasOptimizer):
        layer = getattr(layer, "inside", None)
    return layer


LAYERS = {
    "AverageOptimizer": AverageOptimizer,
    "ClipByGlobalNormOptimizer": ClipByGlobalNormOptimizer,
    "CrossShardOptimizer": CrossShardOptimizer,
    "GradientAccumulationOptimizer": GradientAccumulationOptimizer,
    "LossScaleOptimizer": LossScaleOptimizer,
    "ShardedUpdateOptimizer": CrossShardOptimizer,
    "SyncReplicasOptimizer": SyncReplicasOptimizer,
}


# What changes values, as tests of stacks have it by default. The others only move state.
_DEFAULTS = {
    "ClipByGlobalNormOptimizer": {"clip_norm": 1.0},
    "GradientAccumulationOptimizer": {
        "backward_passes_per_step": 2,
        "average_aggregated_gradients": False,
        "skips": False,
    },
    "SyncReplicasOptimizer": {"replicas_to_aggregate": 2, "decay": None, "accept_summed": False},
}


def specs_of(names: Sequence[str], **given: Any) -> list[Spec]:
    """The wrappers of `tests.wrappers.WRAPPERS` that change values, but for outer steps.

    `given` are arguments of those that have them.
    """
    specs = []
    for name in names:
        kind = name.partition(",")[0]
        if kind in _DEFAULTS:
            arguments = {**_DEFAULTS[kind], **{k: given[k] for k in _DEFAULTS[kind] if k in given}}
            if "skip" in name:
                arguments["skips"] = True
            specs.append(Spec(kind, arguments))
    return specs


def needs_shards(spec: Spec) -> bool:
    """Whether a wrapper takes each shard's own gradients."""
    if spec.kind == "SyncReplicasOptimizer":
        return not spec.arguments["accept_summed"]
    return spec.arguments.get("accumulate") == "local"


def skips_not_finite(spec: Spec) -> bool:
    """Whether a wrapper skips gradients that are not finite."""
    return spec.kind == "SyncReplicasOptimizer" or spec.arguments.get("skips", False)


class Trained(NamedTuple):
    """What a run leaves behind.

    Attributes:
      values: the variables.
      state: the wrappers' state, by name.
      global_step: a step counter that was given to `minimize`.
    """

    values: Values
    state: Values
    global_step: int


class Innermost:
    """An optimizer, an update of `tests.reference`.

    Attributes:
      without_data: how many updates there were none for.
    """

    def __init__(self, update: Callable[[Values, Values], Values]):
        self.update, self.without_data = update, 0

    def __call__(self, values: Values, parts: Parts) -> tuple[Values, float]:
        grads, total = joined(parts)
        self.without_data += not total
        return (self.update(values, grads), total) if total else (values, 0.0)


def layers_of(stack: Sequence[Spec], inner: Any, num_shards: int) -> list[Any]:
    """The layers of a stack, from the outside in, around an optimizer.

    The last one is the optimizer, of `tests.reference` by its name, or a function.
    """
    layers: list[Any] = [Innermost(OPTIMIZERS[inner]() if isinstance(inner, str) else inner)]
    for number in reversed(range(len(stack))):
        spec = stack[number]
        more = {"num_shards": num_shards, "inner_specs": stack[number + 1 :]}
        layers.insert(0, LAYERS[spec.kind](layers[0], **spec.arguments, **more))
    return layers


class Islands:
    """Stacks of islands, with an outer step every two updates, weighted by what islands had.

    A `number` of 0 is one stack without outer steps.

    Attributes:
      outer: the outer values, or those of the one stack.
    """

    def __init__(self, make: Callable[[], list[Any]], number: int, start: Values):
        self.has_outer_steps, number = number > 0, number or 1
        self.stacks = [make() for _ in range(number)]
        self.outer, self.own, self.weights = start, [start] * number, np.zeros(number)
        self.velocity, self.updates = dict.fromkeys(start, 0.0), 0

    def __call__(self, gradients: Callable[[Values], Parts]) -> None:
        """Takes a step by the gradients of all shards at some values."""
        moved = []
        for island, (stack, values) in enumerate(zip(self.stacks, self.own)):
            parts = gradients(values)
            size = len(parts) // len(self.stacks)
            moved.append(stack[0](values, parts[size * island : size * (island + 1)]))
        is_updated = any(weight for _, weight in moved)
        for island, (stack, (values, weight)) in enumerate(zip(self.stacks, moved)):
            # An island without data, where another has some, takes a step with a gradient of zeros.
            accumulates = any(isinstance(x, GradientAccumulationOptimizer) for x in stack)
            if is_updated and not weight and not accumulates:
                moved[island] = stack[-1].update(values, _scaled(values, 0.0)), 0.0
        self.own = [values for values, _ in moved]
        self.weights = self.weights + [weight for _, weight in moved]
        self.updates += is_updated
        if not self.has_outer_steps:
            (self.outer,) = self.own
        elif is_updated and self.updates % 2 == 0:
            for name, outer in self.outer.items():
                away = [(outer - own[name], n) for own, n in zip(self.own, self.weights)]
                difference, _ = weighted_mean(away)
                self.velocity[name] = 0.5 * self.velocity[name] + difference
                move = 0.7 * (difference + 0.5 * self.velocity[name])
                self.outer = {**self.outer, name: outer - move}
            self.own, self.weights = [self.outer] * len(self.own), 0 * self.weights


def train(
    stack: Sequence[Spec],
    names: Sequence[str],
    inner: str,
    feeds: Sequence[Values],
    num_shards: int,
    values: Values,
) -> Trained:
    """Trains with a stack."""
    all_layers = layers_of(stack, inner, num_shards)
    layers = all_layers[:-1]
    for feed in feeds:
        for one in layers:
            one.mask = feed["contributes"]
        with np.errstate(invalid="ignore"):
            values, _ = all_layers[0](values, gradients_of_shards(values, feed, num_shards))
    state: Values = {}
    for one, name in zip(layers, names):
        state.update(one.state(name) if hasattr(one, "state") else {})
    # The outermost condition says which steps count: of accumulation, all.
    gates = [one for one in layers if getattr(one, "is_gate", False)]
    return Trained(values, state, getattr(gates[0], "passed", len(feeds)) if gates else len(feeds))
