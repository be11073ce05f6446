"""Builds training steps and prints a digest of each graph; test_plan has it in two processes."""

from __future__ import annotations

import hashlib

import absl.flags

from mtf_gradsync._private.libraries import tf
from tests import harness, models
from tests.step.stacks import LAYOUT, MESH, mlp_step, stacked

STACKS = (["cross_shard"], ["local", "clip"], ["replicas"])


def digest(names: list[str], kind: str, autostack: bool) -> str:
    """Of the GraphDef of a training step with Momentum."""

    def build(mesh, inputs):
        return mlp_step(stacked(names, models.OPTIMIZERS["momentum"]()), mesh, inputs), {}

    (feed,) = models.mlp_batches(1)
    graph_def = harness.built(kind, MESH, LAYOUT, build, feed, autostack).graph.as_graph_def()
    # Numbered as they are called: TensorFlow goes on counting from graph to graph.
    functions = {}
    for function in graph_def.library.function:
        functions[function.signature.name] = type(function).FromString(function.SerializeToString())
    called: dict[str, str] = {}
    parts = [graph_def]
    del graph_def.library.function[:]
    for part in parts:
        for node in part.node if part is graph_def else part.node_def:
            for attr in node.attr.values():
                name = attr.func.name
                if name in functions and name not in called:
                    called[name] = functions[name].signature.name = f"function_{len(parts)}"
                    parts.append(functions[name])
                if name:
                    attr.func.name = called[name]
    return hashlib.sha256(
        b"".join(part.SerializeToString(deterministic=True) for part in parts)
    ).hexdigest()


def digests() -> list[str]:
    """One for each stack of wrappers, on some mesh, with or without stacked variables."""
    cross_shard, accumulation, replicas = STACKS
    return [
        digest(cross_shard, "placement", autostack=False),
        digest(accumulation, "placement", autostack=True),
        digest(replicas, "simd", autostack=True),
    ]


if __name__ == "__main__":
    tf.disable_v2_behavior()
    tf.enable_resource_variables()
    absl.flags.FLAGS.mark_as_parsed()
    print("\n".join(digests()))
