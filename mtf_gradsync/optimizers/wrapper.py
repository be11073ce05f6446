"""The base class of all wrappers."""

from __future__ import annotations

import contextlib
import itertools
import re
from typing import Any, Iterable, Sequence, Union

from mtf_gradsync._names import counted
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._warn import warn_once
from mtf_gradsync.compat_v1 import given_optimizer, is_v1
from mtf_gradsync.gradients import checks
from mtf_gradsync.gradients.losses import take_without_scale
from mtf_gradsync.gradients.pending import find_axes
from mtf_gradsync.mesh.axes import ReplicaAxes, as_dim_names, axes_of_pipeline, resolve_axes
from mtf_gradsync.optimizers.interface import DeprecatedNames, TrainOptimizerInterface
from mtf_gradsync.optimizers.own_arguments import OwnArguments
from mtf_gradsync.optimizers.pairs import AppliesPairs, OfStep
from mtf_gradsync.optimizers.pipeline import (
    GradientSet,
    Partition,
    Reduction,
    Segment,
    Stage,
    StepBuilder,
    Traits,
    check_meshes,
    check_order,
)
from mtf_gradsync.optimizers.shard_shapes import ShardShapes
from mtf_gradsync.optimizers.state.slots import SlotBook
from mtf_gradsync.reduce import CompressedAllReduce, FusedAllReduce, Strategy, check_strategy
from mtf_gradsync.reduce.strategies.compressed import WireDtype
from mtf_gradsync.reduce.strategy import has_gradient_reduction
from mtf_gradsync.step import Plan

_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_./-]*\Z")


class Wrapper(
    AppliesPairs, DeprecatedNames, TrainOptimizerInterface, ShardShapes, mtf.optimize.Optimizer
):
    """A Mesh-TF optimizer around another one.

    A subclass calls `_wrap` in its constructor, and defines its `stages` and its `traits`, which
    restrict the wrappers around and inside it. A stack of wrappers is built as one list of stages
    (`StepBuilder`). The page "Write your own wrapper" has an example.

    Attributes:
      traits: what the wrapper needs of its stack.
      shown: the values of `reported` that training shows next to the loss, by the names to show.
      opt: the inner optimizer.
      axes: `ReplicaAxes`, or None if no mesh was given.
      reducer: the reduction strategy.
      name: name of the wrapper, a prefix of names of its variables and operations.
      step: the step that was built last, by the outermost wrapper of the stack; None before.
      times_applied: how many times it has applied gradients in the graph of that step.
    """

    traits = Traits()
    shown: Sequence[tuple[str, str]] = ()

    opt: Any
    reducer: Strategy
    _gradient_reducer: Strategy
    name: str
    step = OfStep[Union[StepBuilder, None]](None)
    times_applied = OfStep(0)
    _slots = OfStep(SlotBook())
    # The replica axes of an island, where it stands inside of one.
    _inside: ReplicaAxes | None = None

    def _wrap(
        self,
        opt: Any,
        learning_rate: Any,
        name: str,
        axes: Any,
        mesh_shape: Any,
        layout: Any,
        batch_dims: str | Sequence[str],
        reducer: Strategy | None,
        needs_mesh_for: str = "",
        reduce_dtype: WireDtype | None = None,
    ) -> None:
        """Checks and sets the arguments that all wrappers have.

        `learning_rate` is `NOT_GIVEN` with an optimizer. A wrapper that has to know the mesh says
        by `needs_mesh_for`, a part of an error, for what purpose: it then takes the mesh that the
        program has made for this graph, if none is given. Gradients are sent in `reduce_dtype`;
        None for their own.
        """
        kind = type(self).__name__
        self.opt = given_optimizer(opt, learning_rate, kind)
        if is_v1(self.opt):
            raise TypeError(
                f"{kind} wraps Mesh-TensorFlow optimizers, got the TensorFlow optimizer "
                f"{self.opt!r}. On a mesh: {kind}(gs.MeshOptimizer(optimizer)), or use one of "
                "mtf.optimize."
            )
        self.axes = resolve_axes(axes, mesh_shape, layout, batch_dims)
        if self.axes is None and needs_mesh_for:
            self.axes = axes_of_pipeline(kind, needs_mesh_for, batch_dims)
        self._shard_names = self.axes.batch_dims if self.axes else as_dim_names(batch_dims)
        self.reducer = FusedAllReduce() if reducer is None else check_strategy(reducer)
        self._gradient_reducer = self.reducer
        if reduce_dtype is not None:
            if has_gradient_reduction(self.reducer):
                raise ValueError(
                    f"{self.reducer!r} chooses itself how gradients are sent; got it with "
                    f"reduce_dtype={reduce_dtype!r}. Give one of them."
                )
            self._gradient_reducer = CompressedAllReduce(self.reducer, reduce_dtype)
        if not isinstance(name, str) or not _NAME.match(name):
            raise ValueError(f"name must be of letters, digits and any of . _ / -, got {name!r}.")
        self.name = name
        self._slots = SlotBook()

    def _check_order(self) -> None:
        """Raises ValueError for an order of wrappers that makes no sense."""
        check_order(self, self.inner_stack())

    def _stand_inside(self, islands: ReplicaAxes, inside: ReplicaAxes) -> None:
        """Takes the replica axes inside an island, in place of given axes that contain islands."""
        self._inside = inside
        if self.axes is not None and set(self.axes.mesh_axes) & set(islands.mesh_axes):
            self.axes = inside
            self._shard_names = inside.batch_dims

    # Methods that subclasses override.

    def stages(self) -> list[Stage]:
        """The stages of a step that this wrapper adds, from the outside in."""
        return []

    def settle(self, grads: Sequence[mtf.Tensor | None], around: Sequence[Wrapper]) -> None:
        """Decides what depends on the program's mesh, before the stages of a step are made.

        Args:
          grads: gradients as given to the outermost wrapper, or None.
          around: the wrappers around this one, from the outside in.
        """

    def partition(self) -> Partition | None:
        """How this wrapper shards the updates of the inner optimizer; None if it does not."""
        return None

    def without_scale(
        self, grads: list[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Tensor | None]:
        """Unscales gradients before they pass through the stack, if this wrapper scales the loss.

        Args:
          grads: gradients of a loss.
          variables: their variables.

        Returns:
          The gradients of the loss without the scale.
        """
        del variables
        return grads

    def check(self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]) -> None:
        """Raises ValueError for gradients or variables that this wrapper cannot handle.

        Args:
          grads: gradients as given to the outermost wrapper, or None.
          variables: their variables.
        """

    def check_arguments(self, own: OwnArguments, variables: Sequence[mtf.Variable]) -> None:
        """Raises ValueError for arguments that the optimizer cannot get from this wrapper.

        Args:
          own: more arguments for `apply_grads` of the innermost optimizer.
          variables: the variables.
        """

    def reported(self) -> dict[str, mtf.Tensor]:
        """This wrapper's values for `mtf_gradsync.reported`, by name."""
        return {}

    def progress_fields(self) -> dict[str, mtf.Tensor]:
        """The values that training shows next to the loss, under the names in `shown`."""
        values = self.reported() if self.shown else {}
        return {name: values[tag] for name, tag in self.shown if tag in values}

    # The interface of mtf.optimize.Optimizer.

    def apply_grads(
        self,
        grads: Sequence[mtf.Tensor | None],
        variables: Sequence[mtf.Variable],
        *args: Any,
        **kwargs: Any,
    ) -> list[mtf.Operation]:
        """Applies gradients to variables.

        Args:
          grads: a gradient or None for each variable.
          variables: mesh variables, for example `graph.trainable_variables`.
          *args: more arguments for `apply_grads` of the innermost optimizer. An update uses the
            values of its own step.
          **kwargs: more keyword arguments for it.

        Returns:
          A flat list of mtf operations for `lowering.lowered_operation`; empty if every gradient is
          None.

        Raises:
          TypeError: an argument has the wrong type, or the innermost optimizer does not take it.
          ValueError: a gradient does not fit its variable, or lengths differ.
        """
        own = OwnArguments(args, kwargs)
        grads, variables = self._checked(grads, variables, own)
        if variables:
            self._build_pairs(variables[0].graph)
        wrappers = self._segment_wrappers()
        for number, wrapper in enumerate(wrappers):
            wrapper.settle(grads, wrappers[:number])
        check_meshes(wrappers, grads, variables)
        for wrapper in wrappers:
            wrapper.check(grads, variables)
            wrapper.check_arguments(own, variables)
        if all(g is None for g in grads):
            self._warn_of_no_gradients(variables)
            return []
        # Builds the steps of other pairs, which an error in this one does not undo.
        books = [wrapper._slots for wrapper in self._wrappers()]
        with contextlib.ExitStack() as undone:
            undone.enter_context(Plan.of(variables[0].graph).undone_on_error())
            for book in books:
                undone.enter_context(book.undone_on_error())
            given = GradientSet(tuple(self._without_scales(grads, variables)), tuple(variables))
            innermost = wrappers[-1]
            step = StepBuilder(
                [Segment(w.stages(), w._gradient_reduction()) for w in wrappers],
                innermost.opt,
                # A wrapper inside an optimizer of another library reduces by itself.
                takes_pending=len(wrappers) < len(self._wrappers()),
                partition=next((p for p in (w.partition() for w in wrappers) if p), None),
                slots=innermost._slots,
                arguments=own,
            )
            operations = step.build(given)
        for wrapper in wrappers:
            wrapper._note_step(step)
        return operations

    def _checked(
        self, grads: Any, variables: Any, own: OwnArguments
    ) -> tuple[list[mtf.Tensor | None], list[mtf.Variable]]:
        self._check_arguments(own)
        grads, variables = checks.check_grads_and_variables(grads, variables)
        self._check_shapes(grads, variables)
        return grads, variables

    def _warn_of_no_gradients(self, variables: Sequence[mtf.Variable]) -> None:
        if variables:
            names = counted([v.name for v in variables], "variable")
            warn_once(
                f"no gradients {self.name} {names}",
                "%s trains nothing: every gradient is None, of %s. mtf.gradients has none for a "
                "variable that the loss does not depend on, or only through integers, complex "
                "numbers or mtf.stop_gradient.",
                self.name,
                names,
            )

    def _check_arguments(self, own: OwnArguments) -> None:
        own.check(self._segment_wrappers()[-1].opt)

    def _gradient_reduction(self) -> Reduction:
        """How this wrapper reduces gradients."""
        strategy = self._gradient_reducer
        axes = self.axes or self._inside
        return Reduction(strategy, self._shard_names, axes, self.name, self.reducer)

    def _note_step(self, step: StepBuilder) -> None:
        again = self.step is not None and self.step.plan.graph is step.plan.graph
        self.times_applied = self.times_applied + 1 if again else 1
        self.step = step

    def _check_applied(self, before: str) -> None:
        """Raises ValueError if gradients were not applied before."""
        if self.step is None:
            raise ValueError(
                f"{type(self).__name__} has no step yet: call apply_gradients (or apply_grads) "
                f"before {before}."
            )

    def _applied_before(self, variable: mtf.Variable) -> bool:
        step = self.step
        return step is not None and any(x.graph is variable.graph for x in step.received[:1])

    def _without_scales(
        self, grads: Iterable[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Tensor | None]:
        grads = list(grads)
        for wrapper in self._wrappers():
            grads = wrapper.without_scale(grads, variables)
        take_without_scale(grads, [v.name for v in variables])
        return grads

    # The stack.

    def axes_now(self, grads: Sequence[mtf.Tensor]) -> ReplicaAxes | None:
        """The replica axes of the stack: given ones, or those of the program; None if not known.

        Args:
          grads: gradients that it has applied.
        """
        given = next((w.axes for w in self._wrappers() if w.axes), None)
        return given or find_axes(grads, self._shard_names)

    def inner_stack(self) -> list[Any]:
        """The optimizers inside this one, from the outside in."""
        stack: list[Any] = []
        opt: Any = self.opt
        while opt is not None:
            stack.append(opt)
            # Wrappers of other libraries may have an attribute for the optimizer inside.
            names = ("opt", "optimizer", "_opt", "_optimizer")
            inside = (getattr(opt, name, None) for name in names)
            opt = next((o for o in inside if callable(getattr(o, "apply_grads", None))), None)
        return stack

    def _wrappers(self) -> list[Wrapper]:
        """The wrappers of the stack, from the outside in."""
        return [opt for opt in (self, *self.inner_stack()) if isinstance(opt, Wrapper)]

    def _segment_wrappers(self) -> list[Wrapper]:
        """The wrappers up to the first optimizer of another library."""
        stack = (self, *self.inner_stack())
        return list(itertools.takewhile(lambda opt: isinstance(opt, Wrapper), stack))

    def innermost(self) -> Any:
        """The optimizer that does the updates."""
        return self.inner_stack()[-1]

    # State.

    def get_slot(self, var: mtf.Variable, name: str) -> mtf.Variable | None:
        """The slot that the stack keeps for a variable, or None.

        Args:
          var: a variable that was updated.
          name: the slot's name: what the inner optimizer appended to the variable's name,
            without the leading "/" or "_" ("adam_m", "slot_vr", "momentum_v").

        Returns:
          An `mtf.Variable`.
        """
        inner = getattr(self.opt, "get_slot", None)
        slot = inner(var, name) if inner else None
        return slot if slot is not None else self._slots.get(var, name)

    def get_slot_names(self) -> list[str]:
        """Names of the slots of the whole stack."""
        inner = getattr(self.opt, "get_slot_names", None)
        names = list(inner()) if inner else []
        return names + [n for n in self._slots.names() if n not in names]

    def variables(self) -> list[mtf.Variable]:
        """All variables that the stack made: the inner optimizer's, then the wrapper's."""
        inner = getattr(self.opt, "variables", None)
        inside = list(inner()) if callable(inner) else []
        return inside + [v for v in self._slots.variables() if v not in inside]
