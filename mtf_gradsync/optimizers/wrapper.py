"""Wrapper: the base class of all wrappers."""

from __future__ import annotations

import contextlib
import copy
import itertools
from inspect import getattr_static
from typing import Any, Generic, Iterable, Iterator, NamedTuple, Sequence, TypeVar, Union

import numpy as np

from mtf_gradsync._common import counted, warn_once
from mtf_gradsync._private.libraries import TF_VALUES, mtf, tf
from mtf_gradsync._private.mesh_tensorflow import scale_setting
from mtf_gradsync._private.tensorflow import stack_of
from mtf_gradsync.compat_v1 import NOT_GIVEN, given_optimizer, is_v1
from mtf_gradsync.gradients import arguments
from mtf_gradsync.gradients.arguments import PassedOnArguments
from mtf_gradsync.gradients.layout import find_replica_axes
from mtf_gradsync.gradients.losses import record_unscaled_use
from mtf_gradsync.mesh.axes import ReplicaAxes, as_dim_names, axes_of_pipeline, resolve_axes
from mtf_gradsync.optimizers.interface import TrainOptimizerInterface
from mtf_gradsync.optimizers.pipeline.builder import StepBuilder
from mtf_gradsync.optimizers.pipeline.forms import (
    GradientSet,
    IslandAxes,
    ReductionSettings,
    check_updates,
    shard_names,
    without_frozen,
)
from mtf_gradsync.optimizers.pipeline.order import check_order
from mtf_gradsync.optimizers.pipeline.stack import (
    Place,
    ProgramFacts,
    Segment,
    Stack,
    Stage,
    check_meshes,
    complete_stack,
)
from mtf_gradsync.optimizers.pipeline.weights import (
    WeightsOfGradients,
    check_weights,
    weights_of_step,
    weights_on_mesh,
    with_weights,
)
from mtf_gradsync.optimizers.slots import SlotBook, optimizer_of, optimizers_of
from mtf_gradsync.optimizers.state import check_name
from mtf_gradsync.reduce import CompressedAllReduce, FusedAllReduce, Strategy, check_strategy
from mtf_gradsync.reduce.compressed import WireDtype
from mtf_gradsync.reduce.strategy import has_gradient_reduction
from mtf_gradsync.step.plan import StepPlan

_OF_TENSORFLOW = (*TF_VALUES, tf.Operation, tf.Graph)


_T = TypeVar("_T")


class StepAttribute(Generic[_T]):
    """A wrapper's attribute that a step sets; `before` is its value before there is a step.

    Pairs of a gradient and a variable that were given to `apply_grad` one by one may wait for their
    step to be built. If pairs wait, reading the attribute first builds their step.
    """

    def __init__(self, before: _T):
        self._before = before

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: Any, owner: type) -> _T:
        if wrapper is None:
            return self._before
        for pairs in wrapper._to_build:
            pairs.build_if_here()
        return vars(wrapper).get(self._name, self._before)

    def __set__(self, wrapper: Any, value: _T) -> None:
        vars(wrapper)[self._name] = value


class CommonArguments(NamedTuple):
    """The arguments that all wrappers have.

    Attributes:
      name: name of the wrapper, a prefix of names of its variables and operations.
      axes: the replica axes, in place of mesh_shape, layout and batch_dims.
      mesh_shape: Mesh-TF's mesh shape.
      layout: Mesh-TF's layout rules.
      batch_dims: names of the dimensions that the batch is split along.
      reducer: the reduction strategy; None for `FusedAllReduce()`.
      learning_rate: the argument for a class or factory that is given in place of an optimizer.
    """

    name: str
    axes: Any = None
    mesh_shape: Any = None
    layout: Any = None
    batch_dims: str | Sequence[str] = ("batch",)
    reducer: Strategy | None = None
    learning_rate: Any = NOT_GIVEN


class Wrapper(TrainOptimizerInterface, mtf.optimize.Optimizer):
    """A Mesh-TF optimizer around another one.

    A subclass calls `_wrap` in its constructor, and defines the method `stages`, which returns the
    subclass's steps of an update (reduce, clip, ...). A stage says which form of gradients it takes
    and gives, so that wrappers in a wrong order are found. From the stages of all wrappers
    `StepBuilder` builds the training step. The page "Write your own wrapper" has an example.

    Attributes:
      shown: pairs of a name and the name of a value in `reported`: training shows the value next
        to the loss, under the first name.
      opt: the inner optimizer.
      axes: the replica axes, `ReplicaAxes`; None if no mesh was given.
      reducer: the reduction strategy.
      name: name of the wrapper, a prefix of names of its variables and operations.
      step: the step that was built last, by the outermost wrapper of the stack; None before any
        step was built.
      times_applied: how many times the wrapper has applied gradients in the graph of `step`.
    """

    shown: Sequence[tuple[str, str]] = ()
    _scales_loss = False  # whether `without_scale` makes variables

    opt: Any
    reducer: Strategy
    _gradient_reducer: Strategy
    name: str
    step = StepAttribute[Union[StepBuilder, None]](None)
    times_applied = StepAttribute(0)
    _slots = StepAttribute(SlotBook())

    def _wrap(
        self,
        opt: Any,
        common: CommonArguments,
        needs_mesh_for: str = "",
        reduce_dtype: WireDtype | None = None,
    ) -> None:
        """Checks the arguments that all wrappers have, and sets the attributes for them.

        Args:
          opt: a Mesh-TF optimizer or a wrapper, or a class or factory of one.
          common: the arguments that all wrappers have.
          needs_mesh_for: for an error, what the wrapper has to know the mesh for. A wrapper that
            has to know the mesh and is given none takes the mesh that the program has made for this
            graph. "" for a wrapper that need not know the mesh.
          reduce_dtype: the dtype in which gradients are sent; None for their own dtype.
        """
        name, axes, mesh_shape, layout, batch_dims, reducer, learning_rate = common
        kind = type(self).__name__
        self.opt = given_optimizer(opt, learning_rate, kind)
        if is_v1(self.opt):
            raise TypeError(
                f"{kind} wraps Mesh-TensorFlow optimizers, got the TensorFlow optimizer "
                f"{self.opt!r}. On a mesh: {kind}(gs.MeshOptimizer(optimizer)), or use one of "
                "mtf.optimize."
            )
        for one in optimizers_of(self.opt):
            _warn_of_positional_rate(one)
        self._given_axes = resolve_axes(axes, mesh_shape, layout, batch_dims)
        if self._given_axes is None and needs_mesh_for:
            self._given_axes = axes_of_pipeline(kind, needs_mesh_for, batch_dims)
        self._given_names = as_dim_names(batch_dims)
        self.reducer = FusedAllReduce() if reducer is None else check_strategy(reducer)
        self._gradient_reducer = self.reducer
        if reduce_dtype is not None:
            if has_gradient_reduction(self.reducer):
                raise ValueError(
                    f"{self.reducer!r} chooses itself how gradients are sent; got it with "
                    f"reduce_dtype={reduce_dtype!r}. Give one of them."
                )
            self._gradient_reducer = CompressedAllReduce(self.reducer, reduce_dtype)
        self.name = check_name(name)
        self._slots = SlotBook()

    def _turn_into_v1(self, counterpart: Any, *args: Any, **kwargs: Any) -> None:
        """Turns this new wrapper into an object of `counterpart`, its class for `tf.compat.v1`.

        A wrapper calls this method in ``__init__`` if it is given an optimizer of `tf.compat.v1`.
        `args` and `kwargs` are the arguments of the constructor of `counterpart`. This is not done
        in ``__new__``, because the optimizer is not known there: ``__new__`` runs before gin adds
        arguments, and before a class or factory of an optimizer is called. A ``__new__`` would also
        prevent copies, and subclasses with arguments of their own.
        """
        self.__class__ = counterpart
        counterpart.__init__(self, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes that a copy of the wrapper gets, by name.

        The copy gets the wrapper's settings. What the wrapper knows of a step that it has built is
        left out.
        """
        kind = type(self)
        return {
            name: value
            for name, value in self.__dict__.items()
            if name != "_to_build"
            and not isinstance(getattr_static(kind, name, None), StepAttribute)
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _slots=SlotBook())

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrapper:
        # Objects of a graph (a learning rate, variables to average) are not copied.
        for opt in (self, *self.inner_stack(), *optimizers_of(self.innermost())):
            memo.update((id(x), x) for x in _graph_objects(getattr(opt, "__dict__", {})))
        made = memo[id(self)] = copy.copy(self)
        made.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return made

    def _check_order(self) -> None:
        """Raises ValueError if this wrapper must not be around one of the wrappers inside it."""
        check_order(self, self.inner_stack())

    # Methods that subclasses override.

    def stages(self, place: Place) -> Sequence[Stage]:
        """Returns the stages of a step that this wrapper adds, from the outside in.

        Args:
          place: where the wrapper stands in its stack, and what is known of the program.
        """
        del place
        return []

    def without_scale(
        self, grads: list[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Tensor | None]:
        """Unscales gradients before they pass through the stack, if this wrapper scales the loss.

        Args:
          grads: gradients of a loss.
          variables: the variables of the gradients.

        Returns:
          The gradients of the unscaled loss.
        """
        del variables
        return grads

    def reported(self) -> dict[str, mtf.Tensor]:
        """Returns this wrapper's values for `mtf_gradsync.reported`, by name.

        The values are mtf tensors, the same on every processor, to fetch together with the step.
        The base class returns {}. A subclass that has values defines this method; it returns {}
        before there is a step.
        """
        return {}

    def progress_fields(self) -> dict[str, mtf.Tensor]:
        """Returns the values that training shows next to the loss, by the names in `shown`.

        The values are taken from what the method `reported` returns. Names in `shown` for which
        there is no value are left out.
        """
        values = self.reported() if self.shown else {}
        return {name: values[tag] for name, tag in self.shown if tag in values}

    # The interface of mtf.optimize.Optimizer.

    def apply_grads(
        self,
        grads: Sequence[mtf.Tensor | None],
        variables: Sequence[mtf.Variable],
        *args: Any,
        weights: Any = None,
        **kwargs: Any,
    ) -> list[mtf.Operation]:
        """Applies gradients to variables.

        Args:
          grads: a gradient or None for each variable.
          variables: mesh variables, for example `graph.trainable_variables`.
          *args: more arguments for `apply_grads` of the innermost optimizer. If an argument is a
            tensor, an update uses the value that it has in the step that makes the update.
          weights: how much the loss of the step stands for, as for `compute_gradients`. None takes
            the weights that `compute_gradients` was given for these gradients, if any.
          **kwargs: more keyword arguments for `apply_grads` of the innermost optimizer.

        Returns:
          A flat list of mtf operations for `lowering.lowered_operation`; empty if every gradient is
          None.

        Raises:
          TypeError: an argument has the wrong type, or the innermost optimizer does not take it.
          ValueError: a gradient does not fit its variable, or lengths differ.
        """
        inner_arguments = PassedOnArguments(args, kwargs)
        grads, variables = self._checked(grads, variables, inner_arguments)
        inner = self.innermost()
        given_grads, grads = grads, without_frozen(inner, grads, variables)
        weights = self._checked_weights(weights, grads, variables)
        if variables and self._to_build:
            self._build_pairs(variables[0].graph)
        owners = [v for g, v in zip(grads, variables) if g is not None]
        stack = self._check_stack(grads, variables, inner_arguments)
        if not owners:
            names = counted([v.name for v in variables], "variable") if variables else ""
            if names:
                why = (
                    f"every gradient is None, of {names}. mtf.gradients has none for a variable "
                    "that the loss does not depend on, or only through integers, complex numbers "
                    "or mtf.stop_gradient."
                )
                frozen = all(optimizer_of(inner, v) is None for v in variables)
                if frozen or any(g is not None for g in given_grads):
                    why = f"by the groups of {type(inner).__name__}, nothing updates {names}."
                key = f"no gradients {self.name} {names}"
                warn_once(key, "%s trains nothing: %s", self.name, why)
            return []
        # Builds the steps of other pairs, which an error in this one does not undo.
        books = [wrapper._slots for wrapper in self._wrappers()]
        with contextlib.ExitStack() as undone:
            undone.enter_context(StepPlan.of(variables[0].graph).undone_on_error())
            for book in books:
                undone.enter_context(book.undone_on_error())
            given = GradientSet(tuple(self._without_scales(grads, variables)), tuple(variables))
            wrappers = self._segment()[0]
            slots = wrappers[-1]._slots
            if weights is not None:
                axes = stack.axes_now(0, given.present)
                given = given.with_grads(
                    given.grads, weights=weights_on_mesh(weights, given.mesh, axes)
                )
                stack = with_weights(stack, axes, slots)
            step = StepBuilder(stack, slots, inner_arguments, inner)
            operations = step.build(given)
        for wrapper in wrappers:
            wrapper._note_step(step)
        return operations

    def _check_stack(
        self,
        grads: Sequence[mtf.Tensor | None],
        variables: Sequence[mtf.Variable],
        inner_arguments: PassedOnArguments,
    ) -> Stack:
        """Returns the stack with all of its stages; builds nothing.

        Raises an error if a stage cannot handle `grads`, the gradients of `variables`, or
        `inner_arguments`, the arguments that `apply_grads` passes on to the innermost optimizer.
        """
        present = [g for g in grads if g is not None]
        program = ProgramFacts.of(present) if present else None
        islands = StepPlan.of(variables[0].graph).islands if variables else None
        stack = complete_stack(*self._segment(), program, islands)
        check_meshes(stack, grads, variables)
        for one in stack.stages:
            one.check(grads, variables, inner_arguments)
        check_updates(stack.opt, [v for g, v in zip(grads, variables) if g is not None])
        return stack

    def _checked_weights(
        self,
        weights: Any,
        grads: Sequence[mtf.Tensor | None],
        variables: Sequence[mtf.Variable],
    ) -> Any:
        """Returns the weights of the gradients `grads` after a check; None if there are none.

        `weights` is what `apply_grads` was given. If it is None, the weights are those that
        `compute_gradients` was given for these gradients. `variables` are the gradients' variables.
        Raises ValueError if both methods were given weights that differ. Raises ValueError, too, if
        a wrapper in the stack is inside an optimizer of another library, which does not pass
        weights on to it.
        """
        if weights is not None:
            weights = check_weights(weights, self._stack_shard_names())
        present = [(g, v) for g, v in zip(grads, variables) if g is not None]
        own, owners = zip(*present) if present else ((), ())
        known = StepPlan.of(own[0].graph).known_extension(WeightsOfGradients) if own else None
        if known is not None:
            weights = weights_of_step(weights, known.recorded_for(own), owners)
        if weights is None:
            return None
        inside = [w for w in self._wrappers() if w not in self._segment()[0]]
        if inside:
            raise ValueError(
                f"weights do not reach {inside[0].name} inside of an optimizer of another library: "
                f"put {type(inside[0]).__name__} directly inside of {self.name}."
            )
        self._check_no_groups()
        return check_weights(weights, self._stack_shard_names())  # the stack may be another one

    def _checked(
        self, grads: Any, variables: Any, inner_arguments: PassedOnArguments
    ) -> tuple[list[mtf.Tensor | None], list[mtf.Variable]]:
        self._check_arguments(inner_arguments)
        grads, variables = arguments.check_grads_and_variables(grads, variables)
        self._check_shapes(grads, variables)
        return grads, variables

    def _check_arguments(self, inner_arguments: PassedOnArguments) -> None:
        inner_arguments.check(self._segment()[0][-1].opt)

    def _place(
        self, islands: IslandAxes | None, around: Sequence[Segment], program: ProgramFacts | None
    ) -> Place:
        """Returns this wrapper's place in the stack: its replica axes, and what is around it.

        Args:
          islands: the islands of an `OuterOptimizer` around the wrapper; None if there is none. If
            the wrapper was given axes between islands, the place has the axes inside an island.
          around: the wrappers around the wrapper, the outermost first.
          program: what is known of the program; None while no gradients are applied.
        """
        axes = self._given_axes
        if axes and islands and set(axes.mesh_axes) & set(islands.islands.mesh_axes):
            axes = islands.inside
        names = axes.batch_dims if axes else self._given_names
        return Place(axes, names, islands, tuple(around), program)

    def _gradient_reduction(
        self, place: Place | None = None, found_axes: ReplicaAxes | None = None
    ) -> ReductionSettings:
        """Returns the settings with which this wrapper reduces gradients.

        `place` is what `_place` returned; None if nothing is around the wrapper. `found_axes` are
        the replica axes, if the wrapper's stages have found them; None takes those of `place`.
        """
        place = place or self._place(None, (), None)
        axes = found_axes or place.axes
        names = axes.batch_dims if axes else place.names
        if axes is None and place.islands:
            axes = place.islands.inside
        return ReductionSettings(self._gradient_reducer, names, axes, self.name, self.reducer)

    def _note_step(self, step: StepBuilder) -> None:
        again = self.step is not None and self.step.plan.graph is step.plan.graph
        self.times_applied = self.times_applied + 1 if again else 1
        self.step = step

    def _check_applied(self, before: str) -> None:
        """Raises ValueError if no gradients were applied yet.

        `before` says, for the error, what needs applied gradients, such as "its hook is used".
        """
        if self.step is None:
            raise ValueError(
                f"{type(self).__name__} has no step yet: call apply_gradients (or apply_grads) "
                f"before {before}."
            )

    def _without_scales(
        self, grads: Iterable[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Tensor | None]:
        grads = list(grads)
        for wrapper in self._wrappers():
            grads = wrapper.without_scale(grads, variables)
        record_unscaled_use(grads, [v.name for v in variables])
        return grads

    # The stack.

    def axes_now(self, grads: Sequence[mtf.Tensor]) -> ReplicaAxes | None:
        """Returns the stack's replica axes: those that a wrapper was given, or the program's.

        The result is None if the axes are not known, or if the gradients that are applied, `grads`,
        are on several meshes.
        """
        if len({g.mesh for g in grads}) > 1:
            return None
        given = next((w.axes for w in self._wrappers() if w.axes), None)
        return given or find_replica_axes(grads, self._shard_names)

    def inner_stack(self) -> list[Any]:
        """Returns the optimizers inside this one, from the outside in.

        Raises ValueError if an optimizer contains itself.
        """
        # Wrappers of other libraries may have an attribute for the optimizer inside.
        names = ("opt", "optimizer", "_opt", "_optimizer")
        return stack_of(self, names, "apply_grads")[1:]

    def _wrappers(self) -> list[Wrapper]:
        """Returns the wrappers of the stack, from the outside in."""
        return [opt for opt in (self, *self.inner_stack()) if isinstance(opt, Wrapper)]

    def _segment(self) -> tuple[list[Wrapper], list[Any]]:
        """Returns the stack in two lists: wrappers, and the optimizers inside them.

        The first list has this wrapper and the wrappers inside it, up to the first optimizer that
        is no wrapper. The second list has this optimizer and all optimizers inside it, which may
        be wrappers again.
        """
        stack = [self, *self.inner_stack()]
        wrappers = list(itertools.takewhile(lambda opt: isinstance(opt, Wrapper), stack))
        return wrappers, stack[len(wrappers) :]

    def innermost(self) -> Any:
        """Returns the optimizer inside all wrappers, which makes the updates."""
        return self.inner_stack()[-1]

    # The replica axes, and shard dims in shapes.

    @property
    def axes(self) -> ReplicaAxes | None:
        """The `ReplicaAxes`, or None if no mesh was given."""
        return self._given_axes

    @property
    def _shard_names(self) -> tuple[str, ...]:
        return self.axes.batch_dims if self.axes else self._given_names

    def _stack_shard_names(self) -> tuple[str, ...]:
        return shard_names(wrapper._gradient_reduction() for wrapper in self._wrappers())

    def _shard_dims(self, shape: mtf.Shape, place: Place | None = None) -> list[mtf.Dimension]:
        """Returns the shard dims that a shape has, in the order that numbers the shards.

        `place` is the wrapper's place in its stack; None for the axes that the wrapper was given.
        """
        by_name = {d.name: d for d in shape.dims}
        names = place.names if place else self._shard_names
        return [by_name[name] for name in names if name in by_name]

    def _has_own_copy(self, variable: mtf.Variable, place: Place | None = None) -> bool:
        """Returns whether shards have their own copies of a variable: whether it has shard dims.

        Raises ValueError if the variable has some of the shard dims but not all. `place` is the
        wrapper's place in its stack; None for the axes that the wrapper was given.
        """
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

    # State.

    def get_slot(self, var: mtf.Variable, name: str) -> mtf.Variable | None:
        """Returns the slot that the stack keeps for a variable, or None.

        Args:
          var: a variable that was updated.
          name: the slot's name: what the inner optimizer appended to the variable's name,
            without the leading "/" or "_" ("adam_m", "slot_vr", "momentum_v").

        Returns:
          An `mtf.Variable`.
        """
        inner = getattr(self.inner_stack()[0], "get_slot", None)
        slot = inner(var, name) if inner else None
        return slot if slot is not None else self._slots.get(var, name)

    def get_slot_names(self) -> list[str]:
        """Returns the names of the stack's slots, as `get_slot` takes them."""
        inner = getattr(self.inner_stack()[0], "get_slot_names", None)
        names = list(inner()) if inner else []
        return names + [n for n in self._slots.names() if n not in names]

    def variables(self) -> list[mtf.Variable]:
        """Returns all variables of the stack: the inner optimizer's, then the wrapper's."""
        inner = getattr(self.inner_stack()[0], "variables", None)
        inside = list(inner()) if callable(inner) else []
        return inside + [v for v in self._slots.variables() if v not in inside]


def _warn_of_positional_rate(opt: Any) -> None:
    """Warns once if `opt` is an Adafactor whose first argument was given something else.

    The first argument of Mesh-TF's Adafactor is the boolean multiply_by_parameter_scale, so that a
    learning rate that is given by position is taken for this boolean.
    """
    given = scale_setting(opt)
    if not isinstance(given, (bool, np.bool_)):
        warn_once(
            f"positional rate {type(opt).__name__} {given!r}",
            "%s has multiply_by_parameter_scale=%r, which is no boolean: this is the first "
            "argument, so a learning rate given by position has no effect. Give "
            "%s(learning_rate=...).",
            type(opt).__name__,
            given,
            type(opt).__name__,
        )


def _graph_objects(value: Any) -> Iterator[Any]:
    """Yields the tensors, variables, operations and other objects of a graph that a value has.

    `value` is an object of a tf or mtf graph, or a dict, list, tuple or set of such objects. A
    container may have further containers inside.
    """
    todo, seen = [value], {}
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, dict):
            todo += [*one, *one.values()]
        elif isinstance(one, (list, tuple, set)):
            todo += one
        elif isinstance(one, (mtf.Tensor, mtf.Operation, mtf.Mesh, mtf.Graph, *_OF_TENSORFLOW)):
            yield one
