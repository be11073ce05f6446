"""Builds the specs of a model_fn on a mesh, and runs model_fns on every TensorFlow and runtime.

See ``docs/guides/model_fn.md``.
"""

from mtf_gradsync.estimator.builder import SpecBuilder
from mtf_gradsync.estimator.config import run_config
from mtf_gradsync.estimator.estimator import Estimator

__all__ = ["Estimator", "SpecBuilder", "run_config"]
