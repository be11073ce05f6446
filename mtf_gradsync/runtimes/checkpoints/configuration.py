"""Compares the variables of a checkpoint with those of a config's graph, name by name."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.optimizers.state.restoring import changes
from mtf_gradsync.runtimes.checkpoints.damage import UNREADABLE
from mtf_gradsync.runtimes.checkpoints.flags import ACCEPT_FLAG
from mtf_gradsync.runtimes.errors import ConfigError, first_line

# More than these are counted, not listed.
_MAX_LISTED = 40


class Differences(NamedTuple):
    """The differences between the variables of a checkpoint and those of a graph."""

    dropped: tuple[str, ...]  # names that only the checkpoint has
    new: tuple[str, ...]  # names that only the graph has
    adapted: tuple[str, ...]  # those of `new` that a wrapper derives from other values
    unfit: tuple[str, ...]  # sentences about variables of both that cannot be restored


def differences(path: str, variables: Sequence[Any]) -> Differences:
    """Compares a checkpoint with variables of the default graph.

    State of wrappers for another number of shards is no difference: it is resharded.
    """
    try:
        reader = tf.train.load_checkpoint(path)
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    except UNREADABLE as error:
        raise ConfigError(f"The checkpoint {path} cannot be read: {first_line(error)}") from error
    changed = changes(path)
    new, unfit = [], []
    for variable in variables:
        name, shape, dtype = variable.op.name, variable.shape.as_list(), variable.dtype.base_dtype
        change = changed.get(name)
        if name not in shapes or (change is not None and change.saved_shape is None):
            new.append(name)
        elif change is not None and change.fits:
            continue
        elif shapes[name] != shape:
            unfit.append(f"{name} has the shape {shapes[name]} there and {shape} here")
        elif dtypes[name] != dtype:
            unfit.append(f"{name} has the type {dtypes[name].name} there and {dtype.name} here")
    dropped = set(shapes) - {variable.op.name for variable in variables}
    return Differences(
        dropped=tuple(sorted(dropped)),
        new=tuple(sorted(new)),
        adapted=tuple(name for name in sorted(new) if name in changed),
        unfit=tuple(unfit),
    )


def check_configuration(path: str, variables: Sequence[Any], accept: bool) -> Differences:
    """Returns how a checkpoint and a configuration differ, or raises a ConfigError if they may not.

    With `accept` each may have variables that the other lacks; shapes and types may never differ.
    """
    found = differences(path, variables)
    parts = _lines(found)
    if found.unfit:
        raise _error(
            f"The checkpoint {path} was made by another model or optimizer than this config "
            "describes:",
            *_listed(found.unfit),
            *parts,
            "Nothing was changed. Use the config that made it, or another --model_dir.",
        )
    if parts and not accept:
        raise _error(
            f"The checkpoint {path} was made by another configuration than this one:",
            *parts,
            f"Nothing was changed. With {ACCEPT_FLAG} the run goes on all the same. Or use the "
            "config that made it, or another --model_dir.",
        )
    return found


def check_has(path: str, variables: Sequence[Any], model_dir: str) -> None:
    """Raises a ConfigError if a checkpoint lacks variables, but for those that wrappers derive."""
    found = differences(path, variables)
    missing = [
        f"{name} is not in the checkpoint" for name in found.new if name not in found.adapted
    ]
    if missing or found.unfit:
        raise _error(
            f"The checkpoint {path} was made by another model than this config describes:",
            *_listed([*missing, *found.unfit]),
            f"Use the config that made it, or another model_dir than {model_dir}.",
        )


def describe(found: Differences) -> str:
    """Returns the accepted differences as text for the log; empty where there are none."""
    return "\n".join(_lines(found))


def _error(*lines: str) -> ConfigError:
    return ConfigError("\n".join(lines))


def _lines(found: Differences) -> list[str]:
    begins = [name for name in found.new if name not in found.adapted]
    lines = []
    if found.dropped:
        lines += ["it holds, and this config does not have (dropped, if accepted):"]
        lines += _listed(found.dropped)
    if begins:
        lines += ["this config has, and it does not hold (begins as in a new run, if accepted):"]
        lines += _listed(begins)
    if found.adapted:
        lines += [
            "a wrapper of this config has, and it does not hold (begins from the checkpoint's "
            "steps and variables, if accepted):"
        ]
        lines += _listed(found.adapted)
    return lines


def _listed(lines: Sequence[str]) -> list[str]:
    more = len(lines) - _MAX_LISTED
    listed = [f"  {line}" for line in lines[:_MAX_LISTED]]
    return [*listed, f"  and {more} more"] if more > 0 else listed
