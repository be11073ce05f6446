"""Finds devices, compiles a program for them, and moves arrays to them and back."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Iterator, Sequence

import numpy as np

from .files import StepError

_COUNT_FLAG = "--xla_force_host_platform_device_count"
_LONGEST = 400
_KNOWN_JAX = "0.4.30 to 0.12"
_INSTALL_JAX = "jax>=0.4.30,<0.13"


class OnDevices:
    """One value for each core: an array on each device of this process.

    Attributes:
      arrays: single-device jax arrays, in the order of this process's cores.
    """

    def __init__(self, arrays: Sequence[Any]):
        self.arrays = list(arrays)
        self._joined: Any = None

    def joined(self, sharding: Any) -> Any:
        """The same as one jax array, though values differ from device to device.

        Args:
          sharding: over all devices of the program, each with an array of the full shape.
        """
        import jax

        if self._joined is None:
            self._joined = jax.make_array_from_single_device_arrays(
                self.arrays[0].shape, sharding, self.arrays
            )
        return self._joined


class LoadedProgram:
    """A program that is ready to run, one core on each device."""

    def __init__(self, program: bytes, devices: Sequence[Any], made_beside: str):
        """Compiles it.

        Args:
          program: StableHLO, as a portable artifact or text.
          devices: a jax device for each core.
          made_beside: the version of jax that it was made beside.

        Raises:
          StepError: when this jax cannot, or the devices have no room.
        """
        import jax

        client = devices[0].client
        is_old = not hasattr(client, "compile_and_load")  # before jaxlib 0.6
        try:
            options = _compile_options(devices)
            if is_old:
                self._executable = client.compile(program, options)
            else:
                self._executable = client.compile_and_load(program, list(devices), options)
        except (AttributeError, ImportError, TypeError) as error:
            raise StepError(
                f"jax {jax.__version__} wants to be called otherwise than {_KNOWN_JAX}, which this "
                f'runner knows: {_short(error)} Install one of those: pip install "{_INSTALL_JAX}".'
            ) from error
        except (RuntimeError, ValueError) as error:
            if _is_for_room(error):
                raise _no_room(error) from error
            raise StepError(
                f"jax {jax.__version__} cannot read the program, or not compile it for "
                f"{devices[0].device_kind}: {_short(error)} It was made beside jax {made_beside}: "
                "install that version or a later one."
            ) from error
        self._sharding = jax.sharding.NamedSharding(
            jax.sharding.Mesh(np.array(devices), ("core",)), jax.sharding.PartitionSpec()
        )
        self._is_alone = len({d.process_index for d in devices}) == 1
        # The old one takes the arrays of the devices as they are, which saves time.
        self._joins = not is_old or not self._is_alone
        self._last: list[OnDevices] = []

    def run(self, arguments: Sequence[OnDevices]) -> list[OnDevices]:
        """Runs it once; returns at once, with results that may not be there yet.

        Args:
          arguments: for each parameter. Those that results are written over are gone.

        Returns:
          For each result.
        """
        # jaxlib 0.4 begins it beside the one before, unless it takes something of that. The
        # processes could then be in the sums of two steps at once, and mix them up.
        if {id(last) for last in self._last}.isdisjoint(map(id, arguments)):
            self.wait()
        given = [a.joined(self._sharding) if self._joins else a.arrays for a in arguments]
        results = self._executable.execute_sharded(given)
        found = [OnDevices(r) for r in results.disassemble_into_single_device_arrays()]
        self._last = [] if self._is_alone else found
        return found

    def wait(self) -> None:
        """Waits, with several processes, until it is over on this one's devices."""
        for last in self._last:
            for array in last.arrays:
                array.block_until_ready()
        self._last = []


def _compile_options(devices: Sequence[Any]) -> Any:
    try:
        from jax.extend.backend import get_compile_options
    except ImportError:  # in older versions
        from jax._src.compiler import get_compile_options
    return get_compile_options(
        num_replicas=len(devices),
        num_partitions=1,
        device_assignment=np.array([[device.id] for device in devices]),
    )


def make_cpu_devices(count: int) -> None:
    """Asks for as many CPU devices of this process, where nobody has asked yet.

    It has no effect once jax has started its devices.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _COUNT_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_COUNT_FLAG}={count}".strip()


def find_devices(count: int, platform: str | None) -> list[Any]:
    """The first devices that jax has.

    Args:
      count: how many.
      platform: "cpu", "gpu" ("cuda", "rocm") or "tpu"; None for jax's own choice.

    Returns:
      Devices of all processes.

    Raises:
      StepError: when there is no such platform.
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
        raise StepError(
            f"jax cannot start {f'the platform {platform!r}' if platform else 'its devices'}: "
            f'{_short(error)} Install the plugin (pip install "jax[cuda12]" or "jax[tpu]"), or '
            "name a platform that is there, such as cpu."
        ) from error
    return check_count(found, count)


def check_count(devices: Sequence[Any], count: int) -> list[Any]:
    """The first of some devices.

    Raises:
      StepError: when there are too few.
    """
    if len(devices) >= count:
        return list(devices[:count])
    kind = devices[0].platform if devices else "no"
    remedy = "Start more processes, or export the step for a smaller mesh"
    if kind == "cpu":
        remedy += f". CPU devices are made by XLA_FLAGS={_COUNT_FLAG}={count} before jax starts."
    else:
        remedy += "; --platform cpu runs it on CPU devices."
    raise StepError(
        f"The step has {count} {'core' if count == 1 else 'cores'}, and jax has {len(devices)} "
        f"{kind} {'device' if len(devices) == 1 else 'devices'} for them. {remedy}"
    )


def put(per_core: Sequence[np.ndarray], devices: Sequence[Any]) -> OnDevices:
    """Copies one value to each device.

    Args:
      per_core: for each device. A CPU device may take an array's memory as its own: nobody else
        may write there, and two arrays that a step writes over may not share it.
      devices: of this process.

    Returns:
      The values on the devices; 64-bit numbers stay what they are.
    """
    import jax

    enable_x64: Any = getattr(jax, "enable_x64", None)
    if enable_x64 is None:
        from jax import experimental

        enable_x64 = experimental.enable_x64
    with explained(), enable_x64(True):
        return OnDevices([jax.device_put(v, d) for v, d in zip(per_core, devices)])


def on_all_cores(value: OnDevices, devices: Sequence[Any]) -> list[np.ndarray]:
    """A value on the cores of all processes, which all have to call this.

    Args:
      value: on this process's.
      devices: of all cores.

    Returns:
      For each core: an array.
    """
    with explained():
        mine = [np.array(array) for array in value.arrays]
    if len(mine) == len(devices):
        return mine
    import jax

    owners = [d.process_index for d in devices]
    most = max(owners.count(owner) for owner in owners)
    # As bytes, because what is gathered passes through a program, which rounds no byte.
    packed = np.zeros((most, mine[0].nbytes), np.uint8)
    for number, array in enumerate(mine):
        packed[number] = np.frombuffer(array.tobytes(), np.uint8)
    # One device of each process takes part: nothing of it runs any more once that has the values.
    first = [devices[owners.index(owner)] for owner in sorted(set(owners))]
    mesh = jax.sharding.Mesh(np.array(first), ("process",))
    apart, everywhere = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        for axes in (("process",), ())
    )
    here = next(d for d in first if d.process_index == d.client.process_index())
    row = jax.device_put(packed[np.newaxis], here)
    rows = jax.make_array_from_single_device_arrays((len(first), *packed.shape), apart, [row])
    gathered = np.asarray(jax.jit(lambda x: x, out_shardings=everywhere)(rows).addressable_data(0))
    numbers = {owner: number for number, owner in enumerate(sorted(set(owners)))}
    found = []
    for core, owner in enumerate(owners):
        bits = np.ascontiguousarray(gathered[numbers[owner], owners[:core].count(owner)])
        found.append(bits.view(mine[0].dtype).reshape(mine[0].shape))
    return found


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turns XLA's errors into `StepError`."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if type(error).__name__ not in ("XlaRuntimeError", "JaxRuntimeError"):
            raise
        if _is_for_room(error):
            raise _no_room(error) from error
        raise StepError(
            f"The step failed on the devices: {_short(error)} Its variables may be lost; start "
            "again from the folder that was saved last."
        ) from error


def describe(devices: Sequence[Any]) -> str:
    """Devices in words, as in "8 cpu devices (cpu), 4 of them here"."""
    here = sum(d.process_index == d.client.process_index() for d in devices)
    text = f"{len(devices)} {devices[0].platform} {'device' if len(devices) == 1 else 'devices'}"
    text += f" ({devices[0].device_kind})"
    return text if here == len(devices) else f"{text}, {here} of them here"


def _is_for_room(error: Exception) -> bool:
    """Whether XLA lacked memory, which jaxlib tells in words alone."""
    # The second is what is left of a CPU device's words in jaxlib 0.4.
    return any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "of memory allocating"))


def _no_room(error: Exception) -> StepError:
    return StepError(
        f"The devices have no room for the step: {_short(error)} Export it for a smaller batch, "
        "more microbatches or a larger mesh, or take devices with more memory."
    )


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
    return text if text.endswith((".", "!", "?")) else text + "."
