"""The command ``mtf-gradsync``, which answers in less time than TensorFlow takes to be imported.

``import mtf_gradsync`` imports TensorFlow. Until a command begins its work, the package stands here
with its folder alone, unexecuted, so that its modules that read arguments and gin files can be
imported by themselves; `mtf_gradsync.tools.train.cli.loading` imports it when the work begins.
"""

from __future__ import annotations

import importlib.util
import sys


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; see `mtf_gradsync.tools.train.cli.main`."""
    if "mtf_gradsync" not in sys.modules:
        spec = importlib.util.find_spec("mtf_gradsync")
        sys.modules["mtf_gradsync"] = importlib.util.module_from_spec(spec)
    from mtf_gradsync.tools.train.cli.main import main as run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
