"""Ends a process, with an error that says why, when another process of its job is lost.

If a process of a job dies or stops, the other processes wait in a collective without end. So in
each process a thread, which works while the main thread waits, exchanges a heartbeat every second
with process 0. Process 0 reports lost processes to all others, and each process notices the loss of
process 0 by itself. Then every living process writes one error and exits with
`LOST_PROCESS_EXIT_CODE`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence, TypeVar

from mtf_gradsync.runtimes._common import pipe_to_child
from mtf_gradsync.runtimes.processes import proxy
from mtf_gradsync.runtimes.processes.members import (
    LOST_PROCESS_EXIT_CODE,
    Connection,
    ConnectionBroken,
    Member,
    printable,
)

_BEAT_S = 1.0
# If the loop was late by so many seconds, it has to read messages before it judges who is silent.
_LATE_S = 2.0
# Seconds to wait when another process failed: this one may fail itself, with a better error.
_GRACE_S = 2.0
# Seconds that an error of a step waits for the watchdog to find a lost process.
_VERDICT_S = 10.0
# Seconds to wait after a crash: if another process was lost before, that is the better error.
_CRASH_S = 2.0
# Seconds after which text that another thread has begun to write is written.
_WRITING_S = 0.1

_running: Watchdog | None = None
# The work that this process has begun last, in words.
_begun = ""


class Alarm(NamedTuple):
    """The pipe by which a handler of fatal signals tells the watchdog that this process crashes."""

    descriptor: int  # read end of the pipe that the handler writes to; the watchdog closes it
    explain: Callable[[str], str]  # turns what was written into a sentence about what happened


class Watchdog:
    """The thread that notices lost processes of a job, and then ends its own process."""

    def __init__(
        self,
        me: Member,
        peers: Mapping[Member, Connection],
        silence: float,
        alarm: Alarm | None = None,
    ):
        """Starts the thread.

        Args:
          me: this process.
          peers: this process's connections: in process 0 to all other processes, in any other
            process to process 0.
          silence: the seconds without a heartbeat after which a process counts as lost.
          alarm: the pipe by which a crash of this process is reported; None if there is none.
        """
        global _running
        self._me = me
        self._silence = silence
        self._is_spoken_for = False
        self._peers = dict(peers)
        self._size = len(peers) + 1
        self._last = self._next_beat = time.monotonic()
        self._heard = dict.fromkeys(peers, self._last)
        # The work that each other process has begun last, if known.
        self._begun: dict[Member, str] = {}
        self._alarm, self._alarmed = alarm, ""
        self._crash_at: float | None = None
        self._left: set[Member] = set()  # processes that said goodbye, including this one
        self._doom: tuple[float, str] | None = None  # when to end, and why
        self._finished = threading.Event()
        self._dismissed = threading.Event()  # process 0 said goodbye
        self._compared = threading.Event()  # the thread has looked how late it is
        self._lock = threading.Lock()  # held to use connections, and what was said on them
        self._selector = selectors.DefaultSelector()
        for member, connection in self._peers.items():
            self._selector.register(connection, selectors.EVENT_READ, member)
        if alarm is not None:
            self._selector.register(alarm.descriptor, selectors.EVENT_READ, alarm)
        _running = self
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def leave(self) -> None:
        """Tells the other processes that this one has finished; waits until all have finished."""
        with self._lock:
            self._left.add(self._me)
            self._tell_all(goodbye=True)
            self._finish_if_all_left()
        self._finished.wait()

    def serve(self) -> None:
        """Waits until process 0 has finished its work, and then leaves the job."""
        self._dismissed.wait()
        self.leave()

    def fail(self, reason: str) -> None:
        """Tells the others that this process ends with an error, so that they end, too.

        `reason` says in words what the error is; the errors of the other processes quote it.
        """
        with self._lock:
            self._send_failure(reason)
            self._finished.set()

    @contextlib.contextmanager
    def send_heartbeats_by_proxy(self) -> Iterator[None]:
        """Lets a separate process send this process's heartbeats while the block runs.

        Meanwhile it is no error if the watchdog's thread stands still.
        """
        with pipe_to_child() as pipe:
            with contextlib.ExitStack() as stack:
                # Duplicates stay open even if the watchdog's thread closes a connection.
                with self._lock:
                    peers = [os.dup(connection.fileno()) for connection in self._peers.values()]
                for descriptor in peers:
                    stack.callback(os.close, descriptor)
                given = map(str, (os.getpid(), _BEAT_S, *peers))
                child = subprocess.Popen(
                    [sys.executable, "-I", "-S", proxy.__file__, *given],
                    pass_fds=peers,
                    stdin=pipe,
                    start_new_session=True,  # a terminal's Ctrl-C would end the child
                )
            try:
                self._is_spoken_for = True
                yield
            finally:
                child.kill()
                child.wait()
                # The thread may not have noticed yet how long it stood still.
                self._compared.clear()
                if not self._finished.is_set():
                    self._compared.wait(_LATE_S)
                self._is_spoken_for = False

    def wait_for_verdict(self) -> None:
        """Waits after an error for the watchdog to find out whether a lost process caused it.

        If a lost process caused the error, the watchdog ends this process during the wait.
        """
        self._finished.wait(_VERDICT_S)

    def _run(self) -> None:
        global _running
        while not self._finished.is_set():
            ready = self._selector.select(_BEAT_S / 4)
            with self._lock:
                if not self._finished.is_set():  # `fail` may have had the lock
                    self._take_turn([key.data for key, _ in ready])
        _running = None
        with self._lock:
            for connection in self._peers.values():
                connection.close()
            self._peers.clear()
        self._selector.close()
        if self._alarm is not None:
            os.close(self._alarm.descriptor)

    def _take_turn(self, ready: Sequence[Member | Alarm]) -> None:
        """Reads what has come, sends a heartbeat if it is time, and ends this process if it has to.

        `ready` are the processes whose messages can be read, and the alarm if it was raised.
        """
        now = time.monotonic()
        late, self._last = now - self._last, now
        if late > self._silence and not self._is_spoken_for:
            self._end(
                f"this process stood still for {late:.0f} s, and the other processes give a "
                f"process up after {self._silence:g} s"
            )
        self._compared.set()
        for one in ready:
            if isinstance(one, Alarm):
                self._read_alarm(one, now)
            else:
                self._read_messages(one, now)
        if now >= self._next_beat:
            self._next_beat = now + _BEAT_S
            self._tell_all(beat=True, begun=_begun)
        if late < _LATE_S:
            for member in list(self._peers):
                if now - self._heard[member] > self._silence:
                    self._handle_loss(member, f"has sent no heartbeat for {self._silence:g} s")
        if self._crash_at is not None and now >= self._crash_at and self._doom is None:
            self._end_after_crash()
        if self._doom is not None and now >= self._doom[0]:
            self._end(self._doom[1])

    def _read_messages(self, member: Member, now: float) -> None:
        try:
            for message in self._peers[member].receive():
                self._handle_message(member, message)
        except ConnectionBroken as error:
            connection = self._peers.pop(member)
            self._selector.unregister(connection)
            connection.close()
            begun = self._begun.get(member)
            at = f"; the last work that it had reported is {begun}" if begun else ""
            self._handle_loss(member, f"ended without a word: {error}{at}")
            return
        self._heard[member] = now

    def _handle_message(self, member: Member, message: Mapping[str, Any]) -> None:
        """Handles a message of `member`: that it begins some work, has finished, or has failed.

        A message of process 0 may also say that another process is lost, or that all have finished.
        Raises ConnectionBroken if the message is malformed.
        """
        if "begun" in message:
            self._begun[member] = printable(str(message["begun"]))
        if "goodbye" in message:
            self._left.add(member)
            self._finish_if_all_left()
            if member.index == 0:
                self._dismissed.set()
        elif "all_left" in message:
            self._finished.set()
        elif "failed" in message:
            reason = printable(str(message["failed"]))
            self._handle_loss(member, f"ended with an error: {reason}", _GRACE_S)
        elif "lost" in message:
            how, grace = message.get("how"), message.get("grace")
            if not isinstance(how, str) or not isinstance(grace, (int, float)):
                raise ConnectionBroken(f"no message: {message!r:.80}")
            self._record_loss(Member.of(message["lost"]), printable(how), grace)

    def _read_alarm(self, alarm: Alarm, now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            self._alarmed += os.read(alarm.descriptor, 1 << 16).decode("utf-8", "replace")
        if self._crash_at is None:
            self._crash_at = now + _CRASH_S

    def _end_after_crash(self) -> None:
        """Reports this process's crash to the other processes, which end, and ends this process."""
        at = f" The last work that it had begun is {_begun}." if _begun else ""
        assert self._alarm is not None  # it has rung
        what = f"crashed: {self._alarm.explain(self._alarmed)}{at}"
        self._send_failure(what)
        self._end(f"this process {what}")

    def _finish_if_all_left(self) -> None:
        if self._me.index == 0 and len(self._left) == self._size:
            self._tell_all(all_left=True)
            self._finished.set()

    def _send_failure(self, text: str) -> None:
        """Tells the other processes that this process ends with an error; `text` is its reason."""
        if self._me.index == 0:
            self._tell_all(lost=self._me, how=f"ended with an error: {text}", grace=_GRACE_S)
        else:
            self._tell_all(failed=text)

    def _handle_loss(self, member: Member, how: str, grace: float = 0.0) -> None:
        """Handles the loss of `member`: tells the others, and ends this process in `grace` seconds.

        `how` says in words what happened to `member`. `grace` is 0 unless `member` has reported
        that it ends with an error. If `member` had finished its work and is not process 0, `member`
        does not count as lost, and nothing is done.
        """
        if member in self._left and member.index == 0 and self._me in self._left:
            # Only process 0 says that all have left, and there is nothing to do any more.
            self._finished.set()
        elif member not in self._left or member.index == 0:
            self._tell_all(lost=member, how=how, grace=grace)
            self._record_loss(member, how, grace)

    def _record_loss(self, member: Member, how: str, grace: float) -> None:
        """Records that `member` is lost, and ends this process in `grace` seconds.

        `how` says in words what happened to `member`, for the error that this process writes. If
        several members are lost, the error names the member whose loss was recorded first, and this
        process ends at the time that was set for this member.
        """
        if self._doom is None:
            what = f"lost {member}: it {how}"
            if member == self._me:
                what = f"the other processes have given this process up: it {how}"
            self._doom = time.monotonic() + grace, what
        if time.monotonic() >= self._doom[0]:
            self._end(self._doom[1])

    def _tell_all(self, **message: Any) -> None:
        for connection in self._peers.values():
            with contextlib.suppress(ConnectionBroken):  # which reading will show
                connection.send(**message)

    def _end(self, what: str) -> None:
        text = (
            f"\nmtf_gradsync: {self._me}: {what}. No step can be made without all processes, so "
            f"this one ends with exit code {LOST_PROCESS_EXIT_CODE}. Start the job again; it goes "
            "on from the newest checkpoint.\n"
        )
        # What was printed before comes first, unless the main thread stands still in the middle.
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(1.0)
        with contextlib.suppress(OSError):
            _write_last(text)
        # The main thread may never come back from XLA.
        os._exit(LOST_PROCESS_EXIT_CODE)


@contextlib.contextmanager
def keep_heartbeats() -> Iterator[None]:
    """Lets a separate process send this process's heartbeats while the block runs.

    Use this context manager around code that holds Python's interpreter lock for a long time, so
    that the watchdog's thread cannot run. In a process without a watchdog, it does nothing.
    """
    if _running is None:
        yield
        return
    with _running.send_heartbeats_by_proxy():
        yield


def note_work(begun: str) -> None:
    """Records in words which work this process begins: `begun` is a text such as "step 7".

    If this process crashes or is lost, the errors of all processes name this work.
    """
    global _begun
    _begun = begun


def _write_last(text: str) -> None:
    """Writes a text to standard error, and drops all that this process writes afterwards.

    Later output of this process is dropped because jax's threads report a lost process at the same
    moment as the watchdog, perhaps after the watchdog's text.
    """
    errors = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    time.sleep(_WRITING_S)
    os.write(errors, text.encode())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


_LONGEST = 300
_Self = TypeVar("_Self", bound="Membership")


class Membership:
    """A context manager around all work that needs the other processes of the job.

    An exception that leaves the context ends the other processes of the job, too. The other
    processes also end if this process dies. When the interpreter exits without an error, the method
    `close` is called.
    """

    def __init__(self, watchdog: Watchdog):
        self._watchdog = watchdog
        self._closed = False
        atexit.register(self._at_exit)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self._fail(error)

    def close(self) -> None:
        """Waits until all processes of the job have called `close`, and ends the connections."""
        if not self._closed:
            self._closed = True
            self._leave()

    def _leave(self) -> None:
        self._watchdog.leave()

    def _may_be_caused_by_loss(self, error: BaseException) -> bool:
        """Returns whether a lost process may have caused `error`, which has left the context."""
        raise NotImplementedError

    def _fail(self, error: BaseException) -> None:
        if self._closed:
            return
        self._closed = True
        if self._may_be_caused_by_loss(error):
            # Then this does not return.
            self._watchdog.wait_for_verdict()
        text = " ".join(f"{type(error).__name__}: {error}".split())
        self._watchdog.fail(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")

    def _at_exit(self) -> None:
        uncaught = getattr(sys, "last_value", None)
        if uncaught is not None:
            self._fail(uncaught)
        self.close()
