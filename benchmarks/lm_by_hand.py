"""The language model of the benchmarks, written by hand in JAX, compiled for a TPU topology.

usage: python -m benchmarks.lm_by_hand TOPOLOGY LAYERS D_MODEL BATCH LENGTH

It prints one line of JSON. It runs in a process of its own, because libtpu reads its environment
once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

VOCABULARY, HEADS = 256, 4


def cost(topology: str, layers: int, d_model: int, batch: int, length: int) -> dict[str, Any]:
    """What the compiler expects of a step, by a process of its own.

    Args:
      topology: as in "v5e:2x4", of 8 cores.
      layers: of attention and a dense layer each.
      d_model: width.
      batch: sequences in a step, of all cores.
      length: of a sequence.

    Returns:
      "cost": the compiler's numbers; "memory": bytes as `CoreMemory` takes them; "hlo": the
      compiled program's text.
    """
    return ask("benchmarks.lm_by_hand", topology, layers, d_model, batch, length)


def ask(module: str, *arguments: Any) -> dict[str, Any]:
    """What a module of the benchmarks prints last, a line of JSON, as a process of its own.

    Args:
      module: its name.
      *arguments: its command line.

    Returns:
      The JSON.
    """
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def language_model(layers: int, d_model: int, length: int) -> tuple[dict[str, Any], Any]:
    """A language model of the shapes of `models.lm`.

    Args:
      layers: as for `cost`.
      d_model: as for `cost`.
      length: as for `cost`.

    Returns:
      For each parameter its shape and the mesh axis of each dimension, and the loss: a function of
      parameters and tokens.
    """
    import jax
    import jax.numpy as jnp

    width = d_model // HEADS
    # Parameter -> its shape, and the mesh axis of each dimension, as the layout of `models.lm`.
    layer = {
        "attention_norm": ((d_model,), (None,)),
        "query": ((d_model, HEADS, width), (None, "model", None)),
        "key": ((d_model, HEADS, width), (None, "model", None)),
        "value": ((d_model, HEADS, width), (None, "model", None)),
        "output": ((HEADS, width, d_model), ("model", None, None)),
        "dense_norm": ((d_model,), (None,)),
        "wide": ((d_model, 4 * d_model), (None, "model")),
        "narrow": ((4 * d_model, d_model), ("model", None)),
    }
    parameters = {
        "embedding": ((VOCABULARY, d_model), ("model", None)),
        "position": ((length, d_model), (None, None)),
        "norm": ((d_model,), (None,)),
        **{f"{i}/{name}": made for i in range(layers) for name, made in layer.items()},
    }

    def normalized(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale

    def loss(p: dict[str, Any], tokens: Any) -> Any:
        inputs = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)))
        x = jax.nn.one_hot(inputs, VOCABULARY) @ p["embedding"] + p["position"]
        later = jnp.where(jnp.tri(length) > 0, 0.0, -1e9)
        for i in range(layers):
            h = normalized(x, p[f"{i}/attention_norm"])
            q, k, v = (
                jnp.einsum("bld,dhw->bhlw", h, p[f"{i}/{name}"])
                for name in ("query", "key", "value")
            )
            weights = jax.nn.softmax(jnp.einsum("bhqw,bhkw->bhqk", q, k) + later)
            mixed = jnp.einsum("bhqk,bhkw->bqhw", weights, v)
            x += jnp.einsum("bqhw,hwd->bqd", mixed, p[f"{i}/output"])
            h = normalized(x, p[f"{i}/dense_norm"])
            x += jax.nn.relu(h @ p[f"{i}/wide"]) @ p[f"{i}/narrow"]
        logits = normalized(x, p["norm"]) * d_model**-0.5 @ p["embedding"].T
        right = jnp.take_along_axis(logits, tokens[..., None], -1).take(0, axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - right)

    return parameters, loss


def answer(compiled: Any) -> dict[str, Any]:
    """What `cost` returns, of a program that jax has compiled."""
    memory, numbers = compiled.memory_analysis(), compiled.cost_analysis()
    names = ("argument", "output", "alias", "temp", "generated_code")
    return {
        "cost": dict(numbers[0] if isinstance(numbers, list) else numbers),
        "memory": [getattr(memory, f"{name}_size_in_bytes") for name in names],
        "hlo": compiled.as_text(),
    }


def main(topology: str, layers: int, d_model: int, batch: int, length: int) -> dict[str, Any]:
    """Compiles the step; see `cost`."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices).reshape(4, 2), ("batch", "model"))
    parameters, loss = language_model(layers, d_model, length)
    optimizer = optax.adafactor(0.01)

    def step(p: dict[str, Any], state: Any, tokens: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss)(p, tokens), state, p)
        return optax.apply_updates(p, updates), state

    def placed(x: Any, *axes: Any) -> Any:
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes))
        )

    given = {
        name: placed(jax.ShapeDtypeStruct(shape, jnp.float32), *axes)
        for name, (shape, axes) in parameters.items()
    }
    # Statistics are small, and lie on all cores.
    state = jax.tree.map(placed, jax.eval_shape(optimizer.init, given))
    tokens = placed(jax.ShapeDtypeStruct((batch, length), jnp.int32), "batch")
    outputs = jax.tree.map(lambda x: x.sharding, (given, state))
    return answer(
        jax.jit(step, out_shardings=outputs, donate_argnums=(0, 1))
        .lower(given, state, tokens)
        .compile()
    )


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:]))))
