"""What this package uses of jax without a public name, one function each.

All were read on jax and jaxlib 0.4.34, 0.4.38, 0.10.2 and 0.12.0.1. Where later versions have a
public name it comes first. jax belongs to an extra of the package, so each function imports what
it needs itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any, ContextManager, Mapping, NamedTuple, Sequence

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
    module: str, devices: Sequence[Any], options: Mapping[str, Any], load: bool
) -> Any:
    """Compiles a program that jax did not make, one replica of it for each device.

    Args:
      module: text of an MLIR module of StableHLO.
      devices: devices that exist (load), or that a topology describes.
      options: options of XLA's compiler by name, beyond its defaults.
      load: whether to make it ready to run.

    Returns:
      The executable, for the other functions of this file.

    Raises:
      RuntimeError: when XLA refuses the program.
    """
    client = devices[0].client
    compile_options = _compile_options(devices, options)
    if not hasattr(client, "compile_and_load"):  # before jaxlib 0.6
        return client.compile(module, compile_options)
    if load:
        return client.compile_and_load(module, list(devices), compile_options)
    from jaxlib import xla_client

    return client.compile(_parsed(module), xla_client.DeviceList(tuple(devices)), compile_options)


def _compile_options(devices: Sequence[Any], options: Mapping[str, Any]) -> Any:
    try:
        from jax.extend.backend import get_compile_options
    except ImportError:  # in older versions
        from jax._src.compiler import get_compile_options
    return get_compile_options(
        num_replicas=len(devices),
        num_partitions=1,
        device_assignment=np.array([[device.id] for device in devices]),
        env_options_overrides=dict(options) or None,
    )


def writes_over_arguments_well() -> bool:
    """Whether results may be written over arguments.

    On CPU devices, an executable of jaxlib 0.4.34 or 0.4.38 that went through bytes reads what it
    has overwritten, and 0.4.34 waits for a step whose results are written over its arguments
    before it returns; 0.10.2 does neither.
    """
    import jaxlib

    return tuple(int(part) for part in jaxlib.__version__.split(".")[:3]) >= (0, 5)


def serialized_executable(executable: Any, devices: Sequence[Any]) -> bytes:
    """An executable as bytes that `loaded_executable` takes.

    Raises:
      RuntimeError: where the platform cannot do it.
    """
    return devices[0].client.serialize_executable(executable)


def loaded_executable(serialized: bytes, devices: Sequence[Any]) -> Any:
    """The inverse of `serialized_executable`, for the same version of jaxlib and devices.

    Raises:
      RuntimeError: when these bytes are not such an executable.
    """
    client, options = devices[0].client, _compile_options(devices, {})
    if not hasattr(client, "compile_and_load"):  # before jaxlib 0.6
        return client.deserialize_executable(serialized, options)
    return client.deserialize_executable(serialized, list(devices), options)


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


def cost_numbers(executable: Any) -> dict[str, float]:
    """The compiler's estimate of a step on one device: "flops", "bytes accessed" and so on."""
    numbers = executable.cost_analysis()
    return dict(numbers[0] if isinstance(numbers, list) else numbers)


class OnDevices:
    """One value for each core of a program: an array on each device of this process."""

    def __init__(self, arrays: Sequence[Any] | None = None, joined: Any = None):
        """Takes the value as a program is given it, or as it returns it.

        Args:
          arrays: single-device jax arrays, in the order of this process's devices; or
          joined: one jax array over all devices of the program.
        """
        self._arrays = None if arrays is None else list(arrays)
        self._joined = joined

    @property
    def arrays(self) -> list[Any]:
        """Single-device jax arrays, in the order of this process's devices."""
        if self._arrays is None:
            # addressable_data would give the first of what is called the same on all devices.
            self._arrays = [shard.data for shard in self._joined.addressable_shards]
        return self._arrays

    @property
    def as_it_came(self) -> Any:
        """The joined array where there is one, the list of arrays otherwise."""
        return self._arrays if self._joined is None else self._joined

    def joined(self, sharding: Any) -> Any:
        """The same as one jax array.

        Args:
          sharding: over all devices of the program. Values differ from device to device whatever
            it is called: it only tells jax that each device holds an array of the full shape.
        """
        import jax

        if self._joined is None:
            self._joined = jax.make_array_from_single_device_arrays(
                self.arrays[0].shape, sharding, self.arrays
            )
        return self._joined


class LoadedProgram:
    """An executable with what is known of how this version of jaxlib wants to be called."""

    def __init__(self, executable: Any, devices: Sequence[Any]):
        import jax

        self._executable = executable
        self._sharding = jax.sharding.NamedSharding(
            jax.sharding.Mesh(np.array(devices), ("core",)), jax.sharding.PartitionSpec()
        )
        # jaxlib 0.4 takes the arrays of the devices as they are; joining them takes time.
        self._joins = hasattr(devices[0].client, "compile_and_load") or any(
            d.process_index != devices[0].process_index for d in devices
        )
        # They make one joined array of each result, without one for each device, in a quarter of
        # the time that jax's public way takes.
        self._handlers: list[Any] = []

    def hlo(self) -> bytes:
        """The compiled program, as `compiled_hlo` gives it."""
        return compiled_hlo(self._executable)

    def run(self, arguments: Sequence[OnDevices]) -> list[OnDevices]:
        """Runs it once; returns at once, with results that may not be there yet.

        Args:
          arguments: for each parameter. Those that results are written over are gone.

        Returns:
          For each result.
        """
        given = [a.joined(self._sharding) if self._joins else a.as_it_came for a in arguments]
        results = self._executable.execute_sharded(given)
        if self._handlers:
            return [OnDevices(joined=r) for r in results.consume_with_handlers(self._handlers)]
        found = results.disassemble_into_single_device_arrays()
        with contextlib.suppress(AttributeError, TypeError):  # a jaxlib that has none
            self._handlers = [self._handler(arrays[0].aval) for arrays in found]
        return [OnDevices(arrays) for arrays in found]

    def _handler(self, aval: Any) -> Any:
        from jaxlib import xla_client

        make = functools.partial(
            xla_client.array_result_handler, aval, self._sharding, committed=True
        )
        try:
            return make(_skip_checks=True)
        except TypeError:  # from jaxlib 0.11 on there are no checks
            return make()


def hlo_text(hlo: bytes) -> str:
    """A serialized ``HloModuleProto`` as XLA prints it."""
    return _hlo().HloModule.from_serialized_hlo_module_proto(hlo).to_string()


def hlo_from_text(text: str) -> bytes:
    """The inverse of `hlo_text`."""
    return _hlo().hlo_module_from_text(text).as_serialized_hlo_module_proto()


def _hlo() -> Any:
    from jaxlib import xla_client

    return getattr(xla_client, "hlo", None) or xla_client._xla


def hlo_to_module(hlo: bytes) -> Any:
    """StableHLO of a serialized ``HloModuleProto``.

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


def stablehlo_to_hlo(module: str) -> bytes:
    """A StableHLO module as a serialized ``HloModuleProto``, as XLA's compilers begin with."""
    from jaxlib import xla_client

    try:
        from jaxlib._jax import mlir
    except ImportError:
        mlir = xla_client._xla.mlir
    computation = mlir.mlir_module_to_xla_computation(module)
    return computation.as_serialized_hlo_module_proto()


def _parsed(text: str) -> Any:
    from jax.interpreters import mlir
    from jaxlib.mlir import ir

    with mlir.make_ir_context():
        return ir.Module.parse(text)


def backends_are_initialized() -> bool:
    """Whether jax has started its devices already, after which their number cannot change."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def put_on_devices(values: Sequence[np.ndarray], devices: Sequence[Any]) -> OnDevices:
    """Copies one value to each device.

    Args:
      values: for each device of this process; 64-bit numbers stay what they are.
      devices: the devices of this process.

    Returns:
      The values on the devices.
    """
    import jax

    values = [_with_types_of_jax(np.asarray(v)) for v in values]
    client = devices[0].client
    if hasattr(client, "buffer_from_pyval"):  # jaxlib 0.4
        return OnDevices([client.buffer_from_pyval(v, d) for v, d in zip(values, devices)])
    with enabled_x64():
        return OnDevices([jax.device_put(v, d) for v, d in zip(values, devices)])


def _with_types_of_jax(value: np.ndarray) -> np.ndarray:
    """The same bytes; TensorFlow 2.12 has a bfloat16 of its own."""
    import jax.numpy as jnp

    if value.dtype.name == "bfloat16" and value.dtype != jnp.bfloat16:
        return value.view(np.uint16).view(jnp.bfloat16)
    return value


def enabled_x64() -> ContextManager[None]:
    """Keeps jax from narrowing 64-bit numbers, for a while and this thread."""
    import jax

    enable_x64: Any = getattr(jax, "enable_x64", None)
    if enable_x64 is None:
        from jax import experimental

        enable_x64 = experimental.enable_x64
    return enable_x64(True)


class Cluster(NamedTuple):
    """What jax.distributed has to know of a cluster; None for what is not known.

    Attributes:
      coordinator: address "host:port" of process 0.
      num_processes: how many processes there are.
      process_id: this process's number.
      local_device_ids: the devices of its machine that are its own; None for all.
    """

    coordinator: str | None
    num_processes: int | None
    process_id: int | None
    local_device_ids: list[int] | None


def detected_cluster(timeout: float) -> Cluster:
    """The cluster that jax finds around this process, as ``jax.distributed.initialize`` does.

    Args:
      timeout: seconds.

    Returns:
      The cluster.
    """
    from jax._src.clusters import ClusterEnv

    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    return Cluster(
        *ClusterEnv.auto_detect_unset_distributed_params(
            address, None, None, None, None, int(timeout)
        )
    )


def distributed_is_initialized() -> bool:
    """Whether jax.distributed has been started, and not shut down, in this process."""
    from jax._src import distributed

    return distributed.global_state.client is not None


def use_cpu_collectives(implementation: str) -> None:
    """Says how CPU devices of several processes exchange values, where nobody has said it.

    Later versions of jax know it by themselves.

    Args:
      implementation: "gloo", say.
    """
    import jax

    name = "jax_cpu_collectives_implementation"
    if not hasattr(jax.config, name) and jax.config.read(name) in (None, "none"):
        jax.config.update(name, implementation)
