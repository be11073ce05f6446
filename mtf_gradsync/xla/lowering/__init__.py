"""Turns a program in a TensorFlow graph into StableHLO that any PJRT device compiles."""
