"""Gradient synchronization for Mesh-TensorFlow."""

from mtf_gradsync import _tf_compat as _tf_compat
