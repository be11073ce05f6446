"""Where variables get their names."""

from __future__ import annotations

import contextlib
from typing import Iterator

from mtf_gradsync._private.libraries import tf


@contextlib.contextmanager
def root_scope() -> Iterator[None]:
    """Within it, names of variables are whole names: the current variable scope does not count."""
    root = tf.VariableScope(reuse=tf.get_variable_scope().reuse, name="")
    with tf.variable_scope(root, auxiliary_name_scope=False):
        yield
