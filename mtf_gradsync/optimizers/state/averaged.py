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
    """Checks that training, whose step the default graph has, keeps moving averages.

    Raises:
      NoAveragesError: the graph has no moving averages.
    """
    variables = tf.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    if not any(variable.op.name.endswith(f"/{AVERAGE}") for variable in variables):
        raise NoAveragesError(
            "evaluate_with_averages needs an optimizer that keeps moving averages, and none does: "
            "wrap it in mtf_gradsync.AverageOptimizer, or give SyncReplicasOptimizer "
            "variable_averages and variables_to_average."
        )


@contextlib.contextmanager
def averaged_checkpoint(path: str, variables: Sequence[Any]) -> Iterator[str]:
    """Gives a checkpoint with moving averages in place of the variables.

    It is in a directory for temporary files, and is deleted when the block ends.

    Args:
      path: a checkpoint of a training that keeps averages; it is only read.
      variables: tf variables that are to be restored, which the checkpoint will have. Those without
        an average keep their own values.

    Yields:
      The path of the new checkpoint, with the file name of path.

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
