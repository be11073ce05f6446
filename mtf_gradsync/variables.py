"""Names of variables, and remedies for errors of TensorFlow's ref variables."""

from __future__ import annotations

import contextlib
from typing import Iterator

from mtf_gradsync._common import counted
from mtf_gradsync._private.libraries import tf

#: What a program does to have resource variables in their place.
CURE = (
    "Call tf.compat.v1.enable_resource_variables() at the start of the program, after "
    "tf.compat.v1.disable_v2_behavior(), which takes it back."
)


class RefVariablesError(NotImplementedError):
    """TensorFlow's error about ref variables, with a remedy."""


@contextlib.contextmanager
def ref_variables_explained() -> Iterator[None]:
    """Adds a remedy to TensorFlow's errors of ref variables in a TPU program, inside the block."""
    try:
        yield
    except RefVariablesError:
        raise
    except NotImplementedError as error:
        variables = tf.global_variables()
        refs = [v.op.name for v in variables if v.dtype != v.dtype.base_dtype]
        if not refs:
            raise
        raise RefVariablesError(
            f"{error}. The graph has ref variables, {counted(refs, 'variable')}. {CURE}"
        ) from error
