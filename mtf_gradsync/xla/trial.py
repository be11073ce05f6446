"""Runs a small program on two CPU devices, in the way this package hands programs to jax.

It runs as a script, without TensorFlow: an exit code of 0 says that this jax can be used; otherwise
the last line says what it ended in.

usage: trial.py PRIVATE_JAX
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import numpy as np

_PROGRAM = """
func.func public @main(%x: tensor<4xf32>, %y: tensor<4xi64>) -> (tensor<4xf32>, tensor<4xi64>) {
  %sum = "stablehlo.all_reduce"(%x) <{replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %s = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) : (tensor<4xf32>) -> tensor<4xf32>
  return %sum, %y : tensor<4xf32>, tensor<4xi64>
}
"""


def main(private: Any) -> None:
    """Compiles the program, runs it, keeps it as bytes, and runs these.

    Args:
      private: the module `mtf_gradsync._private.jax`.

    Raises:
      Exception: whatever this jax cannot do.
    """
    import jax

    devices = jax.devices("cpu")[:2]
    executable = private.compile_stablehlo(_PROGRAM, devices, {}, load=True)
    kept = private.serialized_executable(executable, devices)
    for each in (executable, private.loaded_executable(kept, devices)):
        program = private.LoadedProgram(each, devices)
        x = private.put_on_devices([np.ones(4, np.float32)] * 2, devices)
        y = private.put_on_devices([np.full(4, 1 << 40)] * 2, devices)
        for power in range(1, 4):  # the first time results come in another way
            x, y = program.run([x, y])
            for array, expected in ((x, 2**power), (y, 1 << 40)):
                if not all(np.all(np.asarray(a) == expected) for a in array.arrays):
                    raise ValueError(f"step {power} gave {array.arrays} in place of {expected}")


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    os.environ["JAX_PLATFORMS"] = "cpu"
    spec = importlib.util.spec_from_file_location("private_jax", sys.argv[1])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["private_jax"] = module
    spec.loader.exec_module(module)
    main(module)
