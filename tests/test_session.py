import pytest

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.session import session_config


def test_has_as_many_strictly_placed_cpu_devices_as_asked_for():
    config = session_config(num_cpu_devices=3)
    with tf.Graph().as_default(), tf.Session(config=config) as session:
        names = [device.name[-5:] for device in session.list_devices()]
        assert names[:3] == ["CPU:0", "CPU:1", "CPU:2"]
        with tf.device("cpu:3"):
            beyond = tf.constant(1.0) + 1.0
        with pytest.raises(tf.errors.InvalidArgumentError, match="CPU:3"):
            session.run(beyond)


def test_arithmetic_optimizer_is_off_unless_asked_for():
    rewrites = session_config().graph_options.rewrite_options
    assert rewrites.arithmetic_optimization == type(rewrites).OFF
    rewrites = session_config(repeatable=False).graph_options.rewrite_options
    assert rewrites.arithmetic_optimization == type(rewrites).DEFAULT


def test_refuses_no_devices():
    with pytest.raises(ValueError, match=r"num_cpu_devices must be at least 1.*got 0"):
        session_config(num_cpu_devices=0)


def test_collective_group_leader_is_named_as_servers_name_themselves():
    config = session_config(collective_group_leader="/job:worker/task:0")
    assert config.experimental.collective_group_leader == "/job:worker/replica:0/task:0"
    assert not session_config().experimental.collective_group_leader


@pytest.mark.parametrize("leader", ["worker", "/job:worker", "127.0.0.1:80", 0])
def test_refuses_leaders_that_are_no_task(leader):
    with pytest.raises(ValueError, match=r"collective_group_leader must be a task"):
        session_config(collective_group_leader=leader)
