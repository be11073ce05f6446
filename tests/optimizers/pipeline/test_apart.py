"""A strategy that keeps state: rounded gradients with error feedback, exactly as by hand."""


import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import xla
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness
from tests.reduce import rounded

KINDS = ["placement", "simd"] + ([] if xla.why_no_xla() else ["xla"])
MESHES = {
    "4": ("all:4", "batch:all"),
    "2x2": ("rows:2;cols:2", "batch:rows;hidden:cols"),
    "8": ("all:8", "batch:all"),
    "one": harness.ONE,
}
SHARDS = {"4": 4, "2x2": 2, "8": 8, "one": 1}
STEPS = 50
FEEDS = rounded.batches(STEPS)


def sgd():
    return mtf.optimize.SgdOptimizer(rounded.RATE)


class Program:
    """The model with an optimizer, on any runtime; sessions that go on from checkpoints."""

    def __init__(self, kind, mesh, make):
        self.kind, self.mesh = kind, mesh
        shape, layout = MESHES[mesh]
        self.opt = None

        def build(mtf_mesh, inputs):
            loss = rounded.loss(mtf_mesh, inputs)
            self.opt = make(dict(mesh_shape=shape, layout=layout))
            return self.opt.minimize(loss), {"loss": loss}

        self.built = harness.built(kind, shape, layout, build, FEEDS[0])
        if self.built.program is None:
            with self.built.graph.as_default():
                self.saver = gs.ReshardingSaver(max_to_keep=None)

    def run(self, feeds, restore=None, save=None):
        """Makes steps, from a checkpoint perhaps, and returns all masters."""
        made = self.built
        with made.graph.as_default(), made._session() as session:
            if made.program is None:
                session.run(made.init)
                if restore:
                    self.saver.restore(session, restore)
                session.run(made.restore)
            elif restore:
                session.restore(restore)
            for feed in feeds:
                feed = {made.inputs[name]: value for name, value in feed.items()}
                session.run([made.fetched, made.updates], feed)
            if made.program is None:
                session.run(made.collect)
                if save:
                    self.saver.save(session, save)
                return session.run({v.op.name: v for v in tf.global_variables()})
            if save:
                session.save(save)
            return session.variables()


def cross_shard(mesh):
    return gs.CrossShardOptimizer(sgd(), reducer=rounded.RoundedAllReduce(), **mesh)


@pytest.fixture(scope="module")
def programs():
    made = {}

    def program(kind, mesh):
        if (kind, mesh) not in made:
            made[kind, mesh] = Program(kind, mesh, cross_shard)
        return made[kind, mesh]

    return program


@pytest.mark.parametrize("kind", KINDS)
def test_fifty_steps_are_those_by_hand_and_restart_to_the_same_bits(kind, programs, tmp_path):
    reference = rounded.Reference(2)
    for feed in FEEDS:
        reference.update([feed])
    assert any(error.any() for error in reference.errors.values())
    program = programs(kind, "2x2")
    halfway = str(tmp_path / "halfway")
    program.run(FEEDS[:25], save=halfway)
    found = program.run(FEEDS[25:], restore=halfway)
    reference.check(found)
    whole = program.run(FEEDS)
    assert {k: v.tobytes() for k, v in found.items()} == {k: v.tobytes() for k, v in whole.items()}


def test_it_moves_between_meshes_and_runtimes_with_the_sum_of_what_was_not_sent(programs, tmp_path):
    reference, path = rounded.Reference(4), None
    stations = zip(["4", "2x2", "one", "4"], ["simd", "placement", "placement", KINDS[-1]])
    for number, (mesh, kind) in enumerate(stations):
        reference.move(SHARDS[mesh])
        feeds, before = FEEDS[10 * number :][:10], path
        path = str(tmp_path / f"{number}")
        for feed in feeds:
            reference.update([feed])
        found = programs(kind, mesh).run(feeds, restore=before, save=path)
        reference.check(found)
    # All that the gradients were was applied, or waits on a core.
    for name, value in reference.values.items():
        total = sum(rounded.gradients(feed, 1)[name][0] for feed in FEEDS[:40])
        applied = (1 - value) / rounded.RATE
        np.testing.assert_array_equal(applied + reference.errors[name].sum(0), total)


@pytest.mark.parametrize("kind", KINDS)
def test_inside_accumulation_it_changes_with_updates_alone(kind, tmp_path):
    def make(mesh):
        inner = gs.CrossShardOptimizer(sgd(), reducer=rounded.RoundedAllReduce())
        strategy = rounded.RoundedAllReduce()
        return gs.GradientAccumulationOptimizer(inner, 4, reducer=strategy, **mesh)

    program = Program(kind, "2x2", make)
    reference = rounded.Reference(2)
    for start in range(0, 12, 4):
        reference.update(FEEDS[start : start + 4])
    reference.check(program.run(FEEDS[:12]))
    saved = str(tmp_path / "saved")
    reference.check(program.run(FEEDS[:14], save=saved))
    reference.update(FEEDS[12:16])
    reference.check(program.run(FEEDS[14:16], restore=saved))
