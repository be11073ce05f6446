"""What a stack of wrappers reports of a training step: norms, counts, steps."""

from mtf_gradsync.optimizers.report.stack import reported, split_by_shard

__all__ = ["reported", "split_by_shard"]
