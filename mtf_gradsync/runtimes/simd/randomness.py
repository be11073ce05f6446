"""The random numbers of CPU replicas, which depend on seeds, core and step.

TensorFlow's random operations take their numbers from generators that begin anew in each session. A
run that goes on from a checkpoint would get the random numbers of its first steps again. So each
copy of a random operation becomes a stateless operation of the same kind. The seed of the stateless
operation combines integers that identify the step with a key, which depends on the seeds of the
original operation and on the core. Each iteration of a loop gets other numbers.
"""

from __future__ import annotations

import os
import zlib
from typing import NamedTuple

import numpy as np

from mtf_gradsync.extension import mixed, tf
from mtf_gradsync.runtimes.simd.graph_facts import GraphFacts, Loop, split_input
from mtf_gradsync.runtimes.simd.graph_writing import GraphWriter

# Random operation -> the stateless one, and how many inputs come before its seed.
STATELESS = {
    "RandomUniform": ("StatelessRandomUniform", 1),
    "RandomStandardNormal": ("StatelessRandomNormal", 1),
    "TruncatedNormal": ("StatelessTruncatedNormal", 1),
    "RandomUniformInt": ("StatelessRandomUniformInt", 1),
    "Multinomial": ("StatelessMultinomial", 2),
}

_WORDS = 3  # of the state: loop iterations + 2**40 * steps without a new count; the count; zero
_REPEAT_BITS = 40
_PHILOX = 1


class RandomSteps(NamedTuple):
    """The names of the operations that set the step on which random numbers depend.

    Attributes:
      begin: the operation to run before each step, with values fed to the two tensors below.
      with_seed: the tensor to feed with integers (int64) that identify the step, for random
        operations that have a seed.
      without_seed: the tensor to feed with such integers for random operations without a seed.
    """

    begin: str
    with_seed: str
    without_seed: str


class StatelessRandomOps:
    """A rewriter that makes random operations stateless, with seeds that depend on the step.

    Call `rewrite` for each copy of a random operation, and then `finish` once.
    """

    def __init__(self, facts: GraphFacts, out: GraphWriter, name: str):
        """Makes a rewriter; nothing is rewritten yet.

        `facts` describes the user's graph, and `out` is the rewritten graph. `name` is the first
        part of the names of the nodes that the rewriter adds; no other operation's name begins with
        it.
        """
        self._facts, self._out, self._name = facts, out, name
        # Name of a variable of words -> whether its operation has a seed.
        self._variables: dict[str, bool] = {}

    def rewrite(self, copy: tf.NodeDef, original: str, core: int) -> None:
        """Turns the copy of a random operation on a core into a stateless operation.

        `copy` is the node of the copy in the rewritten graph; this node is changed in place.
        `original` is the operation's name in the user's graph, and `core` is the core on which the
        copy runs.
        """
        out, near = self._out, split_input(copy.input[0])[0]
        seeds = copy.attr["seed"].i, copy.attr["seed2"].i
        has_seed = any(seeds)
        if not has_seed:
            seeds = zlib.crc32(original.encode()), 0
        words = copy.name + "/random_words"
        is_in_loop = any(isinstance(c, Loop) for c in self._facts.context[original])
        own = copy.name if is_in_loop else f"{'with' if has_seed else 'without'}_seed"
        variable = f"{self._name}/{own}"
        handle = out.add_handle(copy.name + "/random_state", variable, tf.int64, _WORDS, near)
        if is_in_loop:
            algorithm = out.add_constant(copy.name + "/random_algorithm", _PHILOX, tf.int32, near)
            one = out.add_constant(copy.name + "/random_delta", 1, tf.uint64, near)
            out.add(words, "RngReadAndSkip", [handle, algorithm, one])
        else:
            out.add(words, "ReadVariableOp", [handle], dtype=tf.int64)
        self._variables[variable] = has_seed
        begin = out.add_constant(copy.name + "/random_begin", [0], tf.int32, near)
        size = out.add_constant(copy.name + "/random_size", [2], tf.int32, near)
        step = copy.name + "/random_step"
        out.add(step, "Slice", [words, begin, size], T=tf.int64, Index=tf.int32)
        word = mixed(*seeds)
        key = out.add_constant(
            copy.name + "/random_key", [mixed(word, core), mixed(word, ~core)], tf.int64, near
        )
        seed = out.add(copy.name + "/random_seed", "BitwiseXor", [step, key], T=tf.int64)
        copy.op, position = STATELESS[copy.op]
        inputs = list(copy.input)
        del copy.input[:]
        copy.input.extend([*inputs[:position], seed.name, *inputs[position:]])
        if "Tout" in copy.attr:  # of integers
            copy.attr["dtype"].CopyFrom(copy.attr["Tout"])
        for name in {"seed", "seed2", "Tout"} & set(copy.attr):
            del copy.attr[name]
        copy.attr["Tseed"].type = tf.int64.as_datatype_enum

    def finish(self) -> RandomSteps | None:
        """Adds and returns the operations that set the step; None if nothing was rewritten."""
        if not self._variables:
            return None
        given = {}
        for has_seed in (True, False):
            given[has_seed] = f"{self._name}/step_{'with' if has_seed else 'without'}_seed"
            self._out.add_placeholder(given[has_seed], tf.int64, [_WORDS])
        writes = []
        for number, (variable, has_seed) in enumerate(self._variables.items()):
            name = f"{self._name}/handle_{number}"
            handle = self._out.add_handle(name, variable, tf.int64, _WORDS)
            write = f"{self._name}/write_{number}"
            self._out.add(write, "AssignVariableOp", [handle, given[has_seed]], dtype=tf.int64)
            writes.append("^" + write)
        self._out.add(f"{self._name}/begin", "NoOp", writes)
        return RandomSteps(f"{self._name}/begin", f"{given[True]}:0", f"{given[False]}:0")


class RandomStep:
    """The step of a session, which makes the random numbers of each step different.

    If there is a global step, its value identifies the step. So, in operations with seeds, a
    resumed run gets the random numbers that it would have got without the interruption. If there is
    no global step, or a step does not change it, this object itself counts the steps.
    """

    def __init__(self, steps: RandomSteps, counter: str | None):
        """Makes the object of a session that has not made a step yet.

        `steps` are the operations that set the step in the session's graph. `counter` is the name
        of the tensor with the global step; None if there is no global step.
        """
        self._steps, self._counter = steps, counter
        self._entropy = int.from_bytes(os.urandom(7), "little")
        self._count, self._repeats = -1, 0

    def begin(self, session: tf.Session) -> None:
        """Sets the step of all random operations of a session's graph; called before each step."""
        count = 0 if self._counter is None else int(session.run(self._counter))
        self._repeats = self._repeats + 1 if count == self._count else 0
        self._count = count
        repeats = self._repeats << _REPEAT_BITS
        session.run(
            self._steps.begin,
            {
                self._steps.with_seed: np.array([repeats, count, 0], np.int64),
                self._steps.without_seed: np.array([repeats, count ^ self._entropy, 0], np.int64),
            },
        )

    def restart(self) -> None:
        """Makes this object count steps from 0 again; called after a checkpoint was restored."""
        self._count = -1
