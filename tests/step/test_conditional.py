"""Work that a step does only when it is due."""

import logging

import numpy as np
import pytest

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.step.conditional import Branch, Conditional
from mtf_gradsync.step.plan import StepPlan
from mtf_gradsync.step.writes import Gate
from tests import harness

SCALAR = mtf.Shape([])


def scalar(mesh, name, value=0.0):
    return mtf.get_variable(mesh, name, SCALAR, initializer=tf.constant_initializer(value))


def run(kind, make, flags, **kwargs):
    """Runs a step for each flag; `make(mesh, due)` returns operations and fetches."""

    def build(mesh, inputs):
        due = mtf.greater(mtf.import_tf_tensor(mesh, inputs["due"], SCALAR), 0.5)
        return make(mesh, due)

    feeds = [{"due": np.float32(flag)} for flag in flags]
    return harness.run(kind, "all:2", "batch:all", build, feeds, **kwargs)


def branch_of(plan, make):
    branch = Branch(plan)
    with branch.opened():
        branch.updates.extend(make())
    return branch


@pytest.mark.parametrize("as_call", [True, False])
@pytest.mark.parametrize("autostack", [True, False])
def test_a_branch_runs_when_it_is_due(mesh_kind, as_call, autostack):
    def make(mesh, due):
        w, slot = scalar(mesh, "w", 1.0), scalar(mesh, "slot", 2.0)
        plan = StepPlan.of(mesh.graph)

        def update():
            return mesh.graph.combine_assignments([
                mtf.assign(w, w + slot), mtf.assign(slot, slot * 2.0),
            ])  # fmt: skip

        gate = Gate(plan, [w, slot])
        conditional = Conditional(due, gate, branch_of(plan, update), [], as_call=as_call)
        return conditional.updates, {"w": w}

    result = run(mesh_kind, make, [1, 0, 1, 0], autostack=autostack)
    assert [step["w"] for step in result.fetched] == [1, 3, 3, 7]
    assert result.variables["w"] == 7
    assert result.variables["slot"] == 8


def test_operations_of_a_branch_stay_in_the_graphs_list():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    w = scalar(mesh, "w")
    plan = StepPlan.of(mesh.graph)
    before = list(mesh.graph.operations)
    branch = branch_of(plan, lambda: [mtf.assign(w, w + scalar(mesh, "made_inside"))])
    made = [op for op in mesh.graph.operations if op not in before]
    inside = plan.members(branch)
    assert branch.updates[-1] in inside
    assert [op for op in made if op not in inside] == [scalar(mesh, "made_inside").operation]
    assert mesh.graph.operations[: len(before)] == before


def test_a_sum_that_is_made_in_a_branch_is_made_again_outside(mesh_kind):
    """What a branch computes has no value where the branch did not run."""
    batch = mtf.Dimension("batch", 4)

    def make(mesh, due):
        w, seen = scalar(mesh, "w"), scalar(mesh, "seen")
        total = mtf.reduce_sum(mtf.ones(mesh, mtf.Shape([batch])))
        plan = StepPlan.of(mesh.graph)
        branch = branch_of(plan, lambda: [mtf.assign(w, w + total * total)])
        gate = Gate(plan, [w])
        conditional = Conditional(due, gate, branch, [])
        outside = mtf.assign(seen, seen + total * 2.0)
        gate.hold([outside])
        return [*conditional.updates, outside], {}

    result = run(mesh_kind, make, [0, 1, 0])
    assert result.variables["w"] == 16
    assert result.variables["seen"] == 24


def test_a_branch_in_a_branch(mesh_kind):
    def make(mesh, due):
        w, inner = scalar(mesh, "w"), scalar(mesh, "inner")
        plan = StepPlan.of(mesh.graph)
        gate = Gate(plan, [w, inner])
        second = mtf.greater(w, 0.5)

        def update():
            nested = branch_of(plan, lambda: [mtf.assign(inner, inner + 1.0)])
            conditional = Conditional(second, gate, nested, [], as_call=False)
            return [mtf.assign(w, w + 1.0), *conditional.updates]

        branch = branch_of(plan, update)
        return Conditional(due, gate, branch, [], as_call=False).updates, {}

    result = run(mesh_kind, make, [1, 0, 1, 1])
    assert result.variables["w"] == 3
    assert result.variables["inner"] == 2


def test_summaries_of_a_branch_are_removed_with_a_warning(caplog):
    def make(mesh, due):
        w = scalar(mesh, "w")
        plan = StepPlan.of(mesh.graph)

        def update():
            mtf.scalar_summary("inside", w)
            return [mtf.assign(w, w + 1.0)]

        return Conditional(due, Gate(plan, [w]), branch_of(plan, update), []).updates, {}

    with caplog.at_level(logging.WARNING, "mtf_gradsync"):
        result = run("placement", make, [1])
    assert not result.graph.get_collection(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY)
    assert "inside" in caplog.text
