"""TensorFlow 1's ref variables: they race on a mesh, and a TPU program cannot write them."""

from __future__ import annotations

import contextlib
from typing import Iterator

from mtf_gradsync._names import counted
from mtf_gradsync._private.libraries import tf

#: What a program does to have resource variables in their place.
CURE = (
    "Call tf.compat.v1.enable_resource_variables() at the start of the program, after "
    "tf.compat.v1.disable_v2_behavior(), which takes it back."
)


@contextlib.contextmanager
def ref_variables_explained() -> Iterator[None]:
    """Within it, TensorFlow's error about ref variables in a TPU program says what to do."""
    try:
        yield
    except NotImplementedError as error:
        variables = tf.global_variables()
        refs = [v.op.name for v in variables if v.dtype != v.dtype.base_dtype]
        if not refs or CURE in str(error):
            raise
        raise NotImplementedError(
            f"{error}. The graph has ref variables, {counted(refs, 'variable')}. {CURE}"
        ) from error
