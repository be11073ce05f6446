"""Arguments of an optimizer's `apply_grads` after gradients and variables."""

from __future__ import annotations

import inspect
from typing import Any, Iterator, NamedTuple

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._walk import walk


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
