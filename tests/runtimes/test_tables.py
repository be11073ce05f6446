"""Tables fit into the terminal, and no figure is cut."""

import re

import pytest

from mtf_gradsync.runtimes._tables import WIDE, terminal_width, text_table, wrapped

NAME = "transformer/decoder/block_000/layer_000/self_attention/q"
HEADERS = ("ops", "bytes", "variables", "at", "GB touched", "estimate ms")
ROWS = [
    ("5", "1,234,567,890", f"{NAME}, w and 3 more", "sum_gradients", "0.04457", "0.01612"),
    ("1", "512", "w", "transformer/stack_000/layer_000/add_1", "1,544", "10,612.3"),
]
TEXT = ("variables", "at")


def test_a_table_that_fits_is_in_one_piece():
    assert text_table(["what", "MB\nms"], [("a", "1"), ("bcdef", "23")], ["what"]) == [
        "       MB",
        "what   ms",
        "-----  --",
        "a       1",
        "bcdef  23",
    ]
    assert text_table(["what", "MB"], []) == ["what  MB", "----  --"]


def test_the_widest_text_is_broken_behind_the_parts_of_names():
    assert text_table(HEADERS[:4], ROWS, TEXT, width=72) == [
        "ops          bytes  variables                   at",
        "---  -------------  --------------------------  ----------------------",
        "  5  1,234,567,890  transformer/decoder/        sum_gradients",
        "                     block_000/layer_000/",
        "                     self_attention/q, w and 3",
        "                     more",
        "  1            512  w                           transformer/stack_000/",
        "                                                 layer_000/add_1",
    ]


@pytest.mark.parametrize("width", range(34, 200, 7))
def test_no_line_is_too_long_and_all_is_there(width):
    lines = text_table(HEADERS, ROWS, TEXT, width=width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for row in ROWS:
        assert {row[n] for n in (0, 1, 4, 5)} <= set(words)
    # The characters of names are all there, apart or together.
    assert all(part in words or part in "".join(words) for part in re.split("/|, ", NAME))


def test_columns_of_figures_that_do_not_fit_come_in_several_tables():
    headers = ["mesh", "on", *(f"figure {n}" for n in range(6))]
    rows = [("batch:8;model:1", "v5e:2x4", *(f"{n},000,000" for n in range(6)))]
    lines = text_table(headers, rows, ("mesh", "on"), keys=2, width=60)
    assert max(map(len, lines)) <= 60
    assert sum(line.startswith("batch:8;model:1  v5e:2x4") for line in lines) == 2
    assert lines.count("") == 1


def test_the_width_is_the_terminal_s(monkeypatch):
    monkeypatch.setenv("COLUMNS", "77")
    assert terminal_width() == 77
    wide = [("x" * 50, "y" * 50)]
    assert max(map(len, text_table("ab", wide, "ab"))) <= 77
    # pytest's output is no terminal.
    monkeypatch.delenv("COLUMNS")
    assert terminal_width() == WIDE


def test_text_that_is_too_wide_ends_between_words_and_keeps_its_indent():
    lines = ["a  table   row", "  batch:4;model:2: it does not fit into the memory", "", "x" * 30]
    assert wrapped(lines, 20) == [
        "a  table   row",
        "  batch:4;model:2:",
        "  it does not fit",
        "  into the memory",
        "",
        "x" * 30,
    ]
    assert wrapped(lines, 60) == lines
