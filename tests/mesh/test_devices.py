"""Processors of one memory keep and compute once what they have in common."""

import itertools
import pathlib
import re

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.step.conditional import Branch, Conditional
from mtf_gradsync.step.plan import StepPlan
from tests import harness, models, reference

STEPS = 5
# As for trajectories on Mesh-TF's mesh: a few ulp of values around 1 a step.
TOLERANCE = STEPS * 16 * np.finfo(np.float32).eps
K = 2
MESHES = {name: mesh[:2] for name, mesh in harness.MESHES.items()}
DEVICES = [f"/device:CPU:{i}" for i in range(8)]


def ours(mesh_shape, layout, **kwargs):
    size = mtf.convert_to_shape(mesh_shape).size
    return gs.placement_mesh_impl(mesh_shape, layout, DEVICES[:size], **kwargs)


def wrap(kind, mesh, optimizer):
    mesh_shape, layout, batch_dims = harness.MESHES[mesh]
    opt = gs.CrossShardOptimizer(models.OPTIMIZERS[optimizer]())
    if kind == "alone":
        return opt
    where = {"mesh_shape": mesh_shape, "layout": layout, "batch_dims": batch_dims}
    return gs.GradientAccumulationOptimizer(opt, K, **(where if kind == "local" else {}))


KINDS_AND_OPTIMIZERS = list(
    itertools.product(["alone", "local", "synced"], ["adafactor", "adam", "momentum"])
)


# Every optimizer in every wrapper, and each of them on both meshes.
@pytest.mark.parametrize(
    ("mesh", "kind", "optimizer"),
    [(mesh, *case) for mesh, case in harness.pairs(["4x2", "2x2x2"], KINDS_AND_OPTIMIZERS)],
)
@pytest.mark.mostly_slow
def test_training_equals_numpy(mesh, kind, optimizer):
    feeds = models.mlp_batches(STEPS)
    mesh_shape, layout, batch_dims = harness.MESHES[mesh]
    build = models.train(lambda: wrap(kind, mesh, optimizer), batch_dims)
    result = harness.run("shared", mesh_shape, layout, build, feeds)
    update = reference.OPTIMIZERS[optimizer]()
    if kind != "alone":
        update = reference.Accumulation(update, K)
    reference.assert_close(result.variables, reference.train(update, feeds), TOLERANCE)


def test_two_runs_are_bitwise_the_same():
    build = models.train(lambda: wrap("alone", "4x2", "momentum"))
    runs = harness.run("shared", *MESHES["4x2"], build, models.mlp_batches(STEPS), repeats=8)
    for name, value in runs[0].variables.items():
        assert len({run.variables[name].tobytes() for run in runs}) == 1, (name, value)


def slices_of(mesh_impl, dims):
    """The tf variables of a mesh variable with dimensions of 8, one for each processor."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        shape = mtf.Shape([mtf.Dimension(name, 8) for name in dims])
        value = mtf.get_variable(mesh, "v", shape)
        lowering = mtf.Lowering(graph, {mesh: mesh_impl}, autostack=False)
        return lowering.variables[value.operation].laid_out_tensor.all_slices


@pytest.mark.parametrize(("dims", "number"), [("xy", 1), (["x", "hidden"], 2), (["batch"], 4)])
def test_a_variable_is_kept_once_for_each_part(dims, number):
    slices = slices_of(ours(*MESHES["4x2"]), dims)
    assert len({id(x) for x in slices}) == number
    if number == 2:
        assert [id(x) == id(slices[0]) for x in slices] == [True, False] * 4
    apart = slices_of(ours(*MESHES["4x2"], share_copies=False), dims)
    assert len({id(x) for x in apart}) == 8


def test_each_process_keeps_its_own():
    devices = [f"/job:worker/task:{t}/device:CPU:{d}" for t in range(2) for d in range(4)]
    slices = slices_of(gs.placement_mesh_impl(*MESHES["4x2"], devices), "xy")
    assert len({id(x) for x in slices}) == 2
    tasks = [tf.DeviceSpec.from_string(x.device).task for x in slices]
    assert tasks == [0] * 4 + [1] * 4


class AddsOn(mtf.Operation):
    """Adds to each processor's slice of a variable, by the door or past it."""

    def __init__(self, variable, past):
        super().__init__([variable.value], name="adds_on")
        self._variable, self._past = variable, past

    def lower(self, lowering):
        laid_out, mesh_impl = lowering.variables[self._variable], lowering.mesh_impl(self)
        slices = laid_out.laid_out_tensor.all_slices
        if self._past:
            done = mtf.parallel(mesh_impl.devices, lambda x: tf.assign_add(x, x * 0 + 1), [*slices])
        else:
            done = laid_out.assign_to_slices(
                lambda _, x, value: tf.assign_add(x, value), [tf.ones_like(x) for x in slices]
            )
        lowering.operations[self] = tf.group(done)


@pytest.mark.parametrize(
    ("dims", "past", "conditional", "shares", "refused"),
    [
        ("xy", True, False, True, True),
        ("xy", True, True, True, True),  # in a branch's function
        ("xy", False, True, True, False),
        ("xy", True, False, False, False),  # each processor has its own
    ],
)
def test_a_shared_slice_is_written_by_the_door_or_not_at_all(
    dims, past, conditional, shares, refused
):
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        shape = mtf.Shape([mtf.Dimension(name, 8) for name in dims])
        variable = models.variable(mesh, "v", shape).operation
        if conditional:
            plan = StepPlan.of(graph)
            branch = Branch(plan)
            with branch.opened():
                branch.updates.append(AddsOn(variable, past))
            due = mtf.constant(mesh, True, mtf.Shape([]), tf.bool)
            (operation,) = Conditional(due, None, branch, (), True).updates
        else:
            operation = AddsOn(variable, past)
        meshes = {mesh: ours(*MESHES["4x2"], share_copies=shares)}
        if refused:
            with pytest.raises(ValueError, match="'v', which several processors share") as error:
                mtf.Lowering(graph, meshes, autostack=False)
            assert "assign_to_slices" in str(error.value)
            return
        lowering = mtf.Lowering(graph, meshes, autostack=False)
        add = lowering.lowered_operation(operation)
        with tf.Session(config=gs.session_config(num_cpu_devices=8)) as session:
            session.run([tf.global_variables_initializer()])
            session.run(lowering.copy_masters_to_slices())
            for _ in range(3):
                session.run(add)
            session.run(lowering.copy_slices_to_masters())
            (value,) = session.run(tf.global_variables())
    np.testing.assert_array_equal(value, np.full([8] * len(dims), 3.0))


# Files that write tf variables themselves. The slices of a mesh variable are written by the door
# (`WriteInPlace`, `write_slices`, `assign_to_slices`), from a function that it is given.
BY_THE_DOOR = {
    "optimizers/average.py", "optimizers/pipeline/accumulators.py", "optimizers/step_reports.py",
    "optimizers/skips.py", "step/writes.py",
}  # fmt: skip
NO_SLICES = {
    "_private/mesh_tensorflow.py", "_private/tensorflow.py",  # masters, the global step
    "compat_v1/accumulation.py",  # optimizers off the mesh
    # Step counters of TensorFlow; `step/writes.py` has those of wrappers, too.
    "tools/estimator/spec_builder.py", "tools/train/train_graph.py",
    "tools/train/verifying.py",
    "runtimes/saving.py",  # initial values of masters
    "_private/patches.py", "runtimes/xla/bridge.py",  # states of random numbers
    "tools/train/data/batches.py",  # how many examples a data set has drawn
}  # fmt: skip


def test_nothing_else_of_the_package_writes_tf_variables():
    writes = re.compile(r"(?<!mtf)\.assign(_add|_sub)?\b(?!_)|Assign(Add|Sub)?VariableOp\(")
    root = pathlib.Path(gs.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if writes.search(re.sub("#.*", "", path.read_text(encoding="utf-8")))
    }
    assert found == BY_THE_DOOR | NO_SLICES


def test_gpus_keep_their_own():
    devices = [f"/device:GPU:{i}" for i in range(8)]
    slices = slices_of(gs.placement_mesh_impl(*MESHES["4x2"], devices), "xy")
    assert [x.device for x in slices] == devices


def test_random_numbers_stay_each_processors_own():
    mesh_impl = ours(*MESHES["8"])
    drawn = mesh_impl.slicewise(lambda: tf.random.uniform([4]))
    same = mesh_impl.slicewise(lambda: tf.zeros([4]))
    assert len({x.name for x in drawn.tensor_list}) == 8
    assert len({x.name for x in same.tensor_list}) == 1
    with tf.Session(config=gs.session_config(num_cpu_devices=8)) as session:
        assert len({x.tobytes() for x in session.run(drawn.tensor_list)}) == 8


def test_what_differs_in_one_input_is_computed_for_each():
    mesh_impl = ours(*MESHES["4x2"])
    common = mesh_impl.LaidOutTensor([tf.ones([2])] * 8)
    pairs = mesh_impl.LaidOutTensor([x for x in [tf.zeros([2]), tf.ones([2])] for _ in range(4)])
    total, other = mesh_impl.slicewise(lambda a, b: (a + b, a - b), common, pairs)
    assert len({x.name for x in total.tensor_list}) == 2
    number = mesh_impl.slicewise(lambda a, n: a * n, common, mesh_impl.laid_out_pnum())
    with tf.Session(config=gs.session_config(num_cpu_devices=8)) as session:
        values = session.run([total.tensor_list, other.tensor_list, number.tensor_list])
    expected = [[1] * 4 + [2] * 4, [1] * 4 + [0] * 4, range(8)]
    np.testing.assert_array_equal(
        values, np.repeat(np.array([*map(list, expected)]), 2).reshape(3, 8, 2)
    )


def test_dropout_differs_between_shards_and_not_between_copies():
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        dims = [mtf.Dimension("batch", 8), mtf.Dimension("d", 64)]
        noise = mtf.random_uniform(mesh, mtf.Shape(dims))
        lowering = mtf.Lowering(graph, {mesh: ours(*MESHES["4x2"])})
        slices = lowering.tensors[noise].to_laid_out_tensor().tensor_list
        with tf.Session(config=gs.session_config(num_cpu_devices=8)) as session:
            values = [x.tobytes() for x in session.run(slices)]
    assert values[0::2] == values[1::2]
    assert len({*values}) == 4
