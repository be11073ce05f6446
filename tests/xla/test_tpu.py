"""The real TPU compiler takes the training steps; their HLO computes what float64 computes."""

import json
import pathlib
import re

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import simd, xla
from mtf_gradsync._private.jax import hlo_from_text
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.mesh_tensorflow import SLICES_COLLECTION
from tests import models, reference
from tests.harness import MESHES
from tests.xla.test_collectives import FOUND, TEXT

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.skipif(bool(xla.why_no_tpu_compiler()), reason=xla.why_no_tpu_compiler()),
]

SHAPE, LAYOUT, BATCH_DIMS = MESHES["4x2"]
AXES = {"mesh_shape": SHAPE, "layout": LAYOUT, "batch_dims": BATCH_DIMS}

# name -> what makes it around an inner optimizer, and whether its gradients cross in a branch.
# A new wrapper is one more line.
WRAPPERS = {
    "bare": (lambda opt: opt, False),
    "cross_shard": (gs.CrossShardOptimizer, False),
    # Norms of the model's gradients are far below: the trajectory is the bare one.
    "clip": (lambda opt: gs.ClipByGlobalNormOptimizer(opt, clip_norm=1e6), False),
    "accumulate_local": (
        lambda opt: gs.GradientAccumulationOptimizer(opt, backward_passes_per_step=2, **AXES),
        True,
    ),
}


class Step:
    """A training step of the tests' model, as a SIMD program."""

    def __init__(self, wrapper, optimizer="adam"):
        feeds = models.mlp_batches(1)[0]
        self.inputs = {k: tf.placeholder(tf.float32, v.shape, k) for k, v in feeds.items()}
        with simd.tpu_program(SHAPE, LAYOUT) as self.program:
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            operations, fetches = models.train(
                lambda: WRAPPERS[wrapper][0](models.OPTIMIZERS[optimizer]()), BATCH_DIMS
            )(mesh, self.inputs)
            loss = mtf.anonymize(fetches["loss"])
            self.lowering = mtf.Lowering(graph, {mesh: self.program.mesh_impl})
            self.loss = self.lowering.export_to_tf_tensor(loss)
            for operation in operations:
                self.lowering.lowered_operation(operation)

    def feeds(self, batches):
        return [{self.inputs[k]: v for k, v in batch.items()} for batch in batches]


def all_reduces(collectives, **where):
    return [
        c
        for c in collectives
        if c.operation == "all-reduce" and all(getattr(c, k) is v for k, v in where.items())
    ]


@pytest.mark.parametrize("topology", ["v3:2x2", "v5e:2x4"])
@pytest.mark.parametrize("wrapper", list(WRAPPERS))
def test_the_compiler_takes_the_training_step(wrapper, topology):
    step = Step(wrapper)
    compiled = xla.compile_for_tpu(step.program, [step.loss], topology)
    assert compiled.accepted, compiled.error
    in_branch = WRAPPERS[wrapper][1]
    for found in (compiled.before, compiled.after, compiled.after_unsharded):
        gradients = [c for c in all_reduces(found) if c.bytes_per_core >= 30 * 4]
        if wrapper != "bare":
            assert [c.is_conditional for c in gradients] == [in_branch]
            assert gradients[0].groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    # Updates are not dead code: new values are written over the old ones.
    variables = sum(
        4 * int(np.prod(v.shape.as_list()))
        for v in step.program.graph.get_collection(SLICES_COLLECTION)
        if v.op.name.endswith("_slice_0")
    )
    assert compiled.memory.aliased >= variables > 0
    assert all(compiled.fits().values())
    assert json.loads(compiled.to_json())["fits"]["v3"] is True
    assert "does not fit on: none" in str(compiled)


def test_wrapping_leaves_one_all_reduce_for_all_gradients():
    counts = {}
    for wrapper in ("bare", "cross_shard"):
        with tf.Graph().as_default():
            step = Step(wrapper)
            compiled = xla.compile_for_tpu(step.program, [step.loss])
        counts[wrapper] = len(all_reduces(compiled.before))
    # The forward pass has two; bare Mesh-TF sums each of the four gradients on its own.
    assert counts == {"bare": 2 + 4, "cross_shard": 2 + 1}


class Conditional:
    """Every second step, and only then, sums over the cores and assigns."""

    def __init__(self):
        self.x = tf.placeholder(tf.float32, [4], "x")
        parts = [self.x * float(core) for core in range(8)]
        with tf.variable_scope("", use_resource=True):
            zeros = tf.zeros_initializer()
            total = tf.get_variable("total", [4], initializer=zeros)
            count = tf.get_variable("count", [], tf.int32, initializer=zeros)
        with simd.tpu_program("all:8", "batch:all") as self.program:
            mine = self.program.per_replica(parts)
            now = tf.identity(count.read_value())

            def update():
                summed = tf.tpu.cross_replica_sum(mine, [list(range(8))])
                with tf.control_dependencies([total.assign_add(summed)]):
                    return tf.reduce_sum(summed)

            def turn(i, x):
                pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]
                return i + 1, tf.tpu.cross_replica_sum(x, pairs) * 0.5

            self.updated = tf.cond(tf.equal(now % 2, 1), update, lambda: tf.zeros([]))
            _, self.averaged = tf.while_loop(lambda i, x: i < 3, turn, [tf.constant(0), mine])
            count.assign_add(1)

    @property
    def fetches(self):
        return [self.updated, self.averaged]


@pytest.mark.parametrize("topology", ["v3:2x2", "v5e:2x4"])
def test_collectives_stay_in_their_branch_and_loop(topology, tmp_path):
    conditional = Conditional()
    compiled = xla.compile_for_tpu(
        conditional.program, conditional.fetches, topology, save_hlo=tmp_path
    )
    assert compiled.accepted, compiled.error
    for found in (compiled.before, compiled.after, compiled.after_unsharded):
        (in_branch,) = all_reduces(found, is_conditional=True)
        (in_loop,) = all_reduces(found, is_in_loop=True)
        assert len(all_reduces(found)) == 2
        assert in_branch.bytes_per_core == in_loop.bytes_per_core == 4 * 4
        assert in_branch.inside[0].startswith("branch ")
        assert in_loop.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    for stage in ("before", "after"):
        text = (tmp_path / f"{stage}.hlo.txt").read_text()
        assert xla.find_hlo_collectives(hlo_from_text(text)) == list(getattr(compiled, stage))


def test_modules_that_xla_reads_from_text_hold_the_same_collectives():
    found = xla.find_hlo_collectives(hlo_from_text(TEXT))
    # XLA writes a module without a schedule in an order of its own.
    expected = [xla.HloCollective(*facts) for facts in FOUND]
    assert sorted(found, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize(
    ("spelled", "groups"),
    [
        ("{}", ()),
        ("{{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("[1,4]<=[4]", ((0, 1, 2, 3),)),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
    ],
)
def test_groups_that_xla_reads_from_text_are_the_same(spelled, groups):
    text = f"""HloModule m
    ENTRY main {{
      x = f32[4] parameter(0)
      ROOT g = f32[16] all-gather(x), replica_groups={spelled}, dimensions={{0}}
    }}"""
    (found,) = xla.find_hlo_collectives(hlo_from_text(text))
    assert found.groups == groups


def test_hlo_of_branches_and_loops_computes_what_it_says():
    conditional = Conditional()
    x = np.array([1.0, -2.0, 0.5, 4.0], np.float32)
    steps = 4
    run = xla.run_on_cpu_devices(
        conditional.program, None, conditional.fetches, [{conditional.x: x}] * steps
    )
    total = sum(range(8)) * x
    averaged = [(c // 2 * 2 + 0.5) * x for c in range(8)]  # the mean of a pair of cores
    for step, (updated, average) in enumerate(run.fetched):
        np.testing.assert_array_equal(updated, [total.sum() * (step % 2)] * 8)
        np.testing.assert_array_equal(average, averaged)
    np.testing.assert_array_equal(run.variables["total"], total * (steps // 2))
    assert run.variables["count"] == steps


def test_nested_branches_and_loops_compute_what_they_say():
    x = tf.placeholder(tf.float32, [])
    with tf.variable_scope("", use_resource=True):
        zeros = tf.zeros_initializer()
        count, visits = (tf.get_variable(n, [], initializer=zeros) for n in ("count", "visits"))
    with simd.tpu_program("all:2", "batch:all") as program:
        positive = tf.greater(x, 0.0)

        def turn(i, a):
            def even():
                with tf.control_dependencies([visits.assign_add(1.0)]):
                    return tf.tpu.cross_replica_sum(a, [[0, 1]])

            return i + 1, tf.cond(tf.equal(i % 2, 0), even, lambda: a + 1.0)

        def loop():
            return tf.while_loop(lambda i, a: i < 4, turn, [tf.constant(0), x])[1]

        first = tf.cond(positive, loop, lambda: -x)
        # Shares its predicate with the first, and waits for it.
        second = tf.cond(positive, lambda: first + 0.5, lambda: first)
        with tf.control_dependencies([second.op]):
            count.assign_add(second)
    run = xla.run_on_cpu_devices(program, None, [first, second], [{x: v} for v in (3.0, -2.0)])
    # (3 + 3 + 1) doubled, and 1
    assert [[f.tolist() for f in step] for step in run.fetched] == [
        [[15.0, 15.0], [15.5, 15.5]],
        [[2.0, 2.0], [2.0, 2.0]],
    ]
    assert run.variables == {"count": 17.5, "visits": 2.0}


@pytest.mark.parametrize("wrapper", list(WRAPPERS))
@pytest.mark.parametrize("optimizer", ["adam"])
def test_hlo_of_the_training_step_equals_float64(wrapper, optimizer):
    batches = models.mlp_batches(4)
    step = Step(wrapper, optimizer)
    run = xla.run_on_cpu_devices(step.program, step.lowering, [step.loss], step.feeds(batches))
    update = reference.OPTIMIZERS[optimizer]()
    if wrapper.startswith("accumulate"):
        update = reference.Accumulation(update, passes=2)
    for name, value in reference.train(update, batches).items():
        np.testing.assert_allclose(run.variables[name], value, rtol=3e-6, atol=3e-7, err_msg=name)
    losses = np.array(run.fetched)[:, 0]
    np.testing.assert_array_equal(losses, losses[:, :1].repeat(8, axis=1))


def test_a_program_that_needs_too_much_memory_is_refused_with_the_numbers():
    x = tf.placeholder(tf.float32, [2**17])
    with simd.tpu_program("all:8", "batch:all") as program:
        y = tf.cos(x[:, tf.newaxis] + x)  # 64 GiB
    compiled = xla.compile_for_tpu(program, [y], "v5e:2x4")
    assert not compiled.accepted
    assert "the TPU compiler: RESOURCE_EXHAUSTED" in compiled.error
    assert compiled.memory is None
    assert compiled.fits() == {}
    assert "refused: the TPU compiler" in str(compiled)
    assert json.loads(compiled.to_json())["accepted"] is False


def test_an_operation_without_xla_kernel_is_refused_by_name():
    x = tf.placeholder(tf.float32, [4])
    with simd.tpu_program("all:8", "batch:all") as program:
        y = tf.strings.to_number(tf.strings.as_string(x))
    compiled = xla.compile_for_tpu(program, [y])
    assert "TensorFlow's bridge to XLA" in compiled.error
    assert "AsString" in compiled.error


@pytest.mark.parametrize(
    ("topology", "message"),
    [("v3:4x4", "has 32 cores and the program's mesh 8"), ("v3:3x5", "does not know")],
)
def test_a_topology_that_does_not_match_is_refused(topology, message):
    with simd.tpu_program("all:8", "batch:all") as program:
        y = tf.ones([])
    with pytest.raises(ValueError, match=message):
        xla.compile_for_tpu(program, [y], topology)


def test_a_compiler_that_dies_leaves_its_last_words(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with simd.tpu_program("all:8", "batch:all") as program:
        y = tf.ones([])
    with pytest.raises(xla.CompilerDiedError, match="status 1 and no answer"):
        xla.compile_for_tpu(program, [y])


def test_code_of_the_guide_runs(capsys):
    guide = (pathlib.Path(__file__).parents[2] / "docs" / "tpu.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    exec(code, {})
    assert "topology v3:2x2 (TPU v3), 8 cores\naccepted" in capsys.readouterr().out
