"""Private names of TensorFlow and jax that runtimes use; see `mtf_gradsync._private`."""
