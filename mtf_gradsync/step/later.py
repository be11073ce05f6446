"""Operations that are built later than their outputs are used, and values after they have run."""

from __future__ import annotations

from typing import Any, Sequence

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import give_outputs
from mtf_gradsync.step.plan import StepPlan


class StandIn(mtf.Operation):
    """Stands for the operations of a step that is built later."""

    def __init__(self, later: Later, mesh: mtf.Mesh, name: str):
        super().__init__([], mesh=mesh, name=name)
        self.later = later

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        first = self.later.stand_ins[0]
        if first not in lowering.operations:
            done = [lowering.operations[op] for op in self.later.build()]
            lowering.operations[first] = tf.group(*done)
        lowering.operations[self] = lowering.operations[first]


class Later:
    """Operations that are built on demand, or when the graph is lowered; a subclass has `make`."""

    def __init__(self, plan: StepPlan):
        self.plan = plan
        self.stand_ins: list[StandIn] = []  # what callers got in place of the operations
        self._operations: list[mtf.Operation] | None = None
        plan.later += (self,)

    def make(self) -> list[mtf.Operation]:
        """Makes the operations; called once, unless they are undone."""
        raise NotImplementedError

    def build(self) -> list[mtf.Operation]:
        """Returns the operations, which the first call builds.

        Their place in the graph is that of the last stand-in, or behind everything that they are
        computed from.
        """
        # An error may have undone them, with what was being built around them.
        if self._operations is None or self in self.plan.later:
            graph, waiting = self.plan.graph, self.plan.later
            before = set(graph.operations)
            self.plan.later = tuple(x for x in waiting if x is not self)
            try:
                self._operations = self.make()
            except BaseException:
                self.plan.later = waiting
                raise
            self._place(before)
        return self._operations

    def _place(self, before: set[mtf.Operation]) -> None:
        listed, own = self.plan.graph.operations, set(self.stand_ins)
        # What the step itself has put before others stays there.
        count = max((i for i, op in enumerate(listed, 1) if op in before), default=0)
        others, made = listed[:count], listed[count:]
        needed = {x.operation for op in made for x in op.inputs} | own
        end = max((i for i, op in enumerate(others, 1) if op in needed), default=0)
        first = [op for op in others[:end] if op not in own]
        listed[:] = first + made + self.stand_ins + others[end:]


def build_later(graph: mtf.Graph) -> None:
    """Builds all steps of a graph that are still to be built."""
    plan = StepPlan.of_graph(graph)
    while plan is not None and plan.later:
        plan.later[0].build()


def built(operations: Sequence[mtf.Operation]) -> list[mtf.Operation]:
    """Returns operations with stand-ins replaced by the steps' operations, built if needed."""
    result: dict[mtf.Operation, None] = {}
    for operation in operations:
        is_stand_in = isinstance(operation, StandIn)
        result.update(dict.fromkeys(operation.later.build() if is_stand_in else [operation]))
    return list(result)


class ValuesAfter(mtf.Operation):
    """Reads variables of a mesh (`reads`) once operations have run, also those of a branch."""

    def __init__(self, variables: Sequence[mtf.Variable], writes: Sequence[mtf.Operation]):
        super().__init__([], mesh=variables[0].mesh, name="values_after")
        give_outputs(
            self,
            [
                mtf.Tensor(self, v.shape, v.slice_dtype, index=index)
                for index, v in enumerate(variables)
            ],
        )
        self.reads, self._writes = list(variables), list(writes)

    def lower(self, lowering: mtf.Lowering) -> None:
        """See `mtf.Operation.lower`."""
        # An operation of a branch is lowered to the whole conditional.
        with tf.control_dependencies([lowering.operations[op] for op in self._writes]):
            for variable, output in zip(self.reads, self.outputs):
                lowering.set_tensor_lowering(output, _held(variable, lowering))


def _held(variable: mtf.Variable, lowering: mtf.Lowering) -> Any:
    """Reads the slices of a variable, which autostack may have stacked with others."""
    number = None
    holder = variable
    if variable not in lowering.variables:
        holder = next(
            v
            for v in lowering.variables
            if isinstance(v, mtf.StackedVariable)
            and v.mesh is variable.mesh
            and variable.name in v.original_names
        )
        number = holder.original_names.index(variable.name)

    def read(x: Any) -> tf.Tensor:
        return tf.convert_to_tensor(x) if number is None else tf.convert_to_tensor(x)[number]

    slices = lowering.variables[holder].laid_out_tensor
    return lowering.mesh_impl(variable).slicewise(read, slices)


def values_after(
    variables: Sequence[mtf.Variable], writes: Sequence[mtf.Operation]
) -> Sequence[mtf.Tensor]:
    """Returns the values of variables after operations, whether or not their branch ran.

    `writes` are lowered before. The tensors have the variables' shapes, in the dtype of their
    slices.
    """
    values: dict[mtf.Variable, mtf.Tensor] = {}
    for mesh in dict.fromkeys(v.mesh for v in variables):
        some = [v for v in variables if v.mesh is mesh]
        values.update(zip(some, ValuesAfter(some, writes).outputs))
    return [values[v] for v in variables]
