"""ShardedUpdateOptimizer works inside and around other wrappers, and refuses wrong arguments."""

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness, wrappers
from tests.optimizers.sharded_updates import small_model
from tests.optimizers.sharded_updates.small_model import (
    OPTIMIZERS,
    assert_close,
    assert_same_bits,
    batches,
    run,
    sharded,
)

MESH, NORM, STEPS = "2x2", 0.05, 4
# A norm that is a sum over parts rounds differently; values are around 1.
TOLERANCE = STEPS * 16 * np.finfo(np.float32).eps


def unsharded(optimizer="sgd"):
    """The optimizer that both orders of clipping and sharding are compared with."""
    return gs.ClipByGlobalNormOptimizer(OPTIMIZERS[optimizer](), NORM)


CLIPPED = {
    "inside": lambda optimizer="sgd": sharded(unsharded(optimizer), MESH),
    "around": lambda optimizer="sgd": gs.ClipByGlobalNormOptimizer(
        sharded(OPTIMIZERS[optimizer](), MESH), NORM
    ),
}


def wrap(outer, opt, axes):
    given = {"replicas_to_aggregate": 2, "initial_scale": 8.0}
    return wrappers.wrap(outer, opt, {"axes": axes}, **given) if outer else opt


@pytest.mark.parametrize(
    ("kind", "outer", "clipped", "optimizer"),
    [
        ("simd", "local", "around", "adam"),
        ("simd", "replicas", "around", "sgd"),
        ("simd", "cross_shard", "inside", "sgd"),
        ("simd", "loss_scale", "around", "sgd"),
        ("own memories", "", "around", "sgd"),
        pytest.param("xla", "local", "inside", "sgd", marks=pytest.mark.xla),
    ],
)
@pytest.mark.mostly_slow
def test_among_other_wrappers(kind, outer, clipped, optimizer):
    """The unsharded reference runs on one processor, or on the mesh if it counts replicas."""
    other = MESH if outer == "replicas" else "one"
    axes, axes_of_other = (gs.ReplicaAxes(*small_model.MESHES[mesh]) for mesh in (MESH, other))
    feeds = batches(STEPS)
    few = {"names": small_model.FEW}
    parts = run(kind, MESH, lambda: wrap(outer, CLIPPED[clipped](optimizer), axes), feeds, **few)
    where = "simd" if other == MESH else "placement"
    expected = run(
        where, other, lambda: wrap(outer, unsharded(optimizer), axes_of_other), feeds, **few
    )
    assert_close(trained(parts), trained(expected), TOLERANCE)


def trained(result):
    """Returns variables and slots, without the state of the outer wrapper."""
    return {
        name: value
        for name, value in result.variables.items()
        if name in small_model.SHAPES or name.endswith(("adam_m", "adam_v"))
    }


@pytest.mark.parametrize("outer", ["", "local", "loss_scale"])
@pytest.mark.mostly_slow
def test_clipping_around_parts_is_clipping_inside(outer):
    """The norm is computed from parts; no gradient is all-reduced for it."""
    axes, made = gs.ReplicaAxes(*small_model.MESHES[MESH]), {}
    for name, make in CLIPPED.items():
        made[name] = small_model.built(
            "simd", MESH, lambda make=make: wrap(outer, make(), axes), batches(1)[0],
            names=small_model.FEW,
        )  # fmt: skip
    rows = {
        name: [(row.operation, row.bytes_per_core) for row in x.collectives().rows]
        for name, x in made.items()
    }
    assert "XlaReduceScatter" in [operation for operation, _ in rows["around"]]
    assert sorted(rows["around"]) == sorted(rows["inside"])
    if not outer:
        assert_same_bits(*(x.run(batches(1)).variables for x in made.values()))


def test_nothing_to_split_is_an_error_before_anything_is_built():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    shape = mtf.Shape([mtf.Dimension("odd", 7)])
    w = mtf.get_variable(mesh, "w", shape, initializer=tf.ones_initializer()).operation
    grad = mtf.ones(mesh, shape)
    before = list(mesh.graph.operations)
    alone = sharded(OPTIMIZERS["adam"](), MESH)
    accumulation = gs.GradientAccumulationOptimizer(alone, 2, accumulate="synced")
    for opt in (alone, accumulation, gs.ClipByGlobalNormOptimizer(alone, NORM)):
        with pytest.raises(ValueError, match=r"nothing to split(.|\n)*'w'.*no unsplit dimension"):
            opt.apply_grads([grad], [w])
        assert mesh.graph.operations == before


def test_minimize_with_nothing_to_split_leaves_nothing_in_tensorflows_graph(fresh_graph):
    mesh, batch = mtf.Mesh(mtf.Graph(), "mesh"), mtf.Dimension("batch", 8)
    odd = mtf.Dimension("odd", 7)
    w = mtf.get_variable(mesh, "w", mtf.Shape([odd]), initializer=tf.ones_initializer())
    x = mtf.import_tf_tensor(mesh, tf.ones([8, 7]), mtf.Shape([batch, odd]))
    loss = mtf.reduce_mean(mtf.square(mtf.einsum([x, w], mtf.Shape([batch]))))
    before = fresh_graph.get_operations()
    for scale in ("dynamic", 8.0):
        opt = gs.LossScaleOptimizer(sharded(OPTIMIZERS["adam"](), MESH), scale)
        with pytest.raises(ValueError, match="nothing to split"):
            opt.minimize(loss)
        assert fresh_graph.get_operations() == before


@pytest.mark.slow
def test_reported_norms_are_those_of_unsharded_updates():
    def reported(wrap):
        made = []

        def build(mesh, inputs):
            operations, fetches = small_model.train(lambda: made.append(wrap()) or made[-1])(
                mesh, inputs
            )
            return operations, {**fetches, **gs.reported(made[-1])}

        shape, layout, _ = small_model.MESHES[MESH]
        return harness.run("simd", shape, layout, build, batches(1)).fetched[0]

    expected = reported(unsharded)
    assert len([name for name in expected if name.startswith("gradient_norm")]) == 3
    for make in CLIPPED.values():
        assert_close(reported(make), expected, TOLERANCE)
