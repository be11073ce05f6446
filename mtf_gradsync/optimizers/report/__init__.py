"""Reports of a stack of wrappers about a training step: norms, counts, steps."""
