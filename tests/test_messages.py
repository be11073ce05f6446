"""Holds simple rules for every message that the package raises, warns or logs."""

import ast
import functools
import re
from pathlib import Path
from typing import Iterator, NamedTuple

import pytest

import mtf_gradsync

_PACKAGE = Path(mtf_gradsync.__file__).parent

_BANNED = re.compile(
    r"\b(left out|le(ave|aves|aving) out|sits? out|cross(es)? the mesh|made whole|summed up"
    r"|(told|tells?) apart|hand(s|ed)? on)\b"
)
# They become a part of another message.
_QUOTED = {
    "ArgumentTypeError",
    "ConnectionBroken",
    "ConnectionRefusedError",
    "DamagedObjectError",
    "OtherTensorsError",
}
# Names that are written small, besides those of arguments.
_SMALL = {"gin", "jax", "lowering", "mode", "module"}
# There is no value to show in them.
_NOTHING_TO_SHOW = (
    "Give at least one --gin_file",
    "In a TPU program all cores share",
    "The graph has no variables",
    "A wrapper's operation is lowered before",
    "The input_fn of the evaluation gave no batch",
    "This Python has no pydoc_data",
    "jax finds no cluster",
    "join_cluster got no cluster",
    "watch_copies finds no mtf.Lowering",
    "SyncReplicasOptimizer updates on the parameter server",
)
_LOGGED = {"debug", "info", "warning", "error", "exception", "warn"}


class Message(NamedTuple):
    """A message in the package's source; "{}" stands for what is filled in."""

    path: str
    line: int
    kind: str
    text: str
    names: set

    def __str__(self):
        return f"{self.path}:{self.line}: {self.kind}: {self.text}"


def _text(node):
    """The text of a literal, with "{}" for each value; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(v) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return None if left is right is None else f"{left or '{}'}{right or '{}'}"
    return None


def _argument(call):
    """What kind of message a call makes, and the argument that is its text."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name.endswith(("Error", "ConnectionBroken")) and len(call.args) == 1:
        return name, call.args[0]
    if name == "warn_once":
        return name, call.args[1]
    if name in _LOGGED and isinstance(call.func, ast.Attribute) and call.args:
        return name, call.args[0]
    return name, None


def _names(node):
    arguments = {a.arg for f in ast.walk(node) if isinstance(f, ast.arguments) for a in _all(f)}
    fields = {f.target.id for c in ast.walk(node) if isinstance(c, ast.ClassDef) for f in c.body
              if isinstance(f, ast.AnnAssign)}  # fmt: skip
    return arguments | fields


def _all(arguments):
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _messages() -> Iterator[Message]:
    for file in sorted(_PACKAGE.rglob("*.py")):
        path = file.relative_to(_PACKAGE).as_posix()
        tree = ast.parse(file.read_text())
        names = _names(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                kind, argument = _argument(node)
                text = None if argument is None else _text(argument)
                if text is not None:
                    yield Message(path, node.lineno, kind, text, names)


@functools.lru_cache(maxsize=None)
def messages() -> list[Message]:
    """All of the package. To find them is no work for processes that have other tests."""
    return list(_messages())


def _begins_well(message):
    """Whether it begins with a capital letter, a value, or the name of something."""
    first = re.match(r"[^\s:;,]*", message.text).group()
    return (
        message.kind in _QUOTED
        or not first[:1].islower()
        or re.search(r"[_.={}]", first) is not None
        or first in message.names | _SMALL
    )


def test_they_are_found():
    kinds = {m.kind for m in messages()}
    assert len(messages()) > 300
    assert {"ValueError", "TypeError", "ConfigError", "warning", "warn_once", "info"} <= kinds


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(_begins_well, id="begins with a capital letter or a name"),
        pytest.param(lambda m: "  " not in m.text and m.text == m.text.strip(), id="single spaces"),
        pytest.param(lambda m: not _BANNED.search(m.text), id="plain words"),
        pytest.param(
            lambda m: (
                m.kind not in ("ConfigError", "TypeError", "ValueError")
                or "{}" in m.text
                or "got None" in m.text
                or m.text.startswith(_NOTHING_TO_SHOW)
            ),
            id="shows what was given",
        ),
    ],
)
def test_rules(rule):
    broken = [str(m) for m in messages() if not rule(m)]
    assert not broken, "\n".join(["", *broken])
