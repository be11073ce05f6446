"""Programs in the manner of real ones are the same training, however they are divided."""

import pytest

import mtf_gradsync as gs
from tests.programs import table
from tests.programs.expected import feeds, loss_of
from tests.programs.wrappers import WRAPPERS, Maker

# A stack for each program that it can have, and all of them in some program.
STACKS = {
    "gpt": "average(clip(sharded))",
    "seq2seq": "local",
    "own_adam": "loss_scale(cross_shard)",
    "own_loop": "sum_shards",
    "field": "clip",
    "bert": "cross_shard",
    "bert_not_clipped": "replicas(clip)",
    "mixture": "synced",
    "recomputed": "replicas",
    "penalty": "local(sharded)",
    "spectral": "cross_shard",
}


def program(style, name):
    def step(mesh, inputs, params):
        loss = loss_of(style, mesh, inputs)
        variables = mesh.graph.trainable_variables
        grads = style.gradients([loss], [v.value for v in variables])
        axes = gs.ReplicaAxes(params["mesh_shape"], params["layout"], style.batch_dims)
        optimizer = WRAPPERS[name].wrap(style.optimizer(mesh, inputs), Maker(axes))
        return loss, style.apply(optimizer, grads, variables)

    return step


@pytest.mark.slow
@pytest.mark.parametrize("name", STACKS)
def test_nothing_is_reported(name):
    (style,) = table.STYLES[name]
    params = {"mesh_shape": style.shape, "layout": style.layout}
    kinds = ["batch", "order", "wrappers", "masked"]
    # Two clip by a norm of their own, which each microbatch then has.
    kinds += ["microbatches"] * (style.clip is None)
    found = gs.verify(program(style, STACKS[name]), feeds([style]), params, divisions=kinds)
    compared = [line for line in found.lines if line.verdict != "cannot be"]
    assert {line.verdict for line in compared} == {"equal"}, str(found)
    # The program itself, and more than one other.
    assert found.lines[0] in compared
    assert len(compared) > 2, str(found)
