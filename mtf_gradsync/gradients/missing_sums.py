"""Warns of operations that leave out a sum over the shards, so that gradients are wrong."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Mapping

from mtf_gradsync._common import warn_once
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.gradients.flow import Cause
from mtf_gradsync.gradients.operations import gradient_name

# The methods that communicate; all others of `mtf.MeshImpl` are made of these.
_COLLECTIVES = ("allreduce", "allconcat", "alltoall", "receive", "shift_by_n_processors")


class MissingSumWarnings:
    """Warnings of operations that leave out a sum over the shards that gradients need."""

    def __init__(self, found: Mapping[mtf.Operation, tuple[Cause, mtf.Tensor]]):
        """Sets the operations to watch, as `Flow.dropped_sums` returned them."""
        self._found = found

    @contextlib.contextmanager
    def watching(self, operation: mtf.Operation, lowering: mtf.Lowering) -> Iterator[None]:
        """Returns a context in which `operation` is lowered; warns if it left a sum out.

        An operation that communicates by itself, or leaves its output pending, is not warned of.
        """
        if operation not in self._found:
            yield
            return
        cause, target = self._found[operation]
        with _noting_collectives(lowering.mesh_impl(operation)) as sent:
            yield
        is_left = any(
            isinstance(lowering.tensors.get(t), mtf.LazyAllreduceSum) for t in operation.outputs
        )
        if cause is Cause.DROPS_SUM or not (sent or is_left):
            warn_once(
                f"unsummed {operation.name}",
                "%s %r drops a dimension that the shards split, and nothing sums over it: each "
                "shard has other values of %s, and the replicas of its variable differ after an "
                "update. Give the result that dimension, of the size of its mesh axis, and sum "
                "over it with mtf.reduce_sum.",
                type(operation).__name__,
                operation.name,
                gradient_name(target),
            )


@contextlib.contextmanager
def _noting_collectives(mesh_impl: Any) -> Iterator[list[str]]:
    """Returns a context; the list that it gives gets the name of each collective made inside."""
    sent: list[str] = []

    def noting(name: str) -> Any:
        made = getattr(mesh_impl, name)

        def make(*args: Any, **kwargs: Any) -> Any:
            sent.append(name)
            return made(*args, **kwargs)

        return make

    names = [name for name in _COLLECTIVES if hasattr(mesh_impl, name)]
    for name in names:
        vars(mesh_impl)[name] = noting(name)
    try:
        yield sent
    finally:
        for name in names:
            del vars(mesh_impl)[name]
