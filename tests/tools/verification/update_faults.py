"""More of such programs: faults of updates, slots, averages, counts, and of joined steps."""

from __future__ import annotations

import functools

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests.tools.verification.faults import (
    ACCUMULATION,
    BATCH_AXIS,
    CORES,
    CROSS_SHARD,
    MODEL_AXIS,
    SHARDS,
    Fault,
    H,
    accumulated,
    gradients,
    sgd,
)
from tests.tools.verification.reported_faults import half_of, network, norm_of, step


def state(mesh, name, shape=()):
    return mtf.get_variable(
        mesh, name, mtf.Shape(list(shape)), initializer=tf.zeros_initializer(), trainable=False
    )


class Descent(mtf.optimize.Optimizer):
    """Momentum, whose slots or steps depend on what they should not."""

    def __init__(self, of_slot=lambda slot: slot, of_value=lambda v, new: new):
        self._of_slot, self._of_value = of_slot, of_value

    def apply_grad(self, grad, var):
        slot = state(var.mesh, f"{var.name}/momentum", var.shape)
        momentum = slot * 0.9 + grad
        new = self._of_value(var, var.value - momentum * 0.1)
        return [mtf.assign(slot.operation, self._of_slot(momentum)), mtf.assign(var, new)]


def by(make):
    def update(grads, variables, n):
        return gs.CrossShardOptimizer(make(n)).apply_grads(grads, variables)

    return update


def followed_by(extra):
    """An update, and assignments of the program's own: `extra(mesh, grads, variables, n)`."""

    def update(grads, variables, n):
        updates = gs.CrossShardOptimizer(sgd()).apply_grads(grads, variables)
        return [*updates, *extra(variables[0].mesh, grads, variables, n)]

    return update


def counted(number):
    def extra(mesh, grads, variables, n):
        seen = state(mesh, "examples_seen")
        return [mtf.assign(seen.operation, seen + number(n))]

    return followed_by(extra)


def averaged(share):
    def extra(mesh, grads, variables, n):
        made = []
        for v in variables:
            average = state(mesh, f"{v.name}/average", v.shape)
            made.append(mtf.assign(average.operation, average + (v.value - average) * share(n)))
        return made

    return followed_by(extra)


def statistic(factor):
    def extra(mesh, grads, variables, n):
        moving = state(mesh, "moving_norm")
        norm = norm_of(grads, [1.0] * len(grads))
        return [mtf.assign(moving.operation, moving * 0.9 + norm * factor(n))]

    return followed_by(extra)


def without_last(grads, variables, n):
    """One variable is in no group of parameters where the model is split."""
    pairs = [(g, v) for g, v in zip(grads, variables) if n["model"] == 1 or v.name != "w"]
    return gs.CrossShardOptimizer(sgd()).apply_grads(*map(list, zip(*pairs)))


def stale(grads, variables, n):
    """The update has the gradient of the step before."""
    if n["batch"] == 1:
        return gs.CrossShardOptimizer(sgd()).apply_grads(grads, variables)
    kept = [state(v.mesh, f"{v.name}/last_gradient", v.shape) for v in variables]
    updates = gs.CrossShardOptimizer(sgd()).apply_grads([k * 1.0 for k in kept], variables)
    return [*updates, *(mtf.assign(k.operation, g) for k, g in zip(kept, grads))]


def step_number(mesh):
    """Counts the program's own steps."""
    steps = state(mesh, "own_steps")
    return steps, mtf.assign(steps.operation, steps + 1.0)


def only_last(mesh, inputs, params, wrong):
    """Of two microbatches only the second has a part in the update."""
    loss = mtf.reduce_mean(network(mesh, inputs))
    steps, count = step_number(mesh)
    share = mtf.mod(steps, 2.0) if wrong else 1.0
    grads, variables = gradients(loss, mesh)
    grads = [g * share for g in grads]
    opt = accumulated(gs.CrossShardOptimizer(sgd()), params)
    return loss, [*opt.apply_grads(grads, variables), count]


def assigned_each_step(change):
    """Each microbatch step assigns to variables what `change` makes of them, too."""

    def program(mesh, inputs, params, wrong):
        loss = mtf.reduce_mean(network(mesh, inputs))
        updates = accumulated(gs.CrossShardOptimizer(sgd()), params).minimize(loss)
        if wrong:
            updates += [mtf.assign(v, change(v)) for v in mesh.graph.trainable_variables]
        return loss, updates

    program.right = "accumulated"
    return program


def reduced_by(make):
    """A reduction that rounds."""

    def program(mesh, inputs, params, wrong):
        loss = mtf.reduce_mean(network(mesh, inputs))
        reducer = make() if wrong else None
        return loss, gs.CrossShardOptimizer(sgd(), reducer=reducer).minimize(loss)

    program.right = ""
    return program


def in_bfloat16(grads, variables, n):
    narrow = [
        mtf.cast(mtf.cast(g, tf.bfloat16), tf.float32) if n["batch"] > 1 else g for g in grads
    ]
    return gs.CrossShardOptimizer(sgd()).apply_grads(narrow, variables)


def written(v, new, n):
    """Of the slices of one variable half are not written where it is split."""
    return v.value + half_of(new - v.value, n) if v.name == "w" else new


def half_kept(slot, n):
    return half_of(slot, n) if H in slot.shape.dims else slot


def of_update(update, variable, axis, *factor, right="", what="value"):
    """A fault of what an update makes of right gradients."""
    cause = "a slot is split or" if what == "slot" else "the update itself depends"
    return Fault(step(update=update, right=right), variable, axis, cause, *factor, what=what)


of_slot = functools.partial(of_update, what="slot")

OF_UPDATES = {
    "a learning rate times the shards": of_update(
        by(lambda n: mtf.optimize.SgdOptimizer(0.1 * n["batch"])), "bias", BATCH_AXIS, 4.0, SHARDS
    ),
    "weight decay by each shard": of_update(
        by(lambda n: Descent(of_value=lambda v, new: new - v.value * 0.05 * n["batch"])),
        "bias",
        BATCH_AXIS,
        right="decay",
    ),
    "an update applied twice": of_update(
        by(lambda n: Descent(of_value=lambda v, new: new + (new - v.value) * (n["batch"] > 1))),
        "bias",
        BATCH_AXIS,
        2.0,
        right="momentum",
    ),
    "a slice that is not written": of_update(
        by(lambda n: Descent(of_value=lambda v, new: written(v, new, n))),
        "w",
        MODEL_AXIS,
        right="momentum",
    ),
    "a parameter in no group": Fault(step(update=without_last), "w", MODEL_AXIS, ""),
    "the gradient of the step before": Fault(
        step(update=stale), "bias", BATCH_AXIS, "are of another step"
    ),
    "gradients cast to bfloat16": Fault(
        step(update=in_bfloat16), "bias", BATCH_AXIS, "rounding to bfloat16"
    ),
    "a reduction in 8 bits": Fault(
        reduced_by(lambda: gs.QuantizedAllReduce(block_size=4)),
        "v",
        CROSS_SHARD,
        "rounds gradients on their way",
    ),
    "a sum in bfloat16": Fault(
        reduced_by(lambda: gs.reduce.CompressedAllReduce(gs.FusedAllReduce())),
        "bias",
        CROSS_SHARD,
        "rounding to bfloat16",
    ),
    "a slot times the shards": of_slot(
        by(lambda n: Descent(of_slot=lambda slot: slot * n["batch"])),
        "bias/momentum",
        BATCH_AXIS,
        4.0,
        SHARDS,
        right="momentum",
    ),
    "a slot of which half is lost": of_slot(
        by(lambda n: Descent(of_slot=lambda slot: half_kept(slot, n))),
        "v/momentum",
        MODEL_AXIS,
        right="momentum",
    ),
    "examples counted by each core": of_slot(
        counted(lambda n: 16.0 * n["model"]),
        "examples_seen",
        MODEL_AXIS,
        2.0,
        CORES + "model",
        right="count",
    ),
    "an average that moves with the shards": of_slot(
        averaged(lambda n: 0.1 * n["batch"]),
        "bias/average",
        BATCH_AXIS,
        4.0,
        SHARDS,
        right="average",
    ),
    "a moving statistic that is a sum": of_slot(
        statistic(lambda n: float(n["batch"])),
        "moving_norm",
        BATCH_AXIS,
        4.0,
        SHARDS,
        right="statistic",
    ),
    "the last microbatch alone": Fault(only_last, "bias", ACCUMULATION, ""),
    "an average on every microbatch step": Fault(
        assigned_each_step(lambda v: v.value * 0.5 + mtf.reduce_mean(v.value) * 0.5),
        "v",
        "",
        "every microbatch step",
        what="value before the update",
    ),
    "decayed on each microbatch step": Fault(
        assigned_each_step(lambda v: v.value * 0.99),
        "bias",
        "",
        "every microbatch step",
        what="value before the update",
    ),
}
