"""The forms in which gradients pass through a stack of wrappers."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Callable, Mapping, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.remade import MadeOfSums
from mtf_gradsync.gradients.stages import on_present
from mtf_gradsync.step import Branch, Plan


class Form(enum.Enum):
    """The form of a set of gradients on its way from the loss to the variables."""

    #: Not reduced: of the variable's shape with its all-reduce still to run, or with shard dims.
    PENDING = "pending"
    #: One gradient for each shard: ``[shard dims...] + variable dims``.
    PER_SHARD = "per shard"
    #: Reduced over the mesh: of the variable's shape, the same on all replicas.
    REDUCED = "reduced"
    #: Each replica has its part of the reduced gradient.
    PART = "part"

    @property
    def is_reduced(self) -> bool:
        """Whether the sum over the replicas has run."""
        return self in (Form.REDUCED, Form.PART)


@dataclasses.dataclass(frozen=True)
class GradientSet:
    """The gradients of one call of `apply_grads`, at one stage of the pipeline.

    Attributes:
      grads: for each variable its gradient, or None; at least one is not None.
      variables: the mesh variables; `StepBuilder.reduce_now` with `extra` takes `Piece`s, too.
      form: the form of all gradients.
      divisor: a scalar to divide the reduced gradients by; None for one.
      dtypes: for each gradient the dtype to cast the reduced one to; None for its own.
      already_reduced: in form `PER_SHARD`, and in sums of such gradients: positions of those that
        are reduced, because shards are mixed in them.
      made_of_sums: in form `PER_SHARD`, for some at `already_reduced`, how to make them without the
        shards that a stage skips.
      branch: the branch of the step that can use them; None if every step can.
    """

    grads: tuple[mtf.Tensor | None, ...]
    variables: tuple[mtf.Variable, ...]
    form: Form = Form.PENDING
    divisor: mtf.Tensor | None = None
    dtypes: tuple[tf.DType | None, ...] | None = None
    already_reduced: frozenset[int] = frozenset()
    made_of_sums: Mapping[int, MadeOfSums] = dataclasses.field(default_factory=dict)
    branch: Branch | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "branch", Plan.of(self.graph).open_branch)

    @property
    def graph(self) -> mtf.Graph:
        """The mtf graph."""
        return self.variables[0].graph

    @property
    def mesh(self) -> mtf.Mesh:
        """The mesh of the first gradient, on which a step has its scalars."""
        return self.present[0].mesh

    @property
    def present(self) -> list[mtf.Tensor]:
        """The gradients that are not None."""
        return [g for g in self.grads if g is not None]

    @property
    def owners(self) -> list[mtf.Variable]:
        """The variables of `present`, in its order."""
        return [v for g, v in zip(self.grads, self.variables) if g is not None]

    def with_grads(
        self, grads: Sequence[mtf.Tensor | None], form: Form | None = None, **others: Any
    ) -> GradientSet:
        """Returns the set with other gradients and fields; its form is kept unless one is given."""
        form = form or self.form
        return dataclasses.replace(self, grads=tuple(grads), form=form, **others)

    def with_present(
        self, present: Sequence[mtf.Tensor], form: Form | None = None, **others: Any
    ) -> GradientSet:
        """Does what `with_grads` does, with one gradient for each of `present`."""
        return self.with_grads(on_present(self.grads, lambda _: present), form, **others)

    def change_reduced(self, change: Callable[[mtf.Tensor], mtf.Tensor]) -> GradientSet:
        """The same set with a function applied to the gradients at `already_reduced`."""
        grads = enumerate(self.grads)
        return self.with_grads(
            [change(g) if g is not None and i in self.already_reduced else g for i, g in grads]
        )
