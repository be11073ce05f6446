"""Lists the collectives of SIMD programs: sizes, groups, loops and branches, and variables."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Iterable, Sequence

from mtf_gradsync.extension import mtf, schedules_updates, stages_of, tf
from mtf_gradsync.runtimes._common import mesh_text
from mtf_gradsync.runtimes.simd.checks import check_functions_lack_collectives
from mtf_gradsync.runtimes.simd.communication import (
    CommunicationReport,
    CommunicationRow,
    bytes_of,
    list_transfers,
    when_run,
)
from mtf_gradsync.runtimes.simd.graph_facts import GraphFacts, UnsupportedProgramError
from mtf_gradsync.runtimes.simd.program import Program
from mtf_gradsync.runtimes.simd.replica_session import lowerings_in
from mtf_gradsync.runtimes.simd.side_effects import (
    CollectiveOperation,
    find_collectives,
    written_variables,
)

# Operations that call functions, whose content `list_transfers` does not examine.
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def list_step(
    place: Any, fetches: Sequence[Any], optimizers: Iterable[Any], lowering: Any = None
) -> CommunicationReport | None:
    """Lists what cores or devices exchange in a training step in the default graph.

    Args:
      place: the SIMD `Program` of the step, or the ``PlacementMeshImpl`` that it was lowered with.
      fetches: the tensors and operations that the step fetches; not needed for a program.
      optimizers: the step's optimizers. If some of its steps skip the update, the update may be a
        function of TensorFlow, and the report is then not complete; not needed for a program.
      lowering: argument of `list_collectives`.

    Returns:
      The report; None if it cannot be made, as on a mesh whose processors share a device.
    """
    try:
        if isinstance(place, Program):
            return list_collectives(place, lowering=lowering)
        report = list_transfers(fetches, place)
    except (UnsupportedProgramError, TypeError, ValueError):
        return None
    skips = any(schedules_updates(stages_of(opt)) for opt in optimizers)
    calls = any(op.type in _CALLS for op in tf.get_default_graph().get_operations())
    return dataclasses.replace(report, is_complete=not (skips and calls))


def list_collectives(
    program: Program | tf.Graph,
    mesh_impl: Any | None = None,
    lowering: Any = None,
) -> CommunicationReport:
    """Lists every collective of the TPU programs in a graph.

    Args:
      program: a `Program`, or a graph that holds TPU programs of any origin.
      mesh_impl: the ``SimdMeshImpl`` that a graph was lowered with, to name groups of cores by mesh
        axes. It is not needed if `program` is a `Program`, or if `lowering` is given, because these
        know the mesh. If the mesh is not known, groups are lists of core numbers.
      lowering: the lowering, or the EstimatorSpec that a model_fn returned. With a lowering, the
        report names the variables that Mesh-TF stacked, in place of the stack.

    Returns:
      The report, one row per collective in program order.

    Raises:
      UnsupportedProgramError: when the graph has no TPU program, or a function that the graph calls
        holds a collective.
    """
    lowerings = lowerings_in(lowering)
    if mesh_impl is None and len(lowerings) == 1 and len(lowerings[0].mesh_to_impl) == 1:
        (mesh_impl,) = lowerings[0].mesh_to_impl.values()
    graph: Any = program
    if isinstance(program, Program):
        graph, mesh_impl = program.graph, mesh_impl or program.mesh_impl
    facts = GraphFacts(graph.as_graph_def())
    if not facts.num_replicas:
        raise UnsupportedProgramError(
            "The graph holds no TPU program, so it has no collectives. For a placement mesh, use "
            "simd.list_transfers."
        )
    check_functions_lack_collectives(facts)
    collectives = find_collectives(facts)
    group_names = {} if mesh_impl is None else groups_by_axes(mesh_impl)
    trainable = {v.op.name for v in graph.get_collection(tf.GraphKeys.TRAINABLE_VARIABLES)}
    stacked = _names_in_stacks(lowerings)
    reached = {
        name: _names_in_report(variables, stacked, trainable)
        for name, variables in _variables_reached(facts, collectives).items()
    }
    rows = []
    for name, collective in collectives.items():
        operand = graph.get_operation_by_name(name).inputs[0]
        shape = tuple(operand.shape.as_list()) if operand.shape.is_fully_defined() else None
        groups = frozenset(frozenset(g) for g in collective.groups)
        lists = ",".join(str(list(g)).replace(" ", "") for g in collective.groups)
        rows.append(
            CommunicationRow(
                operation=collective.op,
                name=name,
                dtype=operand.dtype.name,
                shape=shape,
                bytes_per_core=bytes_of([operand]),
                group=group_names.get(groups, lists),
                **when_run(facts, collective.context),
                variables=reached[name],
                together=collective.together,
            )
        )
    mesh = "" if mesh_impl is None else mesh_text(mesh_impl.shape)
    return CommunicationReport(tuple(rows), mesh)


def groups_by_axes(mesh_impl: Any) -> dict[frozenset, str]:
    """Returns a name for the groups of cores along each set of axes of the mesh of `mesh_impl`.

    A name consists of the axes' names, joined by "+", such as "batch+model". The result is a
    dictionary from groups to their name. Its keys are sets of groups, and each group is a set of
    physical core numbers. Axes of size 1 are left out.
    """
    shape = mesh_impl.shape
    axes = [i for i, dim in enumerate(shape.dims) if dim.size > 1]
    names: dict[frozenset, str] = {}
    for size in range(1, len(axes) + 1):
        for chosen in itertools.combinations(axes, size):
            groups: dict[int, set[int]] = {}
            for logical in range(shape.size):
                group = mtf.pnum_to_group(shape, list(chosen), logical)
                groups.setdefault(group, set()).add(mesh_impl.l2p(logical))
            key = frozenset(frozenset(g) for g in groups.values())
            names[key] = "+".join(shape.dims[i].name for i in chosen)
    return names


def _names_in_stacks(lowerings: Sequence[mtf.Lowering]) -> dict[str, list[str]]:
    """Returns the names of the variables in each ``StackedVariable``, by its name.

    Mesh-TF stacks variables of one shape in a ``StackedVariable``, which is one variable of the
    graph. `lowerings` have the variables.
    """
    return {
        v.name: list(v.original_names)
        for lowering in lowerings
        for v in lowering.graph.all_variables
        if isinstance(v, mtf.StackedVariable)
    }


def _names_in_report(
    variables: list[str], stacked: dict[str, list[str]], trainable: set[str]
) -> tuple[str, ...]:
    """Returns the names by which the report lists variables: the trainable ones, or else all.

    The name of a stack in `variables` is replaced by the names of the variables in the stack;
    `stacked`, the result of `_names_in_stacks`, has these names. `trainable` are the names of the
    graph's trainable variables. If none of the variables is trainable, all names are returned.
    """
    names = [name for v in variables for name in stacked.get(v, [v])]
    # Without the lowering, a stack is known by the name of its first variable.
    known = [n for n in names if n in trainable or n.partition("stacked/")[2] in trainable]
    return tuple(known or names)


def _variables_reached(
    facts: GraphFacts, collectives: dict[str, CollectiveOperation]
) -> dict[str, list[str]]:
    """Returns, by the name of each collective, the names of the variables that its result reaches.

    A result reaches a variable if the new value of the variable is computed from it. Variables that
    the result reaches only through another collective are left out. `collectives` are the
    collectives by name, and `facts` describes their graph.
    """
    written = written_variables(facts)
    names = sorted({v for variables in written.values() for v in variables})
    bit = {name: 1 << i for i, name in enumerate(names)}
    reach = {name: sum(bit[v] for v in set(vs)) for name, vs in written.items()}
    changed = True
    while changed:  # a second pass follows values around a loop, further ones around nested loops
        changed = False
        for name in reversed(facts.order):
            found = reach.get(name, 0)
            if not found or name in collectives:
                continue
            # The second input of a Switch is the predicate, which is no part of the value.
            count = 1 if facts.node[name].op == "Switch" else None
            for source, number in facts.inputs(name)[:count]:
                if number >= 0 and found & ~reach.get(source, 0):
                    reach[source] = reach.get(source, 0) | found
                    changed = True
    return {name: [v for v in names if reach.get(name, 0) & bit[v]] for name in collectives}
