"""The dtypes that the inner optimizer gets gradients in."""

from __future__ import annotations

from typing import Any

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._warn import warn_once
from mtf_gradsync.gradients.stage import on_mesh
from mtf_gradsync.optimizers.pipeline.forms import GradientSet


def finished(gradients: GradientSet, opt: Any) -> GradientSet:
    """Returns reduced gradients divided by their divisor, in their dtypes, for an optimizer."""
    dtypes, divisor = gradients.dtypes, gradients.divisor
    if dtypes is None and divisor is None:
        return gradients
    divisors = {}
    if divisor is not None:
        divisors = {
            m: on_mesh(divisor, m) for m in dict.fromkeys(g.mesh for g in gradients.present)
        }

    def finish(total: mtf.Tensor, dtype: tf.DType | None) -> mtf.Tensor:
        if divisors:
            wide = total if total.dtype.size >= 4 else mtf.cast(total, tf.float32)
            total = mtf.divide(wide, mtf.cast(divisors[total.mesh], wide.dtype))
        dtype = total.dtype if dtype is None else _inner_dtype(dtype, opt)
        return total if total.dtype == dtype else mtf.cast(total, dtype)

    results = [
        None if g is None else finish(g, dtypes[i] if dtypes else None)
        for i, g in enumerate(gradients.grads)
    ]
    return gradients.with_grads(results, divisor=None, dtypes=None)


def _inner_dtype(dtype: tf.DType, opt: Any) -> tf.DType:
    """Returns the dtype in which the inner optimizer gets gradients: at least float32."""
    # Mesh-TF 0.1.21's Momentum adds gradients to a velocity of the variable's dtype; the others
    # cast to float32 themselves.
    if dtype.size >= 4 or isinstance(opt, mtf.optimize.MomentumOptimizer):
        return dtype
    return tf.float32


def in_dtypes_of(opt: Any, gradients: GradientSet) -> GradientSet:
    """Casts gradients to the dtypes of the variables' values, for Mesh-TF's Momentum."""
    if not isinstance(opt, mtf.optimize.MomentumOptimizer):
        return gradients
    pairs = list(zip(gradients.grads, gradients.variables))
    other = [g is not None and g.dtype != v.activation_dtype for g, v in pairs]
    if not any(other):
        return gradients
    warn_once(
        "narrow momentum",
        "mtf.optimize.MomentumOptimizer adds up gradients in the dtype of activations, %s: small "
        "ones are lost. Use MeshOptimizer(tf.train.MomentumOptimizer(...)), which adds up in "
        "float32.",
        gradients.variables[other.index(True)].activation_dtype.name,
    )
    return gradients.with_grads(
        [mtf.cast(g, v.activation_dtype) if casts else g for (g, v), casts in zip(pairs, other)]
    )
