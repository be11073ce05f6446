"""Runs the training step in this folder: python run.py --help. Needs numpy and jax."""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))

if __name__ == "__main__":
    sys.path.insert(0, HERE)
    try:
        # In the folder of this file.
        from runner.command import main  # type: ignore[import-not-found]
        from runner.meeting import meet_at  # type: ignore[import-not-found]
    except ImportError as error:
        print(f"run.py: {error}. Install what it needs: pip install numpy jax.", file=sys.stderr)
        sys.exit(2)
    sys.exit(main(sys.argv[1:], HERE, meet_at))
