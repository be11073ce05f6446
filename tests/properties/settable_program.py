"""A mesh program in a session whose variables can be set between steps."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf
from tests import harness

Build = Callable[[mtf.Mesh, "dict[str, tf.Tensor]"], Sequence[mtf.Operation]]


class Program:
    """A session, and what was made in its graph."""

    def __init__(
        self,
        session: Any,
        lowering: mtf.Lowering,
        inputs: dict[str, tf.Tensor],
        step: Sequence[tf.Operation],
    ):
        self._inputs, self._step = inputs, step
        self._masters = {v.op.name: v for v in tf.global_variables()}
        self._values = {
            k: tf.placeholder(v.dtype.base_dtype, v.shape) for k, v in self._masters.items()
        }
        self._assign = {k: tf.assign(v, self._values[k]) for k, v in self._masters.items()}
        self._to_slices = lowering.copy_masters_to_slices()
        self._to_masters = lowering.copy_slices_to_masters()
        init = tf.global_variables_initializer()
        self._session = session()
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
    with tf.Graph().as_default():
        inputs = {
            name: tf.placeholder(tf.as_dtype(value.dtype), value.shape)
            for name, value in feed.items()
        }
        block = simd.tpu_program(mesh_shape, layout) if kind == "simd" else contextlib.nullcontext()
        with block as cores:
            mesh_impl = cores.mesh_impl if cores else harness.placement(mesh_shape, layout)
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            operations = build(mesh, inputs)
            lowering = mtf.Lowering(graph, {mesh: mesh_impl})
            step = [lowering.lowered_operation(op) for op in operations]

        def session() -> Any:
            if cores:
                return cores.session(lowering)
            return tf.Session(config=harness.placement_config(mesh_impl.size))

        running = Program(session, lowering, inputs, step)
        with contextlib.closing(running):
            yield running
