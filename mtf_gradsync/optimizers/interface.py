"""Wrappers' methods of the interface of tf.compat.v1.train.Optimizer, and deprecated names."""

from __future__ import annotations

import warnings
from typing import Any, Callable, Sequence

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.gradients import checks
from mtf_gradsync.gradients.stage import on_mesh
from mtf_gradsync.optimizers.own_arguments import OwnArguments
from mtf_gradsync.optimizers.pairs import OfStep
from mtf_gradsync.optimizers.pipeline import StepBuilder, Traits
from mtf_gradsync.step import Plan, advance_step


class TrainOptimizerInterface:
    """A mixin for wrappers: the methods of `tf.compat.v1.train.Optimizer`."""

    name: str
    step: OfStep[StepBuilder | None]
    apply_grads: Callable[..., list[mtf.Operation]]
    _without_scales: Callable[..., list[Any]]
    _check_arguments: Callable[[OwnArguments], None]
    _wrappers: Callable[[], list[Any]]
    _share_of_shard: Callable[[mtf.Tensor], float]

    def _check_variables(self, variables: Sequence[mtf.Variable]) -> None:
        """Raises ValueError for variables that cannot be updated."""

    def compute_gradients(
        self, loss: mtf.Tensor, var_list: Sequence[mtf.Variable] | None = None
    ) -> checks.GradsAndVars:
        """Differentiates a loss, or the mean of one loss for each shard.

        It is their sum if the stack has a `CrossShardOptimizer` with `reduction=SUM`. Which wrapper
        is the outermost, and which ones know the shards, makes no difference.

        Args:
          loss: an mtf tensor; a scalar, or with its shard dims one loss per shard.
          var_list: mesh variables; None takes the trainable variables of the loss's graph.

        Returns:
          A list of (gradient or None, variable).

        Raises:
          TypeError: loss or var_list has the wrong type.
          ValueError: var_list is empty, or wrappers of the stack contradict each other.
        """
        if not isinstance(loss, mtf.Tensor):
            raise TypeError(f"loss must be an mtf.Tensor, got {loss!r}.")
        if var_list is None:
            var_list = loss.graph.trainable_variables
        variables = checks.check_variables(var_list)
        if not variables:
            raise ValueError(f"There are no variables to differentiate: got var_list={var_list!r}.")
        for wrapper in self._wrappers():
            wrapper._check_variables(variables)
        share = self._share_of_shard(loss)
        with Plan.of(loss.graph).undone_on_error():
            joined = loss if share == 1.0 else loss * share
            grads = mtf.gradients([joined], [v.value for v in variables])
            return list(zip(self._without_scales(grads, variables), variables))

    def apply_gradients(
        self,
        grads_and_vars: checks.GradsAndVars,
        global_step: Any = None,
        name: Any = None,
        **kwargs: Any,
    ) -> list[mtf.Operation]:
        """Applies gradients, then advances global_step by one.

        Args:
          grads_and_vars: pairs as `compute_gradients` returns them.
          global_step: an mtf or tf variable to add one to after the update, or None.
          name: name of the operation that advances global_step; None takes the wrapper's name.
          **kwargs: more arguments for `apply_grads` of the innermost optimizer.

        Returns:
          A flat list of mtf operations.

        Raises:
          TypeError: an argument has the wrong type, or the innermost optimizer does not take it.
          ValueError: grads_and_vars is malformed, or a gradient does not fit its variable.
        """
        pairs = checks.check_pairs(grads_and_vars)
        checks.check_step(global_step)
        grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
        operations = self.apply_grads(grads, variables, **kwargs)
        if global_step is not None:
            mesh = variables[0].mesh
            updated = self.step.updated if operations and self.step else None
            counter = getattr(global_step, "mesh", None)
            if updated is not None and isinstance(counter, mtf.Mesh):
                updated = on_mesh(updated, counter)
            operations.append(
                advance_step(mesh, global_step, operations, name or self.name, updated)
            )
        return operations

    def minimize(
        self,
        loss: mtf.Tensor,
        global_step: Any = None,
        var_list: Sequence[mtf.Variable] | None = None,
        name: Any = None,
        **kwargs: Any,
    ) -> list[mtf.Operation]:
        """Calls `compute_gradients`, then `apply_gradients`."""
        checks.check_step(global_step)
        self._check_arguments(OwnArguments((), kwargs))
        pairs = self.compute_gradients(loss, var_list)
        return self.apply_gradients(pairs, global_step, name, **kwargs)


def _deprecated(old: str, *new: str) -> property:
    """Makes a deprecated attribute: whether one of some traits holds."""

    def warn_and_get(self: DeprecatedNames) -> bool:
        name = type(self).__name__
        text = f"{name}.{old} is deprecated: use {name}.traits.{new[0]}."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return any(getattr(self.traits, trait) for trait in new)

    return property(warn_and_get)


class DeprecatedNames:
    """A mixin for wrappers: deprecated names, which warn and name the new ones."""

    traits: Traits

    skips_updates = _deprecated("skips_updates", "schedules_updates")
    tells_replicas_apart = _deprecated("tells_replicas_apart", "skips_shards")
    leaves_out_not_finite = _deprecated(
        "leaves_out_not_finite", "skips_not_finite", "watches_not_finite"
    )
