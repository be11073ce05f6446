"""Each verdict is earned: what says nothing, and what is wrong, is never called the same."""

import functools
from typing import Any, Callable, NamedTuple

import pytest

import mtf_gradsync as gs
from mtf_gradsync import estimator
from mtf_gradsync._private.libraries import mtf, tf
from tests.tools.verification.faults import (
    MESH,
    STEPS,
    AllReduceAgain,
    D,
    H,
    accumulated,
    along,
    batches,
    gradients,
    lowered_spec,
    model,
    placement_mesh,
    sgd,
    variable,
)
from tests.tools.verification.reported_faults import OnCores, one, times

EQUAL, NOT_EQUAL, NOT_SHOWN, CANNOT_BE = "equal", "NOT EQUAL", "not shown", "cannot be"


def updated(mesh, loss, change=lambda g, v: g, wrap=lambda opt: opt):
    grads, variables = gradients(loss, mesh)
    return wrap(sgd()).apply_grads([change(g, v) for g, v in zip(grads, variables)], variables)


def again(g, _=None):
    return one(AllReduceAgain, g, "batch")


def zeros(mesh, name, *dims, trainable=False, dtype=tf.float32):
    return mtf.get_variable(
        mesh,
        name,
        mtf.Shape(list(dims)),
        initializer=tf.zeros_initializer(),
        trainable=trainable,
        dtype=dtype,
    )


def with_dropout(mesh, inputs, params, wrong):
    loss = mtf.reduce_mean(mtf.dropout(model(mesh, inputs)[0], True, keep_prob=0.9))
    return loss, updated(mesh, loss, again if wrong == "all-reduce" else lambda g, v: g)


def dropout_over_k(mesh, inputs, params):
    loss = mtf.reduce_mean(mtf.dropout(model(mesh, inputs)[0], True, keep_prob=0.9))
    return loss, accumulated(gs.CrossShardOptimizer(sgd()), params, average=False).minimize(loss)


def named_capacity(mesh, inputs, params):
    """A dimension's name is no excuse."""
    loss = mtf.reduce_mean(model(mesh, inputs)[0])
    read = variable(mesh, "room", mtf.Dimension("capacity", 4))
    loss += mtf.reduce_sum(mtf.square(read))
    return loss, updated(mesh, loss, again)


def own_mesh(features, labels, mode, params):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    loss = mtf.reduce_mean(model(mesh, features)[0])
    updates = gs.CrossShardOptimizer(sgd()).minimize(loss)
    mesh_impl = placement_mesh({"mesh_shape": "batch:4;model:2", "layout": "batch:batch"})
    return lowered_spec(mtf.Lowering(graph, {mesh: mesh_impl}), mode, loss, updates)


def all_nan(mesh, inputs, params):
    loss = mtf.reduce_mean(mtf.sqrt(model(mesh, inputs)[0] * -1.0))
    return loss, gs.CrossShardOptimizer(sgd()).minimize(loss)


def one_nan(mesh, inputs, params):
    loss = mtf.reduce_mean(model(mesh, inputs)[0])
    loss += mtf.reduce_sum(mtf.sqrt(variable(mesh, "bias") * 0.0))
    return loss, gs.CrossShardOptimizer(sgd()).minimize(loss)


def on_last_row(mesh, inputs, params):
    loss = mtf.reduce_mean(model(mesh, inputs)[0])
    return loss, updated(mesh, loss, lambda g, v: one(OnCores, g, times(5, core=3)))


def moving_mean(mesh, inputs, params, wrong=False, steps=1):
    loss = mtf.reduce_mean(model(mesh, inputs)[0])
    opt = gs.CrossShardOptimizer(sgd())
    updates = (accumulated(opt, params) if steps > 1 else opt).minimize(loss)
    mean = zeros(mesh, "mean")
    new = again(loss * 1.0) if wrong else loss
    return loss, [*updates, mtf.assign(mean, mean * 0.9 + new * 0.1)]


def averages(mesh, inputs, params):
    loss = mtf.reduce_mean(model(mesh, inputs)[0])
    inner = mtf.optimize.AdafactorOptimizer(learning_rate=0.1)
    return loss, gs.AverageOptimizer(gs.CrossShardOptimizer(inner), 0.9).minimize(loss)


def last_layer_of_zeros(mesh, inputs, params):
    batch = mtf.Dimension("batch", int(inputs["x"].shape[0]))
    x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, D]))
    w, v = variable(mesh, "w", D, H), zeros(mesh, "v", H, trainable=True)
    hidden = mtf.tanh(mtf.einsum([x, w], mtf.Shape([batch, H])))
    loss = mtf.reduce_mean(mtf.square(mtf.einsum([hidden, v], mtf.Shape([batch])) - 1.0))
    return loss, updated(mesh, loss, lambda g, v: again(g) if v.name == "w" else g)


def in_bfloat16(mesh, inputs, params, weights):
    dtype = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)
    batch = mtf.Dimension("batch", int(inputs["x"].shape[0]))
    x = mtf.cast(mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, D])), tf.bfloat16)
    first = tf.random_normal_initializer(stddev=0.5)
    w = mtf.get_variable(mesh, "w", mtf.Shape([D]), initializer=first, dtype=dtype)
    each = mtf.square(mtf.cast(mtf.einsum([x, w], mtf.Shape([batch])), tf.float32) - 1.0)
    mask = mtf.import_tf_tensor(mesh, inputs["weights"], mtf.Shape([batch]))
    tokens = mtf.reduce_sum(mask)
    loss = mtf.reduce_sum(each * mask) / tokens
    opt = accumulated(gs.CrossShardOptimizer(sgd()), params)
    return loss, opt.minimize(loss, weights=tokens if weights else None)


def masked_mean(mesh, inputs, params, weights):
    each, mask = model(mesh, inputs)
    tokens = mtf.reduce_sum(mask)
    loss = mtf.reduce_sum(each * (mask / tokens))
    opt = accumulated(gs.CrossShardOptimizer(sgd()), params)
    return loss, opt.minimize(loss, weights=tokens if weights else None)


def balanced(mesh, inputs, params):
    each, _ = model(mesh, inputs)
    batch = mtf.Dimension("batch", int(inputs["x"].shape[0]))
    experts = mtf.Dimension("gates", 4)
    x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, D]))
    gates = mtf.softmax(
        mtf.einsum([x, variable(mesh, "gate", D, experts)], mtf.Shape([batch, experts])), experts
    )
    chosen = mtf.one_hot(mtf.argmax(gates, experts), experts)
    means = [mtf.reduce_mean(y, output_shape=mtf.Shape([experts])) for y in (gates, chosen)]
    loss = mtf.reduce_mean(each) + mtf.reduce_sum(means[0] * means[1]) * 4.0
    return loss, gs.CrossShardOptimizer(sgd()).minimize(loss)


def normalized(mesh, inputs, params, average=True):
    """Batch normalization."""
    batch = mtf.Dimension("batch", int(inputs["x"].shape[0]))
    x = mtf.import_tf_tensor(mesh, inputs["x"], mtf.Shape([batch, D]))
    hidden = mtf.einsum([x, variable(mesh, "w", D, H)], mtf.Shape([batch, H]))
    hidden -= mtf.reduce_mean(hidden, output_shape=mtf.Shape([H]))
    square = mtf.reduce_mean(mtf.square(hidden), output_shape=mtf.Shape([H]))
    hidden = mtf.tanh(hidden * mtf.rsqrt(square + 1e-3))
    out = mtf.einsum([hidden, variable(mesh, "v", H)], mtf.Shape([batch]))
    loss = mtf.reduce_mean(mtf.square(out - 1.0))
    opt = accumulated(gs.CrossShardOptimizer(sgd()), params, average)
    return loss, opt.minimize(loss)


def softplus(mesh, inputs, params):
    loss = mtf.softplus(mtf.reduce_mean(model(mesh, inputs)[0]))
    return loss, updated(mesh, loss)


def bare(mesh, inputs, params):
    loss = mtf.reduce_mean(model(mesh, inputs)[0])
    return loss, updated(mesh, loss)


def rate_by(features, labels, mode, params, count):
    build = estimator.SpecBuilder(
        mode, params, mesh_shape=params["mesh_shape"], layout=params["layout"]
    )
    loss = mtf.reduce_mean(model(build.mesh, features)[0])
    step = tf.identity(tf.train.get_or_create_global_step().read_value())
    if count == "updates":
        rate = 0.1 / (1.0 + mtf.cast(gs.get_update_step(build.mesh), tf.float32))
    else:
        step = step // STEPS if count == "steps over K" else step
        rate = 0.1 / (1.0 + tf.cast(step, tf.float32))
        rate = mtf.import_tf_tensor(build.mesh, rate, mtf.Shape([]))
    opt = accumulated(gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(rate)), params)
    return build.train(loss, opt.minimize(loss), opt)


def counted_early(mesh, inputs, params):
    """On a mesh of several cores the step is counted before the rate reads it."""
    loss = mtf.reduce_mean(model(mesh, inputs)[0])
    step = zeros(mesh, "step")
    later = step + 1.0
    read = later if along(params, "batch") > 1 else step
    opt = mtf.optimize.SgdOptimizer(0.1 / (read + 1.0))
    updates = opt.apply_grads(*gradients(loss, mesh))
    return loss, [*updates, mtf.assign(step, later)]


def tiny_rate(mesh, inputs, params, wrong):
    """Steps that change values by a few roundings."""
    loss = mtf.reduce_mean(model(mesh, inputs)[0])
    rate = 1e-6 * (along(params, "batch") if wrong else 1)
    return loss, updated(mesh, loss, wrap=lambda _: mtf.optimize.SgdOptimizer(rate))


def growing(mesh, inputs, params, average=True):
    """K is 2 in the first update, and 4 from then on."""
    loss = mtf.reduce_mean(model(mesh, inputs)[0])
    opt = gs.GradientAccumulationOptimizer(
        gs.CrossShardOptimizer(mtf.optimize.AdafactorOptimizer(learning_rate=0.1)),
        lambda update: 2 + 2 * mtf.minimum(update, 1),
        average,
        mesh_shape=params["mesh_shape"],
        layout=params["layout"],
    )
    return loss, opt.minimize(loss)


class LowersAtOnce(mtf.Graph):
    """A graph whose operations are lowered when they are made, once it has a lowering."""

    lowering, is_busy = None, False

    @property
    def operations(self):
        if self.lowering is not None and not self.is_busy:
            self.is_busy = True
            for operation in list(self._operations):
                if operation not in {*self.lowering.operations, *self.done}:
                    self.done.append(operation)
                    operation.lower(self.lowering)
            self.is_busy = False
        return self._operations


def lowered_at_once(features, labels, mode, params):
    """As where a session-like object shares one mesh among all that is made on it."""
    graph = LowersAtOnce()
    graph.done = []
    mesh = mtf.Mesh(graph, "mesh")
    graph.lowering = mtf.Lowering(graph, {mesh: placement_mesh(params)})
    loss = mtf.reduce_mean(model(mesh, features)[0])
    updates = sgd().apply_grads(*gradients(loss, mesh))
    assert graph.operations
    return lowered_spec(graph.lowering, mode, loss, updates)


def own_masks(mesh, inputs, params):
    """Accumulates by itself: gradients are zero on the steps before an update."""
    loss = mtf.reduce_mean(model(mesh, inputs)[0])
    grads, variables = gradients(loss, mesh)
    is_second = zeros(mesh, "is_second")
    sums = [zeros(mesh, f"{v.name}_sum", *v.shape.dims) for v in variables]
    totals = [s + g for s, g in zip(sums, grads)]
    updates = sgd().apply_grads([x * is_second / 2.0 for x in totals], variables)
    keeps = [mtf.assign(s, x * (1.0 - is_second)) for s, x in zip(sums, totals)]
    return loss, [*updates, *keeps, mtf.assign(is_second, 1.0 - is_second)]


def in_order(mesh, inputs, params, wrong=False):
    """Only the first examples reach the loss, as with a full expert."""
    each, _ = model(mesh, inputs)
    (batch,) = each.shape.dims
    rank = mtf.mtf_range(mesh, batch, dtype=tf.float32)
    shards = along(params, "batch") if wrong else 1
    limit = float(batch.size // 2 + (shards > 1))
    loss = mtf.reduce_mean(each * mtf.cast(mtf.less(rank, limit), tf.float32))
    return loss, updated(mesh, loss)


class Case(NamedTuple):
    """A program, and what is said of it.

    Attributes:
      program: the program.
      verdict: of each division.
      says: a part of what is said.
      last: the beginning of the last line.
      options: more arguments of `verify`.
    """

    program: Callable[..., Any]
    verdict: str
    says: str
    last: str
    options: dict[str, Any] = {}  # noqa: RUF012


_NOT, _SAME, _OPEN = "Not the same training:", "The same training", "Not shown: as configured"
_P = functools.partial
CASES = {
    "dropout, and two all-reduces": Case(
        _P(with_dropout, wrong="all-reduce"), NOT_EQUAL, "is 4.00 of what it must be", _NOT
    ),
    "dropout": Case(
        _P(with_dropout, wrong=""), EQUAL, "equal without random numbers",
        "Equal without random numbers", {"divisions": ["microbatches"]},
    ),
    "dropout, taken out": Case(
        _P(with_dropout, wrong=""), EQUAL, "", _SAME, {"without": ["dropout"]}
    ),
    "dropout, and K without division": Case(
        dropout_over_k, NOT_EQUAL, "K, the microbatch steps", _NOT
    ),
    "a name with capacity": Case(named_capacity, NOT_EQUAL, "is 4.00 of what it must be", _NOT),
    "a mesh of its own": Case(
        own_mesh, NOT_SHOWN, 'let it read params["mesh_shape"]', _OPEN, {"divisions": ["batch"]}
    ),
    "NaN": Case(all_nan, NOT_SHOWN, "The loss of the reference is nan", _OPEN),
    "NaN in one variable": Case(one_nan, NOT_SHOWN, "The gradient of bias is not finite", _OPEN),
    "the last row of cores": Case(on_last_row, NOT_EQUAL, "copies of v differ", _NOT),
    "the last row of cores, by XLA": Case(
        on_last_row, NOT_EQUAL, "copies of v differ", _NOT, {"runtime": "xla"}
    ),
    "a moving mean times 4": Case(
        _P(moving_mean, wrong=True), NOT_EQUAL, "slot of mean is 4.00", _NOT
    ),
    "a moving mean": Case(moving_mean, EQUAL, "2 slots", _SAME, {"divisions": ["microbatches"]}),
    "a moving mean over K": Case(
        _P(moving_mean, steps=2), EQUAL, "2 slots", _SAME, {"divisions": ["wrappers"]}
    ),
    "averages": Case(averages, EQUAL, "5 slots", _SAME, {"divisions": ["wrappers"]}),
    "a last layer of zeros": Case(
        last_layer_of_zeros, NOT_EQUAL, "gradient of w is 4.00", _NOT
    ),
    "a last layer of zeros, as it is": Case(
        last_layer_of_zeros, NOT_SHOWN, "The gradient of w is zero everywhere", _OPEN,
        {"own_values": True},
    ),
    "a mean of means in bfloat16": Case(
        _P(in_bfloat16, weights=False), NOT_EQUAL, "give weights=", _NOT
    ),
    "weights in bfloat16": Case(
        _P(in_bfloat16, weights=True), EQUAL, "all in float32 in place of bfloat16", _SAME
    ),
    "a masked mean, divided first": Case(_P(masked_mean, weights=True), EQUAL, "", _SAME),
    "a masked mean, without weights": Case(
        _P(masked_mean, weights=False), NOT_EQUAL, "give weights=", _NOT
    ),
    "a loss that balances": Case(
        balanced, NOT_EQUAL, "a product of means over the batch",
        "Not the same training: 2 microbatch steps.", {"divisions": ["microbatches"]},
    ),
    "batch normalization": Case(
        normalized, EQUAL, "equal without statistics of the batch", "Equal without statistics"
    ),
    "batch normalization, and K without division": Case(
        _P(normalized, average=False), NOT_EQUAL, "K, the microbatch steps", _NOT
    ),
    "softplus of a pending sum": Case(softplus, EQUAL, "", _SAME, {"divisions": ["runtimes"]}),
    "a mesh that cannot be": Case(
        bare, CANNOT_BE, "not divisible", "Not shown: mesh batch:3;model:1",
        {"meshes": ["batch:3;model:1"]},
    ),
    "no wrapper, in microbatches": Case(bare, EQUAL, "", _SAME, {"divisions": ["microbatches"]}),
    "a rate by global_step // K": Case(
        _P(rate_by, count="steps over K"), EQUAL, "", _SAME,
        {"divisions": ["wrappers"], "steps": 3},
    ),
    "a rate by get_update_step": Case(
        _P(rate_by, count="updates"), EQUAL, "", _SAME, {"divisions": ["wrappers"], "steps": 3}
    ),
    "a rate that is K times too fast": Case(
        _P(rate_by, count="steps"), NOT_EQUAL, "base it on gs.get_update_step", _NOT
    ),
    "a step that is counted early": Case(
        counted_early, NOT_EQUAL, "The program counts its step (step) before or after", _NOT
    ),
    "a tiny rate": Case(_P(tiny_rate, wrong=False), EQUAL, "", _SAME, {"divisions": ["batch"]}),
    "a tiny rate, times the shards": Case(
        _P(tiny_rate, wrong=True), NOT_EQUAL, "change of v is", _NOT
    ),
    "K that grows": Case(
        growing, EQUAL, "of 3 updates, of 2, 4, 4 batches", _SAME,
        {"divisions": ["wrappers"], "steps": 3},
    ),
    "K that grows, without division": Case(
        _P(growing, average=False), NOT_EQUAL, "average_aggregated_gradients=True", _NOT,
        {"divisions": [], "steps": 2},
    ),
    "operations that are lowered at once": Case(
        lowered_at_once, CANNOT_BE, "2 microbatch steps: A wrapper's operation is lowered before",
        "The same training in the one division that can be", {"divisions": ["microbatches"]},
    ),
    "masks of its own": Case(own_masks, EQUAL, "2 batches each", _SAME, {"divisions": ["batch"]}),
    "the order of examples": Case(in_order, EQUAL, "", _SAME),
    "the order of examples, divided": Case(
        _P(in_order, wrong=True), NOT_SHOWN, "The same examples in another order", _OPEN
    ),
}  # fmt: skip


@pytest.mark.mostly_slow(every=26)
@pytest.mark.parametrize("name", CASES)
def test_each_verdict_is_earned(name):
    case = CASES[name]
    if case.options.get("runtime") == "xla":
        pytest.importorskip("jax")
    options = {"divisions": [], **case.options}
    if "meshes" in options:
        del options["divisions"]
    found = gs.verify(case.program, batches, MESH, **options)
    text = " ".join(str(found).split())
    assert case.verdict in {line.verdict for line in found.lines}, text
    if case.verdict == EQUAL:
        assert {line.verdict for line in found.lines} == {EQUAL}, text
    assert case.says in text, text
    assert str(found).splitlines()[-1].startswith(case.last), text
    is_equal = case.last.startswith(("The same", "Equal"))
    code = 0 if is_equal else 1 if case.verdict == NOT_EQUAL else 3
    assert found.exit_code == code
