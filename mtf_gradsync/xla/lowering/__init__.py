"""From a program in a TensorFlow graph to StableHLO that any PJRT device compiles."""
