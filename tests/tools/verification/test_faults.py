"""Faults that public reports describe are found: the variable, the factor, what brings it in."""

import functools

import pytest

import mtf_gradsync.tools.verification as verification
from tests.tools.verification.faults import FAULTS, MESH, batches

# The others take seconds.
QUICK = ("a loss per shard that is summed", "K without division")


def verified(name, wrong):
    fault = FAULTS[name]
    return verification.verify(
        functools.partial(fault.program, wrong=wrong),
        batches,
        [{**MESH, **more} for more in fault.params or ({},)],
        divisions=(),
        runtime=fault.runtime,
    )


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in FAULTS]
)
@pytest.mark.mostly_slow
def test_it_is_found(name):
    fault, found = FAULTS[name], verified(name, True)
    line = next(line for line in found.lines if line.verdict == "NOT EQUAL")
    assert (line.variable, line.what) == (fault.variable, fault.what), str(found)
    assert line.factor == (fault.factor and pytest.approx(fault.factor, rel=1e-4)), str(found)
    assert fault.of_factor in line.of_factor, str(found)
    assert line.brought_in_by == fault.brought_in_by, str(found)
    assert fault.cause in line.cause, str(found)
    assert not found.is_equal


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_it_is_not_found_where_it_is_not(name):
    found = verified(name, False)
    assert found.is_equal, str(found)
    assert {line.verdict for line in found.lines} == {"equal"}, str(found)
