"""Every program, wrapper and runtime of the table: `make programs`. It takes some minutes."""

import pytest

from tests.programs import compared, table
from tests.programs.table import marked


@pytest.mark.parametrize(("style", "wrapper", "runtime"), [marked(cell) for cell in table.whole()])
def test_it_trains_as_the_reference(style, wrapper, runtime):
    styles = table.STYLES[style]
    compared.check(styles, (wrapper,) * len(styles), runtime)
