"""Tests of sessions run on every runtime that runs SIMD programs."""

import pytest

from mtf_gradsync import simd, xla


@pytest.fixture(params=["CPU replicas", "XLA devices"])
def runtime(request, monkeypatch):
    """Makes `Program.session` a session of the runtime."""
    if request.param == "XLA devices":

        def session(program, lowering=None):
            return xla.session(program, lowering, cache_dir=None)

        monkeypatch.setattr(simd.Program, "session", session)
    return request.param
