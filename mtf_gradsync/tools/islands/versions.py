"""Versions of the outer values and what they are made of: objects, their names, the arithmetic.

What a version is depends on its decision and the objects that this names alone, not on when
anything arrived. The arithmetic is that of Decoupled DiLoCo (Douillard et al. 2026, arXiv
2604.21428) and of `OuterOptimizer`: SGD with (Nesterov) momentum whose gradient is the mean,
weighted by tokens, of what each island's values have moved from the version that it began with.

An island's change is sent in float32, bfloat16, or int8 with a scale for each block. What rounding
takes away is kept and added to the next change (error feedback), as `QuantizedAllReduce` does with
gradients.
"""

from __future__ import annotations

from typing import Any, Iterator, Literal, Mapping, NamedTuple, Sequence, get_args

import numpy as np

from mtf_gradsync.extension import is_number
from mtf_gradsync.tools.islands.folder import SUFFIX, DamagedObjectError, Folder, Spec, Stored

SETTINGS = "settings.json"
Form = Literal["float32", "bfloat16", "int8"]
FORMS = get_args(Form)
BLOCK = 256
_SCALES = "/scales"


class MergeSettings(NamedTuple):
    """How versions are made. The first merger writes these into the folder; they do not change.

    Attributes:
      outer_learning_rate: of SGD on the outer values.
      outer_momentum: of SGD, 0 for none.
      nesterov: whether the momentum is Nesterov's.
      fragments: into how many sets the variables are cut, which take turns.
    """

    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.5
    nesterov: bool = True
    fragments: int = 1

    def check(self) -> None:
        """Raises ValueError for a setting that makes no sense."""
        if not is_number(self.outer_learning_rate) or not 0.0 < self.outer_learning_rate < 10.0:
            raise ValueError(
                f"outer_learning_rate must be positive, got {self.outer_learning_rate!r}."
            )
        if not is_number(self.outer_momentum) or not 0.0 <= self.outer_momentum < 1.0:
            raise ValueError(f"outer_momentum must be in [0, 1), got {self.outer_momentum!r}.")
        if not isinstance(self.fragments, int) or self.fragments < 1:
            raise ValueError(
                f"fragments must be a whole number of at least 1, got {self.fragments!r}."
            )

    @classmethod
    def of(cls, folder: Folder) -> MergeSettings | None:
        """Returns the settings of a folder; None before a merger has begun there."""
        found = folder.read_json(SETTINGS)
        return None if found is None else cls(**found)


def version_object(version: int) -> str:
    """The name of the object with the values of a version."""
    return f"versions/{version:08d}{SUFFIX}"


def momentum_object(version: int) -> str:
    """The name of the object with the momentum after a version."""
    return f"momenta/{version:08d}{SUFFIX}"


def decision_object(version: int) -> str:
    """The name of the object that says what a version is made of."""
    return f"decisions/{version:08d}.json"


def contribution_object(version: int, island: str) -> str:
    """The name of an island's contribution to what follows a version."""
    return f"contributions/{version:08d}/{island}{SUFFIX}"


def offer_object(island: str) -> str:
    """The name of the initial values that an island offers."""
    return f"offers/{island}{SUFFIX}"


def member_object(island: str) -> str:
    """The name of the object that says that an island is there."""
    return f"members/{island}.json"


def fragment_of(version: int, names: Sequence[str], fragments: int) -> list[str]:
    """The names of the variables that a version changes; all of them in version 0."""
    ordered = sorted(names)
    return ordered if version == 0 else ordered[(version - 1) % fragments :: fragments]


def newest_version(folder: Folder) -> int | None:
    """Returns the number of the newest version whose values are there, or None."""
    names = [name for name in folder.names("versions") if name.endswith(SUFFIX)]
    return int(names[-1][: -len(SUFFIX)]) if names else None


def versions_that_make(version: int, fragments: int) -> list[int]:
    """The versions whose objects hold the newest values of all variables, in ascending order."""
    first = max(version - fragments + 1, 0)
    return (
        sorted({0, *range(first, version + 1)}) if first <= 1 else list(range(first, version + 1))
    )


def read_values(
    folder: Folder,
    version: int,
    fragments: int,
    specs: Mapping[str, Spec] | None = None,
    since: int = 0,
) -> dict[str, np.ndarray]:
    """Returns the values as of a version of the variables that versions have changed `since` one.

    Raises DamagedObjectError for an object that is damaged, foreign or gone.
    """
    values: dict[str, np.ndarray] = {}
    for number in versions_that_make(version, fragments):
        if number < since:
            continue
        wanted = specs
        if specs is not None:
            wanted = {name: specs[name] for name in fragment_of(number, list(specs), fragments)}
        found = folder.load(version_object(number), wanted)
        if found is None:
            raise DamagedObjectError(f"{version_object(number)} in {folder.url} is gone.")
        values.update(found.tensors)
    return values


def merged(
    values: Mapping[str, np.ndarray],
    momenta: Mapping[str, np.ndarray],
    parts: Iterator[tuple[float, Mapping[str, np.ndarray]]],
    settings: MergeSettings,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Makes the outer step: new values and momenta of the variables in `values`.

    `parts` are weights and changes (values at the begin less those now), in the order in which
    they are added up, in float64.
    """
    total, weights = {name: np.zeros(x.shape) for name, x in values.items()}, 0.0
    for weight, change in parts:
        weights += weight
        for name, sum_of in total.items():
            sum_of += np.multiply(change[name], weight, dtype=np.float64)
    new, velocities, momentum = {}, {}, settings.outer_momentum
    for name, x in values.items():
        # In place where it can be: these may be the largest arrays that the process has.
        gradient = total.pop(name)
        gradient /= weights
        move = gradient
        if momentum:
            velocity = gradient.copy()
            if name in momenta:
                velocity += np.multiply(momenta[name], momentum, dtype=np.float64)
            velocities[name] = velocity.astype(np.float32)
            move = velocity
            if settings.nesterov:
                move *= momentum
                move += gradient
        move *= -settings.outer_learning_rate
        move += x
        new[name] = move.astype(x.dtype)
    return new, velocities


def make_version(
    folder: Folder, decision: Mapping[str, Any], settings: MergeSettings
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Makes values and momenta of the version that a decision is about, from what it names.

    Raises DamagedObjectError for an object that is gone or is not what the decision names.
    """
    version = decision["version"]

    def load(name: str, expected: str) -> Stored:
        found = folder.load(name, expected=expected)
        if found is None:
            raise DamagedObjectError(
                f"{name} in {folder.url}, which {decision_object(version)} names, is gone."
            )
        return found

    if version == 0:
        (offer,) = decision["contributions"]
        return load(offer["object"], offer["checksum"]).tensors, {}
    before = read_values(folder, version - 1, settings.fragments)
    names = fragment_of(version, list(before), settings.fragments)
    momenta: dict[str, np.ndarray] = {}
    if settings.outer_momentum and version > settings.fragments:
        last = momentum_object(version - settings.fragments)
        found = folder.load(last)
        if found is None:
            raise DamagedObjectError(f"{last} in {folder.url} is gone.")
        momenta = found.tensors
    specs = {name: Spec.of(before[name]) for name in names}

    def parts() -> Iterator[tuple[float, Mapping[str, np.ndarray]]]:
        for one in decision["contributions"]:
            stored = load(one["object"], one["checksum"])
            yield one["weight"], decoded(stored, specs)

    return merged({name: before[name] for name in names}, momenta, parts(), settings)


def encoded(
    change: Mapping[str, np.ndarray], form: Form
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the tensors to send for a change, by name, and what rounding took away from it."""
    sent: dict[str, np.ndarray] = {}
    errors: dict[str, np.ndarray] = {}
    for name, value in change.items():
        wide = value.astype(np.float32)
        if form == "float32":
            sent[name] = wide
            continue
        if form == "bfloat16":
            import ml_dtypes

            sent[name] = wide.astype(ml_dtypes.bfloat16)
            back = sent[name].astype(np.float32)
        else:
            sent[name], sent[name + _SCALES] = _in_blocks(wide)
            back = _from_blocks(sent[name], sent[name + _SCALES], wide.shape)
        errors[name] = wide - back
    return sent, errors


def decoded(stored: Stored, specs: Mapping[str, Spec]) -> dict[str, np.ndarray]:
    """Returns a contribution's change of the variables in `specs`, in float32.

    Raises DamagedObjectError where it is not of these variables.
    """
    form, found = stored.facts.get("form"), {}
    wanted = set(specs) | ({name + _SCALES for name in specs} if form == "int8" else set())
    if form not in FORMS or set(stored.tensors) != wanted:
        raise DamagedObjectError(
            f"The contribution of {stored.facts.get('island')!r} is in the form {form!r} and of "
            f"{len(stored.tensors)} tensors: it is not of this program's {len(specs)} variables."
        )
    for name, spec in specs.items():
        value = stored.tensors[name]
        if form == "int8":
            scales = stored.tensors[name + _SCALES]
            if value.size < int(np.prod(spec.shape)) or value.shape != (len(scales), BLOCK):
                raise _other_shape(name, value, spec)
            value = _from_blocks(value, scales, spec.shape)
        if value.shape != spec.shape:
            raise _other_shape(name, value, spec)
        found[name] = value.astype(np.float32, copy=False)
    return found


def _other_shape(name: str, value: Any, spec: Spec) -> DamagedObjectError:
    return DamagedObjectError(
        f"The change of {name!r} has the shape {list(value.shape)}, and the variable "
        f"{list(spec.shape)}."
    )


def _in_blocks(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    flat = value.reshape(-1)
    blocks = np.zeros((-(-flat.size // BLOCK), BLOCK), np.float32)
    blocks.reshape(-1)[: flat.size] = flat
    scales = np.abs(blocks).max(axis=1) / np.float32(127.0)
    divisor = np.where(scales > 0.0, scales, np.float32(1.0))
    return np.rint(blocks / divisor[:, None]).astype(np.int8), scales.astype(np.float32)


def _from_blocks(whole: np.ndarray, scales: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    wide = whole.astype(np.float32) * scales[:, None]
    return wide.reshape(-1)[: int(np.prod(shape))].reshape(shape)
