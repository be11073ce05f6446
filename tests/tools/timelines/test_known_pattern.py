"""A program with a known pattern, on every runtime: a long product, a large sum, a slow input."""

import contextlib
import time

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.tools._private.profiles import Profiler
from mtf_gradsync.tools.timelines import TimelineError
from tests.runtimes.simd.programs import SGD, Regression

SIZE = 640
SLEEP = 0.05
STEPS = 3


class Pattern:
    """Each of two cores makes a product of 2 * SIZE**3 operations; then the products are summed."""

    def __init__(self):
        self.x = tf.placeholder(tf.float32, [2, SIZE, SIZE])
        self.feed = {self.x: np.ones([2, SIZE, SIZE], np.float32)}

    def lower(self, impl):
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        batch = mtf.Dimension("batch", 2)
        i, j, k = (mtf.Dimension(name, SIZE) for name in "ijk")
        x = mtf.import_tf_tensor(mesh, self.x, [batch, i, j])
        w = mtf.get_variable(mesh, "w", [j, k], initializer=tf.ones_initializer())
        total = mtf.get_variable(mesh, "total", [i, k], initializer=tf.zeros_initializer())
        product = mtf.einsum([x, w], [batch, i, k], name="long_product")
        summed = mtf.reduce_sum(product, output_shape=[i, k], name="large_sum")
        # Of one row: a largest number of all of them may take as long as the product.
        update, largest = mtf.assign(total, summed), mtf.reduce_max(mtf.slice(summed, 0, 1, "i"))
        self.lowering = mtf.Lowering(graph, {mesh: impl})
        self.fetches = [
            self.lowering.lowered_operation(update),
            self.lowering.export_to_tf_tensor(largest),
        ]


@contextlib.contextmanager
def running(runtime):
    """The pattern and a session that has made its first step."""
    pattern = Pattern()
    if runtime == "placement":
        pattern.lower(
            mtf.placement_mesh_impl.PlacementMeshImpl(
                mtf.convert_to_shape("all:2"),
                mtf.convert_to_layout_rules("batch:all"),
                ["cpu:0", "cpu:1"],
            )
        )
        session = tf.Session(config=gs.session_config(num_cpu_devices=2))
        session.run(tf.global_variables_initializer())
        session.run(pattern.lowering.copy_masters_to_slices())
    else:
        with simd.tpu_program("all:2", "batch:all") as program:
            pattern.lower(program.mesh_impl)
        make = xla.session if runtime == "xla" else type(program).session
        session = make(program, pattern.lowering)
    with session:
        session.run(pattern.fetches, pattern.feed)
        yield pattern, session


@pytest.mark.parametrize("runtime", ["placement", "replicas", "xla"])
def test_the_table_says_where_the_time_went(runtime, tmp_path):
    with running(runtime) as (pattern, session):
        run, own = session.run, dict(vars(session))
        began = time.perf_counter()
        with gs.timeline(session, tmp_path / "trace.json", lowering=pattern.lowering) as timeline:
            for _ in range(STEPS):
                time.sleep(SLEEP)
                found = session.run(pattern.fetches, pattern.feed)[1]
        took = (time.perf_counter() - began) * 1e3 / STEPS
        # As it was: what is not recorded runs nothing of a timeline.
        assert session.run == run
        assert vars(session).keys() == own.keys()
    assert np.max(found) == 2 * SIZE
    table = timeline.table()
    assert table.steps == STEPS
    assert len(table.cores) == 2
    for one in (*table.cores, table.total):
        assert one.compute + one.exposed + one.host + one.idle == pytest.approx(one.step, rel=0.01)
        assert one.exposed <= one.collectives
        # While the input sleeps no core runs anything; a tenth is for how clocks are read.
        assert one.host >= 0.9 * SLEEP * 1e3
        # 2 * SIZE**3 operations in less than a microsecond would be 1e14 a second.
        assert 1e-3 < one.compute < one.step
    # No step is longer than the block.
    assert table.total.step <= took
    assert any(one.name.startswith("long_product") for one in table.operations)
    # Mesh-TF sums where the sum is used first.
    largest = table.collectives[0]
    assert largest.name.startswith("assign/")
    if runtime == "placement":
        # In halves, each by one of the devices.
        assert (largest.bytes_per_core, largest.runs) == (4 * SIZE**2 // 2, 0.5)
    else:
        assert (largest.bytes_per_core, largest.runs) == (4 * SIZE**2, 1)
        assert largest.variables == ("total",)
    assert timeline.written.path.exists()
    assert timeline.written.dropped == 0


@pytest.mark.parametrize("runtime", ["placement", "replicas", "xla"])
def test_the_longest_operation_is_the_product(runtime):
    """With 2 * SIZE operations for each number, against at most one for each in all others.

    On a busy machine another one may wait for a processor for longer, but not in every recording.
    """
    longest = []
    with running(runtime) as (pattern, session):
        while len(longest) < 10:
            with gs.timeline(session, lowering=pattern.lowering) as timeline:
                session.run(pattern.fetches, pattern.feed)
            computed = [one for one in timeline.table().operations if one.kind == "compute"]
            longest.append(max(computed, key=lambda one: one.milliseconds).name)
            if longest[-1].startswith("long_product"):
                return
    raise AssertionError(longest)


def test_a_block_without_steps_is_an_error():
    with running("replicas") as (pattern, session):
        with pytest.raises(TimelineError, match="No step was made"), gs.timeline(session):
            session.read("w")
        timeline = gs.timeline(session)
        with pytest.raises(TimelineError, match="no recordings before the end"):
            timeline.table()
        # An error inside is the program's own, and the session goes on.
        with pytest.raises(ZeroDivisionError), timeline:
            raise ZeroDivisionError
        assert session.run(pattern.fetches, pattern.feed)[1] == 2 * SIZE


def test_a_profile_without_the_devices_is_an_error(monkeypatch):
    with running("xla") as (pattern, session):
        stop = Profiler.stop
        monkeypatch.setattr(Profiler, "stop", lambda self: stop(self)[:0])
        with pytest.raises(TimelineError, match="no operation of core 0, core 1 in 1 steps"):
            with gs.timeline(session):
                session.run(pattern.fetches, pattern.feed)


def test_monitored_sessions_and_other_objects():
    with running("placement") as (pattern, _):
        ready = tf.train.Scaffold(local_init_op=pattern.lowering.copy_masters_to_slices())
        config = gs.session_config(num_cpu_devices=2)
        creator = tf.train.ChiefSessionCreator(ready, config=config)
        with tf.train.MonitoredSession(creator) as session:
            with gs.timeline(session) as timeline:
                session.run(pattern.fetches, pattern.feed)
        assert [one.core for one in timeline.table().cores] == ["CPU:0", "CPU:1"]
    with pytest.raises(TypeError, match="needs a session, got 'a string'"):
        gs.timeline("a string")


@contextlib.contextmanager
def recorded(runtime, model):
    """Records steps of a model on two cores: a function that makes one, and the timeline."""
    model.placeholders()
    with simd.tpu_program("all:2", "batch:all") as program:
        lowering, *fetches = model.build(program.mesh_impl)
    make = xla.session if runtime == "xla" else type(program).session
    with make(program, lowering) as session:
        with gs.timeline(session, lowering=lowering) as timeline:
            yield lambda *given: session.run(fetches, dict(zip(model.feeds, given))), timeline


@pytest.mark.parametrize("runtime", ["replicas", "xla"])
def test_steps_that_update_are_told_by_their_sums(runtime):
    model = Regression(
        lambda: gs.GradientAccumulationOptimizer(SGD(2.0**-8), 2, accumulate="local"), steps=4
    )
    with recorded(runtime, model) as (step, timeline):
        for x, y in zip(model.x, model.y):
            # A step of a millisecond is shorter than what two clocks may differ by.
            time.sleep(0.03)
            step(x, y)
    assert [s.is_update for s in timeline.recordings[0].steps] == [False, True, False, True]
    assert timeline.table().update_steps == 2
    sums = {row.name: row.variables for row in timeline.table().collectives if row.runs == 0.5}
    assert sums == {"conditional/cond/sum_gradients/CrossReplicaSum": ("w",)}


@pytest.mark.parametrize("runtime", ["replicas", "xla"])
def test_sums_of_skips_are_no_updates(runtime):
    """A step that LossScaleOptimizer skips sums what was not finite; others are the updates."""
    model = Regression(lambda: gs.LossScaleOptimizer(SGD(2.0**-9)), steps=2)
    with recorded(runtime, model) as (step, timeline):
        for x in (model.x[0], np.full_like(model.x[0], np.inf)):
            step(x, model.y[0])
    assert [s.is_update for s in timeline.recordings[0].steps] == [None, None]


def test_a_second_profiler_is_an_error():
    """And the first one goes on; what ends a block otherwise is what the program sees."""
    made = []
    with running("xla") as (pattern, session):

        def step():
            made.append(session.run(pattern.fetches, pattern.feed))

        with gs.timeline(session) as timeline:
            # Newer versions of jax refuse where the block begins, older ones where it ends.
            with pytest.raises(TimelineError, match="another profiler"), gs.timeline(session):
                step()
            with pytest.raises((KeyboardInterrupt, TimelineError)), gs.timeline(session):
                raise KeyboardInterrupt
            step()
    assert timeline.table().steps == len(made)
