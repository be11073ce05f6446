"""What is used of gin without a public name still means what it did."""

from __future__ import annotations

import gin
import pytest

from mtf_gradsync.tools._private import gin as private


@gin.configurable(module="tests.private")
def called(number, other=None):
    return number, other


@pytest.fixture
def cleared():
    gin.clear_config()
    yield
    gin.clear_config()


@pytest.mark.usefixtures("cleared")
def test_bindings_are_known_by_scope_full_name_and_parameter():
    gin.parse_config("""
        shared = [1, 2]
        called.number = 1
        a/b/called.number = %shared
        called.other = @a/called()
    """)
    found = private.bindings()
    name = "tests.private.called"
    assert set(found) == {
        ("", name, "number"),
        ("a/b", name, "number"),
        ("", name, "other"),
        ("shared", "gin.macro", "value"),
    }
    assert found["", name, "number"] == 1
    assert found["shared", "gin.macro", "value"] == [1, 2]
    # Not evaluated: a value bound again later means what the reference then refers to.
    for (scope, selector, parameter), value in found.items():
        key = f"{scope}/{selector}.{parameter}".lstrip("/")
        assert gin.query_parameter(key) is value
    with gin.unlock_config():
        gin.bind_parameter("shared/gin.macro.value", 7)
        gin.bind_parameter("called.other", found["a/b", name, "number"])
    assert called() == (1, 7)


@pytest.mark.usefixtures("cleared")
def test_what_is_bound_later_does_not_change_what_was_read():
    gin.bind_parameter("called.number", 1)
    before = private.bindings()
    gin.bind_parameter("called.number", 2)
    assert list(before.values()) == [1]
    assert list(private.bindings().values()) == [2]


def test_what_is_registered_is_known_with_its_parameters():
    assert private.registered()["tests.private.called"] == ["number", "other"]
    assert private.registered()["gin.macro"] == ["value"]
