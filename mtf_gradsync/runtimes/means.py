"""Means of what training steps measured, over the steps since a line was written."""

from __future__ import annotations

import math
from typing import Any, Mapping, NamedTuple


class Measured(NamedTuple):
    """What one training step measured.

    Attributes:
      loss: the model's loss: nats, and what else the model adds, divided by its denominator.
      tokens: targets that are no padding.
      learning_rate: None where the optimizer has its own.
    """

    loss: float
    tokens: int = 0
    learning_rate: float | None = None


class StepMeans:
    """Takes means over the training steps since a line was written about them.

    A line in the middle of an update is also of the update's earlier microbatch steps: the loss of
    an update is that of all its microbatches, not of the last one.
    """

    def __init__(self, denominator: float = 1.0):
        """Begins before any step; `denominator` is what the model divides a loss in nats by."""
        self._denominator = denominator
        self._since_line: list[Measured] = []
        self._of_update: list[Measured] = []
        self._update_step: int | None = None
        self._is_between_updates = True

    def add(self, measured: Measured, update_step: int | None) -> None:
        """Adds a step; update_step counts updates made by its end, None if every step is one."""
        if self._is_between_updates:
            self._of_update = []
        self._since_line.append(measured)
        self._of_update.append(measured)
        before, self._update_step = self._update_step, update_step
        self._is_between_updates = update_step is None or before not in (None, update_step)

    def values(self) -> dict[str, float]:
        """Returns the means by name: "loss", "nats_per_token", "learning_rate" where there is one.

        Losses that are not finite, of steps that were skipped, count only if there is no other. The
        nats are those of all tokens together, in the unit of the held-out loss.
        """
        steps = max(self._since_line, self._of_update, key=len)
        steps = [one for one in steps if math.isfinite(one.loss)] or steps
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
        """How many of the newest steps are in no update yet."""
        return 0 if self._is_between_updates else len(self._of_update)

    def end_line(self) -> None:
        """Begins a new line: its means are of the steps that follow."""
        self._since_line = []

    def state(self) -> dict[str, Any] | None:
        """Returns what a run that goes on from here has to know, for JSON; None for nothing."""
        if not self._since_line and self._is_between_updates:
            return None
        return {
            "since_line": self._since_line,
            "of_update": [] if self._is_between_updates else self._of_update,
            "update_step": self._update_step,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a `state` that was read from JSON."""
        self._since_line = [Measured(*one) for one in state["since_line"]]
        self._of_update = [Measured(*one) for one in state["of_update"]]
        self._update_step = state["update_step"]
        self._is_between_updates = not self._of_update
