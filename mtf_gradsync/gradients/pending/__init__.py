"""Keeps sums over the mesh pending from the batch to the gradients, and reduces them together."""

from mtf_gradsync.gradients.pending.flow import Axes, Cause, Flow, Layout, Mixing
from mtf_gradsync.gradients.pending.layout import (
    check_batch_dims,
    find_axes,
    names_of_batch,
    own_slices,
)
from mtf_gradsync.gradients.pending.lowering import PendingSums
from mtf_gradsync.gradients.pending.sums import PendingSum, gradient_name

__all__ = [
    "Axes",
    "Cause",
    "Flow",
    "Layout",
    "Mixing",
    "PendingSum",
    "PendingSums",
    "check_batch_dims",
    "find_axes",
    "gradient_name",
    "names_of_batch",
    "own_slices",
]
