"""Checkpoints of a run: written, checked, chosen, and compared with what a config describes."""
