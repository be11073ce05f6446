"""Gradients through each of Mesh-TF's operations: foreseen sums are met, and are right."""

import inspect

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.gradients.shards import mixed_gradients
from tests import harness, models
from tests.gradients.flow.foreseen import EPS, check_foreseen

MESH, LAYOUT, _ = harness.MESHES["2x2"]
AXES = gs.ReplicaAxes(MESH, LAYOUT)
F32 = tf.float32  # kernels of pools and convolutions in three dimensions have no other

BATCH, HIDDEN, LEAD = (
    mtf.Dimension("batch", 4),
    mtf.Dimension("hidden", 4),
    mtf.Dimension("lead", 2),
)
ODD, OUT = mtf.Dimension("odd", 3), mtf.Dimension("out", 3)
DEPTH, HEIGHT, WIDTH = (mtf.Dimension(n, 2) for n in ("depth", "height", "width"))
FILTER = [mtf.Dimension(n, 2) for n in ("fd", "fh", "fw")]
VECTOR, PLANE, SPACE = [HIDDEN, ODD], [HEIGHT, WIDTH, HIDDEN], [DEPTH, HEIGHT, WIDTH, HIDDEN]


def number(x, value):
    return mtf.constant(x.mesh, value, mtf.Shape([]), tf.int32)


def convolution(kind, strides, padding, transposed=False):
    sides = FILTER[5 - len(strides) :]
    ends = [OUT, HIDDEN] if transposed else [HIDDEN, OUT]

    def apply(x, variable):
        return kind(x, variable([*sides, *ends]), strides, padding).outputs[0]

    return apply


def pool(name):
    size = [2, 2] if name.endswith("2D") else [2, 2, 2]
    return lambda x, _: mtf.PoolOperation(x, size, size, name).outputs[0]


def doubled(x, _):
    """With a gradient of the program's own."""

    def gradient(output_grads, **others):
        return [3.0 * output_grads[0]]

    return mtf.custom_gradient(lambda t: 2.0 * t, gradient, [x])


def depending(x, _):
    return mtf.depend(x, [mtf.square(x)])


def read_again(x, variable):
    return x * mtf.read_variable(variable([ODD]).operation)


def along(dim, offset, wrap):
    return lambda x, _: mtf.shift(x, offset, dim, wrap)


# name -> the dimensions that it takes, and what it does; `variable` makes another one.
OPERATIONS = {
    "conv2d": (PLANE, convolution(mtf.Conv2dOperation, [1, 1, 1, 1], "SAME")),
    "conv2d valid": (PLANE, convolution(mtf.Conv2dOperation, [1, 1, 1, 1], "VALID")),
    "conv2d strides": (PLANE, convolution(mtf.Conv2dOperation, [1, 2, 2, 1], "SAME")),
    "conv3d": (SPACE, convolution(mtf.Conv3dOperation, [1, 1, 1, 1, 1], "SAME")),
    "conv2d transpose": (
        PLANE, convolution(mtf.Conv2dTransposeOperation, [1, 2, 2, 1], "SAME", True),
    ),
    "conv3d transpose": (
        SPACE, convolution(mtf.Conv3dTransposeOperation, [1, 2, 2, 2, 1], "SAME", True),
    ),
    **{name: (PLANE, pool(name)) for name in ("MAX_2D", "AVG_2D")},
    **{name: (SPACE, pool(name)) for name in ("MAX_3D", "AVG_3D")},
    "shift": (VECTOR, along(ODD, 1, False)),
    "shift around": (VECTOR, along(ODD, -2, True)),
    "shift over processors": (VECTOR, along(HIDDEN, 1, False)),
    "shift around processors": (VECTOR, along(HIDDEN, 3, True)),
    "dynamic shift": (VECTOR, lambda x, _: mtf.dynamic_shift(x, number(x, 1), ODD, False)),
    "dynamic shift around": (VECTOR, lambda x, _: mtf.dynamic_shift(x, number(x, 2), ODD, True)),
    "halo": ([HEIGHT, *VECTOR], lambda x, _: mtf.halo_exchange(x, HEIGHT, ODD, 1)),
    "slice": (VECTOR, lambda x, _: mtf.slice(x, 1, 2, "odd")),
    "pad": (VECTOR, lambda x, _: mtf.pad(x, [1, 2], "odd")),
    "concat": (VECTOR, lambda x, _: mtf.concat([x, mtf.square(x)], "odd")),
    "split": (VECTOR, lambda x, _: mtf.split(x, ODD, [1, 2])[1]),
    "stack": (VECTOR, lambda x, _: mtf.stack([x, mtf.square(x)], "pair")),
    "unstack": (VECTOR, lambda x, _: mtf.add_n([mtf.square(t) for t in mtf.unstack(x, ODD)])),
    "cumsum": (VECTOR, lambda x, _: mtf.cumsum(x, ODD)),
    "gather": (VECTOR, lambda x, _: mtf.gather(x, number(x, 1), ODD)),
    "gather over processors": (VECTOR, lambda x, _: mtf.gather(x, number(x, 1), HIDDEN)),
    "top k": (VECTOR, lambda x, _: mtf.top_k(x, ODD, mtf.Dimension("top", 2))[0]),
    "maximum": (VECTOR, lambda x, _: mtf.maximum(x, 0.5 * x)),
    "times": (VECTOR, lambda x, v: x * v([HIDDEN])),
    "divided": (VECTOR, lambda x, v: x / v([ODD])),
    "plus": (VECTOR, lambda x, v: x + v([ODD])),
    "minus": (VECTOR, lambda x, v: 1.0 - x - v([HIDDEN])),
    "power": (VECTOR, lambda x, _: mtf.pow(mtf.square(x) + 1.0, 1.5)),
    "where": (VECTOR, lambda x, _: mtf.where(mtf.greater(x, 0.1), x, 2.0 * x)),
    "broadcast": (VECTOR, lambda x, _: mtf.broadcast(x, mtf.Shape([OUT, *x.shape.dims]))),
    "broadcast over processors": (
        [ODD], lambda x, _: mtf.broadcast(x, mtf.Shape([HIDDEN, *x.shape.dims])),
    ),
    "reduce sum": (VECTOR, lambda x, _: mtf.reduce_sum(x, reduced_dim=HIDDEN)),
    "reduce mean": (VECTOR, lambda x, _: mtf.reduce_mean(x, reduced_dim=ODD)),
    "reduce max": (VECTOR, lambda x, _: mtf.reduce_max(x, reduced_dim=HIDDEN)),
    "reduce min": (VECTOR, lambda x, _: mtf.reduce_min(x, reduced_dim=ODD)),
    "einsum": (VECTOR, lambda x, v: mtf.einsum([x, v([HIDDEN, OUT])], reduced_dims=[HIDDEN])),
    "transpose": (VECTOR, lambda x, _: mtf.transpose(x, mtf.Shape(x.shape.dims[::-1]))),
    "rename": (VECTOR, lambda x, _: mtf.rename_dimension(x, "hidden", "not_split")),
    "softmax": (VECTOR, lambda x, _: mtf.softmax(x, HIDDEN)),
    "log softmax": (VECTOR, lambda x, _: mtf.log_softmax(x, ODD)),
    "logsumexp": (VECTOR, lambda x, _: mtf.reduce_logsumexp(x, HIDDEN)),
    "softplus": (VECTOR, lambda x, _: mtf.softplus(x)),
    "leaky relu": (VECTOR, lambda x, _: mtf.leaky_relu(x)),
    "squared relu": (VECTOR, lambda x, _: mtf.squared_relu(x)),
    "gelu": (VECTOR, lambda x, _: mtf.gelu(x)),
    "rsqrt": (VECTOR, lambda x, _: mtf.rsqrt(mtf.square(x) + 1.0)),
    "abs": (VECTOR, lambda x, _: mtf.abs(x)),
    "cast": (VECTOR, lambda x, _: mtf.cast(mtf.cast(x, tf.float64), F32)),
    "stop gradient": (VECTOR, lambda x, _: x * mtf.stop_gradient(x)),
    "depend": (VECTOR, depending),
    "print": (VECTOR, lambda x, _: mtf.Print(x, [mtf.reduce_sum(x)], "x", first_n=0)),
    "read variable": (VECTOR, read_again),
    "custom gradient": (VECTOR, doubled),
    "recomputed": (VECTOR, lambda x, v: mtf.recompute_grad(lambda t: mtf.tanh(t), [x])),
    "summary": (VECTOR, lambda x, _: x * mtf.scalar_summary("s", mtf.reduce_sum(x)).outputs[0]),
    "pool 1d": (VECTOR, lambda x, _: mtf.pool_tensor_1d(x, ODD, mtf.reduce_sum, 3)),
}  # fmt: skip


def variables_of(mesh):
    rng = np.random.RandomState(0)
    count = iter(range(10**4))

    def variable(dims):
        value = rng.uniform(0.5, 1.0, [d.size for d in dims])
        name = f"v{next(count)}"
        return models.variable(mesh, name, dims, value, dtype=F32)

    return variable


def build_on(shards, lead, names=tuple(OPERATIONS)):
    """A program with every operation on what has the batch, or on weights that it then meets."""

    def build(mesh, inputs):
        variable = variables_of(mesh)
        x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([BATCH, OUT]))
        z = mtf.reduce_sum(x, reduced_dim=OUT)
        terms = []
        for dims, apply in map(OPERATIONS.get, names):
            if lead == BATCH:
                given = mtf.einsum([x, variable([OUT, *dims])], mtf.Shape([BATCH, *dims]))
                made = apply(given, variable)
            else:
                made = apply(variable([LEAD, *dims]), variable)
                made = mtf.multiply(made, z, output_shape=mtf.Shape([BATCH, *made.shape.dims]))
            terms.append(mtf.reduce_sum(mtf.square(made)))
        values = [v.value for v in mesh.graph.trainable_variables]
        grads = mtf.gradients([mtf.add_n(terms)], values)
        fetches = {f"whole{i}": g for i, g in enumerate(gs.sum_shards(grads)) if g is not None}
        mixed = mixed_gradients(grads, AXES) if shards else {}
        own = [None if i in mixed else g for i, g in enumerate(grads)] if shards else []
        for i, rows in enumerate(gs.per_shard(own, AXES) if shards else []):
            if rows is not None:
                fetches[f"shards{i}"] = rows
        return [], fetches

    return build


# A SIMD mesh takes no control dependencies; on a placement mesh every device has operations of its
# own, so that all of this takes many times as long.
ON_SIMD = [name for name in OPERATIONS if name != "depend"]
ON_PLACEMENT = [
    *("conv2d", "AVG_2D", "shift around processors", "halo", "dynamic shift", "split", "unstack"),
    *("gather over processors", "broadcast over processors", "log softmax", "depend", "print"),
    *("read variable", "custom gradient", "recomputed", "summary"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lead", "names"),
    [
        ("simd", BATCH, ON_SIMD[::2]),
        ("simd", BATCH, ON_SIMD[1::2]),
        ("simd", LEAD, ON_SIMD[::2]),
        ("simd", LEAD, ON_SIMD[1::2]),
        ("placement", LEAD, ON_PLACEMENT),
    ],
    ids=["simd-batch", "simd-batch-others", "simd-weights", "simd-weights-others", "placement"],
)
def test_foreseen_is_met_and_right(kind, lead, names):
    shards = kind == "placement"  # as large a program again
    feed = {"x": np.random.RandomState(1).uniform(0.5, 1.5, [BATCH.size, OUT.size]).astype("f")}
    of_one = build_on(False, lead, names)
    (expected,) = harness.run("placement", *harness.ONE, of_one, [feed]).fetched
    build = build_on(shards, lead, names)
    found = harness.run(kind, MESH, LAYOUT, build, [feed], autostack=False)
    check_foreseen(found.lowering)
    for name, value in expected.items():
        atol = EPS["simd"] * max(1.0, np.max(np.abs(value)))
        np.testing.assert_allclose(found.fetched[0][name], value, rtol=0, atol=atol, err_msg=name)
        parts = found.fetched[0].get(name.replace("whole", "shards"))
        if parts is not None:
            np.testing.assert_allclose(parts.sum(0), value, rtol=0, atol=atol, err_msg=name)


def test_no_operation_with_a_gradient_is_missing(fresh_graph):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    build_on(True, LEAD)(mesh, {"x": tf.ones([BATCH.size, OUT.size], F32)})
    base = mtf.Operation
    kinds = [
        kind
        for kind in vars(mtf.ops).values()
        if inspect.isclass(kind) and issubclass(kind, base) and kind.gradient is not base.gradient
    ]
    assert len(kinds) > 20
    made = mesh.graph.operations
    assert [k.__name__ for k in kinds if not any(isinstance(op, k) for op in made)] == []
