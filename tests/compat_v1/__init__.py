"""The tf.compat.v1 adapter."""
