"""The merger: makes each version of the outer values from what islands have contributed.

A version is made in two writes: first the decision (whose contributions, with which weights and
checksums), then the values (see `versions`). A merger that was killed anywhere makes the same bits
when it is started again, and `replay` does so at any time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

import numpy as np

from mtf_gradsync.extension import is_number
from mtf_gradsync.tools.islands.changes import decoded, weight_of
from mtf_gradsync.tools.islands.folder import (
    SUFFIX,
    DamagedObjectError,
    Folder,
    Spec,
    Stored,
    checksum,
)
from mtf_gradsync.tools.islands.versions import (
    SETTINGS,
    MergeSettings,
    counts_behind,
    decision_object,
    fragment_of,
    make_version,
    member_object,
    momentum_object,
    newest_version,
    read_values,
    version_object,
    versions_that_make,
)

logger = logging.getLogger(__name__)

ROUND = "round.json"
_LEASE = "merger.json"
_LOCK = ".merger.lock"
# A contribution for an older version than this many is not even counted as late.
_VERSIONS_LOOKED_AT = 8


class MergerError(RuntimeError):
    """The merger cannot go on."""


class FolderTakenError(MergerError):
    """Another merger has the folder."""


class Waiting(NamedTuple):
    """How long a merger waits for contributions.

    Attributes:
      quorum: how many contributions to the newest version a merge needs.
      min_grace: seconds to wait for more after the quorum is there, at least.
      max_grace: at most. Between the two it adapts to how far apart contributions usually come.
      max_staleness: how many versions old a contribution may be that is still merged.
    """

    quorum: int = 1
    min_grace: float = 1.0
    max_grace: float = 60.0
    max_staleness: int = 0

    def check(self) -> None:
        """Raises ValueError for a setting that makes no sense."""
        for name, least in (("quorum", 1), ("max_staleness", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(
                    f"{name} must be a whole number of at least {least}, got {value!r}."
                )
        if not 0.0 <= self.min_grace <= self.max_grace:
            raise ValueError(
                "The grace window must have 0 <= min_grace <= max_grace, got "
                f"min_grace={self.min_grace!r}, max_grace={self.max_grace!r}."
            )


class Merger:
    """Makes versions until it is stopped; one at a time for a folder.

    Args:
      folder: the folder of the islands.
      settings: how versions are made; None takes the folder's, or the defaults where it is new.
      waiting: how long to wait for contributions.
      keep_all: whether to keep all versions and contributions, for `replay`.
      poll_seconds: how often to look into the folder; default 0.2 on a local disk, else 2.
      clock: for tests, in place of ``time.monotonic``.

    Raises:
      ValueError: a setting makes no sense, or is another than that of the folder.
    """

    def __init__(
        self,
        folder: Folder,
        settings: MergeSettings | None = None,
        waiting: Waiting | None = None,
        keep_all: bool = False,
        poll_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        waiting = waiting or Waiting()
        waiting.check()
        there = MergeSettings.of(folder)
        self.settings = settings or there or MergeSettings()
        self.settings.check()
        if there is not None and there != self.settings:
            raise ValueError(
                f"{folder.url} was begun with {there}, and {self.settings} was given: islands that "
                "are on the way would be merged otherwise than they began. Give the same, or begin "
                "in another folder."
            )
        if waiting.max_staleness and self.settings.fragments > 1:
            raise ValueError(
                f"max_staleness={waiting.max_staleness} needs fragments=1, got fragments="
                f"{self.settings.fragments}: an older contribution is of other variables."
            )
        self._folder, self._waiting, self._keep_all = folder, waiting, keep_all
        self._poll = poll_seconds or poll_seconds_of(folder)
        self._clock = clock
        self._newest: int | None = None
        self._decisions: dict[int, dict[str, Any]] = {}
        self._looked: dict[str, dict[str, Any] | None] = {}  # object -> what it is; None: refused
        self._seen: dict[str, float] = {}  # object -> when this merger first saw it
        self._refused: dict[str, str] = {}  # object -> why, since the last decision
        self._counted: set[str] = set()  # late contributions that decisions name
        self._told: Any = None
        self._specs: dict[str, Spec] | None = None  # of the variables

    def run(
        self,
        should_stop: Callable[[], bool] = lambda: False,
        on_version: Callable[[dict[str, Any]], None] = lambda decision: None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Makes versions until `should_stop`; calls `on_version` with the decision of each.

        Raises MergerError if another merger has the folder.
        """
        with lease(self._folder, sleep) as check:
            self._folder.remove_half_written()
            self._folder.write_json(SETTINGS, self.settings._asdict())
            self._finish_begun(on_version)
            if self._newest is not None:
                self._tell(is_closing=False)
            while not should_stop():
                decision = self._decide()
                if decision is None:
                    sleep(self._poll)
                    continue
                check()
                self._folder.write_json(decision_object(decision["version"]), decision)
                self._make(decision, on_version)

    def _finish_begun(self, on_version: Callable[[dict[str, Any]], None]) -> None:
        """Makes the version of a decision after which a merger was killed."""
        self._newest = newest_version(self._folder)
        decisions = self._folder.names("decisions")
        if not decisions:
            return
        decision = self._folder.read_json(f"decisions/{decisions[-1]}")
        if self._newest is None or decision["version"] > self._newest or self._is_damaged():
            self._make(decision, on_version)
        else:
            self._clean_up(decision)

    def _is_damaged(self) -> bool:
        try:
            assert self._newest is not None
            self._folder.load(version_object(self._newest))
        except DamagedObjectError as error:
            logger.warning("%s; it is made again", error)
            return True
        return False

    def _make(self, decision: dict[str, Any], on_version: Callable[[dict[str, Any]], None]) -> None:
        version = decision["version"]
        try:
            values, momenta = make_version(self._folder, decision, self.settings)
        except DamagedObjectError as error:
            raise MergerError(f"Version {version} cannot be made: {error}") from error
        facts = {"version": version}
        if momenta:
            self._folder.store(momentum_object(version), facts, momenta)
        # Last: what has values has all else.
        self._folder.store(version_object(version), facts, values)
        self._newest = version
        self._tell(is_closing=False)
        on_version(decision)
        self._clean_up(decision)

    def _tell(self, is_closing: bool) -> None:
        """Tells islands which version is the newest, and whether the next one is about to be made.

        An island that has not made all of its steps then contributes those that it has made.
        """
        told = {"version": self._newest, "closing": is_closing}
        if told != self._told:
            self._folder.write_json(ROUND, told)
            self._told = told

    def _decide(self) -> dict[str, Any] | None:
        """Returns the decision on the next version once it is time for it."""
        if self._newest is None:
            return self._decide_first()
        newest, oldest = self._newest, self._newest - self._waiting.max_staleness
        used = {c["object"] for v in range(oldest + 1, newest + 1) for c in self._contributions(v)}
        there, late = [], []
        for folder in self._folder.names("contributions"):
            if not oldest - _VERSIONS_LOOKED_AT <= int(folder) <= newest:
                continue
            for name in self._folder.names(f"contributions/{folder}"):
                path = f"contributions/{folder}/{name}"
                if path in used or path in self._counted or not name.endswith(SUFFIX):
                    continue
                found = self._look_at(path)
                if found and int(folder) >= oldest:
                    there.append(found)
                elif found and not self._was_counted(path):
                    late.append(found)
        current = [c for c in there if c["version"] == newest]
        if len(current) < self._waiting.quorum:
            return None
        self._tell(is_closing=True)
        now, seen = self._clock(), sorted(self._seen[c["object"]] for c in current)
        if not self._is_complete(current) and now - seen[self._waiting.quorum - 1] < self._grace():
            return None
        # Names decide the order, and not arrival.
        there.sort(key=lambda c: (c["island"], c["version"]))
        late.sort(key=lambda c: c["object"])
        arrivals = {c["island"]: round(self._seen[c["object"]] - seen[0], 3) for c in current}
        refused, self._refused = self._refused, {}
        return {
            "version": newest + 1,
            "counts": counts_behind((self._decision(newest) or {}).get("counts", {}), there),
            "contributions": there,
            "dropped": late,
            "refused": dict(sorted(refused.items())),
            # For people and the next grace window; the values do not depend on these.
            "time": time.time(),
            "seconds": {"waited": round(now - seen[0], 3), "arrivals": arrivals},
        }

    def _decide_first(self) -> dict[str, Any] | None:
        offers = [self._look_at(f"offers/{name}") for name in self._folder.names("offers")]
        found = [o for o in offers if o]
        if len(found) < self._waiting.quorum:
            return None
        # The one that has come furthest.
        found.sort(key=lambda o: (-o["counts"].get("step", 0), o["island"]))
        return {"version": 0, "counts": found[0]["counts"], "contributions": found[:1],
                "dropped": [], "refused": {}, "time": time.time(),
                "seconds": {"waited": 0.0, "arrivals": {}}}  # fmt: skip

    def _decision(self, version: int) -> dict[str, Any] | None:
        """Returns the decision on a version; None where there is none."""
        if version not in self._decisions:
            found = self._folder.read_json(decision_object(version)) if version >= 0 else None
            if found is None:
                return None
            self._decisions[version] = found
        return self._decisions[version]

    def _contributions(self, version: int) -> list[dict[str, Any]]:
        decision = self._decision(version)
        return decision["contributions"] if decision else []

    def _was_counted(self, path: str) -> bool:
        """Whether a decision has merged or dropped a contribution."""
        begun = int(path.split("/")[1])
        was_counted = any(
            path in {c["object"] for c in (*decision["contributions"], *decision["dropped"])}
            for version in range(begun + 1, (self._newest or 0) + 1)
            if (decision := self._decision(version))
        )
        if was_counted:
            self._counted.add(path)
        return was_counted

    def _look_at(self, path: str) -> dict[str, Any] | None:
        """Returns what a decision says of a contribution; None where it is gone or refused."""
        if path not in self._looked:
            try:
                stored = self._folder.load(path)
                if stored is None:
                    return None
                found = _described(path, stored)
                found["weight"] = weight_of(found["tokens"], found["steps"], self.settings.weight)
                self._looked[path] = found
                if stored.facts["version"] is not None:
                    self._check_change(stored)
            except DamagedObjectError as error:
                self._refused[path] = str(error)
                self._looked[path] = None
                logger.warning("%s", error)
            self._seen[path] = self._clock()
        return self._looked[path]

    def _check_change(self, stored: Stored) -> None:
        """Raises DamagedObjectError if a contribution is not of the variables whose turn it is."""
        assert self._newest is not None
        if self._specs is None:
            values = read_values(self._folder, self._newest, self.settings.fragments)
            self._specs = {name: Spec.of(value) for name, value in values.items()}
        turn = stored.facts["version"] + 1
        names = fragment_of(turn, list(self._specs), self.settings.fragments)
        decoded(stored, {name: self._specs[name] for name in names})

    def _is_complete(self, current: Sequence[Mapping[str, Any]]) -> bool:
        """Whether nobody is missing who has joined or contributed lately, and has not left."""
        newest = self._newest
        assert newest is not None
        members = {name[: -len(".json")] for name in self._folder.names("members")}
        if members <= {c["island"] for c in current}:
            return True
        lately = {
            c["island"] for v in (newest - 1, newest) if v > 0 for c in self._contributions(v)
        }
        for island in members - lately:
            member = self._folder.read_json(member_object(island))
            if member and member["version"] >= newest - 1:
                lately.add(island)
        return members & lately <= {c["island"] for c in current}

    def _grace(self) -> float:
        """Seconds to wait: half as long again as contributions have usually come apart."""
        assert self._newest is not None
        decisions = [self._decision(v) for v in range(max(self._newest - 7, 1), self._newest + 1)]
        arrivals = [decision["seconds"]["arrivals"].values() for decision in decisions if decision]
        # One that came alone says nothing about how far apart they come.
        spreads = [max(seconds) for seconds in arrivals if len(seconds) > 1]
        usual = 1.5 * float(np.median(spreads)) if spreads else self._waiting.max_grace
        return min(max(usual, self._waiting.min_grace), self._waiting.max_grace)

    def _clean_up(self, decision: Mapping[str, Any]) -> None:
        """Removes what no island and no restart needs any more."""
        version, fragments = decision["version"], self.settings.fragments
        oldest = version - self._waiting.max_staleness
        # Those of the newest version stay: it can be made again.
        gone = [*decision["dropped"], *self._contributions(oldest - 1)] if version else []
        if not self._keep_all:
            # An island may be reading the version before.
            needed = {*versions_that_make(version, fragments)}
            needed |= set(versions_that_make(max(version - 1, 0), fragments))
            momenta = range(version - fragments, version + 1)
            for folder, keep in (("versions", needed), ("momenta", momenta)):
                for name in self._folder.names(folder):
                    if int(name[: -len(SUFFIX)]) not in keep:
                        self._folder.remove(f"{folder}/{name}")
            for path in [*(c["object"] for c in gone), *decision["refused"]]:
                self._folder.remove(path)
            late = f"contributions/{oldest - _VERSIONS_LOOKED_AT - 1:08d}"
            for name in self._folder.names(late):
                self._folder.remove(f"{late}/{name}")
        for one in gone:
            self._seen.pop(one["object"], None)
            if not self._keep_all:
                self._looked.pop(one["object"], None)
        kept = oldest - _VERSIONS_LOOKED_AT
        self._decisions = {v: d for v, d in self._decisions.items() if v >= kept}


class MergerThread:
    """Runs a merger in this process, or waits until it can: one folder has one.

    Attributes:
      error: what the merger has ended with; None while it has not.
    """

    def __init__(self, make: Callable[[], Merger]):
        self._make = make
        self._merger = make()  # wrong settings are an error at once
        self._stop = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="merger", daemon=True)

    def start(self) -> None:
        """Begins to run, unless it runs."""
        if not self._thread.is_alive():
            self._thread.start()

    def stop(self) -> None:
        """Ends the merger, and waits for its end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._merger.run(self._stop.is_set, sleep=self._stop.wait)
                return
            except FolderTakenError:
                self._stop.wait(5.0)
                self._merger = self._make()
            except BaseException as error:
                self.error = error
                return


def poll_seconds_of(folder: Folder) -> float:
    """Returns how often to look into a folder, in seconds."""
    return 0.2 if folder.is_local else 2.0


def replay(
    folder: Folder, on_version: Callable[[int, bool], None] = lambda version, is_equal: None
) -> list[int]:
    """Makes every version again from its contributions; returns those that have other bits.

    Raises DamagedObjectError for a version whose contributions are gone (see `keep_all`).
    """
    settings = MergeSettings.of(folder)
    if settings is None:
        raise MergerError(f"{folder.url} has no versions yet: no merger has begun there.")
    wrong = []
    for version in range((newest_version(folder) or 0) + 1):
        decision = folder.read_json(decision_object(version))
        if decision is None:
            raise DamagedObjectError(f"{decision_object(version)} in {folder.url} is gone.")
        values, momenta = make_version(folder, decision, settings)
        is_equal = True
        for name, made in ((version_object(version), values), (momentum_object(version), momenta)):
            if made:
                stored = folder.load(name)
                is_equal &= stored is not None and stored.checksum == checksum(
                    {"version": version}, made
                )
        if not is_equal:
            wrong.append(version)
        on_version(version, is_equal)
    return wrong


def _described(path: str, stored: Stored) -> dict[str, Any]:
    """Returns what a decision says of a contribution; raises DamagedObjectError for a wrong one."""
    facts = stored.facts
    *_, folder, name = path.split("/")
    island, version = facts.get("island"), facts.get("version")
    tokens = facts.get("tokens")
    if name != f"{island}{SUFFIX}" or (folder.isdigit() and int(folder) != version):
        raise DamagedObjectError(f"{path} says that it is of {island!r}, version {version!r}")
    if not is_number(tokens) or not 0.0 < tokens < float("inf"):
        raise DamagedObjectError(f"{path} is of {tokens!r} tokens")
    for key, value in stored.tensors.items():
        if value.dtype.kind not in "iu" and not np.isfinite(value.astype(np.float32)).all():
            raise DamagedObjectError(f"{path} has a NaN or an infinity in {key!r}")
    return {"object": path, "island": island, "version": version, "tokens": float(tokens),
            "steps": facts.get("steps"), "counts": facts.get("counts", {}),
            "checksum": stored.checksum}  # fmt: skip


_LEASE_SECONDS = 10.0


@contextlib.contextmanager
def lease(
    folder: Folder, sleep: Callable[[float], object] = time.sleep
) -> Iterator[Callable[[], None]]:
    """Holds a folder for one merger within the block; yields a function that checks that it does.

    On a local disk a lock of the operating system says at once whether another has it; elsewhere a
    number in the folder that goes on counting does, for as long as its merger lives.

    Raises MergerError if another merger has the folder, or takes it meanwhile.
    """
    own = {"id": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid()}

    def refuse(holder: Mapping[str, Any]) -> FolderTakenError:
        return FolderTakenError(
            f"Another merger has {folder.url}: process {holder.get('pid')} on "
            f"{holder.get('host')}. One is enough; this one ends."
        )

    with contextlib.ExitStack() as stack:
        before = _read_lease(folder)
        if not _locked(folder, stack):
            raise refuse(before)
        is_dead = not before or before.get("released")
        if folder.is_local and before.get("host") == own["host"]:
            is_dead = True  # the lock says so
        if not is_dead:
            sleep(_LEASE_SECONDS)
            if _read_lease(folder) != before:
                raise refuse(_read_lease(folder))
        beat = 0

        def write(**more: Any) -> None:
            folder.write_json(_LEASE, {**own, "beat": beat, **more})

        def check() -> None:
            holder = _read_lease(folder)
            if holder.get("id") != own["id"]:
                raise refuse(holder)

        write()
        if not folder.is_local:
            sleep(1.0)  # the last one of two that write at once has it
            check()
        stopped = threading.Event()

        def go_on() -> None:
            nonlocal beat
            while not stopped.wait(_LEASE_SECONDS / 4):
                beat += 1
                with contextlib.suppress(Exception):
                    if _read_lease(folder).get("id") != own["id"]:
                        return
                    write()

        thread = threading.Thread(target=go_on, name="merger lease", daemon=True)
        thread.start()
        try:
            yield check
        finally:
            stopped.set()
            thread.join()
            with contextlib.suppress(Exception):
                if _read_lease(folder).get("id") == own["id"]:
                    write(released=True)


def _read_lease(folder: Folder) -> dict[str, Any]:
    try:
        return folder.read_json(_LEASE) or {}
    except DamagedObjectError:
        return {}


def _locked(folder: Folder, stack: contextlib.ExitStack) -> bool:
    """Locks a local folder until the stack is closed; whether nobody else has it."""
    if not folder.is_local:
        return True
    try:
        import fcntl
    except ImportError:  # no POSIX
        return True
    path = folder._path(_LOCK)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    file = stack.enter_context(open(path, "a"))  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
