"""The model of `tests.reduce.rounded` with optimizers around it, on any runtime."""

from __future__ import annotations

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf
from tests import harness, sessions
from tests.reduce import rounded

MESHES = {
    "4": ("all:4", "batch:all"),
    "2x2": ("rows:2;cols:2", "batch:rows;hidden:cols"),
    "8": ("all:8", "batch:all"),
    "2": ("all:2", "batch:all"),
    "one": harness.ONE,
}
SHARDS = {"4": 4, "2x2": 2, "8": 8, "2": 2, "one": 1}
STEPS = 50
FEEDS = rounded.batches(STEPS)


def sgd():
    return mtf.optimize.SgdOptimizer(rounded.RATE)


class Program:
    """The model with an optimizer, on any runtime; sessions that go on from checkpoints."""

    def __init__(self, kind, mesh, make, reported=False, loss=rounded.loss, feed=FEEDS[0]):
        self.kind, self.mesh = kind, mesh
        shape, layout = MESHES[mesh]
        self.opt = None

        def build(mtf_mesh, inputs):
            value = loss(mtf_mesh, inputs)
            self.opt = make(dict(mesh_shape=shape, layout=layout))
            operations = self.opt.apply_grads(*zip(*self.opt.compute_gradients(value)))
            return operations, {"loss": value, **(gs.reported(self.opt) if reported else {})}

        self.built = harness.built(kind, shape, layout, build, feed)

    def fetches(self, feeds):
        """What the steps fetch, from the start."""
        return self.built.run(feeds).fetched

    def run(self, feeds, restore=None, save=None):
        """Makes steps, from a checkpoint perhaps, and returns all masters."""
        return sessions.ran(self.built, feeds, restore, save)


def cross_shard(mesh):
    return gs.CrossShardOptimizer(sgd(), reducer=rounded.RoundedAllReduce(), **mesh)


def rounding():
    return rounded.RoundedAllReduce()
