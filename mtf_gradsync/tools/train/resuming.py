"""Compares the settings, data and checkpoint of a run to go on with to those it began with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Callable, Mapping, Sequence

import gin

from mtf_gradsync.extension import some_lines, tf
from mtf_gradsync.runtimes._common import ACCEPT_FLAG, CONFIG_FILE, ConfigError
from mtf_gradsync.runtimes.saving import check_configuration, differences_text
from mtf_gradsync.runtimes.starting import Start
from mtf_gradsync.tools._private.gin import bindings_in
from mtf_gradsync.tools.train.train_graph import EXAMPLES

# More differences than these are counted, not listed.
_MOST = 12


def changed_settings(directory: Path) -> dict[str, str]:
    """Compares gin's configuration with the one that a run has left in its directory.

    Returns a text with both values for each binding that differs, by the binding's name. Bindings
    that only one of the two has are left out. If the directory has no configuration, the result is
    empty.
    """
    there, here = _there(directory), _here()
    return {
        name: _difference(name, there, here)
        for name in there
        if name in here and here[name] != there[name]
    }


def _difference(name: str, there: Mapping[str, str], here: Mapping[str, str]) -> str:
    unbound = "unbound"
    return f"{name} = {there.get(name, unbound)} there and {here.get(name, unbound)} here"


def adapted(start: Start, accept: bool, say: Callable[[str], None], words: str) -> Start:
    """Returns a start from a checkpoint that differs from the default graph.

    Variables that the checkpoint does not have are marked to begin with new values. `accept` says
    whether the user accepts a checkpoint of another configuration; `say` takes lines that list the
    differences, and `words` begin that list.
    """
    assert start.path is not None  # the callers have asked
    variables, counts = tf.global_variables(), True
    if not tf.train.load_checkpoint(start.path).has_tensor(EXAMPLES):
        counts, variables = False, [v for v in variables if v.op.name != EXAMPLES]
        say(
            f"{start.path} does not say how many examples its steps have used; they are counted as "
            "steps on batches of the present size"
        )
    # Settings of the model or the optimizer; other settings of a run do not change its variables.
    ours = ("run.", "train.run.", "sample.", "train.sample.")
    kept = ("run.optimizer", "train.run.optimizer")
    changed = changed_settings(Path(start.path).parent)
    lines = [line for name, line in changed.items() if name in kept or not name.startswith(ours)]
    found = check_configuration(start.path, variables, accept, lines)
    if any(found):
        say(f"{words} of another configuration:\n{differences_text(found)}")
    new = [name for name in found.new if name not in found.adapted]
    return start._replace(new=tuple(new if counts else [*new, EXAMPLES]))


def say_changes(directory: Path, say: Callable[[str], None]) -> None:
    """Logs which settings are not those that the run in a directory had before."""
    lines = [f"\n  {line}" for line in changed_settings(directory).values()]
    if lines:
        changed = some_lines(lines, _MOST)
        say(f"these settings are not those that {directory} was made with:{changed}")


def check_data(
    directory: Path,
    before: Sequence[str],
    now: Sequence[str],
    accept: bool,
    say: Callable[[str], None],
) -> bool:
    """Compares the data set that a run began with to the data set that it would go on with.

    Args:
      directory: the run's directory.
      before: hashes of the first examples of the run's data set; [] if they are not known.
      now: hashes of the first examples of the data set now.
      accept: whether the run may go on with other data.
      say: called with a line if the settings are the same, but the examples are not.

    Returns:
      Whether the data are the same, as far as is known.

    Raises:
      ConfigError: the settings of the data differ, and give other examples.
    """
    if not before or all(one == other for one, other in zip(before, now)):
        return True
    there, here = _there(directory), _here()
    names = sorted(_names_of_data(there) | _names_of_data(here))
    changed = [name for name in names if there.get(name) != here.get(name)]
    # If there is another function, its parameters are others, too: naming the function is enough.
    changed = [name for name in changed if name in there and name in here] or changed
    if not changed:
        say(
            f"the data set does not begin with the examples that {directory} was begun with: its "
            "content or its settings have changed, or it comes in another order each time"
        )
    elif not accept:
        lines = "".join(f"\n  {_difference(name, there, here)}" for name in changed)
        raise ConfigError(
            f"The run in {directory} was made with other data:{lines}\nNothing was changed. Train "
            f"in another --model_dir, or go on with these data by {ACCEPT_FLAG}."
        )
    return False


# The settings that say what the examples are, and the functions that they refer to.
_OF_DATA = ("run.train_dataset_fn", "run.vocabulary")


def _names_of_data(bindings: Mapping[str, str]) -> set[str]:
    """Returns the names of the bindings that define the examples, macros included."""
    found, todo = set[str](), [name for name in bindings if name.endswith(_OF_DATA)]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        references = {
            one.split(".")[-1] for one in re.findall(r"@(?:\w+/)*([\w.]+)", bindings[name])
        }
        todo += [one for one in bindings if _configurable(one) in references]
        todo += [
            one for one in re.findall(r"%(?:\w+/)*([\w.]+)", bindings[name]) if one in bindings
        ]
    return found


def _configurable(name: str) -> str:
    """Returns the configurable in a name of a binding: text_files in text_files.files."""
    return name.split("/")[-1].rpartition(".")[0].split(".")[-1]


def _there(directory: Path) -> Mapping[str, str]:
    try:
        return bindings_in((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return {}


def _here() -> Mapping[str, str]:
    # What is bound, and then what was read, which has defaults, too.
    return {**bindings_in(gin.config_str()), **bindings_in(gin.operative_config_str())}
