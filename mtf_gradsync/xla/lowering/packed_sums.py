"""Packs the collectives of a group into few, where a compiler does not combine them itself.

The compilers of TPUs and GPUs make one collective of many sums. XLA on CPUs does not, and each of
its collectives makes all cores wait for each other.
"""

from __future__ import annotations

import collections
import itertools
import math
from typing import NamedTuple, Sequence

import numpy as np

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.tensorflow import GATHERS, TOGETHER_ATTR
from mtf_gradsync.reduce.packs import packing
from mtf_gradsync.reduce.packs.planning import plan_buckets
from mtf_gradsync.reduce.parts.reduce_scatter import SIMD_BUCKET_BYTES
from mtf_gradsync.simd.graph.facts import CONTROL, join_input, split_input
from mtf_gradsync.xla.lowering.replica_program import ReplicaProgram

_SUMS = ("CrossReplicaSum", "XlaReduceScatter")


class Member(NamedTuple):
    """One collective of a group."""

    node: tf.NodeDef
    shape: tuple[int, ...]  # of its result
    axis: int  # along which a result is cut or joined
    cores: int  # how many meet

    @property
    def sent(self) -> tuple[int, ...]:
        """Returns the shape of what is sent."""
        shape = list(self.shape)
        if self.node.op == "XlaReduceScatter":
            shape[self.axis] *= self.cores
        elif self.node.op == "AllToAll":
            shape[0] *= self.cores
            shape[self.axis] //= self.cores
        return tuple(shape)


def with_packed_sums(replica: ReplicaProgram) -> ReplicaProgram:
    """Returns a core's program with few collectives, of packed tensors, in place of each group.

    Its results are the same. Packs are no larger than those of `FusedAllReduce`.
    """
    nodes = {node.name: node for node in replica.graph_def.node}
    groups: dict[tuple[bytes, str, int, str], list[Member]] = collections.defaultdict(list)
    for node in replica.graph_def.node:
        if TOGETHER_ATTR in node.attr and (node.op in _SUMS or GATHERS in node.attr):
            inputs = _data_inputs(node)
            cores = _constant(nodes[inputs[1]])
            axis = 0
            if node.op == "XlaReduceScatter":
                axis = int(_constant(nodes[inputs[2]]))
            elif node.op == "AllToAll":
                axis = node.attr["concat_dimension"].i
            key = node.attr[TOGETHER_ATTR].s, node.op, node.attr["T"].type, str(cores.tolist())
            groups[key].append(Member(node, _shape(node), axis, cores.shape[-1]))
    taken = set(nodes)
    made: dict[str, list[tf.NodeDef]] = {}
    sum_of: dict[str, str] = {}
    for members in groups.values():
        for pack in _packs(members):
            if len(pack) > 1:
                prefix = _free_name(f"{pack[0].node.name}/pack", taken)
                new, outputs = _packed(pack, prefix)
                made[pack[-1].node.name] = new
                sum_of.update({one.node.name: name for one, name in zip(pack, outputs)})
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


def _packs(members: Sequence[Member]) -> list[list[Member]]:
    # Neighbours of one shape are packed without being flattened.
    members = sorted(members, key=lambda m: m.shape)
    itemsize = tf.as_dtype(members[0].node.attr["T"].type).size
    sizes = [math.prod(m.shape) * itemsize for m in members]
    return [[members[i] for i in pack] for pack in plan_buckets(sizes, SIMD_BUCKET_BYTES)]


def _packed(pack: Sequence[Member], prefix: str) -> tuple[list[tf.NodeDef], list[str]]:
    """Returns the nodes that compute the results of a pack, and the names of the results."""
    first, dtype = pack[0].node, tf.as_dtype(pack[0].node.attr["T"].type)
    with tf.Graph().as_default() as graph:
        more: list[tf.Tensor] = []
        given = [tf.placeholder(dtype, m.sent) for m in pack]
        if first.op == "CrossReplicaSum":
            packed = packing.pack(given)
            total = tf.placeholder(dtype, packed.shape)
            results = list(packing.unpack(total, [list(m.shape) for m in pack]))
        elif first.op == "XlaReduceScatter":
            packed = tf.concat([_rows(x, m.axis, m.cores) for x, m in zip(given, pack)], 1)
            total = tf.placeholder(dtype, [1, packed.shape[1]])
            more = [tf.constant(0, tf.int32)]  # the dimension that is cut
            pieces = tf.split(total, [math.prod(m.shape) for m in pack], 1)
            results = [tf.reshape(x, m.shape) for x, m in zip(pieces, pack)]
        else:
            row = tf.concat([tf.reshape(x[:1], [1, 1, -1]) for x in given], 2)
            packed = tf.broadcast_to(row, [pack[0].cores, 1, row.shape[2]])
            total = tf.placeholder(dtype, [1, pack[0].cores, row.shape[2]])
            pieces = tf.split(total[0], [math.prod(m.sent) // m.cores for m in pack], 1)
            results = [_put_together(x, m) for x, m in zip(pieces, pack)]
    source = {t.op.name: split_input(_data_inputs(m.node)[0]) for t, m in zip(given, pack)}
    waits = {text for m in pack for text in m.node.input if text.startswith("^")}
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
            name, number = split_input(packed.name)
            groups = _data_inputs(first)[1]
            node.CopyFrom(first)
            node.name = f"{prefix}/{total.op.name}"
            if node.op == "AllToAll":
                node.attr["concat_dimension"].i = 1
            del node.attr["_output_shapes"]
            del node.attr[TOGETHER_ATTR]
            del node.input[:]
            node.input.extend([join_input(f"{prefix}/{name}", number), groups])
            node.input.extend([f"{prefix}/{x.op.name}" for x in more] + sorted(waits))
        for text in inputs:
            name, number = split_input(text)
            own = source.get(name, (f"{prefix}/{name}", number))
            node.input.append(join_input(*own))
        if not node.input:
            node.input.append(f"^{here.name}")
        nodes.append(node)
    names = (split_input(t.name) for t in results)
    return nodes, [join_input(f"{prefix}/{name}", number) for name, number in names]


def _rows(x: tf.Tensor, axis: int, cores: int) -> tf.Tensor:
    """Returns a tensor as a row for each core that gets a part of it, cut along an axis."""
    shape = x.shape.as_list()
    x = tf.reshape(x, [*shape[:axis], cores, shape[axis] // cores, *shape[axis + 1 :]])
    rest = [i for i in range(len(shape) + 1) if i != axis]
    return tf.reshape(tf.transpose(x, [axis, *rest]), [cores, -1])


def _put_together(rows: tf.Tensor, member: Member) -> tf.Tensor:
    """Returns what an all-gather gives, of a row from each core."""
    axis, part = member.axis, list(member.sent[1:])
    x = tf.reshape(rows, [member.cores, *part])
    # `axis` counts the dimension of the cores, which stands in front.
    order = [*range(1, axis), 0, *range(axis, len(part) + 1)]
    return tf.reshape(tf.transpose(x, order), member.shape)


def _constant(node: tf.NodeDef) -> np.ndarray:
    return tf.make_ndarray(node.attr["value"].tensor)


def _shape(node: tf.NodeDef) -> tuple[int, ...]:
    """Returns the shape of a result, which `replica_program` has added as an attribute."""
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
