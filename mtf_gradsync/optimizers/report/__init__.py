"""Reports of a stack of wrappers about a training step: norms, counts, steps."""

from mtf_gradsync.optimizers.report.noise_scale import NoiseScale, gradient_noise_scale
from mtf_gradsync.optimizers.report.stack import reported, split_by_shard

__all__ = ["NoiseScale", "gradient_noise_scale", "reported", "split_by_shard"]
