"""What is used of jax without a public name still means what it did."""

from __future__ import annotations

import json
import os
import textwrap

import pytest

from benchmarks import hlo as benchmarks_hlo
from mtf_gradsync import xla
from mtf_gradsync.runtimes._private import jax as private
from mtf_gradsync.runtimes._private.tensorflow import hlo_module
from mtf_gradsync.tools._private import profiles
from tests.forked import Forked

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.skipif(bool(xla.why_no_tpu_compiler()), reason=xla.why_no_tpu_compiler()),
]

PROGRAM = """
func.func public @main(%x: tensor<4xf32>, %y: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %sum = "stablehlo.all_reduce"(%x) <{replica_groups = dense<[GROUP]> : tensor<1xSIZExi64>}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %s = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) : (tensor<4xf32>) -> tensor<4xf32>
  %difference = stablehlo.subtract %y, %x : tensor<4xf32>
  return %sum, %difference : tensor<4xf32>, tensor<4xf32>
}
"""


def run_fresh(code):
    """Runs code where jax has two CPU devices; returns what it puts into `out`."""
    before = f"""
        import json
        import numpy as np
        import jax
        import importlib.util
        import sys
        # By their paths: the package itself imports more than what is tested here.
        sys.path.insert(0, {os.path.dirname(xla.__file__)!r})
        from runner.jax_devices import put
        from runner.loaded_program import (
            LoadedProgram, compile_options, compiled, loaded_executable, serialized_executable
        )

        def load(path):
            spec = importlib.util.spec_from_file_location("private", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module

        private, profiles = load({private.__file__!r}), load({profiles.__file__!r})
        benchmarks_hlo = load({benchmarks_hlo.__file__!r})

        def compile_program(devices, options={{}}, load=True):
            text = {PROGRAM!r}.replace("SIZE", str(len(devices)))
            text = text.replace("GROUP", str(list(range(len(devices)))))
            if load:
                return compiled(text, devices, options)
            return private.compiled_for_topology(text, devices, compile_options(devices, options))

        out = {{}}
    """
    code = "\n".join([textwrap.dedent(before), textwrap.dedent(code), "print(json.dumps(out))"])
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    process = Forked(["-c", code], environment=environment)
    try:
        assert process.wait() == 0, process.errors()
        return json.loads(process.output().splitlines()[-1])
    finally:
        process.kill()


def test_a_program_runs_on_its_devices():
    """Each device has its own arguments and results; a sum goes over the devices."""
    out = run_fresh("""
        devices = jax.devices()[::-1]
        program = LoadedProgram(compile_program(devices), devices)
        first = put([np.arange(4.0, dtype=np.float32)] * 2, devices)
        second = put(
            [np.full(4, 100, np.float32), np.full(4, 50, np.float32)], devices
        )
        out["values"], out["devices"] = [], []
        for _ in range(3):
            results = program.run([first, second])
            out["values"].append([[np.asarray(x).tolist() for x in r.arrays] for r in results])
            out["devices"].append([[x.device.id for x in r.arrays] for r in results])
            # What a program has returned it takes again.
            second = results[1]
        out["order"] = [d.id for d in devices]
    """)
    total = [0.0, 2.0, 4.0, 6.0]
    for step, (values, devices) in enumerate(zip(out["values"], out["devices"]), start=1):
        left = [[start - step * i for i in range(4)] for start in (100, 50)]
        assert values == [[total, total], left]
        assert devices == [out["order"]] * 2


def test_results_are_joined_without_jaxlib_s_handlers_too():
    out = run_fresh("""
        def gone(self, aval):
            raise AttributeError("array_result_handler")

        LoadedProgram._handler = gone
        devices = jax.devices()
        program = LoadedProgram(compile_program(devices), devices)
        x = put([np.ones(4, np.float32)] * 2, devices)
        for _ in range(3):
            x = program.run([x, x])[0]
        out["sum"] = [np.asarray(a).tolist() for a in x.arrays]
    """)
    assert out["sum"] == [[8.0] * 4] * 2


def test_options_reach_the_compiler():
    out = run_fresh("""
        try:
            compile_program(jax.devices(), {"xla_no_such_option": True})
        except Exception as error:
            out["error"] = str(error)
    """)
    assert "xla_no_such_option" in out["error"]


def test_a_compiled_program_says_its_memory_and_its_text():
    out = run_fresh("""
        executable = compile_program(jax.devices())
        out["memory"] = private.memory_bytes(executable)
        hlo = private.compiled_hlo(executable)
        text = private.hlo_text(hlo)
        out["text"] = text
        again = private.hlo_text(benchmarks_hlo.hlo_from_text(text))
        out["same"] = again == text
        out["hlo"] = hlo.hex()
    """)
    assert out["memory"]["arguments"] == 2 * 4 * 4
    assert out["memory"]["outputs"] >= 2 * 4 * 4
    assert out["memory"]["aliased"] == 0
    assert out["memory"]["temporaries"] >= 0
    assert out["memory"]["code"] >= 0
    assert out["text"].startswith("HloModule")
    assert "all-reduce" in out["text"]
    assert out["same"]
    computations = hlo_module(bytes.fromhex(out["hlo"])).computations
    assert {"all-reduce", "parameter"} <= {i.opcode for c in computations for i in c.instructions}


def test_a_profile_has_the_operations_of_a_program_and_no_frames_of_python():
    out = run_fresh("""
        profiler = profiles.Profiler()
        double = jax.jit(lambda x: jax.numpy.sin(x) * 2)
        double(1.0)
        profiler.start()
        double(2.0).block_until_ready()
        out["profile"] = profiler.stop().hex()
    """)
    planes = {p.name: p for p in profiles.profile_data(bytes.fromhex(out["profile"])).planes}
    assert "profile_start_time" in dict(planes["Task Environment"].stats)
    events = [event for line in planes["/host:CPU"].lines for event in line.events]
    known = {name for event in events for name, _ in event.stats}
    assert {"hlo_op", "hlo_module"} <= known
    assert not [event.name for event in events if event.name.startswith("$")]


def test_a_profile_that_was_cut_off_is_refused():
    with pytest.raises(ValueError, match=r"[Pp]ars"):
        profiles.profile_data(b"\n\x09cut off")


def test_a_program_is_compiled_for_a_tpu_that_is_only_described():
    out = run_fresh("""
        from jax.experimental import topologies
        description = topologies.get_topology_desc(platform="tpu", topology_name="v3:2x2")
        executable = compile_program(description.devices, load=False)
        out["memory"] = private.memory_bytes(executable)
        out["text"] = private.hlo_text(private.compiled_hlo(executable))
    """)
    assert out["memory"]["arguments"] > 0
    assert out["memory"]["code"] > 0
    assert "all-reduce" in out["text"]


def test_an_executable_goes_through_bytes():
    out = run_fresh("""
        devices = jax.devices()
        kept = serialized_executable(compile_program(devices), devices)
        program = LoadedProgram(loaded_executable(kept, devices), devices)
        x = put([np.ones(4, np.float32)] * 2, devices)
        out["sum"] = np.asarray(program.run([x, x])[0].arrays[1]).tolist()
    """)
    assert out["sum"] == [2.0] * 4


def test_numbers_of_64_bits_stay_what_they_are():
    out = run_fresh("""
        devices = jax.devices()
        big = put([np.array([2**40], np.int64)] * 2, devices)
        out["dtype"] = str(np.asarray(big.arrays[0]).dtype)
        out["value"] = np.asarray(big.arrays[0]).tolist()
    """)
    assert out == {"dtype": "int64", "value": [2**40]}


def test_jax_says_whether_it_has_begun():
    out = run_fresh("""
        out["before"] = private.backends_are_initialized()
        jax.devices()
        out["after"] = private.backends_are_initialized()
    """)
    assert out == {"before": False, "after": True}
