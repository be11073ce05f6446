"""Extracts the program of one core from a SIMD program's graph, to be turned into HLO."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from mtf_gradsync.extension import tf
from mtf_gradsync.runtimes.simd.graph_facts import (
    CONTROL,
    GraphFacts,
    UnsupportedProgramError,
    check_fetchable,
    reachable,
    split_input,
)
from mtf_gradsync.runtimes.simd.graph_writing import (
    GraphWriter,
    join_input,
    remove_device_attributes,
)
from mtf_gradsync.runtimes.simd.program import Program
from mtf_gradsync.runtimes.simd.side_effects import find_collectives, find_effects


class ReplicaInput(NamedTuple):
    """An input of a core's program, from outside: a tensor or a variable."""

    name: str  # the name of its placeholder in `ReplicaProgram.graph_def`
    dtype: str  # the name of the dtype, as in "float32"
    shape: tuple[int, ...]  # the shape of one core's value
    # The name in the user's graph of each core's tensor, or of its variable's ``VarHandleOp``.
    sources: tuple[str, ...]
    is_variable: bool  # whether it is a variable, which the program reads and writes


class ReplicaProgram(NamedTuple):
    """The program of one core."""

    graph_def: tf.GraphDef  # the core's operations, with a placeholder for each of `inputs`
    inputs: tuple[ReplicaInput, ...]  # tensors first, then variables
    fetches: tuple[str, ...]  # names of the tensors to return
    effects: tuple[str, ...]  # names of the operations that have to run
    num_replicas: int  # how many cores run it

    @property
    def tensors(self) -> list[ReplicaInput]:
        """The inputs that are tensors, in their order."""
        return [one for one in self.inputs if not one.is_variable]

    @property
    def variables(self) -> list[ReplicaInput]:
        """The inputs that are variables, in their order."""
        return [one for one in self.inputs if one.is_variable]


def replica_program(program: Program, fetches: Sequence[Any] = ()) -> ReplicaProgram:
    """Returns the program of one core, with the operations for all side effects and for `fetches`.

    `program` is what `tpu_program` yielded. `fetches` are tensors of the program, or names of such
    tensors. The tensors must not be inside loops or conditionals. Raises a ValueError if a fetch is
    anything else. Raises an UnsupportedProgramError if one of the operations has no counterpart in
    HLO, or if an input has no static shape.
    """
    return _CoreExtraction(program, fetches).result()


class _CoreExtraction:
    """Extracts one core's program from the user's graph; its methods take nodes by their names."""

    def __init__(self, program: Program, fetches: Sequence[Any]):
        self._program = program
        self._facts = GraphFacts(program.graph.as_graph_def())
        find_collectives(self._facts)  # refuses groups that are not constant
        self._effects = find_effects(self._facts)
        self._fetches = [self._fetched_tensor(f) for f in fetches]
        self._inputs: dict[str, ReplicaInput] = {}

    def result(self) -> ReplicaProgram:
        facts, out = self._facts, GraphWriter(self._facts.graph_def)
        for function in out.graph_def.library.function:
            for node in function.node_def:
                remove_device_attributes(node)
                _untie_from_tpu(node)
        effects = sorted(self._effects.last[self._program.name])
        needed = self._ancestors([split_input(f)[0] for f in self._fetches] + effects)
        given = {name: self._node_inputs(name) for name in facts.order if name in needed}
        inputs = sorted(self._inputs.values(), key=lambda i: i.is_variable)
        # Placeholders come first, so that each node follows its inputs.
        for i in inputs:
            out.add_placeholder(i.name, tf.resource if i.is_variable else tf.as_dtype(i.dtype))
        for name, node_inputs in given.items():
            _untie_from_tpu(out.copy(facts.node[name], node_inputs))
        return ReplicaProgram(
            out.graph_def,
            tuple(inputs),
            tuple(self._fetches),
            tuple(effects),
            self._program.num_replicas,
        )

    def _must_run_before(self, name: str) -> set[str]:
        """Returns the names of nodes whose side effects must come before the node `name` runs.

        For example, a node that writes a variable may have to run before the node `name`, which
        reads the variable.
        """
        effects = self._effects
        return effects.after.get(name, set()) | effects.after_all_cores.get(name, set())

    def _is_inside(self, name: str) -> bool:
        """Returns whether the node `name` is in the core's program.

        Constants that were made outside the program are also in the core's program, because XLA
        needs constants for shapes.
        """
        return name in self._facts.cluster or self._facts.node[name].op == "Const"

    def _ancestors(self, roots: Sequence[str]) -> set[str]:
        facts = self._facts

        def needs(name: str) -> list[str]:
            if name not in facts.cluster:
                return []
            found = [*(source for source, _ in facts.inputs(name)), *self._must_run_before(name)]
            if facts.is_conditional_switch(name):
                # This node tells apart two conditionals that have the same predicate.
                found.append(split_input(facts.predicate_of(name))[0])
            return [other for other in found if self._is_inside(other)]

        return reachable([root for root in roots if self._is_inside(root)], needs)

    def _node_inputs(self, name: str) -> list[str]:
        if name not in self._facts.cluster:
            return []
        inputs = ["^" + other for other in self._must_run_before(name)]
        for source, number in self._facts.inputs(name):
            if number == CONTROL:
                # Operations outside have run before the program begins.
                if source in self._facts.cluster:
                    inputs.append("^" + source)
            elif self._is_inside(source):
                inputs.append(join_input(source, number))
            else:
                inputs.append(self._add_input(source, number))
        return inputs

    def _add_input(self, source: str, number: int) -> str:
        """Adds a placeholder to the core's program, for a tensor from outside; returns its name.

        The tensor is output `number` of the node `source`; it may be the handle of a variable. A
        second call for the same tensor returns the same name. Raises an UnsupportedProgramError if
        a core cannot hold the tensor.
        """
        facts = self._facts
        key = join_input(source, number)
        name = key.replace(":", "/output_")
        if key in self._inputs:
            return name
        pairs = [(source, number)]
        if facts.node[source].op == "TPUReplicatedInput":
            pairs = [(s, k) for s, k in facts.inputs(source) if k != CONTROL]
        if len(pairs) == 1:
            pairs *= self._program.num_replicas
        origin = facts.node[pairs[0][0]]
        if origin.op == "VarHandleOp":
            dtype = tf.as_dtype(origin.attr["dtype"].type)
            shape = tf.TensorShape(origin.attr["shape"].shape)
            sources = tuple(s for s, _ in pairs)
        else:
            tensor = self._program.graph.get_tensor_by_name(f"{pairs[0][0]}:{pairs[0][1]}")
            dtype, shape = tensor.dtype.base_dtype, tensor.shape
            sources = tuple(f"{s}:{k}" for s, k in pairs)
        if dtype in (tf.resource, tf.variant, tf.string):
            raise UnsupportedProgramError(
                f"The program reads {source!r} of dtype {dtype.name} from outside, but a core "
                "cannot hold this dtype. Read the tensor or resource outside the program, and use "
                "only numbers inside."
            )
        if not shape.is_fully_defined():
            raise UnsupportedProgramError(
                f"The program reads {source!r} of shape {shape} from outside. A TPU program needs "
                "static shapes: give every dimension a size where the tensor is made, for example "
                "by the method batch(size, drop_remainder=True) of a Dataset."
            )
        self._inputs[key] = ReplicaInput(
            name, dtype.name, tuple(shape.as_list()), sources, origin.op == "VarHandleOp"
        )
        return name

    def _fetched_tensor(self, fetch: Any) -> str:
        """Returns the name of the program's tensor that a fetch asks for, as in "loss:0".

        `fetch` is a tensor of the user's graph, or the tensor's name. The tensor has to be in the
        program, or an output of a ``TPUReplicatedOutput``. An operation of this type is outside the
        program and passes on a result of the program. Raises a ValueError if `fetch` is anything
        else.
        """
        try:
            tensor = self._program.graph.as_graph_element(fetch, allow_operation=False)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{fetch!r} cannot be fetched: give a tensor of the program's graph, or its name. "
                "Updates need not be fetched: all of the program's effects are compiled."
            ) from error
        name, number = split_input(tensor.name)
        if self._facts.node[name].op == "TPUReplicatedOutput":
            name, number = self._facts.inputs(name)[0]
        if self._facts.cluster.get(name) != self._program.name:
            raise ValueError(
                f"{tensor.name!r} cannot be fetched: it stands outside the program "
                f"{self._program.name!r}. Fetch what was made inside simd.tpu_program(...)."
            )
        check_fetchable(self._facts, name, number)
        return f"{name}:{number}"


def _untie_from_tpu(node: tf.NodeDef) -> None:
    """Turns the node that says how many cores run a program into one that XLA's bridge accepts."""
    if node.op == "TPUReplicateMetadata":
        node.op = "NoOp"
        node.attr.clear()
