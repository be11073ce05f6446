"""What conftest does for every test."""

import pytest

from mtf_gradsync._private.libraries import tf


@pytest.fixture(scope="module", params=[1, 2])
def shared(request):
    tf.get_variable("w", initializer=1.0)
    return tf.get_default_graph()


def test_a_fixture_of_several_tests_has_its_own_graph_each_time_it_is_made(shared, fresh_graph):
    assert len(shared.get_operations()) > 0
    assert tf.get_default_graph() is fresh_graph is not shared
    assert not fresh_graph.get_operations()
