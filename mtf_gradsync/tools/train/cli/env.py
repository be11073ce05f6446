"""Print versions, runtimes and devices of this machine.

Prints the versions of this package and of the libraries it uses, the runtimes that
train.run.runtime can name on this machine, why other runtimes cannot run, and the machine's
devices. Paste what it prints into a bug report.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Iterator

from mtf_gradsync.runtimes._common import ConfigError
from mtf_gradsync.tools.train.cli import flags
from mtf_gradsync.tools.train.cli.loading import import_package

_LIBRARIES = (
    "mtf-gradsync",
    "tensorflow",
    "mesh-tensorflow",
    "gin-config",
    "numpy",
    "jax",
    "jaxlib",
    "libtpu",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``mtf-gradsync env`` to its parser."""
    flags.add_json_argument(parser, "write the same as JSON, too")


def main(args: argparse.Namespace) -> int:
    """Runs ``mtf-gradsync env`` with its parsed flags `args`, and returns the exit code.

    The exit code is 1 if TensorFlow or Mesh-TensorFlow cannot be imported, else 0.
    """
    json_file = flags.output_path("--json", args.json)
    found: dict[str, str] = {}

    def show(name: str, value: str) -> None:
        found[name] = value
        print(f"{name:<24}{value}")

    show("Python", f"{platform.python_version()}, {sys.executable}")
    show("machine", f"{platform.platform()}, {os.cpu_count()} processors")
    for name in _LIBRARIES:
        show(name, version_of(name) or "not installed")
    # First what cannot fail: this command is for finding out why an environment is broken.
    sys.stdout.flush()
    code = 0
    try:
        import_package(verbosity=-1)
    except ImportError as error:
        show("runtimes", f"none, TensorFlow or Mesh-TensorFlow cannot be imported: {error}")
        code = 1
    else:
        for name, value in _runtime_lines():
            show(name, value)
    flags.write_output("--json", json_file, json.dumps(found, indent=2) + "\n")
    return code


def version_of(name: str) -> str:
    """Returns the version of an installed distribution; "" if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _runtime_lines() -> Iterator[tuple[str, str]]:
    """Yields pairs (name, value) of the lines that need the imported package: runtimes, devices."""
    import mtf_gradsync
    from mtf_gradsync.extension import ESTIMATOR_AVAILABLE, tf
    from mtf_gradsync.runtimes import xla
    from mtf_gradsync.runtimes.sessions import fastest_runtime
    from mtf_gradsync.tools.train.config import transformer_utils

    yield "package", str(Path(mtf_gradsync.__file__).parent)
    yield "tf.estimator", "there" if ESTIMATOR_AVAILABLE else "gone: mtf_gradsync.estimator"
    found, no_xla = "", xla.why_no_xla()
    if not no_xla:
        try:
            # One device: asking for more would make more CPU devices.
            (first,) = xla.devices_for(1)
            kinds = collections.Counter(d.device_kind for d in first.client.devices())
            found = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
            if first.platform == "cpu":
                found = "cpu, as many as the mesh has cores"
        except xla.DevicesError as error:
            no_xla = str(error)
    yield "runtime xla", f"no: {no_xla}" if no_xla else f"yes, on {found}"
    yield "runtime cpu_replicas", "yes"
    devices = collections.Counter(d.device_type for d in tf.config.list_physical_devices())
    listed = ", ".join(f"{number} {kind}" for kind, number in devices.items())
    yield "runtime placement_mesh", f"yes, on {listed} of TensorFlow"
    yield "runtime fastest", f"is {fastest_runtime().name}"
    yield "TPU compiler", xla.why_no_tpu_compiler() or "there, for mtf-gradsync compile"
    try:
        transformer_utils()
        yield "extra train", "yes"
    except ConfigError as error:
        yield "extra train", f"no: {error}"
    yield "compiled programs", f"kept in {xla.default_cache_dir() or 'no folder'}"
