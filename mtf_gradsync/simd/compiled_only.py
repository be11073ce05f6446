"""Meshes for programs that are compiled or listed and never run, which are faster to build.

Mesh-TF makes a variable for every core, with what fills it and reads it back: 85% of the time that
building the small transformer of the benchmarks on 256 cores takes. A core's program does not
depend on how many other cores have a variable of the same name.
"""

from __future__ import annotations

import contextlib
import contextvars
from typing import Any, Iterator

from mesh_tensorflow import tpu_variables

from mtf_gradsync._private.libraries import mtf, tf

_wanted: contextvars.ContextVar[bool] = contextvars.ContextVar("compiled_only", default=False)


@contextlib.contextmanager
def compiled_only() -> Iterator[None]:
    """Makes the programs that are opened inside smaller to build. They cannot run."""
    token = _wanted.set(True)
    try:
        yield
    finally:
        _wanted.reset(token)


def mesh_class() -> type:
    """Returns the class of SIMD mesh that is wanted here."""
    return CompiledOnlyMeshImpl if _wanted.get() else mtf.simd_mesh_impl.SimdMeshImpl


class CompiledOnlyMeshImpl(mtf.simd_mesh_impl.SimdMeshImpl):
    """A SIMD mesh on which all cores share the variables of the first one."""

    class LaidOutVariable(mtf.simd_mesh_impl.SimdMeshImpl.LaidOutVariable):
        """A variable of the first core, in the place of one on each. Nothing is copied."""

        def __init__(self, variable: Any, mesh_impl: Any):
            """Makes the variable; the arguments are those of Mesh-TF's class."""
            self._variable, self._mesh_impl = variable, mesh_impl
            shape = mesh_impl.slice_shape(variable.outputs[0].shape)
            with tf.init_scope():
                zeros = tf.zeros(shape, variable.slice_dtype)
            one = tf.Variable(
                initial_value=zeros,
                trainable=variable.trainable,
                collections=[],
                dtype=variable.slice_dtype,
                name=f"{variable.name}_slice_0",
                expected_shape=shape,
            )
            everywhere = tpu_variables.ReplicatedVariable(variable.name, [one] * mesh_impl.size)
            self._laid_out_tensor = mesh_impl.LaidOutTensor([everywhere])
            with tf.init_scope():
                self._copy_master_to_slices = self._copy_slices_to_master = tf.no_op()
