"""Finds jax's devices, copies arrays to them and back, and explains their errors."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any, Callable, ContextManager, Iterator, Sequence

import numpy as np

_LONGEST = 600


class StepError(Exception):
    """The error of an exported step that cannot run; the message says why, and what to do."""


class DevicesError(StepError, RuntimeError):
    """The error of missing devices, or of a step that failed on its devices."""


@contextlib.contextmanager
def devices_errors(in_step: bool = True) -> Iterator[None]:
    """Turns XLA's errors in a ``with`` block into `DevicesError`, with XLA's message and a remedy.

    `in_step` says whether the block runs a step. If `in_step` is False, the block compiles a
    program: only errors about too little memory become a `DevicesError`, and other errors stay as
    they are.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if type(error).__name__ not in ("XlaRuntimeError", "JaxRuntimeError"):
            raise
        # A step that failed may leave its devices unusable until the process ends.
        remedy = "Variables may be lost; go on from what was saved last in a new process."
        # Only the message tells errors apart. The second text is from CPU devices in jaxlib 0.4.
        if any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "memory allocating")):
            raise DevicesError(
                f"The devices have no room for the step: {short(error)} Take a smaller batch, more "
                "microbatches, more devices, or devices with more memory; an exported step has to "
                f"be exported again for that.{' ' + remedy if in_step else ''}"
            ) from error
        if not in_step:
            raise
        raise DevicesError(f"The step failed on the devices: {short(error)} {remedy}") from error


def short(error: Exception) -> str:
    """Returns the message of `error` on one line, with a full stop; long messages are cut."""
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
    return text if text.endswith((".", "!", "?")) else text + "."


COUNT_FLAG = "--xla_force_host_platform_device_count"


class DeviceValues:
    """An argument or a result of a program: its value on each core of this process.

    jax can represent the values in two ways: as a list of single-device arrays (`arrays`), or as
    one array over all devices of the program (`joined`). An object of this class begins with one of
    the two, and makes the other when it is asked for.
    """

    def __init__(self, arrays: Sequence[Any] | None = None, joined: Any = None):
        self._arrays = None if arrays is None else list(arrays)
        self._joined = joined

    @property
    def arrays(self) -> list[Any]:
        """The single-device jax arrays, in the order of this process's devices."""
        if self._arrays is None:
            # addressable_data would return the first, since the sharding says that all are equal.
            self._arrays = [shard.data for shard in self._joined.addressable_shards]
        return self._arrays

    @property
    def arrays_or_joined(self) -> Any:
        """The one array over all devices if it was made already, otherwise the list `arrays`."""
        return self._arrays if self._joined is None else self._joined

    def joined(self, sharding: Any) -> Any:
        """Returns the values as one jax array over all devices of the program.

        `sharding` is the array's jax sharding, which replicates over these devices. A replicating
        sharding means that all devices have equal values. The values may differ nevertheless: it is
        used because with it each device has an array of the full shape.
        """
        import jax

        if self._joined is None:
            self._joined = jax.make_array_from_single_device_arrays(
                self.arrays[0].shape, sharding, self.arrays
            )
        return self._joined


def make_cpu_devices(count: int, replace: bool = False) -> None:
    """Asks jax for `count` CPU devices of this process, in the environment variable XLA_FLAGS.

    If XLA_FLAGS already has a number of CPU devices, only replace=True changes that number. A call
    has no effect once jax has started its devices.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    others = [flag for flag in flags if not flag.startswith(COUNT_FLAG)]
    if replace or others == flags:
        os.environ["XLA_FLAGS"] = " ".join([*others, f"{COUNT_FLAG}={count}"])


def exchange_at(address: str) -> None:
    """Makes CPU devices of several processes exchange values at one address of this machine.

    `address` is the address, as in "127.0.0.1". By default gloo, jax's library for this, takes the
    address of the machine's host name. Call this function before jax starts its devices.
    """
    try:
        from jaxlib import _jax as library
    except ImportError:  # before 0.6
        from jaxlib.xla_client import _xla as library
    # jax passes no host name.
    make = library.make_gloo_tcp_collectives
    library.make_gloo_tcp_collectives = functools.partial(make, hostname=address)


def find_devices(count: int, platform: str | None) -> list[Any]:
    """Returns the first `count` jax devices of a platform, over all processes.

    Platforms are "cpu", "gpu" ("cuda", "rocm") and "tpu"; None is jax's own choice. Raises a
    DevicesError if there is no such platform or it has too few devices, and a StepError if jax is
    not installed.
    """
    try:
        import jax
    except ImportError as error:
        raise StepError(
            f'jax cannot be imported: {error}. Install it: pip install jax, or "jax[cuda12]" for '
            'NVIDIA GPUs, or "jax[tpu]".'
        ) from error
    try:
        found = jax.devices(platform)
    except RuntimeError as error:
        raise DevicesError(
            f"jax cannot start {f'the platform {platform!r}' if platform else 'its devices'}: "
            f'{short(error)} Install the plugin (pip install "jax[cuda12]" or "jax[tpu]"), ask for '
            "another platform, or let the environment variable JAX_PLATFORMS name one that is "
            "there, such as cpu."
        ) from error
    return first_devices(found, count)


def first_devices(devices: Sequence[Any], count: int) -> list[Any]:
    """Returns the first `count` devices; raises a DevicesError when there are fewer."""
    if len(devices) >= count:
        return list(devices[:count])
    kind = devices[0].platform if devices else "no"
    cpu = f"Set XLA_FLAGS={COUNT_FLAG}={count} before jax starts"
    remedy = cpu if kind == "cpu" else "Let JAX_PLATFORMS=cpu run it on CPU devices"
    raise DevicesError(
        f"The mesh has {count} {'core' if count == 1 else 'cores'}, and jax has {len(devices)} "
        f"{kind} {'device' if len(devices) == 1 else 'devices'} for them. {remedy}, start more "
        "processes, or take a smaller mesh; an exported step has to be exported again for that."
    )


def put(per_core: Sequence[np.ndarray], devices: Sequence[Any]) -> DeviceValues:
    """Copies an array to each of this process's devices; 64-bit numbers keep their types.

    `devices` are this process's devices, and `per_core` has an array for each of them, in the same
    order. For a CPU device, jax may use the array's memory in place of a copy. So no other code may
    write to the array, and two arrays that a step writes over must not share memory.
    """
    import jax

    values = [_with_types_of_jax(np.asarray(value)) for value in per_core]
    client = devices[0].client
    if hasattr(client, "buffer_from_pyval"):  # jaxlib 0.4
        return DeviceValues([client.buffer_from_pyval(v, d) for v, d in zip(values, devices)])
    with keeping_64_bits():
        return DeviceValues([jax.device_put(v, d) for v, d in zip(values, devices)])


def keeping_64_bits() -> ContextManager[None]:
    """Returns a context manager in which jax does not convert 64-bit numbers to 32 bits."""
    import jax

    enable_x64: Any = getattr(jax, "enable_x64", None)
    if enable_x64 is None:
        from jax import experimental

        enable_x64 = experimental.enable_x64
    return enable_x64(True)


def _with_types_of_jax(value: np.ndarray) -> np.ndarray:
    """Returns `value`, or a view of it with jax's bfloat16 if it has another library's bfloat16.

    The other library may be TensorFlow 2.12, which has a bfloat16 type of its own.
    """
    import jax.numpy as jnp

    if value.dtype.name == "bfloat16" and value.dtype != jnp.bfloat16:
        return value.view(np.uint16).view(jnp.bfloat16)
    return value


def on_all_cores(value: DeviceValues, devices: Sequence[Any]) -> list[np.ndarray]:
    """Returns a value as it is on each core of all processes, in the cores' order.

    All processes have to call this function. `value` is what this process's cores hold, and
    `devices` are the devices of all cores.
    """
    with devices_errors():
        of_this_process = [np.array(array) for array in value.arrays]
    if len(of_this_process) == len(devices):
        return of_this_process
    owners = [d.process_index for d in devices]
    most = max(owners.count(owner) for owner in owners)
    # As bytes, because the program that gathers them might round numbers, but not bytes.
    packed = np.zeros((most, of_this_process[0].nbytes), np.uint8)
    for number, array in enumerate(of_this_process):
        packed[number] = np.frombuffer(array.tobytes(), np.uint8)
    gathered = exchanged(packed, tuple(devices))
    numbers = {owner: number for number, owner in enumerate(sorted(set(owners)))}
    found = []
    for core, owner in enumerate(owners):
        bits = np.ascontiguousarray(gathered[numbers[owner], owners[:core].count(owner)])
        found.append(bits.view(of_this_process[0].dtype).reshape(of_this_process[0].shape))
    return found


def exchanged(row: np.ndarray, devices: tuple[Any, ...], how: str = "gather") -> np.ndarray:
    """Returns all processes' arrays, stacked (how="gather") or added up (how="sum").

    `row` is this process's array, and `devices` are the devices of all processes. All processes
    have to call this function, with arrays of one shape and dtype. The arrays are stacked in the
    order of the processes' numbers.
    """
    import jax

    first, apart, combine = _exchange(devices, how)
    here = next(d for d in first if d.process_index == d.client.process_index())
    rows = jax.make_array_from_single_device_arrays(
        (len(first), *row.shape), apart, [jax.device_put(row[np.newaxis], here)]
    )
    return np.asarray(combine(rows).addressable_data(0))


@functools.lru_cache(maxsize=None)
def _exchange(devices: tuple[Any, ...], how: str) -> tuple[list[Any], Any, Callable[[Any], Any]]:
    """Returns one device of each process, a jax sharding, and a function that exchanges rows.

    `devices` are the devices of all processes. The sharding puts one row of an array on one device
    of each process. The function is compiled. It takes an array with this sharding, and returns on
    each of the devices all rows of the array (how="gather"), or the sum of the rows (how="sum").
    """
    import jax

    # One device of each process takes part: once it has the values, nothing runs any more.
    owners = [d.process_index for d in devices]
    first = [devices[owners.index(owner)] for owner in sorted(set(owners))]
    mesh = jax.sharding.Mesh(np.array(first), ("process",))
    apart, everywhere = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        for axes in (("process",), ())
    )
    combine = {"gather": lambda rows: rows, "sum": lambda rows: rows.sum(0, rows.dtype)}[how]
    return first, apart, jax.jit(combine, out_shardings=everywhere)


def describe(devices: Sequence[Any]) -> str:
    """Returns text about devices, such as "8 cpu devices (cpu), 4 of them here"."""
    here = sum(d.process_index == d.client.process_index() for d in devices)
    text = f"{len(devices)} {devices[0].platform} {'device' if len(devices) == 1 else 'devices'}"
    text += f" ({devices[0].device_kind})"
    return text if here == len(devices) else f"{text}, {here} of them here"
