"""Records a program while it is built (wrappers, gradients, lowerings), and changes its stack."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any, Callable, NamedTuple, Sequence

from mtf_gradsync.extension import (
    AVERAGE,
    ClipByGlobalNormOptimizer,
    GradientAccumulationOptimizer,
    ProgramWrites,
    StepPlan,
    SyncReplicasOptimizer,
    UpdateCounters,
    WeightsOfGradients,
    Wrapper,
    averages,
    gated_update,
    is_number,
    is_simd,
    keeps_outer_values,
    mtf,
    schedules_updates,
    stages_of,
    tf,
    why_not,
    without_frozen,
)
from mtf_gradsync.tools.verification.causes import random_operations

# Endings of the names of variables that are added to a program under test.
GRADIENT = "/verified_gradient"
UPDATES = "verified_updates"
RANDOM = "/verified_random"

_INNER_NAMES = ("opt", "optimizer", "_opt", "_optimizer")


class Changes(NamedTuple):
    """Changes of a program: of its stack of wrappers, and of its model.

    Attributes:
      without: labels of wrappers to remove (`RecordedProgram.stack`).
      unwrapped: whether the wrappers that are not in `without` are removed, too, as in the
        reference. Two things then stay: wrappers that only keep averages, and the clipping of
        gradients for each `ClipByGlobalNormOptimizer` that is not in `without`.
      micro_steps: the number of steps over which an added wrapper accumulates gradients; 1 adds no
        wrapper.
      mask: for each shard, whether `SyncReplicasOptimizer` takes its gradients; None takes those of
        all shards.
      mesh: the mesh shape and the layout that the added wrapper gets.
      drops: names of the parts to remove from the model: "dropout", "random" (all random numbers),
        "capacity" (limits to how many examples an expert takes).
      statistics: names of the batch's dimensions; statistics over these dimensions, such as a mean
        over the batch, are replaced by constants. () replaces none.
    """

    without: tuple[str, ...] = ()
    unwrapped: bool = False
    micro_steps: int = 1
    mask: tuple[bool, ...] | None = None
    mesh: tuple[str, str] = ("", "")
    drops: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()


class RecordedProgram:
    """The record of a program, made while the program was built.

    Attributes:
      stack: labels of the wrappers, from the outside in. A label is the name of the class; from the
        second wrapper of a class on, a number follows.
      wrappers: a dictionary from labels to wrappers.
      innermost: the optimizer that makes the update; None if none was seen.
      lowerings: the lowerings that the program made.
      order: names of the variables in the order in which the backward pass makes their gradients.
      variables: a dictionary from names to Mesh-TF variables, for variables that got a gradient.
      slots: names of the variables that the innermost optimizer has made.
      averages: names of moving averages that wrappers keep for variables.
      has_experts: whether the model has experts of Mesh-TensorFlow's transformer.
      random_sizes: a list with the number of random numbers that each random operation draws, for
        operations on which losses depend, and that each removed dropout would draw.
    """

    def __init__(self, changes: Changes):
        self.changes = changes
        self.stack: list[str] = []
        self.wrappers: dict[str, Wrapper] = {}
        self.innermost: Any = None
        self.lowerings: list[mtf.Lowering] = []
        self.variables: dict[str, mtf.Variable] = {}
        self._given: list[mtf.Tensor] = []
        self._differentiated: list[mtf.Tensor] = []
        self.slots: list[str] = []
        self.has_experts = False
        self.random_sizes: list[int] = []
        self._positions: dict[str, int] = {}
        self._outermost: dict[int, Any] = {}
        self._stacks: dict[int, list[Any]] = {}  # id of the outermost optimizer -> original stack
        self._busy: list[Any] = []
        self._references: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        self._weights: dict[int, tuple[Any, Any]] = {}  # id of weights -> the weights, their sum

    @property
    def losses(self) -> list[mtf.Tensor]:
        """The losses of the program, as mtf tensors.

        The losses are those that the program gave to the method `compute_gradients` of a wrapper.
        If the program did not call this method, the losses are those that it gave to
        `mtf.gradients`.
        """
        return self._given or self._differentiated

    @property
    def order(self) -> list[str]:
        """The names of variables in the order in which the backward pass makes their gradients."""
        return sorted(self._positions, key=lambda name: self._positions[name])

    @property
    def batch_dims(self) -> tuple[str, ...]:
        """The names of the batch's dimensions, as the wrappers know them; ("batch",) by default."""
        found = (w._stack_shard_names() for w in self.wrappers.values())
        return next((names for names in found if names), ("batch",))

    @property
    def accumulating_wrappers(self) -> tuple[str, ...]:
        """The labels of the wrappers that may accumulate the gradients of several steps."""
        return tuple(k for k, w in self.wrappers.items() if schedules_updates(stages_of(w)))

    @property
    def island_wrappers(self) -> tuple[str, ...]:
        """The labels of the wrappers whose islands train without exchanging gradients (DiLoCo)."""
        return tuple(k for k, w in self.wrappers.items() if keeps_outer_values(stages_of(w)))

    @property
    def averages(self) -> set[str]:
        """The names of the variables' moving averages, if a wrapper keeps averages.

        The set is empty unless the program's stack has a wrapper that keeps averages and has no
        effect on updates. Otherwise it has a name for each variable with a gradient, even if the
        wrapper keeps no average of this variable.
        """
        if not any(map(self.keeps_averages, self.wrappers)):
            return set()
        return {f"{name}/{AVERAGE}" for name in self.variables}

    def keeps_averages(self, label: str) -> bool:
        """Returns whether a wrapper keeps averages of variables and has no effect on updates.

        `label` is the wrapper's label in `stack`.
        """
        stages = stages_of(self.wrappers[label])
        return averages(stages) and not schedules_updates(stages)

    @property
    def is_simd(self) -> bool:
        """Whether the program was lowered on a mesh of a SIMD program."""
        return any(is_simd(x) for low in self.lowerings for x in low.mesh_to_impl.values())

    # Methods that the patches call.

    def record_losses(self, losses: Sequence[mtf.Tensor]) -> None:
        """Records `losses` as the losses of the program; called when it calls `mtf.gradients`."""
        self._differentiated += losses

    def compute_gradients(self, method: Any, opt: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes gradients; called in place of the method `compute_gradients` of any wrapper.

        The gradients are computed by the program's stack of wrappers, after the attribute `changes`
        has been applied to the stack. If no wrapper is left in the stack, the gradients are those
        of the mean loss.

        Args:
          method: the method that this one replaces.
          opt: the optimizer on which the program called the method.
          loss: the loss, an mtf tensor.
          *args: further arguments of the call.
          **kwargs: further arguments of the call, such as `weights`.

        Returns:
          Pairs of a gradient and a variable, as the replaced method returns them.
        """
        if loss not in self._given:
            self._given.append(loss)
        stack = self._changed_stack(opt)
        given = inspect.signature(method).bind(opt, loss, *args, **kwargs).arguments
        weights = given.get("weights")
        self._record_weights(weights)
        if isinstance(stack, Wrapper) and not self.changes.unwrapped:
            return method(stack, loss, *args, **kwargs)
        variables = given.get("var_list")
        variables = list(loss.graph.trainable_variables if variables is None else variables)
        mean = loss
        if loss.shape.dims and isinstance(weights, mtf.Tensor) and weights.shape.dims:
            mean = mtf.reduce_sum(loss * weights) / mtf.reduce_sum(weights + loss * 0.0)
        elif loss.shape.dims:
            mean = mtf.reduce_mean(loss)
        StepPlan.of(loss.graph).extension(WeightsOfGradients).record_loss(loss, mean)
        grads = mtf.gradients([mean], [v.value for v in variables])
        return list(zip(grads, variables))

    def apply_gradients(
        self, method: Any, opt: Any, grads: Any, variables: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Applies gradients; called in place of the method `apply_grads` of any optimizer.

        The gradients are applied by the program's stack of wrappers, after the attribute `changes`
        has been applied to the stack. The gradients that reach the innermost optimizer of the stack
        are recorded.

        Args:
          method: the method that this one replaces.
          opt: the optimizer on which the method was called.
          grads: the gradients of the variables; None for a variable without one.
          variables: the variables.
          *args: further arguments of the call.
          **kwargs: further arguments of the call, such as `weights`.

        Returns:
          The mtf operations that make the update, and those that store the gradients.
        """
        if any(opt is busy for busy in self._busy):
            return method(opt, grads, variables, *args, **kwargs)
        is_outermost = not self._busy
        if is_outermost and isinstance(opt, Wrapper):
            self._record_weights(kwargs.get("weights"))
        is_changed = isinstance(opt, Wrapper) or self.changes.micro_steps > 1
        stack = self._changed_stack(opt) if is_outermost and is_changed else opt
        is_bare = stack is not opt and not isinstance(stack, Wrapper)
        # If the outermost wrapper only keeps averages, it stays, and the wrappers inside are gone.
        is_unwrapped = is_outermost and self.changes.unwrapped and id(opt) in self._stacks
        if is_bare or is_unwrapped:
            kwargs.pop("weights", None)
            grads = self._reference_gradients(opt, list(grads), list(variables))
        if stack is not opt:
            return stack.apply_grads(grads, variables, *args, **kwargs)
        self._busy.append(opt)
        before = set(variables[0].graph.name_to_variable) if variables else set()
        try:
            make = functools.partial(method, opt, grads, variables, *args, **kwargs)
            operations = self._after_reads(make, grads, variables)
        finally:
            self._busy.pop()
        if isinstance(opt, Wrapper):
            return operations
        self.innermost = opt
        self.slots += [x for x in variables[0].graph.name_to_variable if x not in before]
        return [
            *operations,
            *self._recording_operations(without_frozen(opt, list(grads), variables), variables),
        ]

    def _after_reads(
        self,
        make_update: Callable[[], Sequence[mtf.Operation]],
        grads: Sequence[Any],
        variables: Sequence[mtf.Variable],
    ) -> Sequence[mtf.Operation]:
        """Makes update operations that wait until the step has read all variables.

        The updates of wrappers wait already. For a program without wrappers, this method makes the
        updates wait, so that they do not race with the reads.

        Args:
          make_update: a function that makes the update operations.
          grads: the gradients of the variables; None for a variable without one.
          variables: the variables.
        """
        if any(isinstance(busy, Wrapper) for busy in self._busy):
            return make_update()
        ProgramWrites.wait_for([g for g in grads if g is not None])

        def make() -> list[mtf.Operation]:
            operations, graph = list(make_update()), variables[0].graph
            plan = StepPlan.of_graph(graph)
            if plan and self.stack:  # the removed wrappers would have advanced these counters
                meshes = {v.mesh for v in variables}
                operations += plan.extension(UpdateCounters).advances(graph, meshes)
            return operations

        return gated_update(make, grads)

    def undo(self) -> None:
        """Gives the program's optimizers back their own methods and inner optimizers.

        While the program was built, some of them were replaced.
        """
        while self._undo:
            self._undo.pop()()

    # The rest.

    def _changed_stack(self, opt: Any) -> Any:
        """Changes a stack of wrappers by the attribute `changes`; returns the outermost optimizer.

        `opt` is the outermost optimizer of the stack. The wrappers that the stack had before the
        change are recorded. Further calls for the same stack return the same optimizer.
        """
        if id(opt) in self._outermost:
            return self._outermost[id(opt)]
        stack = [opt, *(opt.inner_stack() if isinstance(opt, Wrapper) else ())]
        self._stacks[id(opt)] = stack
        labels: dict[int, str] = {}
        for one in stack:
            if isinstance(one, Wrapper):
                kind = type(one).__name__
                number = 1 + sum(label.split("#")[0] == kind for label in labels.values())
                labels[id(one)] = kind if number == 1 else f"{kind}#{number}"
        self.stack = list(dict.fromkeys([*self.stack, *labels.values()]))
        self.wrappers.update({labels[id(one)]: one for one in stack if id(one) in labels})
        if not isinstance(stack[-1], mtf.optimize.Optimizer):
            self._record_gradients_of(stack[-1])
        changes = self.changes
        for one in stack:
            if isinstance(one, SyncReplicasOptimizer):
                self._mask(one)
        out = set(changes.without)
        if changes.unwrapped:  # wrappers that only keep averages change no update, so they stay
            out |= {label for label in labels.values() if not self.keeps_averages(label)}
        left = [one for one in stack if labels.get(id(one)) not in out]
        for outer, inner in zip(left, left[1:]):
            self._set_inner(outer, inner)
        outermost = left[0]
        if changes.micro_steps > 1:
            outermost = self._add_accumulation(left)
        self._outermost[id(opt)] = self._outermost[id(outermost)] = outermost
        # Referenced, so that no other object gets the same id.
        self._references += [opt, outermost]
        return outermost

    def _record_gradients_of(self, opt: Any) -> None:
        """Replaces an optimizer's `apply_grads` by a method that records the gradients it gets.

        `opt` is an optimizer that is not an instance of `mtf.optimize.Optimizer`. The gradients of
        instances of this class are recorded by the patches of module `program_patches`.
        """
        own = opt.apply_grads

        def apply_grads(*args: Any, **kwargs: Any) -> Any:
            return self.apply_gradients(lambda opt, *a, **k: own(*a, **k), opt, *args, **kwargs)

        signature = inspect.signature(own, follow_wrapped=False)
        apply_grads.__signature__ = signature  # type: ignore[attr-defined]
        opt.apply_grads = apply_grads
        self._undo.append(lambda: delattr(opt, "apply_grads"))

    def end(self) -> None:
        """Completes the record; called once, when the program is built.

        The method records how many random numbers the model draws. If no optimizer was seen, it
        records all trainable variables of the program in place of those that got a gradient.
        """
        self.random_sizes += [op.outputs[0].shape.size for op in random_operations(self.losses)]
        if self.variables:
            return
        for lowering in self.lowerings:
            for variable in lowering.graph.trainable_variables:
                self.variables[variable.name] = variable
                self._positions[variable.name] = -_position_of_first_use(
                    lowering.graph, variable.name
                )

    def _record_weights(self, weights: Any) -> None:
        """Records the weights that the program gives for a step's loss; None does nothing.

        `weights` are what a wrapper's argument `weights` takes: a number, a tensor or a variable.
        """
        if weights is None or id(weights) in self._weights:
            return
        total = weights.value if isinstance(weights, mtf.Variable) else weights
        if isinstance(total, mtf.Tensor):
            total = mtf.anonymize(mtf.reduce_sum(mtf.cast(total, tf.float32)))
        self._weights[id(weights)] = weights, total

    def weight(self) -> tf.Tensor | None:
        """Returns the total weight of a step's loss, as a float32 tf scalar in the program's graph.

        The result is None if the program gave no weights, or several different weights in a step.
        """
        if len(self._weights) != 1:
            return None
        ((_, total),) = self._weights.values()
        if not isinstance(total, mtf.Tensor):
            return tf.cast(total, tf.float32)
        lowering = next((x for x in self.lowerings if x.graph is total.graph), None)
        return lowering and lowering.export_to_tf_tensor(total)

    @property
    def sees_gradients(self) -> bool:
        """Whether an optimizer was seen, so that gradients and updates are known."""
        return self.innermost is not None

    def _mask(self, wrapper: SyncReplicasOptimizer) -> None:
        mask = self.changes.mask
        self._set(wrapper, "_contributes", None if mask is None else list(mask))
        if mask is not None:
            self._set(wrapper, "_to_aggregate", min(wrapper._to_aggregate, sum(mask)))

    def _add_accumulation(self, left: Sequence[Any]) -> Any:
        """Adds a `GradientAccumulationOptimizer` to a stack, as far out as wrappers permit.

        `left` are the stack's optimizers, from the outside in. The result is the outermost
        optimizer of the stack, which may be the added one. Raises ValueError if the added optimizer
        fits nowhere in the stack.
        """
        shape, layout = self.changes.mesh
        names = next((x._given_names for x in left if isinstance(x, Wrapper)), ("batch",))
        for number, inner in enumerate(left):
            try:
                made = GradientAccumulationOptimizer(
                    inner,
                    self.changes.micro_steps,
                    average_aggregated_gradients=True,
                    mesh_shape=shape,
                    layout=layout,
                    batch_dims=names,
                    name="verified_accumulation",
                )
            except ValueError:
                continue
            around = [one for one in left[:number] if isinstance(one, Wrapper)]
            if any(why_not(stages_of(one), stages_of(made)) for one in around):
                continue
            if number:
                self._set_inner(left[number - 1], made)
            return left[0] if number else made
        kinds = ", ".join(type(one).__name__ for one in left)
        raise ValueError(f"A GradientAccumulationOptimizer fits nowhere in this stack: {kinds}.")

    def _set_inner(self, outer: Any, inner: Any) -> None:
        for name in _INNER_NAMES:
            if callable(getattr(getattr(outer, name, None), "apply_grads", None)):
                self._set(outer, name, inner)
                return

    def _set(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        self._undo.append(lambda: setattr(owner, name, before))
        setattr(owner, name, value)

    def _reference_gradients(
        self, opt: Any, grads: list[Any], variables: list[mtf.Variable]
    ) -> list[mtf.Tensor | None]:
        """Averages gradients over shards and clips them, as the removed wrappers would do.

        Per-shard gradients are replaced by their mean over the shards. Then they are clipped by
        global norm, once for each `ClipByGlobalNormOptimizer` of the stack that `changes.without`
        does not name. The result has the gradients in the order of `grads`.

        Args:
          opt: the outermost optimizer of the program's stack.
          grads: the gradients of the variables; None for a variable without one.
          variables: the variables.
        """
        plain = []
        for grad, variable in zip(grads, variables):
            if grad is not None and grad.shape != variable.shape:
                more = [d for d in grad.shape.dims if d not in variable.shape.dims]
                grad = mtf.reduce_mean(grad, output_shape=variable.shape) if more else grad
            plain.append(grad)
        gone = [w for label, w in self.wrappers.items() if label in self.changes.without]
        clips = [x for x in self._stacks[id(opt)] if _clips(x) and x not in gone]
        present = [g for g in plain if g is not None]
        for one in clips:
            norm = mtf.sqrt(mtf.add_n([mtf.reduce_sum(mtf.square(g)) for g in present]))
            limit = one._clip_norm
            share = limit / mtf.maximum(norm, limit)
            plain = [None if g is None else g * share for g in plain]
        return plain

    def _recording_operations(
        self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Operation]:
        """Returns mtf operations that store gradients and random numbers in added variables.

        After a step, the gradients and random numbers of the step are read from these variables, to
        compare them between divisions. One of the operations counts the updates. If an earlier call
        has made an operation for a variable's gradient, this call makes none for this variable.

        Args:
          grads: the gradients that reach the innermost optimizer; None for a variable without one.
          variables: the variables of these gradients.
        """
        operations: list[mtf.Operation] = []
        for grad, variable in zip(grads, variables):
            if grad is None or variable.name in self.variables:
                continue
            self._positions[variable.name] = -_position_of_first_use(grad.graph, variable.name)
            self.variables[variable.name] = variable
            operations.append(_stored(variable.name + GRADIENT, grad, variable.shape))
            if len(self.variables) == 1:
                if "random" not in self.changes.drops:
                    operations += [
                        _stored(op.name + RANDOM, x, x.shape)
                        for op in random_operations(self.losses)
                        for x in op.outputs
                        if x.dtype.is_floating and x.graph is grad.graph
                    ]
                count = _added_variable(variable.mesh, UPDATES, mtf.Shape([]), tf.float32)
                operations.append(mtf.assign(count, count.value + 1.0))
        return operations


def _clips(opt: Any) -> bool:
    limit = opt._clip_norm if isinstance(opt, ClipByGlobalNormOptimizer) else None
    return is_number(limit) and math.isfinite(limit)


def _position_of_first_use(graph: mtf.Graph, name: str) -> int:
    """Returns the index, in an mtf graph's operations, of the first that reads a variable.

    The backward pass goes through the operations from the last to the first. So the variable's
    gradient is complete once the backward pass has passed the operation at this index. `name` is
    the variable's name, and the result is 0 if no operation reads the variable.
    """
    for number, operation in enumerate(graph.operations):
        if any(x.operation.name == name for x in operation.inputs):
            return number
    return 0


def _stored(name: str, x: mtf.Tensor, shape: mtf.Shape) -> mtf.Operation:
    dtype = tf.float64 if x.dtype == tf.float64 else tf.float32
    kept = _added_variable(x.mesh, name, shape, dtype)
    return mtf.assign(kept, mtf.cast(x, dtype) if x.dtype != dtype else x)


def _added_variable(mesh: mtf.Mesh, name: str, shape: mtf.Shape, dtype: tf.DType) -> mtf.Variable:
    root = tf.VariableScope(reuse=tf.AUTO_REUSE, name="", use_resource=True)
    with tf.variable_scope(root, auxiliary_name_scope=False):
        tensor = mtf.get_variable(
            mesh, name, shape, dtype=dtype, initializer=tf.zeros_initializer(), trainable=False
        )
    return tensor.operation
