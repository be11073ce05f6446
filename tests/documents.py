"""The code in the README and the guides: found, run, and compared with the output on the page."""

from __future__ import annotations

import contextlib
import doctest
import gc
import io
import json
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mtf_gradsync import xla
from mtf_gradsync._private.libraries import ESTIMATOR_AVAILABLE, tf

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# A page explains a warning by quoting a part of it.
_QUOTED = re.compile(r'"([^"\n]{20,})"|`([^`\n]{20,})`')
# What the first line of a block may ask for: "# needs tf.estimator".
_NEEDS = {
    "tf.estimator": lambda: ESTIMATOR_AVAILABLE,
    "jax": lambda: not xla.why_no_xla(),
}


class Block(NamedTuple):
    """A fenced block.

    Attributes:
      language: what stands behind the fence.
      code: what stands inside.
      printed: the text block right behind it, or None.
      place: for error messages.
    """

    language: str
    code: str
    printed: str | None
    place: str


def blocks(path: str | Path, language: str = "python") -> list[Block]:
    """The fenced blocks of a document, by its path in the repository."""
    document = ROOT / path
    text = document.read_text(encoding="utf-8")
    found = list(_FENCE.finditer(text))
    made = []
    for block, behind in zip(found, [*found[1:], None]):
        if block[1] != language:
            continue
        between = text[block.end() : behind.start()] if behind else ""
        shown = behind and behind[1] == "text" and not between.strip()
        line = text.count("\n", 0, block.start()) + 1
        place = f"{document.relative_to(ROOT)}, line {line}"
        made.append(Block(language, block[2], behind[2] if shown else None, place))
    return made


def run(path: str | Path, unexplained: Sequence[str] = ()) -> dict[str, object]:
    """Runs a document's Python blocks one after the other, as a reader would type them.

    Args:
      path: the document's path in the repository.
      unexplained: parts of warnings to accept although the page does not quote them.

    Returns:
      The names that the blocks leave behind.

    Raises:
      AssertionError: a block prints something else than the text block behind it, or logs a warning
        that the page does not explain.
    """
    names: dict[str, object] = {}
    # What earlier tests have left is not the page's.
    gc.collect()
    quoted = [a or b for a, b in _QUOTED.findall((ROOT / path).read_text(encoding="utf-8"))]
    expected = [*quoted, *unexplained]
    with _warnings() as logged:
        for block in blocks(path):
            need = re.match(r"# needs (\S+)", block.code)
            if need and not _NEEDS[need[1]]():
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block.code, block.place, "exec"), names)
            unexpected = [text for text in logged if not any(part in text for part in expected)]
            assert not unexpected, f"{block.place}: logs {unexpected}"
            if block.printed is not None:
                got = printed.getvalue()
                same = doctest.OutputChecker().check_output(block.printed, got, _SAME)
                assert same, f"{block.place}: printed\n{got}and not\n{block.printed}"
    return names


def cells(path: str | Path) -> list[Block]:
    """The code cells of a notebook, by its path in the repository."""
    notebook = json.loads((ROOT / path).read_text(encoding="utf-8"))
    return [
        Block("python", "".join(cell["source"]), None, f"{path}, cell {number}")
        for number, cell in enumerate(notebook["cells"])
        if cell["cell_type"] == "code"
    ]


def is_not_of_garbage(record: logging.LogRecord) -> bool:
    """The filter of TensorFlow's logger in all tests, but while a page runs.

    TensorFlow logs that an operation was never used when it is collected, in whatever test runs.
    """
    return "Object was never used" not in str(record.msg)


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collects the warnings that TensorFlow, Mesh-TensorFlow and this package log meanwhile."""
    logged: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    collector = Collector(logging.WARNING)
    # Mesh-TensorFlow logs by TensorFlow's logger.
    loggers = [logging.getLogger(name) for name in ("tensorflow", "mtf_gradsync")]
    verbosity = tf.logging.get_verbosity()
    tf.logging.set_verbosity(tf.logging.WARN)
    for logger in loggers:
        logger.addHandler(collector)
    loggers[0].removeFilter(is_not_of_garbage)
    try:
        yield logged
    finally:
        loggers[0].addFilter(is_not_of_garbage)
        for logger in loggers:
            logger.removeHandler(collector)
        tf.logging.set_verbosity(verbosity)
