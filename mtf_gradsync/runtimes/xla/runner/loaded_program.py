"""Compiles a program for devices, one core on each, and runs programs one after the other."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from .jax_devices import DeviceValues, StepError, describe, devices_errors, short

# For the program that was called last: a result to wait for, and all its results.
_last: DeviceValues | None = None
_results: weakref.WeakSet[DeviceValues] = weakref.WeakSet()


def run_after_last_program(
    run: Callable[[Sequence[DeviceValues]], list[DeviceValues]], arguments: Sequence[DeviceValues]
) -> list[DeviceValues]:
    """Starts a program by a call of `run`; keeps the program from overlapping the last program.

    The last program is the one that the previous call of this function has started. If the new
    program takes one of the last program's results, the devices themselves wait for this result. If
    not, this process first waits until the last program has ended; an error of the last program is
    raised here.

    `run` is called with `arguments`, the values that the new program takes. Returns what `run`
    returns: the new program's results, which may not be computed yet.
    """
    global _last, _results
    if _results.isdisjoint(arguments):
        wait_for_last_program()
    results = run(arguments)
    # One result is enough: all are ready at once, when all collectives are over.
    _last, _results = results[0], weakref.WeakSet(results)
    return results


def wait_for_last_program() -> None:
    """Waits until the program that was started last has ended on all devices of this process.

    If the program failed, its error is raised here.
    """
    global _last
    last, _last = _last, None
    if last is not None:
        import jax

        jax.block_until_ready(last.arrays_or_joined)


_KNOWN_JAX = "0.4.30 to 0.12"
_INSTALL_JAX = "jax>=0.4.30,<0.13"


class RefusedError(StepError):
    """The error of a program that XLA cannot read or compile."""


def compiled(
    program: bytes | str, devices: Sequence[Any], options: Mapping[str, Any] | None = None
) -> Any:
    """Compiles a program for devices, one replica on each; returns jaxlib's loaded executable.

    `program` is StableHLO: text, or a portable artifact. `devices` are jax devices, one for each
    core. `options` are options of XLA's compiler by name; other options keep their defaults.

    Raises:
      RefusedError: when this jax cannot compile the program.
      DevicesError: when the devices have too little memory for the program.
      StepError: when this version of jax has an unknown interface.
    """
    import jax

    client = devices[0].client
    try:
        with devices_errors(in_step=False):
            chosen = compile_options(devices, options)
            if not hasattr(client, "compile_and_load"):  # before jaxlib 0.6
                return client.compile(program, chosen)
            return client.compile_and_load(program, list(devices), chosen)
    except StepError:
        raise
    except (AttributeError, ImportError, TypeError) as error:
        raise StepError(
            f"jax {jax.__version__} has another interface than {_KNOWN_JAX}, which this "
            f'runner knows: {short(error)} Install one of those: pip install "{_INSTALL_JAX}".'
        ) from error
    except (RuntimeError, ValueError) as error:
        raise RefusedError(
            f"XLA (jax {jax.__version__}) cannot read the program or cannot compile it for "
            f"{describe(devices)}: {short(error)}"
        ) from error


def compile_options(devices: Sequence[Any], options: Mapping[str, Any] | None = None) -> Any:
    """Returns jaxlib's ``CompileOptions`` for a program with one replica on each device.

    `devices` are jax devices, or devices that a topology describes. `options` are options of XLA's
    compiler by name; other options keep their defaults.
    """
    try:
        from jax.extend.backend import get_compile_options
    except ImportError:  # in older versions
        from jax._src.compiler import get_compile_options
    return get_compile_options(
        num_replicas=len(devices),
        num_partitions=1,
        device_assignment=np.array([[device.id] for device in devices]),
        env_options_overrides=dict(options or {}) or None,
    )


def serialized_executable(executable: Any, devices: Sequence[Any]) -> bytes:
    """Converts an executable that `compiled` made to bytes, which `loaded_executable` can load.

    `devices` are the devices that the executable was compiled for. Raises a RuntimeError if the
    platform of these devices cannot serialize executables.
    """
    return devices[0].client.serialize_executable(executable)


def loaded_executable(serialized: bytes, devices: Sequence[Any]) -> Any:
    """Returns the executable that `serialized_executable` turned into bytes, loaded on `devices`.

    `serialized` are the bytes. They must come from the same jaxlib, and from devices of the same
    kind. A RuntimeError is raised if the bytes hold no executable that can be loaded.
    """
    client, options = devices[0].client, compile_options(devices)
    if not hasattr(client, "compile_and_load"):  # before jaxlib 0.6
        return client.deserialize_executable(serialized, options)
    return client.deserialize_executable(serialized, list(devices), options)


class LoadedProgram:
    """A program that is ready to run: an executable from `compiled` or `loaded_executable`."""

    def __init__(self, executable: Any, devices: Sequence[Any]):
        import jax

        self.executable = executable
        self._sharding = jax.sharding.NamedSharding(
            jax.sharding.Mesh(np.array(devices), ("core",)), jax.sharding.PartitionSpec()
        )
        is_alone = len({d.process_index for d in devices}) == 1
        # jaxlib 0.4 takes the arrays of the devices as they are; joining them takes time.
        self._joins = hasattr(devices[0].client, "compile_and_load") or not is_alone
        self._waits = not is_alone and devices[0].platform == "cpu"
        # These make one joined array of each result, without one for each device, in a quarter of
        # the time that jax's public way takes.
        self._handlers: list[Any] = []

    def run(self, arguments: Sequence[DeviceValues]) -> list[DeviceValues]:
        """Runs the program once and returns its results, which may not be computed yet.

        `arguments` are the values of the program's parameters, in order. Arguments over which
        results are written cannot be used again.
        """
        return run_after_last_program(self._run, arguments) if self._waits else self._run(arguments)

    def _run(self, arguments: Sequence[DeviceValues]) -> list[DeviceValues]:
        given = [a.joined(self._sharding) if self._joins else a.arrays_or_joined for a in arguments]
        results = self.executable.execute_sharded(given)
        if self._handlers:
            return [DeviceValues(joined=r) for r in results.consume_with_handlers(self._handlers)]
        found = results.disassemble_into_single_device_arrays()
        with contextlib.suppress(AttributeError, ImportError, TypeError):  # a jaxlib without them
            self._handlers = [self._handler(arrays[0].aval) for arrays in found]
        return [DeviceValues(arrays) for arrays in found]

    def _handler(self, aval: Any) -> Any:
        from jaxlib import xla_client

        make = functools.partial(
            xla_client.array_result_handler, aval, self._sharding, committed=True
        )
        try:
            return make(_skip_checks=True)
        except TypeError:  # from jaxlib 0.11 on there are no checks
            return make()
