"""Tasks that `join_cluster` has brought together end together."""

import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from benchmarks.cluster import free_ports, reserved_ports
from mtf_gradsync import LOST_PROCESS_EXIT_CODE, join_cluster
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes import cluster
from tests import networks
from tests.runtimes.cluster import joined_program

SILENCE = 3.0


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("lost", "number", "how"),
    [
        ("chief 0", signal.SIGKILL, "ended without a word"),
        ("chief 0", None, "ended with an error: KeyError: 'as asked'"),
        ("worker 0", signal.SIGSTOP, "has sent no heartbeat for 3 s"),
    ],
)
@pytest.mark.slow
def test_a_lost_task_ends_the_other_with_an_error_that_names_it(processes, lost, number, how):
    with reserved_ports(2) as ports:
        spec = {job: [f"127.0.0.1:{port}"] for job, port in zip(["worker", "chief"], ports)}
        more = [0, *free_ports(1), SILENCE, "" if number else "raise"]
        started = {
            f"{job} 0": processes.fork("-m", joined_program.__name__, json.dumps(spec), job, *more)
            for job in spec
        }
        processes.wait_for(started["chief 0"], "counted 1.0\n")
        if number:
            os.kill(started[lost].pid, number)
        (name,) = set(started) - {lost}
        other = started[name]
        assert other.wait() == LOST_PROCESS_EXIT_CODE, other.errors()
    last = other.errors().rstrip().splitlines()[-1]
    assert re.match(
        rf"mtf_gradsync: {name} \(host \S+, pid {other.pid}\): "
        rf"lost {lost} \(host \S+, pid {started[lost].pid}\): it {how}",
        last,
    ), last
    if number is None:
        assert started[lost].wait() == 1


SPEC = {"ps": ["c:1"], "worker": ["a:7", "b:7"]}


@pytest.mark.parametrize(
    "given", [SPEC, json.dumps(SPEC), "ps=c:1;worker=a:7,b:7", "worker=a:7, b:7; ps = c:1;"]
)
def test_a_cluster_is_given_in_several_ways(given):
    task = cluster.task_of_spec(given, "worker", 1)
    assert task.names == ["worker 0", "worker 1", "ps 0"]
    assert (task.number, task.port) == (1, 7)
    assert task.addresses == [("a", 7), ("b", 7), ("c", 1)]
    assert task.devices(2)[1:3] == [
        "/job:worker/task:0/device:CPU:1",
        "/job:worker/task:1/device:CPU:0",
    ]


def test_tf_config(monkeypatch):
    about = {"cluster": {**SPEC, "chief": ["d:2"]}, "task": {"type": "chief", "index": "0"}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(about))
    task = cluster.task_of_environment()
    assert task.number == 0
    assert task.names == ["chief 0", "worker 0", "worker 1", "ps 0"]
    for nothing in ("", "{}", '{"model_dir": "x", "task": {"type": "worker"}}'):
        monkeypatch.setenv("TF_CONFIG", nothing)
        assert cluster.task_of_environment() is None


def test_tasks_meet_at_a_port_that_none_of_them_has():
    spec = "worker=a:2222,a:2223,b:2224"
    assert cluster.task_of_spec(spec, "worker", 0).free_port() == 2225


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("worker", "worker", 0), "must be like \"worker=host1:2222,host2:2222\".*got 'worker'"),
        (("{worker: 3}", "worker", 0), "must be like"),
        (({}, "worker", 0), "must be like .*got {}"),
        (({"worker": "a:1"}, "worker", 0), "must list addresses.*got 'a:1'"),
        (({"worker": ["a"]}, "worker", 0), "like \"host:2222\"; the job 'worker' has 'a'"),
        (({"worker": ["a:1", "a:1"]}, "worker", 0), "Two tasks .* same address 'a:1'"),
        (({"ps": ["a:1"]}, "ps", 0), 'must have a job "chief" or "worker"'),
        (({"chief": ["a:1", "b:1"]}, "chief", 0), "has one chief; got 2"),
        ((SPEC, "evaluator", 0), "the jobs worker, ps, and not 'evaluator': the chief evaluates"),
        ((SPEC, "worker", 2), "the tasks 0 to 1; got 2"),
        ((SPEC, "worker", None), "got cluster_spec, job_name without task_index"),
        ((), "TF_CONFIG has none"),
    ],
)
def test_what_is_no_cluster_is_an_error(monkeypatch, given, message):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ValueError, match=message):
        join_cluster(*given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{cluster}", "TF_CONFIG must be like .*got .{cluster}."),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}', "got 1"),
        ('{"cluster": {"worker": ["a:1"]}}', "and not None"),
    ],
)
def test_a_tf_config_that_makes_no_sense_is_an_error(monkeypatch, text, message):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match=message):
        cluster.task_of_environment()


def test_a_port_that_is_taken_is_an_error():
    with reserved_ports(1) as (port,):
        with pytest.raises(cluster.ProcessesError, match=f"cannot serve on port {port}"):
            join_cluster({"worker": [f"127.0.0.1:{port}"]}, "worker", 0)


def test_a_cluster_of_this_machine_that_others_could_reach_does_not_start(monkeypatch, caplog):
    (port,) = free_ports(1)
    spec = {"worker": [f"127.0.0.1:{port}"]}
    monkeypatch.delattr("socket.SO_BINDTODEVICE", raising=False)
    with pytest.raises(cluster.ProcessesError, match=r"cannot bind a socket .*--open_to_network"):
        join_cluster(spec, "worker", 0)
    (port,) = free_ports(1)
    with join_cluster({"worker": [f"127.0.0.1:{port}"]}, "worker", 0, open_to_network=True):
        assert not [r for r in caplog.records if "listens on all" in r.getMessage()]


def test_a_cluster_of_several_machines_says_who_can_call(caplog):
    (port,) = free_ports(1)
    with join_cluster({"worker": [f"{socket.gethostname()}:{port}"]}, "worker", 0):
        pass
    (warning,) = [r for r in caplog.records if "listens on all" in r.getMessage()]
    assert f"whoever reaches port {port} can run any operation" in warning.getMessage()


_SERVES = """
import sys
from mtf_gradsync import join_cluster
with join_cluster({"worker": [f"127.0.0.1:{sys.argv[1]}"]}, "worker", 0) as cluster:
    print(cluster.target, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_no_other_machine_reaches_a_cluster_of_this_one():
    (port,) = free_ports(1)
    with networks.machine() as machine:
        command = machine.command(sys.executable, "-c", _SERVES, port)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as process:
            try:
                assert process.stdout.readline() == f"grpc://127.0.0.1:{port}\n"
                assert machine.listening() == {port: "*%lo"}
                assert machine.reached_by_the_neighbour([port]) == []
            finally:
                process.kill()


def test_a_cluster_of_one_task():
    (port,) = free_ports(1)
    with join_cluster({"worker": [f"127.0.0.1:{port}"]}, "worker", 0) as alone:
        assert alone.is_chief
        with tf.Session(alone.target, config=alone.config) as session, tf.device(alone.devices[0]):
            assert session.run(tf.constant(3)) == 3
