"""A timeline is of one `with` block."""

import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.tools.timelines import Timeline, TimelineError
from tests.tools.timelines.recordings import two_cores

AGAIN = r"one `with` block.* Call gs\.timeline\(session\) again"


@pytest.fixture
def session():
    with tf.Session() as session:
        yield session


def test_a_block_inside_itself(session):
    timeline = gs.timeline(session)
    with pytest.raises(TimelineError, match=AGAIN), timeline, timeline:
        pass
    assert "run" not in vars(session)


def test_a_second_block(session):
    timeline = gs.timeline(session)
    with pytest.raises(KeyError), timeline:
        raise KeyError
    with pytest.raises(TimelineError, match=AGAIN), timeline:
        pass


def test_recordings_made_before():
    with pytest.raises(TimelineError, match=AGAIN), Timeline.of([two_cores()]):
        pass
