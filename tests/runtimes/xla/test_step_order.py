"""XLA's CPU runtime begins a program's collectives in the order that it was compiled with."""

import numpy as np
import pytest

from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.runtimes._private.jax import compiled_hlo
from mtf_gradsync.runtimes.xla.hlo import read_module
from mtf_gradsync.runtimes.xla.hlo_collectives import COLLECTIVES, find_hlo_collectives
from mtf_gradsync.runtimes.xla.runner.jax_devices import DeviceValues
from mtf_gradsync.xla import executable, runner
from tests.runtimes.simd.programs import MESHES, Regression
from tests.runtimes.xla.programs import Conditional
from tests.wrappers import wrap

pytestmark = pytest.mark.xla
SHAPE, LAYOUT, _ = MESHES["4x2"]


STACKS = ["local(cross_shard)", "replicas", "loss_scale(clip(sharded))"]


def compiled(program, lowering):
    """A program's HLO, compiled anew in a session of its own."""
    with program.graph.as_default(), xla.session(program, lowering, cache_dir=None) as session:
        return compiled_hlo(session._prepared.compiled(()).program.executable)


def built(name):
    if name == "loops and branches":
        return Conditional().program, None
    model = Regression(
        lambda: wrap(
            name,
            mtf.optimize.AdamWeightDecayOptimizer(0.1),
            {"mesh_shape": SHAPE, "layout": LAYOUT},
            clip_norm=1.0,
            replicas_to_aggregate=3,
        )
    )
    model.placeholders()
    with simd.tpu_program(SHAPE, LAYOUT) as program:
        lowering, *_ = model.build(program.mesh_impl)
    return program, lowering


@pytest.mark.parametrize("name", [*STACKS, "loops and branches"])
@pytest.mark.slow
def test_every_collective_has_its_place_in_one_order(name):
    """The order is in the compiled program, and is found again when it is compiled again."""
    with tf.Graph().as_default():
        program, lowering = built(name)
        first = compiled(program, lowering)
        program._prepared.clear()
        again = compiled(program, lowering)
    module = read_module(first)
    scheduled = {i for s in module.proto.schedule.sequences.values() for i in s.instruction_ids}
    found = [i.proto.id for i in module.instructions if i.opcode in COLLECTIVES]
    assert found
    assert set(found) <= scheduled
    assert described(first) == described(again)


def described(hlo):
    return [(c.operation, c.bytes_per_core, c.groups, c.inside) for c in find_hlo_collectives(hlo)]


def test_programs_that_take_nothing_of_each_other_wait(monkeypatch):
    """One that takes a result of the last one begins at once: it waits on the devices."""
    waited = []
    monkeypatch.setattr(runner.loaded_program, "wait_for_last_program", lambda: waited.append(True))
    results = runner.loaded_program.run_after_last_program(
        lambda given: [DeviceValues([np.zeros(1)]) for _ in "ab"], []
    )
    assert len(waited) == 1
    kept = DeviceValues([np.zeros(1)])
    runner.loaded_program.run_after_last_program(
        lambda given: [DeviceValues([np.zeros(1)])], [kept, results[1]]
    )
    assert len(waited) == 1
    runner.loaded_program.run_after_last_program(
        lambda given: [DeviceValues([np.zeros(1)])], [kept]
    )
    assert len(waited) == 2


def test_processes_that_compiled_other_orders_stop(monkeypatch):
    """What each has compiled is compared before it runs."""
    seen = {}
    monkeypatch.setattr(
        executable.Cores, "check_same", lambda self, what, content: seen.update({what: content})
    )
    with tf.Graph().as_default():
        program = Conditional().program
        with xla.session(program, cache_dir=None) as session:
            monkeypatch.setattr(type(session.cores), "is_alone", False)
            session._prepared.compiled(())
    assert b"all-reduce" in seen["the orders of collectives"]
