"""Where variables are, what is compiled when, what stands outside, and what is refused."""

import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.runtimes._common import install_extra
from mtf_gradsync.runtimes.xla.runner.jax_devices import devices_errors
from mtf_gradsync.xla import device_values, executable
from tests import harness, models, reference
from tests.runtimes.simd.programs import MESHES, SGD, Regression

pytestmark = pytest.mark.xla
RATE = 2.0**-4


def session(program, lowering=None, **arguments):
    return xla.session(program, lowering, **{"cache_dir": None, **arguments})


def counting_program():
    """A counter inside, another outside after the program, and a reader of both."""
    with tf.variable_scope("", use_resource=True):
        inside, outside = (
            tf.get_variable(n, [], initializer=tf.zeros_initializer()) for n in ("in", "out")
        )
    given = tf.placeholder(tf.float32, [])
    with simd.tpu_program("all:2", "") as program:
        count = inside.assign_add(given)
    with tf.control_dependencies([count.op]):
        later = outside.assign_add(given * 10.0)
    return program, given, count, later, inside, outside


def test_what_stands_outside_after_the_program_runs_after_it_and_once():
    program, given, count, later, inside, outside = counting_program()
    drawn = []

    def draw():
        drawn.append(0)
        return np.float32(len(drawn))

    number = tf.py_func(draw, [], tf.float32)
    number.set_shape([])
    with simd.tpu_program("all:2", "") as other:
        used = number * 1.0
    with tf.control_dependencies([used.op]):
        also = tf.identity(number) + 0.5
    with session(program) as devices:
        assert devices.run([count, later], {given: 2.0}) == [2, 20]
        assert devices.run(later, {given: 1.0}) == 30
        assert devices.run([inside, outside]) == [3, 30]
        # The newest value is where it is asked for, from inside and from outside.
        devices.tf_session.run(outside.initializer.name)
        assert devices.variables() == {"in": 3, "out": 0}
        with pytest.raises(ValueError, match="needs another program"):
            devices.run(used)
        with pytest.raises(ValueError, match="needs another program"):
            devices.run(also)
    with session(other) as devices:
        assert devices.run([used, also]) == [1, 1.5]
    assert len(drawn) == 1


def test_a_variable_that_is_assigned_outside_is_seen_inside():
    program, given, count, _, inside, _ = counting_program()
    reset = inside.assign(100.0)
    with session(program) as devices:
        devices.run(count, {given: 1.0})
        devices.run(reset)
        assert devices.run(count, {given: 1.0}) == 101


def test_steps_are_dispatched_ahead_and_inputs_may_be_changed_meanwhile():
    program, given, count, *_ = counting_program()
    value = np.zeros([], np.float32)
    with session(program) as devices:
        steps = []
        for step in range(5):
            value[...] = step
            steps.append(devices.dispatch(count, {given: value}))
            value[...] = -1000
        assert [step.result() for step in steps] == [0, 1, 3, 6, 10]
        assert steps[1].result() == 1
        assert len(set(steps)) == 5  # two steps are never equal, whatever their values are


def test_constant_inputs_go_to_the_devices_once_but_can_be_fed(monkeypatch):
    constants = [tf.constant(float(core)) for core in range(2)]
    table = tf.square(tf.constant(3.0), name="table")
    x = tf.placeholder(tf.float32, [])
    with simd.tpu_program("all:2", "") as program:
        y = program.per_replica(constants) + table + x
    with session(program) as devices:
        put = []
        real = device_values.put
        monkeypatch.setattr(device_values, "put", lambda v, d: put.append(v) or real(v, d))
        for _ in range(2):
            put.clear()
            assert devices.run(y, {x: 100.0}, per_replica=True) == [109, 110]
        assert put == [[100, 100]]
        assert devices.run(y, {x: 0.0, constants[1]: 50.0}, per_replica=True) == [9, 59]
        assert devices.run(y, {x: 0.0, table.op.inputs[0]: 2.0}, per_replica=True) == [4, 5]
        assert devices.run(y, {x: 0.0}, per_replica=True) == [9, 10]


def test_each_set_of_fetches_compiles_once(monkeypatch):
    compiled = []
    load = executable.loaded
    monkeypatch.setattr(executable, "loaded", lambda *a: compiled.append(a) or load(*a))
    x = tf.placeholder(tf.float32, [])
    with simd.tpu_program("all:2", "") as program:
        a, b = x + 1.0, x + 2.0
    with session(program) as first, session(program) as second:
        for _ in range(3):
            first.run([a, b], {x: 1.0})
            first.run([b, [a, b]], {x: 1.0})
        assert len(compiled) == 1
        first.run(a, {x: 1.0})
        second.run(a, {x: 1.0})
        assert len(compiled) == 2


def test_a_second_start_takes_the_cache(tmp_path, monkeypatch):
    def start():
        with tf.Graph().as_default():
            model = Regression(lambda: SGD(RATE))
            model.placeholders()
            with simd.tpu_program(*MESHES["4x2"]) as program:
                lowering, loss, _ = model.build(program.mesh_impl)
            with session(program, lowering, cache_dir=str(tmp_path)) as devices:
                return model.steps_in(devices, loss), devices.variables()["w"]

    first = start()
    assert len(list(tmp_path.iterdir())) == 2

    def fails(*_):
        raise AssertionError("not from the cache")

    monkeypatch.setattr(executable, "to_hlo", fails)
    monkeypatch.setattr(executable, "compiled", fails)
    for found, expected in zip(start(), first):
        np.testing.assert_array_equal(found, expected)
    # A damaged entry is made again.
    monkeypatch.undo()
    for entry in tmp_path.iterdir():
        entry.write_bytes(entry.read_bytes()[:-1])
    np.testing.assert_array_equal(start()[1], first[1])


@pytest.mark.slow
def test_twenty_runs_have_the_same_bits():
    """Sums across devices in one order, whichever thread comes first."""
    batches = models.mlp_batches(3)
    shape, layout, batch_dims = harness.MESHES["4x2"]
    build = models.train(lambda: models.OPTIMIZERS["adam"](), batch_dims)
    results = harness.run("xla", shape, layout, build, batches, repeats=20)
    for result in results[1:]:
        for name, value in results[0].variables.items():
            np.testing.assert_array_equal(result.variables[name], value, err_msg=name)
        for step, first in zip(result.fetched, results[0].fetched):
            np.testing.assert_array_equal(step["loss"], first["loss"])


@pytest.mark.parametrize("optimizer", list(models.OPTIMIZERS))
@pytest.mark.mostly_slow
def test_training_is_that_of_float64(optimizer):
    batches = models.mlp_batches(4)
    shape, layout, batch_dims = harness.MESHES["4x2"]
    build = models.train(lambda: models.OPTIMIZERS[optimizer](), batch_dims)
    result = harness.run("xla", shape, layout, build, batches)
    expected = reference.train(reference.OPTIMIZERS[optimizer](), batches)
    for name, value in expected.items():
        np.testing.assert_allclose(
            result.variables[name], value, rtol=3e-6, atol=3e-7, err_msg=name
        )


def test_too_few_devices_are_counted():
    with simd.tpu_program("all:64", "") as program:
        y = tf.ones([])
    del y
    with pytest.raises(xla.DevicesError, match=r"64 cores, and jax has 12 cpu devices.*=64"):
        session(program)


def test_a_platform_that_is_not_there_is_named():
    with simd.tpu_program("all:2", "") as program:
        tf.ones([])
    with pytest.raises(xla.DevicesError, match=r"platform 'cuda'.*jax\[cuda12\]"):
        session(program, platform="cuda")


@pytest.mark.parametrize(
    "text", ["RESOURCE_EXHAUSTED: Out of memory", "FAILED: %sOut of memory allocating 7 bytes."]
)
def test_a_step_without_memory_says_what_to_do(text):
    """The runner of exported steps runs out of memory for real, in a process of its own."""
    XlaRuntimeError = type("XlaRuntimeError", (RuntimeError,), {})
    with pytest.raises(xla.DevicesError, match="Take a smaller batch, more microbatches"):
        with devices_errors():
            raise XlaRuntimeError(text)
    with pytest.raises(xla.DevicesError, match=r"failed on the devices: gone\. .*a new process"):
        with devices_errors():
            raise XlaRuntimeError("gone")
    with pytest.raises(RuntimeError, match="not of XLA"):
        with devices_errors():
            raise RuntimeError("not of XLA")


def test_without_jax_the_error_says_what_to_install(monkeypatch):
    from mtf_gradsync.xla import installed

    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None)
    with simd.tpu_program("all:2", "") as program:
        tf.ones([])
    with pytest.raises(xla.XlaMissingError, match=re.escape(install_extra("xla"))):
        session(program)
    assert install_extra("tpu") in xla.why_no_tpu_compiler()


def test_a_jax_that_is_too_old_is_named(monkeypatch):
    from importlib import metadata

    monkeypatch.setattr(metadata, "version", lambda name: "0.4.20")
    assert xla.why_no_xla().startswith("This needs jax 0.4.30 or later; this is 0.4.20.")


@pytest.fixture
def as_if_jax_were_new(monkeypatch):
    """Fakes a version that no test has seen; a small program tells whether it can be used."""
    from importlib import metadata

    from mtf_gradsync.xla import installed

    monkeypatch.setattr(metadata, "version", lambda name: "7.1.0rc2")
    installed._why_unfit.cache_clear()
    yield monkeypatch
    installed._why_unfit.cache_clear()


@pytest.mark.slow
def test_a_jax_that_is_newer_than_any_that_was_tested_is_tried(as_if_jax_were_new):
    from mtf_gradsync.xla import installed

    assert xla.why_no_xla() == ""
    as_if_jax_were_new.setattr(installed.subprocess, "run", None)
    assert xla.why_no_xla() == ""  # and remembered


@pytest.mark.slow
def test_a_jax_that_cannot_be_used_is_named(as_if_jax_were_new, tmp_path):
    from mtf_gradsync.runtimes._common import ConfigError
    from mtf_gradsync.tools.train.runner import choose_runtime
    from mtf_gradsync.xla import installed

    # The trial finds the runner beside itself.
    trial = shutil.copy(installed._TRIAL, tmp_path)
    (tmp_path / "runner").mkdir()
    (tmp_path / "runner" / "jax_devices.py").write_text("")
    (tmp_path / "runner" / "loaded_program.py").write_text(
        "def compiled(*args):\n    raise TypeError('(): incompatible')"
    )
    as_if_jax_were_new.setattr(installed, "_TRIAL", trial)
    reason = xla.why_no_xla()
    assert reason == (
        "jax 7.1.0rc2 with jaxlib 7.1.0rc2 does not run a small program as it should: TypeError: "
        '(): incompatible. Install a version that is known: pip install "jax<=0.12.0.1".'
    )
    with pytest.raises(xla.XlaMissingError, match="incompatible"):
        installed.check_installed("jax", "jaxlib")
    config = {"mesh_devices": None, "mesh_impl": None, "hooks": ()}
    chosen = choose_runtime(SimpleNamespace(runtime="fastest", **config))
    assert (chosen.name, reason in str(chosen)) == ("cpu_replicas", True)
    with pytest.raises(ConfigError, match=r"incompatible.*pip install"):
        choose_runtime(SimpleNamespace(runtime="xla", **config))


def test_other_devices_can_be_given():
    import jax

    with simd.tpu_program("all:2", "") as program:
        y = tf.ones([])
    with session(program, devices=jax.devices()[5:7]) as devices:
        assert devices.run(y, per_replica=True) == [1, 1]
        assert [d.id for d in devices.cores.devices] == [5, 6]


def test_a_program_without_effects_or_inputs_runs():
    with simd.tpu_program("all:2", "") as program:
        y = tf.constant([1.0, 2.0])
    with session(program) as devices:
        np.testing.assert_array_equal(devices.run(y), [1, 2])
        assert devices.variables() == {}
        with pytest.raises(ValueError, match="no variables to save"):
            devices.save("unused")


def test_an_input_made_from_what_the_program_returns_is_refused():
    x = tf.placeholder(tf.float32, [])
    with simd.tpu_program("all:1", "") as program:
        y = x + 1.0
        with tf.control_dependencies(None), tf.control_dependencies([y.op]):
            # Outside, where inputs are made; but after a part of the program.
            late = program.per_replica([tf.identity(x)])
        z = late * 2.0
    with session(program) as devices:
        with pytest.raises(ValueError, match="made from what the program returns"):
            devices.run(z, {x: 2.0})


def test_bad_feeds_leave_the_session_as_it_was():
    program, given, count, *_ = counting_program()
    with session(program) as devices:
        devices.run(count, {given: 1.0})
        with pytest.raises(ValueError, match="Cannot feed value of shape"):
            devices.run(count, {given: np.zeros(3)})
        with pytest.raises(tf.errors.InvalidArgumentError, match="must feed a value"):
            devices.run(count)
        assert devices.run(count, {given: 1.0}) == 2


@pytest.mark.slow
def test_checkpoints_cross_between_runtimes(tmp_path):
    """CPU replicas and XLA devices, both ways, with the moments of Adam."""
    model = Regression(lambda: mtf.optimize.AdamWeightDecayOptimizer(0.25), steps=4)
    model.placeholders()
    with simd.tpu_program(*MESHES["4x2"]) as program:
        lowering, loss, updates = model.build(program.mesh_impl)
    x, y = model.x, model.y
    runtimes = [session, lambda p, low: p.session(low)]
    for first, then in (runtimes, runtimes[::-1]):
        with first(program, lowering) as one:
            model.x, model.y = x[:2], y[:2]
            model.steps_in(one, updates)
            path = one.save(str(tmp_path / "model"))
            model.x, model.y = x[2:], y[2:]
            whole = model.steps_in(one, [loss, updates])
            variables = one.variables()
        with then(program, lowering) as other:
            other.restore(path)
            rest = model.steps_in(other, [loss, updates])
            again = other.variables()
        for name, value in variables.items():
            # Four steps of the same sums in two orders.
            close = 64 * np.finfo(np.float32).eps
            np.testing.assert_allclose(again[name], value, rtol=close, atol=close)
        np.testing.assert_allclose([r[0] for r in rest], [w[0] for w in whole], rtol=1e-5)
