"""The real TPU compiler takes the training steps."""

import contextlib
import functools
import json
from unittest import mock

import numpy as np
import pytest

import mtf_gradsync as gs
from benchmarks import models as model_of_benchmarks
from benchmarks.hlo import hlo_from_text
from mtf_gradsync import reduce, simd, xla
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.reduce import parts
from mtf_gradsync.runtimes._private.mesh_tensorflow import SLICES_COLLECTION
from mtf_gradsync.runtimes.xla.hlo_collectives import bytes_by_operation
from mtf_gradsync.runtimes.xla.topology.compiling import compile_lowered, lower
from tests import models
from tests.harness import MESHES, pairs
from tests.runtimes.xla.programs import Conditional
from tests.tools.planning.machines import LAYOUT as LAYER
from tests.tools.planning.machines import build as small_layer
from tests.wrappers import wrap

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.skipif(bool(xla.why_no_tpu_compiler()), reason=xla.why_no_tpu_compiler()),
]

SHAPE, LAYOUT, BATCH_DIMS = MESHES["4x2"]
AXES = {"mesh_shape": SHAPE, "layout": LAYOUT, "batch_dims": BATCH_DIMS}

# Norms of the model's gradients are far below that of "clip": the trajectory is the bare one.
WRAPPERS = ["bare", "cross_shard", "clip", "local"]


class Step:
    """A training step of the tests' model, as a SIMD program."""

    def __init__(self, wrapper):
        feeds = models.mlp_batches(1)[0]
        self.inputs = {k: tf.placeholder(tf.float32, v.shape, k) for k, v in feeds.items()}
        with simd.tpu_program(SHAPE, LAYOUT) as self.program:
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            opt = models.OPTIMIZERS["adam"]()
            opt = opt if wrapper == "bare" else wrap(wrapper, opt, AXES)
            operations, fetches = models.train(lambda: opt, BATCH_DIMS)(mesh, self.inputs)
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
        if c.operation == "all-reduce" and all(getattr(c, k) == v for k, v in where.items())
    ]


def check_taken(compiled, wrapper, step):
    """A step is accepted, with its sums where they should be, and fits."""
    assert compiled.accepted, compiled.error
    for found in (compiled.before, compiled.after, compiled.after_unsharded):
        # The loss is a sum over the replicas, too, of one number.
        replicas = all_reduces(found, groups=((0, 2, 4, 6), (1, 3, 5, 7)))
        gradients = [c for c in replicas if c.bytes_per_core > 4]
        if wrapper != "bare":
            assert {c.is_conditional for c in gradients} == {wrapper == "local"}
            # The compiler combines sums that stand beside each other.
            assert found is compiled.before or len(gradients) == 1
    # Updates are not dead code: new values are written over the old ones.
    variables = sum(
        4 * int(np.prod(v.shape.as_list()))
        for v in step.program.graph.get_collection(SLICES_COLLECTION)
        if v.op.name.endswith("_slice_0")
    )
    assert compiled.memory.aliased >= variables > 0
    assert all(compiled.fits().values())
    assert json.loads(compiled.to_json())["fits"]["v3"] is True
    assert "fits on all of these" in str(compiled)


# What is compared with a bare step, below, is taken too.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrapper", "topology"), pairs(sorted({*WRAPPERS} - {"cross_shard"}), ["v5e:2x4", "v3:2x2"])
)
def test_the_compiler_takes_the_training_step(wrapper, topology):
    step = Step(wrapper)
    compiled = xla.compile_for_tpu(step.program, [step.loss], topology, update_not_split=True)
    check_taken(compiled, wrapper, step)
    if wrapper == "local":
        # The estimate of a step with its branch is larger than of one without.
        update, other = (compiled.estimates[f"conditions_{v}"] for v in ("true", "false"))
        assert update.bytes_accessed > other.bytes_accessed > 0
        assert update.seconds > other.seconds > 0
        if topology == "v5e:2x4":
            check_branches(step, compiled)


def check_branches(step, compiled):
    """One compilation tells from its branches what three tell."""
    once = compile_lowered(lower(step.program, [step.loss]), compiled.topology, by_branches=True)
    assert once.memory == compiled.memory
    assert {*once.estimates} == {"step", "conditions_true", "conditions_false"}
    for name, estimate in once.estimates.items():
        # A conditional takes some nanoseconds, which is much of the time of so small a program.
        assert estimate.seconds == pytest.approx(compiled.estimates[name].seconds, abs=2e-9)
    update, other = (once.estimates[f"conditions_{v}"] for v in ("true", "false"))
    assert update.seconds > other.seconds >= once.estimates["step"].seconds
    # Without the conditional the loss's sum is joined with that of gradients.
    for one, three in ((once.of_update, compiled.of_update),
                       (once.of_skipped_step, compiled.of_skipped_step)):  # fmt: skip
        assert sum(x.bytes_per_core for x in one) == sum(x.bytes_per_core for x in three)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v3:2x2", "v5e:2x4"])
def test_a_wrapper_costs_what_bare_mesh_tensorflow_does(topology):
    steps = {}
    for wrapper in ("bare", "cross_shard"):
        with tf.Graph().as_default():
            steps[wrapper] = Step(wrapper)
    step, bare = steps["cross_shard"], steps["bare"]
    compiled = xla.compile_for_tpu(
        step.program,
        [step.loss],
        topology,
        bare=bare.program,
        update_not_split=True,
        bare_fetches=[bare.loss],
    )
    check_taken(compiled, "cross_shard", step)
    assert "bare_fetches" not in str(compiled)
    ours, theirs = compiled.estimates["step"], compiled.estimates["bare"]
    assert ours.seconds <= theirs.seconds > 0
    assert ours.bytes_accessed <= theirs.bytes_accessed > 0
    assert "of bare" in str(compiled)


@pytest.mark.slow
def test_sharded_updates_cost_less_than_the_bare_step():
    """Of many equal layers by Adam, which has slots to save; each kind of variable crosses once."""
    model = model_of_benchmarks.dense(layers=8)

    def program(wrap):
        made = []

        @contextlib.contextmanager
        def block():
            with simd.tpu_program(model.mesh_shape, model.layout) as program:
                made.append(program)
                yield program.mesh_impl

        step = model._replace(make_optimizer=lambda: wrap(model.make_optimizer()))
        model_of_benchmarks.build(step, model_of_benchmarks.BARE, block)
        return made[0]

    sharded, plain = program(gs.ShardedUpdateOptimizer), program(lambda opt: opt)
    compiled = xla.compile_for_tpu(sharded, (), "v5e:2x4", bare=plain)
    ours, bare = compiled.estimates["step"], compiled.estimates["bare"]
    assert ours.seconds < 0.9 * bare.seconds
    assert ours.bytes_accessed < 0.9 * bare.bytes_accessed
    assert [c.operation for c in compiled.after].count("all-gather") == 1
    assert not compiled.after_unsharded


@pytest.mark.slow
def test_an_update_that_the_compiler_splits_sends_what_one_all_reduce_does():
    """By Adafactor, with gradients in bfloat16 and variables in float32."""
    x = tf.placeholder(tf.float32, [64, 512])
    with simd.tpu_program("batch:8", "batch:batch") as program:
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        rows, wide = mtf.Dimension("batch", 64), mtf.Dimension("wide", 2048)
        narrow = mtf.Dimension("narrow", 512)
        dtype = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)
        values = [
            mtf.get_variable(mesh, name, shape, dtype=dtype)
            for name, shape in (("w", [narrow, wide]), ("v", [wide, narrow]))
        ]
        h = mtf.cast(mtf.import_tf_tensor(mesh, x, [rows, narrow]), tf.bfloat16)
        h = mtf.relu(mtf.einsum([h, values[0]], reduced_dims=[narrow]))
        h = mtf.einsum([h, values[1]], reduced_dims=[wide])
        loss = mtf.reduce_mean(mtf.square(mtf.cast(h, tf.float32)))
        variables = graph.trainable_variables
        grads = mtf.gradients([loss], [v.outputs[0] for v in variables])
        updates = mtf.optimize.AdafactorOptimizer(learning_rate=0.01).apply_grads(grads, variables)
        lowering = mtf.Lowering(graph, {mesh: program.mesh_impl})
        fetched = lowering.export_to_tf_tensor(loss)
        for update in updates:
            lowering.lowered_operation(update)
    compiled = xla.compile_for_tpu(program, [fetched], "v5e:2x4")
    numbers = 2 * 512 * 2048
    sizes = {name: size for name, (_, size) in bytes_by_operation(compiled.after).items()}
    assert sizes["reduce-scatter"] == 2 * numbers
    assert sizes["all-gather"] == 4 * numbers / 8
    # Statistics of rows and columns, and the loss.
    assert sizes["all-reduce"] < 0.05 * numbers


@pytest.mark.slow
def test_collectives_stay_in_their_branch_and_loop(tmp_path):
    conditional = Conditional()
    compiled = xla.compile_for_tpu(
        conditional.program,
        conditional.fetches,
        "v3:2x2",
        save_hlo=tmp_path,
        update_not_split=True,
    )
    assert compiled.accepted, compiled.error
    for found in (compiled.before, compiled.after, compiled.after_unsharded):
        (in_branch,) = all_reduces(found, is_conditional=True)
        (in_loop,) = all_reduces(found, is_in_loop=True)
        assert len(all_reduces(found)) == 2
        assert in_branch.bytes_per_core == in_loop.bytes_per_core == 4 * 4
        assert in_branch.inside[0].startswith("branch ")
        assert in_loop.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    # In a step with all conditions true the branch's sum runs, beside the loop's.
    update = all_reduces(compiled.of_update)
    assert [c.is_conditional for c in update] == [False, False]
    assert sorted(c.is_in_loop for c in update) == [False, True]
    for stage in ("before", "after"):
        text = (tmp_path / f"{stage}.hlo.txt").read_text()
        assert xla.find_hlo_collectives(hlo_from_text(text)) == list(getattr(compiled, stage))


@pytest.mark.slow
def test_the_estimate_has_every_turn_of_a_loop():
    """Of three products in a loop, as of three one after the other."""

    def estimate(multiplied):
        with tf.Graph().as_default():
            x = tf.placeholder(tf.bfloat16, [2048, 2048])
            with simd.tpu_program("all:8", "batch:all") as program:
                y = tf.reduce_sum(multiplied(x))
            return xla.compile_for_tpu(program, [y], "v5e:2x4").estimates["step"]

    def times(x, y):
        return tf.sin(tf.matmul(x, y))

    def loop(x):
        turn = lambda i, y: (i + 1, times(x, y))  # noqa: E731
        return tf.while_loop(lambda i, y: i < 3, turn, [tf.constant(0), x])[1]

    looped = estimate(loop)
    in_line = estimate(lambda x: functools.reduce(lambda y, _: times(x, y), range(3), x))
    assert looped.loops_counted_once == 0
    # Of 3 * 2 * 2048**3 of the products, counters and sines are less than a hundredth.
    assert looped.flops == pytest.approx(in_line.flops, rel=0.01)
    # One product takes 0.09 ms at the chip's peak; half of a copy of what the loop carries on, of
    # 8 MB read and written, takes 0.01 ms.
    assert looped.seconds == pytest.approx(in_line.seconds, rel=0.01 / 0.09)


@pytest.mark.slow
def test_every_collective_is_compiled():
    """As a relayout, a halo exchange and a mixture of experts have them."""
    x = tf.placeholder(tf.float32, [16, 128])
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    with simd.tpu_program("all:8", "batch:all") as program:
        moved = tf.raw_ops.AllToAll(
            input=x * 2.0,
            group_assignment=groups,
            concat_dimension=1,
            split_dimension=0,
            split_count=4,
        )
        shifted = tf.raw_ops.CollectivePermute(
            input=tf.sin(moved), source_target_pairs=[[i, (i + 1) % 8] for i in range(8)]
        )
        y = tf.reduce_sum(tf.tpu.cross_replica_sum(shifted, groups))
    compiled = xla.compile_for_tpu(program, [y], "v5e:2x4")
    assert compiled.accepted, compiled.error
    for found in (compiled.before, compiled.after):
        kinds = {c.operation.removesuffix("-start") for c in found}
        assert kinds == {"all-to-all", "collective-permute", "all-reduce"}
    (exchange,) = [c for c in compiled.before if c.operation == "all-to-all"]
    assert exchange.groups == ((0, 1, 2, 3), (4, 5, 6, 7))


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


@pytest.mark.slow
def test_a_program_that_needs_too_much_memory_is_refused_with_the_numbers():
    x = tf.placeholder(tf.float32, [])
    with simd.tpu_program("all:8", "batch:all") as program:
        whole = tf.zeros([2**17, 2**16]) + x  # 32 GiB
        _, whole = tf.while_loop(
            lambda i, w: i < 3,
            lambda i, w: (i + 1, tf.roll(w, 1, 0) * 2.0),
            [tf.constant(0), whole],
        )
        y = tf.reduce_sum(whole)
    compiled = xla.compile_for_tpu(program, [y], "v5e:2x4")
    assert not compiled.accepted
    assert "the TPU compiler: RESOURCE_EXHAUSTED" in compiled.error
    assert compiled.memory is None
    assert compiled.fits() == {}
    assert "refused: the TPU compiler" in str(compiled)
    assert json.loads(compiled.to_json())["accepted"] is False


@pytest.mark.slow
def test_a_bare_program_that_is_refused_leaves_the_other_one_its_answer():
    # 2**33 rows of 32 bytes on 8 cores: 32 GiB on each, and more elements than a TPU can count.
    with tf.Graph().as_default():
        bare = small_layer("batch:8", LAYER, batch=2**33).program
    step = small_layer("batch:8", LAYER, batch=64)
    compiled = xla.compile_for_tpu(step.program, step.fetches, "v5e:2x4", bare=bare)
    assert compiled.accepted, compiled.error
    assert set(compiled.estimates) == {"step"}
    assert compiled.bare_memory is None
    (reason,) = compiled.not_estimated.values()
    assert reason.partition(":")[0] in ("UNIMPLEMENTED", "RESOURCE_EXHAUSTED")
    assert f"bare optimizer: refused: {reason}" in str(compiled).splitlines()
    assert compiled.of_update == compiled.after
    assert "The bare step returns less than this one: give" in str(compiled)


@pytest.mark.slow
def test_a_bare_program_that_tensorflow_refuses_leaves_the_other_one_its_answer():
    bare, texts = _without_kernel()
    step = small_layer("batch:8", LAYER, batch=64)
    compiled = xla.compile_for_tpu(
        step.program, step.fetches, "v5e:2x4", bare=bare, bare_fetches=texts
    )
    assert compiled.accepted, compiled.error
    assert "AsString" in compiled.not_estimated["bare"]


def test_a_bare_program_of_another_mesh_is_an_error():
    with tf.Graph().as_default():
        bare = small_layer("batch:4", LAYER, batch=64).program
    step = small_layer("batch:8", LAYER, batch=64)
    with pytest.raises(ValueError, match="bare program has 4 cores and the program 8"):
        xla.compile_for_tpu(step.program, step.fetches, "v5e:2x4", bare=bare)


@pytest.mark.slow
def test_an_operation_without_xla_kernel_is_refused_by_name(tmp_path):
    (tmp_path / "after.hlo.txt").write_text("of another program")
    compiled = xla.compile_for_tpu(*_without_kernel(), save_hlo=tmp_path)
    assert "bridge to XLA refuses" in compiled.error
    assert "AsString" in compiled.error
    assert not list(tmp_path.iterdir())


def _without_kernel():
    with tf.Graph().as_default():
        x = tf.placeholder(tf.float32, [4])
        with simd.tpu_program("all:8", "batch:all") as program:
            y = tf.strings.to_number(tf.strings.as_string(x))
    return program, [y]


@pytest.mark.parametrize("topology", ["v3", "3:2x2", "v1:2x2", "", None])
def test_a_topology_that_is_none_is_refused_before_anything_else(topology):
    with simd.tpu_program("all:8", "batch:all") as program:
        y = tf.ones([])
    with pytest.raises(ValueError, match="'v3:2x2'"):
        xla.compile_for_tpu(program, [y], topology)


@pytest.mark.parametrize(
    ("topology", "message"),
    [("v3:4x4", "has 32 cores and the program's mesh 8"), ("v3:3x5", "does not know")],
)
@pytest.mark.slow
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


@pytest.mark.slow
def test_the_compiler_keeps_reduce_scatters_over_all_cores_of_a_square_slice():
    """Of one over all 16 cores it makes an all-reduce, which sends twice the bytes."""
    rows, columns = 2048, 768
    found = {}
    for at_once in (8, 16):
        with mock.patch.object(parts, "_SCATTERED_AT_ONCE", at_once):
            with tf.Graph().as_default():
                x = tf.placeholder(tf.float32, [rows, columns])
                with simd.tpu_program("all:16", "") as program:
                    impl = program.mesh_impl
                    groups = reduce.ProcessorGroups.along(impl, [0])
                    given = [impl.LaidOutTensor([x])]
                    (part,) = parts.reduce_scatter(impl, given, groups, [[parts.Cut(0, 0)]])
                compiled = xla.compile_for_tpu(program, part.tensor_list, "v5e:4x4")
        found[at_once] = [(c.operation, c.bytes_per_core) for c in compiled.after]
    size = 4 * rows * columns
    assert found == {
        8: [("reduce-scatter", size), ("reduce-scatter", size // 8)],
        16: [("all-reduce", size)],
    }
