"""Compiles a core's HLO with XLA. Needs jax, so it runs in a process of its own."""

from __future__ import annotations

import re
from typing import Any, Mapping, Sequence

from mtf_gradsync._private.jax import compile_stablehlo
from mtf_gradsync.xla.lowering import Hlo

_LONGEST_ERROR = 600


def compiled(
    hlo: Hlo, devices: Sequence[Any], options: Mapping[str, Any] = {}, load: bool = False
) -> Any:
    """Compiles a core's program, one core on each device.

    Args:
      hlo: the program.
      devices: jax devices that exist (load), or that a topology describes.
      options: options of XLA's compiler by name.
      load: whether to make it ready to run.

    Returns:
      The executable, for the functions of `mtf_gradsync._private.jax`.

    Raises:
      RuntimeError: when XLA refuses the program.
    """
    from jax.extend.mlir import hlo_to_stablehlo, ir
    from jax.interpreters import mlir

    with mlir.make_ir_context():
        module = ir.Module.parse(hlo_to_stablehlo(hlo.proto))
        _drop_copies(module)
        _mark_updates(module, hlo)
        return compile_stablehlo(module, devices, dict(options), load)


def _drop_copies(module: Any) -> None:
    """Takes out HLO's ``copy`` of results, which StableHLO does not have and nothing needs."""
    from jax.extend.mlir import ir

    copies = []

    def collect(op: Any) -> Any:
        if op.name == "mhlo.copy":
            copies.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(collect)
    for op in copies:
        op.results[0].replace_all_uses_with(op.operands[0])
        op.erase()


def _mark_updates(module: Any, hlo: Hlo) -> None:
    """Says that new values of variables may be written over the old ones.

    HLO says so in its header, which gets lost on the way through StableHLO.
    """
    from jax.extend.mlir import ir

    main = next(op for op in module.body.operations if op.name.value == "main")
    attributes = [ir.DictAttr.get({}) for _ in main.type.inputs]
    int32 = ir.IntegerType.get_signless(32)
    for output, parameter in enumerate(hlo.updated, start=hlo.num_fetches):
        alias = ir.IntegerAttr.get(int32, output)
        attributes[parameter] = ir.DictAttr.get({"tf.aliasing_output": alias})
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)


def short_error(error: BaseException) -> str:
    """The part of a compiler's message that a user can act on, on one line.

    Args:
      error: what the compiler raised.

    Returns:
      The text; a long one ends in "...".
    """
    text = str(error).split("The op is created at", 1)[0].split("Stack trace", 1)[0]
    text = re.sub(r"\s+", " ", text).strip()
    return text if len(text) <= _LONGEST_ERROR else text[:_LONGEST_ERROR] + "..."
