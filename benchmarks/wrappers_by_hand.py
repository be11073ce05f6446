"""What wrappers with state do, written by hand in JAX and compiled for a TPU topology.

usage: python -m benchmarks.wrappers_by_hand TOPOLOGY KIND CONDITION SIZES...

KIND is one of `KINDS`. CONDITION is "true" or "false": the value of all conditions, put in line as
in `with_conditions` of `mtf_gradsync.runtimes.xla.topology.estimate`. SIZES are those of
`lm_by_hand`, or layers, width and batch of the dense model. It prints one line of JSON, as
`lm_by_hand` does.

Every core has gradients of its own (`shard_map` over the axis of the batch), so that a step without
an update sends none, as those of mtf_gradsync.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Callable, NamedTuple

from benchmarks import lm_by_hand

BARE, ACCUMULATION, SYNC_REPLICAS, LOSS_SCALE = "bare", "accumulation", "sync_replicas", "scale"
KINDS = (BARE, ACCUMULATION, SYNC_REPLICAS, LOSS_SCALE)
GROWTH_STEPS = 2000


def cost(topology: str, kind: str, condition: bool, *sizes: int) -> dict[str, Any]:
    """What the compiler expects of a step, by a process of its own.

    Args:
      topology: as in "v5e:2x4", of 8 cores.
      kind: one of `KINDS`.
      condition: whether the step has an update.
      *sizes: layers, d_model, batch and length of the language model; or layers, width and batch
        of the dense model.

    Returns:
      As `lm_by_hand.cost`.
    """
    condition_ = str(condition).lower()
    return lm_by_hand.ask("benchmarks.wrappers_by_hand", topology, kind, condition_, *sizes)


def dense_model(layers: int, width: int) -> tuple[dict[str, Any], Any]:
    """The dense model of `models.dense`, as `lm_by_hand.language_model` has the other."""
    import jax.numpy as jnp

    weights = {f"w{i}": ((width, width), (None, None)) for i in range(layers)}
    biases = {f"b{i}": ((width,), (None,)) for i in range(layers)}

    def loss(p: dict[str, Any], x: Any) -> Any:
        for i in range(layers):
            x = jnp.tanh(x @ p[f"w{i}"] + p[f"b{i}"])
        return jnp.mean(jnp.square(x))

    return {**weights, **biases}, loss


class Optimizer(NamedTuple):
    """Two functions, as optax has them: `init(p)` and `update(grads, state, p)`."""

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]


def adam(rate: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999) -> Optimizer:
    """Adam without correction of its averages, as Mesh-TF's."""
    import jax
    import jax.numpy as jnp

    def init(p: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, (p, p))

    def update(grads: Any, state: Any, p: Any) -> Any:
        del p
        mean = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state[0], grads)
        square = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, state[1], grads)
        changes = jax.tree.map(lambda m, v: -rate * m / (jnp.sqrt(v) + 1e-6), mean, square)
        return changes, (mean, square)

    return Optimizer(init, update)


def make_step(
    mesh: Any, model: tuple[dict[str, Any], Any], optimizer: Any, kind: str, condition: bool
) -> tuple[Any, Any]:
    """A step of one kind, and what it takes besides the batch.

    Args:
      mesh: a jax mesh with the axes "batch" and "model".
      model: as from `dense_model` and `lm_by_hand.language_model`.
      optimizer: two functions, as `Optimizer` and optax have them.
      kind: one of `KINDS`.
      condition: whether the step has an update.

    Returns:
      The jitted step, a function of parameters, slots, the kind's state and the batch that gives
      the first three anew and writes over those given; and their shapes, dtypes and shardings.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    parameters, loss = model
    shards = mesh.shape["batch"]

    def own_gradients(p: Any, x: Any, scale: Any = 1.0) -> Any:
        # The terms of a core: they add up to the gradient of the mean over the batch.
        return jax.grad(lambda p: loss(p, x) * (scale / shards))(p)

    def summed(grads: Any) -> Any:
        return jax.lax.psum(grads, "batch")

    def are_finite(grads: Any) -> Any:
        return jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()

    def updated(p: Any, slots: Any, grads: Any) -> tuple[Any, Any]:
        changes, slots = optimizer.update(grads, slots, p)
        return jax.tree.map(jnp.add, p, changes), slots

    def bare(p: Any, slots: Any, state: Any, x: Any) -> Any:
        return *updated(p, slots, summed(own_gradients(p, x))), state

    def accumulation(p: Any, slots: Any, state: Any, x: Any) -> Any:
        sums = jax.tree.map(lambda s, g: s[0] + g, state["sums"], own_gradients(p, x))
        new = {"micro_step": state["micro_step"] + 1, "updates": state["updates"]}
        if condition:
            p, slots = updated(p, slots, summed(sums))
            sums = jax.tree.map(jnp.zeros_like, sums)
            new = {"micro_step": jnp.zeros_like(new["micro_step"]), "updates": new["updates"] + 1}
        return p, slots, {**new, "sums": jax.tree.map(lambda s: s[None], sums)}

    def sync_replicas(p: Any, slots: Any, state: Any, x: Any) -> Any:
        grads = own_gradients(p, x)
        own_step = state["local_step"][jax.lax.axis_index("batch")]
        fresh = (own_step >= state["update_step"]) & are_finite(grads)
        flags = jnp.zeros_like(state["local_step"])
        flags = summed(flags.at[jax.lax.axis_index("batch")].set(fresh.astype(jnp.int32)))
        count, sums, step = state["count"] + flags.sum(), state["sums"], state["update_step"]
        made, dropped = state["made"] + flags, state["dropped"] + 1 - flags
        local_step = state["local_step"]
        if condition:  # all replicas are fresh, and the accumulators are zero
            mean = jax.tree.map(lambda g: g * (shards / count), summed(grads))
            p, slots = updated(p, slots, mean)
            count, step = jnp.zeros_like(count), step + 1
            local_step = jnp.full_like(local_step, step)
        else:
            sums = jax.tree.map(lambda s, g: s + jnp.where(fresh, g, 0.0)[None], sums, grads)
        return (
            *(p, slots),
            {
                **{"sums": sums, "count": count, "update_step": step, "local_step": local_step},
                **{"made": made, "dropped": dropped},
            },
        )

    def loss_scale(p: Any, slots: Any, state: Any, x: Any) -> Any:
        scale, good, skipped = state["scale"], state["good_steps"], state["skipped"]
        grads = jax.tree.map(lambda g: g / scale, summed(own_gradients(p, x, scale)))
        finite = are_finite(grads)
        if condition:
            p, slots = updated(p, slots, grads)
        grows = finite & (good + 1 >= GROWTH_STEPS)
        new = {
            "scale": jnp.where(finite, jnp.where(grows, scale * 2.0, scale), scale / 2.0),
            "good_steps": jnp.where(finite & ~grows, good + 1, 0),
            "skipped": skipped + 1 - finite.astype(jnp.int32),
        }
        return p, slots, new

    # Statistics are small, and lie on all cores of the axis "model".
    given = {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, (shape, _) in parameters.items()}
    axes = {k: PartitionSpec(*axes) for k, (_, axes) in parameters.items()}
    slots = jax.eval_shape(optimizer.init, given)
    everywhere = PartitionSpec()
    slot_axes = jax.tree.map(lambda _: everywhere, slots)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    of_shards = jax.ShapeDtypeStruct((shards,), jnp.int32)
    sums = {k: jax.ShapeDtypeStruct((shards, *v.shape), v.dtype) for k, v in given.items()}
    sum_axes = {k: PartitionSpec("batch", *a) for k, a in axes.items()}
    steps = {
        BARE: bare,
        ACCUMULATION: accumulation,
        SYNC_REPLICAS: sync_replicas,
        LOSS_SCALE: loss_scale,
    }
    states = {
        BARE: {},
        ACCUMULATION: {"micro_step": number, "updates": number, "sums": sums},
        SYNC_REPLICAS: {
            **{"sums": sums, "count": number, "update_step": number},
            **{"local_step": of_shards, "made": of_shards, "dropped": of_shards},
        },
        LOSS_SCALE: {
            "scale": jax.ShapeDtypeStruct((), jnp.float32),
            "good_steps": number,
            "skipped": number,
        },
    }
    state = states[kind]
    state_axes = {k: sum_axes if k == "sums" else everywhere for k in state}

    def of_batch(spec: PartitionSpec) -> PartitionSpec:
        """The part of a placement that `shard_map` is to know."""
        return PartitionSpec(*(a if a == "batch" else None for a in spec))

    placements = (axes, slot_axes, state_axes)
    in_map = jax.tree.map(of_batch, placements, is_leaf=lambda x: isinstance(x, PartitionSpec))
    step = _shard_map(steps[kind], mesh, (*in_map, PartitionSpec("batch")), in_map)

    def placed(x: Any, spec: PartitionSpec) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    arguments = jax.tree.map(placed, (given, slots, state), placements)
    outputs = jax.tree.map(lambda x: x.sharding, arguments)
    return jax.jit(step, out_shardings=outputs, donate_argnums=(0, 1, 2)), arguments


def _shard_map(step: Any, mesh: Any, in_specs: Any, out_specs: Any) -> Any:
    """`step` for each coordinate of "batch"; XLA splits it along the mesh's other axes."""
    import jax

    if hasattr(jax, "shard_map"):
        axes = {"axis_names": {"batch"}, "check_vma": False}
        return jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **axes)
    from jax.experimental.shard_map import shard_map

    others = frozenset(mesh.axis_names) - {"batch"}
    return shard_map(step, mesh, in_specs, out_specs, check_rep=False, auto=others)


def main(topology: str, kind: str, condition: bool, *sizes: int) -> dict[str, Any]:
    """Compiles a step; see `cost`."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    is_lm = len(sizes) == 4
    mesh = Mesh(np.array(devices).reshape((4, 2) if is_lm else (8, 1)), ("batch", "model"))
    if is_lm:
        import optax

        layers, d_model, batch, length = sizes
        model = lm_by_hand.language_model(layers, d_model, length)
        optimizer, inputs = optax.adafactor(0.01), ((batch, length), jnp.int32)
    else:
        layers, width, batch = sizes
        model = dense_model(layers, width)
        optimizer, inputs = adam(), ((batch, width), jnp.float32)
    step, arguments = make_step(mesh, model, optimizer, kind, condition)
    placement = NamedSharding(mesh, PartitionSpec("batch"))
    x = jax.ShapeDtypeStruct(*inputs, sharding=placement)
    return lm_by_hand.answer(step.lower(*arguments, x).compile())


if __name__ == "__main__":
    topology, kind, condition = sys.argv[1:4]
    print(json.dumps(main(topology, kind, condition == "true", *map(int, sys.argv[4:]))))
