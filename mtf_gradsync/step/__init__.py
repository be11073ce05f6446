"""The plan of a training step: the order of reads and writes, and work that some steps skip."""
