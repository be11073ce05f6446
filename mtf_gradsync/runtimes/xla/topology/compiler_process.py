"""Runs the TPU compiler in a process of its own.

The compiler has a process of its own for two reasons. First, libtpu reads its environment variables
only once, when it is loaded. Second, a crash of the compiler ends the process that it runs in.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Mapping

from mtf_gradsync.runtimes._common import pipe_to_child
from mtf_gradsync.runtimes._private import jax as private
from mtf_gradsync.runtimes.xla.topology import compiler_script
from mtf_gradsync.runtimes.xla.topology.slices import slice_of

# A fatal message in Google's logs: its text follows time and thread.
_FATAL = re.compile(r"^F\d{4} \S+ +\d+ (.+)", re.MULTILINE)
# Lines without a reason: stack frames, addresses for a symbolizer, a crash handler's own lines.
_NO_REASON = re.compile(r"\s*(PC: )?@ |https://symbolize|.*\] RAW: ")


class CompilerDiedError(RuntimeError):
    """The error of a compiler whose process ended without an answer."""


def compile_in_process(
    folder: str,
    module: str | None,
    topology: str,
    num_cores: int,
    estimate: Mapping[str, str] = {},
    update_not_split: bool = False,
    begun: Callable[[subprocess.Popen[str]], None] = lambda process: None,
) -> dict[str, Any]:
    """Compiles a program for a TPU in another process; returns the TPU compiler's answer.

    Args:
      folder: an empty folder, into which the other process writes the answer and the compiled HLO.
      module: the program's StableHLO; None to ask about the topology only.
      topology: the name of the topology, as in "v3:2x2".
      num_cores: how many cores the program has. If the topology has another number of cores,
        nothing is compiled.
      estimate: the StableHLO of further programs to compile, by name.
      update_not_split: whether to compile the program a second time, without splitting the weight
        update over the cores.
      begun: a function that is called with the other process once it runs, so that the caller can
        end the process.

    Returns:
      If libtpu does not know the topology, a dict with "no_topology": libtpu's message. If libtpu
      knows it, a dict with "device_kind", "num_cores" and "places", which has, for each core, the
      coordinates of its chip and its number on the chip. If the program was compiled, the dict also
      has "seconds", the time of the compilation, "memory" with the fields of `CoreMemory`, and
      "cost" with the compiler's estimates by name. If the compiler refused the program, the dict
      has "error", the reason.

    Raises:
      CompilerDiedError: when the process ended without an answer.
    """
    environment = {
        **os.environ,
        # jax must not look for a TPU; libtpu must not ask a cloud's metadata server for one, nor
        # wait for another process that has it open.
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    place, named = Path(folder), slice_of(topology)
    request = {
        "topology": named.topology,
        "chip_config": named.config,
        "slices": named.slices,
        "num_cores": num_cores,
        "module": module,
        "estimate": dict(estimate),
        "update_not_split": update_not_split,
    }
    (place / "request.json").write_text(json.dumps(request))
    with pipe_to_child() as pipe, subprocess.Popen(
        [sys.executable, compiler_script.__file__, private.__file__, folder],
        env=environment,
        stdin=pipe,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            begun(process)
            said, _ = process.communicate()
        except BaseException:
            process.kill()
            raise
    try:
        return json.loads((place / "answer.json").read_text())
    except OSError:
        raise CompilerDiedError(
            f"The TPU compiler's process ended with status {process.returncode} and no answer. "
            f"It printed: {reason_in(said) or 'nothing'}"
        ) from None


def reason_in(output: str) -> str:
    """Returns the line of a crashed process's `output` that is most likely to say why it crashed.

    If `output` has a fatal message of Google's logs, this message is returned. If there is no such
    message, the last line that is no stack frame is returned; "" if all lines are stack frames.
    """
    fatal = _FATAL.search(output)
    if fatal:
        return fatal[1]
    lines = [line.strip() for line in output.splitlines() if not _NO_REASON.match(line)]
    return next((line for line in reversed(lines) if line), "")
