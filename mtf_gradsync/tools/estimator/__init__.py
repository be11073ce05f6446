"""Builds the specs of a model_fn on a mesh, and runs model_fns on every TensorFlow and runtime.

See ``docs/guides/model_fn.md``.
"""

from mtf_gradsync.tools.estimator.estimator import Estimator, run_config
from mtf_gradsync.tools.estimator.spec_builder import SpecBuilder

__all__ = ["Estimator", "SpecBuilder", "run_config"]
