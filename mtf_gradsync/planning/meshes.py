"""Lists the mesh shapes that a number of cores can have."""

from __future__ import annotations

from typing import Iterator, Sequence


def factorizations(cores: int, axes: Sequence[str]) -> list[str]:
    """All mesh shapes that arrange a number of cores along mesh axes.

    Args:
      cores: the number of cores.
      axes: names of the mesh axes.

    Returns:
      Mesh shapes as text, as in "batch:4;model:2", those with most cores on the first axis first.

    Raises:
      ValueError: when there is no axis, a name appears twice, or cores is not positive.
    """
    if not axes or len(set(axes)) < len(axes):
        raise ValueError(f"axes must be names of mesh axes, each once; got {list(axes)}")
    if cores < 1:
        raise ValueError(f"cores must be a positive number; got {cores}")
    return [
        ";".join(f"{axis}:{size}" for axis, size in zip(axes, sizes))
        for sizes in _sizes(cores, len(axes))
    ]


def _sizes(cores: int, axes: int) -> Iterator[tuple[int, ...]]:
    if axes == 1:
        yield (cores,)
        return
    for first in range(cores, 0, -1):
        if cores % first == 0:
            for rest in _sizes(cores // first, axes - 1):
                yield (first, *rest)
