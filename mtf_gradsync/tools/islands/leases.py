"""Leases in a folder, each held by one process at a time: one to merge, one for each island's name.

To take a lease, a process creates an object (a file of the folder) whose name has the next number.
Only one process can create this object. The process that has a lease writes heartbeats into the
folder, which show that it still runs. Other processes measure by their own clocks how old the
heartbeats are, so that clocks of machines are never compared and no locks are needed. If a process
was stopped and wakes up, it may find an object with a newer number: then it knows that it has lost
its lease. Even if it writes objects before it looks for newer numbers, it does no harm: these
objects have new names, and replace no others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
import uuid
import weakref
from typing import Any, Callable, Mapping, NamedTuple

import msgspec

from mtf_gradsync.tools.islands.folder import Folder, FolderError
from mtf_gradsync.tools.islands.tensor_files import DamagedObjectError

logger = logging.getLogger(__name__)

BEAT_SECONDS = 5.0
LIFE_SECONDS = 20.0  # a process that writes no heartbeat for so long is taken for dead
_TERM = re.compile(r"(.*?)(\d{8})\.(json|beat|left)")
# Ids of leases that this process holds.
_HELD: set[str] = set()


class Holder(msgspec.Struct, frozen=True):
    """The process that has taken a lease: a unique id, the machine, and the process id (pid)."""

    id: str
    host: str
    pid: int


class Heartbeat(msgspec.Struct, frozen=True):
    """A heartbeat of a process that holds a lease, which shows that the process still runs.

    Attributes:
      count: the number of this heartbeat, so that each differs from the one before.
      time: the time by the writer's clock, for people who read it.
      says: messages on what the process waits for, or cannot do.
      version: the number of the version of the outer values that the process has; None if none.
      step: the step that an island is at; None for a merger.
      living: the names of the islands that write heartbeats, as the merger sees them.
    """

    count: int = 0
    time: float = 0.0
    says: list[str] = []
    version: int | None = None
    step: int | None = None
    living: list[str] = []


class LeaseTerm(NamedTuple):
    """A term of a lease: the time during which one process holds the lease.

    Attributes:
      number: the number of the term, which counts up with each new holder.
      mark: the mark (such as an ETag) that the folder gives the object of the last heartbeat. Each
        heartbeat gets another mark. The mark is "" if there was no heartbeat yet.
      has_left: whether the holder has given the lease up.
    """

    number: int
    mark: str
    has_left: bool


def terms_of(marks: Mapping[str, str]) -> dict[str, LeaseTerm]:
    """Returns a dictionary from the name of each lease in a subfolder to its newest `LeaseTerm`.

    A `LeaseTerm` stands for the time during which one process holds a lease. `marks` is what
    `Folder.marks` returns for the subfolder: a dictionary from the names of objects to marks (such
    as ETags).
    """
    found: dict[str, dict[int, dict[str, str]]] = {}
    for name, mark in marks.items():
        match = _TERM.fullmatch(name)
        if match and mark:
            found.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = mark
    newest = {
        lease: max((n for n, kinds in terms.items() if "json" in kinds), default=0)
        for lease, terms in found.items()
    }
    return {
        lease: LeaseTerm(n, found[lease][n].get("beat", ""), "left" in found[lease][n])
        for lease, n in newest.items()
        if n
    }


class HeartbeatAges:
    """A record of when this process first saw the last heartbeat of each lease, by its own clock.

    Args:
      seconds: after how many seconds without a new heartbeat a holder counts as dead.
      clock: a function that returns the time in seconds.

    Attributes:
      renewed: the names of the leases that got a new heartbeat since this object first saw them.
    """

    def __init__(self, seconds: float = LIFE_SECONDS, clock: Callable[[], float] = time.monotonic):
        self._seconds, self._clock = seconds, clock
        self._seen: dict[str, tuple[LeaseTerm, float]] = {}
        self.renewed: set[str] = set()

    def living(self, terms: Mapping[str, LeaseTerm]) -> set[str]:
        """Returns the names of the leases whose holders may be alive.

        The holder of a lease may be alive if it has not given the lease up, and has written a
        heartbeat recently. The age of a heartbeat is the time since this object first saw it.

        Args:
          terms: the newest `LeaseTerm` of each lease (who holds the lease now, or held it last), by
            the name of the lease.
        """
        now = self._clock()
        for lease, term in terms.items():
            seen = self._seen.get(lease)
            if seen is None or seen[0] != term:
                if seen is not None:
                    self.renewed.add(lease)
                self._seen[lease] = (term, now)
        return {
            lease
            for lease, term in terms.items()
            if not term.has_left and now - self._seen[lease][1] < self._seconds
        }


class Lease:
    """A lease that this process can take, hold and give up.

    Args:
      folder: the folder of the islands.
      where: the subfolder with the lease's objects.
      name: the name of the lease in the subfolder; "" if there is only one.
      report: a function that is called for each heartbeat. It returns a dictionary of fields of
        `Heartbeat` other than `count` and `time`.
      replaces_own: whether the lease may be taken from another `Lease` object in this process.
    """

    def __init__(
        self,
        folder: Folder,
        where: str,
        name: str = "",
        report: Callable[[], dict[str, Any]] = dict,
        replaces_own: bool = False,
    ):
        self._folder, self._where, self._name = folder, where, name
        self._report, self._replaces_own = report, replaces_own
        self._own = Holder(uuid.uuid4().hex, _machine_id(), os.getpid())
        self._heartbeats = HeartbeatAges(LIFE_SECONDS)
        self._stopped = threading.Event()
        self._beats = 0
        self.term: int | None = None

    def _object(self, term: int, ending: str) -> str:
        return f"{self._where}/{self._name}{term:08d}.{ending}"

    def _newest(self) -> tuple[LeaseTerm | None, Holder | None]:
        """Returns the newest `LeaseTerm` of this lease, and the process that holds or held it.

        A `LeaseTerm` stands for the time during which one process holds the lease. Both results are
        None if no process has ever taken the lease. Only the process is None if the object that
        names it is gone. Damaged objects are moved away.
        """
        while True:
            term = terms_of(self._folder.marks(self._where)).get(self._name)
            if term is None:
                return None, None
            name = self._object(term.number, "json")
            try:
                return term, self._folder.read_json(name, Holder)
            except DamagedObjectError as error:
                logger.warning("%s; it goes to %s", error, self._folder.set_aside(name))

    def take(self) -> str:
        """Takes the lease if it is free; from then on a thread writes heartbeats.

        Call `take` repeatedly to wait for the lease: if the process that has the lease writes no
        heartbeat for `LIFE_SECONDS`, another process can take it.

        Returns:
          "" if this process has the lease now; else the process that has it, in words such as
          "process 12 on host1".
        """
        term, holder = self._newest()
        if term and holder and self._may_be_alive(term, holder):
            return f"process {holder.pid} on {holder.host.split(' ')[0]}"
        number = term.number + 1 if term else 1
        is_created = bool(term) and holder == self._own  # by an earlier call, which got no answer
        if term and is_created:
            number = term.number
        # Before the object exists, because another thread of this process may read it at once.
        _HELD.add(self._own.id)
        try:
            name = self._object(number, "json")
            is_created = is_created or self._folder.create_json(name, self._own)
        finally:
            if not is_created:
                _HELD.discard(self._own.id)
        if not is_created:
            return "another process"
        self.term = number
        self.write_heartbeat()
        # The thread has only a weak reference to the lease, so that it ends with the lease.
        threading.Thread(
            target=_write_heartbeats, args=(weakref.ref(self), self._stopped),
            name=f"heartbeats of {self._where}", daemon=True,
        ).start()  # fmt: skip
        with contextlib.suppress(FolderError):
            for ending in ("json", "beat", "left"):
                self._folder.remove(self._object(number - 2, ending))
        return ""

    def has_new_heartbeat(self) -> bool:
        """Returns whether this object has seen the lease's holder write a heartbeat.

        A process that waits for the lease calls `take` again and again. The result is True if the
        heartbeats that these calls found were not always the same: then the holder is alive.
        """
        return self._name in self._heartbeats.renewed

    def _may_be_alive(self, term: LeaseTerm, holder: Holder) -> bool:
        if holder.host == self._own.host:
            if holder.pid == self._own.pid:
                # Whether a holder in this very process still holds the lease is known at once.
                self._heartbeats.renewed.add(self._name)
                return holder.id in _HELD and not self._replaces_own and not term.has_left
            if not _is_process(holder.pid):
                return False
        return self._name in self._heartbeats.living({self._name: term})

    def is_held(self) -> bool:
        """Returns whether this process still has the lease, and no other process has taken it.

        If the lease's object (a file of the folder) is gone, it is created again.
        """
        if self.term is None:
            return False
        term, holder = self._newest()
        name = self._object(self.term, "json")
        if term is None or term.number < self.term:
            if not self._folder.create_json(name, self._own):  # a directory has this name
                self._folder.set_aside(name)
                self._folder.create_json(name, self._own)
            term, holder = self._newest()
        number = term.number if term else 0
        return number < self.term or (number == self.term and holder in (self._own, None))

    def write_heartbeat(self) -> None:
        """Writes a heartbeat of this process into the folder; does nothing if the folder fails."""
        assert self.term is not None
        self._beats += 1
        with contextlib.suppress(FolderError):
            heartbeat = Heartbeat(count=self._beats, time=time.time(), **self._report())
            self._folder.write_json(self._object(self.term, "beat"), heartbeat)

    def leave(self) -> None:
        """Gives the lease up, and writes an object that says so."""
        self._stopped.set()
        _HELD.discard(self._own.id)
        if self.term is not None:
            with contextlib.suppress(FolderError):
                self._folder.write_json(self._object(self.term, "left"), True)
            self.term = None

    def abandon(self) -> None:
        """Stops the heartbeats and writes nothing, as if the process were killed."""
        self._stopped.set()
        _HELD.discard(self._own.id)
        self.term = None


class Reminders:
    """A logger of conditions that last: it repeats a message, and logs when the condition ends.

    Each condition, such as a folder that fails, has a key. Call `remind` with this key again and
    again while the condition lasts, and call `end` with it once the condition has ended.

    Args:
      log: the logger that gets the messages.
      clock: a function that returns the time in seconds.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic):
        self._log, self._clock = log, clock
        self._lasting: dict[str, tuple[str, float, float, bool]] = {}  # since, due, was it said

    def remind(self, key: str, message: str, after: float = 0.0) -> None:
        """Records that a condition lasts; logs `message` if a message about it is due.

        Args:
          key: the key of the condition, such as "folder".
          message: the message.
          after: the seconds for which the condition must have lasted before the first message. The
            next messages follow at growing intervals.
        """
        now = self._clock()
        _, since, due, is_said = self._lasting.get(key, (message, now, now + after, False))
        if now >= due:
            for_so_long = f" (for {now - since:.0f} s now)" if is_said or after else ""
            self._log.warning("%s%s", message, for_so_long)
            due, is_said = now + max(60.0, 2.0 * (now - since)), True
        self._lasting[key] = (message, since, due, is_said)

    def end(self, key: str) -> None:
        """Records that a condition has ended; logs this if `remind` has logged the condition.

        `key` is the key of the condition. Nothing happens if `remind` was not called with it.
        """
        if key in self._lasting:
            message, since, _, is_said = self._lasting.pop(key)
            if is_said:
                self._log.warning("Over after %.0f s: %s", self._clock() - since, message)

    def messages(self) -> list[str]:
        """Returns the messages on conditions that still last, if they have been logged before."""
        return [message for message, _, _, is_said in list(self._lasting.values()) if is_said]


def _write_heartbeats(lease: weakref.ref[Lease], stopped: threading.Event) -> None:
    while not stopped.wait(BEAT_SECONDS):
        held = lease()
        if held is None:
            return
        held.write_heartbeat()
        del held


def _machine_id() -> str:
    """Returns an identifier of the machine or container; inside it, process ids are unique."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _is_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True
