"""Each variable is read once a step, but for those that the step itself writes in between."""

import statistics

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models
from tests.step.steps import lowered, of_type


@pytest.mark.parametrize("autostack", [True, False])
def test_each_variable_is_read_once_besides_its_own_assignment(autostack, fresh_graph):
    lowered(lambda: gs.CrossShardOptimizer(models.OPTIMIZERS["momentum"]()), autostack=autostack)
    reads = {}
    for op in of_type(fresh_graph, "ReadVariableOp"):
        handle = op.inputs[0].op.name
        # assign_sub reads what it subtracts from; initializers and copies read outside the step.
        outside = ("Read/ReadVariableOp", "Initializer", "assign", "Cast")
        if "_slice_" in handle and not any(part in op.name for part in outside):
            reads.setdefault(handle, []).append(op.name)
    assert reads
    copies = {}
    for handle, names in reads.items():
        copies[handle] = [n for n in names if "read_once" in n or "unstack" in n]
        assert len(copies[handle]) == 1, (handle, names)


def test_slices_have_no_random_initial_values(fresh_graph):
    """They are copies of masters, which the model here begins with constants."""
    lowered(lambda: gs.CrossShardOptimizer(models.OPTIMIZERS["sgd"]()))
    assert of_type(fresh_graph, "VarHandleOp")
    assert not of_type(fresh_graph, "RandomUniform")


def test_variables_that_the_program_assigns_itself_are_read_where_they_are_used():
    """A loop over variables (num_loop_vars) reads what it wrote, as in bare Mesh-TF."""

    def count(wrap):
        def build(mesh, inputs):
            del inputs
            w = mtf.get_variable(mesh, "w", mtf.Shape([]), initializer=tf.ones_initializer())
            (count,) = mtf.while_loop(
                lambda i, x: mtf.less(i, 5.0),
                # The quarter ends the loop even where x stands still.
                lambda i, x: [i + x + 0.25, x + 1.0],
                [mtf.constant(mesh, 0.0), mtf.constant(mesh, 1.0)],
                num_loop_vars=1,
            )
            opt = wrap(mtf.optimize.SgdOptimizer(0.1))
            return opt.apply_grads([w * 0.0 + 2.0], [w.operation]), {"count": count}

        feeds = [{"x": np.zeros(1, "f")}]
        runs = harness.run(
            "placement", "all:2", "batch:all", build, feeds, False, repeats=9, grappler=True
        )
        # Mesh-TF's loop races now and then, about once in sixty runs, with and without a wrapper.
        return statistics.mode(float(run.fetched[0]["count"]) for run in runs)

    with_one_value_for_all_turns = 20 * 0.25
    assert count(gs.CrossShardOptimizer) == count(lambda opt: opt) != with_one_value_for_all_turns


def test_variables_written_in_place_are_not_read_for_the_step(fresh_graph):
    lowered(
        lambda: gs.GradientAccumulationOptimizer(
            models.OPTIMIZERS["sgd"](), 2, mesh_shape="all:2", layout="batch:all"
        ),
        autostack=False,
    )
    shared = [op.name for op in of_type(fresh_graph, "ReadVariableOp") if "read_once" in op.name]
    assert shared
    assert not [name for name in shared if "accumulator" in name]
