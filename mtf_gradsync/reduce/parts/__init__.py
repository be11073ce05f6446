"""Reduce-scatter and all-gather: each processor gets its part of a sum, or a full tensor."""
