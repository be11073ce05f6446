"""What all wrappers share: TensorFlow 1's interface of optimizers, and shard dims in shapes."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from mtf_gradsync._common import warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import meshes_made
from mtf_gradsync.compat_v1 import Reduction
from mtf_gradsync.gradients import stage
from mtf_gradsync.gradients.copies import check_groups_cover
from mtf_gradsync.gradients.stage import on_mesh
from mtf_gradsync.mesh.axes import ReplicaAxes
from mtf_gradsync.optimizers.pairs import OfStep, OwnArguments
from mtf_gradsync.optimizers.pipeline import Place, StepBuilder, shard_names
from mtf_gradsync.optimizers.pipeline.weights import (
    WeightsOfGradients,
    check_weights,
    weighted_loss,
)
from mtf_gradsync.optimizers.state.variables import check_name
from mtf_gradsync.step import StepPlan, advance_step


class TrainOptimizerInterface:
    """A mixin for wrappers: the methods of `tf.compat.v1.train.Optimizer`."""

    name: str
    step: OfStep[StepBuilder | None]
    apply_grads: Callable[..., list[mtf.Operation]]
    _without_scales: Callable[..., list[Any]]
    _check_arguments: Callable[[OwnArguments], None]
    _wrappers: Callable[[], list[Any]]
    _share_of_shard: Callable[[mtf.Tensor], float]
    _is_of_shards: Callable[[mtf.Tensor], bool]
    _stack_shard_names: Callable[[], tuple[str, ...]]
    _check_no_groups: Callable[[], None]

    def _check_variables(self, variables: Sequence[mtf.Variable]) -> None:
        """Raises ValueError for variables that cannot be updated."""

    def _check_step(self, global_step: Any, name: Any) -> None:
        """Raises TypeError or ValueError for a step that cannot count updates, or a wrong name."""
        stage.check_step(global_step)
        if name is not None:
            check_name(name)

    def compute_gradients(
        self,
        loss: mtf.Tensor,
        var_list: Sequence[mtf.Variable] | None = None,
        weights: Any = None,
    ) -> stage.GradsAndVars:
        """Differentiates a loss, or the mean of one loss for each shard.

        It is their sum if the stack has a `CrossShardOptimizer` with `reduction=SUM`. Which wrapper
        is the outermost, and which ones know the shards, makes no difference.

        Args:
          loss: an mtf tensor; a scalar, or with its shard dims one loss per shard.
          var_list: mesh variables; None takes the trainable variables of the loss's graph.
          weights: how much the loss, a mean, stands for, such as a number of tokens: an mtf scalar,
            or with the shard dims a number for each shard (a tf scalar or a number, too). What the
            stack joins (shards, microbatch steps, islands) is then the weighted mean, and
            `apply_gradients` takes them from here. None for equal weights.

        Returns:
          A list of (gradient or None, variable).

        Raises:
          TypeError: loss or var_list has the wrong type.
          ValueError: var_list is empty, or wrappers of the stack contradict each other.
        """
        _check_loss(loss)
        if var_list is None:
            var_list = loss.graph.trainable_variables
        variables = stage.check_variables(var_list)
        if not variables:
            raise ValueError(f"There are no variables to differentiate: got var_list={var_list!r}.")
        for wrapper in self._wrappers():
            wrapper._check_variables(variables)
        if weights is not None:
            weights = check_weights(weights, self._stack_shard_names())
            self._check_no_groups()
        share = self._share_of_shard(loss)
        plan = StepPlan.of(loss.graph)
        with plan.undone_on_error():
            weighted = weighted_loss(loss, weights, self._stack_shard_names())
            joined = weighted if share == 1.0 else weighted * share
            grads = mtf.gradients([joined], [v.value for v in variables])
            grads = self._without_scales(grads, variables)
            if weights is not None or self._is_of_shards(loss):
                plan.part(WeightsOfGradients).record(grads, weights)
            if weighted is not loss:
                plan.part(WeightsOfGradients).record_loss(loss, weighted)
            return list(zip(grads, variables))

    def apply_gradients(
        self,
        grads_and_vars: stage.GradsAndVars,
        global_step: Any = None,
        name: Any = None,
        weights: Any = None,
        **kwargs: Any,
    ) -> list[mtf.Operation]:
        """Applies gradients, then advances global_step by one.

        Args:
          grads_and_vars: pairs as `compute_gradients` returns them.
          global_step: an mtf or tf variable to add one to after the update, or None.
          name: name of the operation that advances global_step; None takes the wrapper's name.
          weights: as for `apply_grads`.
          **kwargs: more arguments for `apply_grads` of the innermost optimizer.

        Returns:
          A flat list of mtf operations.

        Raises:
          TypeError: an argument has the wrong type, or the innermost optimizer does not take it.
          ValueError: grads_and_vars is malformed, or a gradient does not fit its variable.
        """
        self._check_step(global_step, name)
        pairs = stage.check_pairs(grads_and_vars)
        grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
        if weights is not None:
            kwargs = {**kwargs, "weights": weights}
        mesh, counter = variables[0].mesh, getattr(global_step, "mesh", None)
        if isinstance(counter, mtf.Mesh) and counter.graph is not mesh.graph:
            raise ValueError(
                f"global_step must be of the mtf graph of the variables, got {global_step!r} of "
                "another one."
            )
        operations = self.apply_grads(grads, variables, **kwargs)
        if global_step is not None:
            updated = self.step.updated if operations and self.step else None
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
        weights: Any = None,
        **kwargs: Any,
    ) -> list[mtf.Operation]:
        """Calls `compute_gradients`, then `apply_gradients`."""
        _check_loss(loss)
        self._check_step(global_step, name)
        self._check_arguments(OwnArguments((), kwargs))
        with StepPlan.of(loss.graph).undone_on_error():
            pairs = self.compute_gradients(loss, var_list, weights)
            return self.apply_gradients(pairs, global_step, name, **kwargs)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, mtf.Tensor):
        raise TypeError(f"loss must be an mtf.Tensor, got {loss!r}.")


class ShardShapes:
    """A mixin for wrappers: their replica axes, and shard dims in shapes."""

    loss_reduction: Reduction | None = None
    # Shards that sum the gradients of their own copies of variables; None for all of them.
    _groups: list[list[int]] | None = None
    _wrappers: Callable[[], list[Any]]

    _given_axes: ReplicaAxes | None = None
    _given_names: tuple[str, ...] = ()
    _gradient_reduction: Callable[..., Any]

    @property
    def axes(self) -> ReplicaAxes | None:
        """`ReplicaAxes`, or None if no mesh was given."""
        return self._given_axes

    @property
    def _shard_names(self) -> tuple[str, ...]:
        return self.axes.batch_dims if self.axes else self._given_names

    def _stack_shard_names(self) -> tuple[str, ...]:
        return shard_names(wrapper._gradient_reduction() for wrapper in self._wrappers())

    def _check_no_groups(self) -> None:
        """Raises ValueError for weights of a stack that sums within groups of shards."""
        grouped = next((w for w in self._wrappers() if w._groups), None)
        if grouped is not None:
            raise ValueError(
                f"weights are for the mean over all shards, but {grouped.name} sums within groups, "
                f"group_assignment={grouped._groups!r}: weigh the losses yourself."
            )

    def _is_of_shards(self, loss: mtf.Tensor) -> bool:
        """Returns whether a loss is one for each shard of the stack."""
        names = self._stack_shard_names()
        return any(d.name in names and d.size > 1 for d in loss.shape.dims)

    def _share_of_shard(self, loss: mtf.Tensor) -> float:
        """Returns the share of each shard's loss in the loss of an update of the stack."""
        wrappers, names = self._wrappers(), self._stack_shard_names()
        dims = mtf.Shape([d for d in loss.shape.dims if d.name in names])
        _warn_of_other_dims(type(self).__name__, loss.shape, names, wrappers)
        groups = next((w._groups for w in wrappers if w._groups), None)
        num_shards = check_groups_cover(groups, dims.size) if groups and dims.dims else dims.size
        if num_shards == 1:
            return 1.0
        said = {w.loss_reduction: w for w in wrappers if w.loss_reduction is not None}
        if len(said) > 1:
            found = " and ".join(f"{w.name} has {reduction!r}" for reduction, w in said.items())
            raise ValueError(
                f"The loss of shape {loss.shape.to_string} is one for each shard, and a stack "
                f"joins these by one reduction, but {found}: give both the same."
            )
        return 1.0 if tf.losses.Reduction.SUM in said else 1.0 / num_shards

    def _shard_dims(self, shape: mtf.Shape, place: Place | None = None) -> list[mtf.Dimension]:
        """The shard dims that a shape has, in the order that numbers the shards."""
        by_name = {d.name: d for d in shape.dims}
        names = place.names if place else self._shard_names
        return [by_name[name] for name in names if name in by_name]

    def _has_own_copy(self, variable: mtf.Variable, place: Place | None = None) -> bool:
        """Whether every shard has its own copy of a variable, which then has all shard dims."""
        dims, axes = self._shard_dims(variable.shape, place), place.axes if place else self.axes
        needed = [d.name for d in axes.shard_dims] if axes else []
        missing = [name for name in needed if name not in [d.name for d in dims]]
        if dims and missing:
            raise ValueError(
                f"Variable {variable.name!r} of shape {variable.shape.to_string} has the shard "
                f"dims {[d.name for d in dims]} but not {missing}: a variable has either all of "
                "them (every shard its own copy) or none."
            )
        return bool(dims)

    def _check_shapes(
        self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> None:
        names = self._stack_shard_names()
        for grad, variable in zip(grads, variables):
            if grad is None:
                continue
            self._has_own_copy(variable)
            is_copy = any(d.name in names for d in variable.shape.dims)
            rest = [d for d in grad.shape.dims if is_copy or d.name not in names]
            if rest != variable.shape.dims:
                raise ValueError(
                    f"The gradient of {variable.name!r} has shape {grad.shape.to_string}, but "
                    f"the variable has {variable.shape.to_string}: a gradient has the "
                    f"variable's shape, or the shard dims {list(names)} in front."
                )


def _warn_of_other_dims(
    kind: str, shape: mtf.Shape, names: Sequence[str], wrappers: Sequence[Any]
) -> None:
    """Warns once of a loss that may be one for each shard along dimensions of other names."""
    shards = [d.name for d in shape.dims if d.name in names]
    # No warning for a scalar if CrossShardOptimizer was given no mesh, as in most programs.
    is_given = any(w.loss_reduction and (w.axes is not None or w._groups) for w in wrappers)
    if not shards and (shape.dims or is_given):
        warn_once(
            "loss without shard dims",
            "%s: the loss of shape %s has none of the shard dims %s, so it counts as the loss of "
            "all shards: num_shards is 1 and it is not scaled.%s",
            kind,
            shape.to_string,
            list(names),
            " If one of its dimensions is the batch's, name it in batch_dims."
            if shape.dims
            else "",
        )
    for mesh_shape, layout in meshes_made() if shards else ():
        axes = zip(shape.dims, layout.tensor_layout(shape, mesh_shape))
        wide = [d.name for d, axis in axes if axis is not None and mesh_shape[axis].size > 1]
        split = [name for name in wide if name not in shards]
        if split:
            warn_once(
                "loss with other dims",
                "%s: the loss of shape %s is one for each shard along %s, and is summed along %s, "
                "which a layout splits, too. If the batch is split along these, name them in "
                "batch_dims.",
                kind,
                shape.to_string,
                shards,
                split,
            )
