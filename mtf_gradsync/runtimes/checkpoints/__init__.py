"""Writes the checkpoints of a run, checks them, chooses one and compares it with a config."""
