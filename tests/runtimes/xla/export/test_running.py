"""An exported step does what a session does, without TensorFlow and without this package."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mtf_gradsync.runtimes.xla.runner import Step
from mtf_gradsync.runtimes.xla.runner.combiner import combined_for_cpus, nested_operations
from mtf_gradsync.runtimes.xla.runner.command import main
from mtf_gradsync.runtimes.xla.runner.loaded_program import LoadedProgram, compiled
from tests.runtimes.xla.export import models

pytestmark = pytest.mark.xla


def as_bits(values):
    """Values as the runner writes them: bfloat16 as whole numbers of the same bits."""
    return {n: v.view(np.uint16) if v.dtype.kind == "V" else v for n, v in values.items()}


def without_counter(variables):
    """Variables that the program holds: the step counter stands outside."""
    return {n: v for n, v in variables.items() if n != "global_step"}


@pytest.mark.slow
def test_the_command_does_what_a_session_does(exported, tmp_path):
    fetches, saved = tmp_path / "fetches.npz", tmp_path / "saved"
    args = ["--inputs", exported.batches, "--fetches", fetches, "--save", saved, "--time"]
    done = models.run_alone(exported.step, *args)
    assert done.returncode == 0, done.stderr
    assert "4 cpu devices" in done.stdout
    assert f"step 1 loss {exported.fetches['loss'][0]!s} noise [" in done.stdout
    assert "each of the other 4 steps" in done.stdout
    with np.load(fetches) as found:
        models.assert_same_bits(dict(found), as_bits(exported.fetches))
    assert json.loads((saved / "manifest.json").read_text())["steps"] == models.STEPS
    # The folder's variables are put together as a session's masters are.
    found = Step.load(str(saved)).variables()
    assert found["table"].dtype.name == "bfloat16"
    assert found["seen"] == (1 << 40) + models.batches()["words"].sum()
    found["table"] = found["table"].astype(np.float32)
    models.assert_same_bits(found, without_counter(exported.variables))


@pytest.mark.slow
def test_sums_are_packed_where_a_step_runs_and_not_in_its_folder(exported):
    from jax.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    step = Step.load(str(exported.step))
    together = step.manifest["together"]
    (group,) = {name for name in together if name is not None}
    size = together.count(group)
    assert size > 1
    program = (exported.step / "program.stablehlo").read_bytes()
    packed = combined_for_cpus(program, together)
    with mlir.make_ir_context() as context:
        modules = stablehlo.deserialize_portable_artifact(context, program), ir.Module.parse(packed)
        separate, sums = (
            [op for op in nested_operations(module.operation) if op.name == "stablehlo.all_reduce"]
            for module in modules
        )
        # One sum stays in each function or branch that holds some of the group.
        places = []
        for op, name in zip(separate, together):
            if name is not None and op.operation.parent not in places:
                places.append(op.operation.parent)
        assert len(sums) == len(separate) - (size - len(places))
    # With jaxlib 0.4.34 separate ones stay so; newer versions combine some by themselves.
    as_packed = LoadedProgram(compiled(packed, step.devices), step.devices)
    assert models.collectives(step._program) == models.collectives(as_packed)
    assert models.collectives(step._program) == exported.collectives


@pytest.mark.slow
def test_a_saved_folder_goes_on(exported, tmp_path):
    given = models.batches()
    step = Step.load(str(exported.step))
    needed = {str(i) for i in step.inputs if i.default is None}
    assert needed == {"gain float32[2]", "x float32[8, 4]", "words int64[8]"}
    fetched = [step({n: v[i] for n, v in given.items()}) for i in range(2)]
    step.save(str(tmp_path / "saved"))
    again = Step.load(str(tmp_path / "saved"))
    assert again.steps == 2
    fetched += [again({n: v[i] for n, v in given.items()}) for i in range(2, models.STEPS)]
    found = {n: np.stack([f[n] for f in fetched]) for n in fetched[0]}
    models.assert_same_bits(found, exported.fetches)


@pytest.mark.slow
def test_what_was_given_may_be_written_over(exported):
    step = Step.load(str(exported.step))
    given = {n: np.empty_like(v[0]) for n, v in models.batches().items()}
    fetched = []
    for i in range(models.STEPS):
        for name, value in models.batches().items():
            given[name][...] = value[i]  # over what the step before was given
        fetched.append(step(given))
    found = {n: np.stack([f[n] for f in fetched]) for n in fetched[0]}
    models.assert_same_bits(found, exported.fetches)


@pytest.mark.slow
def test_cores_have_their_own_values(exported):
    step = Step.load(str(exported.step))
    fetched = step({n: v[0] for n, v in models.batches().items()})
    noise = fetched.per_core("noise")
    assert len(noise) == 4
    assert len({n.tobytes() for n in noise}) == 4
    gain = models.batches()["gain"][0]
    ratios = np.array([float(v) for v in fetched.per_core("narrow")]) / fetched["loss"]
    # Two roundings to bfloat16 of factor and product, each by half of 2 ** -8.
    np.testing.assert_allclose(ratios, [gain[0], gain[1]] * 2, rtol=4 * 2**-9)
    both = step.variables(per_core=True)["stacked/first"]
    assert [v.shape for v in both] == [(2, 4, 2)] * 4
    # Logical cores 0 and 2, of column 0, are physical cores 2 and 3.
    whole = step.variables()["second"]
    for core, column in enumerate([1, 1, 0, 0]):
        mine = whole[:, 2 * column : 2 * column + 2]
        models.assert_same_bits({"": both[core][1]}, {"": mine})


@pytest.mark.slow
def test_kept_inputs_can_be_given(exported):
    step = Step.load(str(exported.step))
    assert {i.name: i.default for i in step.inputs}["factor"] == "kept"
    given = {n: v[0] for n, v in models.batches().items()}
    before = step.variables()["first"]
    for _ in range(2):  # an update
        step({**given, "factor": np.float32(0)})
    models.assert_same_bits({"": step.variables()["first"]}, {"": before})


@pytest.mark.slow
def test_inputs_are_made_up(exported, capsys):
    arguments = ["--random-inputs", "--steps", "3", "--below", "10"]
    assert main([str(exported.step), *arguments], ".") == 0
    losses = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split()[:3] for line in losses] == [["step", str(i), "loss"] for i in (1, 2, 3)]


@pytest.mark.slow
def test_the_contents_are_listed(exported, capsys):
    assert main([str(exported.step), "--list"], ".") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 cores, mesh rows:2;cols:2, after step 0"
    assert "input gain: float32[], 2 different on the cores" in lines
    # Read by the program itself, too; the host counts.
    for name in ("steps_before", "global_step"):
        assert f"input {name}: int64[], the step counter" in lines
    assert "fetch narrow: bfloat16[]" in lines
