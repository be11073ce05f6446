"""Model functions of Mesh-TensorFlow: what they repeat, and what runs them on every TensorFlow.

See ``docs/guides/model_fn.md``.
"""

from mtf_gradsync.estimator.builder import SpecBuilder
from mtf_gradsync.estimator.config import run_config
from mtf_gradsync.estimator.estimator import Estimator

__all__ = ["Estimator", "SpecBuilder", "run_config"]
