"""Converts matplotlib figures to SVG with the colors and the font of the page."""

from __future__ import annotations

import html
import io
import re
from typing import Any

from mtf_gradsync.train.files import new_figure

# Placeholders of the page's colors: drawn in these, replaced in the file.
INK, GRID = "#010203", "#010204"
SERIES = tuple(f"#0102{number:02x}" for number in range(0x10, 0x18))
_ON_PAGE = {
    INK: "currentColor",
    GRID: "var(--grid)",
    **{color: f"var(--series-{number})" for number, color in enumerate(SERIES, 1)},
}
_STYLE = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.color": GRID,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "mtf_gradsync",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
# The width of a page's column on a telephone, where letters then have their own size.
WIDTH = 5.2


def style() -> Any:
    """Returns a context manager in which to draw figures for `as_svg`."""
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def figure(height: float = 2.7) -> Any:
    """Returns an empty figure as wide as a column; height in inches."""
    return new_figure(WIDTH, height)


def as_svg(drawn: Any, prefix: str, description: str) -> str:
    """Returns a figure that was drawn within `style` as an ``svg`` element of a page.

    The prefix of elements' names differs for each figure of a page; the description is for readers
    who do not see it.
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
