"""Runs a branch as one function call, so that skipping it skips one operation.

TensorFlow's executor still handles each operation of a branch that is skipped as a dead one, and
each value that the branch takes from another device. An update has tens of thousands of the former
and thousands of the latter.
"""

from __future__ import annotations

from typing import Callable

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.tensorflow import replace_capture, set_attr
from mtf_gradsync.mesh.devices import process_of

_NOT_INLINED = {"_noinline": True}


def can_call(lowering: mtf.Lowering) -> bool:
    """Whether a branch can be a function over the devices of a mesh.

    It cannot be on SIMD meshes (a TPU program has no such calls), on meshes over several processes,
    with ref variables, and on TensorFlow 2.12, which inlines every function. There its operations
    are part of the graph itself, which is slower on the steps that skip it.
    """
    processes = set()
    for mesh_impl in lowering.mesh_to_impl.values():
        for device in getattr(mesh_impl, "devices", None) or [None]:
            if not isinstance(device, str):  # a SIMD mesh, or devices chosen by a function
                return False
            processes.add(process_of(device))
    if len(processes) != 1 or not _takes_attributes():
        return False
    return not any(
        x.dtype != x.dtype.base_dtype
        for variable in lowering.variables.values()
        for x in variable.laid_out_tensor.all_slices
    )


def _takes_attributes() -> bool:
    try:
        tf.function(lambda: None, experimental_attributes=_NOT_INLINED)
    except (TypeError, ValueError):
        return False
    return True


def run_as_call(run: Callable[[], tf.Operation]) -> tf.Operation:
    """Runs a branch as one call of a function; `run` makes its operations and returns the last."""

    def body() -> tf.Tensor:
        _copy_handles_and_constants(tf.get_default_graph())
        with tf.control_dependencies([run()]):
            return tf.constant(True)

    call = tf.function(body, autograph=False, experimental_attributes=_NOT_INLINED)().op
    # The session has optimized the function before it is called; a second time would take start-up
    # time, and regroup sums by options of its own.
    options = tf.ConfigProto()
    options.graph_options.rewrite_options.disable_meta_optimizer = True
    set_attr(call, "config_proto", tf.AttrValue(s=options.SerializeToString()))
    return call


def _copy_handles_and_constants(graph: tf.Graph) -> None:
    """Makes a function's graph copy variable handles and constants instead of capturing them."""
    copies: dict[tf.Operation, tf.Tensor] = {}

    def copy(tensor: tf.Tensor) -> tf.Tensor | None:
        op = tensor.op
        if not _can_be_copied(op):
            return None
        if op not in copies:
            with tf.control_dependencies(None), tf.device(op.device):
                copies[op] = graph.create_op(
                    op.type,
                    [],
                    [x.dtype for x in op.outputs],
                    name=op.name,
                    attrs={k: v for k, v in op.node_def.attr.items() if not k.startswith("_")},
                ).outputs[0]
        return copies[op]

    replace_capture(graph, copy)


def _can_be_copied(op: tf.Operation) -> bool:
    # A handle without a shared name is identified by the name of its operation.
    return op.type == "Const" or (op.type == "VarHandleOp" and bool(op.get_attr("shared_name")))
