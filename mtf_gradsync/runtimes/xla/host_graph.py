"""The part of a user's graph outside the program, which TensorFlow runs on the host.

A step has three parts: the operations that the program needs, the program, and the operations that
need the program. The graph of a `HostGraph` has the first and the last part. If the last part reads
a tensor of the first part, the value that the first part computed is fed to the last part. So no
operation (of an input pipeline, for example) runs twice in a step.
"""

from __future__ import annotations

from typing import Any, Collection, Iterable, NamedTuple, Sequence

import numpy as np

from mtf_gradsync.extension import mtf, tf
from mtf_gradsync.runtimes._private.tensorflow import as_tensorflow_bfloat16
from mtf_gradsync.runtimes.simd.checks import check_can_be_emulated
from mtf_gradsync.runtimes.simd.graph_facts import (
    CONTROL,
    GraphFacts,
    check_fetchable,
    reachable,
    split_input,
)
from mtf_gradsync.runtimes.simd.graph_writing import GraphWriter, finalized_graph, join_input
from mtf_gradsync.runtimes.simd.program import Program
from mtf_gradsync.runtimes.simd.replica_session import MasterOps
from mtf_gradsync.runtimes.xla.gathering import Cores

# Operations through which values enter and leave a program.
BOUNDARY = ("TPUReplicatedInput", "TPUReplicatedOutput")
# Operations that do not change a variable.
_READS = frozenset(
    ["ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp"]
    + ["VariableShape", "_ReadVariablesOp", "SaveV2", "Identity", "Shape", "IsVariableInitialized"]
)
_HANDLES = frozenset(["VarHandleOp", "VariableV2", "Variable"])


class TouchedVariables(NamedTuple):
    """The variables that some operations read or write, as names of their ``VarHandleOp``."""

    used: frozenset[str]  # variables that the operations read, and those in `written`
    written: frozenset[str]


class HostGraph:
    """The part of a user's graph outside a program, as a finalized `graph` for a ``tf.Session``.

    If the user's graph has other programs, these other programs do not run. To the user's graph the
    constructor adds operations that initialize, copy and save variables; the attribute `ops` holds
    these operations. The attribute `facts` is a `GraphFacts` of the user's graph: its nodes and how
    they are connected. If the user's graph cannot run, the constructor raises an
    UnsupportedProgramError and leaves the user's graph unchanged.
    """

    def __init__(self, program: Program, lowerings: Sequence[mtf.Lowering]):
        check_can_be_emulated(GraphFacts(program.graph.as_graph_def()))
        self.ops = MasterOps(program.graph, lowerings)
        self.facts = facts = GraphFacts(program.graph.as_graph_def())
        self._source = program.graph
        self._program = program.name
        self._after = self._find_after({program.name})
        self._of_other_programs = self._find_after(set(facts.num_replicas) - {program.name})
        self._carried: dict[str, str] = {}  # placeholder's tensor -> tensor of the first part
        self._run_before: dict[str, set[str]] = {}  # node -> operations of the first part
        self._returned: dict[str, tuple[str, int]] = {}  # placeholder's tensor -> inside, core
        out = GraphWriter(facts.graph_def)
        for name in facts.order:
            node = facts.node[name]
            if name not in facts.cluster and node.op not in BOUNDARY:
                self._copy(out, name)
        self.graph = finalized_graph(out.graph_def)
        self._touched: dict[frozenset[str], TouchedVariables] = {}

    def is_after(self, name: str) -> bool:
        """Returns whether the operation or tensor `name` depends on results of the program."""
        return split_input(name)[0] in self._after

    def is_fixed(self, name: str, fed: Collection[str] = ()) -> bool:
        """Returns whether a tensor of `graph` depends only on constants and on tensors in `fed`.

        `name` is the name of the tensor, and `fed` has the names of tensors whose values are given.
        """

        def varies(name: str) -> bool:
            op = self.graph.get_operation_by_name(split_input(name)[0])
            # A variable's handle is stateful, too, so what reads a variable is not fixed.
            is_stateful = op.op_def is None or op.op_def.is_stateful
            return is_stateful or op.type.startswith("Placeholder") or self.is_after(name)

        found = reachable([name], lambda name: () if name in fed else self._inputs(name))
        return not any(varies(one) for one in found if one not in fed)

    def _inputs(self, name: str) -> list[str]:
        """Returns the tensors and operations that an operation of `graph` needs, by their names."""
        op = self.graph.get_operation_by_name(split_input(name)[0])
        return [x.name for x in (*op.inputs, *op.control_inputs)]

    def plan(self, names: Sequence[str], per_replica: bool, cores: Cores) -> FetchPlan:
        """Returns what a step has to run and to fetch before, in and after the program.

        Args:
          names: the names of the tensors and operations to fetch, in the user's graph.
          per_replica: whether the values on all cores are wanted; if False, only the value on the
            first core is wanted.
          cores: the cores of the program; the plan says which of this process's cores to ask.

        Raises:
          ValueError: if a fetch is in a loop or branch, if it belongs to another program of the
            graph, or if it needs another program of the graph.
        """
        fetch_sources = tuple(self._source_of(name, per_replica, cores) for name in names)
        outside = {name for source in fetch_sources for name in source.names if name}
        last = {name for name in outside if self.is_after(name)}
        found = self.ancestors(last)
        carried = {k: v for k, v in self._carried.items() if split_input(k)[0] in found}
        returned = {k: v for k, v in self._returned.items() if split_input(k)[0] in found}
        inside = {source.inside for source in fetch_sources if source.inside}
        shared = (outside - last) | set(carried.values())
        return FetchPlan(
            fetch_sources,
            runs_program=bool(last) or any(source.runs_program for source in fetch_sources),
            inside=inside.union(inner for inner, _ in returned.values()),
            first=shared.union(*(self._run_before.get(name, ()) for name in found)),
            last=last,
            carried=carried,
            returned=returned,
            shared=shared,
        )

    def _source_of(self, name: str, per_replica: bool, cores: Cores) -> FetchSource:
        facts = self.facts
        node_name, number = split_input(name)
        others = facts.cluster.get(node_name, self._program) != self._program
        if others or node_name in self._of_other_programs:
            raise ValueError(
                f"{name!r} cannot be fetched in a session of the program {self._program!r}: it "
                "needs another program of the graph. Make a session of that program."
            )
        node = facts.node[node_name]
        position = {core: p for p, core in enumerate(cores.local)}
        if node.op == "TPUReplicatedOutput":
            inner, inner_number = facts.inputs(node_name)[number]
            return FetchSource((), f"{inner}:{inner_number}", (position.get(number),), False, True)
        if node.op == "TPUReplicatedInput":
            sources = [f"{n}:{k}" for n, k in facts.inputs(node_name) if k != CONTROL]
            if not per_replica:
                return FetchSource((sources[cores.local[0]],))
            return FetchSource(
                tuple(s if c in position else "" for c, s in enumerate(sources)), is_list=True
            )
        if node_name not in facts.cluster:
            return FetchSource((name,))
        check_fetchable(facts, node_name, number)
        if ":" not in name:
            return FetchSource(runs_program=True)
        count = facts.num_replicas[self._program]
        wanted = range(count) if per_replica else cores.local[:1]
        return FetchSource((), name, tuple(position.get(c) for c in wanted), per_replica, True)

    def ancestors(self, names: Iterable[str]) -> set[str]:
        """Returns the names of some operations of `graph`, and of all operations that they need.

        `names` are names of operations of `graph`, or of tensors that such operations compute.
        """
        starts = [split_input(name)[0] for name in names]
        return reachable(starts, lambda name: [split_input(n)[0] for n in self._inputs(name)])

    def touched(self, names: Iterable[str]) -> TouchedVariables:
        """Returns the names of variables that are read or written when operations of `graph` run.

        `names` are names of operations of `graph`, or of tensors that such operations compute.
        """
        key = frozenset(split_input(n)[0] for n in names)
        if key not in self._touched:
            used, written = set(), set()
            found = self.ancestors(key)
            for name in found:
                op = self.graph.get_operation_by_name(name)
                if op.type in _HANDLES:
                    used.add(name)
                elif op.type not in _READS:
                    written |= {t.op.name for t in op.inputs if t.op.type in _HANDLES}
            self._touched[key] = TouchedVariables(frozenset(used), frozenset(written))
        return self._touched[key]

    def _find_after(self, programs: set[str]) -> set[str]:
        """Returns the names of operations outside all programs that depend on one of `programs`.

        `programs` are names of programs of the user's graph.
        """
        facts = self.facts
        found: set[str] = set()
        for name in facts.order:
            node = facts.node[name]
            if name in facts.cluster or node.op == "TPUReplicatedInput":
                continue
            for source, _ in facts.inputs(name):
                # An operation that waits for the program's start need not wait for its end.
                starts = facts.node[source].op == "TPUReplicateMetadata"
                inside = facts.cluster.get(source) in programs and not starts
                if source in found or inside:
                    found.add(name)
        return found

    def _copy(self, out: GraphWriter, name: str) -> None:
        facts = self.facts
        inputs: list[str] = []
        for source, number in facts.inputs(name):
            if source in facts.cluster:
                continue  # a control edge: the program has run
            if facts.node[source].op == "TPUReplicatedOutput":
                if number != CONTROL:
                    inputs.append(self._return(out, source, number))
            elif not self._is_sent(name, source, number):
                inputs.append(join_input(source, number))
            elif number == CONTROL:
                self._run_before.setdefault(name, set()).add(source)
            else:
                inputs.append(self._carry(out, source, number))
        out.copy(facts.node[name], inputs)

    def _is_sent(self, name: str, source: str, number: int) -> bool:
        """Returns whether a node of the last part reads a value that the first part computes.

        The host runs the first part of a step before the XLA program, and the last part after the
        program. `name` is the node that reads the value, and the value is output `number` of the
        node `source`. If the value is the handle of a variable, the result is False: each part has
        its own handles.
        """
        if name not in self._after or source in self._after:
            return False
        if number == CONTROL:
            return True
        dtype = self._source.get_tensor_by_name(f"{source}:{number}").dtype
        return dtype not in (tf.resource, tf.variant) and dtype == dtype.base_dtype

    def _carry(self, out: GraphWriter, source: str, number: int) -> str:
        name = f"mtf_gradsync_carried/{source}_{number}"
        if f"{name}:0" not in self._carried:
            tensor = self._source.get_tensor_by_name(f"{source}:{number}")
            out.add_placeholder(name, tensor.dtype, tensor.shape)
            self._carried[f"{name}:0"] = tensor.name
        return name

    def _return(self, out: GraphWriter, source: str, core: int) -> str:
        name = f"mtf_gradsync_returned/{source}_{core}"
        if f"{name}:0" not in self._returned:
            inner, number = self.facts.inputs(source)[core]
            tensor = self._source.get_tensor_by_name(f"{inner}:{number}")
            out.add_placeholder(name, tensor.dtype, tensor.shape)
            self._returned[f"{name}:0"] = (tensor.name, core)
        return name


class FetchSource(NamedTuple):
    """The place from which a fetch gets its value: outside the program, or the program's cores."""

    # Outside: an operation or tensor, or one for each core, with "" for a core of another process.
    names: tuple[str, ...] = ()
    inside: str = ""  # a tensor of the program
    # Indices of the cores to fetch from, among this process's cores; None for other processes'.
    positions: tuple[int | None, ...] = ()
    is_list: bool = False  # whether the result is a list of one value per core
    runs_program: bool = False  # whether it is inside the program

    def value(self, values: dict[str, Any]) -> Any:
        """Returns the fetch's value: a numpy value, or a list with one value for each core.

        `values` has all values of a step by name. Values of tensors outside the program are numpy
        values, and values that the program computed are `DeviceValues`. If the fetch is an
        operation, its value is None.
        """
        if self.inside:
            arrays = values[self.inside].arrays
            found = [
                None if p is None else as_tensorflow_bfloat16(np.asarray(arrays[p]))[()]
                for p in self.positions
            ]
        else:
            found = [values.get(name) for name in self.names] or [None]
        return found if self.is_list else found[0]


class FetchPlan(NamedTuple):
    """The work of a step for a set of fetches.

    The first part of a step is what TensorFlow runs before the program, and the last part is what
    TensorFlow runs after the program. The keys of `carried` and `returned` are names of
    placeholders in the last part; their values say with which tensors the placeholders are fed.
    """

    fetch_sources: tuple[FetchSource, ...]
    runs_program: bool
    inside: set[str]  # tensors of the program to fetch
    first: set[str]  # tensors and operations of the first part
    last: set[str]  # tensors and operations of the last part
    carried: dict[str, str]  # placeholder -> tensor of the first part
    returned: dict[str, tuple[str, int]]  # placeholder -> tensor of the program, and core
    shared: set[str]  # tensors of the first part that the caller, or the last part, gets
