"""All that the tests ask of one cluster of two processes that serve their devices.

The benchmark of two processes, small, what TensorFlow really sends in its sums, and what it sends
in compressed ones. ``python -m tests.runtimes.cluster.two_processes_program <file>``: writes it to
the file as JSON.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import absl.flags

from benchmarks import report, two_processes
from benchmarks.cluster import LocalCluster
from mtf_gradsync import reduce
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.runtimes.settings import enable_mesh_defaults
from tests.runtimes.cluster import compressed_program
from tests.runtimes.cluster.forked_servers import fork_servers

# Tensors that the ring cuts into parts, and some that it sends whole: too small, not divisible.
SHAPES = [[32, 64], [], [3], [41, 33]]
# The table has a row for each; of these something more is known.
IN_TABLE = two_processes.RING, *two_processes.TARGETS, "collective"
ONE_DEVICE = "on one device, in turns"
TWO_LEVELS = two_processes.TWO_LEVELS, "two levels, 4 packs", two_processes.COMPRESSED
# The order of devices and the strategy.
SUMS = [
    *(("mixed", name) for name in two_processes.STRATEGIES),
    *(("by process", name) for name in (two_processes.RING, ONE_DEVICE, *TWO_LEVELS)),
]
WITH_GRAPPLER = two_processes.RING, two_processes.COMPRESSED, "collective"


def device_orders(devices: list[str]) -> dict[str, list[str]]:
    """A process a row of the mesh, and neighbours of a row in different processes."""
    half = len(devices) // 2
    mixed = [d for pair in zip(devices[:half], devices[half:]) for d in pair]
    return {"by process": devices, "mixed": mixed}


def really_sent(
    cluster: LocalCluster, one: two_processes.Reduction, grappler: bool
) -> dict[str, int]:
    """Runs a sum; counts what its partition graphs send between tasks."""
    config = two_processes.config(grappler)
    with tf.Session(cluster.target, graph=one.graph, config=config) as session:
        session.run(one.initialize)
        metadata = tf.RunMetadata()
        options = tf.RunOptions(output_partition_graphs=True)
        session.run(one.used, options=options, run_metadata=metadata)
    sent = {"tensors": 0, "bytes": 0, "signals": 0}
    received = 0
    for graph in metadata.partition_graphs:
        inputs = {node.name: [x for x in node.input if x.startswith("^")] for node in graph.node}
        for node in graph.node:
            ends = [node.attr[end].s.decode() for end in ("send_device", "recv_device")]
            if len({tf.DeviceSpec.from_string(end).task for end in ends}) == 1:
                continue
            received += node.op == "_Recv"
            if node.op != "_Send":
                continue
            name, _, number = node.input[0].partition(":")
            if inputs[name] and name not in {op.name for op in one.graph.get_operations()}:
                # A control edge is sent as an empty constant that waits for its source.
                sent["signals"] += 1
                continue
            tensor = one.graph.get_tensor_by_name(f"{name}:{number or 0}")
            sent["tensors"] += 1
            sent["bytes"] += tensor.shape.num_elements() * tensor.dtype.size
    if received != sent["tensors"] + sent["signals"]:
        raise RuntimeError(f"{received} receptions of {sent}.")
    return sent


def crossed_sums(cluster: LocalCluster) -> dict[str, Any]:
    """Two sums whose members come in opposite orders in the two processes, again and again.

    Returns:
      Both sums by run, and the keys of the collectives by name of their device.
    """
    runs, late = 4, 3_000
    with tf.Graph().as_default() as graph:
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(
            mtf.convert_to_shape("all:8"), mtf.LayoutRules([]), cluster.devices
        )
        turns = tf.placeholder(tf.int32, [2], name="turns")  # before the first operand, by process

        def operand(device: str, number: int) -> tf.Tensor:
            """A device's number for a sum, after as many turns of a loop as it has to make."""
            task = tf.DeviceSpec.from_string(device).task
            with tf.device(device):
                wanted = turns[task if number == 0 else 1 - task]
                begin = [tf.constant(0), tf.zeros([3 + 2 * number])]
                _, value = tf.while_loop(
                    lambda i, _: i < wanted, lambda i, x: [i + 1, x], begin, parallel_iterations=1
                )
                return value + float(number + 1)

        groups = reduce.ProcessorGroups.along(impl, [0])
        values = [
            impl.LaidOutTensor([operand(device, number) for device in cluster.devices])
            for number in range(2)
        ]
        summed = reduce.CollectiveAllReduce(1).all_reduce(impl, values, groups)
        slices = [x.tensor_list for x in summed]
        found: dict[str, Any] = {"sums": [], "keys": {}}
        for op in graph.get_operations():
            if op.type == "CollectiveReduceV2":
                keys = [int(tf.get_static_value(x)) for x in op.inputs[1:4]]
                found["keys"].setdefault(op.device, []).append(keys)
        with tf.Session(cluster.target, config=two_processes.config(False)) as session:
            for run in range(runs):
                feeds = {turns: [late, 0][:: 1 if run % 2 else -1]}
                # The second sum before the first one, too.
                order = slices[:: 1 if run // 2 else -1]
                sums = session.run(order, feeds)[:: 1 if run // 2 else -1]
                found["sums"].append([[x.tolist() for x in one] for one in sums])
    return found


def main(path: str) -> None:
    """Measures and counts."""
    enable_mesh_defaults()
    tf.logging.set_verbosity(tf.logging.ERROR)
    absl.flags.FLAGS.mark_as_parsed()
    fork_servers()
    options = report.Options(rounds=1, quick=True)
    found: dict[str, Any] = {"sums": {}}
    with LocalCluster(two_processes.TASKS, two_processes.EACH) as cluster:
        found["compressed"] = compressed_program.measured_by_strategy(cluster)
        found["crossed"] = crossed_sums(cluster)
        strategies = {name: two_processes.STRATEGIES[name] for name in IN_TABLE}
        table = two_processes.measure_on(cluster, options, strategies)
        found["table"] = report.as_json(table, options)
        orders = device_orders(cluster.devices)
        for order, name in SUMS:
            one = two_processes.reduction(orders[order], SHAPES, two_processes.STRATEGIES[name]())
            counts = {
                "counted": one.transfers._asdict(),
                "real": really_sent(cluster, one, grappler=False),
            }
            # It takes longer than the rest: most edges, casts, and signals alone.
            if order == "mixed" and name in WITH_GRAPPLER:
                counts["with Grappler"] = really_sent(cluster, one, grappler=True)
            found["sums"][f"{order}: {name}"] = counts
    pathlib.Path(path).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
