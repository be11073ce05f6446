"""Recordings made by hand. Times are in milliseconds."""

from mtf_gradsync.tools.timelines import Call, Collective, Event, Recording, Step

MS = 1_000_000


def event(core, name, begin, end, kind="compute"):
    return Event(core, name, kind, round(begin * MS), round(end * MS))


def two_cores(process=0, **more):
    """Two steps, of 10 and 20 ms, on two cores.

    core 0: product 1..4, sum 3..6 (1 of 3 hidden); product 12..18, sum 18..20.
    core 1: product 2..3, sum 3..6; product 12..13, sum 13..20.
    """
    events = [
        event(0, "product", 1, 4),
        event(0, "sum", 3, 6, "collective"),
        event(1, "product", 2, 3),
        event(1, "sum", 3, 6, "collective"),
        event(0, "product", 12, 18),
        event(0, "sum", 18, 20, "collective"),
        event(1, "product", 12, 13),
        event(1, "sum", 13, 20, "collective"),
    ]
    made = {
        "runtime": "xla",
        "process": process,
        "cores": {2 * process: f"core {2 * process}", 2 * process + 1: f"core {2 * process + 1}"},
        "steps": (Step(0, 10 * MS, False), Step(10 * MS, 30 * MS, True)),
        "events": tuple(
            Event(e.core + 2 * process, e.name, e.kind, e.begin, e.end) for e in events
        ),
        "collectives": {"sum": Collective(4096, ("w", "v"), True)},
        "calls": (Call("dispatch", 0, MS),),
    }
    return Recording(**{**made, **more})
