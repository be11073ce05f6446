"""The journal of a folder of islands: who joined, contributed, was late, went, when and with what.

Each process that writes has JSON lines of its own, in parts of a limited size, since an object
store cannot add to an object. What became of contributions stands in the merger's decisions.
"""

from __future__ import annotations

import collections
import json
import logging
import time
from typing import Any, NamedTuple, Sequence

from mtf_gradsync.runtimes._tables import text_table
from mtf_gradsync.tools.islands.folder import DamagedObjectError, Folder

logger = logging.getLogger(__name__)

_LINES_IN_A_PART = 200


class Journal:
    """Writes what happens to one island in one life of its process."""

    def __init__(self, folder: Folder, island: str):
        self._folder, self._island = folder, island
        self._life = f"{time.time_ns():020d}"
        self._part, self._lines = 0, []  # type: tuple[int, list[str]]

    def write(self, event: str, **fields: Any) -> None:
        """Adds an event; it is in the folder when this returns."""
        if len(self._lines) == _LINES_IN_A_PART:
            self._part, self._lines = self._part + 1, []
        line = {"event": event, "island": self._island, "time": round(time.time(), 3), **fields}
        self._lines.append(json.dumps(line, sort_keys=True))
        name = f"journal/{self._island}/{self._life}-{self._part:06d}.jsonl"
        self._folder.write(name, "".join(f"{x}\n" for x in self._lines).encode())


def read_journal(folder: Folder, island: str) -> list[list[dict[str, Any]]]:
    """Returns the events of an island, in order, a list for each life of its process."""
    import msgspec

    lives: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for name in folder.names(f"journal/{island}"):
        data = folder.read(f"journal/{island}/{name}") or b""
        try:
            lives[name.split("-")[0]] += msgspec.json.Decoder(dict[str, Any]).decode_lines(data)
        except ValueError as error:
            raise DamagedObjectError(
                f"journal/{island}/{name} in {folder.url} is damaged: {error}"
            ) from error
    return [lives[life] for life in sorted(lives)]


def events_by_step(folder: Folder, island: str) -> dict[int, list[dict[str, Any]]]:
    """Returns what happened to an island after each step that counts.

    A process that was killed begins again at its checkpoint: what its earlier life did after that
    step is not part of what the island has become.
    """
    found: dict[int, list[dict[str, Any]]] = {}
    for life in read_journal(folder, island):
        for event in life:
            if event["event"] == "joined":
                found = {s: events for s, events in found.items() if s < event["step"]}
            found.setdefault(event["step"], []).append(event)
    return found


class IslandRow(NamedTuple):
    """What became of one island: counts, bytes of tensors, times of its first and last event."""

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


class Status(NamedTuple):
    """What a folder of islands has come to."""

    version: int | None
    rows: list[IslandRow]
    events: list[dict[str, Any]]
    decisions: list[dict[str, Any]]

    def table(self) -> str:
        """The rows as text."""
        if self.version is None:
            head = "no version yet: no merger has found initial values"
        else:
            head = f"version {self.version}"
        columns = ("island", "joined", "contributed", "merged", "late", "refused", "tokens merged",
                   "MB written", "MB read", "last seen", "state")  # fmt: skip
        lines = [
            (r.island, str(r.joined), str(r.contributed), str(r.merged), str(r.late),
             str(r.refused), f"{r.tokens:,.0f}", f"{r.written / 1e6:,.2f}", f"{r.read / 1e6:,.2f}",
             f"{max(time.time() - r.last, 0.0):,.0f} s ago", r.state)
            for r in self.rows
        ]  # fmt: skip
        table = text_table(columns, lines, ("island", "state"))
        return "\n".join([head, *(table if lines else ["no island has joined"])])


def read_status(folder: Folder) -> Status:
    """Reads the journal and the decisions of a folder.

    What cannot be read of either is said in the log and left out.
    """
    decisions, events = [], []
    for name in folder.names("decisions"):
        decision = _read(lambda name=name: folder.read_json(f"decisions/{name}"))
        if decision:
            decisions.append(decision)
    islands = folder.names("journal")
    for island in islands:
        for life in _read(lambda island=island: read_journal(folder, island)) or []:
            events += life
    events.sort(key=lambda e: e["time"])
    version = decisions[-1]["version"] if decisions else None
    return Status(version, [_row(i, events, decisions) for i in islands], events, decisions)


def _read(read: Any) -> Any:
    try:
        return read()
    except DamagedObjectError as error:
        logger.warning("%s", error)
        return None


def _row(island: str, events: list[dict[str, Any]], decisions: list[dict[str, Any]]) -> IslandRow:
    own = [e for e in events if e["island"] == island]
    count = collections.Counter(e["event"] for e in own)
    merged = [c for d in decisions if d["version"] for c in d["contributions"]
              if c["island"] == island]  # fmt: skip
    late = sum(c["island"] == island for d in decisions for c in d["dropped"])
    refused = sum(path.split("/")[-1].rsplit(".", 1)[0] == island
                  for d in decisions for path in d["refused"])  # fmt: skip
    moved: collections.Counter[str] = collections.Counter()
    for event in own:
        moved[event["event"]] += event.get("bytes", 0)
    last: dict[str, Any] = own[-1] if own else {"time": 0.0, "event": "?"}
    state = "left" if last["event"] == "left" else f"after step {last.get('step')}"
    return IslandRow(
        island, count["contributed"], len(merged), late, refused, count["joined"],
        sum(c["weight"] for c in merged), moved["contributed"], moved["took"] + moved["joined"],
        own[0]["time"] if own else 0.0, last["time"], state,
    )  # fmt: skip


def plot_status(
    status: Status, axes: Any, colors: Sequence[str] = ("C0", "C2", "C3", "C1")
) -> None:
    """Draws a row for each island over time: when it was there, and what became of its work.

    `axes` is matplotlib's. `colors` are those of its presence, and of contributions that were
    merged, late, and not finite.
    """
    rows = {row.island: number for number, row in enumerate(status.rows)}
    start = min((e["time"] for e in status.events), default=0.0)
    for island, row in rows.items():
        for begin, end in _lives(status.events, island):
            axes.plot([begin - start, end - start], [row, row], lw=6, alpha=0.25, color=colors[0])
    marks = dict(zip(("merged", "late", "not finite"), zip(colors[1:], "oxs")))
    points = collections.defaultdict(list)
    for event in status.events:
        if event["event"] == "went_back":
            points["not finite"].append((event["time"], event["island"]))
    for decision in status.decisions:
        at = decision["time"]
        if decision["version"]:
            points["merged"] += [(at, c["island"]) for c in decision["contributions"]]
        points["late"] += [(at, c["island"]) for c in decision["dropped"]]
    for what, (color, marker) in marks.items():
        found = [(t - start, rows[i]) for t, i in points[what] if i in rows]
        if found:
            axes.plot(*zip(*found), marker, color=color, label=what, ms=4)
    axes.set_yticks(list(rows.values()), list(rows))
    axes.set_xlabel("seconds")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _lives(events: list[dict[str, Any]], island: str) -> list[tuple[float, float]]:
    """Returns when each life of an island's process began and was last heard of."""
    lives: list[tuple[float, float]] = []
    for event in events:
        if event["island"] != island:
            continue
        if event["event"] == "joined" or not lives:
            lives.append((event["time"], event["time"]))
        else:
            lives[-1] = (lives[-1][0], event["time"])
    return lives
