"""Parts of jax without a public name that this package uses, one function each.

Functions that compile and run programs are in `mtf_gradsync.runtimes.xla.runner`, because exported
steps need these functions, too. The functions of this module were checked with jax and jaxlib
0.4.34, 0.4.38, 0.10.2 and 0.12.0.1. If later versions of jax have a public name for something, that
name is tried first. Each function imports the modules that it needs, because jax is only installed
with an extra of this package.
"""

from __future__ import annotations

import os
from typing import Any, Sequence


def can_write_over_arguments() -> bool:
    """Returns whether, with this jaxlib, results may be written over arguments on CPU devices.

    With jaxlib 0.4.34 and 0.4.38, a deserialized executable reads the memory of arguments after
    results have been written there. With jaxlib 0.10.2 a deserialized executable does not.
    """
    import jaxlib

    return tuple(int(part) for part in jaxlib.__version__.split(".")[:3]) >= (0, 5)


def compiled_hlo(executable: Any) -> bytes:
    """Returns the compiled program of `executable`, as a serialized ``HloModuleProto``."""
    return executable.hlo_modules()[0].as_serialized_hlo_module_proto()


def memory_bytes(executable: Any) -> dict[str, int]:
    """Returns the memory that a compiled program takes on one device, in bytes.

    `executable` is the program, as jax's compiler has returned it. The result has five numbers.
    "arguments" and "outputs" are the values that the program takes and returns; "aliased" is the
    part of the outputs that is written over arguments. "temporaries" are the values between them,
    at the moment when they take the most memory. "code" is the program itself.
    """
    stats = executable.get_compiled_memory_stats()
    return {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
    }


def cost_numbers(executable: Any) -> dict[str, float]:
    """Returns the compiler's estimates for one device: "flops", "bytes accessed" and so on.

    `executable` is the compiled program, as jax's compiler has returned it.
    """
    numbers = executable.cost_analysis()
    return dict(numbers[0] if isinstance(numbers, list) else numbers)


def hlo_text(hlo: bytes) -> str:
    """Returns `hlo`, a serialized ``HloModuleProto``, as text, as XLA prints it."""
    from jaxlib import xla_client

    library = getattr(xla_client, "hlo", None) or xla_client._xla
    return library.HloModule.from_serialized_hlo_module_proto(hlo).to_string()


def hlo_to_module(hlo: bytes) -> Any:
    """Returns StableHLO, a module in the current MLIR context, made from a program of HLO.

    `hlo` is the program, a serialized ``HloModuleProto``.
    """
    from jaxlib.mlir import ir

    try:
        from jax.extend.mlir import hlo_to_stablehlo
    except ImportError:
        from jaxlib import xla_client

        computation = xla_client.XlaComputation(hlo)
        return ir.Module.parse(xla_client._xla.mlir.xla_computation_to_mlir_module(computation))
    return ir.Module.parse(hlo_to_stablehlo(hlo))


def stablehlo_to_hlo(module: str) -> bytes:
    """Returns the serialized ``HloModuleProto`` of a StableHLO module, for XLA's compilers.

    `module` is the module's text.
    """
    from jaxlib import xla_client

    try:
        from jaxlib._jax import mlir
    except ImportError:
        mlir = xla_client._xla.mlir
    computation = mlir.mlir_module_to_xla_computation(module)
    return computation.as_serialized_hlo_module_proto()


def compiled_for_topology(module: str, devices: Sequence[Any], options: Any) -> Any:
    """Compiles StableHLO for the devices of a topology, which need not exist.

    `module` is the module's text, `devices` are the topology's devices, and `options` are jax's
    CompileOptions. The result is an executable, which can be given to `compiled_hlo` and
    `memory_bytes`. Raises RuntimeError if XLA refuses the program.
    """
    client = devices[0].client
    if not hasattr(client, "compile_and_load"):  # before jaxlib 0.6
        return client.compile(module, options)
    from jax.interpreters import mlir
    from jaxlib import xla_client
    from jaxlib.mlir import ir

    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
    return client.compile(parsed, xla_client.DeviceList(tuple(devices)), options)


def backends_are_initialized() -> bool:
    """Returns whether jax has started its devices, after which their number cannot change."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def detected_cluster(
    timeout: float,
) -> tuple[str | None, int | None, int | None, list[int] | None]:
    """Returns the cluster that ``jax.distributed.initialize`` would find around this process.

    A cluster is a job of SLURM, Open MPI, Kubernetes or Cloud TPU. The result has the address
    "host:port" of process 0, the number of processes, this process's number, and the numbers of the
    machine's devices that this process uses (None for all). If jax finds no cluster, all four are
    None, except for the address if JAX_COORDINATOR_ADDRESS is set.

    On a Cloud TPU, jax waits up to `timeout` seconds until the address of process 0 can be looked
    up, and then raises a RuntimeError. In other clusters jax does not wait.
    """
    from jax._src.clusters import ClusterEnv

    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    return ClusterEnv.auto_detect_unset_distributed_params(
        address, None, None, None, None, int(timeout)
    )


def distributed_is_initialized() -> bool:
    """Returns whether jax.distributed has been started, and not shut down, in this process."""
    from jax._src import distributed

    return distributed.global_state.client is not None


def use_cpu_collectives(implementation: str) -> None:
    """Sets how CPU devices of several processes exchange values, unless the user has set it.

    `implementation` is jax's name of a way to exchange values, such as "gloo". Later versions of
    jax choose a way by themselves; with these versions this function sets nothing.
    """
    import jax

    name = "jax_cpu_collectives_implementation"
    # Later versions of jax need no such setting.
    if not hasattr(jax.config, name) and jax.config.read(name) in (None, "none"):
        jax.config.update(name, implementation)
