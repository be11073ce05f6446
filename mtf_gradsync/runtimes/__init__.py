"""How a lowered step runs: on which devices, from which checkpoint, in which session."""
