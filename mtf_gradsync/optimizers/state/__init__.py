"""State that wrappers keep from step to step, and checkpoints of it."""
