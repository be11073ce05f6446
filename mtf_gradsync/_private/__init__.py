"""Private names of TensorFlow, Mesh-TensorFlow and jax: the only place that touches them."""
