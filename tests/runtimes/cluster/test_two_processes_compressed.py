"""Compressed sums of gradients over two processes: what they send, and that both have the same."""

import math

import pytest

from tests.runtimes.cluster import compressed_program as program

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
# A copy of each gradient goes each way.
FLOAT32 = 2 * 4 * sum(map(math.prod, program.SHAPES))


@pytest.fixture
def found(of_two_processes):
    """What the program found, by strategy."""
    return of_two_processes["compressed"]


def test_both_processes_have_the_same_sums(found):
    assert all(one["same"] for one in found.values())
    for name, largest in (("8 bits", 127), ("4 bits", 7)):
        for off, size in zip(found[name]["off"], found[name]["largest"]):
            # Half a scale of each core's number, and of a sum of up to twice the size.
            assert 0 < off <= (0.5 + 0.5 + 1) * 1.01 * size / largest


def test_edges_and_sockets_carry_what_is_promised(found):
    rows = sum(sum(shape) for shape in program.SHAPES if len(shape) == 2)
    whole = sum(math.prod(shape) for shape in program.SHAPES if len(shape) == 1)
    expected = {
        "float32": FLOAT32,
        # 258 and 130 bytes for 256 numbers.
        "8 bits": FLOAT32 * 258 / 1024,
        "4 bits": FLOAT32 * 130 / 1024,
        "low rank": 2 * 4 * (program.RANK * rows + whole),
    }
    for name, one in found.items():
        assert one["edges"] == expected[name], name
        if one["sockets"] is not None:
            # With what describes them: some hundred bytes for each of up to a dozen tensors.
            assert one["edges"] < one["sockets"] < one["edges"] + 12_000, name
    assert found["8 bits"]["edges"] <= 0.27 * found["float32"]["edges"]
