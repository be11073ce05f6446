"""Groups of sums are packed for XLA's CPU devices, and are what they were."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.xla.lowering.packed_sums import with_packed_sums
from mtf_gradsync.xla.lowering.replica_program import replica_program

pytestmark = pytest.mark.xla
SIZES = (3, 3, 5)


def count(replica):
    return sum(node.op == "CrossReplicaSum" for node in replica.graph_def.node)


@pytest.mark.parametrize(("bucket_bytes", "packed"), [(None, 1), (0, len(SIZES))])
def test_a_group_is_one_sum_and_single_sums_stay(bucket_bytes, packed):
    with tf.Graph().as_default():
        batch = mtf.Dimension("batch", 4)
        # Whole numbers: exact in any order.
        values = [np.arange(4 * n, dtype=np.float32).reshape(4, n) for n in SIZES]
        with simd.tpu_program("all:4", "batch:all") as program:
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            given = [
                mtf.import_tf_tensor(
                    mesh, v, mtf.Shape([batch, mtf.Dimension(f"d{i}", v.shape[1])])
                )
                for i, v in enumerate(values)
            ]
            grads = [mtf.reduce_sum(x, reduced_dim=batch) for x in given]
            sums = gs.sum_shards(grads, reducer=gs.FusedAllReduce(bucket_bytes))
            lowering = mtf.Lowering(mesh.graph, {mesh: program.mesh_impl})
            fetches = [lowering.export_to_tf_tensor(s) for s in sums]
        replica = replica_program(program, fetches)
        assert count(replica) == len(SIZES)
        assert count(with_packed_sums(replica)) == packed
        with xla.session(program, lowering) as session:
            for found, value in zip(session.run(fetches), values):
                np.testing.assert_array_equal(found, value.sum(0))
