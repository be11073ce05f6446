"""When the sums behind gradients are made, counted in SIMD programs."""

import collections

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.pending import PendingSums
from mtf_gradsync.step.conditional import Branch, Conditional
from mtf_gradsync.step.plan import StepPlan
from mtf_gradsync.step.writes import Gate
from tests import harness

MESH, LAYOUT = "rows:4;cols:2", "batch:rows;hidden:cols"
BATCH = mtf.Dimension("batch", 8)
IN, HIDDEN = mtf.Dimension("in", 3), mtf.Dimension("hidden", 4)
NAMES = ["a", "b", "c", "d"]


def losses(mesh):
    """One loss for each of four variables, of which two are split over the columns."""
    x = mtf.import_tf_tensor(mesh, tf.ones([8, 3]) * 0.5, mtf.Shape([BATCH, IN]))
    shapes = {"a": [IN, HIDDEN], "b": [IN], "c": [IN, HIDDEN], "d": [IN]}
    variables = {
        name: mtf.get_variable(mesh, name, mtf.Shape(dims), initializer=tf.ones_initializer())
        for name, dims in shapes.items()
    }
    total = 0.0
    for value in variables.values():
        product = mtf.einsum([x, 0.5 * value], [BATCH, *value.shape.dims[1:]])
        total += mtf.reduce_sum(mtf.square(product))
    return total, [v.operation for v in variables.values()]


def gradient_rows(change, make):
    """Sums of at least three numbers; see `gradient_sums`."""

    def build(mesh, inputs):
        loss, variables = losses(mesh)
        grads = change(mtf.gradients([loss], [v.value for v in variables]))
        return make().apply_grads(grads, variables), {}

    rows = harness.built("simd", MESH, LAYOUT, build, {}).collectives().rows
    return [row for row in rows if np.prod(row.shape) >= 3]


def gradient_sums(change, make=lambda: gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.1))):
    """Groups of sums of at least three numbers, by dtype and without a group one by one.

    Args:
      change: makes of the gradients those that are applied.
      make: makes the optimizer.
    """
    rows = gradient_rows(change, make)
    groups = {(row.together or row.name, row.dtype) for row in rows}
    return collections.Counter(dtype for _, dtype in groups)


def clipped(grads):
    norm = mtf.sqrt(mtf.add_n([mtf.reduce_sum(mtf.square(g)) for g in grads]))
    return [g / mtf.maximum(norm, 1.0) for g in grads]


def with_one_that_is_whole(grads):
    whole = mtf.reduce_sum(mtf.square(grads[0]))
    return [g + whole for g in grads]


@pytest.mark.parametrize(
    "change",
    [
        lambda grads: grads,
        lambda grads: [mtf.cast(g, tf.float32) * 0.5 for g in grads],
        clipped,
        lambda grads: clipped([-g for g in grads]),
        with_one_that_is_whole,
    ],
    ids=["as they are", "scaled", "clipped", "scaled and clipped", "with one that is whole"],
)
def test_all_sums_are_made_together_where_the_first_is_needed(change):
    bare = gradient_sums(change, lambda: mtf.optimize.SgdOptimizer(0.1))
    assert bare == {"float32": 4}
    assert gradient_sums(change) == {"float32": 1}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        # As of a table that is used as it is and divided by a number: one sum of both uses.
        (lambda a, b, c, d: [a + 0.5 * c, b, None, d], 3),
        (
            lambda a, b, c, d: [
                -(a + 0.5 * c) * 2.0,
                b + mtf.cast(d, tf.float32) * 3.0,
                None,
                None,
            ],
            2,
        ),
        # The sum of c is there in any case.
        (lambda a, b, c, d: [a + 0.5 * c, b, c, d], 4),
        (lambda a, b, c, d: [a + 0.5 * c, b, None, d + mtf.reduce_sum(mtf.square(c))], 4),
        # A part is less than a whole.
        (
            lambda a, b, c, d: [mtf.pad(mtf.mtf_slice(a * 2.0, 0, 1, "in"), [0, 2], "in"), b, c, d],
            4,
        ),
    ],
    ids=["twice", "and scaled", "one of others", "one for a norm", "padded"],
)
def test_two_uses_of_a_variable_are_added_before_the_sum(change, expected):
    rows = gradient_rows(
        lambda grads: change(*grads),
        lambda: gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.1)),
    )
    assert len(rows) == expected, rows


def test_sums_of_what_is_cast_to_fewer_bytes_keep_their_dtype():
    def change(grads):
        a, b, c, d = grads
        return [mtf.cast(g, tf.bfloat16) for g in (a + 0.5 * c, b, 0.5 * c, d)]

    assert set(gradient_sums(change)) == {"float32"}


def test_sums_that_only_gradients_of_others_need_are_not_made():
    """Mesh-TF makes the gradient of a constant factor too; nobody asked for it."""

    def grads_of_products(grads):
        factor = mtf.ones(grads[0].mesh, mtf.Shape([IN]))
        for grad in grads:
            mtf.einsum([grad, factor], grad.shape - IN)
        return grads

    local = gradient_sums(
        grads_of_products,
        lambda: gs.GradientAccumulationOptimizer(
            mtf.optimize.SgdOptimizer(0.1), 2, mesh_shape=MESH, layout=LAYOUT
        ),
    )
    assert local == {"float32": 1}


def test_what_is_logged_on_the_way_does_not_sum_twice():
    """A reader that needs one gradient whole makes all of them whole, once."""

    def change(grads):
        mtf.scalar_summary("norm", mtf.reduce_sum(mtf.square(grads[1])))
        return [2.0 * g for g in grads]

    assert gradient_sums(change) == {"float32": 1}


SGD = mtf.optimize.SgdOptimizer(0.1)
IN_PARTS = {
    "accumulation": lambda: gs.GradientAccumulationOptimizer(
        SGD, 2, mesh_shape=MESH, layout=LAYOUT
    ),
    "replicas": lambda: gs.SyncReplicasOptimizer(SGD, 4, mesh_shape=MESH, layout=LAYOUT),
}


def norm(grads):
    return mtf.sqrt(mtf.add_n([mtf.reduce_sum(mtf.square(0.5 * g)) for g in grads]))


@pytest.mark.parametrize("wrapper", list(IN_PARTS))
@pytest.mark.parametrize("logged", [[2], [0, 1, 2, 3]])
@pytest.mark.mostly_slow
def test_norms_that_the_program_logs_take_one_group_of_sums_of_their_own(wrapper, logged):
    """The wrapper's group is made once an update, and has what the program asks for in it again."""

    def change(grads):
        for i in logged:
            mtf.scalar_summary(f"norm{i}", norm([grads[i]]))
        return grads

    silent = gradient_sums(lambda grads: grads, IN_PARTS[wrapper])
    assert gradient_sums(change, IN_PARTS[wrapper]) - silent == {"float32": 1}


def test_what_the_program_needs_of_some_gradients_is_all_that_is_sent_for_it():
    def change(grads):
        mtf.scalar_summary("norm", norm(grads[1:2]))
        return grads

    sizes = [np.prod(r.shape) for r in gradient_rows(change, IN_PARTS["accumulation"])]
    # Of "a" and "c" each column has two of four.
    assert sorted(sizes) == [3, 3, 3, 6, 6]


def test_programs_own_clipping_beside_accumulation_is_one_group_a_microbatch_step():
    assert gradient_sums(clipped, IN_PARTS["accumulation"]) == {"float32": 1}


@pytest.mark.mostly_slow
def test_clipped_gradients_have_the_values_that_they_have_by_hand(mesh_kind):
    def build(mesh, inputs):
        del inputs
        loss, variables = losses(mesh)
        grads = clipped([3.0 * g for g in mtf.gradients([loss], [v.value for v in variables])])
        opt = gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.1))
        return opt.apply_grads(grads, variables), {}

    found = harness.run(mesh_kind, MESH, LAYOUT, build, [{"x": np.zeros(1, "f")}]).variables
    # By hand: every element of x is 1/2, so each gradient is 3 * 2 * sum(x * w/2) * 1/2 * 1/2 * 8.
    product = 3 * 0.5 * 0.5
    grad = 3 * 8 * 2 * product * 0.5 * 0.5
    norm = np.sqrt(grad**2 * (12 + 3 + 12 + 3))
    for name in NAMES:
        np.testing.assert_allclose(found[name], 1 - 0.1 * grad / norm, atol=4 * np.finfo("f").eps)


def test_what_a_branch_makes_of_a_sum_is_of_use_in_the_branch_alone(mesh_kind):
    """Two readers in branches, one of which does not run, and one outside."""

    def build(mesh, inputs):
        due = mtf.greater(mtf.import_tf_tensor(mesh, inputs["due"], mtf.Shape([])), 0.5)
        counts = [
            mtf.get_variable(mesh, name, mtf.Shape([]), initializer=tf.zeros_initializer())
            for name in ("first", "second", "outside")
        ]
        total = 0.5 * mtf.reduce_sum(mtf.ones(mesh, mtf.Shape([BATCH])))
        PendingSums.declare_use([total], True, ["batch"], gs.FusedAllReduce())
        plan = StepPlan.of(mesh.graph)
        gate = Gate(plan, counts)

        def counted(count):
            return lambda: [mtf.assign(count, count + mtf.square(total))]

        first, second = Branch(plan), Branch(plan)
        for branch, count in zip((first, second), counts):
            with branch.opened():
                branch.updates += counted(count)()
        operations = [
            *Conditional(due, gate, first, []).updates,
            *Conditional(mtf.logical_not(due), gate, second, [], as_call=False).updates,
            *counted(counts[2])(),
        ]
        gate.hold(operations[-1:])
        return operations, {}

    feeds = [{"due": np.float32(due)} for due in (1, 0, 1)]
    found = harness.run(mesh_kind, MESH, LAYOUT, build, feeds, autostack=False).variables
    assert [found[name] for name in ("first", "second", "outside")] == [32, 16, 48]
