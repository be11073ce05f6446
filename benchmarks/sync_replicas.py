"""SyncReplicasOptimizer with every replica contributing, against CrossShardOptimizer."""

from __future__ import annotations

import sys

import mtf_gradsync as gs
from benchmarks import models, report, timing
from mtf_gradsync._private.libraries import mtf

# What a step may take, as a share of CrossShardOptimizer's.
TARGET = 1.1
CROSS_SHARD, SYNC_REPLICAS = "cross-shard", "sync-replicas"


def measure(options: report.Options) -> report.Table:
    """Steps of both models in which every replica contributes and an update is made."""
    rows: list[report.Row] = []
    targets = []
    for model in models.models(options.quick):
        variants = {name: model._replace(make_optimizer=_maker(model, name)) for name in KINDS}
        programs = {name: models.build(m, models.BARE) for name, m in variants.items()}
        programs[models.BARE] = models.build(model, models.BARE)
        for grappler in (True, False):
            seconds = models.time_steps(model, programs, grappler, options)
            ratio = timing.ratio(seconds, SYNC_REPLICAS, CROSS_SHARD)
            rows.append(
                {
                    "model": model.name,
                    "Grappler": "on" if grappler else "off",
                    **{f"{n} ms": timing.spread([1e3 * s for s in seconds[n]]) for n in programs},
                    "sync-replicas/cross-shard": ratio,
                }
            )
            if not options.quick:
                what = f"step of {model.name}, Grappler {rows[-1]['Grappler']}"
                targets.append(report.Target(what, ratio.median, TARGET))
    return report.Table(
        name="sync_replicas",
        title="A step in which every replica contributes, replicas_to_aggregate = num_shards "
        "(median and quartiles over rounds; ratios are made round by round)",
        rows=rows,
        notes=("The models of the training step's table; every step makes an update.",),
        targets=targets,
    )


KINDS = {
    CROSS_SHARD: lambda opt, model, size: gs.CrossShardOptimizer(opt),
    SYNC_REPLICAS: lambda opt, model, size: gs.SyncReplicasOptimizer(
        opt, size, mesh_shape=model.mesh_shape, layout=model.layout
    ),
}


def _maker(model: models.Model, kind: str):
    size = gs.ReplicaAxes(
        mtf.convert_to_shape(model.mesh_shape), mtf.convert_to_layout_rules(model.layout)
    ).num_shards
    return lambda: KINDS[kind](model.make_optimizer(), model, size)


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.sync_replicas"))
