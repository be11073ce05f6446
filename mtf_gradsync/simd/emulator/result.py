"""The result of the rewriting, and the new names of operations and tensors."""

from __future__ import annotations

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.simd.emulator.agreement import Agreement
from mtf_gradsync.simd.graph.collective_ops import find_collectives
from mtf_gradsync.simd.graph.facts import CONTROL, GraphFacts, split_input
from mtf_gradsync.simd.graph.fetches import check_alive_outside


def clone_name(prefix: str, name: str, core: int) -> str:
    """Returns the name of a physical core's copy of an operation or tensor of a program."""
    return f"{prefix}_{core}/{name}"


class EmulatedGraph:
    """A graph whose TPU programs run on CPU replicas.

    Attributes:
      graph_def: the rewritten graph. It has no TPU operations and no device names.
      num_replicas: name of each TPU program -> its number of cores.
      done: name of each TPU program -> the operation that runs all of it, on all cores.
      agreements: name of each comparing operation -> what it compares.
    """

    def __init__(
        self,
        facts: GraphFacts,
        graph_def: tf.GraphDef,
        prefix: str,
        done: dict[str, str],
        agreements: dict[str, Agreement],
    ):
        self._facts = facts
        self._prefix = prefix
        self.graph_def = graph_def
        self.num_replicas = dict(facts.num_replicas)
        self.done = done
        self.agreements = agreements

    def program_of(self, name: str) -> str:
        """Returns the TPU program that an operation or tensor belongs to.

        Args:
          name: name of an operation or tensor in the graph before the rewriting.

        Returns:
          The program's name, or "" for what stands outside.

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
        """Where an operation of the rewritten graph runs.

        Args:
          name: the operation's.

        Returns:
          The core, and what the operation was called before the rewriting; None for what stands
          outside every program.
        """
        first, _, rest = name.partition("/")
        stem, _, number = first.rpartition("_")
        if stem != self._prefix or not number.isdigit() or not rest:
            return None
        return int(number), rest

    def groups_of_sums(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """The groups of cores of each sum, of which one is made for all of a group.

        Returns:
          Name before the rewriting -> groups; the first core of each has the operation.
        """
        found = find_collectives(self._facts).values()
        return {one.name: one.groups for one in found if one.op == "CrossReplicaSum"}

    def names_on_replicas(self, name: str) -> list[str]:
        """Returns the names that an operation or tensor has after the rewriting.

        Args:
          name: name of an operation ("loss") or tensor ("loss:0") in the graph before.

        Returns:
          One name per core, or a single one for what is outside every program.

        Raises:
          KeyError: when the graph has no such operation.
          ValueError: when it is in a loop or branch, or is an input of the program.
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
        check_alive_outside(self._facts, node_name, number)
        cores = self.num_replicas[self._facts.cluster[node_name]]
        return [clone_name(self._prefix, name, core) for core in range(cores)]
