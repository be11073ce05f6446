"""The devices of a mesh: their names, kinds and places, and how they are connected."""

from __future__ import annotations

import functools
import re
from typing import Any, Callable, Hashable, NamedTuple, Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.tensorflow import (
    local_devices,
)
from mtf_gradsync.mesh.axes import is_simd


def canonical_device(device: Any, argument: str = "A device") -> str:
    """Returns a device string in TensorFlow's full form: "cpu:0" is "/device:CPU:0".

    Anything else raises a ValueError, which calls it `argument`.
    """
    cause: Exception | None = None
    try:
        text = device if isinstance(device, str) else ""
        canonical = tf.DeviceSpec.from_string(text).to_string()
    except (AttributeError, TypeError, ValueError) as error:
        canonical, cause = "", error
    if not canonical:
        raise ValueError(
            f"{argument} must be a string such as '/device:CPU:0' or "
            f"'/job:worker/task:1/device:GPU:0', got {device!r}."
        ) from cause
    return canonical


# Asked for each device of each operation of a program.
@functools.lru_cache(maxsize=None)
def full_name(device: str) -> str:
    """Returns a device's full name, one name for all ways to write it; "" stays empty."""
    return tf.DeviceSpec.from_string(device).to_string()


def place_of(device: str) -> tuple[Any, ...]:
    """Returns a value that is equal for all strings that name one device.

    Unlike `full_name` it knows that "/device:CPU:0" is "/job:localhost/task:0/device:CPU:0".
    """
    spec = tf.DeviceSpec.from_string(device)
    return process_of(device), spec.device_type, spec.device_index or 0


def process_of(device: str) -> tuple[Any, ...]:
    """Returns the process that a device string names: its job, replica and task.

    TensorFlow's name for the local process counts as no name.
    """
    spec = tf.DeviceSpec.from_string(device)
    if spec.job in (None, "localhost") and not spec.task:
        return None, spec.replica or 0, None
    return spec.job, spec.replica or 0, spec.task


#: Kinds of devices that something is known about.
KNOWN_KINDS = ("CPU", "GPU", "TPU")


class Topology(NamedTuple):
    """The hardware under a mesh, as far as device strings and TensorFlow tell.

    Attributes:
      size: number of processors.
      simd: whether one program runs on all of them; nothing else is known then.
      kinds: kind of each processor's device, such as "CPU"; see `kind_of`.
      processes: for each processor a value that is equal for devices of one process.
      chips: for each processor a value that is equal for processors on one device or one GPU.
      linked: whether links join all GPUs of each process, directly or over each other; None if
        unknown, as for GPUs of other processes.
      models: names of the GPUs, where TensorFlow knows them.
    """

    size: int
    simd: bool
    kinds: Sequence[str] = ()
    processes: Sequence[Hashable] = ()
    chips: Sequence[Hashable] = ()
    linked: bool | None = None
    models: Sequence[str] = ()

    def describe(self) -> str:
        """Returns the topology in a few words, for logs."""
        if self.simd:
            return f"a SIMD mesh of {self.size}"
        counts = [f"{self.kinds.count(kind)} {kind}" for kind in sorted(set(self.kinds))]
        devices = " and ".join(counts) + " device" + ("s" if self.size > 1 else "")
        processes = len(set(self.processes))
        where = "one process" if processes == 1 else f"{processes} processes"
        links = {True: ", joined by links", False: ", without links", None: ""}[self.linked]
        models = f" ({', '.join(sorted(set(self.models)))})" if self.models else ""
        return f"{devices}{models} of {where}{links}"


def topology_of(mesh_impl: Any, device_attributes: Sequence[Any] | None = None) -> Topology:
    """Finds out what a placement or SIMD mesh runs on.

    `device_attributes` are TensorFlow's `DeviceAttributes` of devices on the mesh. Without them
    TensorFlow is asked if the mesh has GPUs of this process, and starts all GPUs that it can see,
    as a session would.
    """
    if is_simd(mesh_impl):
        return Topology(mesh_impl.shape.size, simd=True)
    devices = [str(device) for device in mesh_impl.devices]
    kinds = [kind_of(device) for device in devices]
    processes = [_or_itself(process_of, device) for device in devices]
    chips: list[Hashable] = [_or_itself(full_name, device) for device in devices]
    linked: bool | None = None
    models: list[str] = []
    if "GPU" in kinds:
        if device_attributes is None:
            here = any(p == process_of("") for p, kind in zip(processes, kinds) if kind == "GPU")
            device_attributes = _devices_here() if here else ()
        linked, models = _gpu_facts(devices, kinds, processes, chips, device_attributes)
    return Topology(len(devices), False, kinds, processes, chips, linked, models)


def kind_of(device: str) -> str:
    """Returns the kind of a device: "CPU" where the string names none, "unknown" if it is none."""
    try:
        return tf.DeviceSpec.from_string(device).device_type or "CPU"
    except (AttributeError, TypeError, ValueError):
        return "unknown"


def memories(devices: Sequence[str]) -> list[list[int]]:
    """Returns groups of positions of devices that share a memory, as a process's CPUs do."""
    found: dict[Any, list[int]] = {}
    for position, device in enumerate(devices):
        found.setdefault(_memory(device), []).append(position)
    return list(found.values())


# Asked for each device of each operation of a program.
@functools.lru_cache(maxsize=None)
def _memory(device: str) -> Any:
    return process_of(device) if kind_of(device) == "CPU" else full_name(device)


# A strategy that chooses asks at each sum, and TensorFlow makes its devices anew each time.
@functools.lru_cache(maxsize=None)
def _devices_here() -> Sequence[Any]:
    return local_devices()


def _or_itself(fn: Callable[[str], Hashable], device: str) -> Hashable:
    try:
        return fn(device)
    except (AttributeError, TypeError, ValueError):
        return device


def _gpu_facts(
    devices: Sequence[str],
    kinds: Sequence[str],
    processes: Sequence[Hashable],
    chips: list[Hashable],
    device_attributes: Sequence[Any],
) -> tuple[bool | None, list[str]]:
    """Returns whether links join the GPUs, and their names.

    Replaces the `chips` of devices that are parts of one GPU by one value.
    """
    attributes = {place_of(a.name): a for a in device_attributes if kind_of(a.name) == "GPU"}
    gpus = [p for p, kind in enumerate(kinds) if kind == "GPU"]
    found = {
        p: attributes[place_of(devices[p])] for p in gpus if place_of(devices[p]) in attributes
    }
    models = []
    for p, attribute in found.items():
        # For example "device: 0, name: Tesla V100, pci bus id: 0000:00:04.0, compute ...".
        description = dict(re.findall(r"([\w ]+): ([^,]+)", attribute.physical_device_desc))
        description = {key.strip(): value for key, value in description.items()}
        if "name" in description:
            models.append(description["name"])
        if "pci bus id" in description:
            chips[p] = (processes[p], description["pci bus id"])
    if len(found) < len(gpus):
        return None, models
    by_process: dict[Hashable, list[int]] = {}
    for p in gpus:
        by_process.setdefault(processes[p], []).append(p)
    joined = all(_joined([found[p] for p in members]) for members in by_process.values())
    return joined, models


def _joined(gpus: Sequence[Any]) -> bool:
    """Returns whether links reach each GPU of a process from the first."""
    numbers = [tf.DeviceSpec.from_string(gpu.name).device_index for gpu in gpus]
    links = {
        number: {link.device_id for link in gpu.locality.links.link}
        for number, gpu in zip(numbers, gpus)
    }
    reached, todo = set(), [numbers[0]]
    while todo:
        number = todo.pop()
        if number in links and number not in reached:
            reached.add(number)
            todo += links[number]
    return reached == set(numbers)
