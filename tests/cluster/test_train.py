"""``mtf-gradsync train`` over two tasks: what it trains, and what a lost task makes of it."""

import json
import os
import re
import signal
import time
from pathlib import Path

import gin
import numpy as np
import pytest

from benchmarks.cluster import free_ports, reserved_ports
from mtf_gradsync import LOST_PROCESS_EXIT_CODE
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.train.evaluation.held_out import METRICS_FILE
from mtf_gradsync.train.metrics.file import read_metrics
from tests.cluster.processes import TIME_LIMIT, Processes
from tests.train.conftest import NO_EVAL, TINY, train_tiny

pytestmark = pytest.mark.cluster
STEPS = 12
SILENCE = 3.0
QUICK = [
    f"--gin_file={TINY}",
    "--gin_param=train.run.mesh_shape = 'batch:2;model:1'",
    f"--gin_param={NO_EVAL}",
    "--gin_param=train.run.save_checkpoints_steps = 3",
]
# The first steps at once, up to the second checkpoint of a start; the others so that a signal comes
# in between.
PACE = [
    "--gin_param=train.run.hooks = [@pace]",
    "--gin_param=pace.seconds = 0.5",
    "--gin_param=pace.quick = 4",
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
            module = ["-m", "tests.cluster.train_program", "train", f"--model_dir={directory}"]
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TF_CONFIG", variable)
                started.append(self._processes.fork(*module, *given, *common))
        return started

    def run(self, **how):
        """Trains to the end; returns what the chief printed."""
        chief, worker = self.start(**how)
        assert chief.wait(60) == 0, chief.errors()
        assert worker.wait(60) == 0, worker.errors()
        assert "serves its devices until worker 0 ends" in worker.output()
        return chief.output()

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


@pytest.fixture(scope="module")
def ports():
    with reserved_ports(2) as ports:
        yield ports


@pytest.fixture
def tasks(processes, ports, tmp_path):
    """They train into the test's directory."""
    return Tasks(processes, ports, tmp_path)


@pytest.fixture(scope="module")
def whole(ports, tmp_path_factory):
    """The directory of a run that loses nobody, and what it said."""
    directory = tmp_path_factory.mktemp("whole")
    with Processes() as processes:
        return directory, Tasks(processes, ports, directory).run()


def losses(directory):
    return [row["loss"] for row in read_metrics(directory / METRICS_FILE)]


def variables(directory):
    reader = tf.train.load_checkpoint(str(directory))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def test_two_tasks_train_as_one_process(whole, tmp_path):
    directory, said = whole
    assert "worker 0 of the 2 tasks of a cluster (--cluster_spec)" in said
    assert "steps run on a placement mesh (over the tasks of a cluster)" in said
    train_tiny(tmp_path, NO_EVAL, "train.run.runtime = 'placement_mesh'")
    gin.clear_config()
    assert len(losses(directory)) == STEPS
    # Sums may be made in another order: a few ulp a step, as for every trajectory.
    tolerance = STEPS * 16 * np.finfo(np.float32).eps
    np.testing.assert_allclose(losses(directory), losses(tmp_path), rtol=tolerance)


def test_a_run_that_loses_its_tasks_ends_with_the_same_bits(tasks, whole, tmp_path):
    """Each start goes on where the one before was lost, told so by TF_CONFIG this time."""
    for lost, number, how in [
        (1, signal.SIGKILL, "ended without a word"),
        (0, signal.SIGKILL, "ended without a word"),
        (1, signal.SIGSTOP, f"has been silent for {SILENCE:g} s"),
    ]:
        both = tasks.start(*PACE, tf_config=True)
        before = tasks.newest_step()
        tasks.wait_for_checkpoint(before + 3, both[0])
        begin = time.monotonic()
        os.kill(both[lost].pid, number)
        other = both[1 - lost]
        assert other.wait(60) == LOST_PROCESS_EXIT_CODE, other.errors()
        assert time.monotonic() - begin < SILENCE + 10
        named = rf"worker {1 - lost} .*: lost worker {lost} \(host \S+, pid {both[lost].pid}\): it "
        assert re.search(named + how, other.errors()), other.errors()
        both[lost].kill()
        assert before < tasks.newest_step() < STEPS
    assert "from step 9 to 12" in tasks.run(tf_config=True)
    expected, actual = variables(whole[0]), variables(tmp_path)
    assert sorted(expected) == sorted(actual)
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
    assert losses(tmp_path) == losses(whole[0])


def test_sigterm_to_all_saves_and_ends_all(tasks):
    chief, worker = tasks.start(*PACE)
    tasks.wait_for_checkpoint(3, chief)
    os.kill(worker.pid, signal.SIGTERM)
    time.sleep(0.2)
    os.kill(chief.pid, signal.SIGTERM)
    assert chief.wait(60) == 128 + signal.SIGTERM, chief.errors()
    assert worker.wait(60) == 0, worker.errors()
    assert "worker 1 got SIGTERM and serves until worker 0 has ended" in worker.errors()
    assert f"stopped after step {tasks.newest_step()} of 12" in chief.output()


def test_an_error_of_the_chief_ends_the_others_with_its_words(tasks):
    chief, worker = tasks.start("--gin_param=train.run.variable_filter = 'nothing'")
    assert chief.wait(60) == 2, chief.errors()
    assert worker.wait(60) == LOST_PROCESS_EXIT_CODE, worker.errors()
    assert re.search(
        r"lost worker 0 .*: it ended with an error: ConfigError: .*leaves no variable to train",
        worker.errors(),
    )


def test_a_task_that_never_comes_is_named(tasks, tmp_path):
    (chief,) = tasks.start("--timeout=0.5", tasks=[0])
    assert chief.wait(60) == LOST_PROCESS_EXIT_CODE
    assert "did not come in time: worker 1" in chief.errors()
    assert "Traceback" not in chief.errors()
    assert not list(Path(tmp_path).iterdir())
