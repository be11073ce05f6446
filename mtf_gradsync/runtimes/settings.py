"""TensorFlow's settings for programs on a mesh: for sessions, for graphs, and for repeatability."""

from __future__ import annotations

from mtf_gradsync.extension import check_flag, check_whole_number, late_configurable, tf


@late_configurable(module="mtf_gradsync.train")
def session_config(
    num_cpu_devices: int | None = None,
    allow_soft_placement: bool = False,
    repeatable: bool = True,
    inter_op_threads: int = 0,
    intra_op_threads: int = 0,
    collective_group_leader: str | None = None,
) -> tf.ConfigProto:
    """Returns a ConfigProto for the sessions of a mesh program.

    Two defaults differ from TensorFlow's. First, placement is strict: with soft placement, an
    operation whose device string names no device (``cpu:9`` if there are eight) runs on another
    device without a message. Second, Grappler's arithmetic optimizer and its constant folding are
    off. If they were on, they would regroup sums and products differently from one session to the
    next. Two runs of one program would differ by about 1e-7 more after each step, and a restarted
    run would not repeat the first run. The price is that algebraic simplifications (common factors,
    merged reshapes and transposes) are not made; the package's benchmarks have a table of what
    their absence costs.

    Args:
      num_cpu_devices: how many virtual CPU devices the session has, ``/device:CPU:0`` and so on.
        None leaves TensorFlow's default of one.
      allow_soft_placement: whether operations may move to another device than the one that the
        graph names. Some programs on GPUs need soft placement, for operations without a GPU kernel.
      repeatable: whether Grappler's arithmetic optimizer and its constant folding are off.
      inter_op_threads: the number of threads that run operations side by side; 0 is one thread for
        each core.
      intra_op_threads: the number of threads inside one operation; 0 is one thread for each core.
      collective_group_leader: the task, such as "/job:worker/task:0", at which the processes of a
        cluster meet for `CollectiveAllReduce`. All processes have to name the same task, in the
        ConfigProto that they give to ``tf.train.Server``. If no leader is named, the processes wait
        for each other for ever, or for the timeout_seconds of `CollectiveAllReduce`.

    Returns:
      A ConfigProto for ``tf.Session(config=...)`` and ``tf.train.Server(config=...)``.

    Raises:
      ValueError: when `num_cpu_devices` is not a whole number of 1 or more, a number of threads is
        not a whole number of 0 or more, or `collective_group_leader` names no task.
      TypeError: when `allow_soft_placement` or `repeatable` is neither True nor False.

    Examples:
      >>> gs.session_config(num_cpu_devices=8).device_count["CPU"]
      8
    """
    if num_cpu_devices is not None:
        more = "None takes TensorFlow's default of one."
        num_cpu_devices = check_whole_number("num_cpu_devices", num_cpu_devices, 1, more)
    inter_op_threads = check_whole_number("inter_op_threads", inter_op_threads, 0)
    intra_op_threads = check_whole_number("intra_op_threads", intra_op_threads, 0)
    allow_soft_placement = check_flag("allow_soft_placement", allow_soft_placement)
    repeatable = check_flag("repeatable", repeatable)
    leader = None if collective_group_leader is None else _task_name(collective_group_leader)
    config = tf.ConfigProto(
        allow_soft_placement=allow_soft_placement,
        inter_op_parallelism_threads=inter_op_threads,
        intra_op_parallelism_threads=intra_op_threads,
    )
    if num_cpu_devices is not None:
        config.device_count["CPU"] = num_cpu_devices
    if repeatable:
        rewrites = config.graph_options.rewrite_options
        rewrites.arithmetic_optimization = type(rewrites).OFF
        # Constant folding groups constant factors, in an order that differs between equal graphs.
        rewrites.constant_folding = type(rewrites).OFF
    if leader is not None:
        config.experimental.collective_group_leader = leader
    return config


def _task_name(task: str) -> str:
    """Returns a task's name as TensorFlow's servers spell it, because they compare names as text.

    For "/job:worker/task:0" the result is "/job:worker/replica:0/task:0". Raises ValueError if
    `task` names no job or no task.
    """
    try:
        spec = tf.DeviceSpec.from_string(task if isinstance(task, str) else "")
    except (AttributeError, TypeError, ValueError):
        spec = tf.DeviceSpec()
    if spec.job is None or spec.task is None:
        raise ValueError(
            f'collective_group_leader must be a task such as "/job:worker/task:0", got {task!r}'
        )
    return f"/job:{spec.job}/replica:{spec.replica or 0}/task:{spec.task}"


def enable_mesh_defaults() -> None:
    """Sets TensorFlow's global switches for Mesh-TensorFlow programs; for main programs only.

    The switches are graph mode, control flow v1, and resource variables. Resource variables are
    needed because an update of a ref variable may be executed before a read in the same step.
    """
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
