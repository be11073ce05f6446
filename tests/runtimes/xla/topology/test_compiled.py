"""What is said about a compiled program; needs no compiler."""

import json

import pytest

from mtf_gradsync import xla
from mtf_gradsync.runtimes.xla.topology.chips import Rates
from mtf_gradsync.runtimes.xla.topology.estimate import CostEstimate

GIB = 2**30


def all_reduce(size, *inside):
    return xla.HloCollective("all-reduce", "r", size, (), "main", inside)


def compiled(**changes):
    facts = {
        "topology": "v3:2x2",
        "device_kind": "TPU v3",
        "num_replicas": 8,
        "error": "",
        "before": (all_reduce(1000), all_reduce(500, "branch true of c", "body of w")),
        "after": (all_reduce(1500),),
        "after_unsharded": (xla.HloCollective("all-gather", "g", 8, (), "main", ()),),
        "memory": xla.CoreMemory(9 * GIB, 5 * GIB, 4 * GIB, 1024, 0),
        "seconds": 1.25,
    }
    return xla.CompiledProgram(**{**facts, **changes})


def test_an_accepted_program_as_text():
    assert str(compiled()).splitlines() == [
        "topology v3:2x2 (TPU v3), 8 cores",
        "accepted, compiled in 1.2 s",
        "",
        "collectives  before optimization         compiled  compiled, update not split",
        "-----------  -------------------  ---------------  --------------------------",
        "all-reduce       2 (1,500 bytes)  1 (1,500 bytes)                 0 (0 bytes)",
        "all-gather           0 (0 bytes)      0 (0 bytes)                 1 (8 bytes)",
        "in branches                    1                0                           0",
        "in loops                       1                0                           0",
        "",
        "memory per core                            bytes",
        "--------------------------------  --------------",
        "arguments (variables and inputs)   9,663,676,416",
        "outputs                            5,368,709,120",
        "outputs written over arguments    -4,294,967,296",
        "temporaries                                1,024",
        "code                                           0",
        "total                             10,737,419,264",
        "of a core's memory: v2 134%, v3 64.6%, v4 32.5%, v5e 63.5%, v5p 10.4%, v6e 32%, "
        "tpu7x 10.6%",
        "does not fit on: v2",
    ]


def test_a_program_that_fits_everywhere_says_so():
    small = compiled(memory=xla.CoreMemory(1, 1, 1, 1, 0))
    assert str(small).splitlines()[-1] == "fits on all of these"


def test_a_refused_program_as_text():
    refused = compiled(error="the TPU compiler: no", after=(), after_unsharded=(), memory=None)
    assert str(refused).splitlines()[1:4] == [
        "refused: the TPU compiler: no",
        "",
        "collectives  before optimization",
    ]
    assert not refused.accepted
    assert refused.fits() == {}
    assert json.loads(refused.to_json())["accepted"] is False


def test_json_has_what_is_computed_too():
    content = json.loads(compiled().to_json())
    assert content["accepted"] is True
    assert content["memory"]["total"] == 10 * GIB + 1024
    assert content["fits"]["v2"] is False
    assert content["fits"]["v3"] is True
    assert content["before"][1]["inside"] == ["branch true of c", "body of w"]


@pytest.mark.parametrize(
    ("estimates", "line"),
    [
        (
            {"step": 1.1, "bare": 1.0},
            "A step with an update takes 10% more than the bare optimizer's.",
        ),
        (
            {"step": 0.5, "conditions_true": 1.5, "bare": 1.0},
            "A step with an update takes 50% more",
        ),
        ({"step": 1.01, "bare": 1.0}, None),
        ({"step": 1.5}, None),
    ],
)
def test_a_step_that_is_dearer_than_the_bare_one_is_said_to_be(estimates, line):
    costs = {name: CostEstimate(1.0, 1.0, seconds) for name, seconds in estimates.items()}
    text = str(compiled(estimates=costs))
    assert ("A step with an update takes" in text) is (line is not None)
    assert line is None or line in text


def test_times_in_doubt_and_their_source_are_named():
    rates = Rates(flops=1e9, bytes=1e6)
    right = CostEstimate(1e6, 1e6, 1.5, rates=rates)
    wrong = CostEstimate(1e6, 1e6, 0.5, 2, ("kernel",), rates=rates)
    lines = str(compiled(estimates={"step": right, "bare": wrong})).splitlines()
    assert "us by roofline" in " ".join(" ".join(lines).split())
    assert (
        "bare optimizer: do not trust the time, which is below its roofline of 1e+03 ms." in lines
    )
    assert "bare optimizer: 2 custom calls count with their bytes alone (kernel)." in lines
    assert not any(line.startswith("step: ") for line in lines)
    # With conditionals no branch takes time here, and libtpu may count its operations.
    both = compiled(estimates={"step": wrong, "conditions_true": right})
    assert "do not trust" not in str(both)


def test_an_estimate_that_the_compiler_refused_is_named_with_the_reason():
    costs = {"step": CostEstimate(1.0, 1.0, 1.0)}
    refused = compiled(estimates=costs, not_estimated={"bare": "needs 20 GB of 16"})
    assert str(refused).splitlines()[-1] == "bare optimizer: refused: needs 20 GB of 16"
    assert json.loads(refused.to_json())["not_estimated"] == {"bare": "needs 20 GB of 16"}
