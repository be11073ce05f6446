"""The changes that islands contribute, their weights, and the outer step that applies them.

A change is a version's values (the merged values) minus the values that an island has reached from
this version. The outer step makes the next version. As in `OuterOptimizer`, it is SGD with
(Nesterov) momentum (DiLoCo, Douillard et al. 2023), whose gradient is the weighted mean of the
changes. `MergeSettings` offers two choices from Decoupled DiLoCo (Douillard et al. 2026, arXiv
2604.21428): to weight each change by its tokens times its tokens per step, and to average the
lengths of a variable's changes separately from their directions.

Some variables are averaged over islands and not trained: those whose names begin with `MEAN`. They
become the weighted mean of the islands' values, with no learning rate and no momentum.

A change is sent in float32, in bfloat16, or in integers of 8 or 4 bits. Each block of integers has
a scale: the reader of a change multiplies the block's integers by it. An island adds the rounding
errors of a change to its next change (error feedback), as `QuantizedAllReduce` does with gradients.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Literal, Mapping, NamedTuple, Sequence, get_args

import numpy as np

from mtf_gradsync.extension import is_number
from mtf_gradsync.tools.islands.folder import Folder
from mtf_gradsync.tools.islands.objects import SETTINGS, decision_object, numbers_in, read_decision
from mtf_gradsync.tools.islands.tensor_files import (
    Arrays,
    DamagedObjectError,
    Specs,
    Stored,
    TensorSpec,
)

Form = Literal["float32", "bfloat16", "int8", "int4"]
FORMS = get_args(Form)
Weight = Literal["tokens", "tokens_per_step"]
Merge = Literal["mean", "radial"]
# Prefix of the names of variables that are averaged and not trained. TensorFlow's names of
# variables have no ":".
MEAN = "mean:"
_SCALES = "/scales"
_PART = 1 << 17  # so many numbers, and the results computed from them, fit into a core's cache


class _Blocks(NamedTuple):
    """The settings of a rounding to integers.

    `largest` is the largest integer that a number is rounded to. `size` is how many numbers share a
    scale. `in_a_byte` is how many of the integers are stored in a byte.
    """

    largest: int
    size: int
    in_a_byte: int


_BLOCKS = {"int8": _Blocks(127, 256, 1), "int4": _Blocks(7, 64, 2)}


class MergeSettings(NamedTuple):
    """The settings of versions. The first merger writes them into the folder, where they stay.

    Attributes:
      outer_learning_rate: the learning rate of SGD on the outer values, above 0 and below 10.
      outer_momentum: the momentum of that SGD, 0 for none.
      nesterov: whether the momentum is Nesterov's.
      fragments: the number of sets into which variables are divided. Each version changes the
        variables of one set; the sets take turns.
      weight: the weight of a contribution in the mean. "tokens" takes its tokens, "tokens_per_step"
        takes its tokens times its tokens per step.
      merge: "mean" averages changes; "radial" averages the directions of each variable's changes,
        and separately their lengths.
      max_norm: the largest allowed ratio of a change's length to the usual length; longer changes
        are scaled down. The usual length is the median over other islands' changes for the same
        version, and over earlier changes of the island that made the change. 0 sets no limit.
    """

    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.5
    nesterov: bool = True
    fragments: int = 1
    weight: Weight = "tokens"
    merge: Merge = "mean"
    max_norm: float = 10.0

    def check(self) -> None:
        """Raises ValueError if a setting is out of range."""
        if not is_number(self.outer_learning_rate) or not 0.0 < self.outer_learning_rate < 10.0:
            raise ValueError(
                "outer_learning_rate must be above 0 and below 10, got "
                f"{self.outer_learning_rate!r}."
            )
        if not is_number(self.outer_momentum) or not 0.0 <= self.outer_momentum < 1.0:
            raise ValueError(f"outer_momentum must be in [0, 1), got {self.outer_momentum!r}.")
        if not isinstance(self.fragments, int) or self.fragments < 1:
            raise ValueError(
                f"fragments must be a whole number of at least 1, got {self.fragments!r}."
            )
        for name, kind in (("weight", Weight), ("merge", Merge)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"{name} must be one of {', '.join(get_args(kind))}, got "
                    f"{getattr(self, name)!r}."
                )
        if not is_number(self.max_norm) or not (self.max_norm == 0.0 or self.max_norm > 1.0):
            raise ValueError(f"max_norm must be above 1, or 0 for none, got {self.max_norm!r}.")

    @classmethod
    def of(cls, folder: Folder) -> MergeSettings | None:
        """Returns the settings of a folder; None if no merger has begun in it.

        If the object with the settings (a file of the folder) is gone or damaged, the settings are
        read from a decision. The method raises DamagedObjectError if the object is damaged and
        there is no decision to read.
        """
        damaged: DamagedObjectError | None = None
        try:
            found = folder.read_json(SETTINGS, dict[str, Any])
            if found is not None:
                return cls.from_dict(found, f"{SETTINGS} in {folder.url}")
        except DamagedObjectError as error:
            damaged = error
        for version in reversed(numbers_in(folder, "decisions", ".json")):
            with contextlib.suppress(DamagedObjectError):
                decision = read_decision(folder, version)
                if decision:
                    return cls.from_dict(decision.settings, decision_object(version))
        if damaged:
            raise damaged
        return None

    @classmethod
    def from_dict(cls, found: Mapping[str, Any], where: str) -> MergeSettings:
        """Makes `MergeSettings` from a dictionary that was read from the folder, and checks them.

        Args:
          found: a dictionary from the names of settings to their values.
          where: the name of the object that holds the dictionary, for errors.

        Raises:
          DamagedObjectError: `found` has other names than those of settings, or a setting is out of
            range.
        """
        try:
            settings = cls(**found)
            settings.check()
        except (TypeError, ValueError) as error:
            raise DamagedObjectError(f"{where} are no settings of a merger: {error}") from error
        return settings


class Change(NamedTuple):
    """One island's change, decoded, with its weight in the mean from which a version is made.

    Attributes:
      weight: the weight of the change in the mean.
      scale: a factor for the change of trained variables: 1, or less if the change is longer than
        `MergeSettings.max_norm` allows.
      tensors: a dictionary from the names of variables to the values that the island began with,
        minus its values now.
    """

    weight: float
    scale: float
    tensors: Arrays


def wide(value: np.ndarray) -> np.ndarray:
    """Returns an array as float32, or unchanged if its dtype is wider: the dtype in versions."""
    return value.astype(np.promote_types(value.dtype, np.float32), copy=False)


def weight_of(tokens: float, steps: float, weight: Weight) -> float:
    """Returns the weight of a change in the mean over islands.

    Args:
      tokens: the number of tokens from which the change was learned.
      steps: the number of steps in which it was learned.
      weight: the rule: "tokens" returns the tokens, "tokens_per_step" the tokens times the tokens
        per step.
    """
    return tokens if weight == "tokens" else tokens * tokens / max(steps, 1.0)


class Length(NamedTuple):
    """The norm of a change, and the number of steps in which the change was learned."""

    norm: float
    steps: float

    @classmethod
    def of(cls, change: Arrays, steps: float) -> Length:
        """Returns the length of a change: its norm over all trained variables together.

        `change` is a dictionary from the names of variables to their changes, learned in `steps`
        steps.
        """
        squares = [
            float(np.square(value[part], dtype=np.float64).sum())
            for name, x in change.items()
            if not name.startswith(MEAN)
            for value in [x.reshape(-1)]
            for part in _slices(value.size)
        ]
        return cls(float(np.sqrt(sum(squares))), float(steps))


def scale_of(change: Length, others: Sequence[Length], max_ratio: float) -> float:
    """Returns the factor that makes a change at most `max_ratio` times as long as usual.

    `change` is the length of the change. The usual length is the median of `others`: the lengths of
    other islands' changes for the same version, and of earlier changes of the same island. If one
    of them was learned in n times fewer steps than `change`, its length is first multiplied by n.
    The factor is 1 if the change is short enough, if `others` is empty, or if `max_ratio` is 0.

    Examples:
      >>> usual = [Length(norm, steps=5) for norm in (1.0, 1.5, 2.0)]
      >>> scale_of(Length(10.0, steps=5), usual, max_ratio=2.0)
      0.3
    """
    known = [x.norm * max(change.steps / max(x.steps, 1.0), 1.0) for x in others if x.norm]
    if not known or not max_ratio:
        return 1.0
    return min(max_ratio * float(np.median(known)) / max(change.norm, 1e-300), 1.0)


def make_outer_step(
    values: Arrays, momenta: Arrays, changes: Iterator[Change], step: MergeSettings
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Computes a version's values and momenta from those of the version before and the changes.

    Only trained variables have momenta. The islands' changes are added up in the order of
    `changes`, in float64. The new values of variables are float32 or wider.

    Args:
      values: a dictionary from the names of variables to their values in the version before.
      momenta: a dictionary from the names of variables to their momenta as of that version; a
        variable that is not in it has momentum 0.
      changes: one change of each island, which has all variables in `values`.
      step: the settings of the outer step.

    Returns:
      Two dictionaries from the names of variables: to the new values, and to the new momenta.
    """
    total = {name: np.zeros(x.shape) for name, x in values.items()}
    weights, lengths = 0.0, dict.fromkeys(values, 0.0)
    for weight, scale, tensors in changes:
        weights += weight
        for name, sum_of in total.items():
            factor = weight if name.startswith(MEAN) else weight * scale
            if step.merge == "radial" and not name.startswith(MEAN):
                length = Length.of({name: tensors[name]}, 1).norm
                lengths[name] += factor * length
                factor = weight / length if length else 0.0
            flat, value = sum_of.reshape(-1), tensors[name].reshape(-1)
            for part in _slices(flat.size):
                flat[part] += np.multiply(value[part], factor, dtype=np.float64)
    new, velocities, momentum = {}, {}, step.outer_momentum
    for name, x in values.items():
        move = total.pop(name).reshape(-1)
        is_mean = name.startswith(MEAN)
        is_radial, factor = step.merge == "radial" and not is_mean, 1.0
        if is_radial and lengths[name]:
            length = max(float(np.sqrt(np.square(move).sum())), 1e-300)
            factor = lengths[name] / weights / length
        has_momentum = bool(momentum) and not is_mean
        value, new[name] = x.reshape(-1), np.empty(x.shape, np.promote_types(x.dtype, np.float32))
        if has_momentum:
            velocities[name] = np.empty(x.shape, np.float32)
        for part in _slices(x.size):
            moved = move[part] * factor if is_radial else move[part] / weights
            if has_momentum:
                velocity = moved.copy()
                if name in momenta:
                    before = momenta[name].reshape(-1)[part]
                    velocity += np.multiply(before, momentum, dtype=np.float64)
                velocities[name].reshape(-1)[part] = velocity
                moved = velocity * momentum + moved if step.nesterov else velocity
            moved *= -1.0 if is_mean else -step.outer_learning_rate
            new[name].reshape(-1)[part] = moved + value[part]
    return new, velocities


def _slices(size: int) -> Iterator[slice]:
    """Yields slices of at most `_PART` numbers that together cover an array of `size` numbers.

    Arithmetic that is done on one slice after the other needs only small temporary arrays.
    """
    return (slice(at, at + _PART) for at in range(0, size, _PART))


def encoded(change: Arrays, form: Form) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Rounds a change to the form in which it is sent; returns tensors to send and the errors.

    Args:
      change: a dictionary from the names of variables to their changes.
      form: "float32", "bfloat16", "int8" or "int4".

    Returns:
      Two dictionaries. The first has the tensor to send for each variable, by the variable's name.
      For a tensor of integers, it also has the scales of the blocks, by this name with "/scales"
      added. The second has the rounding errors by the variable's name: the change minus what a
      reader decodes. It is empty for "float32".
    """
    sent: dict[str, np.ndarray] = {}
    errors: dict[str, np.ndarray] = {}
    for name, value in change.items():
        exact = value.astype(np.float32)
        if form == "float32":
            sent[name] = exact
            continue
        if form == "bfloat16":
            import ml_dtypes

            sent[name] = exact.astype(ml_dtypes.bfloat16)
            back = sent[name].astype(np.float32)
        else:
            sent[name], sent[name + _SCALES] = _in_blocks(exact, _BLOCKS[form])
            back = _from_blocks(sent[name], sent[name + _SCALES], _BLOCKS[form], exact.shape)
        errors[name] = exact - back
    return sent, errors


def decoded(stored: Stored, specs: Specs) -> dict[str, np.ndarray]:
    """Decodes the change in a contribution; returns float32 arrays by name of the variable.

    Args:
      stored: the content of the contribution's object, as `encoded` has made it.
      specs: a dictionary from the names of the variables to their shapes and dtypes.

    Raises:
      DamagedObjectError: the contribution is for other variables or shapes.
    """
    form, found = stored.facts.form, {}
    blocks = _BLOCKS.get(form) if isinstance(form, str) else None
    wanted = set(specs) | ({name + _SCALES for name in specs} if blocks else set())
    if form not in FORMS or set(stored.tensors) != wanted:
        raise DamagedObjectError(
            f"The contribution of the island {stored.facts.island!r} has {len(stored.tensors)} "
            f"tensors in the form {form!r}: they do not fit this program's {len(specs)} variables."
        )
    for name, spec in specs.items():
        value = stored.tensors[name]
        if blocks:
            scales = stored.tensors[name + _SCALES]
            size = int(np.prod(spec.shape))
            shape = (-(-size // blocks.size), blocks.size // blocks.in_a_byte)
            if value.shape != shape or scales.shape != shape[:1]:
                raise _other_shape(name, value, spec)
            value = _from_blocks(value, scales, blocks, spec.shape)
        if value.shape != spec.shape:
            raise _other_shape(name, value, spec)
        found[name] = value.astype(np.float32, copy=False)
    return found


def _other_shape(name: str, value: np.ndarray, spec: TensorSpec) -> DamagedObjectError:
    return DamagedObjectError(
        f"The change of {name!r} has the shape {list(value.shape)}, and the variable "
        f"{list(spec.shape)}."
    )


def _in_blocks(value: np.ndarray, blocks: _Blocks) -> tuple[np.ndarray, np.ndarray]:
    flat = value.reshape(-1)
    padded = np.zeros((-(-flat.size // blocks.size), blocks.size), np.float32)
    padded.reshape(-1)[: flat.size] = flat
    scales = np.abs(padded).max(axis=1, initial=0.0) / np.float32(blocks.largest)
    divisor = np.where(scales > 0.0, scales, np.float32(1.0))
    whole = np.rint(padded / divisor[:, None]).astype(np.int8)
    if blocks.in_a_byte == 2:
        nibbles = (whole + blocks.largest + 1).view(np.uint8)
        whole = nibbles[:, 0::2] << 4 | nibbles[:, 1::2]
    return whole, scales.astype(np.float32)


def _from_blocks(
    whole: np.ndarray, scales: np.ndarray, blocks: _Blocks, shape: tuple[int, ...]
) -> np.ndarray:
    if blocks.in_a_byte == 2:
        nibbles = np.stack([whole >> 4, whole & 15], axis=-1).reshape(len(whole), blocks.size)
        whole = nibbles.astype(np.int8) - np.int8(blocks.largest + 1)
    exact = whole.astype(np.float32) * scales[:, None]
    return exact.reshape(-1)[: int(np.prod(shape))].reshape(shape)
