"""Records where the time of some steps goes: `timeline`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import TracebackType
from typing import Any, Sequence

from mtf_gradsync.timelines.events import Recording, TimelineError
from mtf_gradsync.timelines.recorder import Recorder
from mtf_gradsync.timelines.table import Table, tabulate_times
from mtf_gradsync.timelines.trace_file import MOST_BYTES, Written, write_trace


def timeline(session: Any, path: str | Path | None = None, *, lowering: Any = None) -> Timeline:
    """Records where the time of some training steps goes, on any runtime.

        session.run(train_op)  # compiles, and fills caches
        with gs.timeline(session, "trace.json.gz") as timeline:
            for _ in range(5):
                session.run(train_op)
        print(timeline.table())

    Every call of ``session.run`` inside that runs the model is a step. A step lasts from the end of
    the one before (of the first one: from the beginning of the block) to its own end, so that what
    the program does between two steps, like reading a batch, is in it.

    With several processes on XLA devices all of them have to enter and leave the block together;
    each then has the recordings of all.

    Args:
      session: what runs the steps: a session of `mtf_gradsync.simd` or `mtf_gradsync.xla`, or, for
        a placement mesh, a ``tf.Session`` or a monitored session.
      path: a file to write the trace to at the end, as `Timeline.save` does.
      lowering: the program's lowering, to name the variables that Mesh-TF has stacked one by one.

    Returns:
      A `Timeline`, to be used as a context manager.

    Raises:
      TypeError: when that is no session.
    """
    return Timeline(_recorder_of(session, lowering), path)


class Timeline:
    """What some steps did, and when. Use it as a context manager, around the steps.

    Attributes:
      written: the file that was written last; None before.
    """

    def __init__(self, recorder: Recorder | None, path: str | Path | None = None):
        """Takes what records; see `timeline`."""
        self._recorder, self._path = recorder, path
        self._running: Recorder | None = None
        self._recordings: tuple[Recording, ...] = ()
        self.written: Written | None = None

    @classmethod
    def of(cls, recordings: Sequence[Recording]) -> Timeline:
        """A timeline of recordings that were made before, one of each process.

        Args:
          recordings: of processes that made the same steps; their clocks have to agree.

        Raises:
          TimelineError: when they are not of the same steps, or two are of one process.
        """
        if len({(r.runtime, len(r.steps)) for r in recordings}) != 1:
            counts = ", ".join(f"{r.process}: {len(r.steps)} of {r.runtime}" for r in recordings)
            raise TimelineError(f"These are not parts of one timeline; steps by process: {counts}")
        processes = [r.process for r in recordings]
        if len(set(processes)) != len(processes):
            raise TimelineError(f"Two parts of a timeline are of one process: {sorted(processes)}")
        made = cls(None)
        made._recordings = tuple(sorted(recordings, key=lambda r: r.process))
        return made

    def __enter__(self) -> Timeline:
        """Begins the recording; a TimelineError where this timeline has begun one before."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            raise TimelineError(
                "A timeline records one `with` block, and this one has begun its block before, or "
                "was made of recordings. Call gs.timeline(session) again for each block."
            )
        recorder.start()
        self._running = recorder
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the recording; a TimelineError when it has no step, or nothing of a core."""
        recorder, self._running = self._running, None
        assert recorder is not None
        if kind is not None:
            recorder.cancel()
            return
        self._recordings = tuple(recorder.stop())
        if self._path is not None:
            self.save(self._path)

    def mark_updates(self, updates: Sequence[int]) -> None:
        """Says which steps updated the variables, where the program counts updates.

        Args:
          updates: made before the first step, then by the end of each. Nothing changes where they
            are not one more than the steps.
        """

        def marked(recording: Recording) -> Recording:
            pairs = zip(recording.steps, updates, updates[1:])
            steps = tuple(dataclasses.replace(s, is_update=a != b) for s, a, b in pairs)
            return dataclasses.replace(recording, steps=steps)

        if len(updates) == len(self.recordings[0].steps) + 1:
            self._recordings = tuple(map(marked, self._recordings))

    @property
    def recordings(self) -> tuple[Recording, ...]:
        """What was recorded, one of each process.

        Raises:
          TimelineError: before the end of the block.
        """
        if not self._recordings:
            raise TimelineError("There is nothing yet: ask after the end of the `with` block.")
        return self._recordings

    def table(self) -> Table:
        """Adds up where the time went.

        Returns:
          The table; ``print`` shows it, and ``to_json`` gives it to other programs.

        Raises:
          TimelineError: before the end of the block.
        """
        return tabulate_times(self.recordings)

    def save(self, path: str | Path, most_bytes: int = MOST_BYTES) -> Written:
        """Writes a trace that https://ui.perfetto.dev and chrome://tracing open.

        Args:
          path: the file; compressed where it ends in ".gz".
          most_bytes: how large it may be. The shortest operations are dropped for it; where that is
            not enough, the shortest calls of the host, then marks of steps in the middle.

        Returns:
          The path, how many operations it shows, and how much was dropped; ``print`` says it.

        Raises:
          TimelineError: before the end of the block.
          ValueError: when most_bytes are fewer than those of an empty trace.
        """
        self.written = write_trace(self.recordings, path, most_bytes)
        return self.written


def _recorder_of(session: Any, lowering: Any) -> Recorder:
    # Not above: programs that record nothing need not wait for these.
    from mtf_gradsync.runtimes.sessions import ProgramSession
    from mtf_gradsync.simd.cpu_replicas import CpuReplicaSession
    from mtf_gradsync.timelines.tensorflow_steps import MeshRecorder, ReplicasRecorder
    from mtf_gradsync.timelines.xla_steps import XlaRecorder
    from mtf_gradsync.xla.session import XlaSession

    inner = session
    if hasattr(session, "run_step_fn"):  # a monitored session
        # The argument's name is prescribed.
        inner = session.run_step_fn(lambda step_context: step_context.session)
    if isinstance(inner, ProgramSession):
        inner = inner.session
    if isinstance(inner, XlaSession):
        return XlaRecorder(inner, lowering)
    if isinstance(inner, CpuReplicaSession):
        return ReplicasRecorder(inner, lowering)
    if not hasattr(session, "run") or not hasattr(session, "graph"):
        raise TypeError(f"gs.timeline needs a session, got {session!r}.")
    # The address of a tf.train.Server, where one runs the steps.
    return MeshRecorder(session, session.graph, is_remote=bool(getattr(inner, "sess_str", "")))
