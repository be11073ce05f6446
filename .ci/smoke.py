"""Checks an installed package from outside the checkout: python smoke.py.

Imports what a user imports, asks the command line for help, and trains a small model on XLA devices
with the gin file that comes with the package, in two runs: the second goes on from the first's
checkpoint.
"""

from __future__ import annotations

import math
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata

import mtf_gradsync as gs
from mtf_gradsync.runtimes._common import configs_dir
from mtf_gradsync.tools.train.metrics import read_metrics

SMALL = ["num_layers = 1", "d_model = 32", "d_ff = 64", "train.run.eval_dataset_fn = None"]
ON_XLA = ["train.run.runtime = 'xla'", "train.run.log_steps = 1"]


def check(condition, message):
    """Fails with the message unless the condition holds; -O does not remove it."""
    if not condition:
        raise SystemExit(f"smoke test failed: {message}")


def command(*arguments):
    """What the installed command says."""
    script = pathlib.Path(sysconfig.get_paths()["scripts"]) / "mtf-gradsync"
    result = subprocess.run(
        [script, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = f"mtf-gradsync {' '.join(map(str, arguments))} gave {result.returncode}"
    check(result.returncode == 0, f"{said}:\n{result.stdout}")
    return result.stdout


def check_install():
    """The package is the installed one, with its data and its command line."""
    package = pathlib.Path(gs.__file__).resolve().parent
    site_packages = pathlib.Path(sysconfig.get_paths()["purelib"]).resolve()
    check(site_packages in package.parents, f"{package} is not under {site_packages}")
    configs = sorted(path.name for path in configs_dir().glob("*.gin"))
    check(configs_dir().parent == package, f"the gin files come from {configs_dir()}")
    check("lm_cpu_mesh.gin" in configs, f"lm_cpu_mesh.gin is not among {configs}")
    output = command("--help")
    check("train" in output, f"mtf-gradsync --help names no train command:\n{output}")


def train(folder, steps):
    """Trains up to a step; returns what was said and the losses by step."""
    bindings = [*SMALL, *ON_XLA, f"train.run.train_steps = {steps}"]
    flags = [f"--gin_param={binding}" for binding in bindings]
    said = command("train", "--gin_file=lm_cpu_mesh.gin", f"--model_dir={folder}", *flags)
    check("steps run on XLA devices" in said, f"the steps did not run on XLA devices:\n{said}")
    rows = read_metrics(folder / "metrics.jsonl")
    return said, {row["step"]: row["loss"] for row in rows if "loss" in row}


def main():
    """Runs the checks and says what was seen."""
    check_install()
    import mesh_tensorflow.transformer.utils  # noqa: F401 - it is the import that is checked

    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place) / "run"
        train(folder, steps=12)
        said, losses = train(folder, steps=20)
    check("from step 12 to 20" in said, f"the second run did not go on from step 12:\n{said}")
    check(sorted(losses) == list(range(1, 21)), f"losses of steps {sorted(losses)}")
    check(all(map(math.isfinite, losses.values())), f"losses {losses}")
    check(losses[20] < losses[1], f"the loss did not fall: {losses}")
    versions = [f"{name} {metadata.version(name)}" for name in ("tensorflow", "jax", "numpy")]
    print(
        f"smoke test passed: Python {sys.version.split()[0]}, {', '.join(versions)}; "
        f"loss {losses[1]:.3f} at step 1, {losses[20]:.3f} at step 20"
    )


if __name__ == "__main__":
    main()
