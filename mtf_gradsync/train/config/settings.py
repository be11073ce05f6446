"""Resolves the batch size, lengths and learning rate of a run for its model."""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Dict, Tuple, Union

from mtf_gradsync._numbers import is_number, is_whole_number
from mtf_gradsync.train.config.mesh import MeshSettings
from mtf_gradsync.train.errors import ConfigError
from mtf_gradsync.train.transformer import learning_rate_schedules, transformer_utils

SequenceLength = Union[int, Dict[str, int]]
BatchSize = Union[int, Tuple[str, int]]
LearningRate = Union[None, float, Callable[..., Any]]


def resolve_sequence_length(sequence_length: SequenceLength) -> dict[str, int]:
    """Returns the length of every feature, by its name."""
    if is_whole_number(sequence_length):
        return {"inputs": sequence_length, "targets": sequence_length}
    if (
        isinstance(sequence_length, dict)
        and "targets" in sequence_length
        and all(map(is_whole_number, sequence_length.values()))
    ):
        return dict(sequence_length)
    raise ConfigError(
        "train.run.sequence_length must be a positive integer or a dict such as "
        f'{{"inputs": 64, "targets": 64}}; got {sequence_length!r}'
    )


def resolve_batch_size(
    batch_size: BatchSize,
    sequence_length: dict[str, int],
    mesh: MeshSettings,
    outer_batch_size: int,
) -> int:
    """Returns the number of sequences in a global batch, which the mesh can split evenly.

    A pair is that of ``mesh_tensorflow.transformer.utils.compute_batch_size``; an outer_batch_size
    of 0 is none.
    """
    given = batch_size
    if is_whole_number(given):
        size = given
    else:
        try:
            size = transformer_utils().compute_batch_size(
                sequence_length, mesh.shape, mesh.layout, batch_size
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(
                "train.run.batch_size must be a positive integer or a pair such as "
                f'("tokens_per_replica", 2048); got {given!r} ({error})'
            ) from error
    parts = mesh.split("batch")
    inner = size // max(1, outer_batch_size)
    if inner * max(1, outer_batch_size) != size or inner < 1 or inner % parts:
        outer = f" in {outer_batch_size} outer batches" if outer_batch_size else ""
        raise ConfigError(
            f"train.run.batch_size = {given!r} gives batches of {size} sequences{outer}, "
            f"which the mesh cannot split evenly: train.run.layout_rules and "
            f'train.run.mesh_shape split "batch" into {parts} parts. Use a multiple of '
            f"{parts * max(1, outer_batch_size)}."
        )
    return size


def resolve_learning_rate(
    learning_rate_schedule: LearningRate | list[Any], total_steps: int
) -> LearningRate:
    """Returns None, a number, or a function of the keyword argument ``step``.

    Schedules of `RunConfig` see total_steps as the length of the run.
    """
    factors = learning_rate_schedule
    for one in factors if isinstance(factors, (list, tuple)) else [factors]:
        if is_number(one) and not 0 <= one < math.inf:
            raise ConfigError(
                "Numbers in train.run.learning_rate_schedule must be finite and not negative; got "
                f"{learning_rate_schedule!r}"
            )
    if isinstance(factors, (list, tuple)) and all(callable(f) or is_number(f) for f in factors):
        return functools.partial(
            learning_rate_schedules().product_learning_rate,
            total_train_steps=total_steps,
            factors=list(factors),
        )
    if callable(factors):
        return functools.partial(factors, total_train_steps=total_steps)
    if factors is None or is_number(factors):
        return factors
    raise ConfigError(
        "train.run.learning_rate_schedule must be a number, a function such as "
        "@learning_rate_schedules.learning_rate_schedule_noam, a list of both to multiply, or "
        f"None; got {learning_rate_schedule!r}"
    )
