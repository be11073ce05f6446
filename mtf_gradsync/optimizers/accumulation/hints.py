"""Hints about optimizers whose schedules would count microbatch steps."""

from __future__ import annotations

import logging
from typing import Any

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._walk import walk
from mtf_gradsync.compat_v1 import MeshOptimizer

_logger = logging.getLogger("mtf_gradsync")


def hint_if_micro_steps_are_counted(opt: Any, name: str) -> None:
    """Logs a hint when settings of the innermost optimizer depend on the TF global step.

    The training loop advances the global step on every microbatch step. Learning-rate schedules,
    and Adafactor's default decay rate and learning rate, are functions of it.
    """
    global_steps = tf.get_collection(tf.GraphKeys.GLOBAL_STEP)
    if not global_steps:
        return
    handle = getattr(global_steps[0], "handle", global_steps[0])
    if isinstance(opt, MeshOptimizer):
        opt = opt.opt
    found = [
        key.lstrip("_")
        for key, value in sorted(getattr(opt, "__dict__", {}).items())
        if isinstance(value, tf.Tensor) and _depends_on(value, handle.op)
    ]
    if found:
        _logger.info(
            "%s: %s of %s follow the TF global step, which counts microbatch steps, not updates. "
            "Base them on the update step: see docs/accumulation.md, per_update and update_step.",
            name,
            " and ".join(found),
            type(opt).__name__,
        )


def _depends_on(tensor: tf.Tensor, source: tf.Operation) -> bool:
    def inputs(op: tf.Operation) -> list[tf.Operation]:
        # A step divided by an integer, as in `per_update`, counts updates.
        return [] if op.type == "FloorDiv" else [t.op for t in op.inputs]

    return source in walk([tensor.op], inputs)
