"""CPU devices of `benchmarks.plan`: rates that are fitted to steps, and a plan by them."""

import numpy as np
import pytest

from benchmarks import this_machine
from benchmarks.this_machine import (
    Calibration,
    CpuMachine,
    FittedRates,
    MeasuredWork,
    Samples,
    Size,
    corrections,
    fit,
    meetings,
    work_of,
)
from mtf_gradsync import xla
from tests.tools.planning.machines import LAYOUT, build

no_xla = xla.why_no_xla()
ONE = this_machine.Size(1, 8, 2, 2)


def made_up(count):
    """Works in which flops, bytes, operations and meetings vary apart from each other."""
    rng = np.random.RandomState(0)
    return [
        MeasuredWork(
            cores=2 ** rng.randint(0, 5),
            flops=1e9 * rng.rand(),
            bytes=1e8 * rng.rand(),
            operations=rng.randint(10, 1000),
            meetings=100 * rng.rand(),
            exchanged_bytes=1e7 * rng.rand(),
            new_bytes=1e8 * rng.rand(),
            divided=rng.randint(1, 100),
        )
        for _ in range(count)
    ]


def by_hand(work, flop, byte, operation, core_byte, meeting, exchanged_byte, new_byte, division):
    total = work.flops * flop + work.bytes * byte + work.operations * operation
    total += work.exchanged_bytes * exchanged_byte
    total += work.new_bytes * new_byte + work.divided * division
    return work.cores * total + work.bytes * core_byte + work.meetings * meeting


@pytest.mark.parametrize(
    "rates",
    [
        (5e-12, 3e-11, 1e-6, 8e-11, 2e-4, 4e-10, 3e-10, 1e-5),
        (5e-12, 3e-11, 0.0, 8e-11, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_fit_finds_the_rates_that_times_were_made_with(rates):
    works = made_up(12)
    seconds = [by_hand(work, *rates) for work in works]
    found = fit(works, seconds)
    # Times are exact but for rounding, and the matrix's condition costs a few digits.
    assert found == pytest.approx(FittedRates(*rates), rel=1e-8, abs=1e-16)
    assert [found.seconds(work) for work in works] == pytest.approx(seconds, rel=1e-8)


def test_no_rate_is_negative():
    works = made_up(12)
    rates = (5e-12, 3e-11, 1e-6, 8e-11, -1e-4, 4e-10, 3e-10, 1e-5)
    found = fit(works, [by_hand(work, *rates) for work in works])
    assert min(found) >= 0
    assert found.meeting == 0


def test_what_no_step_does_costs_nothing():
    works = [work._replace(meetings=0.0) for work in made_up(8)]
    rates = FittedRates(5e-12, 3e-11, 1e-6, 8e-11, 1.0, 4e-10, 3e-10, 1e-5)
    found = fit(works, [by_hand(work, *rates) for work in works])
    assert found == pytest.approx(rates._replace(meeting=0.0), rel=1e-8)


def test_errors_count_relative_to_the_time():
    # The same work takes 1 and 2 ms, and a thousand times the work 1 s: the sum of squares of
    # (r - 1)^2 + (r / 2 - 1)^2 + (r - 1)^2 is least at r = 2.5 / 2.25.
    works = [MeasuredWork(1, flops, 0.0, 0, 0.0) for flops in (1e6, 1e6, 1e9)]
    assert fit(works, [1e-3, 2e-3, 1.0]).flop == pytest.approx(1e-9 * 2.5 / 2.25)


def test_a_mesh_is_corrected_by_what_its_steps_took_longer():
    rates = FittedRates(1e-9, *[0.0] * 7)
    works = [
        MeasuredWork(cores, 1e6, 0.0, 0, 0.0, group=group)
        for cores, group in ((4, 2), (4, 2), (4, 4))
    ]
    # By the rates each takes 4 ms.
    found = corrections(works, [4e-3 * 2, 4e-3 * 4, 4e-3 / 9], rates)
    # Means of logarithms, two errors of 0 with them: 2 * 4 of four errors, 1 / 9 of three.
    assert found == pytest.approx({(4, 2): 8 ** (1 / 4), (4, 4): 9 ** (-1 / 3)})
    calibration = Calibration(rates, found)
    assert calibration.seconds(works[0]) == pytest.approx(4e-3 * 8 ** (1 / 4))
    assert calibration.seconds(works[0]._replace(group=1)) == pytest.approx(4e-3)


def test_meetings_are_shares_of_all_cores():
    assert meetings([[0, 1], [2, 3]], 4) == 0.5
    assert meetings([[0, 1, 2, 3]], 4) == 1
    assert meetings([], 4) == 1
    assert meetings([[0], [1], [2], [3]], 4) == 0
    assert meetings([], 1) == 0


@pytest.mark.parametrize("count", [1, 3, 6, 16])
def test_steps_to_measure_run_on_all_devices_and_on_parts_of_them(count):
    meshes = {mesh for mesh, _ in this_machine.choose_samples(count, [ONE])}
    assert {(1, 1), (count, 1)} <= meshes
    assert all(count % (batch * model) == 0 for batch, model in meshes)


def test_each_way_to_divide_sixteen_has_its_steps():
    meshes = {mesh for mesh, _ in this_machine.choose_samples(16, [ONE])}
    assert meshes == {(n // m, m) for n in (1, 2, 4, 8, 16) for m in (1, 2, 4) if n >= m}


def flops_of(size):
    """Of the products of a step by hand, in two directions and three passes."""
    tokens, width = size.batch * size.length, size.width
    layer = 12 * width**2 + 2 * size.length * width
    return 3 * 2 * tokens * (size.layers * layer + 256 * width)


def test_a_step_is_sampled_by_steps_of_like_length():
    short, long = this_machine.samples_like(1e9), this_machine.samples_like(2e12)
    most, least = max(map(flops_of, short.sizes)), min(map(flops_of, long.sizes))
    assert 10 * most < least
    for size in short.sizes:
        assert this_machine.samples_like(flops_of(size)) is short
    # What is not a product comes on top.
    assert this_machine.samples_like(0.9 * least) is short
    assert this_machine.samples_like(1.05 * least) is long


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
    cost, collectives = machine.compile(lowered, lambda process: None).step
    assert flops == [pytest.approx(2 * cost.flops, rel=0.1)] * 2
    # Forward: 6 x 8 by 8 x 8; backward the same again, by w alone.
    assert cost.flops >= 2 * 2 * 6 * 8 * 8
    # With few operations its meetings are many. The correction is of the whole step: of at least
    # the operations and bytes of both, and of the collectives, which are added elsewhere.
    known = 2 * cost.flops * 1e-9 + 2 * cost.bytes_accessed * 1e-8 + cost.bytes_accessed * 1e-7
    met = sum(machine.seconds(c.operation, c.groups, c.bytes_per_core) for c in collectives)
    # By far the largest part of this step is what they hand on: the gradient and the loss.
    assert met > 2 * (4 * 8 * 8 + 4) * 1e-4
    step = cost.seconds + met
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
