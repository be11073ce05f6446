"""More of such programs: faults of updates, slots, averages, counts, and of joined steps."""

from __future__ import annotations

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests.tools.verification.faults import ACCUMULATION, Fault, H, accumulated, gradients, sgd
from tests.tools.verification.reported_faults import (
    BATCH_AXIS,
    CORES,
    MODEL_AXIS,
    SHARDS,
    half_of,
    network,
    norm_of,
    step,
)

UPDATE, SLOT = "the update itself depends", "a slot is split or"


def state(mesh, name, shape=()):
    return mtf.get_variable(
        mesh, name, mtf.Shape(list(shape)), initializer=tf.zeros_initializer(), trainable=False
    )


class Descent(mtf.optimize.Optimizer):
    """Momentum, whose slots or steps depend on what they should not."""

    def __init__(self, rate=0.1, of_slot=lambda slot, grad: slot, of_value=lambda v, new: new):
        self._rate, self._of_slot, self._of_value = rate, of_slot, of_value

    def apply_grad(self, grad, var):
        slot = state(var.mesh, f"{var.name}/momentum", var.shape)
        momentum = slot * 0.9 + grad
        kept = self._of_slot(momentum, grad)
        new = self._of_value(var, var.value - momentum * self._rate)
        return [mtf.assign(slot.operation, kept), mtf.assign(var, new)]


def by(make):
    def update(grads, variables, n):
        return gs.CrossShardOptimizer(make(n)).apply_grads(grads, variables)

    return update


DESCENT = by(lambda n: Descent())


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


def twice(grads, variables, n):
    opt = gs.CrossShardOptimizer(
        Descent(of_value=lambda v, new: new + (new - v.value) * (n["batch"] > 1))
    )
    return opt.apply_grads(grads, variables)


def stale(grads, variables, n):
    """The update has the gradient of the step before."""
    if n["batch"] == 1:
        return gs.CrossShardOptimizer(sgd()).apply_grads(grads, variables)
    kept = [state(v.mesh, f"{v.name}/last_gradient", v.shape) for v in variables]
    updates = gs.CrossShardOptimizer(sgd()).apply_grads([k * 1.0 for k in kept], variables)
    return [*updates, *(mtf.assign(k.operation, g) for k, g in zip(kept, grads))]


def joined(weights_of=None, average=True, own=None):
    def program(mesh, inputs, params, wrong):
        loss = mtf.reduce_mean(network(mesh, inputs)[0])
        opt = accumulated(gs.CrossShardOptimizer(sgd()), params, average)
        if wrong and weights_of is not None:
            return loss, opt.minimize(loss, weights=weights_of(mesh, opt))
        updates = opt.minimize(loss)
        if wrong and own is not None:
            updates = [*updates, *own(mesh)]
        return loss, updates

    return program


def step_number(mesh):
    """Counts the program's own steps."""
    steps = state(mesh, "own_steps")
    return steps, mtf.assign(steps.operation, steps + 1.0)


def only_last(mesh, inputs, params, wrong):
    """Of two microbatches only the second has a part in the update."""
    loss = mtf.reduce_mean(network(mesh, inputs)[0])
    steps, count = step_number(mesh)
    share = mtf.mod(steps, 2.0) if wrong else 1.0
    grads, variables = gradients(loss, mesh)
    grads = [g * share for g in grads]
    opt = accumulated(gs.CrossShardOptimizer(sgd()), params)
    return loss, [*opt.apply_grads(grads, variables), count]


def averaged_each_step(mesh):
    (v,) = (v for v in mesh.graph.trainable_variables if v.name == "w")
    return [mtf.assign(v, v.value * 0.5 + mtf.reduce_mean(v.value) * 0.5)]


def noisy(mesh, inputs, params, wrong):
    """Noise of 8 bits in the reduction."""
    loss = mtf.reduce_mean(network(mesh, inputs)[0])
    reducer = gs.QuantizedAllReduce(block_size=4) if wrong else None
    return loss, gs.CrossShardOptimizer(sgd(), reducer=reducer).minimize(loss)


def in_bfloat16(grads, variables, n):
    narrow = [
        mtf.cast(mtf.cast(g, tf.bfloat16), tf.float32) if n["batch"] > 1 else g for g in grads
    ]
    return gs.CrossShardOptimizer(sgd()).apply_grads(narrow, variables)


def rate_of_steps(n):
    return mtf.optimize.SgdOptimizer(0.1 * n["batch"])


OF_UPDATES = {
    "a learning rate times the shards": Fault(
        step(make=network, update=by(rate_of_steps)),
        "bias",
        4.0,
        SHARDS,
        BATCH_AXIS,
        UPDATE,
        "value",
    ),
    "weight decay by each shard": Fault(
        step(
            make=network,
            right_update=by(lambda n: Descent(of_value=lambda v, new: new - v.value * 0.05)),
            update=by(lambda n: Descent(of_value=lambda v, new: new - v.value * 0.05 * n["batch"])),
        ),
        "bias",
        None,
        "",
        BATCH_AXIS,
        UPDATE,
        "value",
    ),
    "an update applied twice": Fault(
        step(make=network, right_update=DESCENT, update=twice),
        "bias",
        2.0,
        "",
        BATCH_AXIS,
        UPDATE,
        "value",
    ),
    "a slice that is not written": Fault(
        step(
            make=network,
            right_update=DESCENT,
            update=by(
                lambda n: Descent(
                    of_value=lambda v, new: (
                        v.value + half_of(new - v.value, n) if v.name == "w" else new
                    )
                )
            ),
        ),
        "w",
        None,
        "",
        MODEL_AXIS,
        UPDATE,
        "value",
    ),
    "a parameter in no group": Fault(
        step(make=network, update=without_last),
        "w",
        None,
        "",
        MODEL_AXIS,
        "",
        "gradient",
    ),
    "the gradient of the step before": Fault(
        step(make=network, update=stale),
        "bias",
        None,
        "",
        BATCH_AXIS,
        "are of another step",
    ),
    "gradients cast to bfloat16": Fault(
        step(make=network, update=in_bfloat16),
        "bias",
        None,
        "",
        BATCH_AXIS,
        "rounding to bfloat16",
    ),
    "a reduction in 8 bits": Fault(
        noisy,
        "v",
        None,
        "",
        "CrossShardOptimizer",
        "rounds gradients on their way",
    ),
    "a slot times the shards": Fault(
        step(
            make=network,
            right_update=DESCENT,
            update=by(lambda n: Descent(of_slot=lambda slot, grad: slot * n["batch"])),
        ),
        "bias/momentum",
        4.0,
        SHARDS,
        BATCH_AXIS,
        SLOT,
        "slot",
    ),
    "a slot of which half is lost": Fault(
        step(
            make=network,
            right_update=DESCENT,
            update=by(
                lambda n: Descent(
                    of_slot=lambda slot, grad: half_of(slot, n) if H in slot.shape.dims else slot
                )
            ),
        ),
        "v/momentum",
        None,
        "",
        MODEL_AXIS,
        SLOT,
        "slot",
    ),
    "examples counted by each core": Fault(
        step(
            make=network,
            right_update=counted(lambda n: 16.0),
            update=counted(lambda n: 16.0 * n["model"]),
        ),
        "examples_seen",
        2.0,
        CORES + "model",
        MODEL_AXIS,
        SLOT,
        "slot",
    ),
    "an average that moves with the shards": Fault(
        step(
            make=network,
            right_update=averaged(lambda n: 0.1),
            update=averaged(lambda n: 0.1 * n["batch"]),
        ),
        "bias/average",
        4.0,
        SHARDS,
        BATCH_AXIS,
        SLOT,
        "slot",
    ),
    "a moving statistic that is a sum": Fault(
        step(
            make=network,
            right_update=statistic(lambda n: 1.0),
            update=statistic(lambda n: float(n["batch"])),
        ),
        "moving_norm",
        4.0,
        SHARDS,
        BATCH_AXIS,
        SLOT,
        "slot",
    ),
    "the last microbatch alone": Fault(only_last, "bias", None, "", ACCUMULATION, ""),
    "an average on every microbatch step": Fault(
        joined(own=averaged_each_step),
        "w",
        None,
        "",
        "",
        "every microbatch step",
        "value before the update",
    ),
}
