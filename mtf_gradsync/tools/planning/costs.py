"""Predicts the cost of a training step in each division, from its mtf graph and without compiling.

Here a division is a mesh, a layout, and the settings of the wrappers around the optimizer.
"""

from __future__ import annotations

import collections
import math
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

from mtf_gradsync.extension import mtf
from mtf_gradsync.tools.planning.machines import Machine
from mtf_gradsync.tools.planning.search import rules_of, summed_dims
from mtf_gradsync.tools.planning.stacks import StackSettings

# Operations that write no array in a compiled program, or only rename or reshape one.
_FREE = (
    mtf.Constant,
    mtf.Variable,
    mtf.OneHotOperation,
    mtf.RangeOperation,
    mtf.RandomOperation,
    mtf.ReshapeOperation,
    mtf.StopGradient,
    mtf.ImportOperation,
    mtf.BroadcastOperation,
)
# Shares of the bytes that an operation would touch by itself, and of the forward pass's results
# that the backward pass reads: compilers join operations, and compute cheap results again.
# Measured: docs/best.md, "How the prediction is made".
_TOUCHED, _KEPT, _HELD = 0.25, 0.5, 0.5
# A collective of fewer bytes is joined with others.
_LEAST_BYTES = 1024
_FLOAT32 = 4
# The TPU compiler keeps a reduce-scatter over all cores of a slice of up to so many cores. In a
# larger slice it makes an all-reduce of it and cuts the result (libtpu 0.0.17).
_KEPT_IN = 8
# The share of a sharded update's sums that become separate messages.
_MESSAGES = 0.5


class Array(NamedTuple):
    """The kind of an array in an mtf graph: its dimensions' names and sizes, and bytes per number.

    One `Array` describes all arrays that have the same dimensions, and the same bytes per number.
    """

    dims: tuple[tuple[str, int], ...]
    number_bytes: int

    @classmethod
    def of(cls, tensor: Any, dtype: Any = None) -> Array:
        """Returns the `Array` that describes an mtf tensor or variable.

        `dtype` says how many bytes a number of the array takes; None stands for the dtype of the
        tensor or variable.
        """
        dims = tuple((dim.name, dim.size) for dim in tensor.shape.dims)
        return cls(dims, (dtype or tensor.dtype).size)

    @property
    def names(self) -> frozenset[str]:
        """The names of the array's dimensions."""
        return frozenset(name for name, _ in self.dims)


class _Product(NamedTuple):
    """A product of matrices.

    `dims` are the names and sizes of all dimensions of the multiplied arrays, each dimension once.
    `arrays` are the multiplied arrays, followed by their product.
    """

    dims: tuple[tuple[str, int], ...]
    arrays: tuple[Array, ...]


class _Sum(NamedTuple):
    """A sum over dimensions: cores that split these dimensions have to add up their parts."""

    array: Array
    over: frozenset[str]
    is_gradient: bool  # whether it is a gradient, which wrappers reduce over the replica axes


class _Reshape(NamedTuple):
    """A reshape, whose result may be split along other dimensions than its input."""

    before: Array
    after: Array


class StepCosts(NamedTuple):
    """The facts of a training step from which its cost on any mesh is predicted.

    Attributes that are mappings are counts: a key is a product, array, sum or reshape, and its
    value says how often it occurs in the step's graph.

    Attributes:
      products: products of matrices in the forward and the backward pass.
      touched: arrays that operations other than products and reshapes read or write.
      kept: results of the forward pass that stay in memory because the backward pass reads them.
      sums: results that are sums over dimensions.
      reshapes: reshapes, whose results may be split in another way than their inputs.
      variables: the trained variables, in the dtypes that cores hold.
      gradients: the gradients of the trained variables.
      others: variables that are not trained: slots, averages.
      update_products: products of matrices in the update, such as Muon's.
      update_reads: arrays that the update reads to sum them, for example for a norm.
      shapes: dimensions of each array in the graph. A layout may not split two dimensions of one
        array over the same mesh axis.
      whole_dims: names of the dimensions that no mesh axis may split, because Mesh-TensorFlow cuts
        or joins arrays along them.
      batch_dims: names of the batch's dimensions; microbatch steps divide the last of them.
      batch_size: the size of the last of the batch's dimensions, for an update.
    """

    products: Mapping[_Product, int]
    touched: Mapping[Array, int]
    kept: Mapping[Array, int]
    sums: Mapping[_Sum, int]
    reshapes: Mapping[_Reshape, int]
    variables: Mapping[Array, int]
    gradients: Mapping[Array, int]
    others: Mapping[Array, int]
    update_products: Mapping[_Product, int]
    update_reads: Mapping[Array, int]
    shapes: tuple[tuple[tuple[str, int], ...], ...]
    whole_dims: frozenset[str]
    batch_dims: tuple[str, ...]
    batch_size: int

    @property
    def largest_dims(self) -> list[str]:
        """The names of the trained variables' dimensions that a mesh may split.

        The first name is of the dimension that the largest part of the variables has.
        """
        sizes: collections.Counter[str] = collections.Counter()
        for array, count in self.variables.items():
            numbers = count * math.prod(size for _, size in array.dims)
            sizes.update({name: numbers for name in sorted(array.names - self.whole_dims)})
        return [name for name, _ in sizes.most_common()]


class Predicted(NamedTuple):
    """The predicted cost of an update in one division.

    Attributes:
      seconds: the time of an update of the whole batch, with all its microbatch steps.
      bytes_per_core: the peak memory of a core.
      compute_seconds: the part of `seconds` for operations and their access to memory.
      model_seconds: the part of `seconds` for collectives that a model needs because it is split.
      sync_seconds: the part of `seconds` for collectives of gradients and of new values.
    """

    seconds: float
    bytes_per_core: float
    compute_seconds: float = 0.0
    model_seconds: float = 0.0
    sync_seconds: float = 0.0


def read_costs(
    loss: mtf.Tensor,
    gradients: Sequence[mtf.Tensor | None],
    variables: Sequence[mtf.Variable],
    batch_dims: Sequence[str],
    batch_size: int,
) -> StepCosts:
    """Reads the facts that decide a step's cost from the step's mtf graph.

    Call `read_costs` after the step's gradients have been computed and applied.

    Args:
      loss: the loss. Operations up to the loss are the forward pass.
      gradients: the gradients of the variables. Operations after the last of them are the update.
      variables: the variables that are trained.
      batch_dims: names of the batch's dimensions.
      batch_size: the size of the last of the batch's dimensions, for which the graph is built.

    Returns:
      The facts of the step.

    Raises:
      ValueError: when the model is in a loop, because the graph does not say how often a loop runs.
    """
    graph = loss.graph
    place = {operation: number for number, operation in enumerate(graph.operations)}
    made = [g for g in gradients if g is not None]
    forward_end = place[loss.operation] + 1
    backward_end = max([forward_end, *(place[g.operation] + 1 for g in made)])
    found: dict[str, collections.Counter[Any]]
    found = {name: collections.Counter() for name in ("products", "touched", "sums", "reshapes")}
    reads: collections.Counter[Array] = collections.Counter()
    pending = _pending_sums(graph.operations[:backward_end])
    batch = frozenset(batch_dims)
    for operation in graph.operations[:backward_end]:
        if isinstance(operation, mtf.WhileLoopOperation):
            raise ValueError(
                f"The step is computed in a loop, {operation.name!r}: give the model in one "
                "microbatch."
            )
        outputs = [Array.of(x) for x in operation.outputs]
        inputs = [Array.of(x) for x in operation.inputs]
        is_backward = place[operation] >= forward_end
        over = pending.get(operation)
        if over:
            is_gradient = is_backward and not outputs[0].names & batch
            found["sums"][_Sum(outputs[0], over, is_gradient)] += 1
        is_lookup = not is_backward and any(
            isinstance(x.operation, mtf.OneHotOperation) for x in operation.inputs
        )
        if _is_product(operation) and not is_lookup:
            found["products"][_product(operation)] += 1
        elif isinstance(operation, mtf.ReshapeOperation):
            found["reshapes"][_Reshape(inputs[0], outputs[0])] += 1
        elif not isinstance(operation, _FREE):
            found["touched"].update(
                inputs if isinstance(operation, mtf.ReduceOperation) else outputs
            )
    update = graph.operations[backward_end:]
    for operation in update:
        if isinstance(operation, mtf.ReduceOperation):
            reads.update(map(Array.of, operation.inputs))
    trained = set(variables)
    return StepCosts(
        **found,
        kept=_kept_results(graph.operations, forward_end, backward_end),
        variables=collections.Counter(Array.of(v, v.slice_dtype) for v in variables),
        gradients=collections.Counter(map(Array.of, made)),
        others=collections.Counter(
            Array.of(v, v.slice_dtype) for v in graph.all_variables if v not in trained
        ),
        update_products=collections.Counter(map(_product, filter(_is_product, update))),
        update_reads=reads,
        shapes=tuple({Array.of(x).dims for op in graph.operations for x in op.outputs}),
        # A slicewise operation names the dimensions that may be split, and many name none.
        whole_dims=frozenset().union(
            *(
                operation.unsplittable_dims
                for operation in graph.operations
                if not isinstance(operation, mtf.SlicewiseOperation)
            )
        ),
        batch_dims=tuple(batch_dims),
        batch_size=batch_size,
    )


def _is_product(operation: mtf.Operation) -> bool:
    return isinstance(operation, mtf.EinsumOperation) and bool(summed_dims(operation))


def _product(operation: mtf.Operation) -> _Product:
    inputs = [Array.of(x) for x in operation.inputs]
    dims = tuple(sorted({dim for x in inputs for dim in x.dims}))
    return _Product(dims, (*inputs, *map(Array.of, operation.outputs)))


def _pending_sums(operations: Sequence[mtf.Operation]) -> dict[mtf.Operation, frozenset[str]]:
    """Finds the sums that need an all-reduce if the dimensions that they sum over are split.

    If two sums over the same dimensions are added to each other, Mesh-TensorFlow makes one
    all-reduce after the addition. So the returned dictionary has one key for both sums: the
    addition.

    Returns:
      A dictionary whose keys are the sums among `operations`. Its values are the names of the
      dimensions that each sum is over.
    """
    over: dict[mtf.Operation, frozenset[str]] = {}
    for operation in operations:
        dims = summed_dims(operation)
        if isinstance(operation, mtf.AddOperation):
            makers = [x.operation for x in operation.inputs]
            both = {over.get(maker, frozenset()) for maker in makers}
            if len(both) == 1:
                dims = next(iter(both))
                for maker in makers:
                    over.pop(maker, None)
        if dims:
            over[operation] = dims
    return over


def _kept_results(
    operations: Sequence[mtf.Operation], forward_end: int, backward_end: int
) -> Mapping[Array, int]:
    """Counts the results of the forward pass that the backward pass reads.

    Args:
      operations: all operations of the graph, in order.
      forward_end: how many operations are the forward pass; they come first.
      backward_end: how many operations are the forward and the backward pass.

    Returns:
      A dictionary from each `Array` to the number of counted results that have its dimensions and
      its bytes.
    """
    own = set(operations[:forward_end])
    read = {
        x: None
        for operation in operations[forward_end:backward_end]
        for x in operation.inputs
        if x.operation in own and not isinstance(x.operation, _FREE)
    }
    return collections.Counter(map(Array.of, read))


class Predictor:
    """Predicts what an update costs with one mesh and layout on a machine.

    Attributes:
      replica_axes: names of the mesh axes over which the batch is split.
      shards: the number of shards of the batch.
      batch_parts: the number of parts into which the last of the batch's dimensions is split.
    """

    def __init__(self, costs: StepCosts, machine: Machine, mesh_shape: str, layout: str):
        """Makes a predictor for one mesh and layout.

        Args:
          costs: the facts of the training step, as `read_costs` returns them.
          machine: the machine, which tells the rates of its cores and the times of collectives.
          mesh_shape: the mesh shape, such as "batch:4;model:2".
          layout: the layout rules, such as "batch:batch;heads:model".

        Raises:
          ValueError: when this mesh and layout cannot split the model, or the mesh has not as many
            cores as the machine.
        """
        self._costs, self._machine = costs, machine
        self._shape = mtf.convert_to_shape(mesh_shape)
        dims = self._shape.dims
        self._sizes = {dim.name: dim.size for dim in dims}
        rules = [(rule[0], rule[-1]) for rule in rules_of(layout)]
        self._axis = {name: axis for name, axis in rules if self._sizes.get(axis, 1) > 1}
        self._links: dict[Any, tuple[float, float]] = {}
        self.replica_axes = tuple(
            dim.name for dim in dims
            if dim.name in {self._axis.get(name) for name in costs.batch_dims}
        )  # fmt: skip
        self.shards = self._cores(self.replica_axes)
        self.batch_parts = self._sizes.get(self._axis.get(costs.batch_dims[-1], ""), 1)
        self._check()
        self._peak = machine.peak_flops_per_core or math.inf
        self._bandwidth = machine.bytes_per_second_per_core or math.inf
        self._values, self._slots, self._gradients = (
            self._sum_of(arrays) for arrays in (costs.variables, costs.others, costs.gradients)
        )
        self._sums = self._sum_of(_in_float32(costs.gradients))
        self._steps: dict[int, tuple[float, float, float]] = {}

    def _check(self) -> None:
        used = set()
        if self._shape.size != self._machine.cores:
            cores = f"{self._shape.size} cores and the topology {self._machine.cores}"
            raise ValueError(f"The mesh has {cores}")
        for name in sorted(self._costs.whole_dims & set(self._axis)):
            raise ValueError(f"Mesh-TensorFlow cuts or joins arrays along {name}")
        for dims in self._costs.shapes:
            axes = [self._axis[name] for name, _ in dims if name in self._axis]
            used.update(axes)
            if len(set(axes)) < len(axes):
                names = " and ".join(name for name, _ in dims if name in self._axis)
                raise ValueError(f"{names} of one tensor would lie along the same mesh axis")
            for name, size in dims:
                if name in self._axis and size % self._sizes[self._axis[name]]:
                    axis = self._axis[name]
                    raise ValueError(f"{axis}:{self._sizes[axis]} does not divide {name} = {size}")
        idle = [name for name, size in self._sizes.items() if size > 1 and name not in used]
        if idle:
            raise ValueError(f"{' and '.join(idle)} would split nothing of the model")

    def _numbers_on_core(self, dims: Sequence[tuple[str, int]], steps: int) -> float:
        """Returns how many numbers of an array are on one core in a microbatch step.

        `dims` are the names and sizes of the whole array's dimensions, before they are split over
        cores and microbatch steps. `steps` is the number of microbatch steps of an update.
        """
        count = 1.0
        for name, size in dims:
            count *= size / self._sizes.get(self._axis.get(name, ""), 1)
            if name == self._costs.batch_dims[-1]:
                count /= steps
        return count

    def _bytes(self, array: Array, steps: int = 1) -> float:
        return array.number_bytes * self._numbers_on_core(array.dims, steps)

    def _sum_of(self, arrays: Mapping[Array, int], steps: int = 1) -> float:
        return sum(count * self._bytes(array, steps) for array, count in arrays.items())

    def seconds(self, operation: str, axes: Sequence[str], size: float) -> float:
        """Returns the seconds that a collective along mesh axes takes on the machine's links.

        Args:
          operation: HLO's name of the collective, such as "all-reduce".
          axes: names of the mesh axes along which cores exchange data.
          size: the bytes that each core gives to the collective.

        Returns:
          The seconds; 0 if there are no axes or no bytes.
        """
        if not axes or not size:
            return 0.0
        if operation == "reduce-scatter" and _KEPT_IN < self._machine.cores == self._cores(axes):
            operation = "all-reduce"
        key = operation, tuple(axes)
        if key not in self._links:
            groups, most = self._groups(axes), 1e15
            least = self._machine.seconds(operation, groups, 0.0)
            self._links[key] = least, self._machine.seconds(operation, groups, most) / most
        least, each = self._links[key]
        return max(least, each * size)

    def _cores(self, axes: Sequence[str]) -> int:
        return math.prod(self._sizes[axis] for axis in axes)

    def _groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """Returns the groups of cores that exchange data along the given mesh axes.

        Each group lists the numbers of cores whose places on the mesh differ only along these axes.
        """
        dims = [number for number, name in enumerate(self._sizes) if name in axes]
        return [tuple(group) for group in mtf.processor_groups(self._shape, dims)]

    def predict(self, stack: StackSettings) -> Predicted:
        """Returns the predicted cost of an update of the whole batch.

        `stack` has the settings of the wrappers that make the update.
        """
        steps, costs, bandwidth = stack.steps, self._costs, self._bandwidth
        if steps not in self._steps:
            self._steps[steps] = self._microbatch_costs(steps)
        operations, collectives, kept = self._steps[steps]
        if stack.sums == "local" or stack.inner_steps or stack.reducer == "hierarchical":
            # The loss's all-reduce is joined with that of gradients, if a step has one over the
            # same cores.
            collectives += self.seconds("all-reduce", self.replica_axes, _FLOAT32)
        part = 1 / self.shards
        sum_share = {"": 0.0, "sharded": part}.get(stack.sums, 1.0)
        compute = operations + 2 * sum_share * self._sums / bandwidth
        update_share = part if stack.sharded_updates else 1.0
        # With sharded updates, parts of new values are written by the update, and read and written
        # again by the all-gather.
        passes = 4 if stack.sharded_updates else 2
        once = passes * self._values + 2 * update_share * self._slots
        once = (once + self._sum_of(costs.update_reads)) / bandwidth
        once += self._seconds_of(costs.update_products)
        each, at_update = self._sync_seconds(stack)
        memory = self._values + update_share * self._slots + sum_share * self._sums
        memory += _HELD * self._gradients + kept
        if stack.inner_steps:
            # Values and momentum of the outer steps.
            memory += 2 * self._sums
            once += 4 * self._sums / bandwidth / stack.inner_steps
        sync = steps * each + at_update
        return Predicted(
            steps * (compute + collectives) + once + sync,
            memory,
            steps * compute + once,
            steps * collectives,
            sync,
        )

    def _seconds_of(self, products: Mapping[_Product, int], steps: int = 1) -> float:
        """Returns the seconds of products of matrices, for one of `steps` microbatch steps."""
        return sum(
            count
            * max(
                2 * self._numbers_on_core(one.dims, steps) / self._peak,
                sum(self._bytes(x, steps) for x in one.arrays) / self._bandwidth,
            )
            for one, count in products.items()
        )

    def _microbatch_costs(self, steps: int) -> tuple[float, float, float]:
        """Returns what a microbatch step costs without the work of the wrappers.

        `steps` is the number of microbatch steps of an update.

        Returns:
          Three numbers. The first two are the seconds of the step's operations, and the seconds of
          the collectives that the model needs. The third is the bytes of the forward pass that a
          core keeps for the backward pass.
        """
        costs = self._costs
        compute = self._seconds_of(costs.products, steps)
        compute += _TOUCHED * self._sum_of(costs.touched, steps) / self._bandwidth
        kept = _KEPT * self._sum_of(costs.kept, steps)
        return compute, sum(self._model_collectives(steps)), kept

    def _model_collectives(self, steps: int) -> Iterator[float]:
        """Yields the seconds of the collectives that the model needs in a microbatch step.

        The reduction of gradients over the replica axes is left out, because the wrappers decide
        how gradients are reduced.

        Args:
          steps: the number of microbatch steps that the batch of an update is divided into.
        """
        for one, count in self._costs.sums.items():
            axes = {self._axis[name] for name in one.over if name in self._axis}
            if one.is_gradient:
                axes -= set(self.replica_axes)
            size = self._bytes(one.array, steps)
            if axes and size >= _LEAST_BYTES:
                yield count * self.seconds("all-reduce", sorted(axes), size)
        for reshape, count in self._costs.reshapes.items():
            before, after = self._dims_by_axis(reshape.before), self._dims_by_axis(reshape.after)
            for axis in before:
                if before[axis] != after.get(axis) and not self._only_renames(reshape, axis):
                    kind = "all-to-all" if axis in after else "all-gather"
                    yield count * self.seconds(kind, [axis], self._bytes(reshape.before, steps))

    def _dims_by_axis(self, array: Array) -> dict[str, str]:
        """Returns, for each mesh axis that splits an array, the dimension that it splits.

        The result is a dictionary with names of mesh axes as keys, and names of dimensions as
        values.
        """
        return {self._axis[name]: name for name, _ in array.dims if name in self._axis}

    def _only_renames(self, one: _Reshape, axis: str) -> bool:
        """Returns whether a reshape only renames the dimension that a mesh axis splits.

        A reshape that only renames a dimension needs no exchange of data along the axis. `one` is
        the reshape, and `axis` is the name of the mesh axis. The dimension is only renamed if it is
        at the same place before and after the reshape, and all sizes stay equal.
        """
        places, sizes = [], []
        for array in (one.before, one.after):
            names = [name for name, _ in array.dims]
            places.append([n for n, name in enumerate(names) if self._axis.get(name) == axis])
            sizes.append([size for _, size in array.dims])
        return places[0] == places[1] and sizes[0] == sizes[1]

    def _sync_seconds(self, stack: StackSettings) -> tuple[float, float]:
        """Returns the seconds of the collectives by which a stack's wrappers synchronize replicas.

        In these collectives, replicas exchange gradients, or new values of variables. `stack` has
        the settings of the wrappers.

        Returns:
          Two numbers: the seconds of the collectives that run in each microbatch step, and the
          seconds of those that run once in an update. With outer steps, the second number is the
          seconds of an outer step, divided by the number of steps from one outer step to the next.
        """
        axes, costs = self.replica_axes, self._costs
        if stack.inner_steps:
            float32 = self._sum_of(_in_float32(costs.variables))
            return 0.0, self.seconds("all-reduce", axes, float32) / stack.inner_steps

        def summed(size: float) -> float:
            if stack.reducer == "hierarchical":
                return sum(self.seconds("all-reduce", [axis], size) for axis in axes)
            return self.seconds("all-reduce", axes, size)

        def in_parts(operation: str, arrays: Mapping[Array, int]) -> float:
            # Each array has a reduce-scatter or all-gather of its own.
            share = 1 if operation == "reduce-scatter" else self.shards
            return sum(
                count * self.seconds(operation, axes, self._bytes(array) / share)
                for array, count in arrays.items()
            )

        each = at_update = 0.0
        of_update = _in_float32(costs.gradients) if stack.steps > 1 else costs.gradients
        if stack.sharded_updates:
            at_update += in_parts("all-gather", costs.variables)
            messages = _MESSAGES * sum(costs.update_reads.values())
            at_update += messages * self.seconds("all-reduce", axes, _LEAST_BYTES)
        if stack.sums == "synced":
            each = summed(self._gradients)
        elif stack.sums == "sharded":
            each = in_parts("reduce-scatter", costs.gradients)
            if not stack.sharded_updates:
                at_update += in_parts("all-gather", of_update)
        elif stack.sharded_updates:
            at_update += in_parts("reduce-scatter", of_update)
        else:
            at_update += summed(self._sum_of(of_update))
        return each, at_update


def _in_float32(arrays: Mapping[Array, int]) -> Mapping[Array, int]:
    """Returns the counts in `arrays`, with arrays of float32 (four bytes per number) as keys."""
    found: collections.Counter[Array] = collections.Counter()
    for array, count in arrays.items():
        found[array._replace(number_bytes=_FLOAT32)] += count
    return found
