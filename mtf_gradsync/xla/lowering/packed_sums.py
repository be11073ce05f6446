"""Packs the sums of a group into few collectives, where a compiler does not combine them itself.

The compilers of TPUs and GPUs make one collective of many sums. XLA on CPUs does not, and each of
its collectives makes all cores wait for each other.
"""

from __future__ import annotations

import collections
import itertools
from typing import Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.tensorflow import TOGETHER_ATTR
from mtf_gradsync.reduce.packs import packing
from mtf_gradsync.reduce.packs.planning import plan_buckets
from mtf_gradsync.reduce.parts.reduce_scatter import SIMD_BUCKET_BYTES
from mtf_gradsync.simd.graph.facts import CONTROL, join_input, split_input
from mtf_gradsync.xla.lowering.replica_program import ReplicaProgram


def with_packed_sums(replica: ReplicaProgram) -> ReplicaProgram:
    """Returns a core's program in which each group of sums is one sum of a packed tensor.

    Args:
      replica: the program.

    Returns:
      A program with the same results. Packs are no larger than those of `FusedAllReduce`.
    """
    nodes = {node.name: node for node in replica.graph_def.node}
    groups: dict[tuple[bytes, int, str], list[tf.NodeDef]] = collections.defaultdict(list)
    for node in replica.graph_def.node:
        if node.op == "CrossReplicaSum" and TOGETHER_ATTR in node.attr:
            cores = nodes[_data_inputs(node)[1]].attr["value"].SerializeToString()
            groups[node.attr[TOGETHER_ATTR].s, node.attr["T"].type, str(cores)].append(node)
    taken = set(nodes)
    made: dict[str, list[tf.NodeDef]] = {}
    sum_of: dict[str, str] = {}
    for members in groups.values():
        for pack in _packs(members):
            if len(pack) > 1:
                prefix = _free_name(f"{pack[0].name}/pack", taken)
                new, outputs = _packed(pack, prefix)
                made[pack[-1].name] = new
                sum_of.update({node.name: name for node, name in zip(pack, outputs)})
    if not sum_of:
        return replica
    graph_def = tf.GraphDef()
    graph_def.versions.CopyFrom(replica.graph_def.versions)
    graph_def.library.CopyFrom(replica.graph_def.library)
    for node in replica.graph_def.node:
        graph_def.node.extend(made.get(node.name, ()))
        copy = graph_def.node.add()
        copy.CopyFrom(node)
        if node.name in sum_of:
            # Under the old name, which other nodes use.
            copy.op = "Identity"
            del copy.input[:]
            copy.input.append(sum_of[node.name])
            dtype = node.attr["T"].type
            copy.attr.clear()
            copy.attr["T"].type = dtype
    return replica._replace(graph_def=graph_def)


def _packs(members: Sequence[tf.NodeDef]) -> list[list[tf.NodeDef]]:
    # Neighbours of one shape are packed without being flattened.
    members = sorted(members, key=_shape)
    itemsize = tf.as_dtype(members[0].attr["T"].type).size
    sizes = [tf.TensorShape(_shape(node)).num_elements() * itemsize for node in members]
    return [[members[i] for i in pack] for pack in plan_buckets(sizes, SIMD_BUCKET_BYTES)]


def _packed(pack: Sequence[tf.NodeDef], prefix: str) -> tuple[list[tf.NodeDef], list[str]]:
    """Returns the nodes that compute the sums of a pack, and the names of the sums."""
    shapes = [list(_shape(node)) for node in pack]
    dtype = tf.as_dtype(pack[0].attr["T"].type)
    with tf.Graph().as_default() as graph:
        given = [tf.placeholder(dtype, shape) for shape in shapes]
        packed = packing.pack(given)
        total = tf.placeholder(dtype, packed.shape)
        sums = packing.unpack(total, shapes)
    source = {t.op.name: split_input(_data_inputs(n)[0]) for t, n in zip(given, pack)}
    waits = {text for node in pack for text in node.input if text.startswith("^")}
    # A node without inputs belongs to the loop or branch of what it waits for; a Switch, which
    # passes values into a branch, is outside of it.
    here = tf.NodeDef(name=f"{prefix}/here", op="Identity")
    here.attr["T"].type = dtype.as_datatype_enum
    here.input.append(join_input(*source[given[0].op.name]))
    nodes = [here]
    for node in graph.as_graph_def().node:
        if node.name in source:
            continue
        node.name, inputs = f"{prefix}/{node.name}", list(node.input)
        del node.input[:]
        if node.name == f"{prefix}/{total.op.name}":
            node.op = "CrossReplicaSum"
            node.attr.clear()
            node.attr["T"].type = dtype.as_datatype_enum
            first, number = split_input(packed.name)
            groups = _data_inputs(pack[0])[1]
            node.input.extend([join_input(f"{prefix}/{first}", number), groups, *sorted(waits)])
        for text in inputs:
            name, number = split_input(text)
            own = source.get(name, (f"{prefix}/{name}", number))
            node.input.append(join_input(*own))
        if not node.input:
            node.input.append(f"^{here.name}")
        nodes.append(node)
    names = (split_input(t.name) for t in sums)
    return nodes, [join_input(f"{prefix}/{name}", number) for name, number in names]


def _shape(node: tf.NodeDef) -> tuple[int, ...]:
    """Returns the shape of a sum, which `replica_program` has added as an attribute."""
    (shape,) = node.attr["_output_shapes"].list.shape
    return tuple(dim.size for dim in shape.dim)


def _data_inputs(node: tf.NodeDef) -> list[str]:
    pairs = [split_input(text) for text in node.input]
    return [join_input(name, number) for name, number in pairs if number != CONTROL]


def _free_name(stem: str, taken: set[str]) -> str:
    name = next(
        f"{stem}_{i}"
        for i in itertools.count()
        if not any(n.startswith(f"{stem}_{i}/") for n in taken)
    )
    taken.add(f"{name}/")
    return name
