"""Runs a small program on two CPU devices, in the way in which this package hands programs to jax.

This module is a script that runs without TensorFlow. If the exit code is 0, the installed jax can
be used. If the exit code is not 0, the last line that the script writes to stderr is the error.
"""

from __future__ import annotations

import os

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


def main() -> None:
    """Compiles a small program and runs it; then serializes, deserializes and runs it again."""
    import jax
    from runner import jax_devices as device_tools  # type: ignore[import-not-found]  # beside this file
    from runner import loaded_program as programs

    devices = jax.devices("cpu")[:2]
    executable = programs.compiled(_PROGRAM, devices)
    kept = programs.serialized_executable(executable, devices)
    for each in (executable, programs.loaded_executable(kept, devices)):
        program = programs.LoadedProgram(each, devices)
        x = device_tools.put([np.ones(4, np.float32)] * 2, devices)
        y = device_tools.put([np.full(4, 1 << 40)] * 2, devices)
        for power in range(1, 4):  # results of the first call take another path
            x, y = program.run([x, y])
            for array, expected in ((x, 2**power), (y, 1 << 40)):
                if not all(np.all(np.asarray(a) == expected) for a in array.arrays):
                    raise ValueError(f"Step {power} gave {array.arrays} in place of {expected}")


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    os.environ["JAX_PLATFORMS"] = "cpu"
    main()
