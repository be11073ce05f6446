"""Parts of Mesh-TensorFlow without a public name that runtimes and tools use, one function each.

All were checked with Mesh-TF 0.1.21; ``tests/private/test_mesh_tensorflow.py`` has a test of each,
which fails if a version changes its meaning.
"""

from __future__ import annotations

from typing import Any

from mtf_gradsync.extension import mtf, tf

#: The graph collection with the slices of SIMD meshes' variables. They are no global variables.
SLICES_COLLECTION = "TPU_VAR"


def restored_lowering(hook: mtf.MtfRestoreHook) -> mtf.Lowering:
    """Returns the lowering whose variables an `MtfRestoreHook` copies from masters to slices.

    A master is the whole variable, as checkpoints hold it; a slice is a processor's part of it.
    """
    return hook._lowering


def variables_of_cores(replicated: Any) -> list[tf.Variable]:
    """Returns the tf variables that hold a SIMD mesh's variable, one per core in physical order.

    `replicated` is the object that Mesh-TF's laid-out variable gives as its only slice.
    """
    return replicated._vars
