"""A mesh program in a session whose variables can be set between steps."""

from __future__ import annotations

import contextlib
from typing import Callable, Iterator, Sequence

import numpy as np

from mtf_gradsync._private.libraries import mtf, tf
from tests import harness

Build = Callable[[mtf.Mesh, "dict[str, tf.Tensor]"], Sequence[mtf.Operation]]


class Program:
    """A session, and what was made in its graph."""

    def __init__(self, made: harness.Built):
        self._inputs, self._step = made.inputs, made.updates
        self._masters = {v.op.name: v for v in tf.global_variables()}
        self._values = {
            k: tf.placeholder(v.dtype.base_dtype, v.shape) for k, v in self._masters.items()
        }
        self._assign = {k: tf.assign(v, self._values[k]) for k, v in self._masters.items()}
        self._to_slices = made.lowering.copy_masters_to_slices()
        self._to_masters = made.lowering.copy_slices_to_masters()
        init = tf.global_variables_initializer()
        self._session = made._session()
        # The session of a SIMD program has done so; once more changes nothing.
        self._session.run(init)
        self._session.run(self._to_slices)

    def close(self) -> None:
        """Closes the session."""
        self._session.close()

    def step(self, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Runs a step; returns `variables()`."""
        self._session.run(self._step, {self._inputs[k]: value for k, value in feed.items()})
        return self.variables()

    def variables(self) -> dict[str, np.ndarray]:
        """The values of all variables by name."""
        self._session.run(self._to_masters)
        return self._session.run(self._masters)

    def load(self, values: dict[str, np.ndarray]) -> None:
        """Sets variables by name; the others keep what the last `variables` or `step` returned."""
        # Copies: TensorFlow may keep a slice of what it is fed as a variable, and write to it.
        feed = {self._values[name]: np.array(value) for name, value in values.items()}
        self._session.run([self._assign[name] for name in values], feed)
        self._session.run(self._to_slices)


@contextlib.contextmanager
def program(
    kind: str, mesh_shape: str, layout: str, feed: dict[str, np.ndarray], build: Build
) -> Iterator[Program]:
    """Builds a program and opens its session.

    Args:
      kind: "placement" or "simd".
      mesh_shape: shape of the mesh.
      layout: its layout.
      feed: inputs of a step; only shapes and dtypes matter.
      build: called with the mesh and a placeholder for each input; returns the mtf operations of
        a step.

    Yields:
      The `Program`.
    """
    made = harness.built(kind, mesh_shape, layout, lambda *given: (build(*given), {}), feed)
    with made.graph.as_default(), contextlib.closing(Program(made)) as running:
        yield running
