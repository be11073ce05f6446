"""Logs how much memory sharded updates save."""

from __future__ import annotations

import logging
import math
from typing import Sequence

from mtf_gradsync._names import counted
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.mesh.axes import ReplicaAxes

_logger = logging.getLogger("mtf_gradsync")


def log_savings(
    name: str,
    axes: ReplicaAxes,
    slots: Sequence[mtf.Variable],
    split: Sequence[mtf.Variable],
    variables: Sequence[mtf.Variable],
) -> None:
    """Logs how many bytes of slots a core holds, and whether that saves much memory.

    `split` are those of the variables of which each replica updates its part.
    """
    if not slots and not split:
        return
    held = sum(_core_bytes(axes, v) for v in slots)
    unsharded = sum(_core_bytes(axes, v) * _num_parts(axes, v.shape) for v in slots)
    gathered = sum(_core_bytes(axes, v) for v in split)
    unsplit = [v.name for v in variables if v not in split]
    _logger.info(
        "%s splits the updates of %d of %d variables: a core holds %d bytes of slots, and %d "
        "without the wrapper%s.",
        name,
        len(split),
        len(variables),
        held,
        unsharded,
        f"; it does not split {counted(unsplit, 'variable')}" if unsplit else "",
    )
    # Gathered values take memory beside the slots. Adam's slots save more than that, Adafactor's
    # next to nothing. And half of an update saves less than it takes to gather new values.
    doubts = []
    if unsharded - held < gathered / 4:
        doubts.append(
            f"It saves {unsharded - held} bytes of slots a core, and gathers {gathered} bytes of "
            "new values: with this optimizer it can save time but hardly memory, and a program for "
            "a TPU can take more memory, and on some generations more time, than without it."
        )
    if split and axes.num_shards == 2:
        doubts.append(
            "It splits updates over two replicas: that saves memory, but a step on a TPU can take "
            "more time than without it."
        )
    if doubts:
        _logger.info(
            "%s may not pay. %s `mtf-gradsync compile --compare_with_bare` shows the time and the "
            "memory that the compiler for TPUs expects of both.",
            name,
            " ".join(doubts),
        )


def _num_parts(axes: ReplicaAxes, shape: mtf.Shape) -> int:
    names = [d.name for d in shape.dims]
    return math.prod(d.size for d in axes.shard_dims if d.name in names)


def _core_bytes(axes: ReplicaAxes, variable: mtf.Variable) -> int:
    return math.prod(axes.slice_shape(variable.shape)) * variable.slice_dtype.size
