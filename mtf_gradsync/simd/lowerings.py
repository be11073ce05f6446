"""Finds the Mesh-TensorFlow lowerings of a program in a user's argument."""

from __future__ import annotations

from typing import Any

from mtf_gradsync._private.libraries import mtf
from mtf_gradsync._private.mesh_tensorflow import restored_lowering

_HOOKS = ("training_hooks", "training_chief_hooks", "evaluation_hooks", "prediction_hooks")


def lowerings_in(given: Any) -> list[mtf.Lowering]:
    """Returns the lowerings in a `lowering` argument; raises TypeError if it can hold none.

    It may be a lowering, a sequence of them, None, or an ``EstimatorSpec`` or ``TPUEstimatorSpec``
    whose hooks restore a lowering.
    """
    if given is None:
        return []
    if isinstance(given, mtf.Lowering):
        return [given]
    if hasattr(given, "training_hooks"):
        hooks = [hook for name in _HOOKS for hook in getattr(given, name, ()) or ()]
        hooks = [h for h in hooks if isinstance(h, mtf.MtfRestoreHook)]
        found = [restored_lowering(hook) for hook in hooks]
        if found:
            return found
    elif isinstance(given, (list, tuple)) and all(isinstance(x, mtf.Lowering) for x in given):
        return list(given)
    raise TypeError(
        "lowering must be an mtf.Lowering, a list of them, or a spec that has an "
        f"mtf.MtfRestoreHook among its hooks, got {given!r}."
    )
