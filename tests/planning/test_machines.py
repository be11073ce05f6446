"""Plans with real compilers: the TPU's, and XLA's for the CPU devices of this machine."""

import pytest

from mtf_gradsync import planning, xla
from mtf_gradsync.planning import calibration
from mtf_gradsync.planning.machines import TpuMachine
from mtf_gradsync.planning.this_machine import CpuMachine
from tests.planning.machines import LAYOUT, build

no_compiler = xla.why_no_tpu_compiler()
no_xla = xla.why_no_xla()


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


@pytest.mark.tpu
@pytest.mark.skipif(bool(no_compiler), reason=no_compiler)
def test_places_are_those_of_libtpu():
    machine = TpuMachine("v3:2x2")
    assert machine.cores == 8
    assert machine.peak_flops_per_core == 123e12 / 2
    # Cores of one chip follow each other.
    assert machine.seconds("all-reduce", [[0, 1], [2, 3], [4, 5], [6, 7]], 1e9) == 0
    assert machine.seconds("all-reduce", [[0, 2], [1, 3]], 1e9) > 0


@pytest.mark.skipif(not no_compiler, reason="the TPU compiler is installed")
def test_without_the_compiler_the_error_says_what_to_install():
    with pytest.raises(xla.XlaMissingError, match="pip install"):
        planning.plan(build, "v5e:2x2", LAYOUT)


@pytest.mark.xla
@pytest.mark.skipif(bool(no_xla), reason=no_xla)
def test_a_plan_for_cpu_devices_has_rates_that_were_measured(monkeypatch):
    # What is measured is not the point: once each, and few.
    monkeypatch.setattr(calibration, "_ROUNDS", 1)
    monkeypatch.setattr(calibration, "_WIDTHS", {64: 2, 128: 2})
    monkeypatch.setattr(calibration, "_CHAIN", 2)
    machine = CpuMachine("cpu:2", 2)
    rates = machine.rates
    assert set(rates.sums) == set(rates.waits) == {2}
    assert rates.byte > 0
    # A cube of a width that was measured: 2 * 64^3 operations, three times.
    assert rates.product(3, 64, 64, 64) == pytest.approx(3 * 2 * 64**3 * rates.products[64])
    sizes, seconds = zip(*rates.sums[2])
    for size, alone in zip(sizes, seconds):
        assert machine.seconds("all-reduce", [[0, 1]], size) == alone
    # Of a reduce-scatter half as much is sent.
    half = machine.seconds("reduce-scatter", [[0, 1]], 2 * sizes[1])
    assert half == seconds[1]
    # After four times the work, twice the wait.
    once = 2 * calibration.LOAD**3 * rates.products[calibration.LOAD]
    assert rates.wait(2, 4 * once) == pytest.approx(2 * rates.waits[2])
    assert machine.seconds("all-reduce", [[0], [1]], 1e6) == 0
    built = build("batch:2;model:1", LAYOUT)
    made = machine.compile(machine.lower(built.program, built.fetches), lambda process: None)
    # Forward: 6 x 8 by 8 x 8; backward the same again, by w alone.
    assert made.flops >= 2 * 2 * 6 * 8 * 8
    assert made.estimate_seconds > rates.run
