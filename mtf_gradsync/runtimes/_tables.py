"""Text tables that are no wider than the terminal."""

from __future__ import annotations

import re
import shutil
import textwrap
from typing import Collection, NamedTuple, Sequence

#: The width of tables where output is no terminal, in characters.
WIDE = 160
# The least width of a column of text, in characters.
_LEAST = 16
_GAP = "  "
# A line of text may end after a space, and after signs that names contain.
_PIECES = re.compile(r"[^ /+;>]*[ /+;>]+|[^ /+;>]+")


def terminal_width() -> int:
    """Returns the number of characters in a line of output.

    The number is the value of the environment variable COLUMNS; without this variable, it is the
    width of the terminal; without a terminal, it is `WIDE`.
    """
    return shutil.get_terminal_size((WIDE, 24)).columns


def wrapped(lines: Sequence[str], width: int | None = None) -> list[str]:
    """Breaks lines that are longer than `width` between words; returns all lines of text.

    A line that continues a broken line has the same indentation as the broken line. `width` is the
    largest number of characters in a line; None takes `terminal_width()`.
    """
    width = width or terminal_width()
    short: list[str] = []
    for line in lines:
        if len(line) <= width:
            short.append(line)
            continue
        indent = " " * (len(line) - len(line.lstrip()))
        short += textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    return short


def text_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    text: Collection[str] = (),
    keys: int = 1,
    width: int | None = None,
) -> list[str]:
    """Returns the lines of a table that fits into the terminal. Figures are always shown whole.

    If a table is too wide, the words of its headers are written below each other. If the table is
    still too wide, its widest columns of text are broken into several lines. If that is not enough,
    the columns are divided over several tables, which are written below each other.

    Args:
      headers: a header for each column. Headers and cells may have several lines.
      rows: the cells of each row.
      text: headers of columns of text, which are aligned to the left and may be broken. All other
        columns are aligned to the right.
      keys: the number of columns that name a row. If the columns are divided over several tables,
        each table begins with these columns.
      width: the number of characters in a line; None for `terminal_width`.
    """
    width = width or terminal_width()
    cells = [[row[n] for row in rows] for n in range(len(headers))]
    columns = [_Column.of(h, c, h in text) for h, c in zip(headers, cells)]
    if _width(columns) > width:
        columns = [column.with_narrow_header() for column in columns]
    bands = _split_into_tables(columns, keys, width)
    tables = [_lines(_narrow_columns(band, width)) for band in bands]
    return [line for table in tables for line in ("", *table)][1:]


class _Column(NamedTuple):
    header: list[str]
    cells: list[list[str]]
    is_text: bool

    @classmethod
    def of(cls, header: str, cells: Sequence[str], is_text: bool) -> _Column:
        return cls(header.split("\n"), [cell.split("\n") for cell in cells], is_text)

    @property
    def width(self) -> int:
        return max(len(line) for lines in (self.header, *self.cells) for line in lines)

    def with_narrow_header(self) -> _Column:
        words = [word for line in self.header for word in line.split(" ")]
        room = max([*map(len, words), *(len(line) for cell in self.cells for line in cell)])
        return self._replace(header=_break_lines(self.header, room, indent=""))

    def within(self, width: int) -> _Column:
        return self._replace(cells=[_break_lines(cell, width) for cell in self.cells])


def _break_lines(lines: Sequence[str], width: int, indent: str = " ") -> list[str]:
    """Returns the lines of a cell, broken into lines of at most `width` characters.

    `indent` is the text at the beginning of each line that continues a broken line.
    """
    made = []
    for line in lines:
        pieces, current = _PIECES.findall(line), ""
        while pieces:
            piece = pieces.pop(0)
            if len((current + piece).rstrip()) <= width:
                current += piece
            elif current.strip():
                made.append(current.rstrip())
                current, pieces = indent, [piece, *pieces]
            else:
                room = width - len(current)
                current, pieces = current + piece[:room], [piece[room:], *pieces]
        made.append(current.rstrip())
    return made


def _width(columns: Sequence[_Column]) -> int:
    return sum(column.width for column in columns) + len(_GAP) * (len(columns) - 1)


def _narrowest(column: _Column) -> _Column:
    return column.within(max(_LEAST, *map(len, column.header))) if column.is_text else column


def _split_into_tables(columns: list[_Column], keys: int, width: int) -> list[list[_Column]]:
    """Splits columns into as few tables of at most `width` characters as possible.

    The result has a list of columns for each table. Each table begins with the first `keys`
    columns.
    """
    bands: list[list[_Column]] = []
    for column in columns:
        band = [*bands[-1], column] if bands else [column]
        if len(band) <= keys + 1 or _width([_narrowest(c) for c in band]) <= width:
            bands[-1:] = [band]
        else:
            bands.append([*columns[:keys], column])
    return bands


def _narrow_columns(columns: Sequence[_Column], width: int) -> list[_Column]:
    """Narrows the widest columns of text until all fit into `width`; returns all columns.

    If the columns do not fit even at their smallest widths, they are returned with these widths.
    """
    fitted = list(columns)
    while _width(fitted) > width:
        left = [n for n, c in enumerate(fitted) if c.is_text and _narrowest(c).width < c.width]
        if not left:
            break
        widest = max(left, key=lambda n: fitted[n].width)
        fitted[widest] = columns[widest].within(fitted[widest].width - 1)
    return fitted


def _lines(columns: Sequence[_Column]) -> list[str]:
    widths = [column.width for column in columns]
    headers = [column.header for column in columns]
    height = max(map(len, headers))
    rows = [[[""] * (height - len(h)) + h for h in headers], [["-" * w] for w in widths]]
    rows += [list(row) for row in zip(*(column.cells for column in columns))]
    lines = []
    for row in rows:
        for number in range(max(map(len, row))):
            parts = [cell[number] if number < len(cell) else "" for cell in row]
            aligned = [
                part.ljust(w) if column.is_text else part.rjust(w)
                for part, w, column in zip(parts, widths, columns)
            ]
            lines.append(_GAP.join(aligned).rstrip())
    return lines
