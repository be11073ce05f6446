"""Reports of a SIMD program's communication: each collective, its bytes, and when it runs."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import textwrap
from typing import Any, Iterable, Mapping, NamedTuple, Sequence

from mtf_gradsync.extension import mtf, process_of, some_of, tf
from mtf_gradsync.runtimes._common import mesh_text
from mtf_gradsync.runtimes._tables import terminal_width, text_table
from mtf_gradsync.runtimes.simd.graph_facts import (
    CalledBranch,
    Context,
    GraphFacts,
    Loop,
    reachable,
    runs_in_context,
)


@dataclasses.dataclass(frozen=True)
class CommunicationRow:
    """An operation through which cores or devices exchange data.

    Attributes:
      operation: the operation's type; "transfer" for the copies of a placement mesh.
      name: name of the operation; for copies, their name scope and "/transfer".
      dtype: dtype of the operand, such as "float32".
      shape: shape of the operand on one core; None if it is unknown, or there are several tensors.
      bytes_per_core: size of the operand on one core, in bytes, for one run of the operation. These
        are the bytes that the core gives to the operation; the bytes on the wires depend on the
        algorithm. For transfers, these are the bytes that a device receives, averaged over the
        devices. None if the size is not known.
      group: the cores that exchange: names of mesh axes joined by "+", or lists of core numbers.
      loops: names of the loops around the operation, outermost first.
      turns: how many times the loops run the operation in one step (the product of their numbers of
        iterations); None if the graph does not say.
      branches: the conditionals around the operation, each as (name of the predicate, the
        predicate's value that runs the operation).
      variables: variables that the operation's result reaches without another collective in
        between. For the sum of a gradient, these are the variables that the gradient is for. None
        if not known.
      together: name of the group of sums (see the glossary) that the operation belongs to.
        Compilers of TPUs and GPUs combine the sums of a group. "" for an operation in no group.
    """

    operation: str
    name: str
    dtype: str
    shape: tuple[int, ...] | None
    bytes_per_core: int | None
    group: str
    loops: tuple[str, ...] = ()
    turns: int | None = 1
    branches: tuple[tuple[str, bool], ...] = ()
    variables: tuple[str, ...] | None = None
    together: str = ""

    @property
    def is_conditional(self) -> bool:
        """Whether the operation runs in some steps only."""
        return bool(self.branches)

    @property
    def where(self) -> str:
        """The loops and branches around the operation, such as "while x4, if update"; "" if none.

        The number after "x" is how many times all loops together run the operation in one step; "?"
        stands for an unknown number.
        """
        parts = []
        if self.loops:
            turns = "?" if self.turns is None else self.turns
            parts.append(f"{self.loops[-1]} x{turns}")
        parts += [f"if {'' if taken else 'not '}{predicate}" for predicate, taken in self.branches]
        return ", ".join(parts)

    @property
    def bytes_per_step(self) -> int | None:
        """The bytes per core in a step that runs the operation, with all iterations of its loops.

        The result is None if the number of bytes is unknown.
        """
        if self.bytes_per_core is None or self.turns is None:
            return None
        return self.bytes_per_core * self.turns


@dataclasses.dataclass(frozen=True)
class Total:
    """The totals of several rows of a `CommunicationReport`.

    Attributes:
      operations: the number of operations; an operation in a loop counts once.
      groups: the number of groups of operations that are made together; an operation alone is a
        group, too.
      runs: the number of runs in one step; operations that run an unknown number of times count
        once.
      bytes_per_core: bytes per core in one step. An operation that runs an unknown number of times
        counts once, and an operation of unknown size counts as 0 bytes.
      is_exact: whether all sizes and numbers of runs were known.
    """

    operations: int
    groups: int
    runs: int
    bytes_per_core: int
    is_exact: bool

    @property
    def counts(self) -> str:
        """A text such as "19 operations in 1 group"."""
        return f"{_count(self.operations, 'operation')} in {_count(self.groups, 'group')}"


@dataclasses.dataclass(frozen=True)
class CommunicationReport:
    """The communication of a program: what its cores exchange.

    Attributes:
      rows: one row per operation, in program order.
      mesh: the mesh, as in "batch:4;model:2", or "" if it is not known.
      is_complete: False if the update may be in functions of TensorFlow, which are not examined.
    """

    rows: tuple[CommunicationRow, ...]
    mesh: str = ""
    is_complete: bool = True

    @property
    def every_step(self) -> Total:
        """The total of the operations that run in every step."""
        return _total([r for r in self.rows if not r.is_conditional])

    @property
    def conditional(self) -> Total:
        """The total of the operations that run only when their branch is taken."""
        return _total([r for r in self.rows if r.is_conditional])

    @property
    def update_step(self) -> Total:
        """The total of a step that takes every branch, as an update step does."""
        return _total(self.rows)

    def scalars(self) -> dict[str, float]:
        """Returns bytes per core in one step, by the names that TensorBoard summaries use.

        "traffic/bytes_of_update_step" has the bytes of an update step.
        "traffic/bytes_of_other_step" has the bytes of other steps; it is in the result only if
        other steps send fewer bytes than update steps. The result is empty if the report is not
        complete.
        """
        if not self.is_complete:
            return {}
        other, update = self.every_step.bytes_per_core, self.update_step.bytes_per_core
        values: dict[str, float] = {"traffic/bytes_of_update_step": update}
        if other != update:
            values["traffic/bytes_of_other_step"] = other
        return values

    def by_group(self) -> dict[str, Total]:
        """Returns, for each group of cores that exchange data, the total in an update step.

        The keys are the values of `CommunicationRow.group`, in the order in which they first appear
        in `rows`.
        """
        groups: dict[str, list[CommunicationRow]] = {}
        for row in self.rows:
            groups.setdefault(row.group, []).append(row)
        return {group: _total(rows) for group, rows in groups.items()}

    def __str__(self) -> str:
        lines = [f"mesh {self.mesh}"] if self.mesh else []
        lines += [*table_of(self.rows), "", f"every step      {_sentence(self.every_step)}"]
        if self.conditional.operations:
            lines.append(f"in branches     {_sentence(self.conditional)}")
            lines.append(f"update step     {_sentence(self.update_step)}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Returns the report as JSON text: an object with the keys "mesh", "rows" and "totals"."""
        content = {
            "mesh": self.mesh,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "totals": {
                "every_step": dataclasses.asdict(self.every_step),
                "conditional": dataclasses.asdict(self.conditional),
                "update_step": dataclasses.asdict(self.update_step),
                "by_group": {g: dataclasses.asdict(t) for g, t in self.by_group().items()},
            },
        }
        return json.dumps(content, indent=2)

    def plot(self, path: str) -> None:
        """Writes a PNG that shows bytes per core and numbers of groups of operations, by mesh axes.

        Args:
          path: the file to write.

        Raises:
          ImportError: when matplotlib is not installed.
        """
        # Without pyplot, so that no display and no global state is touched.
        from matplotlib.figure import Figure

        groups = list(self.by_group())
        figure = Figure(figsize=(9, 1.5 + 0.5 * max(1, len(groups))), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        parts = (("every step", False), ("in branches", True))
        left = [[0.0] * len(groups), [0.0] * len(groups)]
        for label, conditional in parts:
            totals = [
                _total([r for r in self.rows if r.group == g and r.is_conditional is conditional])
                for g in groups
            ]
            values: list[list[float]] = [
                [t.bytes_per_core / 1e3 for t in totals],
                [t.groups for t in totals],
            ]
            for panel, value, start in zip(panels, values, left):
                panel.barh(groups, value, left=start, label=label)
            left = [[a + b for a, b in zip(x, y)] for x, y in zip(left, values)]
        panels[0].set_xlabel("kB per core and step")
        panels[1].set_xlabel("groups of operations per step")
        panels[0].invert_yaxis()
        panels[1].legend()
        if self.mesh:
            figure.suptitle(f"mesh {self.mesh}")
        figure.savefig(path, format="png", dpi=120)


# A row with more variables shows this many names.
_MOST_VARIABLES = 6
# Columns that become part of a line above the table if all rows have the same value.
_SAID_ONCE = ("operation", "dtype", "over", "together", "where", "part", "at")


def table_of(rows: Sequence[CommunicationRow], parts: Mapping[str, str] | None = None) -> list[str]:
    """Returns the lines of a table of rows; equal rows become one line that says how many they are.

    Properties that all rows share are in a line above the table. `parts` maps the name of each row
    to the part of the training step that the row belongs to. A column "part" shows these parts. If
    `parts` is None, the table has no such column.
    """
    counts = collections.Counter(
        (
            row.operation,
            row.dtype,
            row.bytes_per_core,
            row.group,
            row.together.rpartition("/")[2],
            row.where,
            parts[row.name] if parts else "",
            "?" if row.variables is None else some_of(row.variables, _MOST_VARIABLES),
            row.name.rpartition("/")[0] or row.name,
        )
        for row in rows
    )
    if not counts:
        return ["none"]
    names = ("operation", "dtype", "bytes/core", "over", "together", "where", "part", "variables")
    columns: dict[str, list[str]] = {"ops": [f"{n:,}" for n in counts.values()]}
    columns.update(zip((*names, "at"), map(list, zip(*counts))))
    columns["bytes/core"] = [
        "?" if row[2] is None else f"{row[2] * count:,}" for row, count in counts.items()
    ]
    once = {n: columns[n][0] for n in _SAID_ONCE if len(counts) > 1 and len({*columns[n]}) == 1}
    left = [n for n in columns if n not in once and any(columns[n])]
    said = [f"{name} {value}" for name, value in once.items() if value]
    table = text_table(
        left, list(zip(*(columns[n] for n in left))), text={*left} - {"ops", "bytes/core"}
    )
    return [*textwrap.wrap(f"all: {', '.join(said)}" if said else "", terminal_width()), *table]


def _total(rows: Sequence[CommunicationRow]) -> Total:
    return Total(
        operations=len(rows),
        groups=len({(r.together, r.branches) if r.together else r.name for r in rows}),
        runs=sum(1 if r.turns is None else r.turns for r in rows),
        bytes_per_core=sum(
            (r.bytes_per_core or 0) * (1 if r.turns is None else r.turns) for r in rows
        ),
        is_exact=all(r.bytes_per_step is not None for r in rows),
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _sentence(total: Total) -> str:
    about = "" if total.is_exact else "at least "
    # Operations in loops run more than once.
    runs = f"{about}{_count(total.runs, 'run')}, " if total.runs != total.operations else ""
    return f"{total.counts}, {runs}{about}{total.bytes_per_core:,} bytes per core"


def list_transfers(fetches: Sequence[Any], mesh_impl: Any) -> CommunicationReport:
    """Lists the copies between the devices of a placement mesh.

    A tensor is copied once to each device that uses it. Copies from and to devices outside the mesh
    (the host's inputs, master variables) are not listed. Copies that TensorFlow makes because it
    places an operation on another device than the graph says are not listed either.

    Args:
      fetches: the tensors and operations that a step fetches with ``session.run``. Operations that
        these fetches do not need are not counted.
      mesh_impl: the ``PlacementMeshImpl`` that the graph was lowered with; its devices have to be
        different from each other.

    Returns:
      The report: one row for each name scope, dtype, loop or branch, and set of mesh axes along
      which source and target differ.

    Raises:
      ValueError: when there are no fetches, or two cores of the mesh share one device string.
    """
    operations = _operations(fetches, "list_transfers")
    devices = {_canonical(device): core for core, device in enumerate(mesh_impl.devices)}
    if len(devices) != mesh_impl.size:
        raise ValueError(
            f"list_transfers needs a device of its own for each of the {mesh_impl.size} cores, "
            f"got {list(mesh_impl.devices)}."
        )
    facts = GraphFacts(operations[0].graph.as_graph_def())
    copies: dict[tuple[Any, ...], list[tf.Tensor]] = collections.defaultdict(list)
    seen: set[tuple[str, str]] = set()
    for operation in _with_inputs(operations):
        for tensor in operation.inputs:
            source, target = _canonical(tensor.op.device), _canonical(operation.device)
            if source == target or source not in devices or target not in devices:
                continue
            if (tensor.name, target) in seen or tensor.dtype == tf.resource:
                continue
            seen.add((tensor.name, target))
            scope = operation.name.rpartition("/")[0] or operation.name
            axes = "+".join(axes_between(mesh_impl.shape, devices[source], devices[target]))
            context = facts.context[operation.name]
            copies[scope, tensor.dtype.name, axes, context].append(tensor)
    rows = []
    for (scope, dtype, axes, context), tensors in copies.items():
        total = bytes_of(tensors)
        rows.append(
            CommunicationRow(
                operation="transfer",
                name=f"{scope}/transfer",
                dtype=dtype,
                shape=None,
                bytes_per_core=None if total is None else math.ceil(total / mesh_impl.size),
                group=axes,
                **when_run(facts, context),
            )
        )
    return CommunicationReport(tuple(rows), mesh_text(mesh_impl.shape))


class ProcessTransfers(NamedTuple):
    """The messages between processes in a step.

    Attributes:
      tensors: messages that carry a tensor.
      bytes: size of these tensors; None if a shape is unknown.
      signals: messages without content, which let operations wait for operations of another
        process.
    """

    tensors: int
    bytes: int | None
    signals: int


def count_process_transfers(fetches: Sequence[Any]) -> ProcessTransfers:
    """Counts what a step sends between the processes of a cluster.

    TensorFlow sends a tensor once to each process that uses it, on however many devices. A loop's
    messages count once, and a branch's messages count whether the branch is taken or not.

    Three kinds of messages are not counted. Messages to and from operations without a fixed process
    are not counted; TensorFlow places such operations, usually in the process of the session's
    master. Messages inside a collective operation are not counted, nor messages that carry fetched
    values to the client.

    Args:
      fetches: the tensors and operations that a step fetches with ``session.run``.

    Returns:
      The counts for the graph as it was built, without the changes that Grappler, TensorFlow's
      graph optimizer, makes.

    Raises:
      ValueError: when there are no fetches.
    """
    tensors: dict[tuple[str, Any], tf.Tensor] = {}
    signals = set()
    for operation in _with_inputs(_operations(fetches, "count_process_transfers")):
        target = _certain_process(operation)
        for tensor in operation.inputs:
            if _is_sent(tensor.op, target) and tensor.dtype != tf.resource:
                tensors[tensor.name, target] = tensor
        for before in operation.control_inputs:
            if _is_sent(before, target):
                signals.add((before.name, target))
    return ProcessTransfers(len(tensors), bytes_of(tensors.values()), len(signals))


def bytes_of(tensors: Iterable[tf.Tensor]) -> int | None:
    """Returns the total size of tensors in bytes; None if a shape is unknown."""
    tensors = list(tensors)
    if not all(x.shape.is_fully_defined() for x in tensors):
        return None
    return sum(x.shape.num_elements() * x.dtype.size for x in tensors)


def _is_sent(source: tf.Operation, target: Any) -> bool:
    return target is not None and _certain_process(source) not in (None, target)


def _certain_process(operation: tf.Operation) -> Any:
    process = process_of(operation.device or "")
    return None if process[-1] is None else process


def _operations(fetches: Sequence[Any], caller: str) -> list[tf.Operation]:
    operations = [getattr(fetch, "op", fetch) for fetch in tf.nest.flatten(fetches)]
    if not operations:
        raise ValueError(f"{caller} needs the tensors and operations of a step, got none.")
    return operations


def _canonical(device: str) -> str:
    return tf.DeviceSpec.from_string(device or "").to_string()


def _with_inputs(operations: Sequence[tf.Operation]) -> list[tf.Operation]:
    """Returns `operations` and all operations that they need, in order of creation."""
    graph_order = {op.name: i for i, op in enumerate(operations[0].graph.get_operations())}
    needed = reachable(operations, lambda op: [*(x.op for x in op.inputs), *op.control_inputs])
    return sorted(needed, key=lambda op: graph_order[op.name])


def axes_between(shape: mtf.Shape, core: int, other: int) -> list[str]:
    """Returns the names of the mesh axes in whose coordinates two cores differ.

    `core` and `other` are the numbers of the cores on the mesh, whose shape is `shape`.
    """
    places = (mtf.pnum_to_processor_coordinates(shape, x) for x in (core, other))
    return [dim.name for dim, a, b in zip(shape.dims, *places) if a != b]


def when_run(facts: GraphFacts, context: Context) -> dict[str, Any]:
    """Returns the values of `loops`, `turns` and `branches` for a `CommunicationRow`, by name.

    `context` is the loops and branches around the row's operation, and `facts` describes the graph
    of the operation.
    """
    return {
        "loops": tuple(c.frame for c in context if isinstance(c, Loop)),
        "turns": runs_in_context(facts, context),
        "branches": tuple((c.predicate, c.taken) for c in context if isinstance(c, CalledBranch)),
    }
