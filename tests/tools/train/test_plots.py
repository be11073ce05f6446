from mtf_gradsync.tools.train import figures, plots

ROWS = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0, "other": 1}, {"step": 2, "held_out_nats": 2.5}]  # fmt: skip # noqa: E501


def test_draws_training_held_out_and_baseline(monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "as_svg", lambda figure, *names: drawn.append(figure) or "")
    (plot,) = plots.draw_plots(ROWS, unigram_nats=3.3)
    assert plot.title == "Loss"
    lines = {line.get_label(): line.get_ydata() for line in drawn[0].axes[0].get_lines()}
    assert list(lines["training"]) == [3.0, 2.0]
    assert list(lines["held out"]) == [2.5]
    assert set(lines["unigram baseline"]) == {3.3}
    # Placeholders, which the page replaces by its own colors.
    colors = {line.get_color() for line in drawn[0].axes[0].get_lines()}
    assert colors <= {figures.INK, *figures.SERIES}


def test_nothing_is_drawn_of_no_rows():
    assert plots.draw_plots([], unigram_nats=3.3) == []
