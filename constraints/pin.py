"""Makes an exact set of packages anew, for one Python or several.

    python constraints/pin.py constraints/tf-2.21.txt python3.11 python3.12 python3.13

asks pip, under each of these Pythons, for the newest packages that the extras of pyproject.toml
need and that are no newer than the file says. What the file says nothing about is taken as new as
it comes: to move a package, change or delete its line and run this.
Nothing is installed. `nox` installs every set and runs the tests on it.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "train,examples,test,dev,xla,tpu,islands"


def main() -> None:
    """Rewrites the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="is read, and written again")
    parser.add_argument("pythons", nargs="+", help="commands, as in python3.12")
    parser.add_argument("--extras", default=EXTRAS, help=f"of pyproject.toml; default {EXTRAS}")
    flags = parser.parse_args()
    lines = flags.file.read_text().splitlines()
    bounds = [re.sub("==", "<=", line) for line in lines if "==" in line]
    found = dict(resolved(python, bounds, flags.extras) for python in flags.pythons)
    header = [line for line in lines if line.startswith("#")]
    flags.file.write_text("\n".join([*header, *merged(found), ""]))


def resolved(python: str, bounds: list[str], extras: str) -> tuple[str, dict[str, str]]:
    """What pip would install.

    Args:
      python: the command.
      bounds: requirements that no package may exceed.
      extras: of this package.

    Returns:
      The Python's version as in "3.12", and name -> version.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "bounds.txt").write_text("\n".join(bounds))
        subprocess.run([python, "-m", "venv", place / "venv"], check=True)
        inside = place / "venv" / "bin" / "python"
        install = [inside, "-m", "pip", "install", "--quiet"]
        # What comes with an older Python can take hours.
        subprocess.run([*install, "--upgrade", "pip"], check=True)
        subprocess.run(
            [
                *install,
                "--dry-run",
                "--ignore-installed",
                "--report",
                place / "report.json",
                "--constraint",
                place / "bounds.txt",
            ]
            + [f"{ROOT}[{extras}]", "setuptools", "wheel"],
            check=True,
        )
        report = json.loads((place / "report.json").read_text())
    packages = [item["metadata"] for item in report["install"]]
    versions = {p["name"]: p["version"] for p in packages if p["name"] != "mtf-gradsync"}
    return report["environment"]["python_version"], versions


def merged(found: dict[str, dict[str, str]]) -> list[str]:
    """Lines for pip, with a marker where Pythons take different versions.

    Args:
      found: Python's version -> name -> version.

    Returns:
      The lines, sorted.
    """
    lines = []
    for name in {name for versions in found.values() for name in versions}:
        by_version: dict[str, list[str]] = {}
        for python, versions in found.items():
            if name in versions:
                by_version.setdefault(versions[name], []).append(python)
        for version, pythons in by_version.items():
            marker = f'; python_version in "{" ".join(pythons)}"' if len(by_version) > 1 else ""
            lines.append(f"{name}=={version}{marker}")
    return sorted(lines, key=str.lower)


if __name__ == "__main__":
    main()
