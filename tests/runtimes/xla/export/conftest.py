"""One exported step, and what a session makes of the same program, for all tests here."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mtf_gradsync import xla
from mtf_gradsync.runtimes.xla.runner import loaded_program as programs
from mtf_gradsync.runtimes.xla.runner import step as steps
from mtf_gradsync.xla import executable
from tests.runtimes.xla.export import models


@pytest.fixture(scope="package", autouse=True)
def compiled_once():
    """A program is compiled once for the same devices: most tests here load the same one."""
    original, made = programs.compiled, {}

    def compiled(program, devices, options=None):
        # A test replaces what compiles.
        key = program, tuple(d.id for d in devices), repr(options), programs.compile_options
        if key not in made:
            made[key] = original(program, devices, options)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in (steps, executable):
            patch.setattr(module, "compiled", compiled)
        yield


@pytest.fixture(scope="package")
def exported(tmp_path_factory):
    """What was exported, and the session's values of the same five steps.

    ``half`` was exported from the session after two of them.
    """
    place = tmp_path_factory.mktemp("portable")
    batches = place / "batches.npz"
    np.savez(batches, **models.batches())
    with models.model() as model:
        model.export(place / "step")
        with xla.session(model.program, model.lowering, cache_dir=None) as session:
            first = model.run(session, range(2))
            model.export(place / "half", session=session)
            halfway = session.save(str(place / "halfway"))
            rest = model.run(session, range(2, models.STEPS))
            variables = session.variables()
            (compiled,) = {id(p.program): p.program for p in session.compiled}.values()
    return SimpleNamespace(
        step=place / "step",
        half=place / "half",
        batches=batches,
        halfway=halfway,
        fetches={name: np.concatenate([first[name], rest[name]]) for name in first},
        variables=variables,
        collectives=models.collectives(compiled),
    )
