"""Profiles of TensorFlow and jax: what begins, ends and reads them without a public name."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any


def profile_space(serialized: bytes) -> Any:
    """Reads a serialized ``XSpace``, a profile as TensorFlow's and jax's profilers write it."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    return xplane_pb2.XSpace.FromString(serialized)


class Profiler:
    """Profiles jax's devices, without the frames of Python."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._session: Any = None

    def start(self) -> None:
        """Begins. Raises RuntimeError when another profiler runs."""
        import jax

        if hasattr(jax.profiler, "ProfileOptions"):  # from 0.5 on
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            with contextlib.ExitStack() as stack:
                folder = tempfile.TemporaryDirectory(prefix="mtf_gradsync_")
                stack.callback(folder.cleanup)
                jax.profiler.start_trace(folder.name, profiler_options=options)
                stack.pop_all()
            # Only now: what did not begin must not end another profiler.
            self._folder = folder
            return
        from jaxlib import xla_client

        jax.devices()  # a profile has only what was there before
        options = xla_client.profiler.ProfileOptions()
        options.python_tracer_level = 0
        self._session = xla_client.profiler.ProfilerSession(options)

    def stop(self) -> bytes:
        """Ends, and returns a serialized ``XSpace``; an empty one where jax wrote none.

        Raises RuntimeError when it has not begun.
        """
        import jax

        folder, session = self._folder, self._session
        self._folder = self._session = None
        if session is not None:
            return session.stop()
        if folder is None:
            raise RuntimeError("No profile was begun; call `start` first.")
        with folder:
            jax.profiler.stop_trace()
            files = sorted(Path(folder.name).rglob("*.xplane.pb"))
            return files[0].read_bytes() if files else b""
