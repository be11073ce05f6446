"""Benchmarks against bare Mesh-TensorFlow: `python -m benchmarks`, or one table by its module."""

import os

# TensorFlow's C++ log drowns the tables. It is read when TensorFlow is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
