"""Rewrites a graph with TPU programs into a graph that runs the programs on CPU replicas.

Every operation of a program is cloned once per core. Operations that exchange data between cores
become ordinary operations between the clones:

    TPUReplicatedInput      core i takes the i-th tensor
    TPUReplicatedOutput     output i is the tensor of core i
    CrossReplicaSum         one AddN for each group of cores; all cores of the group read its sum
    AllToAll                every core splits its tensor, and joins the pieces that are meant for it
    CollectivePermute       every core takes the tensor of its source, or zeros without a source
"""

from __future__ import annotations

import dataclasses
from typing import Sequence

from mtf_gradsync.extension import PASSES_ON, tf
from mtf_gradsync.runtimes.simd.checks import (
    Agreement,
    check_can_be_emulated,
    find_agreements,
    find_meetings,
    frame_leaders,
    name_of_last_values,
)
from mtf_gradsync.runtimes.simd.graph_facts import CONTROL, GraphFacts, check_fetchable, split_input
from mtf_gradsync.runtimes.simd.graph_writing import GraphWriter, join_input
from mtf_gradsync.runtimes.simd.randomness import STATELESS, RandomSteps, StatelessRandomOps
from mtf_gradsync.runtimes.simd.side_effects import (
    CollectiveOperation,
    find_collectives,
    find_effects,
)


def clone_name(prefix: str, name: str, core: int) -> str:
    """Returns the name of a core's copy of an operation or tensor of a program.

    `prefix` is the first part of the names of all copies, `name` is the name in the program before
    the rewriting, and `core` is a physical core's number.
    """
    return f"{prefix}_{core}/{name}"


@dataclasses.dataclass(frozen=True, eq=False)
class EmulatedGraph:
    """A graph whose TPU programs run on CPU replicas.

    Attributes:
      graph_def: the rewritten graph. It has no TPU operations and no device names.
      num_replicas: the number of cores of each TPU program, by the program's name.
      done: the operation that runs a whole TPU program on all cores, by the program's name.
      agreements: for the name of each operation that compares a predicate on several cores, the
        `Agreement` that the operation checks.
      random_steps: the operations that set the step on which random numbers depend; None if there
        are no random operations.
    """

    graph_def: tf.GraphDef
    num_replicas: dict[str, int]
    done: dict[str, str]
    agreements: dict[str, Agreement]
    random_steps: RandomSteps | None
    _facts: GraphFacts
    _prefix: str

    def program_of(self, name: str) -> str:
        """Returns the TPU program that an operation or tensor belongs to.

        Args:
          name: name of an operation or tensor in the graph before the rewriting.

        Returns:
          The program's name, or "" for an operation outside every program.

        Raises:
          KeyError: when the graph has no such operation.
        """
        node = split_input(name)[0]
        op = self._facts.node[node].op
        if op == "TPUReplicatedOutput":
            node = self._facts.inputs(node)[0][0]
        elif op == "TPUReplicatedInput":
            node = self._facts.consumers(node)[0][0]
        return self._facts.cluster.get(node, "")

    def place_of(self, name: str) -> tuple[int, str] | None:
        """Returns the core and the original name of an operation of the rewritten graph.

        Args:
          name: the operation's name in the rewritten graph.

        Returns:
          The core on which the operation runs, and its name before the rewriting; None for an
          operation outside every program.
        """
        first, _, rest = name.partition("/")
        stem, _, number = first.rpartition("_")
        if stem != self._prefix or not number.isdigit() or not rest:
            return None
        return int(number), rest

    def groups_of_sums(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Returns the groups of cores of each ``CrossReplicaSum``.

        Returns:
          The groups, by the operation's name before the rewriting. The first core of each group
          computes the sum for the whole group.
        """
        found = find_collectives(self._facts).values()
        return {one.name: one.groups for one in found if one.op == "CrossReplicaSum"}

    def names_on_replicas(self, name: str) -> list[str]:
        """Returns the names that an operation or tensor has after the rewriting.

        Args:
          name: name of an operation ("loss") or tensor ("loss:0") before the rewriting.

        Returns:
          One name per core; for an operation or tensor outside every program, a single name.

        Raises:
          KeyError: when the graph has no such operation.
          ValueError: when the operation is in a loop or branch, or is an input of the program.
        """
        node_name, number = split_input(name)
        node = self._facts.node[node_name]
        if node.op == "TPUReplicatedOutput":
            source, source_number = self._facts.inputs(node_name)[0]
            return [f"{clone_name(self._prefix, source, number)}:{source_number}"]
        if node.op == "TPUReplicatedInput":
            sources = self._facts.inputs(node_name)
            return [f"{n}:{k}" for n, k in sources if k != CONTROL]
        if node_name not in self._facts.cluster:
            return [name]
        check_fetchable(self._facts, node_name, number)
        cores = self.num_replicas[self._facts.cluster[node_name]]
        return [clone_name(self._prefix, name, core) for core in range(cores)]


# Any large odd number: clones of one random operation must not draw the same numbers.
_SEED_STRIDE = 0x9E3779B1


def emulate(graph: tf.Graph | tf.GraphDef) -> EmulatedGraph:
    """Rewrites every TPU program of a graph, so that it runs on CPU replicas.

    The programs may come from `mtf_gradsync.simd.tpu_program` or from ``tf.tpu.replicate``. The
    graph itself stays as it is.

    Args:
      graph: a graph, or its ``GraphDef``.

    Returns:
      The rewritten graph.

    Raises:
      UnsupportedProgramError: when an operation of the graph cannot be emulated; the error names
        this operation.
    """
    graph_def = graph.as_graph_def() if isinstance(graph, tf.Graph) else graph
    facts = GraphFacts(graph_def)
    check_can_be_emulated(facts)
    return _Rewriter(facts).run()


class _Rewriter:
    """A rewriter of one graph; `run`, which can be called once, returns the rewritten graph."""

    def __init__(self, facts: GraphFacts):
        self._facts = facts
        self._collectives = find_collectives(facts)
        self._effects = find_effects(facts)
        meetings = find_meetings(facts, self._collectives, self._effects)
        self._checks = find_agreements(facts, meetings)
        self._agreed: dict[tuple[str, int], str] = {}  # (predicate, core) -> compared predicate
        self._agreements: dict[str, Agreement] = {}
        self._leaders = frame_leaders(meetings)
        self._out = GraphWriter(facts.graph_def)
        tops = {n.split("/", 1)[0] for n in facts.node}
        cores = max(facts.num_replicas.values())
        self._prefix = "replica"
        while any(clone_name(self._prefix, "", i)[:-1] in tops for i in range(cores)):
            self._prefix += "_"
        self._done = {c: self._free_name(c + "_done") for c in facts.num_replicas}
        random = "random_numbers"
        while random in tops:
            random += "_"
        self._draws = StatelessRandomOps(facts, self._out, random)

    def run(self) -> EmulatedGraph:
        for name in self._facts.order:
            node = self._facts.node[name]
            if node.op in ("TPUReplicatedInput", "TPUReplicatedOutput"):
                continue
            if name not in self._facts.cluster:
                self._copy_outside(node)
            elif name in self._collectives:
                self._exchange(node, self._collectives[name])
            else:
                for core in self._cores(name):
                    self._copy_to_core(node, core)
        self._add_program_ends()
        for predicate, agreements in self._checks.items():
            self._compare(predicate, agreements)
        out, replicas = self._out.graph_def, dict(self._facts.num_replicas)
        random_steps = self._draws.finish()
        return EmulatedGraph(
            out, replicas, self._done, self._agreements, random_steps, self._facts, self._prefix
        )

    def _free_name(self, name: str) -> str:
        while name in self._facts.node:
            name += "_"
        return name

    def _cores(self, name: str) -> range:
        return range(self._facts.num_replicas[self._facts.cluster[name]])

    def _name(self, name: str, core: int) -> str:
        return clone_name(self._prefix, name, core)

    # Inputs, seen from each side of the program's boundary.

    def _outside_input(self, source: str, number: int) -> list[str]:
        """Returns the inputs that replace an input of an operation outside all programs.

        The input is output `number` of the node `source`. The result is a list of texts, each an
        input as a ``NodeDef`` has it; one input may become several.
        """
        facts, node = self._facts, self._facts.node[source]
        if node.op == "TPUReplicatedOutput":
            inner, inner_number = facts.inputs(source)[0]
            done = "^" + self._done[facts.cluster[inner]]
            if number == CONTROL:
                return [done]
            return [join_input(self._name(inner, number), inner_number), done]
        if source in facts.cluster:
            if node.op == "TPUReplicateMetadata":
                # This node is at the program's start: who waits for it does not wait for the end.
                return ["^" + self._name(source, core) for core in self._cores(source)]
            return ["^" + self._done[facts.cluster[source]]]
        return [join_input(source, number)]

    def _core_input(self, source: str, number: int, core: int) -> list[str]:
        """Returns the inputs that replace an input of a program's node, for its copy on a core.

        The input is output `number` of the node `source`. The result is a list of texts, each an
        input as a ``NodeDef`` has it; one input may become several.
        """
        node = self._facts.node[source]
        if source in self._facts.cluster:
            return [join_input(self._name(source, core), number)]
        if node.op == "TPUReplicatedInput":
            sources = self._facts.inputs(source)
            if number == CONTROL:
                return [join_input(s, CONTROL) for s, _ in sources]
            picked = sources[0] if node.attr["is_packed"].b else sources[core]
            return self._outside_input(*picked)
        return self._outside_input(source, number)

    def _core_inputs(self, name: str, core: int) -> tuple[list[str], list[str]]:
        """Returns the data inputs and the control inputs of a core's copy of the node `name`.

        Some of the control inputs make the copy wait for side effects. The inputs are texts, as in
        a ``NodeDef``.
        """
        texts = [t for s, k in self._facts.inputs(name) for t in self._core_input(s, k, core)]
        control = [text for text in texts if text.startswith("^")]
        control += ["^" + self._name(n, core) for n in self._effects.after.get(name, ())]
        for earlier in self._effects.after_all_cores.get(name, ()):
            control += ["^" + self._name(earlier, c) for c in self._cores(name)]
        return [text for text in texts if not text.startswith("^")], control

    # The nodes themselves.

    def _copy_outside(self, node: tf.NodeDef) -> None:
        if node.op == "TPUCompilationResult":
            result = self._out.add(node.name, "Const", dtype=tf.string)
            result.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(b""))
            return
        inputs = [t for s, k in self._facts.inputs(node.name) for t in self._outside_input(s, k)]
        self._out.copy(node, inputs)

    def _copy_to_core(self, node: tf.NodeDef, core: int) -> None:
        facts, name = self._facts, self._name(node.name, core)
        data, control = self._core_inputs(node.name, core)
        if node.op == "TPUReplicateMetadata":
            self._out.add(name, "NoOp", control)
            return
        if core and node.name in self._effects.shared_writes:
            # Every core would write the same value: the first core writes, the others wait for it.
            waits = ["^" + split_input(text)[0] for text in data] + control
            self._out.add(name, "NoOp", [*waits, "^" + self._name(node.name, 0)])
            return
        if node.op == "LoopCond":
            data = [self._checked_predicate(data[0], node.input[0], core)]
        elif facts.is_conditional_switch(node.name):
            data[1] = self._checked_predicate(data[1], facts.predicate_of(node.name), core)
        elif PASSES_ON in node.attr:  # it always has the value of its second input
            data = [data[1]]
        copy = self._out.copy(node, data + control, name)
        if PASSES_ON in node.attr:
            copy.op = "Identity"
        if node.op in ("LoopCond", "Enter"):
            frame = facts.loop_of(node.name).frame
            leader = self._leaders.get((frame, core), core)
            if node.op == "Enter":
                copy.attr["frame_name"].s += f"_replica_{leader}".encode()
            elif core != leader:
                # TensorFlow allows one LoopCond in a frame.
                copy.op = "Identity"
                copy.attr["T"].type = tf.bool.as_datatype_enum
        if copy.op in STATELESS:
            self._draws.rewrite(copy, node.name, core)
        elif core and "seed" in copy.attr and "seed2" in copy.attr:
            seed, seed2 = copy.attr["seed"], copy.attr["seed2"]
            if seed.i or seed2.i:  # both 0: every clone draws its own numbers anyway
                seed2.i = (seed2.i + core * _SEED_STRIDE) % (1 << 62)

    def _exchange(self, node: tf.NodeDef, collective: CollectiveOperation) -> None:
        kind = node.attr["T"].type
        inputs = {core: self._core_inputs(node.name, core) for core in self._cores(node.name)}
        sent = {core: data[0] for core, (data, _) in inputs.items()}
        if node.op == "CrossReplicaSum":
            for number, group in enumerate(collective.groups):
                # Named after the first core, so that it cannot collide with another clone.
                total = self._name(node.name, group[0]) + f"/sum_of_group_{number}"
                waits = [text for c in group for text in inputs[c][1]]
                add = self._out.add(total, "AddN", [sent[c] for c in group] + waits, T=kind)
                add.attr["N"].i = len(group)
                for core in group:
                    self._out.add(self._name(node.name, core), "Identity", [total], T=kind)
        elif node.op == "CollectivePermute":
            source_of = {b: a for a, b in collective.pairs}
            for core, (_, control) in inputs.items():
                op = "Identity" if core in source_of else "ZerosLike"
                received = sent[source_of.get(core, core)]
                self._out.add(self._name(node.name, core), op, [received] + control, T=kind)
        else:
            given = {core: [sent[core], *control] for core, (_, control) in inputs.items()}
            for group in collective.groups:
                self._exchange_parts(node, group, given)

    def _exchange_parts(
        self, node: tf.NodeDef, group: tuple[int, ...], inputs: dict[int, list[str]]
    ) -> None:
        """Splits each core's tensor into a part for each core of a group, and joins the parts.

        `node` is a reduce-scatter, which adds up the parts, or an all-to-all, which concatenates
        them. `inputs` has, for each core, the tensor and control inputs.
        """
        out, kind = self._out, node.attr["T"].type
        adds_up = node.op == "XlaReduceScatter"
        if adds_up:
            constant = self._facts.constant(self._facts.inputs(node.name)[2][0])
            assert constant is not None  # XLA requires a constant
            dimension = int(constant)
        else:
            dimension = node.attr["split_dimension"].i
        splits, near = [], {core: split_input(inputs[core][0])[0] for core in group}
        for core in group:
            stem = self._name(node.name, core) + "/split"
            axis = out.add_constant(stem + "_axis", dimension, tf.int32, near[core])
            splits.append(out.add(stem, "Split", [axis, *inputs[core]], T=kind))
            splits[-1].attr["num_split"].i = len(group)
        for position, core in enumerate(group):
            name = self._name(node.name, core)
            parts = [join_input(split.name, position) for split in splits]
            if adds_up:
                joined = out.add(name, "AddN", parts, T=kind)
            else:
                dimension = node.attr["concat_dimension"].i
                axis = out.add_constant(name + "/concat_axis", dimension, tf.int32, near[core])
                joined = out.add(name, "ConcatV2", [*parts, axis], T=kind, Tidx=tf.int32)
            joined.attr["N"].i = len(group)

    def _add_program_ends(self) -> None:
        """Adds, for each program, an operation that waits until all cores have run the program."""
        facts = self._facts
        last = {c: set(self._effects.last.get(c, ())) for c in facts.num_replicas}
        for name in facts.order:
            if name in facts.cluster:
                continue
            for source, number in facts.inputs(name):
                # An operation outside the program waits for this source, so the source has to run.
                if number != CONTROL or source not in facts.cluster:
                    continue
                if not facts.context_of_output(source, number):
                    last[facts.cluster[source]].add(source)
        for cluster, names in last.items():
            waits = [
                "^" + self._name(n, core)
                for n in sorted(names)
                for core in range(facts.num_replicas[cluster])
            ]
            self._out.add(self._done[cluster], "NoOp", waits)

    # Predicates that a group has to agree on.

    def _checked_predicate(self, text: str, predicate: str, core: int) -> str:
        """Returns the input from which a core's copy of a conditional or loop takes its predicate.

        `predicate` is the predicate's name in the user's graph, and `text` is the input that the
        copy had before. If the predicate may differ between cores, `text` is returned. If it must
        have the same value on `core` and on other cores, the output of a new node is returned. The
        new node waits until the values on these cores have been compared.
        """
        if not any(core in a.group for a in self._checks.get(predicate, ())):
            return text
        return self._agreed.setdefault((predicate, core), self._compared_name(predicate, core))

    def _compared_name(self, predicate: str, core: int) -> str:
        source, number = split_input(predicate)
        return self._name(f"{source}/agreed_{number}", core)

    def _compare(self, predicate: str, agreements: Sequence[Agreement]) -> None:
        source, number = split_input(predicate)
        out = self._out
        checks: dict[int, list[str]] = {}
        for agreement in agreements:
            group = agreement.group
            values = [self._core_input(source, number, c)[0] for c in group]
            stem = self._compared_name(predicate, group[0]) + "_by_" + "_".join(map(str, group))
            pack = out.add(stem + "/values", "Pack", values, T=tf.bool)
            pack.attr["N"].i = len(group)
            axis = out.add_constant(stem + "/axis", [0], tf.int32, near=pack.name)
            out.add(stem + "/all", "All", [pack.name, axis], Tidx=tf.int32)
            out.add(stem + "/any", "Any", [pack.name, axis], Tidx=tf.int32)
            out.add(stem + "/same", "Equal", [stem + "/all", stem + "/any"], T=tf.bool)
            # The error takes the values that were compared last from this variable, not from
            # TensorFlow's text.
            compared = out.add_handle(stem + "/compared", stem, tf.bool, len(group), pack.name)
            write = out.add(
                stem + "/write", "AssignVariableOp", [compared, pack.name], dtype=tf.bool
            )
            check = out.add(stem, "Assert", [stem + "/same", pack.name, "^" + write.name])
            check.attr["T"].list.type.append(tf.bool.as_datatype_enum)
            outside = out.add_handle(stem + "/outside", stem, tf.bool, len(group))
            out.add(name_of_last_values(stem), "ReadVariableOp", [outside], dtype=tf.bool)
            self._agreements[stem] = agreement
            for core in group:
                checks.setdefault(core, []).append(stem)
        for (compared_predicate, core), name in self._agreed.items():
            if compared_predicate == predicate:
                value = self._core_input(source, number, core)
                out.add(name, "Identity", value + ["^" + c for c in checks[core]], T=tf.bool)
