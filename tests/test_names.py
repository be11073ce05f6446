"""Messages about many variables say how many there are, and the first three."""

import pytest

import mtf_gradsync as gs
from mtf_gradsync._common import counted, some_of
from mtf_gradsync._private.libraries import mtf, tf


def test_names_of_a_message():
    assert some_of(["a", "b", "c"]) == "a, b, c"
    assert some_of(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert counted(["a"], "variable") == "variable a"
    assert counted(["a", "b"], "variable") == "2 variables: a, b"
    assert counted(list("abcd"), "variable") == "4 variables: a, b, c and 1 more"


def test_a_refusal_of_34_variables():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    batch, d = mtf.Dimension("batch", 4), mtf.Dimension("d", 2)
    x = mtf.import_tf_tensor(mesh, tf.ones([4, 2]), mtf.Shape([batch, d]))
    for i in range(34):
        x *= mtf.get_variable(mesh, f"v{i}", mtf.Shape([d]))
    variables = mesh.graph.trainable_variables
    grads = mtf.gradients([mtf.reduce_sum(x)], [v.value for v in variables])
    grads = [mtf.square(g) for g in grads]
    optimizer = gs.SyncReplicasOptimizer(
        mtf.optimize.SgdOptimizer(0.1), 4, mesh_shape="all:4", layout="batch:all"
    )
    with pytest.raises(ValueError, match="are not recoverable") as error:
        optimizer.apply_grads(grads, variables)
    text = str(error.value)
    assert [f"variable 'v{i}'" in text for i in range(5)] == [True, True, True, False, False]
    assert "and 31 more" in text
