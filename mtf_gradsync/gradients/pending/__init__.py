"""Sums over the mesh that stay pending from the batch to the gradients, and are made together."""

from mtf_gradsync.gradients.pending.flow import Flow, Layout
from mtf_gradsync.gradients.pending.part import PendingSums
from mtf_gradsync.gradients.pending.sums import PendingSum

__all__ = ["Flow", "Layout", "PendingSum", "PendingSums"]
