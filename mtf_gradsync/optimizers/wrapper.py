"""What all wrappers share: construction, the optimizer interface, slots."""

from __future__ import annotations

import contextlib
import re
import weakref
from typing import Any, Callable, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._warn import warn_once
from mtf_gradsync.compat_v1 import AppliesGradients, is_v1
from mtf_gradsync.gradients import SumGradients, on_present, take_without_scale
from mtf_gradsync.mesh.axes import (
    LayoutLike,
    MeshShapeLike,
    ReplicaAxes,
    as_dim_names,
    resolve_axes,
)
from mtf_gradsync.optimizers import checks
from mtf_gradsync.optimizers.interface import TrainOptimizerInterface
from mtf_gradsync.optimizers.seen import Seen, Summed, seen_now
from mtf_gradsync.optimizers.state.slots import SlotBook
from mtf_gradsync.reduce import FusedAllReduce, Strategy, check_strategy
from mtf_gradsync.step import Plan, gated_update

_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_./-]*\Z")


class _OrCounterpart(type):
    """Calling a wrapper's class gives its non-mesh counterpart where it has set one."""

    # No return type: with one, editors would not look at the arguments of wrappers.
    def __call__(cls, *args: Any, **kwargs: Any):
        made = super().__call__(*args, **kwargs)
        return vars(made).get("counterpart", made)


class Wrapper(TrainOptimizerInterface, mtf.optimize.Optimizer, metaclass=_OrCounterpart):
    """A Mesh-TF optimizer around another one.

    Subclasses say what happens to gradients on their way to the inner optimizer, by `_to_inner`.
    Wrappers nest: the innermost one gates the update.

    Attributes:
      opt: the inner optimizer.
      axes: `ReplicaAxes`, or None if no mesh was given.
      reducer: the reduction strategy.
      name: name of the wrapper, a prefix of what it creates.
      came: the gradients that it was given last; None before.
      handed_on: those that it gave the inner optimizer.
      shards: the same as came, per shard, where it has told the shards apart.
      times_applied: how often it has applied gradients in the graph that it was used in last.
      summed: the gradients that it has summed over the shards; None where it did not.
      takes_parts: whether it may be given parts of variables, as inside ShardedUpdateOptimizer.
    """

    takes_parts = False

    def __init__(
        self,
        opt: AppliesGradients,
        name: str,
        axes: ReplicaAxes | None = None,
        mesh_shape: MeshShapeLike | None = None,
        layout: LayoutLike | None = None,
        batch_dims: str | Sequence[str] = ("batch",),
        reducer: Strategy | None = None,
    ):
        """Wraps an optimizer.

        Args:
          opt: an object with apply_grads.
          name: name of the wrapper.
          axes: the replica axes; or give mesh_shape and layout.
          mesh_shape: Mesh-TF's mesh shape, where the mesh is known when the graph is built.
          layout: Mesh-TF's layout rules, likewise.
          batch_dims: names of the tensor dimensions that the batch is split along.
          reducer: how sums cross the mesh; None takes `FusedAllReduce()`.

        Raises:
          TypeError: opt is a TensorFlow optimizer, or an argument has the wrong type.
          ValueError: arguments contradict each other.
        """
        if is_v1(opt):
            kind = type(self).__name__
            raise TypeError(
                f"{kind} wraps Mesh-TensorFlow optimizers, got the TensorFlow optimizer {opt!r}. "
                f"On a mesh: {kind}(gs.MeshOptimizer(optimizer)), or use one of mtf.optimize."
            )
        self.opt: Any = opt
        self.axes = resolve_axes(axes, mesh_shape, layout, batch_dims)
        self._shard_names = self.axes.batch_dims if self.axes else as_dim_names(batch_dims)
        self.reducer = FusedAllReduce() if reducer is None else check_strategy(reducer)
        if not isinstance(name, str) or not _NAME.match(name):
            raise ValueError(
                "name must be one that TensorFlow takes for variables, letters, digits and any "
                f"of . _ / -, got {name!r}."
            )
        self.name = name
        self._slots = SlotBook()
        self.came: Seen | None = None
        self.handed_on: Seen | None = None
        self.shards: Seen | None = None
        self.summed: Summed | None = None
        self.times_applied = 0
        self._graph: weakref.ref[mtf.Graph] | None = None
        self._check_inner_stack()

    # What a wrapper does.

    def _to_inner(
        self, grads: list[mtf.Tensor | None], variables: list[mtf.Variable]
    ) -> list[mtf.Operation]:
        """Passes checked gradients, at least one not None, to the inner optimizer."""
        raise NotImplementedError

    def _check_inner_stack(self) -> None:
        """Raises ValueError for an order of wrappers that makes no sense."""
        kind = type(self).__name__
        if any(getattr(inner, "accumulate", None) == "local" for inner in self.inner_stack()):
            raise ValueError(
                f"{kind} around local accumulation would sum over the mesh on every micro step: "
                f"turn them round, GradientAccumulationOptimizer({kind}(opt), ...), or accumulate "
                "what is summed, by accumulate='synced'."
            )
        for inner in self.inner_stack():
            if getattr(inner, "tells_replicas_apart", False):
                other = type(inner).__name__
                raise ValueError(
                    f"{kind} around {other} would sum gradients before the replicas are told "
                    f"apart: turn them round, {other}({kind}(opt), ...), or give {other} "
                    "accept_summed=True."
                )

    def _check_hides_nothing(self) -> None:
        """Raises ValueError where this one leaves out what an inner loss scale has to see."""
        if any(getattr(inner, "moves_by_not_finite", False) for inner in self.inner_stack()):
            kind = type(self).__name__
            raise ValueError(
                f"{kind} leaves out gradients that are not finite, so that LossScaleOptimizer "
                "inside it never learns that its scale is too large: turn them round, "
                f"LossScaleOptimizer({kind}(opt, ...)), or leave nothing out here."
            )

    def _check_variables(self, variables: Sequence[mtf.Variable]) -> None:
        """Raises ValueError for variables that cannot be updated; creates nothing."""

    def _check_shapes(
        self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> None:
        """Raises ValueError for gradients that do not fit; creates nothing."""
        for grad, variable in zip(grads, variables):
            if grad is None:
                continue
            shard_dims = [] if self._has_own_copy(variable) else self._shard_dims(grad.shape)
            if [d for d in grad.shape.dims if d not in shard_dims] != variable.shape.dims:
                raise ValueError(
                    f"The gradient of {variable.name!r} has shape {grad.shape.to_string}, but "
                    f"the variable has {variable.shape.to_string}: a gradient has the "
                    f"variable's shape, or the shard dims {list(self._shard_names)} in front."
                )

    def _shard_dims(self, shape: mtf.Shape) -> list[mtf.Dimension]:
        """The shard dims that a shape has, in the order that numbers the shards."""
        by_name = {d.name: d for d in shape.dims}
        return [by_name[name] for name in self._shard_names if name in by_name]

    def _has_own_copy(self, variable: mtf.Variable) -> bool:
        """Whether every shard has its own copy of a variable.

        Raises:
          ValueError: the variable has some of the shard dims, but not all.
        """
        dims = self._shard_dims(variable.shape)
        needed = [d.name for d in self.axes.shard_dims] if self.axes else []
        missing = [name for name in needed if name not in [d.name for d in dims]]
        if dims and missing:
            raise ValueError(
                f"Variable {variable.name!r} of shape {variable.shape.to_string} has the shard "
                f"dims {[d.name for d in dims]} but not {missing}: a variable has either all of "
                "them (every shard its own copy) or none."
            )
        return bool(dims)

    def _scale_loss(self, loss: mtf.Tensor) -> mtf.Tensor:
        """The loss to differentiate."""
        return loss

    def _entered(
        self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Tensor | None]:
        """What this wrapper does to gradients before they enter the stack that it is part of."""
        del variables
        return list(grads)

    def _enter(
        self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Tensor | None]:
        """Gradients as the stack takes them."""
        for wrapper in self._wrappers():
            grads = wrapper._entered(grads, variables)
        take_without_scale(grads, [v.name for v in variables])
        return list(grads)

    def _summed(
        self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Tensor | None]:
        """Whole gradients of the variables' shapes: shard dims that a variable has not go."""
        owners = [v for g, v in zip(grads, variables) if g is not None]

        def add_up(present: list[mtf.Tensor]) -> Sequence[mtf.Tensor]:
            dims = [
                [d for d in grad.shape.dims if d not in variable.shape.dims]
                for grad, variable in zip(present, owners)
            ]
            sums = SumGradients(present, dims, self.reducer, self._shard_names).outputs
            self._note_sums(present, sums)
            return sums

        return on_present(grads, add_up)

    def _note_sums(self, parts: Sequence[mtf.Tensor], sums: Sequence[mtf.Tensor]) -> None:
        """Remembers the first sums of gradients that come by."""
        if self.summed is None:
            before, after = seen_now(parts), seen_now(sums)
            assert before is not None  # there is at least one
            assert after is not None
            self.summed = Summed(before, after)

    def _apply_totals(
        self,
        sums: Sequence[mtf.Tensor | None],
        dtypes: Sequence[tf.DType | None],
        variables: Sequence[mtf.Variable],
        divisor: mtf.Tensor | None,
    ) -> list[mtf.Operation]:
        """Sums accumulated gradients over the mesh and applies them.

        Args:
          sums: what the accumulators hold.
          dtypes: dtypes of the gradients that were added.
          variables: their variables.
          divisor: a scalar to divide by, or None.

        Returns:
          What the inner optimizer returned.
        """

        def finish(index: int, total: mtf.Tensor) -> mtf.Tensor:
            if divisor is not None:
                wide = total if total.dtype.size >= 4 else mtf.cast(total, tf.float32)
                total = mtf.divide(wide, mtf.cast(divisor, wide.dtype))
            dtype = self._inner_dtype(dtypes[index])
            return total if total.dtype == dtype else mtf.cast(total, dtype)

        def finish_all(totals: Sequence[mtf.Tensor | None]) -> list[mtf.Tensor | None]:
            return [None if x is None else finish(i, x) for i, x in enumerate(totals)]

        apply_unsummed = self._inner_apply_unsummed
        if apply_unsummed is not None:
            return self._apply_inner(sums, variables, lambda g, v: apply_unsummed(g, v, finish_all))
        return self._apply_inner(finish_all(self._summed(sums, variables)), variables)

    @property
    def _inner_apply_unsummed(self) -> Callable[..., list[mtf.Operation]] | None:
        """How the inner optimizer takes gradients that are not summed, if it sums by itself."""
        return getattr(self.opt, "apply_unsummed", None)

    def _inner_dtype(self, dtype: tf.DType) -> tf.DType:
        """What the inner optimizer gets for gradients of a dtype: float32 for narrow ones."""
        # Mesh-TF 0.1.21's Momentum adds gradients to a velocity of the variable's dtype; the
        # others cast to float32 themselves.
        if dtype.size >= 4 or isinstance(self.innermost(), mtf.optimize.MomentumOptimizer):
            return dtype
        return tf.float32

    def _in_dtypes_of_inner(
        self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Tensor | None]:
        """Gradients as Mesh-TF's Momentum takes them: in the dtype of the variable's value."""
        if not isinstance(self.opt, mtf.optimize.MomentumOptimizer):
            return list(grads)
        other = [g is not None and g.dtype != v.activation_dtype for g, v in zip(grads, variables)]
        if any(other):
            narrow = variables[other.index(True)].activation_dtype.name
            warn_once(
                "narrow momentum",
                "mtf.optimize.MomentumOptimizer takes gradients in the dtype of activations, %s, "
                "and adds them up in it: small ones are lost. "
                "MeshOptimizer(tf.train.MomentumOptimizer(...)) adds up in float32.",
                narrow,
            )
        return [
            mtf.cast(g, v.activation_dtype) if casts else g
            for g, v, casts in zip(grads, variables, other)
        ]

    def _apply_inner(
        self,
        grads: Sequence[mtf.Tensor | None],
        variables: Sequence[mtf.Variable],
        apply: Callable[..., list[mtf.Operation]] | None = None,
    ) -> list[mtf.Operation]:
        """Applies the inner optimizer behind a gate, and remembers the slots that it makes.

        Args:
          grads: what it gets.
          variables: their variables.
          apply: what to call in place of its `apply_grads`.

        Returns:
          What it returned.
        """
        if not isinstance(self.opt, Wrapper):
            grads = self._in_dtypes_of_inner(grads, variables)
        self.handed_on = seen_now(grads)
        graph = variables[0].graph
        before = set(graph.all_variables)

        def make() -> list[mtf.Operation]:
            do = apply or getattr(self.opt, "_apply_entered", self.opt.apply_grads)
            update = do(list(grads), list(variables))
            if update is None:
                raise TypeError(
                    f"apply_grads of {self.opt!r} must return a list of mtf operations, got None."
                )
            return list(update)

        operations = make() if isinstance(self.opt, Wrapper) else gated_update(make, grads)
        told = getattr(self.opt, "variables", None)
        told = set(told()) if callable(told) else set()
        created = [v for v in graph.all_variables if v not in before and v not in told]
        self._slots.record(created, variables, tf.get_variable_scope().name)
        return operations

    # The interface of mtf.optimize.Optimizer.

    def apply_grads(
        self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Operation]:
        """Applies gradients to variables.

        Args:
          grads: a gradient or None for each variable.
          variables: mesh variables, for example `graph.trainable_variables`.

        Returns:
          A flat list of mtf operations, to be looked up by `lowering.lowered_operation`; empty if
          every gradient is None.

        Raises:
          TypeError: an argument has the wrong type.
          ValueError: a gradient does not fit its variable, or lengths differ.
        """
        grads, variables = checks.check_grads_and_variables(grads, variables)
        self._check_shapes(grads, variables)
        if all(g is None for g in grads):
            return []
        with contextlib.ExitStack() as undone:
            undone.enter_context(Plan.of(variables[0].graph).undone_on_error())
            for wrapper in self._wrappers():
                undone.enter_context(wrapper._slots.undone_on_error())
            return self._apply_entered(self._enter(grads, variables), variables)

    def _apply_entered(
        self, grads: Sequence[mtf.Tensor | None], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Operation]:
        """`apply_grads` inside of another wrapper, whose `apply_grads` undoes what went wrong."""
        grads, variables = checks.check_grads_and_variables(grads, variables)
        self._check_shapes(grads, variables)
        graph = variables[0].graph
        again = self._graph is not None and self._graph() is graph
        self._graph = weakref.ref(graph)
        self.times_applied = self.times_applied + 1 if again else 1
        self.came = seen_now(grads)
        self.handed_on = self.shards = self.summed = None
        return self._to_inner(grads, variables)

    def apply_grad(self, grad: mtf.Tensor | None, var: mtf.Variable) -> list[mtf.Operation]:
        """`apply_grads` for one pair; a list gives one reduction for all and is faster."""
        return self.apply_grads([grad], [var])

    def _step_updated(self) -> mtf.Tensor | None:
        """What global_step grows by, an int32 scalar that is 0 or 1; None for 1."""
        return self.opt._step_updated() if isinstance(self.opt, Wrapper) else None

    # What it tells, and the stack.

    def reported(self) -> dict[str, mtf.Tensor]:
        """What this wrapper adds to `mtf_gradsync.reported`, by name."""
        return {}

    def inner_stack(self) -> list[Any]:
        """The optimizers inside this one, from the outside in."""
        stack: list[Any] = []
        opt: Any = self.opt
        while opt is not None:
            stack.append(opt)
            # Wrappers of others are looked through where they name what they wrap.
            names = ("opt", "optimizer", "_opt", "_optimizer")
            inside = (getattr(opt, name, None) for name in names)
            opt = next((o for o in inside if callable(getattr(o, "apply_grads", None))), None)
        return stack

    def _wrappers(self) -> list[Wrapper]:
        """The wrappers of the stack, from the outside in."""
        return [opt for opt in (self, *self.inner_stack()) if isinstance(opt, Wrapper)]

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
