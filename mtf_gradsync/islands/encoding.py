"""How an island's change is sent: in float32, bfloat16, or int8 with a scale for each block.

What rounding takes away is kept and added to the next change (error feedback), as
`QuantizedAllReduce` does with gradients.
"""

from __future__ import annotations

from typing import Any, Literal, Mapping, get_args

import numpy as np

from mtf_gradsync.islands.folder import DamagedObjectError, Spec, Stored

Form = Literal["float32", "bfloat16", "int8"]
FORMS = get_args(Form)
BLOCK = 256
_SCALES = "/scales"


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
