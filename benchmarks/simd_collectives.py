"""How many collectives the gradients take on a SIMD (TPU) mesh, and their bytes."""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Iterator

from benchmarks import models, report
from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import TOGETHER_ATTR

# What stands between a collective and the gradient that it sums.
_CARRIERS = ("Cast", "Identity", "Reshape", "Split", "SplitV")


def measure(options: report.Options) -> report.Table:
    """Builds both models as SIMD programs; nothing is run."""
    rows: list[report.Row] = []
    for model in models.models(options.quick):
        for variant in (models.BARE, models.WRAPPED):
            program = models.build(model, variant, lambda model=model: _simd_mesh(model))
            sums = gradient_collectives(program)
            rows.append(
                {
                    "model": model.name,
                    "optimizer": variant,
                    "gradients": len(pending(program)),
                    "gradient bytes": gradient_bytes(program),
                    "CrossReplicaSum": len(sums),
                    "groups": len({together(op) for op in sums}),
                    "bytes summed": sum(_bytes(op.inputs[0]) for op in sums),
                    "in the whole step": len(_all_sums(program.graph)),
                }
            )
    return report.Table(
        name="simd_collectives",
        title="CrossReplicaSum operations for the gradients on a SIMD mesh, with the bytes of one"
        " core",
        rows=rows,
        notes=(
            '"in the whole step" is the number of all CrossReplicaSum operations of a step: those'
            " of the forward pass, the backward pass and the update.",
            '"groups" is the number of groups of sums. The compilers of TPUs and GPUs combine the'
            " sums of each group.",
        ),
    )


@contextlib.contextmanager
def _simd_mesh(model: models.Model) -> Iterator[Any]:
    with simd.tpu_program(model.mesh_shape, model.layout) as program:
        yield program.mesh_impl


def pending(program: models.Program) -> list[mtf.LazyAllreduceSum]:
    """The lowered gradients that have to be reduced, each once."""
    lowered = {program.lowering.tensors[grad] for grad in program.grads}
    return [x for x in lowered if isinstance(x, mtf.LazyAllreduceSum)]


def gradient_collectives(program: models.Program) -> set[tf.Operation]:
    """The CrossReplicaSum operations that make the gradients whole."""
    found: set[tf.Operation] = set()
    for lowered in pending(program):
        # The all-reduce has run, so this returns what it made and adds nothing.
        (whole,) = lowered.to_laid_out_tensor().tensor_list
        op = whole.op
        while op.type in _CARRIERS:
            # A split has its axis as first input (Split) or after the value (SplitV).
            op = op.inputs[1 if op.type == "Split" else 0].op
        if op.type == "CrossReplicaSum":
            found.add(op)
    return found


def together(op: tf.Operation) -> str:
    """The group of sums that a sum is one of: its own name where it is made alone."""
    attr = op.node_def.attr
    return attr[TOGETHER_ATTR].s.decode() if TOGETHER_ATTR in attr else op.name


def gradient_bytes(program: models.Program) -> int:
    """Bytes of one core's slices of all gradients that are reduced."""
    partial_sums = [x.laid_out_input.to_laid_out_tensor() for x in pending(program)]
    return sum(_bytes(x) for partial_sum in partial_sums for x in partial_sum.tensor_list)


def _all_sums(graph: tf.Graph) -> list[tf.Operation]:
    return [op for op in graph.get_operations() if op.type == "CrossReplicaSum"]


def _bytes(x: tf.Tensor) -> int:
    return x.shape.num_elements() * x.dtype.size


if __name__ == "__main__":
    sys.exit(report.main([measure], "python -m benchmarks.simd_collectives"))
