"""Groups of a mesh's processors, and copies of a slice that a group shares."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Callable, Iterable, Iterator, Sequence

from mtf_gradsync._private.libraries import TF_VALUES, mtf, tf
from mtf_gradsync._private.tensorflow import (
    calls_function,
    variable_key,
    variables_written,
)
from mtf_gradsync.mesh.devices import full_name, memories


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
            if isinstance(argument, TF_VALUES):
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
