"""What the graph of a TPU program says: its structure, effects, loops and collective operations."""
