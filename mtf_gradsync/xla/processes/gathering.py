"""Exchanges values of the host between processes."""

from __future__ import annotations

from typing import Sequence

import numpy as np

from mtf_gradsync._private.jax import enabled_x64


def all_gathered(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The values of all processes.

    All processes have to call it with values of the same shapes and dtypes.

    Args:
      values: this process's.

    Returns:
      For each value: array ``[processes, ...]``.
    """
    from jax.experimental import multihost_utils

    with enabled_x64():
        # As bytes, because what is gathered passes through a program, which rounds no byte.
        packed = np.concatenate(
            [np.ascontiguousarray(v).view(np.uint8).reshape(-1) for v in values]
        )
        gathered = np.asarray(multihost_utils.process_allgather(packed))
    found, begin = [], 0
    for value in values:
        part = np.ascontiguousarray(gathered[:, begin : begin + value.nbytes])
        found.append(part.view(value.dtype).reshape(-1, *value.shape))
        begin += value.nbytes
    return found
