"""Means of training steps' measurements, over the steps since a line was written."""

from __future__ import annotations

import math
from typing import Any, Mapping, NamedTuple


class Measured(NamedTuple):
    """The measurements of one training step.

    Attributes:
      loss: the model's loss: nats and other terms of the model, divided by its denominator.
      tokens: targets that are no padding.
      learning_rate: None where the optimizer has its own.
      weight: how much the loss stands for, where the optimizer was given weights.
    """

    loss: float
    tokens: int = 0
    learning_rate: float | None = None
    weight: float = 1.0


class StepMeans:
    """The means over the training steps since the last line.

    A line in the middle of an update is also of the update's earlier microbatch steps: the loss of
    an update is that of all its microbatches, not of the last one.
    """

    def __init__(self, denominator: float = 1.0):
        """Begins before any step; `denominator` is the model's divisor of a loss in nats."""
        self._denominator = denominator
        self._since_line: list[Measured] = []
        self._of_update: list[Measured] = []
        self._in_sums = 0

    def add(self, measured: Measured, in_sums: int | None = None) -> None:
        """Adds a step.

        `in_sums` is the number of gradients that wait in sums after the step; None if there are no
        such sums.
        """
        before, self._in_sums = self._in_sums, in_sums or 0
        if not before:
            self._of_update = []
        self._since_line.append(measured)
        if not before or self._in_sums != before:  # or the step was skipped
            self._of_update.append(measured)

    def values(self) -> dict[str, float]:
        """Returns the means by name: "loss", "nats_per_token", "learning_rate" where there is one.

        Losses of skipped steps that are not finite count only if there are no others. The loss is
        the weighted mean, and the nats are the mean over all tokens, in the unit of the held-out
        loss.
        """
        steps = max(self._since_line, self._of_update, key=len)
        steps = [one for one in steps if math.isfinite(one.loss)] or steps
        weight = math.fsum(one.weight for one in steps)
        if weight > 0:
            means = {"loss": math.fsum(one.weight * one.loss for one in steps) / weight}
        else:
            means = {"loss": math.fsum(one.loss for one in steps) / len(steps)}
        if math.isnan(means["loss"]):
            return means
        tokens = sum(one.tokens for one in steps)
        if tokens:
            nats = math.fsum(one.loss for one in steps) * self._denominator
            means["nats_per_token"] = nats / tokens
        rates = [one.learning_rate for one in steps if one.learning_rate is not None]
        if rates:
            means["learning_rate"] = math.fsum(rates) / len(rates)
        return means

    @property
    def steps_in_no_update(self) -> int:
        """The number of newest steps that are in no update yet."""
        return len(self._of_update) if self._in_sums else 0

    def end_line(self) -> None:
        """Ends the line: the next means are of later steps."""
        self._since_line = []

    def state(self) -> dict[str, Any] | None:
        """Returns the sums that a resumed run needs, for JSON; None if there are none."""
        if not self._since_line and not self._in_sums:
            return None
        return {
            "since_line": self._since_line,
            "of_update": self._of_update if self._in_sums else [],
            "in_sums": self._in_sums,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state` that was read from JSON."""
        self._since_line = [Measured(*one) for one in state["since_line"]]
        self._of_update = [Measured(*one) for one in state["of_update"]]
        self._in_sums = state["in_sums"]
