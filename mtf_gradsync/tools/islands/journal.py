"""The journal of a folder of islands: what happened to each island, after which step and when.

Each run of an island's process writes lines of JSON into objects (files of the folder) of its own.
An object gets a limited number of lines, because an object store cannot append to an object. The
journal does not say which contributions were merged. The merger's decisions say it: objects in
which it writes down the contributions to each version.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import time
from typing import Any, NamedTuple, Sequence

import msgspec

from mtf_gradsync.runtimes._tables import text_table
from mtf_gradsync.tools.islands.folder import Folder, FolderError
from mtf_gradsync.tools.islands.leases import Heartbeat, Holder, Reminders, terms_of
from mtf_gradsync.tools.islands.objects import Decision, IslandTotal, numbers_in, read_decision
from mtf_gradsync.tools.islands.tensor_files import SUFFIX, DamagedObjectError

logger = logging.getLogger(__name__)

_LINES_IN_A_PART = 200
_PARTS_KEPT = 50  # so many parts of an island's journal stay, unless all are kept
_DECISIONS_SHOWN = 8  # the table lists contributions that the last so many decisions refused


class Journal:
    """The writer of the events of one island, during one run of its process.

    If an event cannot be written into the folder, it is written together with the next event.

    Attributes:
      life: the number of the run of the process. Set it before the first event.
      keeps_all: whether all objects with events stay; if not, only the newest 50 of them stay.
    """

    def __init__(self, folder: Folder, island: str, reminders: Reminders):
        self._folder, self._place = folder, f"journal/{island}"
        self.life = 0  # to be set before the first event
        self._reminders = reminders
        self._island, self._part, self._lines = island, 0, list[dict[str, Any]]()
        self._before = 0  # the number of lines in earlier parts
        self.keeps_all = True

    @property
    def event_count(self) -> int:
        """The number of events in this run of the process."""
        return self._before + len(self._lines)

    def write(self, event: str, must_succeed: bool = False, **fields: Any) -> None:
        """Adds an event to the journal, with the time and the island's name.

        Args:
          event: the kind of event, such as "joined", "contributed" or "took".
          must_succeed: what happens if the event cannot be written into the folder now. If True,
            FolderError is raised and the event is not added. If False, the event is written
            together with a later event.
          **fields: more facts of the event, which JSON can hold. "step" must be one of them.
        """
        if len(self._lines) >= _LINES_IN_A_PART and not self._write_failed():
            self._before = self.event_count
            self._part, self._lines = self._part + 1, []
            self._remove_old()
        self._lines.append(
            {"event": event, "island": self._island, "time": round(time.time(), 3), **fields}
        )
        if self._write_failed() and must_succeed:
            self._lines.pop()
            raise FolderError(f"{self._name()} in {self._folder.url} cannot be written")

    def _name(self) -> str:
        return f"{self._place}/{self.life:08d}-{self._part:06d}.jsonl"

    def _write_failed(self) -> bool:
        """Writes the newest object of the journal again, with all its events.

        The result is True if the folder failed, so that the object may lack events. Events are
        added to the newest object until it has 200 events.
        """
        try:
            lines = msgspec.json.Encoder(order="sorted").encode_lines(self._lines)
            self._folder.write(self._name(), lines)
        except FolderError as error:
            what = f"Island {self._island}: {error}; it is written with a later line"
            self._reminders.remind("journal", what)
            with contextlib.suppress(FolderError):
                try:
                    self._folder.read(self._name())
                except DamagedObjectError:  # a directory has the name of the object
                    self._folder.set_aside(self._name())
            return True
        self._reminders.end("journal")
        return False

    def _remove_old(self) -> None:
        if not self.keeps_all:
            with contextlib.suppress(FolderError):
                for name in self._folder.names(self._place)[:-_PARTS_KEPT]:
                    self._folder.remove(f"{self._place}/{name}")


class JournalEvent(msgspec.Struct, frozen=True):
    """The fields that each line of a journal must have; a line may have others."""

    event: str
    island: str
    time: float
    step: int


def read_journal(folder: Folder, island: str) -> dict[int, list[dict[str, Any]]]:
    """Returns a dictionary from the number of each run of an island's process to its events.

    The events of a run are in the order in which they were written. Each event is a dictionary with
    the fields of `JournalEvent` and possibly more fields. Damaged parts of the journal are left
    out, and a warning is logged.

    Args:
      folder: the folder of the islands.
      island: the island's name.
    """
    lives: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)
    for name in folder.names(f"journal/{island}"):
        if not name.endswith(".jsonl"):
            continue
        try:
            data = folder.read(f"journal/{island}/{name}") or b""
            lines = msgspec.json.Decoder(dict[str, Any]).decode_lines(data)
            msgspec.convert(lines, list[JournalEvent])
            lives[int(name.split("-")[0])] += lines
        except ValueError as error:
            logger.warning(
                "%s is passed over: %s", f"journal/{island}/{name} in {folder.url}", error
            )
    return dict(sorted(lives.items()))


def events_by_step(folder: Folder, island: str) -> dict[int, list[dict[str, Any]]]:
    """Returns a dictionary from steps to an island's events after each of them, in order.

    If an island's process was killed, its next run goes on from the island's last checkpoint.
    Events of the killed process after this checkpoint have no effect any more, and are left out of
    the result.

    Args:
      folder: the folder of the islands.
      island: the island's name.
    """
    counted: list[tuple[tuple[int, int], dict[str, Any]]] = []
    for life, events in read_journal(folder, island).items():
        for number, event in enumerate(events):
            if event["event"] == "joined":
                # With a restored file beside the checkpoint, events up to that file count, even
                # those of the same step.
                until = tuple(event.get("restored", ()))
                counted = [
                    (at, one)
                    for at, one in counted
                    if (at < until if until else one["step"] < event["step"])
                ]
            counted.append(((life, number), event))
    found: dict[int, list[dict[str, Any]]] = {}
    for _, event in counted:
        found.setdefault(event["step"], []).append(event)
    return found


class IslandRow(NamedTuple):
    """A summary of one island, for a table.

    Attributes:
      island: the island's name.
      contributed: the number of its contributions.
      merged: how many of them were merged.
      late: how many of them came too late.
      refused: how many of them were refused.
      joined: how often the island began or came back.
      tokens: the tokens in merged contributions.
      written: bytes of tensors that the island has written.
      read: bytes of tensors that the island has read.
      first: the time of its first event.
      last: the time of its last event or heartbeat.
      state: in words, whether the merger sees the island alive, and whether the island has left or
        which step it has reported last: "lives, after step 40" or "left".
      version: the number of the version that the island has; None if that is unknown.
    """

    island: str
    contributed: int
    merged: int
    late: int
    refused: int
    joined: int
    tokens: float
    written: int
    read: int
    first: float
    last: float
    state: str
    version: int | None = None


class Status(NamedTuple):
    """The state of a folder of islands.

    Attributes:
      version: the number of the newest version; None before the first.
      rows: a summary of each island.
      events: the events of all islands, sorted by time (each by its writer's clock).
      decisions: the decisions on versions, as far as the folder still has them.
      merger: which process merges, in words.
      says: messages of the merger and the islands: what they wait for, or cannot do.
    """

    version: int | None
    rows: list[IslandRow]
    events: list[dict[str, Any]]
    decisions: list[Decision]
    merger: str = ""
    says: Sequence[str] = ()

    def table(self) -> str:
        """Returns the state as text: a table with a line for each island, then messages.

        The messages say what the merger and the islands wait for, or cannot do (the attribute
        `says`). Others are the reasons for which the merger refused contributions in its last eight
        decisions.
        """
        head = "no version yet" if self.version is None else f"version {self.version}"
        columns = ("island", "joined", "contributed", "merged", "late", "refused", "tokens merged",
                   "MB written", "MB read", "behind", "last seen", "state")  # fmt: skip
        lines = [
            (r.island, str(r.joined), str(r.contributed), str(r.merged), str(r.late),
             str(r.refused), f"{r.tokens:,.0f}", f"{r.written / 1e6:,.2f}", f"{r.read / 1e6:,.2f}",
             "" if r.version is None else str((self.version or 0) - r.version),
             f"{max(time.time() - r.last, 0.0):,.0f} s ago", r.state)
            for r in self.rows
        ]  # fmt: skip
        table = text_table(columns, lines, ("island", "state"))
        refused = [
            f"refused for version {decision.version}: {reason}"
            for decision in self.decisions[-_DECISIONS_SHOWN:]
            for reason in decision.refused.values()
        ]
        rows = table if lines else ["no island has joined"]
        return "\n".join([f"{head}; {self.merger}", *rows, *self.says, *refused])


def read_status(folder: Folder) -> Status:
    """Returns the state of a folder, read from the files of its islands and of its merger.

    Journals say what islands have done. The merger's decisions say which contributions it has
    merged into each version. Heartbeats say which processes still run. Damaged files of the folder
    are left out, and a warning is logged for each.
    """
    decisions = [
        decision
        for number in numbers_in(folder, "decisions", ".json")
        if (decision := _read(lambda number=number: read_decision(folder, number)))
    ]
    islands = sorted(name for name, mark in folder.marks("journal").items() if not mark)
    events = [
        event for one in islands for life in read_journal(folder, one).values() for event in life
    ]
    events.sort(key=lambda e: e["time"])
    newest = max(numbers_in(folder, "versions", SUFFIX), default=None)
    merger, beat = _merger_and_heartbeat(folder)
    members = terms_of(folder.marks("members"))
    says, rows = list(beat.says), []
    totals = decisions[-1].totals if decisions else {}
    for island in islands:
        term = members.get(f"{island}@")
        heartbeat = Heartbeat()
        if term:
            name = f"members/{island}@{term.number:08d}.beat"
            heartbeat = _read(lambda name=name: folder.read_json(name, Heartbeat)) or heartbeat
        says += heartbeat.says if term and not term.has_left else []
        lives = island in beat.living and bool(term and not term.has_left)
        of_island = [event for event in events if event["island"] == island]
        rows.append(_row(island, of_island, totals.get(island, IslandTotal()), heartbeat, lives))
    return Status(newest, rows, events, decisions, merger, says)


def _merger_and_heartbeat(folder: Folder) -> tuple[str, Heartbeat]:
    """Returns which process merges, in words, and the last heartbeat of that process.

    If no process merges, the words say so, and the heartbeat is an empty `Heartbeat()`.
    """
    term = terms_of(folder.marks("merger")).get("")
    if term is None:
        return "no merger has begun", Heartbeat()
    if term.has_left:
        return "the last merger has left", Heartbeat()
    name = f"merger/{term.number:08d}"
    holder = _read(lambda: folder.read_json(f"{name}.json", Holder))
    beat = _read(lambda: folder.read_json(f"{name}.beat", Heartbeat)) or Heartbeat()
    who = f"process {holder.pid} on {holder.host.split(' ')[0]}" if holder else "somebody"
    since = max(time.time() - beat.time, 0.0)
    return f"{who} merges; its last heartbeat was {since:,.0f} s ago", beat


def _read(read: Any) -> Any:
    try:
        return read()
    except DamagedObjectError as error:
        logger.warning("%s", error)
        return None


def _row(
    island: str, own: list[dict[str, Any]], total: IslandTotal, beat: Heartbeat, lives: bool
) -> IslandRow:
    count = collections.Counter(e["event"] for e in own)
    moved: collections.Counter[str] = collections.Counter()
    for event in own:
        moved[event["event"]] += event.get("bytes", 0)
    last: dict[str, Any] = own[-1] if own else {"time": 0.0, "event": "?"}
    versions = [e["version"] for e in own if isinstance(e.get("version"), int)][-1:]
    version = max([*versions, -1 if beat.version is None else beat.version], default=-1)
    state = "left" if last["event"] == "left" else f"after step {beat.step or last.get('step')}"
    return IslandRow(
        island, count["contributed"], total.merged, total.late, total.refused, count["joined"],
        total.tokens, moved["contributed"], moved["took"] + moved["joined"],
        own[0]["time"] if own else 0.0, max(last["time"], beat.time),
        f"lives, {state}" if lives else state, version if version >= 0 else None,
    )  # fmt: skip


def plot_status(
    status: Status, axes: Any, colors: Sequence[str] = ("C0", "C2", "C3", "C1")
) -> None:
    """Draws a horizontal line for each island over time: when it ran, and its contributions.

    Args:
      status: the state of the folder of islands, as `read_status` returns it.
      axes: the axes of matplotlib to draw into.
      colors: four colors: for the times at which an island ran, for merged contributions, for late
        contributions, and for changes that were not finite.
    """
    rows = {row.island: number for number, row in enumerate(status.rows)}
    start = min((e["time"] for e in status.events), default=0.0)
    for island, row in rows.items():
        for begin, end in _times_of_runs(status.events, island):
            axes.plot([begin - start, end - start], [row, row], lw=6, alpha=0.25, color=colors[0])
    marks = dict(zip(("merged", "late", "not finite"), zip(colors[1:], "oxs")))
    points = collections.defaultdict(list)
    for event in status.events:
        if event["event"] == "went_back":
            points["not finite"].append((event["time"], event["island"]))
    for decision in status.decisions:
        at = decision.time
        if decision.version:
            points["merged"] += [(at, one.island) for one in decision.contributions]
        points["late"] += [(at, one.island) for one in decision.dropped]
    for what, (color, marker) in marks.items():
        found = [(t - start, rows[i]) for t, i in points[what] if i in rows]
        if found:
            axes.plot(*zip(*found), marker, color=color, label=what, ms=4)
    axes.set_yticks(list(rows.values()), list(rows))
    axes.set_xlabel("seconds")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _times_of_runs(events: list[dict[str, Any]], island: str) -> list[tuple[float, float]]:
    """Returns the times of the first and the last event of each run of an island's process.

    The result has a pair of times for each run. `events` are the events of all islands, sorted by
    time, and `island` is the island's name.
    """
    lives: list[tuple[float, float]] = []
    for event in events:
        if event["island"] != island:
            continue
        if event["event"] == "joined" or not lives:
            lives.append((event["time"], event["time"]))
        else:
            lives[-1] = (lives[-1][0], event["time"])
    return lives
