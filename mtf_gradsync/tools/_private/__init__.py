"""Private names of gin, TensorFlow and jax that tools use; see `mtf_gradsync._private`."""
