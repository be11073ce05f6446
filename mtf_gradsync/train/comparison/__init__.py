"""Compares what a training step exchanges with bare Mesh-TensorFlow and with the wrappers."""
