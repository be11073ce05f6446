"""What the constructor of each wrapper and optimizer refuses, before anything is in the graph."""

import inspect
import re

import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, wrappers

FOUR = {"mesh_shape": "all:4", "layout": "batch:all"}
TWO_LEVELS = {
    "mesh_shape": "a:2;b:2",
    "layout": "outer:a;batch:b",
    "batch_dims": ("outer", "batch"),
}
# What has to be given, if nothing else is said.
NEEDED = {
    name: {**entry.needs, **(FOUR if entry.needs_mesh else {})}
    for name, entry in wrappers.REGISTRY.items()
}
NEEDED["AdamWOptimizer"] = {"learning_rate": 0.1}
NO_MESH = {"mesh_shape": None, "layout": None}


def sgd():
    return mtf.optimize.SgdOptimizer(0.1)


def wrapped(name, /, opt=None, **arguments):
    """Makes a wrapper or an optimizer."""
    arguments = {**NEEDED[name], **arguments}
    if name == "AdamWOptimizer":
        return gs.AdamWOptimizer(**arguments)
    return getattr(gs, name)(**{"opt": sgd() if opt is None else opt(), **arguments})


FakeKeras = type("OptimizerV2", (), {"__module__": "keras.optimizers.optimizer_v2"})
# Arguments of every wrapper, the error, and what it says. Here "opt" is a function that makes it.
OF_EVERY_WRAPPER = [
    ({"opt": FakeKeras}, TypeError, "Keras.*mtf.optimize"),
    ({"opt": lambda: FakeKeras, "learning_rate": 0.1}, TypeError, "Keras.*mtf.optimize"),
    ({"opt": lambda: 3}, ValueError, "apply_grads.*3"),
    ({"opt": lambda: None}, ValueError, "apply_grads.*None"),
    ({"opt": lambda: dict, "learning_rate": 0.1}, ValueError, "apply_grads.*dict"),
    ({"opt": lambda: mtf.optimize.SgdOptimizer}, ValueError, "learning_rate"),
    ({"learning_rate": 0.1}, ValueError, "without parentheses"),
    ({"opt": lambda: lambda learning_rate: 3, "learning_rate": 1}, ValueError, "made 3"),
    ({"name": ""}, ValueError, "name"),
    ({"reducer": "ring"}, TypeError, "reducer.*ring"),
    ({**NO_MESH, "axes": "all:8"}, TypeError, "axes.*all:8"),
    ({"mesh_shape": "all:8", "layout": None}, ValueError, "layout is missing"),
    ({"batch_dims": (1,)}, ValueError, "batch_dims"),
]
SCALE, NUMBER = "loss_scale must be 'dynamic' or a number", "must be a whole number"
REFUSED = {
    "AdamWOptimizer": [
        ({"learning_rate": None}, TypeError, "learning_rate must be a number or a floating scalar"),
        ({"learning_rate": abs}, TypeError, "get_update_step"),
        ({"weight_decay_rate": -0.1}, ValueError, "weight_decay_rate must be a number from 0, got"),
        ({"beta_1": 1.0}, ValueError, r"beta_1 must be a number from 0 up to 1 \(not included\)"),
        ({"beta_2": True}, ValueError, "beta_2 must be a number"),
        ({"epsilon": "0"}, ValueError, "epsilon must be a number from 0, got '0'"),
        ({"exclude_from_weight_decay": [3]}, TypeError, "regular expressions, strings, got"),
        ({"exclude_from_weight_decay": "("}, ValueError, r"'\(', which is no regular expression"),
    ],
    "AverageOptimizer": [
        ({"decay": 1.0}, ValueError, "decay must be a decay from 0 up to 1"),
        ({"decay": [0.5]}, ValueError, "decay must be a decay from 0 up to 1"),
        ({"num_updates": "all"}, TypeError, "num_updates must be True"),
        ({"num_updates": True, "zero_debias": True}, ValueError, "zero_debias needs a decay"),
        ({"zero_debias": 1}, TypeError, "zero_debias must be a boolean"),
    ],
    "ClipByGlobalNormOptimizer": [
        ({"clip_norm": 0}, ValueError, "clip_norm"),
        ({"clip_norm": -1}, ValueError, "clip_norm"),
        ({"clip_norm": "x"}, TypeError, "clip_norm"),
        ({"clip_norm": None}, TypeError, "clip_norm"),
    ],
    "CrossShardOptimizer": [
        *(
            ({"reduction": reduction}, ValueError, "reduction must be")
            for reduction in ("mean", "none", None, 3, tf.losses.Reduction.NONE)
        ),
        *(
            ({"group_assignment": groups}, ValueError, "list of lists")
            for groups in ("01", 3, [0, 1], [[0, 1], 2], [[0, "1"]], [[0, 1.0]], [[True, False]])
        ),
        *(
            ({"group_assignment": groups, **FOUR}, ValueError, words)
            for groups, words in (
                ([[0, 1], [2]], r"missing \[3\]"),
                ([[0, 1], [2, 9]], r"missing \[3\], unknown \[9\]"),
                ([[0, 1], [2, 2]], r"missing \[3\], repeated \[2\]"),
                ([[0, 1, 2], [3]], r"equal sizes.*\[3, 1\]"),
                ([[0, 1, 2, 3], []], r"equal sizes.*\[4, 0\]"),
            )
        ),
    ],
    "GradientAccumulationOptimizer": [
        ({"backward_passes_per_step": 0}, ValueError, "backward_passes_per_step.*0"),
        ({"backward_passes_per_step": -2}, ValueError, "backward_passes_per_step.*-2"),
        ({"backward_passes_per_step": 1.5}, ValueError, "backward_passes_per_step.*1.5"),
        ({"backward_passes_per_step": True}, ValueError, "backward_passes_per_step"),
        ({"backward_passes_per_step": "4"}, ValueError, "backward_passes_per_step"),
        ({"accumulator_dtype": tf.int32}, ValueError, "accumulator_dtype.*int32"),
        ({"accumulator_dtype": "wide"}, ValueError, "accumulator_dtype.*wide"),
        ({"accumulate": "here"}, ValueError, "accumulate.*'here'"),
        ({"accumulate": "local"}, ValueError, "mesh_shape and layout"),
        ({"should_skip_update_fn": 3}, TypeError, "should_skip_update_fn.*3"),
        ({"should_skip_update_fn": gs.skip_large_updates}, TypeError, "should_skip_update_fn"),
        ({"max_steps_without_update": 0}, ValueError, "max_steps_without_update"),
        (
            {"backward_passes_per_step": 8, "max_steps_without_update": 5},
            ValueError,
            "5: an update takes backward_passes_per_step=8",
        ),
        (
            {
                "opt": lambda: tf.train.GradientDescentOptimizer(1.0),
                "max_steps_without_update": 3,
            },
            ValueError,
            "max_steps_without_update",
        ),
        (
            {"opt": lambda: gs.GradientAccumulationOptimizer(sgd(), 2)},
            ValueError,
            "product of both",
        ),
    ],
    "LossScaleOptimizer": [
        ({"loss_scale": "static"}, ValueError, SCALE),
        ({"loss_scale": 0}, ValueError, SCALE),
        ({"loss_scale": float("inf")}, ValueError, SCALE),
        ({"loss_scale": True}, ValueError, SCALE),
        ({"loss_scale": 1e-60}, ValueError, "that float32 can hold"),
        ({"initial_scale": -1.0}, ValueError, "initial_scale must be greater than 0"),
        (
            {"max_scale": 1e39},
            ValueError,
            r"max_scale must be greater than 0, from 1e-30 to 1e\+30",
        ),
        (
            {"min_scale": 1e-60},
            ValueError,
            r"min_scale must be greater than 0, from 1e-30 to 1e\+30",
        ),
        ({"initial_scale": 2.0**30}, ValueError, "between min_scale and max_scale"),
        ({"min_scale": 4.0, "initial_scale": 2.0}, ValueError, "between min_scale and max_scale"),
        ({"multiplier": 1.0}, ValueError, "multiplier must be finite and greater than 1"),
        ({"growth_steps": 0}, ValueError, f"growth_steps {NUMBER}"),
        ({"growth_steps": 1.5}, ValueError, f"growth_steps {NUMBER}"),
        ({"max_steps_without_update": 1.5}, ValueError, "max_steps_without_update"),
        ({"opt": lambda: tf.train.GradientDescentOptimizer(0.1)}, TypeError, "MeshOptimizer"),
    ],
    "OuterOptimizer": [
        ({"inner_steps": 0}, ValueError, f"inner_steps {NUMBER}"),
        ({"inner_steps": 2.5}, ValueError, f"inner_steps {NUMBER}"),
        ({"fragments": 0}, ValueError, f"fragments {NUMBER}"),
        ({"inner_steps": 4, "fragments": 3}, ValueError, "must be a multiple of fragments"),
        ({"inner_steps": 2, "fragments": 4}, ValueError, "must be a multiple of fragments"),
        ({"outer_learning_rate": 0}, ValueError, "outer_learning_rate must be gr"),
        ({"outer_learning_rate": "a"}, ValueError, "outer_learning_rate must be gr"),
        ({"outer_momentum": 1.0}, ValueError, "outer_momentum must be from 0"),
        ({"outer_momentum": -0.1}, ValueError, "outer_momentum must be from 0"),
        ({"max_steps_without_update": 1}, ValueError, "an outer step every .* 2 updates"),
        (NO_MESH, ValueError, "there is no mesh yet"),
        ({**NO_MESH, "fragments": 2, "outer_dims": ()}, ValueError, "there is no mesh yet"),
        ({"outer_dims": "rows"}, ValueError, "outer_dims must be names in batch_dims"),
        (
            {**TWO_LEVELS, "layout": "batch:b", "outer_dims": "outer"},
            ValueError,
            r"splits none of the outer_dims ..outer... Add a layout rule .* outer_dims=\(\)",
        ),
        (
            {"opt": lambda: gs.ShardedUpdateOptimizer(sgd(), **FOUR)},
            ValueError,
            r"each of the islands along .'batch'. has one",
        ),
    ],
    "ShardedUpdateOptimizer": [
        ({"mesh_shape": "all:1", "layout": ""}, ValueError, "one replica"),
        (NO_MESH, ValueError, "there is no mesh yet"),
        ({"min_size": -1}, ValueError, "min_size must be"),
        ({"opt": lambda: gs.CrossShardOptimizer(sgd())}, ValueError, "turn them round"),
    ],
    "SyncReplicasOptimizer": [
        (NO_MESH, ValueError, "mesh"),
        ({"replicas_to_aggregate": 0}, ValueError, "replicas_to_aggregate"),
        ({"total_num_replicas": 3}, ValueError, "total_num_replicas.*4"),
        ({"variable_averages": 0.9}, ValueError, "variables_to_average"),
        ({"variable_averages": 2, "variables_to_average": []}, ValueError, "decay"),
        ({"max_steps_without_update": 0}, ValueError, "max_steps_without_update"),
    ],
}
CASES = [(name, *case) for name, cases in REFUSED.items() for case in cases] + [
    (name, *case) for name in sorted(wrappers.exported()) for case in OF_EVERY_WRAPPER
]


@pytest.mark.parametrize(("name", "arguments", "error", "words"), CASES)
def test_it_is_refused_before_anything_is_in_the_graph(name, arguments, error, words, fresh_graph):
    with pytest.raises(error, match=words):
        wrapped(name, **arguments)
    assert not fresh_graph.get_operations()


@pytest.mark.parametrize("name", sorted({*wrappers.exported(), *REFUSED}))
def test_the_docstring_names_just_these_errors(name):
    """A new wrapper has to have both."""
    text = inspect.getdoc(getattr(gs, name).__init__).partition("Raises:\n")[2]
    documented = set(re.findall(r"^\s*(\w+Error):", text, re.MULTILINE))
    assert name in REFUSED, "tests/optimizers/test_refusals.py has no refusals of it"
    assert documented == {error.__name__ for n, _, error, _ in CASES if n == name}


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        (lambda: gs.MuonOptimizer(0.1), "MuonOptimizer updates matrices, and 'b'"),
        (
            lambda: gs.ByVariable(sgd(), [("b", gs.MuonOptimizer(0.1))]),
            "MuonOptimizer updates matrices, and 'b'",
        ),
        (
            lambda: gs.AdamWOptimizer(0.1, rounding="stochastic"),
            "float16",
        ),
        (
            lambda: gs.MeshOptimizer(tf.train.AdamOptimizer(0.1), rounding="stochastic"),
            "float16",
        ),
    ],
)
def test_a_variable_is_refused_before_wrappers_make_their_state(inner, words, fresh_graph):
    del fresh_graph
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    variable = mtf.get_variable(mesh, "b", mtf.Shape([mtf.Dimension("d", 4)]), tf.float16)
    opt = gs.AverageOptimizer(gs.ClipByGlobalNormOptimizer(inner(), 1.0), zero_debias=True)
    opt = gs.GradientAccumulationOptimizer(gs.LossScaleOptimizer(opt), 2)
    loss = mtf.reduce_sum(mtf.square(variable))
    grads = mtf.gradients([loss], [variable])
    step = tf.train.get_or_create_global_step()
    with harness.unchanged(mesh.graph), pytest.raises(ValueError, match=words):
        opt.minimize(loss, step)
    with harness.unchanged(mesh.graph), pytest.raises(ValueError, match=words):
        opt.apply_grads(grads, [variable.operation], weights=3.0)


def test_a_second_step_of_a_loss_scale_is_refused_before_others_make_their_state(fresh_graph):
    del fresh_graph
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    a, b = (mtf.get_variable(mesh, n, mtf.Shape([mtf.Dimension("d", 4)])) for n in "ab")
    grads = mtf.gradients([mtf.reduce_sum(mtf.square(a) * b)], [a, b])
    opt = gs.LossScaleOptimizer(sgd())
    opt.apply_grads(grads[:1], [a.operation])
    around = gs.AverageOptimizer(opt, zero_debias=True)
    with harness.unchanged(mesh.graph), pytest.raises(ValueError, match="has applied gradients"):
        around.apply_grads(grads[1:], [b.operation])
    assert around.apply_grads([None], [b.operation]) == []
