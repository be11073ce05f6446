"""TensorFlow's error about ref variables in a TPU program, with a remedy."""

from __future__ import annotations

import contextlib
from typing import Iterator

from mtf_gradsync._common import counted
from mtf_gradsync._private.libraries import tf

#: What a program has to do to get resource variables instead of ref variables, for errors.
CURE = (
    "Call tf.compat.v1.enable_resource_variables() at the start of the program, after "
    "tf.compat.v1.disable_v2_behavior(), which takes it back."
)


class RefVariablesError(NotImplementedError):
    """TensorFlow's error that a TPU program cannot have ref variables, with a remedy."""


@contextlib.contextmanager
def ref_variables_explained() -> Iterator[None]:
    """Returns a context that adds a remedy to TensorFlow's errors about ref variables.

    TensorFlow raises them when a TPU program is built.
    """
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
