"""The best division is the one that counting by hand finds, of all that fit."""

import itertools
import json
import math
import zlib

import pytest

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.tools.planning import machines
from mtf_gradsync.tools.planning.best import Checked, Choice, all_choices, best_of
from mtf_gradsync.tools.planning.costs import Predicted, Predictor, read_costs
from mtf_gradsync.tools.planning.stacks import StackSettings
from tests.tools.planning.machines import Counting

STEPS = (1, 2, 3, 4, 6, 12)
LAYOUT = "batch:batch;h:model"


class Ring(Counting):
    """Cores in a ring, on which a byte to a neighbour takes a second."""

    peak_flops_per_core = 64.0
    bytes_per_second_per_core = 32.0

    def seconds(self, operation, groups, size):
        members = max(map(len, groups))
        return 0.01 * members + machines.bytes_sent(operation, members, size)


def layer(rows, inputs, hidden, tied=False, slots=2, update=lambda gradient: None, cut=False):
    """Returns the costs of a layer, of two whose weights are one variable, and of their update."""
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        batch, x_dim, h_dim = (
            mtf.Dimension(*x) for x in zip(("batch", "x", "h"), (rows, inputs, hidden))
        )
        x = mtf.import_tf_tensor(mesh, tf.ones([rows, inputs]), [batch, x_dim])
        w = mtf.get_variable(mesh, "w", [x_dim, h_dim])
        hidden = mtf.einsum([x, w], reduced_dims=[x_dim])
        if cut:
            hidden = mtf.slice(hidden, 0, 1, "h")
        if tied:
            hidden = mtf.einsum([mtf.relu(hidden), w], reduced_dims=[h_dim])
        loss = mtf.reduce_mean(mtf.square(hidden))
        (gradient,) = mtf.gradients([loss], [w])
        for number in range(slots):
            mtf.get_variable(mesh, f"slot_{number}", w.shape, trainable=False)
        update(gradient)
        (variable,) = mesh.graph.trainable_variables
        return read_costs(loss, [gradient], [variable], ["batch"], rows)


def by_hand(costs, machine, layout):
    """Returns every division that is possible, written out: (mesh, layout, stack) and seconds."""
    found = {}
    (rows,) = {size for dims in costs.shapes for name, size in dims if name == "batch"}
    sizes = {name: size for dims in costs.shapes for name, size in dims}
    for along in range(1, machine.cores + 1):
        if machine.cores % along:
            continue
        across = machine.cores // along
        shape = f"batch:{along};model:{across}"
        for text in {layout, "batch:batch"}:
            split = dict(rule.split(":") for rule in text.split(";"))
            if across > 1 and "h" not in split:
                continue  # nothing lies along the model axis
            if rows % along or (across > 1 and sizes["h"] % across):
                continue
            rules = layout if across == 1 else text
            for k in STEPS:
                if rows % (k * along):
                    continue
                for sums, sharded in itertools.product(
                    [""] if k == 1 else ["local", "synced", "sharded"], [False, True]
                ):
                    if along == 1 and (sharded or sums in ("synced", "sharded")):
                        continue
                    stack = StackSettings(k, sums, sharded)
                    predicted = Predictor(costs, machine, shape, rules).predict(stack)
                    found[shape, rules, stack] = predicted
    return found


def choices_of_a_layer():
    """Returns all divisions of a layer, and the machine that they are for."""
    costs, machine = layer(48, 16, 12), Ring(memory=None)
    return all_choices(costs, machine, ["batch", "model"], [LAYOUT], STEPS)[0], machine


@pytest.mark.parametrize("cores", [1, 4, 6])
@pytest.mark.parametrize(
    "model", [(12, 8, 12), (48, 4, 6), (12, 64, 48, True)], ids=["layer", "wide batch", "tied"]
)
def test_the_choice_is_the_fastest_of_all_that_fit(model, cores):
    costs, machine, layout = layer(*model), Ring(cores=cores, memory=None), "batch:batch;h:model"
    choices, _ = all_choices(costs, machine, ["batch", "model"], [layout], STEPS)
    every = by_hand(costs, machine, layout)
    assert {choice[:3] for choice in choices} == set(every)
    needs = sorted({round(x.bytes_per_core) for x in every.values()})
    seconds = math.inf
    for budget in (needs[0] - 1, *needs, needs[-1] + 1):
        fitting = [x.seconds for x in every.values() if x.bytes_per_core <= budget]
        best = best_of(choices, machine, budget)
        if not fitting:
            assert best.chosen is None
            assert seconds == math.inf
            continue
        assert best.chosen.predicted.seconds == min(fitting)
        assert best.chosen.predicted.bytes_per_core <= budget
        # More budget never gives a slower one.
        assert best.chosen.predicted.seconds <= seconds
        seconds = best.chosen.predicted.seconds


def test_the_compiler_decides_what_fits_and_more_budget_is_never_slower():
    choices, machine = choices_of_a_layer()

    def check(choice):
        # By no rule that the prediction knows.
        share = 0.8 + 0.6 * (zlib.crc32(repr(choice[:2]).encode()) % 7) / 7
        if choice.stack.sums == "synced":
            return Checked(refused="no synced sums")
        return Checked(share * choice.predicted.bytes_per_core, 1.0, "made up")

    needs = sorted(choice.predicted.bytes_per_core for choice in choices)
    seconds = math.inf
    for share in (0.5, 1.0, 1.1, 1.3, 2.0, 50.0):
        budget = share * needs[0]
        best = best_of(choices, machine, budget, check)
        if best.chosen is None:
            assert seconds == math.inf
            continue
        assert best.checked.bytes_per_core <= budget
        assert best.chosen.stack.sums != "synced"
        assert best.chosen.predicted.seconds <= seconds
        seconds = best.chosen.predicted.seconds
        for choice, said in best.tried:
            assert said.refused or said.bytes_per_core > budget
            assert choice.predicted.seconds <= seconds
    assert seconds < math.inf


def test_what_is_refused_everywhere_is_not_said_to_be_too_large():
    choices, machine = choices_of_a_layer()
    best = best_of(choices, machine, 1e9, lambda choice: Checked(refused=choice.name))
    assert best.chosen is None
    assert str(best).endswith("No division is possible: each of them is refused.")


SHARDED, OUTER = StackSettings(2, "sharded", True), StackSettings(inner_steps=10)


def chosen_of(*those, refused, budget=None):
    """Returns what is chosen of (mesh, stack, bytes), and all that was asked about before it."""
    choices = [
        Choice(mesh, "batch:batch", stack, Predicted(float(number), size))
        for number, (mesh, stack, size) in enumerate(those)
    ]

    def check(choice):
        is_refused = (choice.mesh_shape, choice.stack) in refused
        return Checked(choice.predicted.bytes_per_core, refused="no" if is_refused else "")

    best = best_of(choices, Ring(memory=None), budget, check)
    return best.chosen[:3:2], [choice[:3:2] for choice, _ in best.tried]


def test_a_stack_that_several_meshes_refuse_is_not_asked_about_again():
    of_four = SHARDED._replace(steps=4)
    some = [("batch:4", SHARDED, 1.0), ("batch:2;model:2", of_four, 1.0)]
    refused = {one[:2] for one in some}
    third, plain = ("batch:1;model:4", SHARDED, 1.0), ("batch:4", StackSettings(), 1.0)
    assert chosen_of(*some, third, plain, refused=refused) == (plain[:2], [x[:2] for x in some])
    # Two that one mesh refuses say nothing of another mesh.
    some[1] = ("batch:4", of_four, 1.0)
    refused = {one[:2] for one in some}
    assert chosen_of(*some, third, plain, refused=refused)[0] == third[:2]


def test_what_is_refused_with_outer_steps_may_be_without():
    meshes = "batch:4", "batch:2;model:2"
    refused = {(mesh, OUTER) for mesh in meshes}
    plain = "batch:4", StackSettings(), 1.0
    assert chosen_of(*((*x, 1.0) for x in sorted(refused)), plain, refused=refused)[0] == plain[:2]


def test_refusals_that_a_larger_budget_asks_for_do_not_make_the_answer_slower():
    large = [("batch:4", SHARDED, 9.0), ("batch:2;model:2", SHARDED, 8.0)]
    refused = {one[:2] for one in large}
    small, slow = ("batch:1;model:4", SHARDED, 1.0), ("batch:4", StackSettings(), 1.0)
    for budget in (5.0, 50.0):
        assert chosen_of(*large, small, slow, refused=refused, budget=budget)[0] == small[:2]


def test_a_budget_that_nothing_fits_names_the_nearest():
    choices, machine = choices_of_a_layer()
    least = min(choices, key=lambda choice: choice.predicted.bytes_per_core)
    best = best_of(choices, machine, 10.0)
    assert best.chosen is None
    said = " ".join(str(best).split())
    assert "None fits into 10 bytes a core." in said
    needed = f"{least.predicted.bytes_per_core:,.0f} bytes"
    assert f"The nearest is {least.name}: it is predicted to need {needed}." in said
    assert json.loads(best.to_json())["nearest"]["bytes_per_core"] == (
        least.predicted.bytes_per_core
    )


def test_what_each_division_saves():
    """Sums, slots and bytes that are sent, of a layer whose figures are known."""
    rows, inputs, hidden, shards = 48, 16, 12, 4
    costs, machine = layer(rows, inputs, hidden), Ring(memory=None)
    predictor = Predictor(costs, machine, "batch:4;model:1", "batch:batch;h:model")
    weight = 4.0 * inputs * hidden

    def needed(stack):
        return predictor.predict(stack).bytes_per_core

    # Two slots and the sums.
    local = StackSettings(2, "local")
    assert needed(StackSettings()) - needed(StackSettings(sharded_updates=True)) == 2 * weight * (
        1 - 1 / shards
    )
    assert needed(local) == needed(StackSettings(2, "synced"))
    assert needed(local) - needed(StackSettings(2, "sharded")) == weight * (1 - 1 / shards)
    half = predictor.predict(local), predictor.predict(StackSettings(4, "local"))
    assert half[0].bytes_per_core > half[1].bytes_per_core
    # Synced sums cross in each step, local ones once.
    local, synced = (
        predictor.predict(StackSettings(2, sums)).sync_seconds for sums in ("local", "synced")
    )
    assert local == pytest.approx(machines.bytes_sent("all-reduce", shards, weight))
    assert synced == pytest.approx(2 * local)
    # Reduce-scattered in two steps, and new values gathered once: 2/2 and 1/2 of a sum.
    sharded = predictor.predict(StackSettings(2, "sharded", True)).sync_seconds
    assert sharded == pytest.approx(1.5 * local)
    # Outer steps send values once in so many steps, and hold values and momentum besides.
    outer = predictor.predict(StackSettings(inner_steps=10))
    assert outer.sync_seconds == pytest.approx(local / 10)
    assert outer.model_seconds == predictor.seconds("all-reduce", ["batch"], 4.0) > 0
    assert outer.bytes_per_core - needed(StackSettings()) == 2 * weight


def test_a_mesh_of_other_cores_is_not_possible():
    costs, machine = layer(48, 16, 12), Ring(memory=None)
    shapes = ["batch:8;model:1", "batch:2;model:2"]
    choices, why = all_choices(costs, machine, [], [LAYOUT], (1,), mesh_shapes=shapes)
    assert {choice.mesh_shape for choice in choices} == {"batch:2;model:2"}
    assert list(why.values())[:1] == ["The mesh has 8 cores and the topology 4"]


def test_outer_steps_are_considered_only_if_asked():
    costs, machine = layer(48, 16, 12), Ring(memory=None)
    arguments = costs, machine, ["batch", "model"], [LAYOUT], STEPS
    for inner, seen in (((), {0}), ((10, 36), {0, 10, 36})):
        choices, _ = all_choices(*arguments, inner)
        assert {choice.stack.inner_steps for choice in choices} == seen


def test_a_batch_that_no_rule_splits_has_no_replicas():
    costs, machine = layer(48, 16, 12), Ring(memory=None)
    choices, why = all_choices(costs, machine, ["batch", "model"], ["h:model"], STEPS)
    assert {choice.mesh_shape for choice in choices} == {"batch:1;model:4"}
    assert not any(choice.stack.sharded_updates for choice in choices)
    assert why["batch:4;model:1, h:model"] == "batch would split nothing of the model"


def test_two_dimensions_of_a_tensor_are_not_split_along_one_axis():
    choices, why = all_choices(
        layer(48, 16, 12),
        Ring(memory=None),
        ["batch", "model"],
        ["batch:batch;x:model;h:model"],
        STEPS,
    )
    assert {choice.layout for choice in choices if "model:4" in choice.mesh_shape} == {
        "batch:batch;x:model",
        "batch:batch;h:model",
    }
    assert any("along the same mesh axis" in reason for reason in why.values())


def test_replicas_along_two_axes_may_be_reduced_in_two_levels():
    costs, machine = layer(48, 16, 12), Ring(memory=None)
    two = costs._replace(batch_dims=("h", "batch"))  # as if both were of the batch
    for of_batch, reducers in ((costs, {"fused"}), (two, {"fused", "hierarchical"})):
        choices, _ = all_choices(of_batch, machine, ["batch", "model"], [LAYOUT], (1,))
        assert {choice.stack.reducer for choice in choices} == reducers
    # A fused sum takes the loss along.
    predictor = Predictor(two, machine, "batch:2;model:2", LAYOUT)
    fused, hierarchical = (
        predictor.predict(StackSettings(reducer=reducer)) for reducer in ("fused", "hierarchical")
    )
    loss = predictor.seconds("all-reduce", ["batch", "model"], 4.0)
    assert hierarchical.model_seconds - fused.model_seconds == pytest.approx(loss)
    # Microbatch steps divide the last dimension alone.
    choices, why = all_choices(two, machine, ["batch", "model"], [LAYOUT], (24,))
    assert {choice.mesh_shape for choice in choices} == {"batch:2;model:2", "batch:1;model:4"}
    assert why[f"batch:4;model:1, {LAYOUT}"] == (
        "batch = 48 cannot be divided among 4 shards in 24 microbatch steps"
    )


def test_arrays_that_are_cut_along_a_dimension_are_not_split_along_it():
    costs, machine = layer(48, 16, 12, cut=True), Ring(memory=None)
    choices, why = all_choices(costs, machine, ["batch", "model"], [LAYOUT], (1,))
    assert {choice.mesh_shape for choice in choices} == {"batch:4;model:1"}
    assert why[f"batch:2;model:2, {LAYOUT}"] == "Mesh-TensorFlow cuts or joins arrays along h"


def test_products_of_the_update_take_time_once_in_an_update():
    def square(gradient):
        other = mtf.rename_dimension(gradient, "x", "y")
        mtf.einsum([gradient, other], reduced_dims=gradient.shape.dims[1:])

    machine = Ring(memory=None)
    plain, more = (
        Predictor(layer(48, 16, 12, update=update), machine, "batch:4;model:1", LAYOUT)
        for update in (lambda gradient: None, square)
    )
    for stack in (StackSettings(), StackSettings(4, "local")):
        longer = more.predict(stack).seconds - plain.predict(stack).seconds
        assert longer == pytest.approx(2 * 16 * 16 * 12 / machine.peak_flops_per_core)


@pytest.mark.parametrize(
    ("chips", "topology"),
    [
        ("v5e:256", "v5e:16x16"),
        ("v5e:128", "v5e:8x16"),
        ("v5e:1", "v5e:1x1"),
        ("v5p:8", "v5p:2x2x2"),
        ("v4:64", "v4:4x4x4"),
        ("v3:2x2", "v3:2x2"),
        ("2xv5e:16", "2xv5e:4x4"),
        ("v9:4", "v9:4"),
    ],
)
def test_chips_are_arranged_as_close_to_a_square_or_cube_as_can_be(chips, topology):
    assert machines.topology_of(chips) == topology


def test_an_odd_number_of_chips_needs_a_topology():
    with pytest.raises(ValueError, match="how 3 chips of v5e are arranged: give the topology"):
        machines.topology_of("v5e:3")
