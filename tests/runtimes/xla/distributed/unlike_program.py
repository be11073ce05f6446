"""Two processes that run another program each: what must never happen, and ends gloo's process.

Run as a script with the coordinator's address, the number of processes, this process's number and a
folder.
"""

from __future__ import annotations

import sys

import numpy as np

from mtf_gradsync import xla
from tests.forked import TIME_LIMIT
from tests.runtimes.xla.distributed.order_program import CORES, Programs, module


def main(address: str, count: str, index: str, unused_folder: str) -> None:
    with xla.start_processes(
        address, int(count), int(index), cpu_devices=CORES // int(count), timeout=TIME_LIMIT
    ):
        print("started", flush=True)
        programs = Programs(int(index))
        # The sums of the one are longer than those of the other.
        kinds = [("program", "all_reduce"), ("loop", "all_reduce")]
        program = programs.compiled(module(*kinds[:: 1 if index == "0" else -1]))
        for _ in range(50):
            results = programs.dispatch(program, (0, 0))
            np.asarray(results[0].arrays[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
