"""What opens a TPU program, and what says where operations run, still means what it did."""

from __future__ import annotations

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.runtimes._private.mesh_tensorflow import SLICES_COLLECTION
from mtf_gradsync.runtimes._private.tensorflow import (
    TPU_PROGRAM_ATTR,
    kernel_devices,
    tpu_replicate_context,
    tpu_replicate_metadata,
    tpu_replicated_input,
    tpu_shard_context,
)


def program_of(operation):
    try:
        return operation.get_attr(TPU_PROGRAM_ATTR)
    except ValueError:
        return None


def test_operations_of_a_program_are_marked():
    pivot, outside = tf.no_op(), tf.constant(1.0)
    with tpu_replicate_context("program", 2, pivot):
        inside = tf.identity(outside)
        alone = tf.constant(2.0)
    after = tf.identity(outside)
    assert [program_of(x.op) for x in (outside, inside, alone, after)] == [
        None,
        b"program",
        b"program",
        None,
    ]
    # What uses nothing of the program waits for its beginning.
    assert alone.op.control_inputs == [pivot]


def test_a_program_says_how_many_cores_run_it():
    with tpu_replicate_context("program", 4, tf.no_op()):
        operation = tpu_replicate_metadata(4)
    assert operation.type == "TPUReplicateMetadata"
    assert operation.get_attr("num_replicas") == 4
    assert program_of(operation) == b"program"


def test_sums_over_all_cores_take_the_number_of_cores():
    with tpu_shard_context(4):
        tf.tpu.cross_replica_sum(tf.constant([1.0]))
    (groups,) = [
        tf.get_static_value(op.inputs[1])
        for op in tf.get_default_graph().get_operations()
        if op.type == "CrossReplicaSum"
    ]
    assert groups.tolist() == [[0, 1, 2, 3]]


def test_a_tensor_with_a_value_for_each_core():
    ours, theirs = tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])
    tensor = tpu_replicated_input([ours, theirs], "ours")
    assert tensor.op.type == "TPUReplicatedInput"
    assert list(tensor.op.inputs) == [ours, theirs]
    assert tensor.op.name == "ours"
    assert (tensor.dtype, tensor.shape.as_list()) == (tf.float32, [2])


def test_kernels_say_their_devices():
    assert kernel_devices("MatMul") >= {"CPU"}
    assert not kernel_devices("CrossReplicaSum") & {"CPU", "DEFAULT"}
    assert kernel_devices("NoOp") & {"CPU", "DEFAULT"}


def test_slices_of_a_simd_mesh_stand_in_a_collection_of_their_own():
    topology = tf.tpu.experimental.Topology(
        mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]]
    )
    mesh_impl = mtf.simd_mesh_impl.SimdMeshImpl(
        "all:2",
        "rows:all",
        device_assignment=tf.tpu.experimental.DeviceAssignment(
            topology, [[[0, 0, 0, 0]], [[0, 0, 0, 1]]]
        ),
    )
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    with tpu_replicate_context("program", 2, tf.no_op()), tpu_shard_context(2):
        mtf.get_variable(mesh, "w", mtf.Shape([mtf.Dimension("rows", 4)]))
        mtf.Lowering(graph, {mesh: mesh_impl})
    slices = tf.get_collection(SLICES_COLLECTION)
    assert [v.op.name.rpartition("/")[2] for v in slices] == ["w_slice_0", "w_slice_1"]
    assert [v.shape.as_list() for v in slices] == [[2], [2]]
    assert not {id(v) for v in slices} & {id(v) for v in tf.global_variables()}
