"""Runs TPU programs on CPU replicas: each core's part as TensorFlow operations."""
