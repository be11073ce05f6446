"""Calls functions on a core's program in a process of their own.

For four reasons: libtpu reads its environment variables once, when it is loaded; a compiler that
dies takes only its own process along; TensorFlow's bridge to XLA wants eager execution, which a
Mesh-TF program has switched off; and the number of virtual CPU devices of a process cannot change.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from typing import Any, Callable, TypeVar

from mtf_gradsync._private.libraries import tf
from mtf_gradsync.xla.lowering.replica_program import ReplicaProgram

_REQUEST, _ANSWER = "request.pickle", "answer.pickle"

_Answer = TypeVar("_Answer")


class CompilerDiedError(RuntimeError):
    """The process that compiles ended without an answer."""


def call_in_own_process(
    task: Callable[..., _Answer], replica: ReplicaProgram, **arguments: Any
) -> _Answer:
    """Calls a function in a process that has as many virtual CPU devices as a program has cores.

    Args:
      task: a function of a module; it takes the core's program, then the arguments.
      replica: the core's program.
      arguments: what else it takes; can be pickled.

    Returns:
      What it returned; can be pickled.

    Raises:
      CompilerDiedError: when the process ended without an answer.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in [*sys.path] if p),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # jax must not look for a TPU; libtpu must not ask a cloud's metadata server for one, nor
        # wait for another process that has it open.
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={replica.num_replicas}",
    }
    # TensorFlow's protocol buffers do not pickle.
    packed = replica._replace(graph_def=replica.graph_def.SerializeToString())
    with tempfile.TemporaryDirectory(prefix="mtf_gradsync_") as folder:
        with open(os.path.join(folder, _REQUEST), "wb") as file:
            pickle.dump((task, packed, arguments), file)
        done = subprocess.run(
            [sys.executable, "-c", f"from {__name__} import answer; answer({folder!r})"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        try:
            with open(os.path.join(folder, _ANSWER), "rb") as file:
                return pickle.load(file)
        except OSError:
            raise CompilerDiedError(
                f"The compiler's process ended with status {done.returncode} and no answer. Its "
                f"last words:\n{done.stdout[-2000:]}"
            ) from None


def answer(folder: str) -> None:
    """What the other process runs.

    Args:
      folder: where the request lies and the answer goes.
    """
    with open(os.path.join(folder, _REQUEST), "rb") as file:
        task, replica, arguments = pickle.load(file)
    replica = replica._replace(graph_def=tf.GraphDef.FromString(replica.graph_def))
    found = task(replica, **arguments)
    unfinished = os.path.join(folder, _ANSWER + ".unfinished")
    with open(unfinished, "wb") as file:
        pickle.dump(found, file)
    os.replace(unfinished, os.path.join(folder, _ANSWER))
