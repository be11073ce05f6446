"""Records steps that a program makes on XLA devices."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Callable, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from mtf_gradsync._private.jax import Profiler, compiled_hlo
from mtf_gradsync._private.tensorflow import profile_space
from mtf_gradsync.runtimes.errors import first_line
from mtf_gradsync.simd.collectives import list_collectives
from mtf_gradsync.timelines.events import (
    Call,
    Event,
    Recording,
    TimelineError,
    check_recorded,
    leaves,
    until_used,
)
from mtf_gradsync.timelines.profiles import read_profile
from mtf_gradsync.timelines.recorder import (
    Recorder,
    Replaced,
    now,
    operations_of,
    steps_until,
    sums_of_updates,
    timed,
)
from mtf_gradsync.xla.cores import OtherProcessError
from mtf_gradsync.xla.session import Dispatched, XlaSession

_Result = TypeVar("_Result")

# What `to_stablehlo` calls every program.
_MODULE = "step"

_ADVICE = (
    "Perhaps another profiler of this process (TensorBoard's, or a jax.profiler.trace around the "
    "steps) has them: end that one. On GPUs jax needs CUPTI: install jax[cuda12]."
)


class XlaRecorder(Recorder):
    """Has jax profile the devices."""

    def __init__(self, session: XlaSession, lowering: Any = None):
        """Takes the session, and the lowering to name variables by."""
        self._session, self._lowering = session, lowering
        self._profiler = Profiler()
        self._pending: list[Dispatched] = []
        self._ends: list[int] = []
        self._calls: list[Call] = []
        self._begin = 0

    def start(self) -> None:
        """See `Recorder`."""
        self._session.wait()
        try:
            self._everywhere(self._start_profiler)
        except BaseException:
            self._drop_profile()
            raise
        self._begin = now()
        self._replaced = Replaced(self._session, "dispatch", self._noted)

    def cancel(self) -> None:
        """See `Recorder`."""
        self._replaced.put_back()
        self._drop_profile()

    def stop(self) -> list[Recording]:
        """See `Recorder`."""
        self._replaced.put_back()
        try:
            self._session.wait()
        except BaseException:
            self._drop_profile()
            raise
        self._ends += [now()] * len(self._pending)
        recording = self._everywhere(self._recording)
        if self._session.cores.is_alone:
            return [recording]
        return _gathered(self._session, recording)

    def _everywhere(self, work: Callable[[], _Result]) -> _Result:
        """Returns what a function returns; an error of one process is one of all."""
        try:
            return self._session.cores.together(work)
        except OtherProcessError as error:
            raise TimelineError(f"No process has a timeline. {error}") from error

    def _start_profiler(self) -> None:
        try:
            self._profiler.start()
        except RuntimeError as error:
            raise TimelineError(f"jax cannot begin a profile: {error}. {_ADVICE}") from error

    def _drop_profile(self) -> None:
        # What ends the block is worth more than what the profiler says.
        with contextlib.suppress(RuntimeError):
            self._profiler.stop()

    def _recording(self) -> Recording:
        try:
            profile = self._profiler.stop()
        except RuntimeError as error:  # jax 0.4 tells only now that another profiler runs
            raise TimelineError(f"jax has no profile: {first_line(error)}. {_ADVICE}") from error
        try:
            space = profile_space(profile)
        except DecodeError as error:
            raise TimelineError(
                f"The profile of jax, of {len(profile):,} bytes, cannot be read: "
                f"{first_line(error)}. Perhaps it was cut off: record fewer steps."
            ) from error
        return check_recorded(self._recorded(space), _ADVICE)

    def _noted(self, dispatch: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Dispatched:
            before = self._session.steps
            step = timed(self._calls, "dispatch", lambda: dispatch(*args, **kwargs))
            if self._session.steps == before:
                return step  # the program did not run
            self._pending.append(step)
            Replaced(step, "result", lambda result: lambda: self._waited(step, result))
            return step

        return noted

    def _waited(self, step: Dispatched, result: Any) -> Any:
        value = timed(self._calls, "wait for the step", result)
        if step in self._pending:
            self._pending.remove(step)
            self._ends.append(now())
        return value

    def _recorded(self, space: Any) -> Recording:
        session = self._session
        cores = session.cores
        rows = list_collectives(session.program, lowering=self._lowering).rows
        operations = operations_of(
            [(compiled_hlo(p.program.executable), p.replica) for p in session.compiled], rows
        )
        ordinals = [_ordinal(device) for device in cores.local_devices]
        ran = leaves(read_profile(space, _MODULE, ordinals), operations.inside)
        ran = until_used(ran, operations.users)
        events = tuple(
            Event(
                cores.local[one.core],
                operations.name.get(one.operation, one.operation),
                "collective" if one.operation in operations.collective else "compute",
                one.begin,
                one.end,
            )
            for one in ran
        )
        last: dict[int, int] = {}
        for one in ran:
            last[one.execution] = max(last.get(one.execution, 0), one.end)
        # The devices know when a step ended. Without them it is when its result was there.
        ends, marks = self._ends, events
        if len(last) == len(self._ends):
            ends = sorted(last.values())
            # A core may be in the next step before another one has ended this one.
            marks = tuple(
                dataclasses.replace(event, begin=last[one.execution] - 1)
                for event, one in zip(events, ran)
                if event.kind == "collective"
            )
        of_updates = sums_of_updates(operations.facts, session.program.graph)
        steps = steps_until(self._begin, ends, marks, of_updates)
        process = cores.local_devices[0].process_index
        names = {core: f"core {core}" for core in cores.local}
        calls = tuple(self._calls)
        return Recording("xla", process, names, steps, events, operations.facts, calls)


def _ordinal(device: Any) -> int:
    """What a profile calls a device."""
    found = getattr(device, "local_hardware_id", None)
    return device.id if found is None or device.platform == "cpu" else found


def _gathered(session: XlaSession, recording: Recording) -> list[Recording]:
    """The recordings of all processes, on each of them."""
    cores = session.cores
    mine = np.frombuffer(recording.to_json().encode(), np.uint8)
    count = len(cores.local)
    (sizes,) = cores.gather([[np.array(len(mine))] * count])
    padded = np.zeros(int(max(sizes)), np.uint8)
    padded[: len(mine)] = mine
    # A part of it for each core: every core's array has one shape.
    parts = np.array_split(np.pad(padded, (0, -len(padded) % count)), count)
    (gathered,) = cores.gather([parts])
    texts: dict[int, list[np.ndarray]] = {}
    length: dict[int, int] = {}
    for core, device in enumerate(cores.devices):
        texts.setdefault(device.process_index, []).append(gathered[core])
        length[device.process_index] = int(sizes[core])
    return [
        Recording.from_json(np.concatenate(texts[p]).tobytes()[: length[p]].decode())
        for p in sorted(texts)
    ]
