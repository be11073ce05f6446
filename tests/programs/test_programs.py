"""Programs in the manner of real ones train by each wrapper as in numpy, on each runtime."""

import pytest

from tests.programs import compared, seq2seq, table
from tests.programs.table import marked
from tests.programs.wrappers import WRAPPERS


@pytest.mark.parametrize(
    ("style", "wrapper", "runtime"), [marked(cell) for cell in table.selected()]
)
@pytest.mark.mostly_slow
def test_it_trains_as_the_reference(style, wrapper, runtime):
    styles = table.STYLES[style]
    compared.check(styles, (wrapper,) * len(styles), runtime)


@pytest.mark.parametrize("style", table.REFUSED)
def test_what_makes_no_sense_is_an_error(style):
    for wrapper in WRAPPERS:
        if errors := table.refused(style, wrapper):
            with pytest.raises(ValueError, match="|".join(f"(?:{error})" for error in errors)):
                compared.built(table.STYLES[style], (wrapper,), True)


@pytest.mark.parametrize("kind", ["placement", "simd"])
@pytest.mark.slow
def test_two_meshes_have_a_wrapper_each(kind):
    """Applied pair by pair, which are gathered by mesh."""
    by_pairs = [s._replace(apply=seq2seq.pair_by_pair) for s in table.STYLES["two_meshes"]]
    compared.check(tuple(by_pairs), ("local", "replicas"), kind)


def test_the_selection_has_each_of_two_in_it():
    selected = list(table.selected())
    whole = [
        cell
        for cell in table.whole()
        if cell.style not in table.BEYOND and (cell.wrapper != "bare" or cell.style in table.BARE)
    ]

    def pairs(cells):
        for style, wrapper, runtime in cells:
            yield style, runtime
            for part in WRAPPERS[wrapper].parts:
                yield from ((style, part), (part, runtime))

    assert set(pairs(selected)) >= set(pairs(whole))
    assert set(selected) < set(table.whole())
