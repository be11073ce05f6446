"""Figures of matplotlib: their colors, PNG files, and SVG for the page."""

from __future__ import annotations

import html
import importlib.util
import io
import re
from pathlib import Path
from typing import Any

from mtf_gradsync.runtimes._common import ConfigError, install_extra, write_bytes


def check_library(library: str, work: str) -> None:
    """Raises a ConfigError if a library of the train extra is missing, without importing it.

    `work` is a text for the error's message: what needs the library, such as "a plot".
    """
    if importlib.util.find_spec(library) is None:
        raise ConfigError(f"{work} needs {library}: {install_extra('train')}")


def check_drawing() -> None:
    """Imports matplotlib; raises a ConfigError if that fails, so that pictures cannot be drawn."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            f"Drawing pictures needs matplotlib ({error}): {install_extra('train')}"
        ) from error


# The width of a page's column on a telephone, where letters then have their own size.
WIDTH = 5.2


def new_figure(width: float = WIDTH, height: float = 2.7) -> Any:
    """Returns an empty figure, sized in inches; by default as wide as a column of a run's page.

    Raises a ConfigError without matplotlib.
    """
    check_drawing()
    # Not pyplot: its state would outlive the call, and its backend is the program's choice.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(path: Path, figure: Any) -> None:
    """Writes a figure as a PNG file, atomically."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    write_bytes(path, content.getvalue())


# Placeholders for the page's colors (letters and axes, the grid, lines and bars): figures are
# drawn in these colors, and `as_svg` replaces them.
INK, _GRID = "#010203", "#010204"
SERIES = tuple(f"#0102{n:02x}" for n in range(0x10, 0x18))
_ON_PAGE = {
    INK: "currentColor",
    _GRID: "var(--grid)",
    **{color: f"var(--series-{number})" for number, color in enumerate(SERIES, 1)},
}


def page_style() -> Any:
    """Returns a context manager in which figures get the colors and letters of a run's page.

    Figures for `as_svg` have to be drawn inside the context manager's block.
    """
    import matplotlib

    return matplotlib.rc_context(
        {
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "font.size": 9,
            "grid.color": _GRID,
            "legend.frameon": False,
            "svg.fonttype": "none",
            "svg.hashsalt": "mtf_gradsync",
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
        }
    )


def as_svg(drawn: Any, prefix: str, description: str) -> str:
    """Returns a figure that was drawn within `page_style` as an ``svg`` element of a page.

    The names of the element's parts begin with `prefix`, which has to differ for each figure of a
    page. `description` is a text for readers who cannot see the figure.
    """
    content = io.StringIO()
    drawn.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    text = content.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{prefix}-", text)
    for color, on_page in _ON_PAGE.items():
        text = text.replace(color, on_page)
    label = html.escape(description)
    # The size is the page's business; the viewBox keeps the proportions.
    return re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>',
        rf'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" \1 '
        rf'role="img" aria-label="{label}">',
        text,
        count=1,
    )
