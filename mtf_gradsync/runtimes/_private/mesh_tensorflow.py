"""Parts of Mesh-TensorFlow without a public name that runtimes and tools use, one function each.

All functions of this module were checked with Mesh-TF 0.1.21.
``tests/private/test_mesh_tensorflow.py`` has a test of each function, which fails if a version of
Mesh-TF changes the meaning of a part that the function uses.
"""

from __future__ import annotations

from typing import Any

from mtf_gradsync.extension import mtf, tf

#: The graph collection with the slices of SIMD meshes' variables. They are no global variables.
SLICES_COLLECTION = "TPU_VAR"


def restored_lowering(hook: mtf.MtfRestoreHook) -> mtf.Lowering:
    """Returns the lowering whose variables `hook` copies from masters to slices.

    A master is a whole variable, as checkpoints hold it; a slice is the part of a variable that a
    processor holds.
    """
    return hook._lowering


def variables_of_cores(replicated: Any) -> list[tf.Variable]:
    """Returns the tf variables that hold a SIMD mesh's variable, one per core in physical order.

    `replicated` is an object of Mesh-TF: the only slice that Mesh-TF's laid-out variable has on a
    SIMD mesh.
    """
    return replicated._vars
