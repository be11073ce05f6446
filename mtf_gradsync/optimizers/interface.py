"""The methods by which programs train: those of TensorFlow 1's optimizers, and `apply_grad`."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from mtf_gradsync._common import warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import meshes_made
from mtf_gradsync.compat_v1 import Reduction
from mtf_gradsync.gradients import arguments
from mtf_gradsync.gradients.arguments import PassedOnArguments
from mtf_gradsync.gradients.operations import on_mesh
from mtf_gradsync.gradients.pending import PendingSums
from mtf_gradsync.optimizers.pipeline.forms import without_frozen
from mtf_gradsync.optimizers.pipeline.weights import (
    WeightsOfGradients,
    check_weights,
    weighted_loss,
)
from mtf_gradsync.optimizers.state import check_name
from mtf_gradsync.reduce import Strategy
from mtf_gradsync.step.plan import StandIn, StepPlan
from mtf_gradsync.step.writes import advance_step


class TrainOptimizerInterface:
    """A mixin for wrappers: the methods of `tf.compat.v1.train.Optimizer`, and `apply_grad`.

    Attributes:
      loss_reduction: how `compute_gradients` joins losses of shards, `tf.losses.Reduction.MEAN` or
        `.SUM`. None leaves the choice to the other wrappers of the stack. If all wrappers have
        None, losses are averaged.
    """

    name: str
    step: Any  # StepBuilder | None
    loss_reduction: Reduction | None = None
    # Groups of shards that sum the gradients of their own copies of variables; None for one group.
    _groups: list[list[int]] | None = None
    # The pairs given to `apply_grad` of this wrapper, or of one around it, without a step yet.
    _to_build: tuple[_DeferredPairs, ...] = ()
    # While `minimize` computes gradients: the arguments of the step that it makes afterwards.
    _minimizing: PassedOnArguments | None = None
    reducer: Strategy
    apply_grads: Callable[..., list[mtf.Operation]]
    innermost: Callable[[], Any]
    _checked: Callable[..., Any]
    _check_stack: Callable[..., Any]
    _without_scales: Callable[..., list[Any]]
    _check_arguments: Callable[[PassedOnArguments], None]
    _wrappers: Callable[[], list[Any]]
    _stack_shard_names: Callable[[], tuple[str, ...]]

    def _check_variables(self, variables: Sequence[mtf.Variable]) -> None:
        """Raises ValueError for variables that the wrapper cannot update.

        This base class accepts all variables.
        """

    def _check_step(self, global_step: Any, name: Any) -> None:
        """Raises TypeError or ValueError for a wrong argument of `apply_gradients`.

        `global_step` has to be a variable that can count updates, or None, and `name` has to be a
        name for an operation, or None.
        """
        arguments.check_step(global_step)
        if name is not None:
            check_name(name)

    def compute_gradients(
        self,
        loss: mtf.Tensor,
        var_list: Sequence[mtf.Variable] | None = None,
        weights: Any = None,
    ) -> arguments.GradsAndVars:
        """Returns the gradients of a loss, or of the mean of shards' losses, with variables.

        Losses of shards are averaged, but summed if the stack has a `CrossShardOptimizer` with
        `reduction=SUM`. The gradients do not depend on which wrapper is the outermost, nor on which
        wrappers were given the mesh.

        Args:
          loss: an mtf tensor: a scalar, or a tensor with the shard dims, which has one loss for
            each shard.
          var_list: mesh variables; None takes the trainable variables of the loss's graph.
          weights: how much the loss, a mean, stands for, such as a number of tokens: a number, a tf
            scalar or an mtf scalar, or an mtf tensor with the shard dims, which has one number for
            each shard. The means over shards, microbatch steps and islands are then weighted.
            `apply_gradients` finds the weights by the gradients. None for equal weights.

        Returns:
          A list of pairs (gradient or None, variable).

        Raises:
          TypeError: loss or var_list has the wrong type.
          ValueError: var_list is empty, or wrappers of the stack contradict each other.
        """
        _check_loss(loss)
        if var_list is None:
            var_list = loss.graph.trainable_variables
        variables = arguments.check_variables(var_list)
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
            updated = without_frozen(self.innermost(), grads, variables)
            if self._minimizing is not None:
                grads = updated  # the others would be scaled, and never used
            if self._minimizing is not None and any(w._scales_loss for w in self._wrappers()):
                # Before a loss scale makes its variables, which stay in the TensorFlow graph.
                self._build_pairs(loss.graph)
                self._check_stack(grads, variables, self._minimizing)
            grads = self._without_scales(grads, variables)
            names = self._stack_shard_names()
            if any(w._scales_loss for w in self._wrappers()):
                # Gradients that no update uses are not reduced unless the program itself uses them.
                others = [g for g, used in zip(grads, updated) if used is None and g is not None]
                for mesh in dict.fromkeys(g.mesh for g in others):
                    some = [g for g in others if g.mesh is mesh]
                    PendingSums.declare_use(some, False, names, self.reducer)
            is_of_shards = any(d.name in names and d.size > 1 for d in loss.shape.dims)
            if weights is not None or is_of_shards:
                plan.extension(WeightsOfGradients).record(grads, weights)
            if weighted is not loss:
                plan.extension(WeightsOfGradients).record_loss(loss, weighted)
            return list(zip(grads, variables))

    def apply_gradients(
        self,
        grads_and_vars: arguments.GradsAndVars,
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
          weights: how much the loss of the step stands for, such as its number of examples. None
            takes the weights that `compute_gradients` was given, if any.
          **kwargs: more arguments for `apply_grads` of the innermost optimizer.

        Returns:
          A flat list of mtf operations.

        Raises:
          TypeError: an argument has the wrong type, or the innermost optimizer does not take it.
          ValueError: grads_and_vars is malformed, or a gradient does not fit its variable.
        """
        self._check_step(global_step, name)
        pairs = arguments.check_pairs(grads_and_vars)
        grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
        if weights is not None:
            kwargs = {**kwargs, "weights": weights}
        mesh, counter = variables[0].mesh, getattr(global_step, "mesh", None)
        if isinstance(counter, mtf.Mesh) and counter.graph is not mesh.graph:
            raise ValueError(
                f"global_step must be of the mtf graph of the variables, got {global_step!r} of "
                "another graph."
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
        """Computes the gradients of a loss and applies them; returns a flat list of mtf operations.

        This method calls `compute_gradients` with loss, var_list and weights, and then
        `apply_gradients` with global_step, name and the other arguments.
        """
        _check_loss(loss)
        self._check_step(global_step, name)
        inner_arguments = PassedOnArguments((), kwargs)
        self._check_arguments(inner_arguments)
        with StepPlan.of(loss.graph).undone_on_error():
            self._minimizing = inner_arguments
            try:
                pairs = self.compute_gradients(loss, var_list, weights)
            finally:
                del self._minimizing
            return self.apply_gradients(pairs, global_step, name, **kwargs)

    def apply_grad(
        self,
        grad: mtf.Tensor | None,
        var: mtf.Variable,
        *args: Any,
        weights: Any = None,
        **kwargs: Any,
    ) -> list[mtf.Operation]:
        """Applies the gradient of one variable, together with all other such pairs of the graph.

        The calls in a graph gather pairs (gradient, variable). One step for all pairs is built when
        the graph is lowered, or when the program reads an attribute that the step sets. A pair
        begins another step, with a warning, if the step of the pairs before it is built already, or
        has a pair of the same variable. It also does so if it comes in another variable scope, or
        with other arguments, than the pairs before it.

        Args:
          grad: a gradient, or None.
          var: its mesh variable.
          *args: more arguments for `apply_grads` of the innermost optimizer.
          weights: how much the loss of the step stands for, such as its number of examples. None
            takes the weights that `compute_gradients` was given, if any.
          **kwargs: more arguments for `apply_grads` of the innermost optimizer, by name.

        Returns:
          A list of one mtf operation, which stands for the whole step if it is given to
          `lowering.lowered_operation`; empty if the gradient is None.

        Raises:
          TypeError: an argument has the wrong type, or the innermost optimizer does not take it.
          ValueError: the gradient does not fit its variable.
        """
        inner_arguments = PassedOnArguments(args, kwargs)
        (grad,), (var,) = self._checked([grad], [var], inner_arguments)
        if weights is not None:
            inner_arguments = PassedOnArguments(args, {**kwargs, "weights": weights})
        waiting = self._waiting_pairs(var.graph)
        pairs = next((p for p in waiting if p.takes(var, inner_arguments)), None)
        if pairs is None:
            received = self.step.received[:1] if self.step else []
            if waiting or any(x.graph is var.graph for x in received):
                name = type(self).__name__
                warn_once(
                    f"{name}.apply_grad",
                    "%s.apply_grad: the gradient of %s begins another step, with its own sums and "
                    "counts, as the step of the pairs before it is built already, or has the same "
                    "variable, another variable scope or other arguments. Call "
                    "apply_grads(grads, variables) with all pairs instead.",
                    name,
                    var.name,
                )
            self._build_pairs(var.graph)
            pairs = _DeferredPairs(self, var.graph, inner_arguments)
        return pairs.add(grad, var)

    def _waiting_pairs(self, graph: mtf.Graph) -> list[_DeferredPairs]:
        own = (p for p in self._to_build if p.is_waiting and p.wrapper is self)
        return [p for p in own if p.plan.graph is graph]

    def _build_pairs(self, graph: mtf.Graph) -> None:
        for pairs in self._waiting_pairs(graph):
            pairs.build_if_here()

    def _check_no_groups(self) -> None:
        """Raises ValueError, for losses with weights, if the stack sums within groups of shards."""
        grouped = next((w for w in self._wrappers() if w._groups), None)
        if grouped is not None:
            raise ValueError(
                f"weights are for the mean over all shards, but {grouped.name} sums within groups, "
                f"group_assignment={grouped._groups!r}: weigh the losses yourself."
            )

    def _share_of_shard(self, loss: mtf.Tensor) -> float:
        """Returns the factor by which a loss is multiplied before gradients are computed.

        If `loss` has a loss for each shard, and these are averaged, the factor is 1/num_shards, or
        1/(group size) if shards are in groups. If they are summed, or if `loss` has no shard dims,
        the factor is 1.0. Raises ValueError if wrappers of the stack have different reductions.
        """
        wrappers, names = self._wrappers(), self._stack_shard_names()
        dims = mtf.Shape([d for d in loss.shape.dims if d.name in names])
        _warn_of_other_dims(type(self).__name__, loss.shape, names, wrappers)
        grouped = next((w for w in wrappers if w._groups), None)
        num_shards = grouped._group_size(dims.size) if grouped and dims.dims else dims.size
        if num_shards == 1:
            return 1.0
        said = {w.loss_reduction: w for w in wrappers if w.loss_reduction is not None}
        if len(said) > 1:
            found = " and ".join(f"{w.name} has {reduction!r}" for reduction, w in said.items())
            raise ValueError(
                f"The loss of shape {loss.shape.to_string} has one value for each shard, and "
                "all wrappers of a stack have to join these values by the same reduction, but "
                f"{found}."
            )
        return 1.0 if tf.losses.Reduction.SUM in said else 1.0 / num_shards


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, mtf.Tensor):
        raise TypeError(f"loss must be an mtf.Tensor, got {loss!r}.")


def _warn_of_other_dims(
    kind: str, shape: mtf.Shape, names: Sequence[str], wrappers: Sequence[Any]
) -> None:
    """Warns once if a loss of this shape may have shard dims that the wrappers do not know.

    Args:
      kind: the class name of the outermost wrapper, for the warning.
      shape: the shape of the loss.
      names: the names of the stack's shard dims.
      wrappers: the wrappers of the stack.
    """
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
                "%s: the loss of shape %s has one value for each shard along %s, and is summed "
                "along %s, which a layout splits, too. If the batch is split along "
                "these dimensions, name them in batch_dims.",
                kind,
                shape.to_string,
                shards,
                split,
            )


class DeferredUpdate:
    """A wrapper's update that is built later: when it is asked for, or when the graph is lowered.

    Subclasses define `make`.
    """

    def __init__(self, plan: StepPlan):
        self.plan = plan
        self.stand_ins: list[StandIn] = []  # what callers got in place of the operations
        self._operations: list[mtf.Operation] | None = None
        plan.deferred += (self,)

    def make(self) -> list[mtf.Operation]:
        """Makes and returns the mtf operations of the update; subclasses define it.

        `build` calls this method once, or again if an error has undone the operations.
        """
        raise NotImplementedError

    def build(self) -> list[mtf.Operation]:
        """Returns the mtf operations of the update; the first call makes them.

        The operations are put in the graph's list of operations at the position of the last
        stand-in (what callers got in place of the operations). But in any case they come after all
        operations that they are computed from.
        """
        # An error may have undone the operations, together with what was being built around them.
        if self._operations is None or self in self.plan.deferred:
            graph, waiting = self.plan.graph, self.plan.deferred
            before = set(graph.operations)
            self.plan.deferred = tuple(x for x in waiting if x is not self)
            try:
                self._operations = self.make()
            except BaseException:
                self.plan.deferred = waiting
                raise
            self._place(before)
        return self._operations

    def _place(self, before: set[mtf.Operation]) -> None:
        listed, own = self.plan.graph.operations, set(self.stand_ins)
        # Operations that the update itself has put before others stay there.
        count = max((i for i, op in enumerate(listed, 1) if op in before), default=0)
        others, made = listed[:count], listed[count:]
        needed = {x.operation for op in made for x in op.inputs} | own
        end = max((i for i, op in enumerate(others, 1) if op in needed), default=0)
        first = [op for op in others[:end] if op not in own]
        listed[:] = first + made + self.stand_ins + others[end:]


class _DeferredPairs(DeferredUpdate):
    """The pairs given to a wrapper's `apply_grad` in one graph; their common step is built later.

    `inner_arguments` are the other arguments of `apply_grad`, which are the same for all pairs.
    """

    def __init__(
        self, wrapper: TrainOptimizerInterface, graph: mtf.Graph, inner_arguments: PassedOnArguments
    ):
        super().__init__(StepPlan.of(graph))
        self.wrapper = wrapper
        self._inner_arguments = inner_arguments
        self._scope, self._where = tf.get_variable_scope(), self._here()
        self._pairs: dict[mtf.Variable, mtf.Tensor | None] = {}
        for one in wrapper._wrappers():
            one._to_build = (*(p for p in one._to_build if p.is_waiting), self)

    @property
    def is_waiting(self) -> bool:
        """Whether the step is neither built nor being built."""
        return self in self.plan.deferred

    def takes(self, variable: mtf.Variable, inner_arguments: PassedOnArguments) -> bool:
        """Returns whether a pair of `variable` can join this step.

        A pair cannot join if the step has a pair of the variable already. Nor can it join if it
        comes in another graph, branch or variable scope, or with other arguments
        (`inner_arguments`), than the pairs before it.
        """
        return (
            variable not in self._pairs
            and self._where == self._here()
            and self._scope.name == tf.get_variable_scope().name
            and _comparable(self._inner_arguments) == _comparable(inner_arguments)
        )

    def add(self, grad: mtf.Tensor | None, variable: mtf.Variable) -> list[mtf.Operation]:
        """Adds the pair (`grad`, `variable`) to the step that will be built for all pairs.

        Returns a list of one operation, which stands for the whole step. The list is empty if
        `grad` is None.
        """
        self._pairs[variable] = grad
        if grad is None:
            return []
        self.stand_ins.append(StandIn(self, variable.mesh, "apply_grad"))
        return [self.stand_ins[-1]]

    def build_if_here(self) -> None:
        """Builds the step if its pairs were given in the tf graph and branch that are open now.

        If another tf graph or branch is open, or if the step is built already, the method does
        nothing.
        """
        if self.is_waiting and self._where == self._here():
            self.build()

    def _here(self) -> tuple[Any, ...]:
        return tf.get_default_graph(), self.plan.open_branch, self.plan.needs_no_gate

    def make(self) -> list[mtf.Operation]:
        args, kwargs = self._inner_arguments
        with tf.variable_scope(self._scope, auxiliary_name_scope=False):
            grads, variables = list(self._pairs.values()), list(self._pairs)
            operations = self.wrapper.apply_grads(grads, variables, *args, **kwargs)
        # A wrapper may live longer than the graph.
        for one in self.wrapper._wrappers():
            one._to_build = tuple(p for p in one._to_build if p is not self)
        return operations


def _comparable(inner_arguments: PassedOnArguments) -> dict[Any, Any]:
    """Returns a dictionary by which the arguments of two calls can be compared with ==.

    `inner_arguments` are the arguments of one call. The dictionaries of two calls are equal if each
    argument is the same object, an equal string or an equal number of the same type. The ``__eq__``
    of other arguments, such as tensors, is not called.
    """
    values = [*enumerate(inner_arguments.positional), *inner_arguments.named.items()]
    plain = (bool, int, float, str)
    return {k: (type(x), x) if isinstance(x, plain) else id(x) for k, x in values}
