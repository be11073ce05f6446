"""Gradient accumulation: several microbatch steps for each update."""
