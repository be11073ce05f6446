"""Checks of single bindings of ``train.run``."""

from __future__ import annotations

from typing import Any

from mtf_gradsync._numbers import is_whole_number
from mtf_gradsync.train.errors import ConfigError


def check_count(name: str, value: Any, optional: bool = False) -> None:
    """Raises ConfigError unless a binding of ``train.run`` is a positive integer."""
    if (optional and value is None) or is_whole_number(value):
        return
    raise ConfigError(
        f"train.run.{name} must be a positive integer{' or None' if optional else ''}; "
        f"got {value!r}"
    )


def check_callable(name: str, value: Any, example: str, optional: bool = False) -> None:
    """Raises ConfigError unless a binding of ``train.run`` is a class or function."""
    if callable(value) or (optional and value is None):
        return
    raise ConfigError(
        f"train.run.{name} must be a class or function, written as a gin reference without "
        f"parentheses like {example}; got {value!r}"
    )


def check_vocabulary(vocabulary: Any) -> None:
    """Raises ConfigError unless a vocabulary, or an (inputs, targets) pair of them, can be used."""
    pair = vocabulary if isinstance(vocabulary, tuple) else (vocabulary,)
    for one in pair:
        missing = [name for name in ("vocab_size", "encode", "decode") if not hasattr(one, name)]
        if missing or isinstance(one, type) or len(pair) > 2:
            raise ConfigError(
                "train.run.vocabulary must be an object with vocab_size, encode and decode (or an "
                "(inputs, targets) pair), written like @ByteVocabulary() with parentheses; got "
                f"{vocabulary!r}"
            )
