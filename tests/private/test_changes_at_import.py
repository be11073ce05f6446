"""The page's lists of what the package changes in libraries and in the process are complete."""

from __future__ import annotations

import json
import pathlib
import re
import textwrap
from typing import Any

import pytest

from tests.runtimes.cluster.processes import Processes

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "mesh_tensorflow.md"
# What each attribute of the libraries' modules, and of the classes made in them, is before and
# after; `mesh_tensorflow` is importable once the package's one module without effects is loaded.
CHANGES = """
    import json, logging, os, signal, sys, types, warnings
    from tensorflow.compat import v1 as tf
    from tensorflow.python.framework import ops
    from tensorflow.python.framework.tensor_conversion_registry import (
        _tensor_conversion_func_registry as conversions)

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

    def changed(before, modules):
        return [
            name
            for name, value in attributes().items()
            # Modules that were loaded meanwhile have changed nothing, nor have their packages.
            if before.get(name) is not value
            and not isinstance(value, types.ModuleType)
            and any(name.startswith(module + ".") and module in modules
                    for module in (name.rsplit(".", 1)[0], name.rsplit(".", 2)[0]))
            and not isinstance(value, (int, float, str, list, dict))
        ]

    def registered():
        converted = [kind for pairs in conversions.values() for kinds, _ in pairs
                     for kind in (kinds if isinstance(kinds, tuple) else (kinds,))]
        return {
            "conversions": [kind.__name__ for kind in converted],
            "meta graphs": list(ops._proto_function_registry._registry),
            "importers": [getattr(one, "__name__", type(one).__name__) for one in sys.meta_path],
            "gin": [name.split(".")[0] for name in gin.config._REGISTRY._selector_map],
        }

    def process():
        loggers = {
            name: (one.level, *map(repr, one.handlers + one.filters))
            for name, one in [("", logging.root), *logging.root.manager.loggerDict.items()]
            if isinstance(one, logging.Logger) and not name.startswith("mtf_gradsync")
        }
        return {
            "environment": dict(os.environ),
            "signals": {n: repr(signal.getsignal(n)) for n in signal.valid_signals()},
            "warnings": [*map(repr, warnings.filters), repr(warnings.showwarning)],
            "loggers": loggers,
            "graph": tf.get_default_graph().version,
            "switches": [tf.executing_eagerly(), tf.resource_variables_enabled(),
                         tf.control_flow_v2_enabled(), tf.logging.get_verbosity()],
        }

    # Bare packages, so that what `libraries` imports of them does not import the package itself.
    for name, folder in [("mtf_gradsync", %r), ("mtf_gradsync._private", %r)]:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [folder]
    import mtf_gradsync._private.libraries
    for name in [name for name in sys.modules if name.startswith("mtf_gradsync")]:
        del sys.modules[name]
    import mesh_tensorflow as mtf, gin
    state = process()  # first: this makes the default graph
    modules, before, names = set(sys.modules), attributes(), registered()
    import mtf_gradsync as gs
    found = {"functions": changed(before, modules)}
    found.update({k: sorted(set(v) - set(names[k])) for k, v in registered().items()})
    found["process"] = {k: [state[k], v] for k, v in process().items() if v != state[k]}

    def train(optimizer):
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        w = mtf.get_variable(mesh, "w", [mtf.Dimension("batch", 2)])
        impl = gs.placement_mesh_impl("b:2", "batch:b", ["/device:CPU:0"] * 2)
        grads = mtf.gradients([mtf.reduce_sum(w)], [w])
        updates = optimizer.apply_grads(grads, [w.operation])
        lowering = mtf.Lowering(graph, {mesh: impl})
        copy = lowering.copy_masters_to_slices()
        updates = [lowering.lowered_operation(op) for op in updates]
        with tf.Session(config=gs.session_config(num_cpu_devices=1)) as session:
            session.run(tf.global_variables_initializer())
            session.run(copy)
            session.run(updates)

    # First without a wrapper: TensorFlow makes objects when it is first used.
    for optimizer in (mtf.optimize.SgdOptimizer(0.1), None):
        modules, before = set(sys.modules), attributes()
        with tf.Graph().as_default():
            train(optimizer or gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.1)))
    found["later"] = changed(before, modules)
    print(json.dumps(found))
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
def found() -> dict[str, Any]:
    with Processes() as processes:
        package = ROOT / "mtf_gradsync"
        code = textwrap.dedent(CHANGES) % (str(package), str(package / "_private"))
        process = processes.fork("-c", code)
        return json.loads(processes.wait(process).splitlines()[-1])


@pytest.fixture(scope="module")
def listed() -> list[set[str]]:
    """The names in each table of the page's section, which are in its first or second column."""
    section = PAGE.read_text(encoding="utf-8").partition("## What importing")[2].partition("\n## ")
    columns = zip(section[0].split("The import also registers", 1), (1, 2), strict=True)
    return [
        {
            name
            for line in text.splitlines()
            if line.startswith("|")
            for name in re.findall(r"`([\w.]+)`", line.split("|")[column])
        }
        for text, column in columns
    ]


def test_the_page_lists_each_function_that_the_import_replaces(found, listed):
    changed = {_public(name) for name in found["functions"]}
    # So that this test can fail: what every wrapper needs is among them.
    assert {"mtf.gradients", "mtf.Lowering.__init__", "tf.train.Saver.restore"} <= changed
    assert listed[0] == changed


def test_the_page_lists_what_the_import_registers(found, listed):
    kinds = ("conversions", "meta graphs", "importers", "gin")
    assert all(found[kind] for kind in kinds)
    assert listed[1] == {name for kind in kinds for name in found[kind]}


def test_the_import_leaves_the_process_as_it_is(found):
    assert found["process"] == {}


def test_a_step_replaces_nothing_in_the_libraries(found):
    assert found["later"] == []
