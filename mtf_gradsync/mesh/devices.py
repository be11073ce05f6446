"""A mesh's devices: their names, copies of values on them, and the memories that they share.

Processors that share a memory and have equal slices of a variable share one tf variable.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any, Callable, Iterable, Iterator, Sequence

from mtf_gradsync._common import grouped
from mtf_gradsync._private.libraries import TF_VALUES, mtf, tf
from mtf_gradsync._private.tensorflow import calls_function, variable_key, variables_written
from mtf_gradsync.mesh.axes import is_simd


def canonical_device(device: Any, argument: str = "A device") -> str:
    """Returns the full name of a device, as TensorFlow spells it: "cpu:0" is "/device:CPU:0".

    Raises a ValueError if `device` is no device string. `argument` is the name by which the error
    calls `device`.

    Examples:
      >>> canonical_device("cpu:0")
      '/device:CPU:0'
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
    """Returns the full name of a device, as TensorFlow spells it; "" stays empty.

    "cpu:0" and "/device:CPU:0", for example, have the same full name, "/device:CPU:0".
    """
    return tf.DeviceSpec.from_string(device).to_string()


def place_of(device: str) -> tuple[Any, ...]:
    """Returns the process, kind and number of a device; they are equal for all names of a device.

    The full names of one device may differ: "/device:CPU:0" and
    "/job:localhost/task:0/device:CPU:0" name the same device.
    """
    spec = tf.DeviceSpec.from_string(device)
    return process_of(device), spec.device_type, spec.device_index or 0


def process_of(device: str) -> tuple[Any, ...]:
    """Returns the process that a device string names: a tuple of job, replica and task.

    The job or task is None if the device string does not name it. TensorFlow's name for the local
    process, "/job:localhost", counts as no job.
    """
    spec = tf.DeviceSpec.from_string(device)
    if spec.job in (None, "localhost") and not spec.task:
        return None, spec.replica or 0, None
    return spec.job, spec.replica or 0, spec.task


def kind_of(device: str) -> str:
    """Returns the kind of a device, such as "GPU".

    The result is "CPU" if the device string has no kind, and "unknown" if the given string is no
    device string.
    """
    try:
        return tf.DeviceSpec.from_string(device).device_type or "CPU"
    except (AttributeError, TypeError, ValueError):
        return "unknown"


# Values that are given on devices, or copied to devices.


def check_destinations(mesh_impl: Any, destinations: Any) -> list[str] | None:
    """Returns the devices that destinations name, or None if they are a `LaidOutTensor`.

    Destinations are a `LaidOutTensor`, a device string, a list of device strings, or a tf variable,
    which stands for its device.

    Raises:
      ValueError: destinations are of another kind, or empty, or are devices and the mesh is a SIMD
        mesh.
    """
    if hasattr(destinations, "tensor_list"):
        _check_on_mesh(mesh_impl, destinations, "destinations")
        return None
    # Ref and resource variables have no common base in tf.compat.v1.
    if hasattr(destinations, "read_value") and hasattr(destinations, "device"):
        devices = [destinations.device]
    elif isinstance(destinations, str):
        devices = [destinations]
    elif isinstance(destinations, (list, tuple)) and all(isinstance(d, str) for d in destinations):
        devices = list(destinations)
    else:
        raise ValueError(
            "destinations must be a LaidOutTensor, a device string, a list of device strings or a "
            f"tf.Variable, got {destinations!r}."
        )
    if not devices or not all(devices):
        raise ValueError(
            f"destinations must not be empty: got {destinations!r}. Give a device such as "
            "'/device:CPU:0', or a LaidOutTensor for the whole mesh."
        )
    for device in devices:
        canonical_device(device, "A device of destinations")
    if is_simd(mesh_impl):
        raise ValueError(
            f"destinations must be a LaidOutTensor on a SIMD mesh, whose one program runs on all "
            f"cores and cannot name a device; got {destinations!r}."
        )
    return devices


def check_value(mesh_impl: Any, value: Any) -> Any:
    """Returns `value` unchanged; raises ValueError if it is not a `LaidOutTensor` of this mesh.

    The value has to have one slice for each processor, and on a SIMD mesh one slice in all.
    """
    if isinstance(value, mtf.Tensor):
        raise ValueError(
            f"A value to reduce must be a LaidOutTensor, got {value!r}. Give what it was lowered "
            "to: lowering.tensors[x].to_laid_out_tensor()."
        )
    if not hasattr(value, "tensor_list"):
        raise ValueError(
            "A value to reduce must be a LaidOutTensor with a slice for each processor of the "
            f"mesh, got {value!r}."
        )
    _check_on_mesh(mesh_impl, value, "A value to reduce")
    return value


def _check_on_mesh(mesh_impl: Any, value: Any, what: str) -> None:
    slices, each = mesh_impl.size, f"one slice for each of the {mesh_impl.size} processors"
    if is_simd(mesh_impl):
        slices, each = 1, "the one slice that a core's program holds"
    if len(value.tensor_list) != slices:
        raise ValueError(
            f"{what} must have {each} of the mesh {mesh_impl.shape.to_string}, got "
            f"{len(value.tensor_list)}."
        )


def copy_to_devices(mesh_impl: Any, value: Any, devices: Sequence[str]) -> dict[str, tf.Tensor]:
    """Copies a value that is the same on all processors to devices; returns copies by device.

    `value` is a `LaidOutTensor` on a placement mesh. Each copy is made from the nearest slice: a
    slice on the device itself, or else one in the device's process, or else the first slice.
    """
    on_device: dict[str, tf.Tensor] = {}
    in_process: dict[Any, tf.Tensor] = {}
    for device, x in zip(mesh_impl.devices, value.tensor_list):
        on_device.setdefault(canonical_device(device) if device else "", x)
        in_process.setdefault(process_of(device), x)
    result = {}
    for device in devices:
        near = in_process.get(process_of(device), value.tensor_list[0])
        with tf.device(device):
            result[device] = tf.identity(on_device.get(canonical_device(device), near))
    return result


def broadcast_to_devices(tensor: tf.Tensor, devices: Sequence[str]) -> list[tf.Tensor]:
    """Returns a copy of a tensor on each of `devices`, in the same order.

    Each process receives the tensor only once: the first device in a process sends it to the
    process's other devices.
    """
    first: dict[Any, tf.Tensor] = {}
    result = []
    for device in devices:
        with tf.device(device):
            result.append(tf.identity(first.get(process_of(device), tensor)))
        first.setdefault(process_of(device), result[-1])
    return result


# Memories that devices share.


def memories(devices: Sequence[str]) -> list[list[int]]:
    """Returns the positions in `devices`, in a list for each memory: devices that share it.

    The CPU devices of one process share a memory, and every other device has a memory of its own.

    Examples:
      >>> memories(["/cpu:0", "/cpu:1", "/gpu:0"])
      [[0, 1], [2]]
    """
    return list(grouped(range(len(devices)), [_memory(device) for device in devices]).values())


# Asked for each device of each operation of a program.
@functools.lru_cache(maxsize=None)
def _memory(device: str) -> Any:
    return process_of(device) if kind_of(device) == "CPU" else full_name(device)


# TensorFlow calls these operations stateful, but a second read gives what the first one gave.
_REPEATABLE = ("ReadVariableOp", "VarHandleOp")


def slicewise(mesh_impl: Any, fn: Callable[..., Any], inputs: Sequence[Any]) -> list[Any]:
    """Returns the results of `fn` for each processor, in a list in the order of the processors.

    `inputs` has for each argument of `fn` a list of the argument's values for all processors. `fn`
    is called only once for all processors that share a memory and have the same values (the same
    objects). If `fn` makes operations with state, such as those of random numbers, it is called for
    each processor.
    """
    devices, graph = mesh_impl.devices, tf.get_default_graph()
    result: list[Any] = [None] * mesh_impl.size

    def call(processor: int) -> Any:
        return mtf.parallel([devices[processor]], fn, *[[x[processor]] for x in inputs])[0]

    for memory in memories(devices):
        alike = grouped(memory, [tuple([id(x[p]) for x in inputs]) for p in memory])
        for members in alike.values():
            if len(members) == 1:
                result[members[0]] = call(members[0])
                continue
            # The call is on a device that holds an argument, so that chains stay on one device.
            on = {full_name(devices[member]): member for member in members}
            arguments = [x[members[0]] for x in inputs]
            holders = [on.get(full_name(x.device)) for x in arguments if isinstance(x, TF_VALUES)]
            first = next((x for x in holders if x is not None), members[0])
            num_before = graph.version
            value = call(first)
            made = graph.get_operations()[num_before:]
            has_state = any(op.op_def.is_stateful and op.type not in _REPEATABLE for op in made)
            for member in members:
                result[member] = call(member) if has_state and member != first else value
    return result


def shares_all(mesh_impl: Any) -> bool:
    """Returns whether all processors of a mesh share one memory, and one copy of equal slices.

    The result is false if the mesh keeps a copy of a slice for each processor.
    """
    shares = getattr(mesh_impl, "LaidOutVariable", None) is SharedVariable
    return shares and len(memories(mesh_impl.devices)) == 1


def first_alike(mesh_impl: Any, slices: Sequence[Any], groups: Sequence[list[int]]) -> list[Any]:
    """Returns for each group of processors the first group that has the same slices of a tensor.

    `slices` has the tensor's slice on each processor, and `groups` are lists of processor numbers.
    Two groups have the same slices if their slices are the same objects, in the same order, in the
    same memories. On meshes whose processors share copies, this holds for groups that differ only
    along mesh axes which do not split the tensor.
    """
    memory = {p: n for n, members in enumerate(memories(mesh_impl.devices)) for p in members}
    first: dict[Any, list[int]] = {}
    return [first.setdefault(tuple((id(slices[p]), memory[p]) for p in g), g) for g in groups]


class SharedVariable:
    """A lowered variable with one copy of each slice in each memory.

    Processors that share a memory and have equal slices share one tf variable. This tf variable is
    on the device of one of these processors (the writer), and is written once. The processors take
    turns: for each new variable the next one of them is the writer.

    Attributes:
      laid_out_tensor: a `LaidOutTensor` of tf variables, one for each processor.
      writers: for each processor, the processor that writes its slice.
      copy_master_to_slices: the tf operation that sets the slices from the master (the variable
        that checkpoints hold).
      copy_slices_to_master: the tf operation that sets the master from the slices.
    """

    def __init__(self, variable: mtf.Variable, mesh_impl: Any):
        """Makes the tf variables of the slices of `variable`, whose master exists already.

        `mesh_impl` is a mesh with a method `next_turn`. The method returns a number that is one
        more at each call; the number chooses the device that a shared slice is put on.
        """
        self._variable, self._mesh_impl, self.name = variable, mesh_impl, variable.name
        self.writers: list[int] = [0] * mesh_impl.size
        with writing_shared_slices():
            self._make(variable, mesh_impl)

    def _make(self, variable: mtf.Variable, mesh_impl: Any) -> None:
        shape = variable.outputs[0].shape
        slices: list[Any] = [None] * mesh_impl.size
        turn = mesh_impl.next_turn()
        for memory in memories(mesh_impl.devices):
            holders = grouped(memory, [tuple(mesh_impl.slice_begin(shape, p)) for p in memory])
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
        """Returns a tf operation that assigns to every slice, and to each tf variable only once.

        `values` has the value of each processor's slice. `assign_fn` is a function as for Mesh-TF's
        variables: it gets the mtf variable, the tf variable of a slice and the slice's value, and
        returns the tf operation that assigns the value.
        """
        writers = list(dict.fromkeys(self.writers))
        slices = self.laid_out_tensor.all_slices
        with writing_shared_slices():
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
    """Returns for each processor the number of the processor that writes its slice of a variable.

    If processors share no slices, each processor writes its own slice. The argument is the lowered
    variable, `lowering.variables[variable]`.
    """
    shared = getattr(laid_out_variable, "writers", None)
    return shared or list(range(len(laid_out_variable.laid_out_tensor.all_slices)))


# For each graph the numbers of the operations that were made inside of a context
# `writing_shared_slices`, and `only_calls`.
_WRITING: weakref.WeakKeyDictionary[tf.Graph, list[tuple[range, bool]]]
_WRITING = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def writing_shared_slices(only_calls: bool = False) -> Iterator[None]:
    """Returns a context; tf operations made inside may write slices that processors share.

    `check_writers` raises no error about operations made in the context, so that the caller has to
    make sure that each slice is written once. If `only_calls` is true, this holds only for
    operations that call tf functions: what these functions write is checked while the functions are
    built.
    """
    graph = tf.get_default_graph()
    first = graph.version
    yield
    _WRITING.setdefault(graph, []).append((range(first, graph.version), only_calls))


def check_writers(laid_out_variables: Iterable[Any], first: int = 0) -> None:
    """Raises a ValueError if an operation writes a slice that processors share, and may not.

    Operations may write such slices if they were made in the context `writing_shared_slices`.

    Args:
      laid_out_variables: the variables of a lowering, as the lowering has them
        (`lowering.variables.values()`).
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
