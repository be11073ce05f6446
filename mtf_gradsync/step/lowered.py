"""The state of one lowering of a plan's graph."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import sum_made_by
from mtf_gradsync.step.part import PartLowering


class Lowered:
    """The state of one lowering."""

    def __init__(self, scope: str):
        self.scope = scope  # the name scope that operations are lowered in
        self.branch: Any = None  # the one that is being lowered
        self.parts: list[PartLowering] = []
        self.early: set[mtf.Operation] = set()  # those lowered before their turn
        self.reads: dict[mtf.Mesh, list[mtf.Tensor]] = {}  # variables' values that are read once
        self.barriers: dict[Any, tf.Operation] = {}  # gate -> what waits for its tensors

    @contextlib.contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Opens the name scope that Mesh-TF would open for an operation of a name."""
        with tf.name_scope(self.scope + "/" if self.scope else None):
            with tf.name_scope(name):
                yield


@contextlib.contextmanager
def pending_sums_outside(lowering: mtf.Lowering) -> Iterator[None]:
    """Forgets sums that Mesh-TF reduces inside the block, which have no value outside a branch."""
    before = {
        tensor: lazy
        for tensor, lazy in lowering.tensors.items()
        if type(lazy) is mtf.LazyAllreduceSum and sum_made_by(lazy) is None
    }
    for tensor, lazy in before.items():
        lowering.tensors[tensor] = mtf.LazyAllreduceSum(
            lazy.mesh_impl, lazy.laid_out_input, lazy.mesh_axes, lazy.add_counter_fn
        )
    try:
        yield
    finally:
        lowering.tensors.update(before)


def scope_around(operation: mtf.Operation) -> str:
    """Returns the name scope around the one that Mesh-TF opened for an operation."""
    inner = tf.get_default_graph().get_name_scope().split("/")
    # A name with slashes opens nested scopes, of which the last may have a number added.
    return "/".join(inner[: -(operation.name.count("/") + 1)])
