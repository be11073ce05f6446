"""Makes a folder a virtual environment of the Python that runs this, unless it is one already.

    python3.12 .ci/make_venv.py .venv --extras train,xla

installs the checkout, to be edited in place, with these extras in the exact versions of a set in
constraints/: the one that fits this Python, unless --constraints names another. Without --extras
the environment gets what the set lists, and nothing of the checkout.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Makes the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--constraints", metavar="FILE", help="the exact set of packages")
    parser.add_argument("--extras", default="", help="of pyproject.toml, separated by commas")
    flags = parser.parse_args()
    constraints = flags.constraints or fitting_set()
    # Two may begin at once: the second waits, and finds all done.
    with open(f"{flags.folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            make(flags.folder, constraints, flags.extras)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"{flags.folder} could not be made: {error}. The next make begins it anew.")
        except KeyboardInterrupt:
            sys.exit(130)


def fitting_set() -> str:
    """The exact set of packages for this Python: Estimator's last TensorFlow where it runs."""
    return f"constraints/tf-{'2.15' if sys.version_info < (3, 12) else '2.21'}.txt"


def make(folder: Path, constraints: str, extras: str) -> None:
    """Makes a folder an environment; its stamp, written last, says of what.

    Args:
      folder: where it goes.
      constraints: file of the exact versions.
      extras: of this package.

    Raises:
      OSError: when a file cannot be read or written.
      subprocess.CalledProcessError: when Python or pip failed.
    """
    stamp = folder / ".installed"
    # The one under a virtual environment that is active, which may be this very folder.
    base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    made_of = {
        "python": [base, sys.version],
        "folder": str(folder.resolve()),
        "constraints": _digest(constraints),
        "extras": extras,
    }
    wanted = {**made_of, "pyproject": _digest("pyproject.toml") if extras else ""}
    there = _read(stamp)
    if there == wanted:
        return
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"Setting up {folder}: Python {version}, {constraints} (minutes the first time)")
    sys.stdout.flush()
    stamp.unlink(missing_ok=True)
    if any(there.get(key) != value for key, value in made_of.items()):
        _clear(folder)
        subprocess.run([base, "-m", "venv", folder], check=True)
    # Python compiles what is imported; pip would compile everything.
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    pip += ["--no-compile", "--constraint", constraints]
    if extras:
        # The build tool comes first, from the set, so that the build itself is repeatable too.
        subprocess.run([*pip, "setuptools", "wheel"], check=True)
        editable = ["--no-build-isolation", "--editable", f".[{extras}]"]
        subprocess.run([*pip, *editable], check=True)
    else:
        subprocess.run([*pip, "--requirement", constraints], check=True)
    stamp.write_text(json.dumps(wanted))


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _read(stamp: Path) -> dict[str, object]:
    try:
        return json.loads(stamp.read_text())
    except (OSError, ValueError):  # none, or that of an older make
        return {}


def _clear(folder: Path) -> None:
    """Empties a folder that holds an environment, or the beginning or the rest of one, alone."""
    mark = folder / "pyvenv.cfg"  # first to come and last to go
    if folder.exists() and any(folder.iterdir()) and not mark.exists():
        sys.exit(f"{folder} is not a virtual environment. Name another folder: make VENV=...")
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != mark:
            path.unlink()


if __name__ == "__main__":
    main()
