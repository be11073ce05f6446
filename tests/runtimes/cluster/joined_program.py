"""A plain loop of sessions on a cluster: ``<spec> <job> <task> <watch port> <silence> <odd>``."""

import os
import sys
import time

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import tf
from tests import grappler


def count(cluster, odd):
    """Counts on the last device of the cluster until it is ended."""
    with tf.device(cluster.devices[-1]):
        counter = tf.get_variable("counter", [], initializer=tf.zeros_initializer())
        counted = counter.assign_add(1.0)
    with tf.train.MonitoredTrainingSession(cluster.target, config=cluster.config) as session:
        while True:
            print(f"counted {session.run(counted)}", flush=True)
            if odd == "raise":
                raise KeyError("as asked")
            time.sleep(0.05)


def main(spec, job, index, port, silence, odd=""):
    os.environ["TF_GRPC_REUSE_PORT"] = "1"
    tf.disable_v2_behavior()
    grappler.turn_off()
    tf.enable_resource_variables()
    with gs.join_cluster(
        spec, job, int(index), num_cpu_devices=2, watch_port=int(port), silence=float(silence)
    ) as cluster:
        if cluster.is_chief:
            count(cluster, odd)


if __name__ == "__main__":
    main(*sys.argv[1:])
