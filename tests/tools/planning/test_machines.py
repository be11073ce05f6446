"""Plans with the real compiler for TPUs."""

from types import SimpleNamespace

import pytest

import mtf_gradsync as gs
from mtf_gradsync import xla
from mtf_gradsync.runtimes.xla.topology.compiled import CoreMemory
from mtf_gradsync.runtimes.xla.topology.compiling import LoweredProgram
from mtf_gradsync.runtimes.xla.topology.estimate import CostEstimate
from mtf_gradsync.tools import planning
from mtf_gradsync.tools.planning import machines
from mtf_gradsync.tools.planning.machines import StepCost, TpuMachine
from tests.tools.planning.machines import LAYOUT, build

no_compiler = xla.why_no_tpu_compiler()


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.skipif(bool(no_compiler), reason=no_compiler)
def test_a_plan_for_tpus():
    plan = planning.plan(build, "v5e:2x2,v5p:2x2x1", LAYOUT, jobs=2)
    assert [(r.mesh_shape, r.machine) for r in plan.refused] == []
    found = {(row.machine, row.mesh_shape): row for row in plan.rows}
    shapes = ("batch:4;model:1", "batch:2;model:2", "batch:1;model:4")
    assert set(found) == {(m, shape) for m in ("v5e:2x2", "v5p:2x2x1") for shape in shapes}
    for row in found.values():
        assert row.fits
        assert row.flops > 0
        assert 0 < row.estimate_seconds < row.step_seconds
        assert row.step_seconds == row.estimate_seconds + row.link_seconds
        assert row.tokens_per_second == 12 / row.step_seconds
    # The gradient of w, 8 x 8 floats and the loss.
    (along,) = found["v5e:2x2", "batch:4;model:1"].traffic
    assert (along.axis, along.bytes_per_core) == ("batch", 4 * 8 * 8 + 4)


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.skipif(bool(no_compiler), reason=no_compiler)
def test_the_more_steps_an_update_has_the_more_tokens_a_second():
    rates = []
    for steps in (2, 8):

        def accumulating(shape, layout, steps=steps):
            axes = {"mesh_shape": shape, "layout": layout}
            built = build(
                shape, layout, wrap=lambda opt: gs.GradientAccumulationOptimizer(opt, steps, **axes)
            )
            return built._replace(steps_per_update=steps)

        (row,) = planning.plan(accumulating, "v5e:2x2", LAYOUT, ["batch:4;model:1"]).rows
        assert row.is_of_update
        # Without an update only the loss, a number, is reduced: it takes six hops.
        assert row.skipped_step_seconds < row.step_seconds
        mean = (row.step_seconds + (steps - 1) * row.skipped_step_seconds) / steps
        assert row.mean_step_seconds == pytest.approx(mean)
        rates.append(row.tokens_per_second)
    assert rates[0] < rates[1]


@pytest.mark.tpu
@pytest.mark.skipif(bool(no_compiler), reason=no_compiler)
@pytest.mark.slow
def test_what_is_given_twice_is_planned_once():
    plan = planning.plan(build, "v5e:2x2,v5e:2x2", [LAYOUT, LAYOUT], ["batch:8", "batch:8"])
    assert [r.mesh_shape for r in plan.refused] == ["batch:8"]


@pytest.mark.tpu
@pytest.mark.skipif(bool(no_compiler), reason=no_compiler)
@pytest.mark.slow
def test_places_are_those_of_libtpu():
    machine = TpuMachine("v3:2x2")
    assert machine.cores == 8
    assert machine.peak_flops_per_core == 123e12 / 2
    # Cores of one chip follow each other.
    assert machine.seconds("all-reduce", [[0, 1], [2, 3], [4, 5], [6, 7]], 1e9) == 0
    assert machine.seconds("all-reduce", [[0, 2], [1, 3]], 1e9) > 0


def test_between_slices_the_cores_of_a_chip_share_what_it_sends(monkeypatch):
    # Two slices of two chips of two cores.
    places = [(x, 0, 0, core) for x in range(2) for core in range(2)]
    monkeypatch.setattr(machines, "places_of", lambda topology: tuple(places * 2))
    machine = TpuMachine("2xv3:2x1", 1e9)
    assert (machine.cores, machine.slices, machine.chips) == (8, 2, 4)
    counterparts = [[0, 4], [1, 5], [2, 6], [3, 7]]
    # 2 * 1/2 of a GB, of two cores.
    assert machine.seconds("all-reduce", counterparts, 1e9) == pytest.approx(2.0)
    assert machine.seconds("all-to-all", counterparts, 1e9) == pytest.approx(1.0)
    # Within a slice it is the torus, whichever slice it is.
    groups = [[0, 2], [1, 3]], [[4, 6], [5, 7]]
    first, second = (machine.seconds("all-reduce", group, 82e6) for group in groups)
    assert first == second == pytest.approx(2e-3)
    with pytest.raises(ValueError, match=r"The 2 slices of '2xv3:2x1' .*give what a chip sends"):
        TpuMachine("2xv3:2x1")


@pytest.mark.tpu
@pytest.mark.skipif(bool(no_compiler), reason=no_compiler)
@pytest.mark.slow
def test_two_slices_are_compiled_as_such():
    def known(shape, layout):
        return build(shape, layout, batch=8)._replace(parameters=64)

    plan = planning.plan(known, "2xv5e:2x2", LAYOUT, dcn_bandwidth=3.0, inner_steps=[10], price=2)
    rows = {row.mesh_shape: row for row in plan.rows}
    assert set(rows) == {
        "batch:8;model:1", "batch:4;model:2", "model:2;batch:4", "batch:2;model:4",
        "model:4;batch:2", "model:8;batch:1",
    }  # fmt: skip
    for shape, row in rows.items():
        assert (row.slices, row.cores, row.dollars_per_hour) == (2, 8, 16.0)
        (crossing,) = [t for t in row.traffic if t.axis == "DCN"]
        assert row.dcn_seconds == crossing.seconds > 0
        ways = [one.way for one in row.fewer_messages]
        assert ways == (["OuterOptimizer", "islands"] if shape.startswith("batch") else [])
    # A quarter of 64 numbers and of a row of 128, to which the compiler may fill up.
    of_slice = next(t for t in rows["batch:8;model:1"].traffic if t.axis == "DCN")
    assert 64 / 4 * 4 <= of_slice.bytes_per_core <= 128 * 4
    assert of_slice.seconds == pytest.approx(of_slice.bytes_per_core / 3e9)
    given = planning.plan(known, "2xv5e:2x2", LAYOUT, ["model:1;batch:8"], dcn_bandwidth=3.0)
    assert (
        "model:1, crosses the data center network, and 2 slices do not" in given.refused[0].reason
    )


@pytest.mark.tpu
@pytest.mark.skipif(bool(no_compiler), reason=no_compiler)
@pytest.mark.slow
def test_one_chip_is_a_topology():
    (row,) = planning.plan(build, "v5e:1x1", LAYOUT, ["batch:1;model:1"]).rows
    assert (row.cores, row.link_seconds) == (1, 0)
    assert row.step_seconds > 0


@pytest.mark.parametrize(
    "estimates",
    [{"step": 1.0}, {"step": 1.0, "conditions_true": 2.0, "conditions_false": 0.5}],
)
def test_figures_of_a_program_with_conditionals_are_those_of_an_update(monkeypatch, estimates):
    made = SimpleNamespace(
        memory=CoreMemory(*[1] * len(CoreMemory.__annotations__)),
        estimates={name: CostEstimate(1.0, 1.0, seconds) for name, seconds in estimates.items()},
        of_update=(),
        of_skipped_step=("sent",),
        seconds=0.5,
    )
    monkeypatch.setattr(machines, "places_of", lambda topology: [(0, 0, 0, 0)])
    monkeypatch.setattr(machines, "compile_lowered", lambda *_, **__: made)
    compiled = TpuMachine("v5e:1x1").compile(LoweredProgram(1, "module"), lambda process: None)
    assert compiled.step.cost.seconds == max(estimates.values())
    assert compiled.is_of_update == (len(estimates) > 1)
    assert compiled.skipped == (
        StepCost(CostEstimate(1.0, 1.0, 0.5), ("sent",)) if len(estimates) > 1 else None
    )


@pytest.mark.skipif(not no_compiler, reason="the TPU compiler is installed")
def test_without_the_compiler_the_error_says_what_to_install():
    with pytest.raises(xla.XlaMissingError, match="pip install"):
        planning.plan(build, "v5e:2x2", LAYOUT)
