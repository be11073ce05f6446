"""Chooses the runtime of a model_fn."""

from __future__ import annotations

from mtf_gradsync import xla
from mtf_gradsync.runtimes.sessions import RUNTIMES, RuntimeName


def check_runtime(runtime: RuntimeName | None, use_tpu: bool, num_cores: int | None) -> RuntimeName:
    """Returns the runtime, by default the one that use_tpu asks for.

    Raises ValueError if there is no such runtime, it cannot run here, or it needs num_cores.
    """
    chosen: RuntimeName = runtime or ("xla" if use_tpu else "placement_mesh")
    if chosen not in RUNTIMES:
        raise ValueError(f"runtime must be one of {', '.join(RUNTIMES)}, or None; got {runtime!r}.")
    if chosen == "placement_mesh":
        return chosen
    if not num_cores:
        raise ValueError(
            f"On {chosen!r} the model_fn is one program for all cores, and their number is not "
            "known: give num_cores, or a TPUConfig with num_shards in config."
        )
    if chosen == "xla" and xla.why_no_xla():
        raise ValueError(
            f"The runtime 'xla' does not run here: {xla.why_no_xla()} 'cpu_replicas' runs the "
            "same program without jax."
        )
    return chosen
