"""Attributes that tie an operation to a device or to a TPU."""

from __future__ import annotations

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.tensorflow import PASSES_ON

_PREFIXES = ("_tpu", "_xla", "_Xla")


def untie(node: tf.NodeDef) -> None:
    """Removes the attributes that tie a node to devices or to a TPU, in place."""
    node.device = ""
    for attr in list(node.attr):
        if attr == "_class" or attr.startswith(_PREFIXES):
            del node.attr[attr]


def without_pass(node: tf.NodeDef, data: list[str]) -> list[str]:
    """The inputs of a node on a CPU, where one with `PASSES_ON` would be a pass over the values.

    Such a node is made an identity.
    """
    if PASSES_ON not in node.attr:
        return data
    node.op = "Identity"
    return [data[1]]
