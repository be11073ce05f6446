"""Plans with real compilers: the TPU's, and XLA's for the CPU devices of this machine."""

from types import SimpleNamespace

import pytest

import mtf_gradsync as gs
from mtf_gradsync import planning, xla
from mtf_gradsync.planning import machines, this_machine
from mtf_gradsync.planning.machines import SkippedStep, TpuMachine
from mtf_gradsync.planning.this_machine import (
    Calibration,
    CpuMachine,
    FittedRates,
    Samples,
    Size,
    work_of,
)
from mtf_gradsync.xla.topology.compiled import CoreMemory
from mtf_gradsync.xla.topology.compiling import LoweredProgram
from mtf_gradsync.xla.topology.estimate import CostEstimate
from tests.planning.machines import LAYOUT, build

no_compiler = xla.why_no_tpu_compiler()
no_xla = xla.why_no_xla()


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
def test_what_is_given_twice_is_planned_once():
    plan = planning.plan(build, "v5e:2x2,v5e:2x2", [LAYOUT, LAYOUT], ["batch:8", "batch:8"])
    assert [r.mesh_shape for r in plan.refused] == ["batch:8"]


@pytest.mark.tpu
@pytest.mark.skipif(bool(no_compiler), reason=no_compiler)
def test_places_are_those_of_libtpu():
    machine = TpuMachine("v3:2x2")
    assert machine.cores == 8
    assert machine.peak_flops_per_core == 123e12 / 2
    # Cores of one chip follow each other.
    assert machine.seconds("all-reduce", [[0, 1], [2, 3], [4, 5], [6, 7]], 1e9) == 0
    assert machine.seconds("all-reduce", [[0, 2], [1, 3]], 1e9) > 0


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
    assert compiled.estimate_seconds == max(estimates.values())
    assert compiled.is_of_update == (len(estimates) > 1)
    assert compiled.skipped == (
        SkippedStep(1.0, 1.0, 0.5, ("sent",)) if len(estimates) > 1 else None
    )


@pytest.mark.skipif(not no_compiler, reason="the TPU compiler is installed")
def test_without_the_compiler_the_error_says_what_to_install():
    with pytest.raises(xla.XlaMissingError, match="pip install"):
        planning.plan(build, "v5e:2x2", LAYOUT)


@pytest.mark.xla
@pytest.mark.skipif(bool(no_xla), reason=no_xla)
@pytest.mark.slow
def test_a_plan_for_cpu_devices_has_rates_that_were_fitted(monkeypatch):
    # What is measured is not the point: once each, and few.
    steps = [((2, 1), Size(1, 8, 2, 2)), ((1, 2), Size(1, 8, 2, 2))]
    flops = []

    def samples_like(count):
        flops.append(count)
        return Samples((), rounds=1)

    monkeypatch.setattr(this_machine, "samples_like", samples_like)
    monkeypatch.setattr(this_machine, "choose_samples", lambda count, sizes: steps)
    machine = CpuMachine("cpu:2", 2)
    built = build("batch:2;model:1", LAYOUT)
    lowered = machine.lower(built.program, built.fetches)
    rates, corrections, _ = machine.calibration
    assert len(rates) == 8
    assert min(rates) >= 0 < max(rates)
    # Along the batch two cores sum gradients at the end; along the model they meet all the time.
    assert set(corrections) == {(2, 1), (2, 2)}
    # Once in a process.
    other = CpuMachine("cpu:2", 2)
    other.lower(built.program, built.fetches)
    assert other.calibration is machine.calibration
    made_up = FittedRates(1e-9, 1e-8, 1e-6, 1e-7, 1e-3, 1e-4, 0.0, 0.0)
    machine.calibration = Calibration(made_up, {(2, 2): 2.0})
    # Two groups of two among four cores would be a half; here all two meet. Each puts in 1 MB.
    assert machine.seconds("all-reduce", [[0, 1]], 1e6) == pytest.approx(1e-3 + 2 * 1e6 * 1e-4)
    assert machine.seconds("all-reduce", [[0], [1]], 1e6) == 0
    made = machine.compile(lowered, lambda process: None)
    assert flops == [pytest.approx(2 * made.flops, rel=0.1)] * 2
    # Forward: 6 x 8 by 8 x 8; backward the same again, by w alone.
    assert made.flops >= 2 * 2 * 6 * 8 * 8
    # With few operations its meetings are many. The correction is of the whole step: of at least
    # the operations and bytes of both, and of the collectives, which are added elsewhere.
    known = 2 * made.flops * 1e-9 + 2 * made.bytes_accessed * 1e-8 + made.bytes_accessed * 1e-7
    met = sum(machine.seconds(c.operation, c.groups, c.bytes_per_core) for c in made.collectives)
    # By far the largest part of this step is what they hand on: the gradient and the loss.
    assert met > 2 * (4 * 8 * 8 + 4) * 1e-4
    step = made.estimate_seconds + met
    assert 2 * (known + met) < step < 2 * (known + met + 2 * 1e-6 * 1000)


@pytest.mark.xla
@pytest.mark.skipif(bool(no_xla), reason=no_xla)
def test_only_large_temporary_memory_is_given_anew():
    import jax

    def work(size):
        x = jax.ShapeDtypeStruct((size, size), "float32")
        # A sort keeps newer versions of XLA from making one operation of it all.
        made = jax.jit(lambda x: jax.numpy.sort(x @ x).sum()).lower(x).compile()
        return work_of(made.runtime_executable(), cores=1)

    # 300 x 300 floats stay below 32 MiB, 3000 x 3000 do not.
    assert work(300).new_bytes == 0
    # The product; what kernels need beside it is a fraction of it.
    assert 4 * 3000**2 <= work(3000).new_bytes < 2 * 4 * 3000**2
    assert work(3000).flops >= 2 * 3000**3
