"""``mtf-gradsync train`` over two tasks: what it trains, and what a lost task makes of it."""

import json
import os
import re
import signal
import time

import gin
import numpy as np
import pytest

from benchmarks.cluster import free_ports, reserved_ports
from mtf_gradsync import LOST_PROCESS_EXIT_CODE
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.tools.train.cli import main as cli
from tests.forked import TIME_LIMIT
from tests.sessions import saved_variables
from tests.tools.train.conftest import NO_ATTENTION, NO_EVAL, TINY, metric, train_tiny

pytestmark = pytest.mark.cluster
STEPS = 12
SILENCE = 3.0
QUICK = [
    f"--gin_file={TINY}",
    "--gin_param=train.run.mesh_shape = 'batch:2;model:1'",
    f"--gin_param={NO_ATTENTION}",
    f"--gin_param={NO_EVAL}",
    "--gin_param=train.run.save_checkpoints_steps = 3",
]
# The first steps at once, up to the second checkpoint of a start; the others so that a signal comes
# in between.
PACE = [
    "--gin_param=train.run.hooks = [@pace]",
    "--gin_param=pace.seconds = 0.5",
    "--gin_param=pace.quick = 3",
]
TASK_OF_TWO = [
    "--cluster_spec=worker=localhost:1,localhost:2",
    "--job_name=worker",
    "--task_index=0",
]


class Tasks:
    """Two tasks that train into one directory."""

    def __init__(self, processes, ports, directory):
        self._processes, self._ports, self._directory = processes, ports, directory

    def start(self, *arguments, tf_config=False, tasks=(0, 1)):
        """Starts the command in each task."""
        addresses = [f"127.0.0.1:{port}" for port in self._ports]
        common = [*QUICK, *arguments, f"--silence={SILENCE}", f"--watch_port={free_ports(1)[0]}"]
        started = []
        for task in tasks:
            given = [f"--cluster_spec=worker={','.join(addresses)}", "--job_name=worker"]
            given.append(f"--task_index={task}")
            variable = ""
            if tf_config:
                about = {"type": "worker", "index": task}
                variable = json.dumps({"cluster": {"worker": addresses}, "task": about})
                given = []
            # Only the chief writes.
            directory = self._directory if task == 0 else "/dev/null/no_directory"
            module = [
                "-m",
                "tests.runtimes.cluster.train_program",
                "train",
                f"--model_dir={directory}",
            ]
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TF_CONFIG", variable)
                started.append(self._processes.fork(*module, *given, *common))
        return started

    def newest_step(self):
        """The step of the newest checkpoint, 0 without any."""
        path = tf.train.latest_checkpoint(str(self._directory))
        return int(path.rpartition("-")[2]) if path else 0

    def wait_for_checkpoint(self, step, process):
        end = time.monotonic() + TIME_LIMIT
        while self.newest_step() < step:
            assert process.poll() is None, process.errors()
            assert time.monotonic() < end
            time.sleep(0.02)


@pytest.fixture
def tasks(processes, tmp_path):
    """They train into a directory of the test."""
    with reserved_ports(2) as ports:
        yield Tasks(processes, ports, tmp_path / "tasks")


def losses(directory):
    return [*metric(directory, "loss").values()]


@pytest.mark.slow
def test_a_run_that_is_ended_twice_ends_as_one_in_one_process(tasks, tmp_path):
    # A worker is lost.
    chief, worker = tasks.start(*PACE)
    tasks.wait_for_checkpoint(3, chief)
    os.kill(worker.pid, signal.SIGKILL)
    assert chief.wait() == LOST_PROCESS_EXIT_CODE, chief.errors()
    lost = rf"worker 0 .*: lost worker 1 \(host \S+, pid {worker.pid}\): it ended without a word"
    assert re.search(lost, chief.errors()), chief.errors()
    assert "worker 0 of the 2 tasks of a cluster (--cluster_spec)" in chief.output()
    # The supervisor ends all.
    chief, worker = tasks.start(*PACE, tf_config=True)
    tasks.wait_for_checkpoint(6, chief)
    os.kill(worker.pid, signal.SIGTERM)
    time.sleep(0.2)
    os.kill(chief.pid, signal.SIGTERM)
    assert chief.wait() == 128 + signal.SIGTERM, chief.errors()
    assert worker.wait() == 0, worker.errors()
    assert "worker 1 got SIGTERM and serves until worker 0 has ended" in worker.errors()
    assert "worker 0 of the 2 tasks of a cluster (TF_CONFIG)" in chief.output()
    stopped = tasks.newest_step()
    assert f"stopped after step {stopped} of {STEPS}" in chief.output()
    # Nothing ends it.
    chief, worker = tasks.start(tf_config=True)
    assert chief.wait() == 0, chief.errors()
    assert worker.wait() == 0, worker.errors()
    assert "steps run on a placement mesh (over the tasks of a cluster)" in chief.output()
    assert f"from step {stopped} to {STEPS}" in chief.output()
    assert "serves its devices until worker 0 ends" in worker.output()

    train_tiny(tmp_path / "one", NO_EVAL, "train.run.runtime = 'placement_mesh'")
    gin.clear_config()
    assert len(losses(tmp_path / "one")) == STEPS
    # With two shards there is one order in which to add them up.
    assert losses(tmp_path / "tasks") == losses(tmp_path / "one")
    expected, actual = saved_variables(tmp_path / "one"), saved_variables(tmp_path / "tasks")
    assert sorted(expected) == sorted(actual)
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


@pytest.mark.slow
def test_an_error_of_the_chief_ends_the_others_with_its_words(tasks):
    chief, worker = tasks.start("--gin_param=train.run.batch_size = 7")
    assert chief.wait() == 2, chief.errors()
    assert worker.wait() == LOST_PROCESS_EXIT_CODE, worker.errors()
    said = "lost worker 0 .*: it ended with an error: ConfigError: train.run.batch_size = 7"
    assert re.search(said, worker.errors()), worker.errors()


@pytest.mark.slow
def test_a_task_that_never_comes_is_named(tasks, tmp_path):
    (chief,) = tasks.start("--timeout=0.5", tasks=[0])
    assert chief.wait() == LOST_PROCESS_EXIT_CODE
    assert "did not come in time: worker 1" in chief.errors()
    assert "Traceback" not in chief.errors()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--job_name=worker"], "--job_name without --cluster_spec and --task_index"),
        ([*TASK_OF_TWO, "--task_index=2"], "the tasks 0 to 1; got 2"),
        ([*TASK_OF_TWO, "--gin_param=train.run.runtime = 'xla'"], "does not run on a cluster"),
        (
            [*TASK_OF_TWO, "--gin_param=train.run.mesh_shape = 'batch:1;model:3'"],
            "has 3 processors, which 2 tasks cannot share evenly",
        ),
        (
            [*TASK_OF_TWO, "--gin_param=train.run.mesh_devices = ['cpu:0', 'cpu:1']"],
            "names 'cpu:0', which is on no task",
        ),
    ],
)
def test_flags_that_cannot_work_are_named(capsys, tmp_path, arguments, message):
    given = ["train", f"--model_dir={tmp_path}", *QUICK, *arguments]
    assert cli.main(given) == cli.EXIT_BAD_CONFIG
    gin.clear_config()
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.xla
def test_two_processes_on_xla_devices_train_as_one(processes, tmp_path):
    directory = tmp_path / "two"
    more = [f"--coordinator=127.0.0.1:{free_ports(1)[0]}", "--num_processes=2"]
    # Evaluation, which only process 0 makes, changes nothing in the program.
    given = ["train", f"--model_dir={directory}", *QUICK[:3], *more]
    given.append("--gin_param=train.run.perplexity_eval_steps = 1")
    both = [
        processes.fork("-m", "tests.runtimes.cluster.train_program", *given, f"--process_id={i}")
        for i in (0, 1)
    ]
    for one in both:
        assert one.wait() == 0, one.errors()
    assert "process 0 evaluates, and writes" in both[1].output()
    train_tiny(tmp_path / "one", NO_EVAL, "train.run.runtime = 'xla'")
    gin.clear_config()
    tolerance = STEPS * 16 * np.finfo(np.float32).eps
    np.testing.assert_allclose(losses(directory), losses(tmp_path / "one"), rtol=tolerance)
