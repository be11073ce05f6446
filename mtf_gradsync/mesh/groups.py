"""The devices of a mesh, groups of its processors, and copies of a slice that a group shares."""

from __future__ import annotations

import contextlib
import functools
import re
import weakref
from typing import Any, Callable, Hashable, Iterable, Iterator, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import (
    calls_function,
    local_devices,
    variable_key,
    variables_written,
)
from mtf_gradsync.mesh.axes import is_simd


def canonical_device(device: Any, argument: str = "A device") -> str:
    """Returns a device string in TensorFlow's full form: "cpu:0" is "/device:CPU:0".

    Anything else raises a ValueError, which calls it `argument`.
    """
    cause: Exception | None = None
    try:
        canonical = tf.DeviceSpec.from_string(device).to_string()
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


class ProcessorGroups:
    """A partition of a mesh's processors into equally large groups.

    Attributes:
      groups: lists of logical processor numbers; each processor stands in one of them.
      mesh_axes: the mesh axes that the groups run along, or None for groups that no set of axes
        describes.
    """

    def __init__(self, groups: Sequence[Sequence[int]], mesh_axes: Sequence[int] | None = None):
        """Sets the groups.

        Args:
          groups: equally long lists of processor numbers, together every number from 0 on once.
          mesh_axes: the mesh axes by number that the groups run along; None where it is not known.

        Raises:
          ValueError: groups are no such lists.
        """
        try:
            self.groups: list[list[int]] = [list(group) for group in groups]
            members = sorted(processor for group in self.groups for processor in group)
        except TypeError:
            self.groups, members = [], []
        if (
            members != list(range(len(members)))
            or not members
            or len({len(group) for group in self.groups}) > 1
        ):
            raise ValueError(
                "groups must be equally long lists of processor numbers, in which each number from "
                f"0 on stands once, such as [[0, 1], [2, 3]], got {groups!r}."
            )
        self.mesh_axes: tuple[int, ...] | None = (
            None if mesh_axes is None else tuple(sorted(mesh_axes))
        )

    @classmethod
    def along(cls, mesh_impl: Any, mesh_axes: Sequence[int | str]) -> ProcessorGroups:
        """Returns groups of the processors that differ only in their coordinates along mesh_axes.

        Args:
          mesh_impl: an `mtf.MeshImpl`.
          mesh_axes: mesh dimensions by number or name.

        Raises:
          ValueError: the mesh has no such dimension.
        """
        axes = sorted({axis_number(mesh_impl.shape, axis, "mesh_axes") for axis in mesh_axes})
        return cls(mtf.processor_groups(mesh_impl.shape, axes), axes)

    @property
    def group_size(self) -> int:
        """How many processors a group has."""
        return len(self.groups[0])


def check_mesh(mesh_impl: Any) -> None:
    """Raises TypeError unless mesh_impl is a mesh implementation."""
    if not isinstance(mesh_impl, mtf.MeshImpl):
        raise TypeError(
            "mesh_impl must be an mtf.MeshImpl, such as gs.placement_mesh_impl(...) makes, got "
            f"{mesh_impl!r}."
        )


def check_groups(mesh_impl: Any, groups: Any) -> None:
    """Raises TypeError or ValueError unless groups are `ProcessorGroups` of a mesh's processors."""
    check_mesh(mesh_impl)
    if not isinstance(groups, ProcessorGroups):
        raise TypeError(
            "groups must be ProcessorGroups, such as ProcessorGroups.along(mesh_impl, [0]) makes, "
            f"got {groups!r}."
        )
    size = sum(map(len, groups.groups))
    if size != mesh_impl.size:
        raise ValueError(
            f"groups must hold the {mesh_impl.size} processors of the mesh "
            f"{mesh_impl.shape.to_string}, got {size} in {groups.groups}."
        )


def axis_number(shape: mtf.Shape, axis: Any, argument: str) -> int:
    """Returns the number of a mesh dimension that is given by name or number.

    Anything else raises a ValueError, which names the caller's `argument`.
    """
    names = shape.dimension_names
    if axis in names:
        return names.index(axis)
    if isinstance(axis, int) and not isinstance(axis, bool) and 0 <= axis < shape.ndims:
        return axis
    raise ValueError(
        f"{argument} must be dimensions of the mesh {shape.to_string} by name, or by number from "
        f"0 to {shape.ndims - 1}, got {axis!r}."
    )


# Stateful as TensorFlow sees it, but a second read gives what the first one gave.
_REPEATABLE = ("ReadVariableOp", "VarHandleOp")


def slicewise(mesh_impl: Any, fn: Callable[..., Any], inputs: Sequence[Any]) -> list[Any]:
    """Calls a function once for all processors that share a memory and have the same inputs.

    Each input is a list of one value for each processor, and so is the result. A function that
    makes operations with state, as random numbers have, is called for each processor.
    """
    result: list[Any] = [None] * mesh_impl.size
    for memory in memories(mesh_impl.devices):
        alike: dict[tuple[int, ...], list[int]] = {}
        for processor in memory:
            alike.setdefault(tuple(id(x[processor]) for x in inputs), []).append(processor)
        for members in alike.values():
            arguments = [x[members[0]] for x in inputs]
            first = _member_with_argument(mesh_impl, members, arguments)
            num_before = tf.get_default_graph().version
            result[first] = _call(mesh_impl, first, fn, inputs)
            shared = len(members) == 1 or not _has_state(num_before)
            for member in members:
                if member != first:
                    result[member] = (
                        result[first] if shared else _call(mesh_impl, member, fn, inputs)
                    )
    return result


def shares_all(mesh_impl: Any) -> bool:
    """Returns whether a mesh keeps one copy of what is equal on all processors."""
    shares = getattr(mesh_impl, "LaidOutVariable", None) is SharedVariable
    return shares and len(memories(mesh_impl.devices)) == 1


def first_alike(mesh_impl: Any, slices: Sequence[Any], groups: Sequence[list[int]]) -> list[Any]:
    """For each group the first group with the very same tensors in the same memories.

    Where copies are shared, processors that differ only along a dimension that a tensor is not
    split over have one tensor together.
    """
    memory = {p: n for n, members in enumerate(memories(mesh_impl.devices)) for p in members}
    first: dict[Any, list[int]] = {}
    return [first.setdefault(tuple((id(slices[p]), memory[p]) for p in g), g) for g in groups]


def _call(mesh_impl: Any, processor: int, fn: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    return mtf.parallel([mesh_impl.devices[processor]], fn, *[[x[processor]] for x in inputs])[0]


def _member_with_argument(mesh_impl: Any, members: list[int], arguments: Sequence[Any]) -> int:
    """Returns the member whose device holds an argument: chains of operations stay on a device."""
    if len(members) > 1:
        devices = {full_name(mesh_impl.devices[member]): member for member in members}
        for argument in arguments:
            if isinstance(argument, (tf.Tensor, tf.Variable)):
                member = devices.get(full_name(argument.device))
                if member is not None:
                    return member
    return members[0]


def _has_state(num_before: int) -> bool:
    """Returns whether an operation that the graph has beyond `num_before` has state of its own."""
    made = tf.get_default_graph().get_operations()[num_before:]
    return any(op.op_def.is_stateful and op.type not in _REPEATABLE for op in made)


class SharedVariable:
    """A laid-out variable, in place of Mesh-TF's, that has each slice once in each memory.

    Processors that share a memory and a slice have one tf variable together. It is on the device of
    one of them, the devices taking turns, and is written once.

    Attributes:
      laid_out_tensor: a `LaidOutTensor` of tf variables, one for each processor.
      writers: for each processor the one that writes its slice.
      copy_master_to_slices: the tf operation that sets the tf variables from the master.
      copy_slices_to_master: the tf operation that does the reverse.
    """

    def __init__(self, variable: mtf.Variable, mesh_impl: Any):
        """Makes the tf variables of a variable that has a master; the mesh has `next_turn`."""
        self._variable, self._mesh_impl, self.name = variable, mesh_impl, variable.name
        self.writers: list[int] = [0] * mesh_impl.size
        with writing():
            self._make(variable, mesh_impl)

    def _make(self, variable: mtf.Variable, mesh_impl: Any) -> None:
        shape = variable.outputs[0].shape
        slices: list[Any] = [None] * mesh_impl.size
        turn = mesh_impl.next_turn()
        for memory in memories(mesh_impl.devices):
            holders: dict[tuple[int, ...], list[int]] = {}
            for processor in memory:
                begin = tuple(mesh_impl.slice_begin(shape, processor))
                holders.setdefault(begin, []).append(processor)
            for members in holders.values():
                writer = members[turn % len(members)]
                with tf.device(mesh_impl.devices[writer]):
                    value = tf.get_variable(
                        f"{variable.name}_slice_{writer}",
                        mesh_impl.slice_shape(shape),
                        dtype=variable.slice_dtype,
                        collections=[],
                    )
                for member in members:
                    slices[member], self.writers[member] = value, writer
        self.laid_out_tensor = mesh_impl.LaidOutTensor(slices)
        self.copy_master_to_slices = self.assign_to_slices(
            mtf.assign_slice, mesh_impl.make_slices(variable.get_master(), shape)
        )
        to_master = [tf.cast(value, variable.master_dtype) for value in slices]
        self.copy_slices_to_master = variable.assign_to_master(
            mesh_impl.combine_slices(to_master, shape)
        )

    def assign_to_slices(self, assign_fn: Callable[..., Any], values: Sequence[Any]) -> Any:
        """Assigns the value of each processor's slice, each tf variable once."""
        writers = list(dict.fromkeys(self.writers))
        slices = self.laid_out_tensor.all_slices
        with writing():
            return tf.group(
                mtf.parallel(
                    [self._mesh_impl.devices[writer] for writer in writers],
                    assign_fn,
                    [self._variable] * len(writers),
                    [slices[writer] for writer in writers],
                    [values[writer] for writer in writers],
                )
            )


def writers_of(laid_out_variable: Any) -> list[int]:
    """Returns for each processor the one that writes its slice of a laid-out variable."""
    shared = getattr(laid_out_variable, "writers", None)
    return shared or list(range(len(laid_out_variable.laid_out_tensor.all_slices)))


# For each graph the numbers of the operations that were made inside `writing`, and whether those
# are only its calls.
_WRITING: weakref.WeakKeyDictionary[tf.Graph, list[tuple[range, bool]]]
_WRITING = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def writing(only_calls: bool = False) -> Iterator[None]:
    """Lets the operations that are made inside the block write shared slices, each of them once.

    With `only_calls`, those that call functions, which have been checked themselves.
    """
    graph = tf.get_default_graph()
    first = graph.version
    yield
    _WRITING.setdefault(graph, []).append((range(first, graph.version), only_calls))


def check_writers(laid_out_variables: Iterable[Any], first: int = 0) -> None:
    """Raises a ValueError if an operation outside of `writing` writes a slice that is shared.

    Args:
      laid_out_variables: the variables of a lowering.
      first: how many operations the default graph had before the lowering.
    """
    shared = {
        variable_key(x.op): variable.name
        for variable in laid_out_variables
        if isinstance(variable, SharedVariable)
        for x in variable.laid_out_tensor.all_slices
    }
    graph = tf.get_default_graph()
    allowed: dict[bool, set[int]] = {True: set(), False: set()}
    for numbers, only_calls in _WRITING.get(graph, ()):
        allowed[only_calls].update(numbers)
    for number, op in enumerate(graph.get_operations()[first:] if shared else (), first):
        if number in allowed[False] or (number in allowed[True] and calls_function(op)):
            continue
        for key in variables_written(op):
            if key in shared:
                raise ValueError(
                    f"Operation {op.name!r} writes a slice of variable {shared[key]!r}, which "
                    "several processors share: a slice has one writer, as two writes of one step "
                    "would race. Write by mtf.assign, or in an operation of your own by "
                    "lowering.variables[variable].assign_to_slices(assign_fn, values); or make the "
                    "mesh with share_copies=False."
                )
