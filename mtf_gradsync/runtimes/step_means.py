"""Means of measurements over the training steps since the last line of the log."""

from __future__ import annotations

import math
from typing import Any, Mapping, NamedTuple


class Measured(NamedTuple):
    """The measurements of one training step.

    Attributes:
      loss: the model's loss: cross entropy in nats plus other terms, divided by the model's
        denominator.
      tokens: the number of target tokens that are no padding.
      learning_rate: the learning rate; None if the optimizer sets its own.
      weight: the weight of the loss in means, if the optimizer was given weights; else 1.
    """

    loss: float
    tokens: int = 0
    learning_rate: float | None = None
    weight: float = 1.0


class StepMeans:
    """The means over the training steps since the last line of the log.

    The loss of an update is the mean over all of its microbatches. If some microbatch steps of the
    newest update were made before the last line of the log, and the others after it, the means are
    over all microbatch steps of this update.
    """

    def __init__(self, denominator: float = 1.0):
        """Begins without steps; `denominator` is the number by which the model divides its loss."""
        self._denominator = denominator
        self._since_line: list[Measured] = []
        self._of_update: list[Measured] = []
        self._in_sums = 0

    def add(self, measured: Measured, in_sums: int | None = None) -> None:
        """Adds `measured`, the measurements of a training step.

        `in_sums` is the number of microbatch gradients in the accumulated sums after the step; None
        if gradients are not accumulated. If the number is above 0 and has not changed, the step was
        skipped, and does not count for the loss of the update.
        """
        before, self._in_sums = self._in_sums, in_sums or 0
        if not before:
            self._of_update = []
        self._since_line.append(measured)
        if not before or self._in_sums != before:  # or the step was skipped
            self._of_update.append(measured)

    def values(self) -> dict[str, float]:
        """Returns the means by name: "loss", and "nats_per_token" and "learning_rate" if known.

        Losses that are not finite (of skipped steps) count only if no loss is finite. "loss" is the
        weighted mean over steps. "nats_per_token" is the mean over all tokens, to be compared with
        the loss on held-out data.
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
        """The number of newest steps whose gradients no update has used yet."""
        return len(self._of_update) if self._in_sums else 0

    def end_line(self) -> None:
        """Ends a line of the log: the next means are over later steps."""
        self._since_line = []

    def state(self) -> dict[str, Any] | None:
        """Returns the measurements that a resumed run needs, for JSON; None if it needs none.

        A resumed run needs the measurements of the steps since the last line of the log, and of the
        microbatch steps whose update is not made yet.
        """
        if not self._since_line and not self._in_sums:
            return None
        return {
            "since_line": self._since_line,
            "of_update": self._of_update if self._in_sums else [],
            "in_sums": self._in_sums,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over the measurements of an earlier run: its `state()`, read from JSON."""
        self._since_line = [Measured(*one) for one in state["since_line"]]
        self._of_update = [Measured(*one) for one in state["of_update"]]
        self._in_sums = state["in_sums"]
