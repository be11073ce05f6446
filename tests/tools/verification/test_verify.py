"""What `verify` answers for programs that are right, and what it says of bad input."""

import functools
import json

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync import estimator
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.tools.train.cli.main import main
from mtf_gradsync.tools.verification.program_patches import recording
from mtf_gradsync.tools.verification.recorded_program import Changes
from tests import harness, models
from tests.tools.train.conftest import TINY
from tests.tools.verification.faults import MESH, accumulated, along, batches, gradients, model, sgd


def clipped(mesh, inputs, params):
    loss = mtf.reduce_mean(model(mesh, inputs)[0])
    opt = gs.CrossShardOptimizer(gs.ClipByGlobalNormOptimizer(sgd(), 0.05))
    return loss, opt.minimize(loss)


def averaged(mesh, inputs, params, is_outermost):
    loss = mtf.reduce_mean(model(mesh, inputs)[0])
    clip = functools.partial(gs.ClipByGlobalNormOptimizer, clip_norm=0.05)
    average = functools.partial(gs.AverageOptimizer, decay=0.9)
    outer, inner = (average, clip) if is_outermost else (clip, average)
    return loss, outer(inner(gs.CrossShardOptimizer(sgd()))).minimize(loss)


def grouped(mesh, inputs, params):
    loss = mtf.reduce_mean(model(mesh, inputs)[0])
    adamw = functools.partial(gs.AdamWOptimizer, learning_rate=0.1)
    opt = gs.ByVariable(adamw, [("v", None), ("w", {"learning_rate_factor": 0.5})])
    return loss, gs.CrossShardOptimizer(opt).minimize(loss)


def replicas(mesh, inputs, params):
    loss = mtf.reduce_mean(model(mesh, inputs)[0])
    mesh_of = {name: params[name] for name in ("mesh_shape", "layout")}
    opt = gs.SyncReplicasOptimizer(mtf.optimize.AdafactorOptimizer(learning_rate=0.1), 4, **mesh_of)
    return loss, opt.apply_grads(*gradients(loss, mesh))


def weighted_shards(mesh, inputs, params, steps=1, shown="losses"):
    """A mean over the tokens of each shard, joined by how many these are."""
    each, weights = model(mesh, inputs)
    (batch,) = each.shape.dims
    count = along(params, "batch")
    shards, rows = mtf.Dimension("batch", count), mtf.Dimension("rows", batch.size // count)
    split = mtf.Shape([shards, rows])
    weights = mtf.reshape(weights + 0.25, split)  # no shard is without tokens
    tokens = mtf.reduce_sum(weights, reduced_dim=rows)
    losses = mtf.reduce_sum(mtf.reshape(each, split) * weights, reduced_dim=rows) / tokens
    opt = gs.CrossShardOptimizer(sgd())
    opt = accumulated(opt, params) if steps > 1 else opt
    updates = opt.minimize(losses, weights=tokens)
    return losses if shown == "losses" else mtf.reduce_mean(losses), updates


@pytest.mark.slow
def test_losses_of_shards_with_weights_are_compared_by_their_weighted_mean():
    found = gs.verify(weighted_shards, batches, MESH, divisions=["wrappers"])
    assert set(verdicts(found).values()) == {"equal"}, str(found)
    over_two = functools.partial(weighted_shards, steps=2)
    found = gs.verify(over_two, batches, MESH, steps=2, divisions=["batch", "runtimes"])
    assert set(verdicts(found).values()) == {"equal"}, str(found)
    # One that shows a mean of means is told, also where microbatch steps are joined.
    wrong = functools.partial(weighted_shards, steps=2, shown="mean of means")
    found = gs.verify(wrong, batches, MESH, divisions=())
    assert set(verdicts(found).values()) == {"NOT EQUAL"}
    assert "the loss that is shown" in found.lines[0].cause


@pytest.mark.parametrize("where", ["everywhere", "in a scope"])
def test_ref_variables(where, caplog):
    """Where they are TensorFlow's default they become resource variables; a scope's are named."""

    def step(mesh, inputs, params):
        with tf.variable_scope("refs", use_resource=None if where == "everywhere" else False):
            loss = mtf.reduce_mean(model(mesh, inputs)[0])
        return loss, sgd().apply_grads(*gradients(loss, mesh))

    tf.disable_resource_variables()
    try:
        found = gs.verify(step, batches, MESH, divisions=(), runtime="placement_mesh")
    finally:
        tf.enable_resource_variables()
    if where == "everywhere":
        assert verdicts(found) == {"as configured": "equal"}
        assert "verified with resource variables, but on placement meshes" in caplog.text
    else:
        assert "' is a TensorFlow ref variable" in found.lines[0].cause
        assert "do not make it with use_resource=False" in found.lines[0].cause


def verdicts(found):
    return {line.division: line.verdict for line in found.lines}


@pytest.mark.slow
def test_every_division_of_a_right_program_is_equal():
    found = gs.verify(clipped, batches, MESH, steps=3)
    assert set(verdicts(found).values()) == {"equal"}, str(found)
    assert len(found.lines) >= 8
    assert found.source == "float64"
    # An error would be the number of shards, at least.
    assert all(line.error < 1e-5 for line in found.lines)


@pytest.mark.slow
@pytest.mark.parametrize("is_outermost", [True, False])
def test_clipping_beside_averages_has_its_part_in_the_reference(is_outermost):
    program = functools.partial(averaged, is_outermost=is_outermost)
    found = gs.verify(program, batches, MESH, divisions=["wrappers"])
    assert len(found.lines) == 4, str(found)
    assert set(verdicts(found).values()) == {"equal"}, str(found)


@pytest.mark.slow
def test_groups_of_variables_of_which_one_stays_as_it_is():
    """Wrappers do not reduce its gradient, so that none is compared."""
    found = gs.verify(grouped, batches, MESH, steps=2, divisions=["batch", "wrappers"])
    assert len(found.lines) >= 3, str(found)
    assert set(verdicts(found).values()) == {"equal"}, str(found)


@pytest.mark.slow
def test_a_masked_shard_has_no_part_in_the_reference():
    found = gs.verify(replicas, batches, MESH, divisions=["masked", "wrappers"])
    assert verdicts(found) == {
        "as configured": "equal",
        "without SyncReplicasOptimizer": "equal",
        "shard 3 masked": "equal",
    }, str(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": {"layout": ""}}, "params has no mesh_shape: got"),
        ({"steps": 0}, "steps must be a positive integer, got 0"),
        ({"divisions": ["modle"]}, "divisions must be among .*got 'modle'"),
        ({"without": ["noise"]}, "without must be among dropout, random, capacity; got 'noise'"),
        ({"input_fn": list}, "The batches ended after 0 of 1 updates"),
    ],
)  # fmt: skip
def test_bad_input_is_named(change, message):
    given = {"program": clipped, "input_fn": batches, "params": MESH, **change}
    with pytest.raises(ValueError, match=message):
        gs.verify(**given)


def test_the_stack_is_as_before_afterwards():
    made = []

    def program(mesh, inputs, params):
        loss = mtf.reduce_mean(model(mesh, inputs)[0])
        made.append(gs.CrossShardOptimizer(sgd()))
        return loss, made[-1].minimize(loss)

    before = mtf.optimize.SgdOptimizer.apply_grad, gs.CrossShardOptimizer.apply_grads
    assert gs.verify(program, batches, MESH, divisions=["wrappers"]).is_equal
    assert (mtf.optimize.SgdOptimizer.apply_grad, gs.CrossShardOptimizer.apply_grads) == before
    assert all(isinstance(opt.opt, mtf.optimize.SgdOptimizer) for opt in made)
    assert "__init_subclass__" not in vars(mtf.optimize.Optimizer)


@pytest.mark.slow
def test_the_command_verifies_a_config(capsys, tmp_path):
    files = [f"--json={tmp_path / 'v.json'}", f"--png={tmp_path / 'v.png'}"]
    assert main(["verify", f"--gin_file={TINY}", "--divisions=batch", *files]) == 0
    assert "The same training, however it is divided." in capsys.readouterr().out
    said = json.loads((tmp_path / "v.json").read_text())
    assert said["is_equal"]
    assert len(said["lines"]) >= 2
    assert (tmp_path / "v.png").stat().st_size > 1000
    wrong = ["--gin_param=train.run.optimizer = @GradientAccumulationOptimizer",
             "--gin_param=GradientAccumulationOptimizer.opt = @AdafactorOptimizer",
             "--gin_param=GradientAccumulationOptimizer.backward_passes_per_step = 2",
             "--gin_param=GradientAccumulationOptimizer.average_aggregated_gradients = False",
             ]  # fmt: skip
    assert main(["verify", f"--gin_file={TINY}", "--divisions=wrappers", *wrong]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "is 2.00 of what it must be" in out
    assert "K, the microbatch steps" in out
    assert "equal without GradientAccumulationOptimizer" in out


@pytest.mark.slow
def test_a_model_fn_with_a_context_runs_on_each_runtime():
    def model_fn(features, labels, mode, params):
        build = estimator.SpecBuilder(
            mode, params, mesh_shape=params["mesh_shape"], layout=params["layout"]
        )
        loss = mtf.reduce_mean(model(build.mesh, {**features, "weights": labels})[0])
        opt = gs.CrossShardOptimizer(sgd())
        return build.train(loss, opt.minimize(loss), opt)

    def input_fn(params):
        assert params["rate"] == 1
        (batch, _) = (b for b, _ in zip(batches(), range(2)))
        data = ({"x": batch["x"]}, batch["weights"])
        return tf.data.Dataset.from_tensors(data).repeat()

    found = gs.verify(model_fn, input_fn, {**MESH, "rate": 1}, divisions=["runtimes", "batch"])
    assert set(verdicts(found).values()) == {"equal"}, str(found)
    assert {line.runtime for line in found.lines} >= {"placement_mesh", "cpu_replicas"}
    assert np.isfinite(found.lines[0].error)


def test_an_update_without_a_wrapper_is_in_order():
    (feed,) = models.mlp_batches(1)
    build = models.train(models.OPTIMIZERS["adam"])
    with recording(Changes()):
        made = harness.built("placement", *harness.MESHES["2"][:2], build, feed)
    assert not made.races()
