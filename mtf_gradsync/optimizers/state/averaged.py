"""Checkpoints with moving averages in place of the variables."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any, Iterator, Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.optimizers.state.restoring import write_changed

# The last part of an average's name, as TensorFlow has it.
AVERAGE = "ExponentialMovingAverage"


class NoAveragesError(ValueError):
    """A graph or checkpoint has no moving averages of its variables."""


def check_averages_kept() -> None:
    """Raises NoAveragesError if the default graph, with the step of training, has no averages."""
    variables = tf.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    if not any(variable.op.name.endswith(f"/{AVERAGE}") for variable in variables):
        raise NoAveragesError(
            "evaluate_with_averages needs an optimizer that keeps moving averages, and none does: "
            "wrap it in mtf_gradsync.AverageOptimizer, or give SyncReplicasOptimizer "
            "variable_averages and variables_to_average."
        )


@contextlib.contextmanager
def averaged_checkpoint(path: str, variables: Sequence[Any]) -> Iterator[str]:
    """Gives the path of a copy of a checkpoint with moving averages in place of tf variables.

    The copy has only these variables; those without an average keep their own values. It has the
    file name of `path`, and is deleted when the block ends.

    Raises:
      NoAveragesError: the checkpoint has no average of any of the variables.
    """
    reader = tf.train.load_checkpoint(path)
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    names = [variable.op.name for variable in variables if variable.op.name in shapes]
    averages = {name: f"{name}/{AVERAGE}" for name in names if f"{name}/{AVERAGE}" in shapes}
    if not averages:
        raise NoAveragesError(
            f"evaluate_with_averages: the checkpoint {path} has no moving averages of the model's "
            f"variables (<variable>/{AVERAGE}). mtf_gradsync.AverageOptimizer keeps them in "
            "training."
        )
    values = {
        # Averages are wider than narrow variables.
        name: reader.get_tensor(average).astype(dtypes[name].as_numpy_dtype)
        for name, average in averages.items()
    }
    with tempfile.TemporaryDirectory() as directory:
        target = os.path.join(directory, os.path.basename(path))
        write_changed(path, target, values, only=names)
        yield target
