"""Stacks of wrappers in numpy float64: what each does to gradients, variables and its state.

Every layer is called with the variables and the gradients, a dictionary for each shard (what the
shard adds to the gradient) or one dictionary for what is reduced already. It gives the new values
and whether the variables were updated.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from tests.reference import OPTIMIZERS, Values

Shards = list[Values]
Layer = Callable[[Values, Shards], "tuple[Values, bool]"]

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


def shard_gradients(values: Values, feed: Values, num_shards: int) -> Shards:
    """What each shard adds to the gradient of `mean((x w + b - y)^2)`."""
    x, y = (feed[name].astype(np.float64) for name in ("x", "y"))
    difference = 2 * (x @ values["w"] + values["b"] - y) / y.size
    return [
        {"w": rows_of_x.T @ rows, "b": rows.sum(0)}
        for rows_of_x, rows in zip(np.split(x, num_shards), np.split(difference, num_shards))
    ]


def _total(shards: Shards) -> Values:
    return {name: sum(shard[name] for shard in shards) for name in shards[0]}


def _scaled(grads: Values, factor: float) -> Values:
    return {name: grad * factor for name, grad in grads.items()}


def _is_finite(grads: Values) -> bool:
    return all(np.all(np.isfinite(grad)) for grad in grads.values())


class CrossShardOptimizer:
    """Reduces gradients; `ShardedUpdateOptimizer` does no more, as far as values go."""

    def __init__(self, inside: Layer, **others: Any):
        self.inside = inside

    def __call__(self, values: Values, shards: Shards) -> tuple[Values, bool]:
        return self.inside(values, [_total(shards)])


class ClipByGlobalNormOptimizer:
    """Reduces gradients, and scales them where their norm is larger than `clip_norm`."""

    def __init__(self, inside: Layer, clip_norm: float, **others: Any):
        self.inside, self.clip_norm = inside, clip_norm

    def __call__(self, values: Values, shards: Shards) -> tuple[Values, bool]:
        grads = _total(shards)
        norm = np.sqrt(sum(np.sum(grad**2) for grad in grads.values()))
        # np.maximum keeps NaN: what has no norm has no gradient.
        return self.inside(
            values, [_scaled(grads, self.clip_norm / np.maximum(norm, self.clip_norm))]
        )


class AverageOptimizer:
    """Moves averages with each update."""

    def __init__(self, inside: Layer, decay: float, **others: Any):
        self.inside, self.decay = inside, decay
        self.averages = start()

    def __call__(self, values: Values, shards: Shards) -> tuple[Values, bool]:
        values, is_updated = self.inside(values, shards)
        if is_updated:
            for name, average in self.averages.items():
                self.averages[name] = average * self.decay + values[name] * (1 - self.decay)
        return values, is_updated

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

    def __call__(self, values: Values, shards: Shards) -> tuple[Values, bool]:
        skips_shards = _skips_shards(self.inside)
        if skips_shards is None:
            is_finite = all(map(_is_finite, shards))
        else:  # what a skipped shard has does not count
            result = self.inside(values, shards)
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
                return values, False
        if skips_shards is not None:
            return result
        if self.inner_skips and self.inner_needs_shards:
            return self.inside(values, shards)
        return self.inside(values, [_total(shards)])

    def state(self, name: str) -> Values:
        dynamic = {f"{name}/scale": self.scale, f"{name}/good_steps": self.good_steps}
        return {f"{name}/skipped": self.skipped, **(dynamic if self.is_dynamic else {})}


class GradientAccumulationOptimizer:
    """Adds up micro steps."""

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
        self.sums: Shards = []
        self.mini_step = self.update_step = self.skipped = 0

    def __call__(self, values: Values, shards: Shards) -> tuple[Values, bool]:
        if not self.is_gate:
            return self.inside(values, shards)
        if self.skips and not all(map(_is_finite, shards)):
            self.skipped += 1
            return values, False
        self.sums += shards
        self.mini_step += 1
        if self.mini_step < self.passes:
            return values, False
        grads = _scaled(_total(self.sums), 1 / self.mini_step if self.average else 1)
        self.sums, self.mini_step = [], 0
        values, is_updated = self.inside(values, [grads])
        self.update_step += is_updated
        return values, is_updated

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
        self.sums: Shards = []
        self.passed = 0

    def __call__(self, values: Values, shards: Shards) -> tuple[Values, bool]:
        if len(shards) == 1:  # reduced before: an equal share for each
            shards = [_scaled(shards[0], 1 / self.num_shards)] * self.num_shards
        before = sum(self.made)
        for number, grads in enumerate(shards):
            if self.mask[number] and _is_finite(grads):
                self.made[number] += 1
                self.sums.append(grads)
            else:
                self.dropped[number] += 1
        self.is_finite = sum(self.made) > before or not np.any(self.mask)
        if len(self.sums) < self.wanted:
            return values, False
        # A shard adds 1/num_shards of its own gradient to the gradient of the mean.
        grads = _scaled(_total(self.sums), self.num_shards / len(self.sums))
        self.sums = []
        self.passed += 1
        return self.inside(values, [grads])

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


def layers_of(stack: Sequence[Spec], inner: str, num_shards: int) -> list[Any]:
    """The layers of a stack, from the outside in, around an optimizer of `tests.reference`.

    The last one is the optimizer.
    """
    update = OPTIMIZERS[inner]()

    def innermost(values: Values, shards: Shards) -> tuple[Values, bool]:
        return update(values, _total(shards)), True

    layers: list[Any] = [innermost]
    for number in reversed(range(len(stack))):
        spec = stack[number]
        more = {"num_shards": num_shards, "inner_specs": stack[number + 1 :]}
        layers.insert(0, LAYERS[spec.kind](layers[0], **spec.arguments, **more))
    return layers


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
            values, _ = all_layers[0](values, shard_gradients(values, feed, num_shards))
    state: Values = {}
    for one, name in zip(layers, names):
        state.update(one.state(name) if hasattr(one, "state") else {})
    # The outermost condition says which steps count: of accumulation, all.
    gates = [one for one in layers if getattr(one, "is_gate", False)]
    return Trained(values, state, getattr(gates[0], "passed", len(feeds)) if gates else len(feeds))
