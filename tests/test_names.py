"""Messages about variables: how many there are and the first three; names near an unknown one."""

import pytest

import mtf_gradsync as gs
from mtf_gradsync._common import close_to, counted, did_you_mean, some_of, warn_of_unmatched
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.runtimes.saving import initialize_from
from mtf_gradsync.tools.estimator.specs import warm_start


def test_names_of_a_message():
    assert some_of(["a", "b", "c"]) == "a, b, c"
    assert some_of(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert counted(["a"], "variable") == "variable a"
    assert counted(["a", "b"], "variable") == "2 variables: a, b"
    assert counted(list("abcd"), "variable") == "4 variables: a, b, c and 1 more"


def test_names_that_come_near():
    names = ["block_000/layer_norm/scale", "block_000/ffn/kernel", "embedding"]
    assert close_to("LayerNorm", names) == names[:1]
    assert close_to("embeding", names) == names[2:]
    assert close_to("kernel", [*names, "kernel"]) == ["kernel", names[1]]
    assert close_to("step", ["train_steps", "seed"], most=1) == ["train_steps"]
    assert did_you_mean("LayerNorm", names) == "; did you mean block_000/layer_norm/scale?"
    assert did_you_mean("xyz", names) == did_you_mean("", []) == ""


def test_a_pattern_in_no_name_is_told_once(caplog):
    for _ in range(2):
        warn_of_unmatched("what", ["LayerNorm", "ker.el$"], ["a/layer_norm", "a/kernel"])
    assert caplog.messages == [
        "what: 'LayerNorm' is in no name of 2 variables: a/kernel, a/layer_norm; did you mean "
        "a/layer_norm?"
    ]


def exclude(*names):
    return {"weight_decay_rate": 0.1, "exclude_from_weight_decay": names}


OPTIMIZERS = {
    "AdamWOptimizer": lambda *names: gs.AdamWOptimizer(0.1, **exclude(*names)),
    "AdamWeightDecayOptimizer": lambda *names: mtf.optimize.AdamWeightDecayOptimizer(
        0.1, **exclude(*names)
    ),
    "AdafactorOptimizer": lambda *names: mtf.optimize.AdafactorOptimizer(
        learning_rate=0.1, exclude_from_parameter_scale=names
    ),
}


@pytest.mark.parametrize("wrap", [lambda opt: opt, gs.CrossShardOptimizer], ids=["bare", "wrapped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_patterns_of_optimizers_that_are_in_no_name(name, wrap, caplog):
    mesh, d = mtf.Mesh(mtf.Graph(), "mesh"), mtf.Dimension("d", 2)
    for variable in ("layer_norm/scale", "dense/kernel", "dense/bias"):
        mtf.get_variable(mesh, variable, mtf.Shape([d]))
    variables = mesh.graph.trainable_variables[1:]
    grads = [mtf.ones(mesh, mtf.Shape([d]))] * 2
    # The optimizer has two of three variables; the pattern may be for the other one.
    wrap(OPTIMIZERS[name]("layer_norm", "bias", "LayerNorm")).apply_grads(grads, variables)
    (line,) = caplog.messages
    assert line.startswith(f"{name}: exclude_from_")
    assert "'LayerNorm' is in no name of 3 variables" in line
    assert line.endswith("; did you mean layer_norm/scale?")


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of two variables."""
    with tf.Graph().as_default(), tf.Session() as session:
        for name in ("w", "encoder/LayerNorm/scale"):
            tf.get_variable(name, [2])
        session.run(tf.global_variables_initializer())
        return tf.train.Saver().save(session, str(tmp_path / "model"))


def test_a_string_in_place_of_a_list_of_patterns_is_told(caplog):
    """Of which Mesh-TensorFlow takes each letter; AdamWOptimizer takes it as one pattern."""
    mesh, shape = mtf.Mesh(mtf.Graph(), "mesh"), mtf.Shape([mtf.Dimension("d", 2)])
    mtf.get_variable(mesh, "dense/bias", shape)
    for adam in (mtf.optimize.AdamWeightDecayOptimizer, gs.AdamWOptimizer):
        with tf.variable_scope(adam.__name__):
            opt = adam(0.1, weight_decay_rate=0.1, exclude_from_weight_decay="bias")
            opt = gs.CrossShardOptimizer(opt)
            opt.apply_grads([mtf.ones(mesh, shape)], mesh.graph.trainable_variables)
    (line,) = caplog.messages
    assert line.startswith("AdamWeightDecayOptimizer: exclude_from_weight_decay='bias' is no list")


def test_names_that_a_checkpoint_has_otherwise(checkpoint):
    for name in ("w", "w/adam_m", "encoder/layer_norm/scale"):
        tf.get_variable(name, [2])
    text = initialize_from(checkpoint, tf.global_variables())
    *_, first, second = text.splitlines()
    assert first == "  encoder/layer_norm/scale (it has encoder/LayerNorm/scale)"
    assert second == "  w/adam_m"


def test_patterns_of_a_warm_start(checkpoint, caplog):
    for name in ("w", "v"):
        tf.get_variable(name, [2])
    warm_start((checkpoint, ["w", "vv"], None, None))
    assert caplog.messages[0].startswith(
        "warm_start_from: vars_to_warm_start: 'vv' is in no name of 2 variables: v, w"
    )


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
