"""Parts of Mesh-TensorFlow without a public name that runtimes and tools use, one function each.

All were checked with Mesh-TF 0.1.21; ``tests/private/test_mesh_tensorflow.py`` has a test of each,
which fails if a version changes its meaning.
"""

from __future__ import annotations

from typing import Any

from mtf_gradsync.extension import mtf, tf

#: A graph's collection of the slices of a SIMD mesh's variables, which are no global variables.
SLICES_COLLECTION = "TPU_VAR"


def restored_lowering(hook: mtf.MtfRestoreHook) -> mtf.Lowering:
    """Returns the lowering whose masters an `MtfRestoreHook` copies to their slices."""
    return hook._lowering


def variables_of_cores(replicated: Any) -> list[tf.Variable]:
    """Returns the tf variable of each core, in physical order, of a SIMD mesh's laid-out variable.

    `replicated` is the one slice that the laid-out variable shows.
    """
    return replicated._vars
