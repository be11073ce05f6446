"""What this package uses of jax without a public name, one function each.

All were read on jax and jaxlib 0.10.2. jax belongs to an extra of the package, so each function
imports what it needs itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import numpy as np


class MemoryBytes(NamedTuple):
    """Bytes of memory that a compiled program takes on one device.

    Attributes:
      arguments: its arguments.
      outputs: its results.
      aliased: the part of the results that is written over arguments.
      temporaries: everything in between, at its peak.
      code: the program itself.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int


def compile_stablehlo(
    module: Any, devices: Sequence[Any], options: dict[str, Any], load: bool
) -> Any:
    """Compiles a program that jax did not make, one replica of it for each device.

    Args:
      module: an MLIR module of StableHLO; its context has to be the current one.
      devices: devices that exist (load), or that a topology describes.
      options: options of XLA's compiler by name, beyond its defaults.
      load: whether to make it ready to run.

    Returns:
      The executable, for the other functions of this file.

    Raises:
      RuntimeError: when XLA refuses the program.
    """
    from jaxlib import xla_client

    compile_options = xla_client.CompileOptions()
    for target in (compile_options, compile_options.executable_build_options):
        target.num_replicas, target.num_partitions = len(devices), 1
    ids = np.array([[device.id] for device in devices])
    compile_options.device_assignment = xla_client.DeviceAssignment.create(ids)
    if options:
        compile_options.env_option_overrides = list(options.items())
    client = devices[0].client
    compile_ = client.compile_and_load if load else client.compile
    return compile_(module, xla_client.DeviceList(tuple(devices)), compile_options)


def compiled_hlo(executable: Any) -> bytes:
    """The compiled program of an executable, as a serialized ``HloModuleProto``."""
    return executable.hlo_modules()[0].as_serialized_hlo_module_proto()


def memory_bytes(executable: Any) -> MemoryBytes:
    """The memory that an executable takes on one device."""
    stats = executable.get_compiled_memory_stats()
    return MemoryBytes(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )


def run_executable(executable: Any, arguments: Sequence[Any]) -> list[list[Any]]:
    """Runs an executable that was compiled to be loaded.

    Args:
      executable: what to run.
      arguments: for each parameter, a jax array with one shard on each device.

    Returns:
      For each result, an array for each device.
    """
    return executable.execute_sharded(list(arguments)).disassemble_into_single_device_arrays()


def hlo_text(hlo: bytes) -> str:
    """A serialized ``HloModuleProto`` as XLA prints it."""
    from jaxlib import xla_client

    return xla_client.hlo.HloModule.from_serialized_hlo_module_proto(hlo).to_string()


def hlo_from_text(text: str) -> bytes:
    """The inverse of `hlo_text`."""
    from jaxlib import xla_client

    return xla_client.hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()


def hlo_to_module(hlo: bytes) -> Any:
    """StableHLO of a serialized ``HloModuleProto``; read on jaxlib 0.4.30 to 0.10.2.

    Args:
      hlo: the program.

    Returns:
      The MLIR module, in the current context.
    """
    from jaxlib.mlir import ir

    try:
        from jax.extend.mlir import hlo_to_stablehlo
    except ImportError:
        from jaxlib import xla_client

        computation = xla_client.XlaComputation(hlo)
        return ir.Module.parse(xla_client._xla.mlir.xla_computation_to_mlir_module(computation))
    return ir.Module.parse(hlo_to_stablehlo(hlo))
