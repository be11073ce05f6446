"""``mtf-gradsync train`` as a task of a cluster, at a pace at which it can be hit."""

import os
import sys
import time

import gin

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.tools.train.cli import main as cli
from tests import grappler


class Pace(tf.train.SessionRunHook):
    """Waits before each step, except the first ones."""

    def __init__(self, seconds, quick):
        self._seconds, self._left = seconds, quick

    def before_run(self, run_context):
        del run_context
        self._left -= 1
        if self._left < 0:
            time.sleep(self._seconds)


@gin.configurable
def pace(seconds=gin.REQUIRED, quick=gin.REQUIRED):
    """A hook for ``train.run.hooks``."""
    return Pace(seconds, quick)


if __name__ == "__main__":
    # The tests hold the ports until the servers come to them.
    os.environ["TF_GRPC_REUSE_PORT"] = "1"
    # It takes longer than the steps, and is the same where one process trains.
    grappler.turn_off()
    sys.exit(cli.main(sys.argv[1:]))
