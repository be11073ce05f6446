"""The interfaces of reduction strategies, without and with state."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.mesh.axes import ProcessorGroups, check_groups, check_mesh, is_simd
from mtf_gradsync.mesh.devices import canonical_device, process_of
from mtf_gradsync.reduce.parts import Cuts, reduce_scatter, take_parts
from mtf_gradsync.reduce.sums import check_values, simd_wire_dtype


class GradientOfCores(NamedTuple):
    """The description of an unreduced gradient, of which each core has one term.

    Attributes:
      name: the name of the gradient's variable, a prefix for the names of a strategy's variables.
      shape: the shape of the gradient, `mtf.Shape`.
      shard_dims: a dimension for each mesh axis that the gradient is to be reduced over. The
        dimension has the axis's size, and the layout splits it over the axis. So a variable whose
        first dimensions are `shard_dims` has a value for each core. `shard_dims` is empty on a mesh
        of one shard whose layout has no axis for the batch.
      dtype: the dtype of the terms.
      slice_shape: the shape of a core's term. It is smaller than `shape` if the layout splits
        dimensions of the gradient.
    """

    name: str
    shape: mtf.Shape
    shard_dims: tuple[mtf.Dimension, ...]
    dtype: tf.DType
    slice_shape: tuple[int, ...]


class Compression(NamedTuple):
    """The number of bytes that a strategy sends for an optimizer's gradients, for one core.

    Attributes:
      given: the size of the gradients in their own dtypes, in bytes.
      sent: the size, in bytes, of an all-reduce that would send as much as the strategy sends.
      whole: names of the gradients that the strategy does not compress, because they are too small,
        for example. They count in `given` and in `sent`.
    """

    given: int
    sent: int
    whole: tuple[str, ...] = ()


class StateMaker(abc.ABC):
    """A maker of variables for a strategy's state, for the gradients of one optimizer.

    Attributes:
      name: prefix for names of variables that belong to no single gradient.
    """

    name: str

    @abc.abstractmethod
    def variable(
        self,
        name: str,
        shape: mtf.Shape,
        dtype: tf.DType = tf.float32,
        shard_dims: Sequence[mtf.Dimension] = (),
        start: float = 0,
        begins_anew: bool = False,
    ) -> mtf.Variable:
        """Makes a variable that is not trained and is saved in checkpoints.

        Args:
          name: the full name, also in checkpoints: `<gradient's name>/<purpose>`, or
            `<name of this maker>/<purpose>`.
          shape: the shape without shard dims.
          dtype: the dtype.
          shard_dims: the shard dims of a gradient, for a variable with a value for each core. If a
            checkpoint is restored on another mesh, the sum of the values over the cores stays the
            same. Empty for a variable that all replicas share, for which each replica has to
            compute the same new value.
          start: the value in a new run, and after a checkpoint without the variable.
          begins_anew: what happens if a checkpoint has the variable in another shape, for example
            because it is from another mesh. If true, the variable is set to `start`; if false,
            restoring fails. It can be true only for variables without shard dims.

        Returns:
          The variable, of shape `[shard_dims...] + shape`.

        Raises:
          ValueError: the graph has a variable of that name already.
        """

    @abc.abstractmethod
    def report(self, compression: Compression) -> None:
        """Records how many bytes the strategy sends, for the log and for `reported`.

        A strategy that compresses calls this method once for each optimizer, in `gradient_state`.
        """


#: A nested structure (NamedTuple, tuple, list or dict) of variables or Nones; while a graph is
#: lowered it holds `LaidOutTensor`s in place of variables.
State = Any


class Strategy(abc.ABC):
    """A method of summing tensors over groups of processors. Wrappers can share a strategy.

    A strategy with a special reduction for the gradients of an optimizer, or with variables for
    them, is a `GradientStrategy`.
    """

    @abc.abstractmethod
    def all_reduce(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> list[Any]:
        """Sums each tensor over each group of processors; all members of a group get the sum.

        Args:
          mesh_impl: an `mtf.MeshImpl`, placement or SIMD.
          values: `LaidOutTensor`s of any shapes and dtypes, with one slice for each processor
            (SIMD: one slice that stands for all).
          groups: the processors that sum with each other.

        Returns:
          `LaidOutTensor`s with the shapes and dtypes of `values`, in the same order.
        """

    def reduce_scatter(
        self,
        mesh_impl: Any,
        values: Sequence[Any],
        groups: ProcessorGroups,
        cuts: Sequence[Cuts],
    ) -> list[Any]:
        """Sums each tensor over each group, and gives each processor only its part of the sum.

        On a SIMD mesh all strategies that send the same dtypes use the same reduce-scatter. In
        other cases this base method all-reduces the tensors and takes each processor's part of the
        sums, with the same result.

        Args:
          mesh_impl: as for `all_reduce`.
          values: as for `all_reduce`.
          groups: the processors that sum with each other, along mesh axes.
          cuts: for each value, the cuts into parts, along some of the mesh axes of the groups.

        Returns:
          `LaidOutTensor`s of the dtypes of `values`, in the same order.
        """
        if is_simd(mesh_impl) and self._sends_as_simd_does(mesh_impl, values, groups):
            self.check(mesh_impl, groups)
            check_values(values)
            return reduce_scatter(mesh_impl, values, groups, cuts)
        sums = self.all_reduce(mesh_impl, values, groups)
        return [take_parts(mesh_impl, x, cut) for x, cut in zip(sums, cuts)]

    def _sends_as_simd_does(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups
    ) -> bool:
        dtypes = {x.tensor_list[0].dtype.base_dtype for x in values}
        return all(
            self.wire_dtype(mesh_impl, dtype, groups) == simd_wire_dtype(mesh_impl, dtype, groups)
            for dtype in dtypes
        )

    @property
    def has_gradient_reduction(self) -> bool:
        """Whether an optimizer's gradients are reduced by `reduce_gradients`, not `all_reduce`."""
        return False

    def gradient_state(self, gradients: Sequence[GradientOfCores], maker: StateMaker) -> State:
        """Makes the variables that this strategy keeps for gradients; called when a step is built.

        Args:
          gradients: gradients of one optimizer that are reduced over the same mesh axes.
          maker: the object that makes the variables.

        Returns:
          The variables, a `State`; none in this base class.
        """
        del gradients, maker
        return ()

    def reduce_gradients(
        self, mesh_impl: Any, values: Sequence[Any], groups: ProcessorGroups, state: State
    ) -> tuple[list[Any], State]:
        """Reduces an optimizer's gradients; called if `has_gradient_reduction`.

        The new state is written when all gradients exist and all variables have been read, and only
        on steps that use the sums.

        Args:
          mesh_impl: as for `all_reduce`.
          values: each core's terms of the gradients that `gradient_state` was given, in order.
            Inside `CompressedAllReduce` these terms have a narrower dtype.
          groups: the processors that sum with each other, along mesh axes. On a mesh of one shard,
            each group has one processor.
          state: the structure that `gradient_state` returned, with `LaidOutTensor`s of each core's
            values, without shard dims, in place of variables.

        Returns:
          The sums, of the shapes and dtypes of values, the same on all processors of a group; and
          the new state, in the structure of the old one.
        """
        return self.all_reduce(mesh_impl, values, groups), state

    def check(self, mesh_impl: Any, groups: ProcessorGroups) -> None:
        """Raises an error, before anything is built, if this strategy cannot sum over groups.

        Args:
          mesh_impl: the mesh.
          groups: the processors that sum with each other.

        Raises:
          TypeError: mesh_impl is not a mesh, or groups is not a `ProcessorGroups`.
          ValueError: the groups are not of this mesh, or the strategy's settings do not fit it.
        """
        check_groups(mesh_impl, groups)

    def wire_dtype(self, mesh_impl: Any, dtype: tf.DType, groups: ProcessorGroups) -> tf.DType:
        """Returns the dtype in which values are sent: the narrowest one if levels differ.

        Args:
          mesh_impl: the mesh.
          dtype: the dtype of the values.
          groups: the processors that sum with each other.

        Returns:
          The dtype of the messages.
        """
        return simd_wire_dtype(mesh_impl, dtype, groups) if is_simd(mesh_impl) else dtype

    def reduce(
        self,
        mesh_impl: Any,
        aggregation: Any,
        value: Any,
        destinations: Any,
        groups: ProcessorGroups | None = None,
    ) -> Any:
        """Sums or averages one value over processors and copies the result to destinations.

        Args:
          mesh_impl: an `mtf.MeshImpl`, placement or SIMD.
          aggregation: `tf.VariableAggregation.SUM` or `.MEAN`. A mean is the sum, divided once
            by the number of processors in a group.
          value: a `LaidOutTensor` with one slice for each processor.
          destinations: where the result is copied to. Any `LaidOutTensor` on the mesh stands for
            all processors, each of which gets the result of its group. Otherwise it names devices,
            which need not be on the mesh: a device string, a list of device strings, or a tf
            variable, which stands for its device.
          groups: the processors that are summed; None for all in one group. With devices as
            destinations there must be one group.

        Returns:
          A `LaidOutTensor` if destinations is one, else a dictionary from each device to the
          result on this device, in the order of destinations.

        Raises:
          TypeError: mesh_impl is not a mesh, or groups is not a `ProcessorGroups`.
          ValueError: an argument is anything else, or a value is not a dense numeric tensor of
            known shape.

        References:
          TensorFlow 1's `CrossTowerOps.reduce`.
        """
        pairs = [(value, destinations)]
        return self.batch_reduce(mesh_impl, aggregation, pairs, groups)[0]

    def batch_reduce(
        self,
        mesh_impl: Any,
        aggregation: Any,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        groups: ProcessorGroups | None = None,
    ) -> list[Any]:
        """Reduces several values together, each as `reduce` does.

        Args:
          mesh_impl: an `mtf.MeshImpl`.
          aggregation: as for `reduce`.
          value_destination_pairs: a list or tuple of tuples (value, destinations); destinations
            may differ.
          groups: as for `reduce`.

        Returns:
          A list with the result of `reduce` for each pair.

        Raises:
          ValueError: as for `reduce`, or value_destination_pairs is not such a list.
        """
        check_mesh(mesh_impl)
        pairs = as_pairs(value_destination_pairs)
        is_mean = check_aggregation(aggregation)
        values = [check_value(mesh_impl, value) for value, _ in pairs]
        places = [check_destinations(mesh_impl, destinations) for _, destinations in pairs]
        check_values(values)
        if groups is None:
            groups = ProcessorGroups.along(mesh_impl, range(mesh_impl.shape.ndims))
        self.check(mesh_impl, groups)
        if len(groups.groups) > 1 and any(devices is not None for devices in places):
            raise ValueError(
                "destinations must be LaidOutTensors if there are several groups, each of which "
                f"has its own result; got devices for the groups {groups.groups}."
            )
        if is_mean:
            check_divisible(values)
        sums = self.all_reduce(mesh_impl, values, groups)
        if is_mean:
            sums = [divide(mesh_impl, x, groups.group_size) for x in sums]
        return [
            x if devices is None else copies(mesh_impl, x, devices)
            for x, devices in zip(sums, places)
        ]

    def broadcast(self, mesh_impl: Any, tensor: tf.Tensor, destinations: Any) -> Any:
        """Copies one tensor to destinations.

        Args:
          mesh_impl: an `mtf.MeshImpl`.
          tensor: a dense tf tensor. In a SIMD program it is the same on all cores already.
          destinations: as for `reduce`.

        Returns:
          A `LaidOutTensor` if destinations is one, else a dictionary from each device to its copy.

        Raises:
          TypeError: mesh_impl is not a mesh.
          ValueError: an argument is anything else.
        """
        check_mesh(mesh_impl)
        if not isinstance(tensor, tf.Tensor):
            raise ValueError(f"tensor must be a dense tf.Tensor, got {tensor!r}.")
        devices = check_destinations(mesh_impl, destinations)
        if is_simd(mesh_impl):
            return mesh_impl.slicewise(tf.identity, mesh_impl.LaidOutTensor([tensor]))
        if devices is None:
            return mesh_impl.LaidOutTensor(spread(tensor, mesh_impl.devices))
        return dict(zip(devices, spread(tensor, devices)))


def reduce_scatter_by(
    strategy: Any,
    mesh_impl: Any,
    values: Sequence[Any],
    groups: ProcessorGroups,
    cuts: Sequence[Cuts],
) -> list[Any]:
    """Returns what `strategy.reduce_scatter` returns for the same arguments.

    If `strategy` has no method `reduce_scatter`, because it is not a `Strategy`, its `all_reduce`
    makes the sums, and each processor then takes its part of them.
    """
    scatter = getattr(strategy, "reduce_scatter", None)
    if scatter is not None:
        return scatter(mesh_impl, values, groups, cuts)
    sums = strategy.all_reduce(mesh_impl, values, groups)
    return [take_parts(mesh_impl, x, cut) for x, cut in zip(sums, cuts)]


def has_gradient_reduction(strategy: Any) -> bool:
    """Returns whether a strategy reduces an optimizer's gradients by its own `reduce_gradients`.

    If `strategy` is an object of another class than `Strategy`, without the attribute
    `has_gradient_reduction`, the result is False.
    """
    return bool(getattr(strategy, "has_gradient_reduction", False))


def check_strategy(reducer: Any) -> Any:
    """Returns `reducer` unchanged; raises TypeError if it is not a strategy.

    Any object with a method `all_reduce` that is not a class counts as a strategy.
    """
    if isinstance(reducer, type) or not callable(getattr(reducer, "all_reduce", None)):
        raise TypeError(
            "reducer must be a strategy such as mtf_gradsync.reduce.FusedAllReduce(), "
            f"got {reducer!r}."
        )
    return reducer


# Arguments and results of `Strategy.reduce` and `broadcast`.


def check_aggregation(aggregation: Any) -> bool:
    """Returns whether an aggregation is a mean: `tf.VariableAggregation.MEAN`, and not `.SUM`.

    Raises ValueError if `aggregation` is neither MEAN nor SUM.
    """
    if aggregation == tf.VariableAggregation.MEAN:
        return True
    if aggregation == tf.VariableAggregation.SUM:
        return False
    raise ValueError(
        "aggregation must be tf.VariableAggregation.SUM or tf.VariableAggregation.MEAN, got "
        f"{aggregation!r}."
    )


def check_divisible(values: Sequence[Any]) -> None:
    """Raises ValueError if one of `values` (`LaidOutTensor`s) is of an integer dtype.

    Integers have no mean.
    """
    for value in values:
        dtype = value.tensor_list[0].dtype
        if dtype.is_integer:
            raise ValueError(
                f"There is no mean of {dtype.name} values: got {value!r}. Cast it to a float, or "
                "take the sum."
            )


def divide(mesh_impl: Any, value: Any, number: int) -> Any:
    """Returns the `LaidOutTensor` `value`, divided by `number`.

    A slice that several processors share is divided once, and they share the quotient.
    """
    if is_simd(mesh_impl):
        return mesh_impl.slicewise(lambda x: x / tf.cast(number, x.dtype), value)
    divided: dict[str, tf.Tensor] = {}
    for x in value.tensor_list:
        if x.name not in divided:
            with tf.device(x.device):
                divided[x.name] = x / tf.cast(number, x.dtype)
    return mesh_impl.LaidOutTensor([divided[x.name] for x in value.tensor_list])


def check_destinations(mesh_impl: Any, destinations: Any) -> list[str] | None:
    """Returns the devices that destinations name, or None if they are a `LaidOutTensor`.

    See `Strategy.reduce` for what destinations may be.

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


def as_pairs(pairs: Any) -> list[tuple[Any, Any]]:
    """Returns a list or tuple of pairs (value, destinations) as a list.

    Raises ValueError if `pairs` is no list or tuple of tuples of two elements. The elements of a
    pair are not checked.
    """
    if not isinstance(pairs, (list, tuple)):
        raise ValueError(
            "value_destination_pairs must be a list or tuple of tuples (value, destinations), got "
            f"{pairs!r}."
        )
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                "Each element of value_destination_pairs must be a tuple (value, destinations), "
                f"got {pair!r}."
            )
    return list(pairs)


def copies(mesh_impl: Any, value: Any, devices: Sequence[str]) -> dict[str, tf.Tensor]:
    """Copies a value that is the same on all processors to devices; returns copies by device.

    `value` is a `LaidOutTensor` on a placement mesh. Each copy is made from the nearest slice: one
    on the device itself, else one in the device's process, else the first slice.
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


def spread(tensor: tf.Tensor, devices: Sequence[str]) -> list[tf.Tensor]:
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


def _check_on_mesh(mesh_impl: Any, value: Any, what: str) -> None:
    slices, each = mesh_impl.size, f"one slice for each of the {mesh_impl.size} processors"
    if is_simd(mesh_impl):
        slices, each = 1, "the one slice that a core's program holds"
    if len(value.tensor_list) != slices:
        raise ValueError(
            f"{what} must have {each} of the mesh {mesh_impl.shape.to_string}, got "
            f"{len(value.tensor_list)}."
        )
