from pathlib import Path

import pytest

from mtf_gradsync.tools.train import report
from mtf_gradsync.tools.train.figures import PAPER
from mtf_gradsync.tools.train.plots import plot_losses

ROWS = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0, "other": 1}, {"step": 2, "held_out_nats": 2.5}]  # fmt: skip # noqa: E501


@pytest.mark.parametrize("rows", [ROWS, []])
def test_writes_a_png_and_nothing_else(tmp_path, rows):
    path = tmp_path / "loss.png"
    plot_losses(rows, path, unigram_nats=3.3, title="a run")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 5000
    assert list(tmp_path.iterdir()) == [path]


def test_draws_training_held_out_and_baseline(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **kw: drawn.append(self))
    plot_losses(ROWS, tmp_path / "loss.png", unigram_nats=3.3)
    (axes,) = drawn[0].axes
    lines = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    assert list(lines["training"]) == [3.0, 2.0]
    assert list(lines["held out"]) == [2.5]
    assert set(lines["unigram baseline"]) == {3.3}
    # The page's colors by day, and none of the placeholders that its SVG has.
    page = Path(report.__file__).with_name("page.html.jinja").read_text()
    by_day = page[page.index(":root") : page.index("@media")]
    assert all(f": {color};" in by_day for color in (PAPER.grid, PAPER.ink, *PAPER.series))
    assert {line.get_color() for line in axes.get_lines()} <= {PAPER.ink, *PAPER.series}
