"""Attributes that tie an operation to a device or to a TPU."""

from __future__ import annotations

from mtf_gradsync._private.libraries import tf

_PREFIXES = ("_tpu", "_xla", "_Xla")


def untie(node: tf.NodeDef) -> None:
    """Removes the attributes that tie a node to devices or to a TPU, in place."""
    node.device = ""
    for attr in list(node.attr):
        if attr == "_class" or attr.startswith(_PREFIXES):
            del node.attr[attr]
