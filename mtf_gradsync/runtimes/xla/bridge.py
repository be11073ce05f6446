"""Turns a core's program into HLO with TensorFlow's own bridge to XLA."""

from __future__ import annotations

import functools
import json
import math
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from mtf_gradsync.extension import GATHERS, TOGETHER_ATTR, mixed, tf
from mtf_gradsync.runtimes._private.tensorflow import (
    BridgeError,
    eager_mode,
    function_hlo,
    xla_custom_call,
)
from mtf_gradsync.runtimes.simd.functionalize import StandIn, rebuild
from mtf_gradsync.runtimes.simd.graph_facts import UnsupportedProgramError
from mtf_gradsync.runtimes.simd.side_effects import COLLECTIVE_TYPES
from mtf_gradsync.runtimes.xla.hlo import read_module
from mtf_gradsync.runtimes.xla.replica_program import ReplicaProgram

# Target of a custom call -> the collective that it replaces.
COLLECTIVE_TARGETS = {f"mtf_gradsync.{op}": op for op in (*COLLECTIVE_TYPES, "AllGather")}

# Operations that make random floats -> the stateless ones that take their place.
_FLOATS = {
    "RandomUniform": tf.raw_ops.StatelessRandomUniformV2,
    "RandomStandardNormal": tf.raw_ops.StatelessRandomNormalV2,
    "TruncatedNormal": tf.raw_ops.StatelessTruncatedNormalV2,
}
# Random operations that XLA would draw from one state that all cores and all steps share.
RANDOM_TYPES = frozenset([*_FLOATS, "RandomUniformInt", "RandomShuffle", "Multinomial"])

_PHILOX = 1
# The state has three words: the draws of this step; the number of steps, with a key of this run for
# operations without a seed in the upper bits; and the core's key.
STATE_WORDS = 3
_STEP_BITS = 40
_RUN_BITS = 23


def collective(node: tf.NodeDef, data: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Makes a custom call that stands for a collective; returns its result, a list of one tensor.

    TensorFlow's bridge to XLA cannot lower collectives. So each collective becomes a custom call,
    which states the groups of cores and the dimensions as JSON. The module `stablehlo` later
    replaces this call by XLA's own collective.

    Args:
      node: the collective's node.
      data: the collective's inputs: the operand and the groups of cores; for a reduce-scatter also
        the dimension to scatter along. The groups and the dimension are constants.
    """
    sent, groups = data[:2]
    shape = sent.shape.as_list()
    # Names other than "groups" and "together" are names of StableHLO's attributes.
    settings: dict[str, Any] = {"groups": tf.get_static_value(groups).tolist()}
    if TOGETHER_ATTR in node.attr:
        settings["together"] = node.attr[TOGETHER_ATTR].s.decode()
    op = node.op
    if op == "AllToAll" and node.attr[GATHERS].b:
        # All rows are equal, so one row is sent to all cores.
        op, sent = "AllGather", sent[:1]
        axis = settings["all_gather_dim"] = node.attr["concat_dimension"].i
        shape[axis] *= shape[0]
        shape[0] = 1
    elif op == "XlaReduceScatter":
        dimension = settings["scatter_dimension"] = int(tf.get_static_value(data[2]))
        shape[dimension] //= len(settings["groups"][0])
    elif op == "AllToAll":
        for name in ("split_count", "split_dimension", "concat_dimension"):
            settings[name] = node.attr[name].i
        parts = settings["split_count"]
        shape[settings["split_dimension"]] //= parts
        shape[settings["concat_dimension"]] *= parts
    target = f"mtf_gradsync.{op}"
    return [xla_custom_call(sent, target, json.dumps(settings), shape, node.name)]


class Randomness:
    """Makes the operations that replace TensorFlow's random operations in a core's program.

    The random numbers of the new operations depend on the core's state. `state` is the handle of an
    int64 variable ``[STATE_WORDS]`` that holds this state.
    """

    def __init__(self, state: Any):
        self._state = state

    def stand_ins(self) -> dict[str, StandIn]:
        """Returns, for each type of random operation, a function that makes the replacement.

        Each function takes a replaced operation's node and inputs, and returns the outputs of the
        replacement.
        """
        return {
            **{op: functools.partial(self._floats, make) for op, make in _FLOATS.items()},
            "RandomUniformInt": self._integers,
            "RandomShuffle": self._shuffled,
            "Multinomial": self._samples,
        }

    def end_of_step(self) -> tf.Operation:
        """Returns an operation that sets the state to the state at the beginning of the next step.

        The operation has to run after the step has made all of its random numbers.
        """
        state = tf.raw_ops.ReadVariableOp(resource=self._state, dtype=tf.int64)
        new = tf.stack([tf.zeros([], tf.int64), state[1] + 1, state[2]])
        return tf.raw_ops.AssignVariableOp(resource=self._state, value=new)

    def _draw(self, node: tf.NodeDef, size: int) -> dict[str, Any]:
        """Returns "key", "counter" and "alg", the arguments of a stateless random operation.

        The method also advances the state by `size`, the number of random numbers that this
        operation makes, so that the next operation gives other random numbers. `node` is the
        replaced operation, whose seeds are mixed into the key.
        """
        before = tf.raw_ops.RngReadAndSkip(
            resource=self._state, alg=tf.constant(_PHILOX), delta=tf.constant(size, tf.uint64)
        )
        seeds = node.attr["seed"].i, node.attr["seed2"].i
        count = before[1:2]
        if any(seeds):
            count = tf.bitwise.bitwise_and(count, tf.constant([(1 << _STEP_BITS) - 1], tf.int64))
        # A constant of 64 bits: TensorFlow's seeds may not fit into less.
        key = tf.bitwise.bitwise_xor(before[2:], tf.constant([mixed(*seeds)], tf.int64))
        return {
            "key": tf.bitcast(key, tf.uint64),
            "counter": tf.bitcast(tf.concat([before[:1], count], 0), tf.uint64),
            "alg": tf.constant(_PHILOX),
        }

    def _floats(
        self, stateless: Callable[..., Any], node: tf.NodeDef, data: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        shape, dtype = _static(node, data[0]), tf.as_dtype(node.attr["dtype"].type)
        return [stateless(shape=shape, dtype=dtype, **self._draw(node, math.prod(shape)))]

    def _integers(self, node: tf.NodeDef, data: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        shape = _static(node, data[0])
        drawn = self._draw(node, math.prod(shape))
        make = tf.raw_ops.StatelessRandomUniformIntV2
        return [make(shape=shape, minval=data[1], maxval=data[2], **drawn)]

    def _uniform(self, node: tf.NodeDef, shape: list[int]) -> tf.Tensor:
        """Returns a tensor of random numbers above 0 and below 1, of which logarithms can be taken.

        The tensor is float32 and has the shape `shape`. `node` is the replaced random operation.
        The numbers depend on this operation's seeds and on the core's state.
        """
        drawn = tf.raw_ops.StatelessRandomUniformV2(
            shape=shape, dtype=tf.float32, **self._draw(node, math.prod(shape))
        )
        return tf.maximum(drawn, 2.0**-24)

    def _shuffled(self, node: tf.NodeDef, data: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        rows = data[0].shape[0]
        return [tf.gather(data[0], tf.argsort(self._uniform(node, [rows])))]

    def _samples(self, node: tf.NodeDef, data: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the output that replaces a ``Multinomial``'s: classes ``[batch, samples]``.

        The result is a list with one tensor. `node` is the ``Multinomial``, and `data` are its
        inputs: logits ``[batch, classes]`` and the number of samples, a constant. Each sample is
        the argmax of the logits plus Gumbel noise.
        """
        logits = tf.cast(data[0], tf.float32)
        batch, classes = logits.shape.as_list()
        count = int(_static(node, data[1]))
        gumbel = -tf.math.log(-tf.math.log(self._uniform(node, [batch, count, classes])))
        dtype = tf.as_dtype(node.attr["output_dtype"].type)
        return [tf.argmax(logits[:, tf.newaxis] + gumbel, axis=-1, output_type=dtype)]


def initial_state(core: int, step: int, entropy: int) -> np.ndarray:
    """Returns a core's state of random numbers, int64 ``[STATE_WORDS]``, after `step` steps.

    `core` is the core's number: each core has its own random numbers. `entropy` is a number that is
    chosen at random for the run; the results of random operations without a seed depend on it.
    """
    run = entropy % (1 << _RUN_BITS)
    return np.array([0, step | run << _STEP_BITS, mixed(core, 1)], np.int64)


def _static(node: tf.NodeDef, tensor: tf.Tensor) -> Any:
    value = tf.get_static_value(tensor)
    if value is None:
        raise UnsupportedProgramError.of(
            node,
            "XLA has to know how many random numbers the operation makes",
            "give the shape, or the number of samples, as a constant",
        )
    return value.tolist()


class Hlo(NamedTuple):
    """A core's program as HLO. Its parameters are `ReplicaProgram.inputs`, in that order."""

    # A serialized ``HloModuleProto``. Custom calls stand for the collectives, and each instruction
    # has the name of the graph's operation that it comes from.
    proto: bytes
    num_fetches: int  # how many results are fetches; they come first
    updated: tuple[int, ...]  # for each further result, the parameter that it replaces
    # Whether it draws random numbers. If so, the last parameter is their state, int64 ``[3]``.
    has_randomness: bool
    iterations: dict[str, int]  # name of a ``While`` operation -> the loop's number of iterations


def to_hlo(replica: ReplicaProgram) -> Hlo:
    """Turns `replica`, a core's program, into HLO that is not optimized; needs no devices.

    Raises an UnsupportedProgramError when XLA has no kernel for an operation.
    """
    import tensorflow as tf2

    tensors, variables = replica.tensors, replica.variables
    has_randomness = any(node.op in RANDOM_TYPES for node in replica.graph_def.node)
    # The bridge needs live variables, and eager execution.
    with eager_mode():
        # The bridge reads only their shapes.
        live = [tf2.Variable(tf2.zeros(i.shape, i.dtype), trainable=False) for i in variables]
        state = tf2.Variable(tf2.zeros([STATE_WORDS], tf2.int64), trainable=False)
        iterations: dict[str, int] = {}

        def body(*values: Any) -> Any:
            capture = tf.get_default_graph().capture
            given = {i.name: value for i, value in zip(tensors, values)}
            given.update((i.name, capture(v.handle)) for i, v in zip(variables, live))
            stand_ins: dict[str, StandIn] = {op: collective for op in COLLECTIVE_TYPES}
            if has_randomness:
                randomness = Randomness(capture(state.handle))
                stand_ins.update(randomness.stand_ins())
            made, found = rebuild(
                replica.graph_def, given, [*replica.fetches, *replica.effects], stand_ins
            )
            iterations.update(found)
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
    for instruction in module.instructions:
        # Where in Python operations were made: it differs from machine to machine.
        for field in ("source_file", "source_line"):
            instruction.proto.metadata.ClearField(field)
    aliases = module.aliases
    num_fetches = max(1, len(replica.fetches))
    if list(aliases) != list(range(num_fetches, num_fetches + len(aliases))):
        raise RuntimeError(
            f"TensorFlow {tf.__version__} returns updated variables in an order that this version "
            f"of mtf_gradsync does not know: {aliases}. TensorFlow 2.21 is known to work."
        )
    return Hlo(
        module.proto.SerializeToString(),
        num_fetches,
        tuple(aliases.values()),
        has_randomness,
        iterations,
    )
