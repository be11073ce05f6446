"""Stages, the parts of wrappers, between the gradients and the new values of variables."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Callable, Literal, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.optimizers.pipeline.forms import Form, GradientSet
from mtf_gradsync.optimizers.pipeline.reduction import Reduction

if TYPE_CHECKING:
    from mtf_gradsync.optimizers.pipeline.builder import StepBuilder


class Stage:
    """One stage of a training step; the base class passes gradients on as they are.

    The builder calls the stages of a stack from the outermost wrapper to the innermost, and
    converts gradients to the form that a stage takes, and then to the form that it gives.

    Attributes:
      takes: the form of gradients for `apply`; `REDUCED` includes `PART` if the updates of the
        stack are sharded. None for any form.
      gives: the form of gradients after the stage; None for the one that `apply` returns.
      wants_reduced: whether the stage needs reduced gradients and not parts, as it adds them up
        in accumulators that are laid out like variables.
      mixed: if the stage takes `PER_SHARD`, what to do about gradients in which shards are mixed:
        each shard takes an equal share, or they are reduced (`already_reduced` of the set has
        their positions), or it is an error.
      adds_up: if the stage takes `PER_SHARD`, whether it treats all shards alike, so that a shard
        may hold a part of the sum that is not its own gradient, such as an expert's of all
        examples.
      remakes: if the stage takes `PER_SHARD`, whether it makes gradients at `made_of_sums` again,
        without the shards that it skips. They, and gradients that hold no shard's data but are
        split over a replica axis, are then no error and are at `already_reduced`.
      reads_shown: whether `after_update` reads values for evaluation, which stages inside or around
        this one may replace (`StepBuilder.show`): it is called after theirs.
      mixed_warning: a warning about those that are reduced, with fields for the wrapper's name, the
        variables and the operations that mix shards; "" for none.
    """

    takes: Form | None = None
    gives: Form | None = None
    wants_reduced = False
    mixed: Literal["share", "reduce", "refuse"] = "share"
    mixed_warning = ""
    adds_up = False
    remakes = False
    reads_shown = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Takes the deprecated name `wants_whole` for `wants_reduced`."""
        super().__init_subclass__(**kwargs)
        if "wants_whole" in vars(cls):
            text = f"{cls.__name__}.wants_whole is deprecated: use wants_reduced."
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            cls.wants_reduced = vars(cls)["wants_whole"]

    def apply(self, gradients: GradientSet, step: StepBuilder) -> GradientSet:
        """Returns the gradients for the next stage; may add operations and conditions to the step.

        The gradients given are in the form that the stage takes.
        """
        del step
        return gradients

    def update(
        self,
        gradients: GradientSet,
        step: StepBuilder,
        apply_inner: Callable[[GradientSet], list[mtf.Operation]],
    ) -> list[mtf.Operation]:
        """Returns the operations of the update, which `apply_inner` makes from gradients."""
        del step
        return apply_inner(gradients)

    def after_update(
        self, updates: Sequence[mtf.Operation], step: StepBuilder
    ) -> list[mtf.Operation]:
        """Returns more operations for steps with an update, to run after those of `updates`.

        `step.value_after` gives the new value of a variable. The innermost wrapper's stages are
        called first, and those with `reads_shown` last.
        """
        del updates, step
        return []

    def end_of_step(
        self, operations: Sequence[mtf.Operation], step: StepBuilder
    ) -> list[mtf.Operation]:
        """Returns more operations for every step; `operations` are all others of the step."""
        del operations, step
        return []


class Segment(NamedTuple):
    """The stages of one wrapper, in the order in which gradients pass through them."""

    stages: Sequence[Stage]
    reduction: Reduction
