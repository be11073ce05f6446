"""Checks of SIMD programs: what CPU replicas cannot run, and where cores must agree."""

from __future__ import annotations

import functools
from typing import Iterable, Iterator, NamedTuple

from mtf_gradsync.extension import tf
from mtf_gradsync.runtimes._private.tensorflow import kernel_devices
from mtf_gradsync.runtimes.simd.graph_facts import (
    CONTROL,
    GraphFacts,
    Loop,
    UnsupportedProgramError,
    reachable,
)
from mtf_gradsync.runtimes.simd.side_effects import (
    COLLECTIVE_TYPES,
    CollectiveOperation,
    Effects,
    find_collectives,
    merge_overlapping,
)

# The emulator rewrites these, so they need no CPU kernel.
_REWRITTEN = frozenset(COLLECTIVE_TYPES) | {"TPUReplicateMetadata"}
_BOUNDARY = frozenset(["TPUReplicatedInput", "TPUReplicatedOutput"])

_REMEDIES = {
    "InfeedDequeue": "feed per-core tensors through program.per_replica([...])",
    "InfeedDequeueTuple": "feed per-core tensors through program.per_replica([...])",
    "OutfeedEnqueue": "fetch the tensor from the session",
    "OutfeedEnqueueTuple": "fetch the tensor from the session",
    "Placeholder": "make the placeholder before the program opens, and use it inside",
}


def check_can_be_emulated(facts: GraphFacts) -> None:
    """Raises `UnsupportedProgramError` for a graph that CPU replicas cannot run correctly.

    `facts` describes the graph.
    """
    if not facts.num_replicas:
        raise UnsupportedProgramError(
            "The graph holds no TPU program. Build the model inside simd.tpu_program(...) or "
            "tf.tpu.replicate(...)."
        )
    check_functions_lack_collectives(facts)
    find_collectives(facts)  # raises an error if groups make no sense
    functions = {f.signature.name for f in facts.graph_def.library.function}
    types: dict[str, tf.NodeDef] = {}
    for name in facts.order:
        node = facts.node[name]
        if name in facts.cluster:
            _check_cluster(facts, node)
            if node.op not in functions:
                types.setdefault(node.op, node)
        elif node.op not in _BOUNDARY:
            _check_outside(facts, node)
    for op_type, node in types.items():
        if op_type not in _REWRITTEN and not kernel_devices(op_type) & {"CPU", "DEFAULT"}:
            remedy = _REMEDIES.get(op_type, "remove it from the program, or run it on a TPU")
            raise UnsupportedProgramError.of(node, "TensorFlow has no CPU kernel for it", remedy)


def check_functions_lack_collectives(facts: GraphFacts) -> None:
    """Raises `UnsupportedProgramError` if a program calls a function that holds a collective.

    `facts` describes the graph with the programs.
    """
    functions = {f.signature.name: f for f in facts.graph_def.library.function}

    def called(function: str) -> list[str]:
        nodes = functions[function].node_def
        return [name for node in nodes for name in _functions_named(node) if name in functions]

    @functools.lru_cache(maxsize=None)
    def collective_in(function: str) -> tf.NodeDef | None:
        needed = reachable([function], called)
        nodes = (node for name in functions if name in needed for node in functions[name].node_def)
        return next((node for node in nodes if node.op in COLLECTIVE_TYPES), None)

    for node in (facts.node[name] for name in facts.order if name in facts.cluster):
        for function in _functions_named(node):
            found = collective_in(function) if function in functions else None
            if found is not None:
                raise UnsupportedProgramError.of(
                    node,
                    f"its function {function!r} holds the collective {found.name!r} of type "
                    f"{found.op}",
                    "build loops and conditionals with control flow version 1 "
                    "(tf.disable_v2_behavior() or tf.disable_control_flow_v2()), and call "
                    "collectives outside tf.function",
                )


def _check_cluster(facts: GraphFacts, node: tf.NodeDef) -> None:
    if facts.cluster[node.name] not in facts.num_replicas:
        raise UnsupportedProgramError.of(
            node,
            f"its program {facts.cluster[node.name]!r} has no TPUReplicateMetadata",
            "take the whole graph, not a part of it",
        )
    if node.op == "Placeholder":
        raise UnsupportedProgramError.of(
            node, "a TPU program cannot be fed from inside", _REMEDIES["Placeholder"]
        )


def _check_outside(facts: GraphFacts, node: tf.NodeDef) -> None:
    for source, number in facts.inputs(node.name):
        if number != CONTROL and source in facts.cluster:
            raise UnsupportedProgramError.of(
                node,
                f"it stands outside the TPU program and reads {source!r} from inside the program",
                f"move it into the program, or fetch {source!r} from the session",
            )
        if facts.node[source].op == "TPUReplicatedInput":
            raise UnsupportedProgramError.of(
                node,
                f"it reads the per-core input {source!r} outside the program",
                "read the tensors that went into program.per_replica([...])",
            )


def _functions_named(node: tf.NodeDef) -> Iterator[str]:
    """Yields the names of all functions that a node may call, and the node's type.

    The type is among the names because it, too, may be the name of a function. All other names are
    those of the functions in the node's attributes.
    """
    yield node.op
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        for item in value.list.func:
            yield item.name


def find_meetings(
    facts: GraphFacts, collectives: dict[str, CollectiveOperation], effects: Effects
) -> list[CollectiveOperation]:
    """Returns the operations that several cores of a program have to reach together.

    The returned list has the operations in `collectives`. For each write to a shared variable that
    `effects` names, it has an operation in which all cores of the program are one group.
    `collectives` and `effects` belong to the graph that `facts` describes.
    """
    meetings = list(collectives.values())
    for name in facts.order:
        if name in effects.shared_writes:
            cores = tuple(range(facts.num_replicas[facts.cluster[name]]))
            op, context = facts.node[name].op, facts.context[name]
            meetings.append(CollectiveOperation(name, op, (cores,), (), context))
    return meetings


def frame_leaders(meetings: Iterable[CollectiveOperation]) -> dict[tuple[str, int], int]:
    """Returns, for each loop in which cores exchange data, which cores run it in one frame.

    A frame is TensorFlow's name for one execution of a loop. Cores that exchange data inside a loop
    iterate together, in the frame of the core with the lowest number among them. `meetings` are the
    operations in which cores exchange data. The result's keys are pairs of a loop's frame name and
    a core's number; the value is the number of the core whose frame this core uses. A core whose
    pair is missing has its own frame.

    Cores that exchange nothing must not share a frame. A frame is executed as a whole or not at
    all, but the loop may be in a branch that only some groups of cores take.
    """
    groups: dict[str, list[tuple[int, ...]]] = {}
    for meeting in meetings:
        for around in meeting.context:
            if isinstance(around, Loop):
                groups.setdefault(around.frame, []).extend(meeting.groups)
    return {
        (frame, core): cores[0]
        for frame, found in groups.items()
        for cores in merge_overlapping(found)
        for core in cores
    }


class Agreement(NamedTuple):
    """A predicate that has to have the same value on all cores of `group`.

    `kind` is "conditional" or "while loop", and `predicate` is the predicate in the user's graph,
    as the text of a ``NodeDef``'s input. `meetings` are the names of the operations that the cores
    have to reach together.
    """

    kind: str  # "conditional" or "while loop"
    predicate: str  # the predicate in the user's graph, as the text of a NodeDef's input
    group: tuple[int, ...]
    meetings: list[str]  # names of the operations that need the agreement


def find_agreements(
    facts: GraphFacts, meetings: Iterable[CollectiveOperation]
) -> dict[str, list[Agreement]]:
    """Returns, by predicate, on which groups of cores the predicate must have one value.

    `meetings` are the operations of the graph (`facts` describes it) that groups of cores have to
    reach together. If one of these operations is inside a conditional or loop, the predicate of the
    conditional or loop must have one value on all cores of each group. The keys of the result are
    these predicates, as texts of a ``NodeDef``'s input.
    """
    found: dict[str, dict[tuple[int, ...], Agreement]] = {}
    for meeting in meetings:
        for around in meeting.context:
            if isinstance(around, Loop):
                kind, predicate = "while loop", facts.node[facts.condition_of[around]].input[0]
            else:
                kind, predicate = "conditional", around.predicate
            for group in (tuple(sorted(g)) for g in meeting.groups if len(g) > 1):
                agreement = Agreement(kind, predicate, group, [])
                of_predicate = found.setdefault(predicate, {})
                of_predicate.setdefault(group, agreement).meetings.append(meeting.name)
    return {predicate: list(agreements.values()) for predicate, agreements in found.items()}


def name_of_last_values(check: str) -> str:
    """Returns the name of the operation that reads the values that a check has compared last.

    `check` is the name of the check: an operation that compares the values of a predicate on a
    group of cores. The named operation returns these values as a boolean vector, in the order of
    the group's cores.
    """
    return check + "/last_values"
