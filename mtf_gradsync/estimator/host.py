"""Runs a spec's metrics and host_call on the host, in a graph of their own."""

from __future__ import annotations

import logging
from typing import Any, Callable, Mapping, Sequence, Union

import numpy as np

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._private.tensorflow import summary_writers

_logger = logging.getLogger(__name__)

Tensors = Union[Sequence[tf.Tensor], Mapping[str, tf.Tensor]]


class HostFunction:
    """A function of a step's `tensors`, called with the values that a session returned for them."""

    def __init__(self, call: Sequence[Any]):
        """Builds the graph of `call`, a pair of a function and its tensors, a list or by name.

        TPUEstimatorSpec's eval_metrics and host_call are such pairs.
        """
        if not isinstance(call, (list, tuple)) or len(call) != 2 or not callable(call[0]):
            raise ValueError(
                f"eval_metrics and host_call are pairs of a function and its tensors, got {call!r}."
            )
        function, self.tensors = call
        graph = tf.Graph()
        with graph.as_default():
            inputs = tf.nest.map_structure(_placeholder, self.tensors)
            self._inputs = tf.nest.flatten(inputs)
            is_named = isinstance(inputs, Mapping)
            self.result = function(**inputs) if is_named else function(*inputs)
            writers = summary_writers(graph)
            initialize = [
                tf.global_variables_initializer(),
                tf.local_variables_initializer(),
                tf.tables_initializer(),
                *writers,
            ]
            self._flush = [tf.raw_ops.FlushSummaryWriter(writer=op.inputs[0]) for op in writers]
        self._session = tf.Session(graph=graph)
        self._session.run(initialize)

    def run(self, fetches: Any, values: Any) -> Any:
        """Runs operations of the function's graph on the values of a step's tensors."""
        return self._session.run(fetches, dict(zip(self._inputs, tf.nest.flatten(values))))

    def read(self, fetches: Any) -> Any:
        """Runs operations of the function's graph that need no values."""
        return self._session.run(fetches)

    def close(self) -> None:
        """Writes what is not written yet, and frees the graph."""
        self._session.run(self._flush)
        self._session.close()


def _placeholder(tensor: tf.Tensor) -> tf.Tensor:
    return tf.placeholder(tensor.dtype, tensor.shape)


class Metrics:
    """Metrics over the steps of an evaluation."""

    def __init__(self, eval_metrics: Sequence[Any]):
        self._host = HostFunction(eval_metrics)
        self.tensors = self._host.tensors
        pairs = dict(self._host.result)
        self._values = {name: value for name, (value, _) in pairs.items()}
        self._updates = [update for _, update in pairs.values()]

    def add(self, values: Any) -> None:
        """Adds the values of a step's tensors."""
        self._host.run(self._updates, values)

    def result(self) -> dict[str, np.ndarray]:
        """Returns the metrics by name, and frees the graph."""
        result = self._host.read(self._values)
        self._host.close()
        return result


class HostCallHook(tf.train.SessionRunHook):
    """Runs a spec's host_call after every step."""

    def __init__(self, host_call: tuple[Callable[..., Any], Tensors]):
        self._call = host_call
        self._host: HostFunction | None = None

    def begin(self) -> None:
        """Builds the function's graph."""
        try:
            self._host = HostFunction(self._call)
        except Exception as error:
            if getattr(error.__cause__, "name", None) != "tensorboard":
                raise
            _logger.warning(
                "host_call is skipped: it writes summaries by tf.summary, which needs TensorBoard "
                "(pip install tensorboard)."
            )

    def before_run(self, run_context: Any) -> tf.train.SessionRunArgs | None:
        """Asks for the tensors."""
        del run_context
        return self._host and tf.train.SessionRunArgs(self._host.tensors)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Calls the function."""
        del run_context
        if self._host:
            self._host.run(self._host.result, run_values.results)

    def end(self, session: Any) -> None:
        """Frees the graph."""
        del session
        if self._host:
            self._host.close()
