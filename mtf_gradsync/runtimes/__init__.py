"""Runs a lowered step: on which devices, from which checkpoint, in which session."""
