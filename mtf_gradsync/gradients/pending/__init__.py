"""Keeps sums over the mesh pending from the batch to the gradients, and reduces them together."""

from mtf_gradsync.gradients.pending.batch import check_batch_dims, find_axes
from mtf_gradsync.gradients.pending.flow import Cause, Flow, Mixing
from mtf_gradsync.gradients.pending.layout import Layout
from mtf_gradsync.gradients.pending.part import PendingSums
from mtf_gradsync.gradients.pending.sums import PendingSum
from mtf_gradsync.gradients.pending.unsummed import gradient_name

__all__ = [
    "Cause",
    "Flow",
    "Layout",
    "Mixing",
    "PendingSum",
    "PendingSums",
    "check_batch_dims",
    "find_axes",
    "gradient_name",
]
