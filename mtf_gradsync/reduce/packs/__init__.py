"""Packs of tensors that are reduced together: plans, packing and unpacking."""
