"""Random numbers on placement meshes, which depend on the graph's seed, slice and global step."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Iterator

from mtf_gradsync._common import mixed
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync._private.patches import patch
from mtf_gradsync._private.tensorflow import advance_step_after, is_in_loop

_STATELESS = {
    tf.random.uniform: tf.random.stateless_uniform,
    tf.random.normal: tf.random.stateless_normal,
    tf.random.truncated_normal: tf.random.stateless_truncated_normal,
}


def draw_by_step() -> None:
    """Makes random numbers of placement meshes depend on the step where a program has a seed.

    Mesh-TF seeds TensorFlow's generators, which begin anew in each session, by Python's random
    numbers and hash. In a graph with a seed and a global step (a resource variable), the same
    program draws the same numbers in each process, and in a run that was resumed. Turns of loops,
    and graphs without these, draw as ever.
    """

    def by_step(random: Any) -> Any:
        def draw(self: Any, shape: mtf.Shape, tf_fn: Any, kwargs: dict[str, Any]) -> Any:
            stateless = _STATELESS.get(tf_fn)
            numbers = None if stateless is None else _Numbers.of(tf.get_default_graph())
            if stateless is None or numbers is None:
                return random(self, shape, tf_fn, kwargs)
            slice_shape, operation = self.slice_shape(shape), next(numbers.operations)

            def of_slice(processor: int) -> tf.Tensor:
                # Slices that are the same part of a tensor have the same numbers.
                word = operation
                for begin in self.slice_begin(shape, processor):
                    word = mixed(word, begin)
                key = tf.constant([mixed(word, numbers.seed), word], tf.int64)
                seed = tf.bitwise.bitwise_xor(numbers.step, key)
                return stateless(slice_shape, seed=seed, **kwargs)

            return self.slicewise(of_slice, self.laid_out_pnum())

        return draw

    patch(mtf.placement_mesh_impl.PlacementMeshImpl, "random", by_step)


class _Numbers:
    """What random operations of a graph draw from.

    Attributes:
      seed: the graph's.
      step: int64 ``[2]``, another in each step.
      operations: numbers of the random operations.
    """

    def __init__(self, graph: tf.Graph, counter: Any):
        self.seed: int = graph.seed
        self.operations: Iterator[int] = itertools.count(1)
        with tf.control_dependencies(None), tf.name_scope("random_step"), tf.device(counter.device):
            self.step = _words(counter)

    @classmethod
    def of(cls, graph: tf.Graph) -> _Numbers | None:
        """Returns those of a graph; None where random operations cannot depend on the step."""
        if graph.seed is None or is_in_loop(graph):
            return None
        if graph not in _OF_GRAPH:
            counter = tf.train.get_global_step(graph)
            if counter is None or getattr(counter, "handle", None) is None:
                return None
            _OF_GRAPH[graph] = cls(graph, counter)
        return _OF_GRAPH[graph]


_OF_GRAPH: weakref.WeakKeyDictionary[tf.Graph, _Numbers] = weakref.WeakKeyDictionary()


def _words(counter: Any) -> tf.Tensor:
    """Returns the number of steps since the global step moved, and the global step."""
    count = tf.cast(counter.read_value(), tf.int64)
    advance_step_after(counter, [count.op])
    raw = tf.raw_ops
    # Nobody initializes it: it belongs to no collection, and to no checkpoint.
    last = raw.VarHandleOp(
        dtype=tf.int64, shape=[2], shared_name=tf.get_default_graph().unique_name("last")
    )
    before = tf.cond(
        raw.VarIsInitializedOp(resource=last),
        lambda: raw.ReadVariableOp(resource=last, dtype=tf.int64),
        lambda: tf.constant([0, -1], tf.int64),
    )
    stands = tf.cast(tf.equal(before[1], count), tf.int64)
    words = tf.stack([stands * (before[0] + 1), count])
    with tf.control_dependencies([raw.AssignVariableOp(resource=last, value=words)]):
        return tf.identity(words)
