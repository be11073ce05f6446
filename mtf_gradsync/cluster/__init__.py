"""A mesh over the tasks of a ``tf.train.Server`` cluster; see ``docs/clusters.md``."""

from mtf_gradsync.cluster.join import Cluster, join_cluster
from mtf_gradsync.cluster.task import Task, task_of_environment, task_of_spec
from mtf_gradsync.processes.members import ProcessesError

__all__ = [
    "Cluster",
    "ProcessesError",
    "Task",
    "join_cluster",
    "task_of_environment",
    "task_of_spec",
]
