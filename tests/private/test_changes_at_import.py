"""The page's list of what importing the package changes in libraries is what it changes."""

from __future__ import annotations

import json
import pathlib
import re
import textwrap

import pytest

from tests.runtimes.cluster.processes import Processes

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "mesh_tensorflow.md"
# What each attribute of the libraries' modules, and of the classes made in them, is before and
# after; `mesh_tensorflow` is importable once the package's one module without effects is loaded.
CHANGES = """
    import json, sys, types
    from tensorflow.python.framework import ops

    LIBRARIES = {"mesh_tensorflow", "tensorflow", "tensorflow_estimator", "keras", "gin"}

    def attributes():
        found = {}
        for name, module in list(sys.modules.items()):
            # A lazy module would load what it stands for when its attributes are read.
            if name.split(".")[0] not in LIBRARIES or type(module) is not types.ModuleType:
                continue
            for key, value in list(vars(module).items()):
                found[f"{name}.{key}"] = value
                if isinstance(value, type) and value.__module__ == name:
                    found.update({f"{name}.{key}.{k}": v for k, v in vars(value).items()})
        import gin
        registry = gin.config._REGISTRY
        found.update({f"gin.config._REGISTRY.{k}": v for k, v in vars(registry).items()})
        return found

    # Bare packages, so that what `libraries` imports of them does not import the package itself.
    for name, folder in [("mtf_gradsync", %r), ("mtf_gradsync._private", %r)]:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [folder]
    import mtf_gradsync._private.libraries
    for name in [name for name in sys.modules if name.startswith("mtf_gradsync")]:
        del sys.modules[name]
    import mesh_tensorflow, gin
    modules, before = set(sys.modules), attributes()
    import mtf_gradsync
    changed = [
        name
        for name, value in attributes().items()
        # Modules that were loaded meanwhile have changed nothing, nor have their packages.
        if before.get(name) is not value
        and not isinstance(value, types.ModuleType)
        and any(name.startswith(module + ".") and module in modules
                for module in (name.rsplit(".", 1)[0], name.rsplit(".", 2)[0]))
        and not isinstance(value, (int, str, list, dict))
    ]
    print(json.dumps(changed))
"""
# Where TensorFlow and Mesh-TensorFlow have what the page calls by its public name.
PLACES = {
    "mesh_tensorflow.ops._": "mtf.ops._",
    "mesh_tensorflow.ops.": "mtf.",
    "mesh_tensorflow.optimize.": "mtf.optimize.",
    "mesh_tensorflow.placement_mesh_impl.": "mtf.placement_mesh_impl.",
    "mesh_tensorflow.simd_mesh_impl.": "mtf.simd_mesh_impl.",
    "mesh_tensorflow.": "mtf.",
    "tensorflow.python.training.saver.": "tf.train.",
    "tensorflow.python.training.checkpoint_utils.": "tf.train.",
}


def _public(name: str) -> str:
    for place, public in PLACES.items():
        if name.startswith(place):
            return public + name.removeprefix(place)
    return name


@pytest.fixture(scope="module")
def changed() -> set[str]:
    with Processes() as processes:
        package = ROOT / "mtf_gradsync"
        code = textwrap.dedent(CHANGES) % (str(package), str(package / "_private"))
        process = processes.fork("-c", code)
        return {_public(n) for n in json.loads(processes.wait(process).splitlines()[-1])}


def test_the_page_lists_each_function_that_the_import_replaces(changed):
    section = PAGE.read_text(encoding="utf-8").partition("## What importing")[2].partition("\n## ")
    rows = [line.split("|")[1] for line in section[0].splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    assert listed == changed


def test_a_function_that_is_replaced_is_found(changed):
    # So that the test above can fail: what every wrapper needs is among them.
    assert {"mtf.gradients", "mtf.Lowering.__init__", "tf.train.Saver.restore"} <= changed
