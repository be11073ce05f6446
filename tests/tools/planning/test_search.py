"""Building and compiling candidates: each program once, until somebody stops it."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.runtimes.xla.hlo_collectives import HloCollective
from mtf_gradsync.runtimes.xla.runner.jax_devices import make_cpu_devices
from mtf_gradsync.runtimes.xla.topology.compiler_process import CompilerDiedError
from mtf_gradsync.runtimes.xla.topology.estimate import CostEstimate
from mtf_gradsync.tools import planning
from mtf_gradsync.tools.planning.machines import Compiled, StepCost
from mtf_gradsync.tools.planning.search import Candidate, search
from tests.tools.planning.machines import LAYOUT, Counting, build, interrupted_and_dropped


def candidates(machine, *shapes):
    return [Candidate(shape, LAYOUT, machine) for shape in shapes]


def test_a_row_adds_links_to_the_estimate():
    plan = search(build, candidates(Counting(), "batch:2;model:2"))
    (row,) = plan.rows
    (along,) = row.traffic
    # Groups of neighbours: the last axis.
    assert (along.axis, along.collectives, along.bytes_per_core) == ("model", 1, 3)
    assert row.step_seconds == 2.0 + 3.0
    assert row.overlapped_seconds == 3.0
    assert row.tokens_per_second == 12 / 5.0
    assert row.share_of_peak == 200.0 / (5.0 * 100.0)
    assert row.fits
    assert not plan.is_partial


def test_mfu_is_of_what_the_model_needs():
    """Four cores of 100 operations a second; the step takes 5 s."""
    machine = Counting()
    shape = "batch:2;model:2"

    def known(shape, layout, **facts):
        return build(shape, layout)._replace(**facts)

    for facts, needed in (
        ({"model_flops": 500.0, "parameters": 3}, 500.0),
        ({"parameters": 3}, 6.0 * 3 * 12),
        ({}, None),
    ):
        (row,) = search(functools.partial(known, **facts), candidates(machine, shape)).rows
        assert row.model_flops == needed
        assert row.mfu == (None if needed is None else needed / (5.0 * 100.0 * 4))


def test_what_fewer_messages_between_slices_take():
    """Two slices of two cores; a chip sends a byte a second, and each sum takes a second a byte."""
    machine = Counting()
    machine.slices, machine.dcn_bytes_per_second = 2, 1.0

    def known(shape, layout):
        return build(shape, layout)._replace(parameters=20)

    def planned(shape):
        (row,) = search(known, [Candidate(shape, LAYOUT, machine, (4, 100))]).rows
        return row

    row = planned("batch:2;model:2")
    apart = row.step_seconds - row.dcn_seconds
    # Half of the values on each core, in float32: of an island all, there and back.
    outer, islands = 4 * 20 / 2, 2 * 4 * 20
    assert row.fewer_messages == (
        planning.FewerMessages("OuterOptimizer", 4, apart + outer / 4, outer),
        planning.FewerMessages("OuterOptimizer", 100, apart + outer / 100, outer),
        planning.FewerMessages("islands", 4, islands / 4, islands),
        planning.FewerMessages("islands", 100, apart, islands),
    )
    assert planned("model:2;batch:2").fewer_messages == ()


def test_operations_that_a_model_needs():
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        batch, width, wide = (mtf.Dimension(n, s) for n, s in zip("bio", (2, 8, 4)))
        experts, length = mtf.Dimension("e", 3), mtf.Dimension("l", 5)
        x = mtf.import_tf_tensor(mesh, tf.ones([2, 5, 8]), [batch, length, width])
        w = mtf.get_variable(mesh, "w", [width, wide])

        def layer(x):
            return mtf.einsum([x, w], reduced_dims=[width])

        h = mtf.recompute_grad(layer, [x])
        keys = mtf.rename_dimension(h, "l", "m")
        weights = mtf.softmax(mtf.einsum([h, keys], reduced_dims=[wide]), keys.shape.dims[1])
        h = mtf.einsum([weights, keys], reduced_dims=[keys.shape.dims[1]])
        # A lookup, and dispatching to experts by a gate.
        table = mtf.get_variable(mesh, "table", [experts, wide])
        chosen = mtf.argmax(mtf.einsum([h, table], reduced_dims=[wide]), experts)
        h += mtf.gather(table, chosen, experts)
        gate = mtf.one_hot(chosen, experts) * mtf.reduce_sum(h, reduced_dim=wide)
        sent = mtf.einsum([h, gate], reduced_dims=[length])
        loss = mtf.reduce_sum(mtf.square(sent))
        mtf.gradients([loss], [w.value if hasattr(w, "value") else w])
        # w, both products of attention, and the table for the gate.
        by_hand = 6 * 2 * 5 * (8 * 4 + 2 * 5 * 4 + 3 * 4)
        assert planning.model_flops(loss) == by_hand
        (looped,) = mtf.while_loop(lambda x: mtf.less(x, 1.0), lambda x: [x + 1.0], [loss])
        with pytest.raises(ValueError, match="is computed in a loop"):
            planning.model_flops(looped)


def test_under_accumulation_the_means_are_over_all_steps_of_an_update():
    """An update of 2 s and 3 s of links; the other steps take a second and 100 operations."""
    machine = Counting(skipped=StepCost(CostEstimate(100.0, 10.0, 1.0)))

    def accumulating(shape, layout):
        return build(shape, layout)._replace(steps_per_update=4, parameters=64)

    (row,) = search(accumulating, candidates(machine, "batch:2;model:2")).rows
    assert (row.step_seconds, row.skipped_step_seconds, row.parameters) == (5.0, 1.0, 64)
    assert row.mean_step_seconds == (5.0 + 3 * 1.0) / 4
    assert row.tokens_per_second == 12 * 4 / 8.0
    assert row.share_of_peak == (200.0 + 3 * 100.0) / (8.0 * 100.0)
    assert row.doubt == ""
    # What it sends without an update takes its time, too.
    sends = StepCost(
        CostEstimate(100.0, 10.0, 1.0),
        (HloCollective("all-reduce", "r", 2, ((0, 1), (2, 3)), "m", ()),),
    )
    (row,) = search(accumulating, candidates(Counting(skipped=sends), "batch:2;model:2")).rows
    assert row.skipped_step_seconds == 1.0 + 2
    assert row.skipped_step_traffic == (planning.AxisTraffic("model", 1, 2, 2.0),)
    (alone,) = search(build, candidates(machine, "batch:2;model:2")).rows
    assert (alone.mean_step_seconds, alone.tokens_per_second) == (5.0, 12 / 5.0)


def test_what_cannot_be_beside_its_roofline_is_not_ranked():
    """200 operations at 100 a second, as long as 50 bytes at 25 a second."""
    made = {name: Counting(name) for name in ("below", "right", "far above", "too large")}
    made["below"].estimate, made["right"].estimate, made["far above"].estimate = 1.8, 3.9, 80.0
    made["too large"].memory_per_core = 1
    every = [one for machine in made.values() for one in candidates(machine, "batch:4")]
    found = search(build, every).rows
    assert [row.machine for row in found] == ["right", "too large", "below", "far above"]
    assert {row.roofline_seconds for row in found} == {2.0}
    assert {row.estimate_source for row in found} == {"made up"}
    doubts = [row.doubt for row in found]
    assert doubts[:2] == ["", ""]
    assert "below its roofline of 2e+03 ms" in doubts[2]
    assert "40 times its roofline" in doubts[3]
    wrong = Counting(skipped=StepCost(CostEstimate(100.0, 10.0, 0.5)))
    (row,) = search(build, candidates(wrong, "batch:4")).rows
    assert "below its roofline of 1e+03 ms" in row.doubt


def test_a_machine_of_unknown_rates_has_no_roofline():
    machine = Counting()
    machine.bytes_per_second_per_core = None
    (row,) = search(build, candidates(machine, "batch:4")).rows
    assert (row.roofline_seconds, row.doubt) == (None, "")


def test_what_does_not_fit_comes_last():
    small = Counting("small", memory=599)
    found = search(build, candidates(small, "batch:4") + candidates(Counting(), "batch:4"))
    assert [(row.machine, row.fits) for row in found.rows] == [("four", True), ("small", False)]


def test_equal_programs_are_compiled_once():
    machine = Counting(module="the same")
    plan = search(build, candidates(machine, "batch:4;model:1", "batch:4"))
    assert machine.compiled == ["the same"]
    assert sorted(row.is_repeated for row in plan.rows) == [False, True]


def test_machines_of_one_kind_have_one_lowering():
    first, second = Counting("first"), Counting("second")
    built = []

    def counted(shape, layout):
        built.append(shape)
        return build(shape, layout)

    search(counted, candidates(first, "batch:4") + candidates(second, "batch:4"))
    assert built == ["batch:4"]
    assert (first.lowered, second.lowered) == (1, 0)
    assert len(first.compiled) == len(second.compiled) == 1


def test_what_does_not_divide_is_skipped_with_the_reason():
    machine = Counting(cores=8)
    plan = search(build, candidates(machine, "batch:8;model:1", "batch:4;model:2"))
    assert [row.mesh_shape for row in plan.rows] == ["batch:4;model:2"]
    (refused,) = plan.refused
    assert refused.mesh_shape == "batch:8;model:1"
    assert "not divisible" in refused.reason
    assert "\n" not in refused.reason


def test_a_compiler_that_refuses_says_why():
    class Full(Counting):
        def compile(self, lowered, begun):
            return Compiled(error="needs 20 GB of 16")

    plan = search(build, candidates(Full(), "batch:4"))
    assert (plan.rows, plan.refused[0].reason) == ((), "needs 20 GB of 16")


def test_other_errors_are_the_callers():
    def broken(shape, layout):
        raise TypeError("not mine")

    with pytest.raises(TypeError, match="not mine"):
        search(broken, candidates(Counting(), "batch:4"))


def test_stopped_it_returns_what_it_has_and_ends_its_compilers():
    running = []

    def wait(lowered, begun, stack):
        if "model" in lowered.module and "batch=2" in lowered.module:
            sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
            process = stack.enter_context(subprocess.Popen(sleeper, text=True))
            running.append(process)
            begun(process)
            process.wait()

    machine = Counting(before=wait)

    def interrupted(shape, layout):
        if shape == "batch:1;model:4":
            while not running or len(machine.compiled) < 1:
                time.sleep(0.01)
            raise KeyboardInterrupt
        return build(shape, layout)

    shapes = ("batch:4;model:1", "batch:2;model:2", "batch:1;model:4")
    plan = search(interrupted, candidates(machine, *shapes), jobs=2)
    assert [row.mesh_shape for row in plan.rows] == ["batch:4;model:1"]
    assert plan.is_partial
    assert plan.not_reached == 2
    assert running[0].returncode is not None
    assert "stopped: 2 not looked at" in str(plan)
    assert '"is_partial": true' in plan.to_json()


def test_a_compiler_that_the_interruption_ends_is_not_a_reason():
    # A terminal sends Ctrl-C to the compilers, too.
    class Interrupted(Counting):
        def compile(self, lowered, begun):
            if "batch=2" in lowered.module:
                died.set()
                raise CompilerDiedError("status -2")
            return super().compile(lowered, begun)

    died = threading.Event()

    def interrupted(shape, layout):
        if shape == "batch:1;model:4":
            assert died.wait(60)
            raise KeyboardInterrupt
        return build(shape, layout)

    shapes = ("batch:2;model:2", "batch:1;model:4")
    plan = search(interrupted, candidates(Interrupted(), *shapes))
    assert (plan.rows, plan.refused, plan.not_reached) == ((), (), 2)
    assert str(plan) == "no mesh was planned\n\nstopped: 2 not looked at; the plan lacks them"


class TestPlan:
    @pytest.fixture
    def machine(self, monkeypatch):
        """What every topology of TPUs is here."""
        machine = Counting()
        module = sys.modules[planning.plan.__module__]
        monkeypatch.setattr(module, "TpuMachine", lambda name: machine)
        return machine

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    @pytest.mark.slow
    def test_a_signal_that_python_drops_stops_it(self, machine, number):
        def dropped(shape, layout):
            if shape == "batch:2;model:2":
                interrupted_and_dropped(number)
            return build(shape, layout)

        before = signal.getsignal(number)
        plan = planning.plan(dropped, "v5e:2x2", LAYOUT)
        assert plan.is_partial
        assert plan.stopped_by == number
        assert "batch:1;model:4" not in [row.mesh_shape for row in plan.rows]
        assert len(plan.rows) + plan.not_reached == 3
        assert signal.getsignal(number) == before

    def test_what_jax_reads_is_in_the_environment_as_before(self, machine, monkeypatch):
        """CPU devices of this machine are asked for by it."""
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        monkeypatch.setenv("XLA_FLAGS", "--own")

        def asks(shape, layout):
            os.environ["JAX_PLATFORMS"] = "cpu"
            make_cpu_devices(4, replace=True)
            raise KeyError

        with pytest.raises(KeyError):
            planning.plan(asks, "v5e:2x2", LAYOUT)
        assert "JAX_PLATFORMS" not in os.environ
        assert os.environ["XLA_FLAGS"] == "--own"

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_a_compiler_that_a_dropped_signal_ends_is_not_a_reason(self, machine):
        def dies(lowered, begun, stack):
            assert sent.wait(60)
            raise CompilerDiedError("status -2")

        def dropped(shape, layout):
            built = build(shape, layout)
            if shape == "batch:2;model:2":
                interrupted_and_dropped(signal.SIGINT)
                sent.set()
            return built

        sent, machine.before = threading.Event(), dies
        plan = planning.plan(dropped, "v5e:2x2", LAYOUT, ["batch:4;model:1", "batch:2;model:2"])
        assert (plan.rows, plan.refused, plan.not_reached) == ((), (), 2)

    def test_two_spellings_of_a_mesh_are_planned_once(self, machine):
        layouts = [LAYOUT, "hidden:model,batch:batch", "batch:batch"]
        plan = planning.plan(build, "v5e:2x2", layouts, ["batch:2;model:2", "batch:2,model:2"])
        found = [(row.mesh_shape, row.layout) for row in plan.rows]
        assert sorted(found) == [("batch:2;model:2", "batch:batch"), ("batch:2;model:2", LAYOUT)]

    def test_jobs_must_be_positive(self):
        with pytest.raises(ValueError, match="jobs must be a positive integer; got 0"):
            planning.plan(build, "v5e:2x2", LAYOUT, jobs=0)

    def test_a_topology_must_be_given(self):
        with pytest.raises(ValueError, match="at least one layout and one topology"):
            planning.plan(build, "", LAYOUT)

    def test_what_cannot_be_read_is_an_error_that_says_how_to_write_it(self):
        with pytest.raises(ValueError, match=r"mesh shape 'batch' .* like \"batch:4;model:2\""):
            planning.plan(build, "v5e:2x2", LAYOUT, ["batch"])
        for shape in ("batch:-4", "batch:0;model:4"):
            with pytest.raises(ValueError, match=f"mesh shape '{shape}' cannot be read; write it"):
                planning.plan(build, "v5e:2x2", LAYOUT, [shape])
        with pytest.raises(ValueError, match=r"layout 'batch' .* like \"batch:batch;heads"):
            planning.plan(build, "v5e:2x2", "batch")

    def test_an_unknown_generation_is_an_error(self):
        with pytest.raises(ValueError, match="topology must name a TPU generation"):
            planning.plan(build, "v9:2x2", LAYOUT)
