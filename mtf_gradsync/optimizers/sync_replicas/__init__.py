"""Synchronous replicas: an update when enough shards have contributed a fresh gradient."""

from mtf_gradsync.optimizers.sync_replicas.no_update import NoUpdateError

__all__ = ["NoUpdateError"]
