"""Reads gin files and bindings, and reports which one is wrong."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import logging
import re
import tokenize
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import gin

# All that gin files bind: nothing can be registered once a configuration is read.
import mtf_gradsync.tools.islands.elastic
import mtf_gradsync.tools.train.data.datasets
import mtf_gradsync.tools.train.data.vocabulary
import mtf_gradsync.tools.train.sampling
import mtf_gradsync.tools.train.train_graph  # noqa: F401
from mtf_gradsync.extension import did_you_mean
from mtf_gradsync.runtimes._common import ConfigError, configs_dir
from mtf_gradsync.tools._private.gin import (
    bindings,
    bindings_that_call,
    macros,
    note_user_bindings,
    pop_bindings,
    registered,
    unused_macros,
)
from mtf_gradsync.tools.train.config import RunConfig, transformer_utils

_RUN = "mtf_gradsync.train.run"
_UTILS_RUN = "mesh_tensorflow.transformer.utils.run"
_FIELDS = {field.name for field in dataclasses.fields(RunConfig)}


def load(
    gin_files: Sequence[str], gin_params: Sequence[str], search_paths: Sequence[str] = ()
) -> list[str]:
    """Replaces gin's configuration by the bindings in gin files and in `gin_params`.

    If two bindings are of the same parameter, the later one counts. `gin_files` are names of gin
    files. A gin file is looked for under its name as it is, then in the folders `search_paths`,
    then among the files that come with the package. `gin_params` are bindings such as
    "train.run.batch_size = 8". A binding of ``utils.run``, as T5's configs have it, becomes a
    binding of ``train.run`` if ``train.run`` has a parameter of this name. If a file binds the
    parameter of ``train.run``, too, the binding of ``train.run`` wins. Returns the names of the
    ``utils.run`` bindings and the macros that have no effect. Raises ConfigError for a binding or a
    file that gin refuses.
    """
    # Registers what model configs bind; also the check for the extra.
    transformer_utils()
    gin.clear_config()
    configs = configs_dir()
    # As "lm_cpu_mesh.gin" and as "configs/lm_cpu_mesh.gin", from any directory.
    for path in [*search_paths, str(configs), str(configs.parent)]:
        gin.add_config_file_search_path(path)
    with _no_search_log():
        for name in gin_files:
            _parse(gin.parse_config_file, name, name)
        ignored = _take_over_utils_run()
        unused = unused_macros()
        useless: set[str] = set()
        # One by one, because gin numbers lines where a binding wants to be quoted.
        for binding in gin_params:
            _parse(gin.parse_config, binding, f"--gin_param={binding!r}")
            _take_over_utils_run(overrides=True)
            # A later flag for another binding may well leave a macro without a use.
            useless.update(re.findall(r"^\s*(\w+)\s*=", binding, re.MULTILINE))
            useless.intersection_update(unused_macros())
    more = sorted(useless.difference(unused))
    if more:
        hint = did_you_mean(more[0], sorted(set(macros()) - set(more)))
        raise ConfigError(f"--gin_param: nothing in the config uses the macro {more[0]!r}{hint}")
    left = [key.parameter for key in bindings() if key.selector == _UTILS_RUN]
    ignored += [f"utils.run.{name}" for name in left]
    ignored += [f"{name} (a macro that nothing uses)" for name in unused]
    try:
        gin.finalize()
    except ValueError as error:
        raise ConfigError(f"gin: {_one_line(error)}") from error
    folders = [Path(), *map(Path, search_paths), configs, configs.parent]
    named = [Path(folder, name) for name in gin_files for folder in folders]
    note_user_bindings(
        [*(path.read_text(encoding="utf-8") for path in named if path.is_file()), *gin_params]
    )
    return ignored


def bound_run_config() -> RunConfig:
    """Returns the settings that gin's configuration binds on ``train.run``, or their defaults.

    Raises ConfigError if a setting without a default is not bound.
    """
    required = [f.name for f in dataclasses.fields(RunConfig) if f.default is gin.REQUIRED]
    missing = [f"train.run.{name}" for name in required if not _is_bound(f"{_RUN}.{name}")]
    if missing:
        raise ConfigError(f"Missing in the config: {', '.join(missing)}")
    return RunConfig()


def mesh_lines(mesh_shape: str, layout: str) -> list[str]:
    """Returns gin lines that replace the mesh and layout that gin binds on optimizers now.

    The result has a line for each bound parameter `mesh_shape` or `layout` of this package, except
    those of ``train.run``. Inside ``with bound(lines)`` the optimizers are on the other mesh.
    """
    given = {"mesh_shape": mesh_shape, "layout": layout}
    return [
        f'{key} = "{given[key.parameter]}"'
        for key in bindings()
        if key.parameter in given
        and key.selector.startswith("mtf_gradsync.")
        and key.selector != _RUN
    ]


def explain_error(error: BaseException) -> str:
    """Returns a message of one line for an exception that a function bound by gin raised."""
    text = _one_line(error)
    # The address and path of a function say no more than its name.
    text = re.sub(r" \((<(class|function)[^>]*>|<[^()]* at 0x\w+>)\)", "", text)
    # Proxy classes of gin have the name of their original class.
    text = f"the config cannot be run: {type(error).__name__}: {text}"
    for name in re.findall(r"in call to configurable '(?:\w+\.)*(\w+)'", text):
        keys = [key for key in bindings_that_call(name) if key.endswith((".opt", ".optimizer"))]
        if keys:
            text = (
                f"{keys[0]} = @{name}(): take the parentheses away. "
                f"Optimizers are called later, when the learning rate is known; called now: {text}"
            )
            break
    return f"{text} (--verbosity=1 shows where)"


def _parse(parse: Callable[[str], Any], text: str, where: str) -> None:
    try:
        parse(text)
    except tokenize.TokenError as error:
        raise ConfigError(f"{where}: it ends in the middle of a value") from error
    except (
        Exception
    ) as error:  # TensorFlow's of a name, Python's of a text, a module's of an import
        # `where` has the text of a binding, and the message the token of a value.
        said = re.sub(" In bindings string .*|malformed node or string.*> ", "", _one_line(error))
        if "os.PathLike object, not NoneType" in said:
            # gin's words where the folder's name could be a package, which has no such file either.
            said = "there is no such file, or one that it includes is not there"
        said = _with_hint(said)
        if Path(where).suffix == ".txt":
            said += f". If it is a text to train on: mtf-gradsync init --text {where}"
        raise ConfigError(f"{where}: {said}") from error


def _with_hint(message: str) -> str:
    """Returns gin's error text `message` in plainer words, or with names that may be meant.

    A message that this function does not know is returned as it is.
    """
    missing = re.match(r"Unable to open file: (.*)\. Searched config paths: (\[.*\])", message)
    if missing:
        folders = dict.fromkeys(folder or "." for folder in ast.literal_eval(missing[2]))
        return f"There is no gin file {missing[1]!r}; looked for it in {', '.join(folders)}"
    if message.startswith("Failed to parse token"):
        return (
            f"{message}: it is no value. Text wants quotes; a number, True, None, a list, a "
            "reference (@name) and a macro (%name) have none."
        )
    known = registered()
    parameter = re.search(r"Configurable '(.*?)' doesn't have a parameter named '(.*?)'", message)
    unknown = re.search(r"No configurable matching (?:reference )?'@?([\w./]*)", message)
    if parameter:
        selector, given = parameter.groups()
        names = {p for name in known if f".{name}".endswith(f".{selector}") for p in known[name]}
    elif unknown:
        given = unknown[1].split(".")[-1]
        names = {name.split(".")[-1] for name in known}
    else:
        return message
    names -= {"self", "cls", "args", "kwargs"}
    hint = did_you_mean(given, names)
    if parameter and names and not hint:
        hint = f"; it has {', '.join(sorted(names))}"
    return f"{message.rstrip('.')}{hint}" if hint else message


@contextlib.contextmanager
def _no_search_log() -> Iterator[None]:
    """Keeps gin from logging an error for each search path that does not have the file."""

    def keep(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Path not found")

    # Gin logs through the root logger itself.
    logging.getLogger().addFilter(keep)
    try:
        yield
    finally:
        logging.getLogger().removeFilter(keep)


def _take_over_utils_run(overrides: bool = False) -> list[str]:
    """Moves bindings of ``utils.run`` to ``train.run``, if that has a parameter of the name.

    If gin binds the parameter of ``train.run`` already, the existing binding stays, unless
    `overrides` is set. Returns a text on each binding of ``utils.run`` that has no effect because
    an existing binding with another value stays.
    """
    ignored = []
    for name, value in pop_bindings(_UTILS_RUN).items():
        if name not in _FIELDS:
            gin.bind_parameter(f"{_UTILS_RUN}.{name}", value)
        elif overrides or not _is_bound(f"{_RUN}.{name}"):
            gin.bind_parameter(f"{_RUN}.{name}", value)
        elif value != gin.query_parameter(f"{_RUN}.{name}"):
            ignored.append(f"utils.run.{name} (train.run.{name} counts)")
    return ignored


def _is_bound(parameter: str) -> bool:
    try:
        gin.query_parameter(parameter)
    except ValueError:
        return False
    return True


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()).replace(" In call to ", "; in call to ")
    return text or type(error).__name__
