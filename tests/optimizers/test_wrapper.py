"""The interface that every wrapper keeps: construction, arguments, slots, errors."""

import functools
from unittest import mock

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, models, reference

WRAPPERS = {
    "cross_shard": gs.CrossShardOptimizer,
    "accumulation": functools.partial(gs.GradientAccumulationOptimizer, backward_passes_per_step=2),
    "clip": functools.partial(gs.ClipByGlobalNormOptimizer, clip_norm=1e6),
}
features = mtf.Dimension("d", 3)
AXES = gs.ReplicaAxes("all:3", "batch:all")


class Recorder(mtf.optimize.Optimizer):
    """Keeps what it was called with."""

    def __init__(self, learning_rate="not given"):
        self.learning_rate = learning_rate
        self.calls = []

    def apply_grads(self, grads, variables):
        self.calls.append((grads, variables))
        return []


def model(graph=None):
    graph = graph or mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    shape = mtf.Shape([features])
    variables = [
        mtf.get_variable(mesh, name, shape, initializer=tf.ones_initializer()).operation
        for name in ("w", "w_1", "v")
    ]
    return mesh, variables


@pytest.fixture(params=sorted(WRAPPERS))
def wrapper(request):
    return WRAPPERS[request.param]


def test_a_learning_rate_in_the_place_of_adafactors_flag_is_told_once(wrapper, caplog):
    adafactor = mtf.optimize.AdafactorOptimizer
    for right in (adafactor(), adafactor(np.bool_(False)), adafactor(learning_rate=0.1)):
        wrapper(right)
    assert not caplog.messages
    for _ in range(2):
        wrapper(gs.CrossShardOptimizer(adafactor(0.1)))
    (line,) = caplog.messages
    assert "multiply_by_parameter_scale=0.1" in line
    assert "AdafactorOptimizer(learning_rate=...)" in line


@pytest.mark.parametrize("form", ["class", "factory", "partial"])
@pytest.mark.parametrize("learning_rate", [0.5, None, "tf", "mtf"])
def test_a_class_or_factory_gets_the_learning_rate_untouched(wrapper, form, learning_rate):
    if learning_rate == "tf":
        learning_rate = tf.constant(0.5)
    elif learning_rate == "mtf":
        learning_rate = mtf.constant(model()[0], 0.5, mtf.Shape([]))
    opt = {
        "class": Recorder,
        "factory": lambda learning_rate: Recorder(learning_rate),
        "partial": functools.partial(Recorder),
    }[form]
    assert wrapper(learning_rate=learning_rate, opt=opt).opt.learning_rate is learning_rate


def test_an_instance_is_used_as_it_is(wrapper):
    inner = Recorder()
    assert wrapper(inner).opt is inner
    assert wrapper(inner, learning_rate=None).opt is inner


def test_wrappers_nest_around_anything_with_apply_grads(wrapper):
    class Duck:
        def apply_grads(self, grads, variables):
            return []

    assert isinstance(wrapper(gs.CrossShardOptimizer(Duck())).opt, gs.CrossShardOptimizer)


def test_a_stack_without_an_end_is_an_error(wrapper):
    class Own(Recorder):
        def __init__(self):
            self.optimizer = self

    with pytest.raises(ValueError, match=r"contains itself: Own > Own "):
        wrapper(Own())
    with pytest.raises(ValueError, match=r"contains itself: Mock > Mock > Mock "):
        wrapper(mock.Mock())  # it makes up an optimizer inside of each
    mesh, variables = model()
    outer = wrapper(gs.CrossShardOptimizer(Recorder()))
    outer.opt.opt = outer
    names = f"{type(outer).__name__} > CrossShardOptimizer > {type(outer).__name__}"
    for call in (
        lambda: outer.apply_grads([None] * 3, variables),
        lambda: outer.apply_grad(mtf.ones(mesh, mtf.Shape([features])), variables[0]),
        lambda: outer.minimize(mtf.reduce_sum(variables[0].value)),
        lambda: outer.get_slot(variables[0], "m"),
        lambda: gs.reported(outer),
        lambda: gs.ClipByGlobalNormOptimizer(outer, 1.0),
        outer.get_slot_names,
        outer.variables,
        outer.innermost,
    ):
        with pytest.raises(ValueError, match=f"contains itself: {names}"):
            call()


def test_real_keras_optimizers_are_refused(wrapper):
    keras = pytest.importorskip("tensorflow").keras
    with pytest.raises(TypeError, match="Keras"):
        wrapper(keras.optimizers.SGD(0.1))


def test_none_gradients_pass_through_and_lists_stay_as_they_were(wrapper):
    mesh, variables = model()
    inner = Recorder()
    grads = [None, mtf.ones(mesh, mtf.Shape([features])), None]
    before = list(grads), list(variables)
    wrapper(inner).apply_grads(grads, variables)
    assert (grads, variables) == before
    ((passed, seen),) = inner.calls
    assert [g is None for g in passed] == [True, False, True]
    assert list(seen) == variables
    owners = {v.name.split("/")[0] for v in mesh.graph.all_variables if not v.trainable}
    assert owners <= {"w_1", "GradientAccumulationOptimizer"}


def test_no_gradients_give_no_operations(wrapper, fresh_graph):
    mesh, variables = model()
    before = len(mesh.graph.operations), len(fresh_graph.get_operations())
    inner = Recorder()
    assert wrapper(inner).apply_grads([None] * 3, variables) == []
    assert wrapper(inner).apply_grads([], []) == []
    assert wrapper(inner).apply_grad(None, variables[0]) == []
    assert not inner.calls
    assert (len(mesh.graph.operations), len(fresh_graph.get_operations())) == before


def test_the_live_list_of_trainable_variables_and_a_single_pair(wrapper):
    mesh, variables = model()
    grads = [mtf.ones(mesh, mtf.Shape([features])) for _ in variables]
    optimizer = wrapper(mtf.optimize.SgdOptimizer(0.5))
    operations = optimizer.apply_grads(grads, mesh.graph.trainable_variables)
    operations += optimizer.apply_grad(grads[0], variables[0])
    lowering = mtf.Lowering(mesh.graph, {mesh: harness.placement("all:2", "")})
    assert all(lowering.lowered_operation(op) is not None for op in operations)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda o, g, v: o.apply_grads([g], v), ValueError, "1 gradients for 3 variables"),
        (lambda o, g, v: o.apply_grads(g, v[:1]), TypeError, "grads must be a list"),
        (lambda o, g, v: o.apply_grads([3], v[:1]), TypeError, r"grads\[0\] is 3"),
        (lambda o, g, v: o.apply_grads([g], [3]), TypeError, r"variables\[0\] is 3"),
        (lambda o, g, v: o.apply_grads([g], v[0]), TypeError, "variables must be a list"),
        (lambda o, g, v: o.apply_grads([g, g], [v[0]] * 2), ValueError, "'w' is twice"),
        (lambda o, g, v: o.apply_grads([mtf.reduce_sum(g)], v[:1]), ValueError, "'w' has shape"),
        (lambda o, g, v: o.apply_gradients(None), ValueError, "grads_and_vars.*None"),
        (lambda o, g, v: o.apply_gradients([]), ValueError, "grads_and_vars"),
        (lambda o, g, v: o.apply_gradients([g]), ValueError, "item 0"),
        (lambda o, g, v: o.apply_gradients([(g, v[0], 1)]), ValueError, "item 0"),
        (lambda o, g, v: o.apply_gradients([(g, v[0])], 3), TypeError, "global_step.*3"),
        (lambda o, g, v: o.apply_gradients([(g, v[0])], v[1]), ValueError, "scalar"),
        (lambda o, g, v: o.compute_gradients(3.0), TypeError, "loss.*3.0"),
        (lambda o, g, v: o.compute_gradients(g, [3]), TypeError, r"variables\[0\]"),
        (lambda o, g, v: o.compute_gradients(g, []), ValueError, "no variables"),
        (lambda o, g, v: o.minimize(g, global_step="x"), TypeError, "global_step"),
    ],
)
def test_bad_calls_leave_both_graphs_as_they_were(wrapper, call, error, words, fresh_graph):
    mesh, variables = model()
    grad = mtf.ones(mesh, mtf.Shape([features]))
    if "has shape" in words:
        scalar = mtf.ones(mesh, mtf.Shape([]))
        call = lambda o, g, v: o.apply_grads([scalar], v[:1])  # noqa: E731
    optimizer = wrapper(Recorder())

    def state():
        graph = mesh.graph
        return (
            len(graph.operations),
            len(graph.all_variables),
            dict(graph.name_to_variable),
            len(fresh_graph.get_operations()),
        )

    before = state()
    with pytest.raises(error, match=words):
        call(optimizer, grad, variables)
    assert state() == before
    assert not optimizer.opt.calls


def test_gradient_and_variable_on_different_meshes(wrapper):
    mesh, variables = model()
    other = mtf.ones(mtf.Mesh(mesh.graph, "other"), mtf.Shape([features]))
    with pytest.raises(ValueError, match="different meshes"):
        wrapper(Recorder()).apply_grads([other], variables[:1])


def test_slots_of_the_whole_stack(wrapper):
    mesh, variables = model()
    grads = [mtf.ones(mesh, mtf.Shape([features])) for _ in variables]
    optimizer = wrapper(gs.CrossShardOptimizer(mtf.optimize.AdamWeightDecayOptimizer(0.1)))
    optimizer.apply_grads(grads, variables)
    assert set(optimizer.get_slot_names()) >= {"adam_m", "adam_v"}
    for variable in variables:
        slot = optimizer.get_slot(variable, "adam_m")
        assert slot.name == variable.name + "/adam_m"
        assert not slot.trainable
    assert optimizer.get_slot(variables[0], "momentum_v") is None
    names = [v.name for v in optimizer.variables()]
    assert len(names) == len(set(names))
    assert len([n for n in names if "adam" in n]) == 6


def test_slots_of_similar_names_keep_their_owners():
    mesh, variables = model()
    grads = [mtf.ones(mesh, mtf.Shape([features])) for _ in variables]
    optimizer = gs.CrossShardOptimizer(mtf.optimize.MomentumOptimizer(0.1, 0.9))
    optimizer.apply_grads(grads, variables)
    for variable in variables:
        assert optimizer.get_slot(variable, "momentum_v").name == variable.name + "_momentum_v"


def test_slots_of_several_graphs_keep_their_owners(wrapper):
    optimizer = wrapper(mtf.optimize.MomentumOptimizer(0.1, 0.9))
    weights = []
    for _ in range(2):
        with tf.Graph().as_default():
            mesh, (w, *_) = model()
            optimizer.apply_grads([mtf.ones(mesh, w.shape)], [w])
        weights.append(w)
    slots = [optimizer.get_slot(w, "momentum_v") for w in weights]
    assert [slot.graph for slot in slots] == [w.graph for w in weights]


def test_an_inner_optimizer_answers_for_its_slots(wrapper):
    class Answers(Recorder):
        def get_slot(self, var, name):
            return (var.name, name)

        def get_slot_names(self):
            return ["mine"]

        def variables(self):
            return ["state"]

    optimizer = wrapper(Answers())
    _, variables = model()
    assert optimizer.get_slot(variables[0], "mine") == ("w", "mine")
    assert optimizer.get_slot_names()[0] == "mine"
    assert optimizer.variables()[0] == "state"


@pytest.mark.mostly_slow
def test_minimize_equals_compute_and_apply(wrapper):
    def minimize(mesh, inputs):
        loss = models.mlp_loss(mesh, inputs)
        return wrapper(models.OPTIMIZERS["adam"]()).minimize(loss), {"loss": loss}

    feeds = models.mlp_batches(3)
    make = lambda: wrapper(models.OPTIMIZERS["adam"]())  # noqa: E731
    one = harness.run("placement", "all:2", "batch:all", minimize, feeds)
    two = harness.run("placement", "all:2", "batch:all", models.train(make), feeds)
    reference.assert_equal(one.variables, two.variables)


def test_an_error_inside_leaves_the_mesh_graph_as_it_was(wrapper):
    class Fails(mtf.optimize.SgdOptimizer):
        def apply_grads(self, grads, variables):
            super().apply_grads(grads, variables)
            raise RuntimeError("inside")

    mesh, variables = model()
    grads = [mtf.ones(mesh, mtf.Shape([features])) for _ in variables]
    graph = mesh.graph
    before = [list(graph.operations), list(graph.all_variables), dict(graph.name_to_variable)]
    optimizer = wrapper(gs.ClipByGlobalNormOptimizer(Fails(0.1), 1.0))
    with pytest.raises(RuntimeError, match="inside"):
        optimizer.apply_grads(grads, variables)
    assert before == [graph.operations, graph.all_variables, graph.name_to_variable]
    assert optimizer.variables() == optimizer.get_slot_names() == []


def test_an_optimizer_that_returns_nothing_is_named(wrapper):
    class Nothing(Recorder):
        def apply_grads(self, grads, variables):
            return None

    mesh, variables = model()
    grads = [mtf.ones(mesh, mtf.Shape([features])) for _ in variables]
    with pytest.raises(TypeError, match=r"Nothing.*list of mtf operations"):
        wrapper(Nothing()).apply_grads(grads, variables)


def test_variables_of_two_graphs_are_refused(wrapper):
    mesh, (w, *_) = model()
    with tf.variable_scope("other"):
        other, (x, *_) = model()
    grads = [mtf.ones(mesh, w.shape), mtf.ones(other, x.shape)]
    with pytest.raises(ValueError, match="several mtf graphs, 2"):
        wrapper(Recorder()).apply_grads(grads, [w, x])


ALL = dict(
    WRAPPERS,
    replicas=functools.partial(gs.SyncReplicasOptimizer, replicas_to_aggregate=1, axes=AXES),
    sharded=functools.partial(gs.ShardedUpdateOptimizer, min_size=1, axes=AXES),
)


@pytest.mark.parametrize("name", sorted(ALL))
def test_gradients_that_are_all_none_are_a_warning_that_names_the_variables(name, caplog):
    """As of a loss that depends on its variables through complex numbers alone."""
    _, variables = model()
    loss = mtf.reduce_sum(mtf.cast(mtf.cast(variables[0].value, tf.complex64), tf.float32))
    optimizer = ALL[name](Recorder())
    step = tf.train.get_or_create_global_step()
    for _ in range(2):
        optimizer.minimize(loss, step, variables)
    optimizer.apply_grads([], [])
    assert optimizer.opt.calls == []
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(optimizer.name)
    assert "3 variables: w, w_1, v" in record.getMessage()
    assert "complex numbers" in record.getMessage()


def test_one_gradient_that_is_none_is_no_warning(wrapper, caplog):
    mesh, variables = model()
    wrapper(Recorder()).apply_grads([mtf.ones(mesh, variables[0].shape), None], variables[:2])
    assert "trains nothing" not in caplog.text
