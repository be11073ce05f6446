"""Programs in the manner of real ones are the same training, however they are divided."""

import numpy as np
import pytest

import mtf_gradsync as gs
from examples import gpt
from mtf_gradsync._private.libraries import mtf, tf
from tests.programs import table
from tests.programs.expected import feeds, loss_of
from tests.programs.wrappers import wrap

# A stack for each program that it can have, and most of them in some program; and kinds of
# divisions, all of them in some programs. Not into microbatches where the program clips by a norm
# of its own, which each of these then has.
CASES = {
    "gpt": ("average(clip(sharded))", ["batch", "microbatches"]),
    "seq2seq": ("local", ["order", "wrappers"]),
    "own_adam": ("loss_scale(cross_shard)", ["wrappers", "microbatches"]),
    "own_loop": ("sum_shards", ["batch", "order"]),
    "field": ("clip", ["order", "wrappers"]),
    "bert": ("cross_shard", ["order"]),
    "mixture": ("synced", ["batch", "wrappers"]),
    "recomputed": ("replicas", ["masked", "microbatches"]),
    "penalty": ("local(sharded)", ["order", "wrappers"]),
    "spectral": ("cross_shard", ["batch", "microbatches"]),
}


def program(style, name):
    def step(mesh, inputs, params):
        loss = loss_of(style, mesh, inputs)
        variables = mesh.graph.trainable_variables
        grads = style.gradients([loss], [v.value for v in variables])
        axes = gs.ReplicaAxes(params["mesh_shape"], params["layout"], style.batch_dims)
        optimizer = wrap(name, style.optimizer(mesh, inputs), axes)
        return loss, style.apply(optimizer, grads, variables)

    return step


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_reported(name):
    (style,), (stack, kinds) = table.STYLES[name], CASES[name]
    params = {"mesh_shape": style.shape, "layout": style.layout}
    found = gs.verify(program(style, stack), feeds([style]), params, divisions=kinds)
    compared = [line for line in found.lines if line.verdict != "cannot be"]
    assert {line.verdict for line in compared} == {"equal"}, str(found)
    # The program itself, and another.
    assert found.lines[0] in compared
    assert len(compared) > 1, str(found)


def gpt_step(mesh, inputs, params):
    batch, length = (
        mtf.Dimension(*x) for x in zip(("batch", "length"), inputs["inputs"].shape.as_list())
    )
    features = {
        name: mtf.import_fully_replicated(mesh, x, [batch, length]) for name, x in inputs.items()
    }
    grads, outputs = mtf.serialize_training_step(
        features,
        lambda part: {"loss": gpt.model(part, params, mtf.VariableDType(*params["dtypes"]))},
        batch,
        params["num_microbatches"],
    )
    loss = outputs["loss"]
    return loss, gpt.get_optimizer(mesh, loss, params, inp_var_grads=grads)[1]


@pytest.mark.slow
def test_the_example_in_the_style_of_gpt_neo_is_the_same_in_microbatches():
    narrow = (tf.float32, tf.float32, tf.bfloat16)
    small = {"n_ctx": 8, "n_embd": 16, "n_layer": 1, "dtypes": narrow}
    params = {**gpt.PARAMS, **small, "num_microbatches": 1}
    words = np.random.RandomState(0).randint(gpt.PARAMS["n_vocab"], size=[16, 9])
    batch = {"inputs": words[:, :-1].astype("i"), "targets": words[:, 1:].astype("i")}
    settings = [params, {**params, "num_microbatches": 2}]
    found = gs.verify(gpt_step, [batch], settings, divisions=["batch", "wrappers"])
    assert {line.verdict for line in found.lines} == {"equal"}, str(found)
    assert "params 2" in [line.division for line in found.lines]
