"""A TPU program that writes a ref variable fails with the call that it lacks, and its order."""

import pytest

import mtf_gradsync as gs
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models

SHAPE, LAYOUT, _ = harness.MESHES["2x2"]


@pytest.fixture
def global_step():
    """A program's own, from before the TPU program, where its imports took the call back."""
    tf.enable_resource_variables()
    tf.disable_v2_behavior()
    try:
        yield tf.train.get_or_create_global_step()
    finally:
        tf.enable_resource_variables()


@pytest.mark.parametrize("who", ["the wrapper", "the program"])
def test_the_error_says_what_to_call_and_when(global_step, who):
    feed = {k: tf.constant(v) for k, v in models.mlp_batches(1)[0].items()}
    optimizer = gs.CrossShardOptimizer(models.OPTIMIZERS["sgd"]())

    def build():
        with simd.tpu_program(SHAPE, LAYOUT) as program:
            loss = models.mlp_loss(mtf.Mesh(mtf.Graph(), "mesh"), feed)
            optimizer.minimize(loss, global_step if who == "the wrapper" else None)
            mtf.Lowering(loss.graph, {loss.mesh: program.mesh_impl})
            tf.assign_add(global_step, 1)

    with pytest.raises(NotImplementedError) as error:
        build()
    text = str(error.value)
    assert "variable global_step" in text
    assert "enable_resource_variables() at the start of the program, after" in text
    assert "after tf.compat.v1.disable_v2_behavior()" in text
    assert text.count("Call ") == 1


def test_a_session_that_sets_a_ref_variable_says_what_to_do(global_step):
    with simd.tpu_program(SHAPE, LAYOUT) as program:
        feed = {k: tf.constant(v) for k, v in models.mlp_batches(1)[0].items()}
        loss = models.mlp_loss(mtf.Mesh(mtf.Graph(), "mesh"), feed)
        lowering = mtf.Lowering(loss.graph, {loss.mesh: program.mesh_impl})
    with program.session(lowering) as session:
        with pytest.raises(ValueError, match=r"'global_step' is a TensorFlow ref variable"):
            session.write({"global_step": 1})


def test_without_ref_variables_an_error_stays_as_it_is():
    tf.train.get_or_create_global_step()
    with pytest.raises(NotImplementedError, match=r"^of its own$"):
        with simd.tpu_program(SHAPE, LAYOUT):
            raise NotImplementedError("of its own")
