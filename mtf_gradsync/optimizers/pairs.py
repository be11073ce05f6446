"""Pairs of `apply_grad` that wait for their step, and arguments for the optimizer inside."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Generic, Iterator, NamedTuple, TypeVar

from mtf_gradsync._common import walk, warn_once
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.step import Later, StandIn, StepPlan


class OwnArguments(NamedTuple):
    """Arguments of `apply_grads` after gradients and variables, for the innermost optimizer."""

    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = {}  # noqa: RUF012  # never changed

    def check(self, opt: Any) -> None:
        """Raises TypeError if the signature of an optimizer's `apply_grads` does not take these."""
        try:
            # The signature of a decorator counts, not that of the function inside.
            signature = inspect.signature(opt.apply_grads, follow_wrapped=False)
        except (TypeError, ValueError):
            return
        try:
            signature.bind(None, None, *self.positional, **self.named)
        except TypeError as error:
            given = [*map(repr, self.positional), *(f"{k}={v!r}" for k, v in self.named.items())]
            raise TypeError(
                f"The optimizer {opt!r} cannot be called with "
                f"apply_grads({', '.join(['grads', 'variables', *given])}): {error}. It takes "
                f"apply_grads{signature}; wrappers pass on all arguments after grads and "
                "variables."
            ) from None

    def tensors(self) -> Iterator[tuple[str, mtf.Tensor]]:
        """Gives the mesh tensors in arguments, and in lists and dictionaries, with names."""
        for number, value in enumerate(self.positional):
            yield from _tensors_in(f"positional argument {number + 3}", value)
        for name, value in self.named.items():
            yield from _tensors_in(name, value)


def _tensors_in(name: str, value: Any) -> Iterator[tuple[str, mtf.Tensor]]:
    if isinstance(value, mtf.Variable):
        value = value.value
    if isinstance(value, mtf.Tensor):
        yield name, value
    elif isinstance(value, (list, tuple, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(name, inner)


def variables_behind(tensor: mtf.Tensor) -> set[mtf.Variable]:
    """Finds the variables that a tensor is computed from."""
    before = walk([tensor.operation], lambda operation: [x.operation for x in operation.inputs])
    return {operation for operation in before if isinstance(operation, mtf.Variable)}


_T = TypeVar("_T")


class OfStep(Generic[_T]):
    """An attribute that a step sets, with its value before there is a step.

    Reading it builds the step of the pairs gathered so far.
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


class AppliesPairs:
    """A mixin for wrappers: `apply_grad`, which calls their `apply_grads`."""

    apply_grads: Callable[..., list[mtf.Operation]]
    _checked: Callable[..., Any]
    _wrappers: Callable[[], list[Any]]
    # Whether this wrapper has built a step for the graph of a variable.
    _applied_before: Callable[[mtf.Variable], bool]
    # Pairs gathered for it, or for a wrapper around it, whose steps are still to be built.
    _to_build: tuple[_Pairs, ...] = ()

    def apply_grad(
        self,
        grad: mtf.Tensor | None,
        var: mtf.Variable,
        *args: Any,
        weights: Any = None,
        **kwargs: Any,
    ) -> list[mtf.Operation]:
        """Applies the gradient of one variable, in one step with all other pairs of the graph.

        The step of all pairs is built when the graph is lowered, or when an attribute of the step
        is read. Pairs given later make another step, with a warning, and so do pairs of a variable
        that has one already, in another variable scope, or with other arguments.

        Args:
          grad: a gradient, or None.
          var: its mesh variable.
          *args: as for `apply_grads`, the same for all pairs; errors are those of `apply_grads`.
          weights: as for `apply_grads`, the same for all pairs.
          **kwargs: as for `apply_grads`, the same for all pairs.

        Returns:
          A list of one mtf operation, which stands for the whole step in
          `lowering.lowered_operation`; empty if the gradient is None.
        """
        own = OwnArguments(args, kwargs)
        (grad,), (var,) = self._checked([grad], [var], own)
        if weights is not None:
            own = OwnArguments(args, {**kwargs, "weights": weights})
        waiting = self._waiting_pairs(var.graph)
        pairs = next((p for p in waiting if p.takes(var, own)), None)
        if pairs is None:
            if waiting or self._applied_before(var):
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
            pairs = _Pairs(self, var.graph, own)
        return pairs.add(grad, var)

    def _waiting_pairs(self, graph: mtf.Graph) -> list[_Pairs]:
        own = (p for p in self._to_build if p.is_waiting and p.wrapper is self)
        return [p for p in own if p.plan.graph is graph]

    def _build_pairs(self, graph: mtf.Graph) -> None:
        for pairs in self._waiting_pairs(graph):
            pairs.build_if_here()


class _Pairs(Later):
    """The pairs of one wrapper and graph, whose step is built later."""

    def __init__(self, wrapper: AppliesPairs, graph: mtf.Graph, own: OwnArguments):
        super().__init__(StepPlan.of(graph))
        self.wrapper = wrapper
        self._own, self._scope, self._where = own, tf.get_variable_scope(), self._here()
        self._pairs: dict[mtf.Variable, mtf.Tensor | None] = {}
        for one in wrapper._wrappers():
            one._to_build = (*(p for p in one._to_build if p.is_waiting), self)

    @property
    def is_waiting(self) -> bool:
        """Whether the step is to be built: neither built, nor being built."""
        return self in self.plan.later

    def takes(self, variable: mtf.Variable, own: OwnArguments) -> bool:
        """Whether a pair can be part of the same step."""
        return (
            variable not in self._pairs
            and self._where == self._here()
            and self._scope.name == tf.get_variable_scope().name
            and _identities(self._own) == _identities(own)
        )

    def add(self, grad: mtf.Tensor | None, variable: mtf.Variable) -> list[mtf.Operation]:
        """Adds a pair; returns the operation that stands for the step."""
        self._pairs[variable] = grad
        if grad is None:
            return []
        self.stand_ins.append(StandIn(self, variable.mesh, "apply_grad"))
        return [self.stand_ins[-1]]

    def build_if_here(self) -> None:
        """Builds the step if it belongs to the scope and branch that are being built."""
        if self.is_waiting and self._where == self._here():
            self.build()

    def _here(self) -> tuple[Any, ...]:
        return tf.get_default_graph(), *self.plan.surroundings

    def make(self) -> list[mtf.Operation]:
        """See `Later.make`."""
        args, kwargs = self._own
        with tf.variable_scope(self._scope, auxiliary_name_scope=False):
            grads, variables = list(self._pairs.values()), list(self._pairs)
            operations = self.wrapper.apply_grads(grads, variables, *args, **kwargs)
        # A wrapper may live longer than the graph.
        for one in self.wrapper._wrappers():
            one._to_build = tuple(p for p in one._to_build if p is not self)
        return operations


def _identities(own: OwnArguments) -> dict[Any, Any]:
    """Returns keys of arguments that can be compared without calling their ``__eq__``.

    They are equal for the same objects, equal strings, and equal numbers of one type.
    """
    values = [*enumerate(own.positional), *own.named.items()]
    plain = (bool, int, float, str)
    return {k: (type(x), x) if isinstance(x, plain) else id(x) for k, x in values}
