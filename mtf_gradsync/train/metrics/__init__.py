"""Writes the measurements of a run."""
