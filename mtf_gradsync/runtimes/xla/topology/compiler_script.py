"""Runs the TPU compiler, as a script in a process of its own: with jax and libtpu, no TensorFlow.

usage: compiler_script.py PRIVATE_JAX FOLDER

The process also ends when its standard input ends, as the pipe from a process that has died.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Mapping

# Keeps each all-reduce of a large weight update one operation, so that bytes can be compared.
_UPDATE_NOT_SPLIT = {"xla_jf_auto_cross_replica_sharding": False}

# The number of chips of a host by default.
_CHIPS_PER_HOST = 4


def main(private: Any, folder: Path) -> dict[str, Any]:
    """Compiles the program in a folder for a TPU; returns the compiler's answer as a dict.

    `compiler_process.compile_in_process` has written the file ``request.json`` of `folder`. The
    file has the program, further programs by name, and how to compile them. The HLO of each
    compiled program is written into `folder`. The result describes the TPU (its kind and its
    cores), and has the time, memory and estimates of the compilation, or the compiler's error.
    `private` is the module `mtf_gradsync.runtimes._private.jax`.
    """
    # `private` is the module `mtf_gradsync.runtimes._private.jax`, which cannot be imported here.
    from jax.experimental import topologies
    from runner.loaded_program import compile_options  # type: ignore[import-not-found]  # by its path

    request = json.loads((folder / "request.json").read_text())
    name, config = request["topology"], request["chip_config"]
    options = {**_host_options(name), **({"chip_config_name": config} if config else {})}
    if request["slices"] > 1:
        options["num_slices"] = request["slices"]
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except RuntimeError as error:
        return {"no_topology": str(error)}
    answer = {
        "device_kind": found.devices[0].device_kind,
        "num_cores": len(found.devices),
        "places": [(*device.coords, device.core_on_chip) for device in found.devices],
    }
    module = request["module"]
    if module is None or len(found.devices) != request["num_cores"]:
        return answer

    def keep(stage: str, hlo: bytes) -> None:
        (folder / f"{stage}.hlo.pb").write_bytes(hlo)
        (folder / f"{stage}.hlo.txt").write_text(private.hlo_text(hlo))

    def compiled(text: str, options: Mapping[str, Any]) -> Any:
        chosen = compile_options(found.devices, options)
        return private.compiled_for_topology(text, found.devices, chosen)

    keep("before", private.stablehlo_to_hlo(module))
    began = time.monotonic()
    try:
        executable = compiled(module, {})
    except RuntimeError as error:
        return {**answer, "error": str(error)}
    answer["seconds"] = time.monotonic() - began
    answer["memory"] = private.memory_bytes(executable)
    keep("after", private.compiled_hlo(executable))
    answer["cost"] = {"step": private.cost_numbers(executable)}
    answer["memory_of"], answer["not_estimated"] = {}, {}
    for name, text in request["estimate"].items():
        try:
            other = compiled(text, {})
        except RuntimeError as error:
            answer["not_estimated"][name] = str(error)
            continue
        keep(name, private.compiled_hlo(other))
        answer["cost"][name] = private.cost_numbers(other)
        answer["memory_of"][name] = private.memory_bytes(other)
    if request["update_not_split"]:
        keep("after_unsharded", private.compiled_hlo(compiled(module, _UPDATE_NOT_SPLIT)))
    return answer


def _host_options(topology: str) -> dict[str, Any]:
    """Returns the options for libtpu that say how the chips of a topology are spread over hosts.

    `topology` is libtpu's name of the topology. A TPU slice of fewer chips than a host has is put
    on one host. For larger TPU slices the result is empty, and libtpu decides.
    """
    sizes = topology.partition(":")[2].split("x")
    if not all(size.isdigit() for size in sizes):
        return {}
    bounds = (*map(int, sizes), 1, 1)[:3]
    return {"chips_per_host_bounds": bounds} if 0 < math.prod(bounds) < _CHIPS_PER_HOST else {}


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_input, daemon=True).start()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    spec = importlib.util.spec_from_file_location("private_jax", sys.argv[1])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["private_jax"] = module
    spec.loader.exec_module(module)
    place = Path(sys.argv[2])
    unfinished = place / "answer.json.unfinished"
    unfinished.write_text(json.dumps(main(module, place)))
    unfinished.replace(place / "answer.json")
