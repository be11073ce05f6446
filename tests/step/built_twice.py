"""Builds training steps and prints a digest of each graph; run by test_plan, in two processes."""

from __future__ import annotations

import hashlib
import itertools

import absl.flags

from mtf_gradsync._private.libraries import tf
from tests import harness, models
from tests.step.test_plan import LAYOUT, MESH, mlp_step, stacked

STACKS = (["cross_shard"], ["local", "clip"], ["sync_replicas"])


def digest(names: list[str], kind: str, autostack: bool) -> str:
    """Of the GraphDef of a training step with Momentum."""

    def build(mesh, inputs):
        return mlp_step(stacked(names, models.OPTIMIZERS["momentum"]()), mesh, inputs), {}

    (feed,) = models.mlp_batches(1)
    graph = harness.built(kind, MESH, LAYOUT, build, feed, autostack).graph
    return hashlib.sha256(graph.as_graph_def().SerializeToString(deterministic=True)).hexdigest()


if __name__ == "__main__":
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    absl.flags.FLAGS.mark_as_parsed()
    for number, (names, kind) in enumerate(itertools.product(STACKS, ("placement", "simd"))):
        print(names, kind, digest(names, kind, autostack=number % 4 < 2))
