"""TPU programs on CPU replicas: every core's part as TensorFlow operations."""
