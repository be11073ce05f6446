"""Compares what a run goes on with to what it began with: settings, data and checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Callable, Mapping, Sequence

import gin

from mtf_gradsync.extension import some_lines, tf, walk
from mtf_gradsync.runtimes._common import ACCEPT_FLAG, CONFIG_FILE, ConfigError
from mtf_gradsync.runtimes.saving import check_configuration, describe_differences
from mtf_gradsync.runtimes.starting import Start
from mtf_gradsync.tools._private.gin import bindings_in
from mtf_gradsync.tools.train.train_graph import EXAMPLES

# More differences than these are counted, not listed.
_MOST = 12


def changed_settings(directory: Path) -> dict[str, str]:
    """Returns the bindings whose values differ between a run's former and present configuration.

    The former configuration is the config file in `directory`, the run's directory; the present
    one is gin's. The result is a dictionary from the name of a binding to a text with both values.
    Bindings that only one of the two configurations has are left out. If the directory has no
    config file, the result is empty.
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


def adapt_start(start: Start, accept: bool, say: Callable[[str], None], words: str) -> Start:
    """Compares the checkpoint of `start` with the variables of the default graph.

    Returns a `Start` whose `new` has the names of the variables that the checkpoint lacks; they
    begin as in a new run. `accept` is whether the user accepts a checkpoint of another
    configuration. If `accept` is False, differences between the checkpoint and the graph raise a
    ConfigError. A variable of another shape or type always raises a ConfigError. If there are
    differences, `say` is called with a text that lists them; the text begins with `words`, such as
    "going on from x,".
    """
    assert start.path is not None  # the callers have asked
    variables, counts = tf.global_variables(), True
    if not tf.train.load_checkpoint(start.path).has_tensor(EXAMPLES):
        counts, variables = False, [v for v in variables if v.op.name != EXAMPLES]
        say(
            f"{start.path} does not say how many examples its steps have used; each step is "
            "counted as one batch of the present size"
        )
    # Settings of the model or the optimizer; other settings of a run do not change its variables.
    ours = ("run.", "train.run.", "sample.", "train.sample.")
    kept = ("run.optimizer", "train.run.optimizer")
    changed = changed_settings(Path(start.path).parent)
    lines = [line for name, line in changed.items() if name in kept or not name.startswith(ours)]
    found = check_configuration(start.path, variables, accept, lines)
    if any(found):
        say(f"{words} of another configuration:\n{describe_differences(found)}")
    new = [name for name in found.new if name not in found.adapted]
    return start._replace(new=tuple(new if counts else [*new, EXAMPLES]))


def say_changes(directory: Path, say: Callable[[str], None]) -> None:
    """Tells the user which settings, as gin has them now, differ from those a run had before.

    `directory` is the run's directory, in which the run has left its settings. If some settings
    differ, `say` is called once, with a text that lists them; otherwise it is not called.
    """
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
    names = sorted(_data_binding_names(there) | _data_binding_names(here))
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


def _data_binding_names(bindings: Mapping[str, str]) -> set[str]:
    """Returns the names of the bindings that define the examples of a run.

    `bindings` is a dictionary from the name of each binding of the run to the bound value, as text.
    The result has the names of the bindings of the data set function and of the vocabulary. It also
    has the names of the bindings of other functions and of macros, if the bindings of the data set
    function or of the vocabulary refer to them.
    """

    def referred(name: str) -> list[str]:
        functions = re.findall(r"@(?:\w+/)*([\w.]+)", bindings[name])
        names = {one.split(".")[-1] for one in functions}
        macros = re.findall(r"%(?:\w+/)*([\w.]+)", bindings[name])
        return [one for one in bindings if one in macros or _configurable_of(one) in names]

    return set(walk([name for name in bindings if name.endswith(_OF_DATA)], referred))


def _configurable_of(name: str) -> str:
    """Returns which configurable a binding is of: "text_files" for "text_files.files".

    The result has neither the scope nor the modules of the binding's name. It is "" for a macro.
    """
    return name.split("/")[-1].rpartition(".")[0].split(".")[-1]


def _there(directory: Path) -> Mapping[str, str]:
    try:
        return bindings_in((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return {}


def _here() -> Mapping[str, str]:
    # What is bound, and then what was read, which has defaults, too.
    return {**bindings_in(gin.config_str()), **bindings_in(gin.operative_config_str())}
