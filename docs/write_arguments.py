"""Writes the arguments of each wrapper into its page: python docs/write_arguments.py.

A page has a line ``<!-- arguments of NAME -->`` where the table begins, and ``<!-- end -->`` where
it ends. What stands between them comes from the docstring of the class's constructor.
"""

from __future__ import annotations

import inspect
import pathlib
import re
from typing import Any

import mtf_gradsync as gs

DOCS = pathlib.Path(__file__).parent
_TABLE = re.compile(r"<!-- arguments of (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)
# An argument's line in a Google-style section "Args:", and what follows it, which is indented more.
_ARGUMENT = re.compile(r"^(\*{0,2}\w+): (.*?)(?=^\*{0,2}\w+: |\Z)", re.DOTALL | re.MULTILINE)
_HEAD = "| argument | default | what it is |\n|---|---|---|\n"


def table(name: str) -> str:
    """Returns the Markdown table of a class's arguments.

    Args:
      name: the class's name in `mtf_gradsync`.

    Raises:
      ValueError: an argument of the constructor is not in its docstring.
    """
    init = getattr(gs, name).__init__
    section = inspect.cleandoc(init.__doc__).partition("Args:\n")[2]
    section = inspect.cleandoc(re.split(r"^\w+:$", section, flags=re.MULTILINE)[0])
    described = {n: " ".join(text.split()) for n, text in _ARGUMENT.findall(section)}
    rows = []
    for parameter in list(inspect.signature(init).parameters.values())[1:]:
        if parameter.name not in described:
            raise ValueError(f"The docstring of {name}.__init__ does not have {parameter.name!r}.")
        text = described[parameter.name].replace("|", "\\|")
        rows.append(f"| `{parameter.name}` | {_default(parameter)} | {text} |\n")
    return _HEAD + "".join(rows)


def _default(parameter: inspect.Parameter) -> str:
    value: Any = parameter.default
    if value is inspect.Parameter.empty or "REQUIRED" in repr(value):
        return "required"
    # An object without a value to show, which stands for "not given".
    return "" if repr(value).startswith("<") else f"`{value!r}`"


def written(text: str) -> str:
    """Returns a page's text with its tables made anew."""
    return _TABLE.sub(lambda m: f"<!-- arguments of {m[1]} -->\n{table(m[1])}<!-- end -->", text)


def pages() -> dict[str, pathlib.Path]:
    """Returns the page of each class that has its arguments on one."""
    found = {}
    for page in sorted(DOCS.glob("*.md")):
        for name, _ in _TABLE.findall(page.read_text(encoding="utf-8")):
            found[name] = page
    return found


if __name__ == "__main__":
    for path in set(pages().values()):
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
