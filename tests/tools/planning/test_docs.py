"""The code in the guide runs."""

import pytest

from mtf_gradsync import xla
from mtf_gradsync.tools import planning
from tests import documents


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.skipif(bool(xla.why_no_tpu_compiler()), reason=xla.why_no_tpu_compiler())
def test_code_of_the_guide_runs():
    documents.run("docs/plan.md")


def test_the_guide_has_the_figures_of_the_table():
    text = (documents.ROOT / "docs" / "plan.md").read_text()
    for chip in planning.CHIPS:
        cells = [
            cell.strip()
            for cell in next(
                line for line in text.splitlines() if line.startswith(f"| {chip.name} |")
            ).split("|")
        ]
        assert float(cells[2].replace(",", "")) == chip.peak_flops / 1e12
        assert float(cells[4].replace(",", "")) == chip.hbm_bytes_per_second / 1e9
        assert int(cells[5]) == chip.links
        assert float(cells[6]) == chip.link_bytes_per_second / 1e9
        assert all(source in text for source in chip.sources if "scaling-book" not in source)
