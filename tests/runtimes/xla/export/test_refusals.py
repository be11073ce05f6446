"""What is missing is said in one line, with what would do, before anything runs."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.xla.runner import Step, StepError, files
from mtf_gradsync.runtimes.xla.runner import loaded_program as programs
from mtf_gradsync.runtimes.xla.runner.command import main
from tests.runtimes.xla.export import models

pytestmark = pytest.mark.xla


@pytest.fixture
def folder(exported, tmp_path):
    """A copy of the exported step to spoil."""
    shutil.copytree(exported.step, tmp_path / "step")
    return tmp_path / "step"


def refused(capsys, folder, *args):
    """What a command that is refused says."""
    assert main([str(folder), *map(str, args)], ".") == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    return said[0]


def rewrite(folder, name, content):
    """Writes a file as if it had been exported so."""
    old = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / name).write_bytes(content)
    sums = (folder / "SHA256SUMS").read_text()
    (folder / "SHA256SUMS").write_text(sums.replace(old, hashlib.sha256(content).hexdigest()))


@pytest.mark.slow
def test_too_few_devices(exported):
    done = models.run_alone(exported.step, "--cpu_devices", "2", "--random-inputs")
    assert done.returncode == 2
    assert done.stderr == (
        "run.py: The mesh has 4 cores, and jax has 2 cpu devices for them. Set "
        "XLA_FLAGS=--xla_force_host_platform_device_count=4 before jax starts, start more "
        "processes, or take a smaller mesh; an exported step has to be exported again for that.\n"
    )


@pytest.mark.slow
def test_a_platform_without_a_plugin(exported, capsys):
    said = refused(capsys, exported.step, "--random-inputs", "--platform", "tpu")
    assert said.startswith("run.py: jax cannot start the platform 'tpu': ")
    assert 'Install the plugin (pip install "jax[cuda12]" or "jax[tpu]")' in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["manifest.json", "program.stablehlo", "values.npz"])
def test_a_damaged_file(folder, capsys, name):
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    assert f"{name} is damaged: its sha256 is not what SHA256SUMS says" in refused(capsys, folder)
    (folder / name).unlink()
    assert f"{name} is missing" in refused(capsys, folder)


def test_a_folder_that_is_none(tmp_path, capsys):
    assert "holds no exported step" in refused(capsys, tmp_path)


@pytest.mark.slow
def test_another_format(folder, capsys):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["format"] = 7
    rewrite(folder, "manifest.json", json.dumps(manifest).encode())
    said = refused(capsys, folder)
    assert "has format 7, written by mtf_gradsync" in said
    assert "this runner reads format 1. Run the folder's own run.py." in said


@pytest.mark.slow
def test_a_program_that_this_jax_cannot_read(folder, capsys):
    rewrite(folder, "program.stablehlo", b"ML\xefR from the future")
    said = refused(capsys, folder, "--random-inputs")
    assert "cannot read the program" in said
    assert "The step was exported with jax" in said


@pytest.mark.slow
def test_a_jax_with_another_interface(folder, capsys, monkeypatch):
    def other(devices, options=None):
        raise TypeError("(): incompatible function arguments.")

    monkeypatch.setattr(programs, "compile_options", other)
    said = refused(capsys, folder, "--random-inputs")
    assert f"jax {jax.__version__} has another interface than 0.4.30 to 0.12" in said
    assert said.endswith('Install one of those: pip install "jax>=0.4.30,<0.13".')


def test_a_program_without_room(tmp_path, capsys):
    with simd.tpu_program("all:1", "") as program:
        total = tf.reduce_sum(tf.random.normal([1 << 20]))
    xla.export(program, None, {"total": total}, tmp_path / "step")
    # Sorting a multiple of 2**32 numbers ends jaxlib 0.12 with a division by zero.
    huge = """module {
      func.func @main(%state: tensor<3xi64>) -> (tensor<f32>, tensor<3xi64>) {
        %0 = stablehlo.iota dim = 0 : tensor<5000000000001xf32>
        %1 = "stablehlo.sort"(%0) ({
        ^bb0(%a: tensor<f32>, %b: tensor<f32>):
          %2 = stablehlo.compare LT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
          stablehlo.return %2 : tensor<i1>
        }) {dimension = 0 : i64} : (tensor<5000000000001xf32>) -> tensor<5000000000001xf32>
        %3 = stablehlo.slice %1 [0:1] : (tensor<5000000000001xf32>) -> tensor<1xf32>
        %4 = stablehlo.reshape %3 : (tensor<1xf32>) -> tensor<f32>
        return %4, %state : tensor<f32>, tensor<3xi64>
      }
    }"""
    rewrite(tmp_path / "step", "program.stablehlo", huge.encode())
    said = refused(capsys, tmp_path / "step")
    assert said.startswith("run.py: The devices have no room for the step: ")
    assert "Take a smaller batch, more microbatches, more devices" in said
    assert "an exported step has to be exported again for that." in said


@pytest.mark.slow
def test_inputs_of_the_command(exported, tmp_path, capsys):
    said = refused(capsys, exported.step)
    assert "The step reads " in said
    assert "words int64[8]" in said
    assert "--inputs FILE.npz" in said
    assert "cannot be read as an .npz file" in refused(
        capsys, exported.step, "--inputs", tmp_path / "none.npz"
    )
    said = refused(capsys, exported.step, "--inputs", exported.batches, "--steps", 6)
    assert "has inputs for 5 steps of 6. Give more, or --repeat." in said
    np.savez(tmp_path / "uneven.npz", x=np.zeros(3), words=np.zeros(2))
    said = refused(capsys, exported.step, "--inputs", tmp_path / "uneven.npz")
    assert "as many rows as each other" in said


@pytest.mark.slow
def test_inputs_of_a_step(exported):
    step = Step.load(str(exported.step))
    given = {n: v[0] for n, v in models.batches().items()}
    with pytest.raises(StepError, match=r"misses \['x'\]. Give it these: .*x float32\[8, 4\]"):
        step({n: v for n, v in given.items() if n != "x"})
    with pytest.raises(StepError, match=r"was given \['z'\], unknown to it"):
        step({**given, "z": 1})
    with pytest.raises(StepError, match=r"'x' is float64\[8, 4\], and .* float32\[8, 4\]. Cast"):
        step({**given, "x": given["x"].astype(np.float64)})
    with pytest.raises(StepError, match=r"'gain' is float32\[\], and the step reads float32\[2\]"):
        step({**given, "gain": given["gain"][0]})
    assert step.steps == 0


@pytest.mark.slow
def test_a_folder_that_is_there(exported, tmp_path, capsys):
    args = ["--inputs", exported.batches, "--save", tmp_path]
    assert f"{tmp_path} is there already" in refused(capsys, exported.step, *args)
    assert "is no exported step, and is not replaced" in refused(
        capsys, exported.step, *args, "--replace"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_nothing_is_left_half_made(exported, tmp_path, monkeypatch):
    shutil.copytree(exported.step, tmp_path / "step")
    before = (tmp_path / "step" / "SHA256SUMS").read_bytes()
    step = Step.load(str(exported.step))

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez", full)
    for name in ("step", "new"):
        with pytest.raises(OSError, match="No space"):
            step.save(str(tmp_path / name), replace=True)
    assert [p.name for p in tmp_path.iterdir()] == ["step"]
    assert (tmp_path / "step" / "SHA256SUMS").read_bytes() == before


def test_an_interrupt_between_two_folders_leaves_the_one_that_was_there(tmp_path, monkeypatch):
    folder = tmp_path / "step"
    write = functools.partial(files.write_folder, folder, {"format": "mtf_gradsync-step-1"}, {})
    write({"which": b"old"}, False)
    move = Path.rename

    def interrupted(path, target):
        if path.name == "new":
            raise KeyboardInterrupt
        return move(path, target)

    monkeypatch.setattr(files, "check_free", lambda *unused: None)
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write({"which": b"new"}, True)
    assert [x.name for x in tmp_path.iterdir()] == ["step"]
    assert (folder / "which").read_bytes() == b"old"


class TestExport:
    """What `xla.export` refuses."""

    @pytest.fixture
    def program(self):
        self.x = tf.placeholder(tf.float32, [2], "x")
        with simd.tpu_program("all:2", "") as program:
            self.y = tf.identity(self.x, "y")
        self.outside = tf.identity(self.x, "outside")
        return program

    def test_fetches_from_outside(self, program, tmp_path):
        with pytest.raises(ValueError, match="stands outside the program"):
            xla.export(program, None, [self.outside], tmp_path / "step")
        with pytest.raises(ValueError, match="operation 'outside' stands outside the program"):
            xla.export(program, None, [self.outside.op], tmp_path / "step")

    def test_names_of_what_is_no_input(self, program, tmp_path):
        with pytest.raises(ValueError, match=r"does not read 'outside:0'.* reads \['x:0'\]"):
            xla.export(program, None, [self.y], tmp_path / "step", inputs={"z": self.outside})

    def test_values_of_another_shape(self, program, tmp_path):
        with pytest.raises(ValueError, match=r"keep for 'x:0' has shape \[3\].* reads \[2\]"):
            xla.export(program, None, [self.y], tmp_path / "step", keep={self.x: [1, 2, 3]})

    @pytest.mark.slow
    def test_two_origins_of_variables(self, program, tmp_path, exported):
        with program.session() as session:
            with pytest.raises(ValueError, match="a session or a checkpoint"):
                xla.export(
                    program,
                    None,
                    [self.y],
                    tmp_path / "step",
                    session=session,
                    checkpoint=exported.halfway,
                )

    def test_a_folder_that_is_there(self, program, tmp_path):
        xla.export(program, None, [self.y], tmp_path / "step")
        with pytest.raises(StepError, match="is there already"):
            xla.export(program, None, [self.y], tmp_path / "step")
        xla.export(program, None, {"z": self.y}, tmp_path / "step", replace=True)
        assert Step.load(str(tmp_path / "step")).manifest["fetches"] == ["z"]
        assert [p.name for p in tmp_path.iterdir()] == ["step"]
