"""An optimizer as GPT-Neo's: Adam that knows variables by their names, and clips beforehand."""

from __future__ import annotations

import re

from mtf_gradsync._private.libraries import mtf, tf
from tests import models, reference

RATE, DECAY, BETA1, BETA2, EPSILON = 0.01, 0.1, 0.9, 0.99, 1e-6
# What is not decayed: by a part of its name.
NOT_DECAYED = ("^b", "scale")


class AdamByName(mtf.optimize.Optimizer):
    """Keeps float32 slots `<variable>/adam_m` and `<variable>/adam_v`; decays weights by name."""

    def __init__(self, rate):
        self.rate = rate

    def apply_grad(self, grad, var):
        if grad is None:
            return []
        grad = mtf.to_float(grad)
        m, v = (
            models.variable(var.mesh, f"{var.name}/{slot}", var.shape, trainable=False)
            for slot in ("adam_m", "adam_v")
        )
        new_m = m * BETA1 + grad * (1 - BETA1)
        new_v = v * BETA2 + mtf.square(grad) * (1 - BETA2)
        change = new_m / (mtf.sqrt(new_v) + EPSILON)
        if is_decayed(var.name):
            change += mtf.to_float(var.value) * DECAY
        return [
            mtf.assign_sub(var, change * self.rate),
            mtf.assign(m, new_m),
            mtf.assign(v, new_v),
        ]


def is_decayed(name):
    return not any(re.search(part, name) for part in NOT_DECAYED)


def step(opt, loss, clip_norm, slice_dtype=tf.float32):
    """Update operations, as GPT-Neo makes them: casts, clips in the graph, and applies."""
    grads, variables = models.gradients(loss)
    grads = [mtf.cast(g, slice_dtype) for g in grads]
    norm = mtf.sqrt(mtf.add_n([mtf.reduce_sum(mtf.square(g)) for g in grads]))
    limit = mtf.constant(loss.mesh, clip_norm, dtype=slice_dtype)
    factor = limit / mtf.maximum(norm, limit)
    return opt.apply_grads([g * factor for g in grads], variables)


def in_numpy(clip_norm):
    """The same as an update for `tests.reference`."""
    adam = reference.Adam(RATE, DECAY, (BETA1, BETA2), EPSILON, NOT_DECAYED)
    return reference.Clipped(adam, clip_norm)
