"""Finds why an update differs between divisions: parts of the model, or faults of the program.

A division is a way to divide the same training over cores: by mesh, runtime or microbatches.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping, NamedTuple, Sequence

from mtf_gradsync.extension import mtf, some_of, tf, walk


def operations_behind(losses: Sequence[mtf.Tensor]) -> list[mtf.Operation]:
    """Returns the operations from which losses are computed, in the order of their mtf graphs.

    The operations whose outputs are the losses are among them.
    """
    there = set(walk([x.operation for x in losses], lambda op: [x.operation for x in op.inputs]))
    return [op for graph in {x.graph for x in losses} for op in graph.operations if op in there]


def random_operations(losses: Sequence[mtf.Tensor]) -> list[mtf.Operation]:
    """Returns the operations that draw the random numbers that losses depend on."""
    return [op for op in operations_behind(losses) if isinstance(op, mtf.ops.RandomOperation)]


def narrow_dtypes(losses: Sequence[mtf.Tensor]) -> list[str]:
    """Returns the names of floating-point dtypes narrower than float32 that losses depend on."""
    dtypes = {x.dtype for op in operations_behind(losses) for x in op.outputs}
    return sorted(x.name for x in dtypes if x.is_floating and x.size < 4)


class _Flow(NamedTuple):
    """The dependence of a tensor of the forward pass on a sum over the batch and on a variable.

    Attributes:
      is_summed: whether the tensor depends on a sum over the batch.
      is_trained: whether the tensor depends on a variable.
    """

    is_summed: bool = False
    is_trained: bool = False


def _flows(forward: Sequence[mtf.Operation], batch_dims: Sequence[str]) -> dict[mtf.Tensor, _Flow]:
    found: dict[mtf.Tensor, _Flow] = {}
    for op in forward:
        flows = [found.get(x, _Flow()) for x in op.inputs]
        trained = isinstance(op, mtf.Variable) or any(x.is_trained for x in flows)
        for out in op.outputs:
            falls = not _has_any(out, batch_dims) and any(
                _has_any(x, batch_dims) for x in op.inputs
            )
            found[out] = _Flow(falls or any(x.is_summed for x in flows), trained)
    return found


def _has_any(x: mtf.Tensor, dims: Sequence[str]) -> bool:
    return any(d.name in dims for d in x.shape.dims)


def statistics_of(
    losses: Sequence[mtf.Tensor], batch_dims: Sequence[str]
) -> list[tuple[str, mtf.Tensor]]:
    """Returns the model's statistics over the batch that enter the computation of single examples.

    A statistic over the batch is computed from several examples, as the mean in batch normalization
    is. A statistic that only scales the loss, such as 1 / the sum of a mask, is left out of the
    result.

    Args:
      losses: the losses of the model.
      batch_dims: the names of the batch's dimensions.

    Returns:
      Pairs: the name of an operation that combines a statistic with examples, and the statistic.
    """
    forward = operations_behind(losses)
    flows = _flows(forward, batch_dims)
    users: dict[mtf.Tensor, list[mtf.Operation]] = {}
    for op in forward:
        for x in op.inputs:
            users.setdefault(x, []).append(op)
    found = []
    for op in forward:
        sums = [x for x in op.inputs if flows[x].is_summed and not _has_any(x, batch_dims)]
        if sums and any(_has_any(x, batch_dims) for x in op.inputs):
            for x in sums:
                if not (isinstance(op, mtf.ops.EinsumOperation) and _only_scales_loss(op, users)):
                    found.append((op.name, x))
    return found


_LINEAR = (
    mtf.ops.EinsumOperation,
    mtf.ops.ReduceOperation,
    mtf.ops.ReshapeOperation,
    mtf.ops.ScalarMultiplyOperation,
    mtf.ops.BroadcastOperation,
    mtf.ops.SliceOperation,
)


def _only_scales_loss(op: mtf.Operation, users: Mapping[mtf.Tensor, list[mtf.Operation]]) -> bool:
    """Returns whether a factor that depends on the whole batch only scales the loss.

    The result is True if all operations between `op`, which multiplies by the factor, and the loss
    are linear.

    Args:
      op: the operation that multiplies examples by the factor.
      users: a dictionary from each tensor to the operations that read it.
    """
    seen, waiting = {op}, [op]
    while waiting:
        for out in waiting.pop().outputs:
            following = users.get(out, [])
            for one in following:
                # An addition of scalars only adds up the terms of a loss.
                ends = isinstance(one, mtf.ops.AddOperation) and not one.outputs[0].shape.dims
                mixes = sum(x.operation in seen for x in one.inputs) > 1
                kind = getattr(one, "_reduction_fn_string", "SUM")
                if not ends and (mixes or kind != "SUM" or not isinstance(one, _LINEAR)):
                    return False
                if one not in seen:
                    seen.add(one)
                    waiting.append(one)
    return True


def products_of_means(losses: Sequence[mtf.Tensor], batch_dims: Sequence[str]) -> list[str]:
    """Returns the names of operations that multiply two means or sums over the batch.

    The result has only products in which both means or sums depend on variables. A loss that
    balances experts has such a product.

    Args:
      losses: the losses of the model.
      batch_dims: the names of the batch's dimensions.
    """
    forward = operations_behind(losses)
    flows = _flows(forward, batch_dims)
    found = []
    for op in forward:
        means = [x for x in op.inputs if flows[x] == (True, True) and not _has_any(x, batch_dims)]
        if isinstance(op, mtf.ops.EinsumOperation) and len(means) > 1:
            found.append(op.name)
    return found


def rounds_to_bfloat16(graph: tf.Graph, model: Sequence[str]) -> bool:
    """Returns whether a lowered program has bfloat16 tensors although its model has none.

    `graph` is the program's TensorFlow graph. `model` has the names of the model's floating-point
    dtypes that are narrower than float32 (`narrow_dtypes`).
    """
    if tf.bfloat16.name in model:
        return False
    return any(x.dtype == tf.bfloat16 for op in graph.get_operations() for x in op.outputs)


_CLOSE = 1e-3
# The least and the largest error that is taken for a sum in bfloat16 whose terms do not cancel.
_BFLOAT16 = (2.0**-12, 2.0**-5)


def name_of_factor(factor: float, numbers: Mapping[str, float]) -> str:
    """Returns in words which known numbers explain a factor, such as "1 over the number of shards".

    Args:
      factor: the number by which a value is too large.
      numbers: a dictionary from labels, such as "the number of shards", to their numbers.

    Returns:
      The label of each number that equals `factor`, and "1 over " with the label of each number
      that equals 1 / `factor`. They are joined by ", or "; "" if there are none.
    """
    found = []
    for name, value in numbers.items():
        if value and abs(factor - value) < _CLOSE * value:
            found.append(name)
        elif value and abs(factor * value - 1) < _CLOSE:
            found.append(f"1 over {name}")
    return ", or ".join(found)


class DifferenceFacts(NamedTuple):
    """The facts of a difference from the reference, by which `cause_of` finds its cause.

    Attributes:
      what: the kind of value that differs first, such as "gradient" (see `DivisionResult.what`).
      culprit: the wrapper, mesh axis or other part of the division without which nothing differs;
        "" if unknown.
      factor: the value divided by the reference's value, if the quotient is one number for all
        elements; else None.
      of_factor: the meaning of `factor`, such as "the number of shards"; "" if unknown.
      error: the largest difference, divided by the largest number of the reference.
      factors_are_one: whether all variables' gradients have the same factor.
      forward: whether the loss differs from the reference's loss, too.
      rounds: whether the update has tensors in bfloat16 although the model has none.
      products: names of operations that multiply means over the batch (`products_of_means`).
      reducer: the class name of the culprit's strategy, if this may round gradients; else "".
      counts: the cause in words, if the program advances a counter (such as its global step) at the
        wrong time; else "".
      sees_gradients: whether gradients were compared.
    """

    what: str
    culprit: str = ""
    factor: float | None = None
    of_factor: str = ""
    error: float = 0.0
    factors_are_one: bool = False
    forward: bool = False
    rounds: bool = False
    products: Sequence[str] = ()
    reducer: str = ""
    counts: str = ""
    sees_gradients: bool = True


_OF_FORWARD = (
    "The loss differs, too, so that the forward pass does: examples or tokens are dropped or "
    "counted by shard, or a dimension is called like the batch's."
)


def cause_of(facts: DifferenceFacts) -> str:
    """Returns the likely cause of a difference in words, as one or two sentences for the user.

    `facts` describes the difference. The usual causes are tried in a fixed order, and the first
    that fits the difference is returned.
    """
    return next(_causes(facts))


def _causes(facts: DifferenceFacts) -> Iterator[str]:
    what, factor, kind = facts.what, facts.factor, facts.culprit.split("#")[0]
    joins_steps = "Accumulation" in kind or kind == "microbatch steps" or "SyncReplicas" in kind
    if what == "copies":
        yield (
            "Processors hold copies of one slice, or of its gradient, that are not equal: "
            "something writes or changes only some of them, or not all of them are reduced."
        )
    if what == "random numbers":
        yield (
            "Shards have the same random numbers, so that dropout, say, is one for all of them: a "
            "seed of the program's own, or numbers that are drawn for one shard and used by all."
        )
    if what == "value before the update":
        yield (
            "It changes on steps that only accumulate: a decay, an average or an assignment of "
            "the program's own runs on every microbatch step. Do it in the inner optimizer."
        )
    if what == "loss":
        yield (
            "Gradients are equal and the loss that is shown is not: shards or microbatches have "
            "losses of other weights, or it is the loss of one shard."
        )
    if facts.counts:
        yield facts.counts
    if facts.reducer:
        yield (
            f"The strategy rounds gradients on their way: {facts.reducer} trains by other numbers "
            "than a sum in float32. Without it, the rest can be shown to be equal."
        )
    if facts.products:
        yield (
            f"The loss has a product of means over the batch ({some_of(facts.products)}), as a "
            "loss that balances experts: the mean over microbatches of a product is not the "
            "product of the means."
        )
    if what == "slot":
        yield (
            "Gradients are equal, and this variable is not: a slot is split or "
            "reduced wrongly, or the program updates it by what one shard or microbatch has."
        )
    if what == "value" and not facts.sees_gradients:
        yield (
            "No optimizer was seen, so that gradients are not known: they, or what the program "
            "makes of them, depend on the division."
        )
    if what == "value":
        yield (
            "Its gradient is equal and its new value is not: the update itself depends on the "
            "division (a learning rate, a decay, a slot, or a norm in the optimizer)."
        )
    if factor is not None and factor < 0:
        yield (
            "It has the other sign: the gradient is subtracted where it is added elsewhere, or a "
            "loss is negated."
        )
    if factor == 0:
        yield "No gradient reaches it: a mask or a stop_gradient that depends on the division."
    if factor is not None and "microbatch steps" in facts.of_factor and factor > 1:
        yield "Microbatch gradients are added and not averaged: average_aggregated_gradients=True."
    if facts.factors_are_one and factor is not None and not facts.of_factor:
        yield (
            "All gradients are multiplied by one number, which is no number of cores or steps: "
            "clipping or a norm that counts copies, leaves out parts that are split, or is taken "
            "over shards; or a scale that is not taken out."
        )
    # A variable with a single element always has a factor, so that alone says nothing.
    named = factor if facts.of_factor or facts.factors_are_one else None
    if named is not None and named > 1:
        yield (
            "Gradients of shards or copies are added where the mean is meant, or are summed twice: "
            "reduction=SUM, a sum of the program's own before or after that of the wrapper, or a "
            "loss for each shard that is not divided by their number."
        )
    if named is not None:
        yield (
            "Something divides by it that was divided already: a mean over shards of gradients "
            "that shards have parts of, as of experts, or a learning rate or loss scaled for the "
            "number of shards; or a part of the sum is missing."
        )
    if facts.rounds and _BFLOAT16[0] < facts.error < _BFLOAT16[1]:
        yield (
            "The size of a rounding to bfloat16, which the model does not have: a reduction in "
            "bfloat16 (reduce_dtype), or a cast of gradients."
        )
    if joins_steps:
        yield (
            "Steps are joined that are not alike: a mean of means where they have unequal tokens "
            "(give weights=), clipping by each microbatch's own norm (clip inside the "
            "accumulation), or examples that are dropped."
        )
    if kind == "CrossShardOptimizer":
        yield (
            "Shards are joined that are not alike: a mean of means with unequal tokens (give "
            "weights=), or a variable with a dimension that is called like the batch's."
        )
    if facts.forward:
        yield _OF_FORWARD
    yield (
        "The loss is equal and the gradient is not, by no number of cores or steps: some shards' "
        "parts are missing, count otherwise or are of another step, or a dimension is called like "
        "the batch's."
    )


def why_on_another_mesh(recorded: Any, mesh_shape: str) -> str:
    """Returns in words that a program was lowered on a mesh of another shape than `mesh_shape`.

    `verify` asks a program to use a mesh, but the program may make a mesh of its own.

    Args:
      recorded: the `RecordedProgram` that was made when the program was built.
      mesh_shape: the mesh shape that the program was asked to use, such as "batch:4;model:2".

    Returns:
      The error in words, with both mesh shapes; "" if the program was lowered on `mesh_shape`.
    """
    asked = mtf.convert_to_shape(mesh_shape)
    found = {v.mesh: v for v in recorded.variables.values()}
    for lowering in recorded.lowerings:
        for mesh, mesh_impl in lowering.mesh_to_impl.items():
            if mesh in found and mesh_impl.shape != asked:
                shape = ";".join(f"{d.name}:{d.size}" for d in mesh_impl.shape.dims) or "no axis"
                return (
                    f"the program was lowered on a mesh of {shape}, and not on {mesh_shape}: it "
                    'makes a mesh of its own; let it read params["mesh_shape"] and params["layout"]'
                )
    return ""
