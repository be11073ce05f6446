"""Copies that part while a training runs are found on every runtime, and others are not."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.runtimes._private.mesh_tensorflow import variables_of_cores
from mtf_gradsync.runtimes.simd.replica_session import VariableAccess
from mtf_gradsync.runtimes.xla.runner.jax_devices import put
from tests import harness, models
from tests.wrappers import wrap

MESH_SHAPE, LAYOUT, _ = harness.MESHES["2x2"]
# Cores 1 and 3 hold the second half of what "hidden" splits.
WHERE = {"mesh_shape": MESH_SHAPE, "layout": LAYOUT}
KINDS = ["placement", "simd", pytest.param("xla", marks=pytest.mark.xla)]


def wrapped():
    axes = gs.ReplicaAxes(MESH_SHAPE, LAYOUT)
    adam = models.OPTIMIZERS["adam"]()
    return gs.GradientAccumulationOptimizer(gs.CrossShardOptimizer(adam), 2, axes=axes)


class Running:
    """A program, watched, in a session of its runtime."""

    def __init__(self, kind, make=wrapped, every=1, mesh=(MESH_SHAPE, LAYOUT)):
        self.feeds = models.mlp_batches(8)
        self.made = harness.built(kind, *mesh, models.train(make), self.feeds[0])
        self.hook = gs.watch_copies(every)
        with self.made.graph.as_default():
            self.hook.begin()

    def __enter__(self):
        self.graph = self.made.graph.as_default()
        self.graph.__enter__()
        self.session = self.made._session().__enter__()
        if self.made.program is None:
            self.session.run(self.made.init)
            self.session.run(self.made.restore)
        return self

    def __exit__(self, *error):
        self.session.__exit__(*error)
        self.graph.__exit__(*error)

    def step(self):
        feed = {self.made.inputs[k]: v for k, v in self.feeds.pop(0).items()}
        self.session.run([self.made.updates], feed)
        self.hook.after_step(self.session)

    def slice_of(self, name, core):
        """The tf variable of a core's slice."""
        of = {v.name: x for v, x in self.made.lowering.variables.items()}[name]
        slices = of.laid_out_tensor.all_slices
        return (variables_of_cores(slices[0]) if self.made.program else slices)[core]

    def spoil(self, name, core, change):
        """Changes one core's copy, as a fault of its memory would."""
        one = self.slice_of(name, core).op.name
        if self.made.kind == "xla":
            held = self.session._variables._on_devices
            key = next(key for key in held if one in key)
            before, devices = [np.array(x) for x in held[key].arrays], self.session.cores.devices
            self.undo = lambda: held.update({key: put(before, devices)})
            arrays = [np.array(x) for x in before]
            change(arrays[core].reshape(-1))
            held[key] = put(arrays, devices)
            return
        session = getattr(self.session, "tf_session", self.session)
        access = VariableAccess(session.graph)
        before = np.array(session.run(access.read[one]))
        self.undo = lambda: access.set(session, [(one, before)])
        value = np.array(before)
        change(value.reshape(-1))
        access.set(session, [(one, value)])


def flip_lowest_bit(numbers):
    numbers.view(np.uint32)[3] ^= 1


def fill(value):
    return lambda numbers: numbers.fill(value)


# A variable, its name in the error where it is stacked, a core whose copy is changed, what the
# error says.
PARTED = [
    ("w1", "w1", 3, flip_lowest_bit, "1 of the slice's 24 numbers differ; the first, at [0, 3],"),
    ("b1", "b1", 3, fill(np.nan), "4 of the slice's 4 numbers differ; the first, at [0], is nan"),
    ("stacked/w1/adam_m", "w1/adam_m", 2, flip_lowest_bit, "1 of the slice's 48 numbers differ"),
    # Of one shard, on the cores of which it has two copies.
    ("scale/gradient_accumulator", "", 1, fill(np.inf), "the first, at [0], is inf on core 1"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.mostly_slow
def test_a_copy_that_parts_ends_the_run(kind):
    with Running(kind) as running:
        running.step()
        for variable, name, core, change, said in PARTED:
            running.spoil(variable, core, change)
            with pytest.raises(gs.CopiesError, match="have become different after run 1") as error:
                running.hook.check(running.session)
            assert error.value.variable == (name or variable)
            assert core in error.value.cores
            assert said in str(error.value)
            running.undo()
            running.hook.check(running.session)
        running.spoil(*PARTED[0][0:4:2], flip_lowest_bit)
        with pytest.raises(gs.CopiesError) as error:
            running.step()
        assert (error.value.variable, error.value.step) == ("w1", 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.mostly_slow
def test_bits_are_compared_and_not_values(kind):
    with Running(kind, lambda: gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.0))) as running:
        running.step()
        for value in (np.nan, 0.0):  # the same on all copies is no difference
            for core in range(4):
                running.spoil("scale", core, fill(value))
            running.hook.check(running.session)
        running.spoil("scale", 2, fill(-0.0))
        said = (
            r"core 2 has other bits than cores 0, 1, 3\. .* is -0\.0 on core 2 and 0\.0 on core 0"
        )
        with pytest.raises(gs.CopiesError, match=said) as error:
            running.hook.check(running.session)
    assert error.value.cores == (2,)


# What lies on each shard, or on each core, is rightly another one.
REDUCERS = {
    "errors of 8 bits": gs.QuantizedAllReduce(block_size=4),
    "errors of low rank": gs.LowRankAllReduce(rank=1, min_compression_rate=1.0),
}
STACKS = ["sharded", "islands", *REDUCERS, "replicas", "average(loss_scale)", "local"]


@pytest.mark.parametrize(
    ("kind", "stack"),
    [
        *harness.pairs(["simd", "placement"], STACKS),
        # They read each core's value as CPU replicas do.
        *(pytest.param("xla", name, marks=pytest.mark.xla) for name in ("islands", "local")),
    ],
)
@pytest.mark.slow
def test_state_of_a_shard_is_no_difference(kind, stack):
    def make():
        adafactor = models.OPTIMIZERS["adafactor"]()
        if stack in REDUCERS:
            return gs.CrossShardOptimizer(adafactor, reducer=REDUCERS[stack])
        how = {"fragments": 2, "should_skip_update_fn": gs.skip_not_finite}
        return wrap(stack, adafactor, WHERE, **how)

    with Running(kind, make) as running:
        for _ in range(3):
            running.step()


def session_of(made, hooks):
    """A session with hooks, as TensorFlow's own loops open it."""
    restore = mtf.MtfRestoreHook(made.lowering)
    return tf.train.SingularMonitoredSession(
        hooks=[restore, *hooks], config=harness.placement_config(4)
    )


@pytest.mark.slow
def test_nothing_is_saved_of_copies_that_have_parted(tmp_path):
    with Running("simd") as running:
        running.step()
        running.hook.every = 100
        path = running.session.save(str(tmp_path / "good"))
        running.spoil("w1", 3, flip_lowest_bit)
        running.step()
        for save in (running.session.save, lambda path: running.session.begin_save(path, None, 1)):
            with pytest.raises(gs.CopiesError, match="'w1' have become different"):
                save(str(tmp_path / "bad"))
        assert not list(tmp_path.glob("bad*"))
        running.session.restore(path)
        running.session.save(str(tmp_path / "good again"))


@pytest.mark.slow
def test_hooks_end_a_session_before_it_saves(tmp_path):
    feeds = models.mlp_batches(4)
    made = harness.built("placement", MESH_SHAPE, LAYOUT, models.train(wrapped), feeds[0])
    with made.graph.as_default():
        step = tf.train.get_or_create_global_step()
        train = tf.group(*made.updates, tf.assign_add(step, 1))
        of = {v.name: x for v, x in made.lowering.variables.items()}["w1"]
        one = of.laid_out_tensor.all_slices[3]
        spoil = one.assign(one.read_value() * 1.5)
        hooks = [
            gs.watch_copies(every=100),
            tf.train.CheckpointSaverHook(
                str(tmp_path),
                save_steps=2,
                listeners=[mtf.MtfCheckpointSaverListener(made.lowering)],
            ),
        ]

        def train_on() -> None:
            with session_of(made, hooks) as session:
                for number, feed in enumerate(feeds):
                    given = {made.inputs[k]: v for k, v in feed.items()}
                    session.run([train, *([spoil] if number == 2 else [])], given)

        with pytest.raises(gs.CopiesError, match="by global step 4") as error:
            train_on()
    assert (error.value.variable, error.value.step) == ("w1", 4)
    assert tf.train.latest_checkpoint(str(tmp_path)).endswith("-2")


def test_copies_that_processors_share_are_nothing_to_compare(caplog):
    with Running("shared") as running:
        running.step()
    assert "nothing to compare" in caplog.text
    assert not [op for op in running.made.graph.get_operations() if op.type == "Fingerprint"]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="every must be a whole number of 1 or more, got 0"):
        gs.watch_copies(0)
    with tf.Graph().as_default(), pytest.raises(ValueError, match=r"finds no mtf\.Lowering"):
        gs.watch_copies().begin()
