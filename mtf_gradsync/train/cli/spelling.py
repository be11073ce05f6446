"""Finds misspelt names in gin files and bindings, without importing what they configure.

The configurables of this package and of Mesh-TensorFlow are read from their sources. Those of
other modules are not known here: where a file imports some, gin checks the names that are not
found.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import os
import tokenize
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Sequence

import gin
from gin import config_parser

from mtf_gradsync._configs import configs_dir
from mtf_gradsync.runtimes.errors import ConfigError

_PACKAGES = ("mtf_gradsync", "mesh_tensorflow")
_DECORATOR = "gin.configurable"
# What gin itself registers.
_OF_GIN = ("gin.macro", "gin.constant", "gin.singleton")


class _Use(NamedTuple):
    """A configurable and its bound parameter, "" for none, in a file's line or in a binding."""

    selector: str
    parameter: str
    where: str


def check_spelling(
    gin_files: Sequence[str], gin_params: Sequence[str], search_paths: Sequence[str] = ()
) -> None:
    """Raises a ConfigError for a missing file, a line that cannot be read, or a misspelt name.

    The arguments are those of `mtf_gradsync.train.gin_files.load`.
    """
    configs = configs_dir()
    reader = _Reader([".", *search_paths, str(configs), str(configs.parent)])
    for name in gin_files:
        reader.read_file(name)
    for binding in gin_params:
        reader.read(binding, f"--gin_param={binding!r}")
    if reader.is_dynamic:
        return
    known = known_configurables()
    for use in reader.uses:
        found = {name: known[name] for name in known if _matches(use.selector, name)}
        if not found:
            if not reader.imports_others and not _is_registered(use.selector):
                last = use.selector.split(".")[-1]
                names = sorted({name.split(".")[-1] for name in known})
                raise ConfigError(
                    f"{use.where}: No configurable matching {use.selector!r}"
                    f"{_suggestion(last, names)}"
                )
        elif use.parameter and all(
            parameters is not None and use.parameter not in parameters
            for parameters in found.values()
        ):
            names = sorted({name for parameters in found.values() for name in parameters or ()})
            raise ConfigError(
                f"{use.where}: {use.selector} has no parameter {use.parameter!r}"
                f"{_suggestion(use.parameter, names)}"
            )


def _is_registered(selector: str) -> bool:
    """Returns whether a program that calls the command has registered a configurable itself."""
    try:
        return gin.get_configurable(selector) is not None
    except (KeyError, ValueError):
        return False


@functools.lru_cache(maxsize=None)
def known_configurables() -> dict[str, tuple[str, ...] | None]:
    """Returns the parameters of all that this package and Mesh-TensorFlow register, by full name.

    They are None where the sources do not show them, as with ``**kwargs``.
    """
    known: dict[str, tuple[str, ...] | None] = dict.fromkeys(_OF_GIN)
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(folder).rglob("*.py")):
                text = path.read_text(encoding="utf-8")
                if _DECORATOR in text:
                    parts = path.relative_to(folder).with_suffix("").parts
                    module = ".".join([package, *(p for p in parts if p != "__init__")])
                    known.update(_registered(ast.parse(text), module))
    return known


def _registered(tree: ast.AST, module: str) -> Iterator[tuple[str, tuple[str, ...] | None]]:
    for node in ast.walk(tree):
        for decorator in getattr(node, "decorator_list", ()):
            call = decorator if isinstance(decorator, ast.Call) else None
            if ast.unparse(call.func if call else decorator) != _DECORATOR:
                continue
            name, given = getattr(node, "name", ""), module
            if call and call.args:
                name = ast.literal_eval(call.args[0])
            for keyword in call.keywords if call else ():
                if keyword.arg == "module":
                    given = ast.literal_eval(keyword.value)
            yield f"{given}.{name}", _parameters(node)


def _parameters(node: Any) -> tuple[str, ...] | None:
    if isinstance(node, ast.ClassDef):
        constructors = [n for n in node.body if getattr(n, "name", "") in ("__init__", "__new__")]
        if constructors:
            return _parameters(constructors[0])
        if any("dataclass" in ast.unparse(d) for d in node.decorator_list) and not node.bases:
            fields = [n.target for n in node.body if isinstance(n, ast.AnnAssign)]
            return tuple(ast.unparse(field) for field in fields)
        return None  # inherited
    arguments = node.args
    if arguments.kwarg:
        return None
    return tuple(a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])


class _Reader(config_parser.ParserDelegate):
    """Reads gin files and what they include: which names they use, and what they import.

    `imports_others` says whether they import modules that are not known here, `is_dynamic` whether
    they register what they import, by gin's dynamic registration.
    """

    def __init__(self, prefixes: Sequence[str]):
        self._prefixes = prefixes
        self._where = ""
        self.uses: list[_Use] = []
        self.imports_others = self.is_dynamic = False

    def read_file(self, name: str) -> None:
        """Reads a file; one that only gin's other readers can open counts as an import."""
        for prefix in self._prefixes:
            path = os.path.join(prefix, name)
            if os.path.isfile(path):
                try:
                    text = Path(path).read_text(encoding="utf-8")
                except (OSError, UnicodeDecodeError) as error:
                    raise ConfigError(f"{path} cannot be read: {error}") from error
                self.read(text, name)
                return
        package = name.replace(".", "/").split("/")[0]
        if ":" in name or (package and importlib.util.find_spec(package) is not None):
            self.imports_others = True
            return
        folders = ", ".join(dict.fromkeys(map(os.path.abspath, self._prefixes)))
        raise ConfigError(f"There is no gin file {name!r}; looked for it in {folders}")

    def read(self, text: str, where: str) -> None:
        """Reads statements; `where` names them in errors."""
        outer, self._where = self._where, where
        try:
            for statement in config_parser.ConfigParser(text, self):
                line = getattr(statement, "location", None)
                here = f"{where}:{line.line_num}" if line and "--gin_param" not in where else where
                self._take(statement, here)
        except (SyntaxError, tokenize.TokenError) as error:
            raise ConfigError(f"{where}: {_unreadable(error, text)}") from error
        self._where = outer

    def _take(self, statement: Any, where: str) -> None:
        if isinstance(statement, config_parser.IncludeStatement):
            self.read_file(statement.filename)
        elif isinstance(statement, config_parser.ImportStatement):
            top = statement.module.split(".")[0]
            self.imports_others |= top not in _PACKAGES
            self.is_dynamic |= top == "__gin__"
        elif isinstance(statement, config_parser.BlockDeclaration):
            self.uses.append(_Use(statement.selector, "", where))
        elif statement.arg_name:  # not a macro's value
            self.uses.append(_Use(statement.selector, statement.arg_name, where))

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> str:
        """Takes ``@scope/name``."""
        del evaluate
        self.uses.append(_Use(scoped_configurable_name.split("/")[-1], "", self._where))
        # Gin's parser wants a value that can be a key of a dict.
        return scoped_configurable_name

    def macro(self, macro_name: str) -> str:
        """Takes ``%name``, which may be a constant of any module."""
        return macro_name


def _unreadable(error: Exception, text: str) -> str:
    """Returns what is wrong with a statement, and how to write it."""
    if isinstance(error, tokenize.TokenError):
        return "it ends in the middle of a value"
    line = (getattr(error, "text", None) or text).strip()
    if isinstance(error, SyntaxError) and error.__context__ is None:
        return f"line {error.lineno} cannot be read, {line!r}: {' '.join(error.msg.split())}"
    # Gin's parser has taken the token for a value.
    value = line.partition("=")[2].strip() or line
    return (
        f"{value} is no value. Text wants quotes, as in {value.strip()!r}; a number, True, None, a "
        "list, a reference (@name) and a macro (%name) have none."
    )


def _matches(selector: str, name: str) -> bool:
    return name == selector or name.endswith("." + selector)


def _suggestion(given: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(given, names, n=2)
    return f"; did you mean {' or '.join(close)}?" if close else ""
