"""What is used of jax without a public name still means what it did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from mtf_gradsync import xla

# TensorFlow 2.12 brings an old jax along, which the package does not use.
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
        from jax.extend.mlir import ir
        from jax.interpreters import mlir
        from mtf_gradsync._private import jax as private

        def compile_program(devices, options={{}}, load=True):
            with mlir.make_ir_context():
                text = {PROGRAM!r}.replace("SIZE", str(len(devices)))
                text = text.replace("GROUP", str(list(range(len(devices)))))
                return private.compile_stablehlo(ir.Module.parse(text), devices, options, load)

        out = {{}}
    """
    code = "\n".join([textwrap.dedent(before), textwrap.dedent(code), "print(json.dumps(out))"])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_program_runs_on_its_devices():
    """Each device has its own arguments and results; a sum goes over the devices."""
    out = run_fresh("""
        devices = jax.devices()[::-1]
        executable = compile_program(devices)
        mesh = jax.sharding.Mesh(np.array(devices), ["all"])
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
        first = jax.device_put(np.arange(8, dtype=np.float32), split)
        second = jax.device_put(np.full(8, 100, np.float32), split)
        results = private.run_executable(executable, [first, second])
        out["values"] = [[np.asarray(x).tolist() for x in result] for result in results]
        out["devices"] = [[x.device.id for x in result] for result in results]
        out["order"] = [d.id for d in devices]
    """)
    total = [4.0, 6.0, 8.0, 10.0]
    assert out["values"] == [[total, total], [[100, 99, 98, 97], [96, 95, 94, 93]]]
    assert out["devices"] == [out["order"]] * 2


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
        out["memory"] = private.memory_bytes(executable)._asdict()
        hlo = private.compiled_hlo(executable)
        text = private.hlo_text(hlo)
        out["text"] = text
        again = private.hlo_text(private.hlo_from_text(text))
        out["same"] = again == text
        from mtf_gradsync._private.tensorflow import hlo_module
        out["opcodes"] = sorted(
            {i.opcode for c in hlo_module(hlo).computations for i in c.instructions}
        )
    """)
    assert out["memory"]["arguments"] == 2 * 4 * 4
    assert out["memory"]["outputs"] >= 2 * 4 * 4
    assert out["memory"]["aliased"] == 0
    assert out["memory"]["temporaries"] >= 0
    assert out["memory"]["code"] >= 0
    assert out["text"].startswith("HloModule")
    assert "all-reduce" in out["text"]
    assert out["same"]
    assert {"all-reduce", "parameter"} <= set(out["opcodes"])


def test_a_program_is_compiled_for_a_tpu_that_is_only_described():
    out = run_fresh("""
        from jax.experimental import topologies
        description = topologies.get_topology_desc(platform="tpu", topology_name="v3:2x2")
        executable = compile_program(description.devices, load=False)
        out["memory"] = private.memory_bytes(executable)._asdict()
        out["text"] = private.hlo_text(private.compiled_hlo(executable))
    """)
    assert out["memory"]["arguments"] > 0
    assert out["memory"]["code"] > 0
    assert "all-reduce" in out["text"]
