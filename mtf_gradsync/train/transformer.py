"""Imports ``mesh_tensorflow.transformer``, which needs an extra."""

from __future__ import annotations

import importlib
from types import ModuleType

from mtf_gradsync.train.errors import ConfigError


def transformer_utils() -> ModuleType:
    """Imports ``mesh_tensorflow.transformer.utils``; raises a ConfigError without the extra."""
    return _import("utils")


def transformer_models() -> ModuleType:
    """Imports ``mesh_tensorflow.transformer.transformer``."""
    return _import("transformer")


def learning_rate_schedules() -> ModuleType:
    """Imports ``mesh_tensorflow.transformer.learning_rate_schedules``."""
    return _import("learning_rate_schedules")


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"mesh_tensorflow.transformer.{name}")
    except ImportError as error:
        raise ConfigError(
            f"mesh_tensorflow.transformer cannot be imported ({error}). Training transformers "
            'needs the train extra: pip install "mtf-gradsync[train]"'
        ) from error
