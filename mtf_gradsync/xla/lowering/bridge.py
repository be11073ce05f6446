"""Turns a core's program into HLO by TensorFlow's own bridge to XLA."""

from __future__ import annotations

from typing import Any, NamedTuple

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.tensorflow import BridgeError, eager_mode, function_hlo
from mtf_gradsync.simd.effects import COLLECTIVE_TYPES
from mtf_gradsync.simd.errors import UnsupportedProgramError
from mtf_gradsync.simd.functional import StandIn, rebuild
from mtf_gradsync.xla.hlo import aliases_of, read_module
from mtf_gradsync.xla.lowering.replica_program import ReplicaProgram
from mtf_gradsync.xla.lowering.stand_ins import RANDOM_TYPES, STATE_WORDS, Randomness, collective


class Hlo(NamedTuple):
    """A core's program as HLO. Its parameters are `ReplicaProgram.inputs`, in that order."""

    # A serialized ``HloModuleProto``. Custom calls stand for the collectives, and instructions
    # know the operation of the graph that they are of.
    proto: bytes
    num_fetches: int  # how many results are fetches; they come first
    updated: tuple[int, ...]  # for each further result, which parameter it is the new value of
    # Whether it draws random numbers; its last parameter is then their state, int64 ``[3]``.
    has_randomness: bool


def to_hlo(replica: ReplicaProgram) -> Hlo:
    """Turns a core's program into HLO, which XLA has not optimized yet.

    Raises an UnsupportedProgramError when XLA has no kernel for an operation.
    """
    import tensorflow as tf2

    tensors = [i for i in replica.inputs if not i.is_variable]
    variables = [i for i in replica.inputs if i.is_variable]
    has_randomness = any(node.op in RANDOM_TYPES for node in replica.graph_def.node)
    # The bridge needs live variables, and eager execution.
    with eager_mode():
        # It reads only their shapes.
        live = [tf2.Variable(tf2.zeros(i.shape, i.dtype), trainable=False) for i in variables]
        state = tf2.Variable(tf2.zeros([STATE_WORDS], tf2.int64), trainable=False)

        def body(*values: Any) -> Any:
            capture = tf.get_default_graph().capture
            given = {i.name: value for i, value in zip(tensors, values)}
            given.update((i.name, capture(v.handle)) for i, v in zip(variables, live))
            stand_ins: dict[str, StandIn] = {op: collective for op in COLLECTIVE_TYPES}
            if has_randomness:
                randomness = Randomness(capture(state.handle))
                stand_ins.update(randomness.stand_ins())
            made = rebuild(
                replica.graph_def, given, [*replica.fetches, *replica.effects], stand_ins
            )
            if has_randomness:
                with tf.control_dependencies([getattr(m, "op", m) for m in made]):
                    made.append(randomness.end_of_step())
            count = len(replica.fetches)
            with tf.control_dependencies(made[count:]):
                # A function has to return something that depends on its effects.
                return [tf.identity(t) for t in made[:count]] or [tf.zeros([])]

        specs = [tf2.TensorSpec(i.shape, i.dtype) for i in tensors]
        # wrap_function, because tf.function adds control edges of its own, which cannot cross the
        # frames of a v1 loop.
        try:
            proto = function_hlo(tf.wrap_function(body, specs), specs)
        except BridgeError as error:
            raise UnsupportedProgramError(
                f"TensorFlow {tf.__version__}'s bridge to XLA refuses the program: {error}"
            ) from error
    module = read_module(proto)
    _forget_places(module)
    aliases = aliases_of(module)
    num_fetches = max(1, len(replica.fetches))
    if list(aliases) != list(range(num_fetches, num_fetches + len(aliases))):
        raise RuntimeError(
            f"TensorFlow {tf.__version__} returns updated variables in an order that this version "
            f"of mtf_gradsync does not know: {aliases}. TensorFlow 2.21 is known to work."
        )
    return Hlo(module.SerializeToString(), num_fetches, tuple(aliases.values()), has_randomness)


def _forget_places(module: Any) -> None:
    """Takes out where in Python operations were made: it differs from machine to machine."""
    for computation in module.computations:
        for instruction in computation.instructions:
            for field in ("source_file", "source_line"):
                instruction.metadata.ClearField(field)
