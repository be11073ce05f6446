"""Runs a training step that mtf_gradsync exported, on the devices that jax has here.

This package, the runner, needs numpy and jax, but neither TensorFlow nor mtf_gradsync. Every
exported folder has a copy of the runner. mtf_gradsync's own sessions compile and run programs with
it, too. To use the runner as a command, in an exported folder:

    python run.py --steps 100 --inputs batches.npz

To use the runner as a module, with the exported folder on ``sys.path``:

    from runner import Step
    step = Step.load(folder)
    print(step({"x": x, "y": y})["loss"])

The file docs/portable.md of mtf_gradsync describes the files in an exported folder.
"""

from .jax_devices import StepError
from .step import Fetched, Step

__all__ = ["Fetched", "Step", "StepError"]
