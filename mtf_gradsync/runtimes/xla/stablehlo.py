"""Turns the HLO of a core's program into StableHLO, as text or as a portable artifact."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import numpy as np
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from mtf_gradsync.runtimes._private.jax import hlo_to_module
from mtf_gradsync.runtimes.xla.bridge import COLLECTIVE_TARGETS, Hlo
from mtf_gradsync.runtimes.xla.runner.combiner import (
    TOGETHER,
    create,
    fill_with_sum,
    group_names,
    nested_operations,
    text_of,
)

#: The attribute of a loop that has its number of iterations.
ITERATIONS = "mtf_gradsync.turns"
_STABLEHLO = {
    "AllGather": "stablehlo.all_gather",
    "AllToAll": "stablehlo.all_to_all",
    "CollectivePermute": "stablehlo.collective_permute",
    "CrossReplicaSum": "stablehlo.all_reduce",
    "XlaReduceScatter": "stablehlo.reduce_scatter",
}


def to_stablehlo(hlo: Hlo, with_names: bool = False) -> str:
    """Turns `hlo`, a core's program, into the text of an MLIR module of StableHLO.

    In the module, results that are new values of variables are marked as values that may be written
    over the old values.

    If `with_names` is True, each operation of the module has the name of the TensorFlow operation
    from which it was made. Profiles of the compiled program show these names. If `with_names` is
    False, operations have no such names. Instead, each loop whose number of iterations is known
    from the TensorFlow graph has this number as the attribute `ITERATIONS`.
    """
    with mlir.make_ir_context(), ir.Location.unknown():
        module = hlo_to_module(hlo.proto)
        for op in list(nested_operations(module.operation)):
            if op.name == "mhlo.copy":
                # HLO's copy of results, which StableHLO lacks and nothing needs.
                op.results[0].replace_all_uses_with(op.operands[0])
                op.operation.erase()
            elif op.name == "stablehlo.custom_call":
                _put_collective(op)
            elif op.name == "stablehlo.while" and not with_names:
                iterations = hlo.iterations.get(str(op.location)[len('loc("') : -len('")')])
                if iterations is not None:
                    op.attributes[ITERATIONS] = ir.IntegerAttr.get(
                        ir.IntegerType.get_signless(64), iterations
                    )
        main = main_of(module)
        _return_separately(main)
        _mark_updates(main, hlo)
        share_constants(module.operation)
        # The rest of HLO's header needs a dialect that other versions do not have.
        for name in [getattr(a, "name", a) for a in module.operation.attributes]:
            if name.startswith("mhlo."):
                del module.operation.attributes[name]
        # The module's name from TensorFlow contains a count of all functions of the process.
        text = text_of(module, with_names)
        return re.sub(r"^module @\S+", "module @step", text, count=1, flags=re.MULTILINE)


def without_overwriting(module: str) -> str:
    """Returns a module that `to_stablehlo` made, changed to write no results over parameters."""
    return re.sub(r" \{tf\.aliasing_output = \d+ : i32\}", "", module)


def share_constants(operation: Any) -> None:
    """Replaces equal constant arrays in each block of an MLIR operation by the first of them.

    Equal arrays make a program large: TensorFlow makes an array of relative positions, for example,
    once for each layer. An array of relative positions may have a megabyte, and more than two
    megabytes as text.
    """
    for region in operation.regions:
        for block in region:
            first: dict[Any, Any] = {}
            for inner in list(block):
                op = inner.operation
                share_constants(op)
                if op.name != "stablehlo.constant":
                    continue
                value = op.attributes["value"]
                if ir.DenseElementsAttr(value).is_splat:
                    continue
                kept = first.setdefault(value, op)
                if kept is not op:
                    op.results[0].replace_all_uses_with(kept.results[0])
                    op.erase()


def _put_collective(op: Any) -> None:
    """Replaces a custom call that stands for a collective by XLA's own collective.

    `op` is the custom call, an MLIR operation. If `op` is a custom call that does not stand for a
    collective, it is not changed.
    """
    target = ir.StringAttr(op.attributes["call_target_name"]).value
    if target not in COLLECTIVE_TARGETS:
        return
    settings = json.loads(ir.StringAttr(op.attributes["backend_config"]).value)
    collective = COLLECTIVE_TARGETS[target]
    name = _STABLEHLO[collective]
    who = "source_target_pairs" if collective == "CollectivePermute" else "replica_groups"
    attributes: dict[str, Any] = {who: _matrix(settings.pop("groups"))}
    group = settings.pop("together", None)
    if group is not None:
        attributes[TOGETHER] = ir.StringAttr.get(group)
    int64 = ir.IntegerType.get_signless(64)
    attributes.update((key, ir.IntegerAttr.get(int64, n)) for key, n in settings.items())
    regions = 1 if collective in ("CrossReplicaSum", "XlaReduceScatter") else 0
    with ir.InsertionPoint(op), op.location:
        made = create(name, op.results[0].type, [op.operands[0]], attributes, regions)
    if regions:
        fill_with_sum(made.owner.regions[0], op.operands[0])
    op.results[0].replace_all_uses_with(made)
    op.erase()


def _matrix(groups: list[list[int]]) -> Any:
    """Returns groups of cores as an MLIR attribute: a matrix with a row for each group.

    If groups differ in size, the rows of the smaller groups are filled up with -1.
    """
    longest = max((len(g) for g in groups), default=0)
    rows = [[*g, *[-1] * (longest - len(g))] for g in groups]
    return ir.DenseIntElementsAttr.get(np.array(rows, np.int64).reshape(len(rows), longest))


def main_of(module: Any) -> Any:
    """Returns the function "main" of an MLIR module, which a run of the program calls.

    The function is an MLIR operation.
    """
    return next(
        op.operation
        for op in module.body.operations
        if ir.StringAttr(op.operation.attributes["sym_name"]).value == "main"
    )


def _type_of(function: Any) -> Any:
    return ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)


def _return_separately(main: Any) -> None:
    """Changes a function that returns one tuple, so that it returns the tuple's elements.

    `main` is the function, an MLIR operation. If `main` does not return a tuple, it is not changed.
    """
    last = main.regions[0].blocks[0].operations[len(main.regions[0].blocks[0].operations) - 1]
    if len(last.operands) == 1 and _is_tuple(last.operands[0].type):
        packed = last.operands[0].owner
        with ir.InsertionPoint(last):
            ir.Operation.create("func.return", operands=list(packed.operands))
        types = [x.type for x in packed.operands]
        last.operation.erase()
        packed.erase()
        new = ir.FunctionType.get(list(_type_of(main).inputs), types)
        main.attributes["function_type"] = ir.TypeAttr.get(new)
        if "res_attrs" in main.attributes:
            del main.attributes["res_attrs"]


def _is_tuple(kind: Any) -> bool:
    if hasattr(ir.TupleType, "isinstance"):  # jaxlib 0.4
        return ir.TupleType.isinstance(kind)
    return isinstance(kind, ir.TupleType)


def _mark_updates(main: Any, hlo: Hlo) -> None:
    """Marks variables' new values as results that may be written over the old values.

    `main` is the module's function, an MLIR operation. `hlo` says which results of `main` are new
    values of variables, and which parameters of `main` are the variables' old values.
    """
    attributes = [ir.DictAttr.get({}) for _ in _type_of(main).inputs]
    int32 = ir.IntegerType.get_signless(32)
    for output, parameter in enumerate(hlo.updated, start=hlo.num_fetches):
        alias = ir.IntegerAttr.get(int32, output)
        attributes[parameter] = ir.DictAttr.get({"tf.aliasing_output": alias})
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)


class Artifact(NamedTuple):
    """A program as a portable artifact of StableHLO."""

    content: bytes
    version: str  # the oldest version of StableHLO that reads it; "text" for text
    # Each collective's group, in order. The oldest versions have no room for such attributes.
    groups: list[str | None]


def to_artifact(module: str) -> Artifact:
    """Returns StableHLO as a portable artifact, in a format that old versions of jax can read.

    `module` is the text of an MLIR module with the StableHLO. If the module has operations that a
    portable artifact cannot hold, the content of the result is the text `module` itself.
    """
    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        groups = group_names(parsed)
        for version in (stablehlo.get_minimum_version(), stablehlo.get_current_version()):
            try:
                content = stablehlo.serialize_portable_artifact(parsed, version)
                return Artifact(content, version, groups)
            except ValueError:
                continue
    return Artifact(module.encode(), "text", groups)
