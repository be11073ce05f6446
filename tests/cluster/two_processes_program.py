"""The benchmark of two processes, small, and what TensorFlow really sends in its sums.

``python -m tests.cluster.two_processes_program <file>``: writes both to the file as JSON.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import absl.flags

from benchmarks import report, two_processes
from benchmarks.cluster import LocalCluster
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.session import enable_mesh_defaults

# Tensors that the ring cuts into parts, and some that it sends whole: too small, not divisible.
SHAPES = [[32, 64], [], [3], [41, 33]]


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


def main(path: str) -> None:
    """Measures and counts."""
    enable_mesh_defaults()
    tf.logging.set_verbosity(tf.logging.ERROR)
    absl.flags.FLAGS.mark_as_parsed()
    options = report.Options(rounds=1, quick=True)
    found: dict[str, Any] = {"sums": {}}
    with LocalCluster(two_processes.TASKS, two_processes.EACH) as cluster:
        found["table"] = report.as_json(two_processes.measure_on(cluster, options), options)
        for order, devices in device_orders(cluster.devices).items():
            for name, make in two_processes.STRATEGIES.items():
                one = two_processes.reduction(devices, SHAPES, make())
                counts = {
                    "counted": one.transfers._asdict(),
                    "real": really_sent(cluster, one, grappler=False),
                }
                # Once is enough: it takes longer than the rest.
                if order == "mixed":
                    counts["with Grappler"] = really_sent(cluster, one, grappler=True)
                found["sums"][f"{order}: {name}"] = counts
    pathlib.Path(path).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
