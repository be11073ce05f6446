"""Texts about stages: lines of `mtf_gradsync.describe`, and settings as text."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

from mtf_gradsync._common import is_number
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.mesh.axes import ReplicaAxes


class Line(NamedTuple):
    """A line of `describe`: a part of a stage's work, in words.

    Attributes:
      what: the work, for example "clip to a global norm of 1".
      when: the steps on which the work is done; "" for the steps on which the stage runs.
      after: whether the work is done after the update, and not where the stage is.
      first: whether the work is done on every step before all stages, and not where the stage is.
    """

    what: str
    when: str = ""
    after: bool = False
    first: bool = False


class About(NamedTuple):
    """The facts of the program that lines of a description name, such as numbers of shards.

    Attributes:
      axes: the replica axes of the stage; None if they are not known.
      variables: the variables that get gradients; () if they are not known.
      num_bytes: a function that takes a reduction strategy and returns two numbers: the bytes of a
        core's gradients that are to be reduced, and the number of groups of sums. The number of
        groups is None for a strategy that sends something else than sums of these gradients, such
        as sums in several levels, and for replicas' parts of gradients (the argument is then None).
        The function returns None if variables or axes are not known.
      mixed: the variables whose gradients are reduced before they are split by shard, because the
        program has mixed shards in them; () if they are not known.
    """

    axes: ReplicaAxes | None
    variables: tuple[mtf.Variable, ...]
    num_bytes: Callable[[Any], tuple[int, int | None] | None]
    mixed: tuple[mtf.Variable, ...] = ()


def shards_text(axes: ReplicaAxes | None) -> str:
    """Returns text that names the shards a reduction sums over, such as "batch, 4 shards".

    `axes` are the replica axes. If they are None (not known), the text is "the replica axes".
    """
    if axes is None:
        return "the replica axes"
    if not axes.shard_dims:
        return "the mesh, 1 shard"
    names = ", ".join(d.name for d in axes.shard_dims)
    return f"{names}, {axes.num_shards} shard{'s' * (axes.num_shards != 1)}"


def setting_text(value: Any) -> str:
    """Returns the value of a setting as text for a line of `describe`.

    For None, a boolean, a string or a number the text is the value itself, such as "0.1". For a
    tensor or variable the text has its name: "the value of learning_rate".
    """
    if value is None or isinstance(value, (bool, str)):
        return str(value)
    if is_number(value):
        return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
    return f"the value of {getattr(value, 'name', type(value).__name__)}"


def strategy_text(strategy: Any) -> str:
    """Returns a reduction strategy as text: "fused" for `FusedAllReduce`, for example.

    For a strategy of another library the text has the name of its class: "by MyStrategy".
    """
    name, inner = type(strategy).__name__, getattr(strategy, "reducer", None)
    narrow = getattr(strategy, "compressed_dtype", None)
    if narrow is not None:
        return f"{strategy_text(inner)}, sent in {narrow.name}"
    how = {
        "FusedAllReduce": "fused",
        "QuantizedAllReduce": f"quantized to {getattr(strategy, 'bits', '')} bits",
        "LowRankAllReduce": f"low rank, {getattr(strategy, 'rank', '')}",
    }
    return how.get(name, f"by {name}")


def frequency_text(count: Any) -> str:
    """Returns how often something is done, in words: "every step", "every 4th" and so on.

    `count` is the number of steps from one time to the next. If it is a string, it is returned as
    it is; if it is something else, such as a function, the words are "when due".
    """
    if not isinstance(count, int):
        return count if isinstance(count, str) else "when due"
    if count == 1:
        return "every step"
    ending = {1: "st", 2: "nd", 3: "rd"}.get(count % 10 if count % 100 not in (11, 12, 13) else 0)
    return f"every {count:,}{ending or 'th'}"


def bytes_text(count: int) -> str:
    """Returns a number of bytes as text, such as "12.3 MB"."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return (
                f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count // size:,} {unit}"
            )
    return f"{count} bytes"
