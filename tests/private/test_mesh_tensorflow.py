"""What is used of Mesh-TensorFlow without a public name still means what it did."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from mtf_gradsync import simd
from mtf_gradsync._private import mesh_tensorflow, patches
from mtf_gradsync._private import mesh_tensorflow as private
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.interface import DeferredUpdate
from mtf_gradsync.runtimes._private import mesh_tensorflow as of_runtimes
from mtf_gradsync.step.plan import StepPlan

ROWS, COLUMNS = mtf.Dimension("rows", 4), mtf.Dimension("columns", 2)


@pytest.fixture
def mesh():
    return mtf.Mesh(mtf.Graph(), "mesh")


@pytest.fixture
def x(mesh):
    values = np.arange(8, dtype="f").reshape(4, 2)
    return mtf.import_tf_tensor(mesh, tf.constant(values), mtf.Shape([ROWS, COLUMNS]))


def lower(mesh, size=2, **more):
    shape = f"all:{size}"
    mesh_impl = mtf.placement_mesh_impl.PlacementMeshImpl(shape, "rows:all", [""] * size)
    return mtf.Lowering(mesh.graph, {mesh: mesh_impl}, **more)


def run(fetches):
    with tf.Session() as session:
        return session.run(fetches)


@contextlib.contextmanager
def initialized(lowering):
    """A session with initialized variables."""
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        yield session


def test_a_pending_sum_keeps_what_it_has_become(mesh, x):
    total = mtf.reduce_sum(x, reduced_dim=ROWS)
    lazy = lower(mesh).tensors[total]
    assert isinstance(lazy, mtf.LazyAllreduceSum)
    assert private.reduced_value(lazy) is None
    reduced = lazy.to_laid_out_tensor()
    assert private.reduced_value(lazy) is reduced
    np.testing.assert_array_equal(run(reduced.tensor_list), [[12, 16]] * 2)


@pytest.mark.parametrize(("largest", "narrow"), [(2, False), (4, True)])
def test_bfloat16_is_cast_in_larger_groups_only(largest, narrow):
    mesh_impl = mtf.simd_mesh_impl.SimdMeshImpl(
        "all:4", "", allreduce_in_bfloat16_max_group_size=largest
    )
    assert private.bfloat16_group_size(mesh_impl) == largest
    value = mesh_impl.LaidOutTensor([tf.constant([1.0], tf.bfloat16)])
    mesh_impl.allreduce(value, [0], "SUM")
    (summed,) = [
        op for op in tf.get_default_graph().get_operations() if op.type == "CrossReplicaSum"
    ]
    assert (summed.inputs[0].dtype == tf.bfloat16) is narrow


def test_bfloat16_goes_as_it_is_in_groups_of_up_to_eight():
    mesh_impl = mtf.simd_mesh_impl.SimdMeshImpl("all:4", "")
    assert private.bfloat16_group_size(mesh_impl) == 8


def test_a_restore_hook_has_its_lowering(mesh, x):
    lowering = lower(mesh)
    assert of_runtimes.restored_lowering(mtf.MtfRestoreHook(lowering)) is lowering


def test_slice_functions(x):
    def double(y):
        return 2 * y

    doubled = mtf.slicewise(double, [x], splittable_dims=[ROWS])
    assert private.slice_function(doubled.operation) is double
    assert private.slice_function(mtf.cwise(double, [x]).operation) is double
    assert private.slice_function((x + x).operation) is tf.add
    assert private.slice_function(mtf.maximum(x, x).operation) is tf.maximum
    assert private.slice_function(mtf.less(x, x).operation) is tf.less


def test_scalars(x):
    added, multiplied = (x + 3.0).operation, (x * 5.0).operation
    assert isinstance(added, mtf.ScalarAddOperation)
    assert isinstance(multiplied, mtf.ScalarMultiplyOperation)
    assert private.scalar_of(added) == 3.0
    assert private.scalar_of(multiplied) == 5.0
    scalar = tf.constant(7.0)
    assert private.scalar_of((x + scalar).operation) is scalar


@pytest.mark.parametrize("name", ["sum", "max", "min"])
def test_reductions(x, name):
    reduced = getattr(mtf, f"reduce_{name}")(x, reduced_dim=ROWS)
    assert isinstance(reduced.operation, mtf.ReduceOperation)
    assert private.reduction_kind(reduced.operation) == name.upper()


def test_a_generic_gradient_takes_the_gradients_of_outputs_last(mesh, x):
    forward = mtf.cwise(tf.math.softplus, [x])
    (gradient,) = mtf.gradients([mtf.reduce_sum(forward)], [x])
    assert isinstance(gradient.operation, mtf.GenericGradOperation)
    (output_gradient,) = private.output_gradients(gradient.operation)
    assert output_gradient is gradient.operation.inputs[-1]
    assert output_gradient.shape == forward.shape
    assert gradient is gradient.operation.outputs[0]


def test_a_custom_gradient_passes_its_results_on(mesh, x):
    made = []

    def forward(y):
        made.append(mtf.square(y))
        return made[0]

    result = mtf.custom_gradient(forward, lambda output_grads, **_: output_grads, [x])
    operation = result.operation
    assert isinstance(operation, mtf.CustomGradientOperation)
    assert private.custom_gradient_results(operation) == made
    lowering = lower(mesh)
    assert lowering.tensors[result] is lowering.tensors[made[0]]


def test_the_parts_of_a_loop(mesh, x):
    number = mtf.zeros(mesh, mtf.Shape([]), dtype=tf.int32)
    body_arguments, condition_arguments = [], []

    def condition(n, y):
        condition_arguments.extend([n, y])
        return mtf.less(n, 3)

    def body(n, y):
        body_arguments.extend([n, y])
        return [n + 1, y * 2.0, mtf.reduce_sum(y)]

    outputs = mtf.while_loop(condition, body, [number, x], has_accumulators=True)
    operation = outputs[0].operation
    assert isinstance(operation, mtf.WhileLoopOperation)
    assert operation.inputs == [number, x]
    assert operation.outputs == list(outputs)

    part = private.loop_condition(operation)
    assert part.inputs == condition_arguments
    assert [x.dtype for x in part.outputs] == [tf.bool]
    assert part.outputs[0].operation is part.operations[-1]

    part = private.loop_body(operation)
    assert part.inputs == body_arguments
    assert len(part.outputs) == 3
    assert all(x.operation in part.operations for x in part.outputs)
    assert part.operations is private.loop_body(operation).operations
    assert not set(part.operations) & set(mesh.graph.operations)

    lowering = lower(mesh, size=1)
    count, last, total = run([lowering.export_to_tf_tensor(y) for y in outputs])
    assert (count, total) == (3, 28 * 7)
    np.testing.assert_array_equal(last, 8 * np.arange(8).reshape(4, 2))


def test_operations_that_are_taken_out_of_a_body_do_not_run(mesh, x):
    """The list of a loop's operations is the one that it goes by."""
    number = mtf.zeros(mesh, mtf.Shape([]), dtype=tf.int32)

    def body(n, y):
        doubled = y * 2.0
        mtf.scalar_summary("unused", mtf.reduce_sum(doubled))
        return [n + 1, doubled]

    (_, last) = mtf.while_loop(lambda n, y: mtf.less(n, 3), body, [number, x])
    operations = private.loop_body(last.operation).operations
    before = len(operations)
    operations[:] = [o for o in operations if not isinstance(o, mtf.ScalarSummaryOperation)]
    assert len(operations) == before - 1
    lower(mesh, size=1)
    assert tf.get_collection(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY) == []


def test_an_operation_that_was_given_outputs_may_be_split_along_them(mesh, x):
    operation = mtf.Operation([x], name="given")
    outputs = [mtf.Tensor(operation, mtf.Shape([mtf.Dimension("new", 3)]), tf.float32)]
    private.set_operation_outputs(operation, outputs)
    assert operation.outputs == outputs
    assert operation.splittable_dims == {"rows", "columns", "new"}
    assert not operation.unsplittable_dims


def test_a_graph_knows_the_meshes_that_were_made_in_it():
    def make(shape, layout):
        size = mtf.convert_to_shape(shape).size
        return mtf.placement_mesh_impl.PlacementMeshImpl(shape, layout, [""] * size)

    with tf.Graph().as_default():
        assert private.meshes_made() == []
        made = make("a:2;b:3", "x:a;y:b")
        make("a:2;b:3", "y:b;x:a")
        ((shape, layout),) = private.meshes_made()
        assert shape == made.shape
        for dim, axis in (("x", 0), ("y", 1), ("z", None)):
            assert layout.tensor_dimension_to_mesh_axis(mtf.Dimension(dim, 6), shape) == axis
        make("a:2;b:3", "x:a")
        assert len(private.meshes_made()) == 2
        patches.patch_libraries()
        make("c:1", "")
        assert [shape.to_string for shape, _ in private.meshes_made()][2:] == ["Shape[c=1]"]
        assert not tf.get_default_graph().get_all_collection_keys()
    with tf.Graph().as_default():
        assert private.meshes_made() == []


def test_a_mesh_may_be_forgotten(fresh_graph):
    first, second = (mtf.placement_mesh_impl.PlacementMeshImpl("a:1", "", [""]) for _ in range(2))
    private.forget_mesh(fresh_graph, first)
    assert private.mesh_impls_made() == [second]


def test_a_variable_stands_for_another_one():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    d, part = mtf.Dimension("d", 4), mtf.Shape([mtf.Dimension("part", 4)])
    w = mtf.get_variable(mesh, "w", [d], dtype=tf.float32).operation
    known = list(mesh.graph.operations)
    stand_in = mtf.Variable.__new__(mtf.Variable)
    private.init_replacement(stand_in, w, mtf.zeros(mesh, part))
    assert (stand_in.name, stand_in.shape, stand_in.dtype) == ("w", part, w.dtype)
    assert stand_in.outputs == [stand_in.value]
    assert w.shape == mtf.Shape([d])
    assert mesh.graph.all_variables == [w]
    assert stand_in not in mesh.graph.operations[len(known) :]


@pytest.mark.parametrize("number", [1, 2])  # two of one shape are stacked
def test_a_variable_gets_a_value_of_another_shape_and_its_own_is_made_of_that(number):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    d, square = mtf.Dimension("d", 8), mtf.Shape([ROWS, COLUMNS])
    start = tf.constant_initializer(np.arange(8))
    wholes = [mtf.get_variable(mesh, f"w_{i}", [d], initializer=start) for i in range(number)]
    variables = [whole.operation for whole in wholes]
    values = [private.reshape_variable(w, square) for w in variables]
    for w, whole, value in zip(variables, wholes, values):
        assert (w.outputs, w.value, w.shape) == ([value], value, square)
        join = mtf.reshape(value, whole.shape).operation
        private.move_outputs(join, [whole])
        assert (whole.operation, join.outputs) == (join, [whole])
    doubled = [whole * 2.0 for whole in wholes]
    update = mtf.Assign(variables, [v + 1.0 + i for i, v in enumerate(values)])
    lowering = lower(mesh)
    (laid_out,) = lowering.variables.values()
    with initialized(lowering) as session:
        # The new shape is laid out, its rows over two processors.
        assert laid_out.laid_out_tensor.slice_shape[-2:] == [2, 2]
        for x in doubled:
            np.testing.assert_array_equal(
                session.run(lowering.export_to_tf_tensor(x)), 2.0 * np.arange(8)
            )
        session.run(lowering.lowered_operation(update))
        session.run(lowering.copy_slices_to_masters())
        for i, master in enumerate(tf.global_variables()):
            np.testing.assert_array_equal(session.run(master), 1.0 + i + np.arange(8))


def test_an_assignment_is_made_one_to_another_variable():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    zeros = tf.zeros_initializer()
    first, second = (mtf.get_variable(mesh, name, [], initializer=zeros).operation for name in "ab")
    value = mtf.constant(mesh, 2.0)
    assign = mtf.assign(first, mtf.constant(mesh, 1.0))
    private.reassign(assign, [second], [value])
    assert (assign.variables, assign.inputs) == ([second], [value])
    lowering = lower(mesh)
    with initialized(lowering) as session:
        session.run(lowering.lowered_operation(assign))
        session.run(lowering.copy_slices_to_masters())
        masters = {v.op.name: v for v in tf.global_variables()}
        assert session.run(masters) == {"a": 0.0, "b": 2.0}


def test_optimizers_know_dimensions_by_name():
    adafactor = mtf.optimize.AdafactorOptimizer(learning_rate=0.1, stacked_dim_names=["layers"])
    assert tuple(private.stacked_dim_names(adafactor)) == ("layers",)
    assert private.stacked_dim_names(mtf.optimize.SgdOptimizer(0.1)) == ()


def test_patterns_of_optimizers_by_argument():
    adam = mtf.optimize.AdamWeightDecayOptimizer
    assert private.variable_patterns(adam(0.1))["exclude_from_weight_decay"] == ()
    excluded = private.variable_patterns(adam(0.1, exclude_from_weight_decay=["a", "b"]))
    assert excluded["exclude_from_weight_decay"] == ("a", "b")
    letters = private.variable_patterns(adam(0.1, exclude_from_weight_decay="ab"))
    assert letters["exclude_from_weight_decay"] == "ab"
    adafactor = mtf.optimize.AdafactorOptimizer(exclude_from_parameter_scale=["a.b"])
    assert private.variable_patterns(adafactor)["exclude_from_parameter_scale"] == (r"a\.b",)


def test_adafactors_first_argument_is_no_learning_rate():
    assert private.scale_setting(mtf.optimize.AdafactorOptimizer(0.5)) == 0.5
    assert private.scale_setting(mtf.optimize.AdafactorOptimizer(learning_rate=0.5)) is True
    assert private.scale_setting(mtf.optimize.SgdOptimizer(0.1)) is True


def test_calls_of_gradients_are_known_with_their_losses():
    patches.patch_libraries()  # a second time changes nothing
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    d = mtf.Dimension("d", 2)
    w, unused = (
        mtf.get_variable(mesh, name, [d], initializer=tf.ones_initializer()) for name in "wu"
    )
    loss = mtf.reduce_sum(mtf.square(w))
    (grad, none) = mtf.gradients([loss], [w, unused])
    mtf.gradients([w], [w], [grad])  # begins with a gradient, not with ones
    (call,) = mesh_tensorflow.gradients_calls(graph)
    assert none is None
    assert call.outputs == [grad]
    (seed,) = call.seeds
    assert seed.outputs[0].shape == loss.shape
    seed.scale = mtf.import_tf_tensor(mesh, tf.constant(3.0), [])
    lowered = graph.operations.index(seed)  # what scales comes before it
    graph.operations.insert(lowered, graph.operations.pop())
    lowering = lower(mesh, 1)
    values = lowering.export_to_tf_tensor(grad), lowering.export_to_tf_tensor(loss)
    with initialized(lowering) as session:
        scaled, value = session.run(values)
    assert scaled.tolist() == [6.0, 6.0]
    assert value == 2.0


def test_microbatches_differentiate_through_the_same_function():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, d = mtf.Dimension("batch", 4), mtf.Dimension("d", 2)
    w = mtf.get_variable(mesh, "w", [d], initializer=tf.ones_initializer())
    x = mtf.import_tf_tensor(mesh, tf.ones([4, 2]), [batch, d])
    loss = lambda features: {"loss": mtf.reduce_sum(features["x"] * w)}  # noqa: E731
    mtf.serialize_training_step({"x": x}, loss, batch, 2)
    assert mesh_tensorflow.gradients_calls(graph)


@pytest.mark.parametrize(
    ("dtype", "scalar", "expected"),
    [("float16", -1e9, -65504.0), ("float16", 2.0, 2.0), ("float32", -1e9, -1e9)],
)
def test_masks_stay_finite(dtype, scalar, expected):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.import_tf_tensor(mesh, tf.constant([0.0, 1.0], dtype), [mtf.Dimension("d", 2)])
    product = x * scalar
    value = lower(mesh, 1).export_to_tf_tensor(product)
    assert run(value).tolist() == [0.0, expected]


def scaled(x, w):
    """Squares in two more dimensions, both of which a weight has."""
    return mtf.einsum([x, x, w], mtf.Shape([x.shape.dims[0], *w.shape.dims]))


@pytest.mark.parametrize("weight", [False, True])
def test_recomputation_waits_for_gradients_of_the_same_examples(weight):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    dims = [mtf.Dimension("batch", 2), mtf.Dimension("d", 2)]
    x = mtf.import_tf_tensor(mesh, tf.constant([[1.0, 2.0], [3.0, 4.0]]), dims)
    weights = mtf.import_tf_tensor(mesh, tf.constant([1.0, np.nan]), dims[:1])
    if weight:
        heads = mtf.Shape([mtf.Dimension("heads", 1), mtf.Dimension("size", 1)])
        y = mtf.recompute_grad(scaled, [x, 1.0 * mtf.ones(mesh, heads)])
    else:
        y = mtf.recompute_grad(mtf.square, [x])
    before = len(mesh.graph.operations)
    (grad,) = mtf.gradients([mtf.reduce_sum(y * weights)], [x])
    waits = mesh.graph.operations[before:]
    assert any(isinstance(op, mtf.ScalarMultiplyOperation) for op in waits)
    value = lower(mesh, 1).export_to_tf_tensor(grad)
    found = run(value)
    assert found[0].tolist() == [2.0, 4.0]
    assert np.isnan(found[1]).all()


def test_steps_that_an_error_has_undone_are_built_again():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    w = mtf.get_variable(mesh, "w", [mtf.Dimension("d", 2)])

    class Doubled(DeferredUpdate):
        def make(self):
            return [mtf.assign(w.operation, w * 2.0)]

    plan = StepPlan.of(mesh.graph)
    doubled = Doubled(plan)
    with contextlib.suppress(ZeroDivisionError), plan.undone_on_error():
        doubled.build()
        raise ZeroDivisionError
    lowering = lower(mesh, 1)
    assert set(doubled.build()) <= {*mesh.graph.operations} & {*lowering.operations}


@pytest.mark.parametrize("autostack", [True, False])
def test_steps_are_built_before_a_graph_is_rewritten_or_lowered(autostack):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    added = []

    class Added(DeferredUpdate):
        def make(self):
            w = mtf.get_variable(mesh, f"w{len(added)}", [mtf.Dimension("d", 2)])
            added.append(mtf.assign(w.operation, w * 2.0))
            return added[-1:]

    first = Added(StepPlan.of(mesh.graph))
    if not autostack:
        mesh.graph.rewrite_stack_variables()
        assert len(added) == 1
        assert len(mesh.graph.all_variables) == 1
    second = Added(StepPlan.of(mesh.graph))
    lowering = lower(mesh, 1, autostack=autostack)
    assert [*first.build(), *second.build()] == added
    assert all(op in lowering.operations for op in added)


def test_a_slice_of_a_simd_mesh_knows_the_variable_of_each_core():
    with tf.Graph().as_default(), simd.tpu_program("all:2", "rows:all") as program:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        v = mtf.get_variable(mesh, "v", mtf.Shape([ROWS]))
        lowering = mtf.Lowering(mesh.graph, {mesh: program.mesh_impl})
        (one,) = lowering.variables[v.operation].laid_out_tensor.all_slices
        names = [x.op.name for x in of_runtimes.variables_of_cores(one)]
    assert [name.rpartition("_slice_")[2] for name in names] == ["0", "1"]
