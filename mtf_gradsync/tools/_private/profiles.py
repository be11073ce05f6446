"""Begins, ends and reads profiles of jax, by private names of jax and TensorFlow."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Iterator


def profile_data(serialized: bytes) -> Any:
    """Parses a serialized ``XSpace``, as jax's profiler writes it, into a ``ProfileData`` of jax.

    Jax 0.4 has no class ``ProfileData``. With jax 0.4 the result is an object that has the
    attributes of ``ProfileData`` that this package reads. Raises a ValueError if the bytes are no
    ``XSpace``.
    """
    from google.protobuf.message import DecodeError
    from jax import profiler

    try:
        if hasattr(profiler, "ProfileData"):
            return _use_iterators_once(profiler.ProfileData.from_serialized_xspace(serialized))
        from tensorflow.tsl.profiler.protobuf import xplane_pb2

        space = xplane_pb2.XSpace.FromString(serialized)
    except (DecodeError, RuntimeError) as error:
        raise ValueError(str(error)) from error
    return SimpleNamespace(planes=[_as_jax_plane(plane) for plane in space.planes])


def _use_iterators_once(data: Any) -> Any:
    """Uses each kind of iterator of `data`, a ``ProfileData``, once; returns `data`.

    When an iterator of ``ProfileData`` is used for the first time, its C++ code makes a type, and
    Python 3.12 and later give a warning for this. Where warnings are raised as exceptions, the
    warning would end the process, because it comes from C++. This function ignores the warning, and
    later uses of the iterators give none.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in data.planes:
            iter(plane.stats)
            for line in plane.lines:
                for event in line.events:
                    iter(event.stats)
                    break
    return data


def _as_jax_plane(plane: Any) -> Any:
    """Converts a plane of an ``XSpace`` protocol buffer to an object like jax's planes.

    The returned object has the attributes `name`, `lines` and `stats`. A line has the attributes
    `name` and `events`; an event has `name`, `start_ns`, `duration_ns` and `stats`. `stats` is an
    iterator of pairs (name, value).
    """

    def stats(of: Any) -> Iterator[tuple[str, Any]]:
        for stat in of.stats:
            kind = stat.WhichOneof("value")
            value = getattr(stat, kind) if kind else None
            if kind == "ref_value":
                value = plane.stat_metadata[value].name
            yield plane.stat_metadata[stat.metadata_id].name, value

    def event(line: Any, one: Any) -> Any:
        return SimpleNamespace(
            name=plane.event_metadata[one.metadata_id].name,
            start_ns=line.timestamp_ns + one.offset_ps // 1000,
            duration_ns=one.duration_ps // 1000,
            stats=stats(one),
        )

    lines = [
        SimpleNamespace(name=line.name, events=[event(line, one) for one in line.events])
        for line in plane.lines
    ]
    return SimpleNamespace(name=plane.name, lines=lines, stats=stats(plane))


class Profiler:
    """A profiler of jax's devices, which does not record the calls of Python functions."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._session: Any = None

    def start(self) -> None:
        """Begins a profile; raises RuntimeError when another profiler runs."""
        import jax

        if hasattr(jax.profiler, "ProfileOptions"):  # from 0.5 on
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            with contextlib.ExitStack() as stack:
                folder = tempfile.TemporaryDirectory(prefix="mtf_gradsync_")
                stack.callback(folder.cleanup)
                jax.profiler.start_trace(folder.name, profiler_options=options)
                stack.pop_all()
            # Set only now: a profile that did not begin must not end that of another profiler.
            self._folder = folder
            return
        from jaxlib import xla_client

        jax.devices()  # a profile has only the devices that existed before it began
        options = xla_client.profiler.ProfileOptions()
        options.python_tracer_level = 0
        self._session = xla_client.profiler.ProfilerSession(options)

    def stop(self) -> bytes:
        """Ends the profile; returns a serialized ``XSpace``, empty if jax wrote none.

        Raises RuntimeError if no profile was begun.
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
