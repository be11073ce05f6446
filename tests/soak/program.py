"""The program that is trained under faults: ``mtf-gradsync``, with a fault inside."""

from __future__ import annotations

import sys
from typing import Callable, Sequence

from mtf_gradsync.tools.train import plots
from mtf_gradsync.tools.train.cli import main as cli
from tests.soak.injected import install


def program(fault: str, arguments: Sequence[str], prepare: Callable[[], None] | None = None) -> int:
    """Runs the command line.

    Args:
      fault: for `tests.soak.injected`.
      arguments: of ``mtf-gradsync``.
      prepare: called first.

    Returns:
      The exit code.
    """
    if prepare is not None:
        prepare()
    install(fault)
    # Pictures take longer than all the rest, and no fault here is about them.
    plots.draw_plots = lambda *unused_args, **unused_kwargs: []
    return cli.main(list(arguments))


if __name__ == "__main__":
    sys.exit(program(sys.argv[1], sys.argv[2:]))
