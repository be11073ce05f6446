"""Turns a core's program into HLO, the language of the TPU compiler, by TensorFlow's own bridge.

The bridge needs eager execution and a TensorFlow of 2.18 or later, so it runs in a process of its
own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.tensorflow import function_hlo
from mtf_gradsync.simd.graph.functional import rebuild
from mtf_gradsync.xla.hlo import aliases_of, read_module
from mtf_gradsync.xla.replica_program import ReplicaProgram

_OLDEST_TENSORFLOW = (2, 18)


class TensorFlowTooOldError(RuntimeError):
    """This TensorFlow cannot turn a SIMD program into HLO."""


class Hlo(NamedTuple):
    """A core's program as HLO. Its parameters are `ReplicaProgram.inputs`, in that order.

    Attributes:
      proto: a serialized ``HloModuleProto``.
      num_fetches: how many results are fetches; they come first.
      updated: for each further result, which parameter (a variable) it is the new value of.
    """

    proto: bytes
    num_fetches: int
    updated: tuple[int, ...]


def check_tensorflow() -> None:
    """Checks that this TensorFlow can make HLO of a SIMD program.

    Raises:
      TensorFlowTooOldError: when it cannot.
    """
    # ``XlaAllReduce`` exists since 2.11, its kernel since 2.18 (read on 2.15, 2.18 and 2.21).
    version = tuple(int(part) for part in tf.__version__.split(".")[:2])
    if version < _OLDEST_TENSORFLOW:
        oldest = ".".join(map(str, _OLDEST_TENSORFLOW))
        raise TensorFlowTooOldError(
            f"Compiling a SIMD program needs TensorFlow {oldest} or later; this is "
            f'{tf.__version__}. Install the extra in an environment of its own: pip install "mtf-'
            'gradsync[train,tpu]" "tensorflow>=2.18".'
        )


def to_hlo(replica: ReplicaProgram) -> Hlo:
    """Turns a core's program into HLO.

    Needs eager execution: call it in a process that has not called ``disable_v2_behavior``.

    Args:
      replica: the core's program.

    Returns:
      The HLO, before any optimization by XLA.

    Raises:
      TensorFlowTooOldError: on TensorFlow before 2.18.
      tf.errors.InvalidArgumentError: when XLA has no kernel for an operation.
    """
    check_tensorflow()
    import tensorflow as tf2

    tensors = [i for i in replica.inputs if not i.is_variable]
    variables = [i for i in replica.inputs if i.is_variable]
    # The bridge reads shapes from live variables; their values do not matter.
    live = [tf2.Variable(tf2.zeros(i.shape, i.dtype), trainable=False) for i in variables]

    def body(*values: Any) -> Any:
        capture = tf.get_default_graph().capture
        given = {i.name: value for i, value in zip(tensors, values)}
        given.update((i.name, capture(v.handle)) for i, v in zip(variables, live))
        made = rebuild(replica.graph_def, given, [*replica.fetches, *replica.effects])
        count = len(replica.fetches)
        with tf.control_dependencies(made[count:]):
            # A function has to return something for its effects to hang on.
            return [tf.identity(t) for t in made[:count]] or [tf.zeros([])]

    specs = [tf2.TensorSpec(i.shape, i.dtype) for i in tensors]
    # wrap_function, because tf.function adds control edges of its own, which cannot cross the
    # frames of a v1 loop.
    proto = function_hlo(tf.wrap_function(body, specs), specs)
    aliases = aliases_of(read_module(proto))
    num_fetches = max(1, len(replica.fetches))
    if list(aliases) != list(range(num_fetches, num_fetches + len(aliases))):
        raise RuntimeError(
            f"TensorFlow {tf.__version__} returns updated variables in an order that this version "
            f"of mtf_gradsync does not know: {aliases}. TensorFlow 2.21 is known to work."
        )
    return Hlo(proto, num_fetches, tuple(aliases.values()))
