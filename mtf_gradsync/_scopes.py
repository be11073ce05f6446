"""Variable scopes: where variables get their names."""

from __future__ import annotations

import contextlib
from typing import Iterator

from mtf_gradsync._private.libraries import tf


@contextlib.contextmanager
def root_scope() -> Iterator[None]:
    """Makes variable names full names inside it: the current variable scope adds no prefix."""
    root = tf.VariableScope(reuse=tf.get_variable_scope().reuse, name="")
    with tf.variable_scope(root, auxiliary_name_scope=False):
        yield
