"""The faults, and what must follow from each."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple

from mtf_gradsync.runtimes.starting import remove_leftovers
from tests.damage import damage
from tests.soak import settings
from tests.soak.busy import busy_machine
from tests.soak.injected import random_moment
from tests.soak.started import Processes, Run

NONE = "null"
# A fault that ends a run has to do so, with its cause, in this time.
LIMIT_S = 30.0


class Seen(NamedTuple):
    """What a fault came to.

    Attributes:
      hit: whether it happened before the run was over.
      problems: what should not have been, in words.
      seconds: from the fault to the end of what it ended.
    """

    hit: bool
    problems: tuple[str, ...] = ()
    seconds: float = 0.0


class Fault(NamedTuple):
    """A kind of fault.

    Attributes:
      name: for the table.
      act: starts the run, brings the fault about and looks at its end.
      damages: whether the newest checkpoint is lost by it.
      needs_checkpoint: whether there has to be one.
      afterwards: whether it makes sense for a run that has made all its steps.
      processes: of how many processes the runs are that it can hit.
      can_hit: whether it can hit the runs of a runtime and a config.
    """

    name: str
    act: Callable[[Run, random.Random], Seen]
    damages: bool = False
    needs_checkpoint: bool = False
    afterwards: bool = False
    processes: tuple[int, ...] = (1, 2)
    can_hit: Callable[[settings.Runtime, str], bool] = lambda runtime, config: True


def _running(run: Run, rng: random.Random, least: float = 0.2) -> tuple[Processes, bool]:
    """A start of a run at a random moment, and whether it still runs."""
    processes = run.start()
    processes.sleep(rng.uniform(least, run.usual_seconds))
    return processes, processes.are_alive()


def _kill_at_random(run: Run, rng: random.Random) -> Seen:
    processes, hit = _running(run, rng)
    processes.kill_all()
    return Seen(hit)


def _kill_at_moment(run: Run, rng: random.Random) -> Seen:
    fault = random_moment(rng, run.saves_to_come())
    processes = run.start(json.dumps(fault))
    hit = processes.wait_first(run.patience) == -signal.SIGKILL
    processes.kill_all()
    return Seen(hit)


def _signal(number: int) -> Callable[[Run, random.Random], Seen]:
    def act(run: Run, rng: random.Random) -> Seen:
        processes, hit = _running(run, rng)
        began = time.monotonic()
        processes[0].send(number)
        status = processes.wait_first(LIMIT_S)
        seconds = time.monotonic() - began
        problems = []
        # Before the loop it ends as any program does.
        if hit and status not in (0, 128 + number, -number):
            problems.append(f"ended with {status}: {processes[0].errors()[-300:]}")
        # A signal before the first step may meet a callback that ignores exceptions.
        errors = processes[0].errors().replace("Exception ignored", "")
        ignored = len(errors) < len(processes[0].errors())
        if "Traceback" in errors and status != 128 + number and not ignored:
            problems.append("a traceback")
        problems += processes.others_end(LIMIT_S, (0, 75, 128 + number))
        processes.kill_all()
        return Seen(hit and status != 0, tuple(problems), seconds)

    return act


def _stand_still(run: Run, rng: random.Random) -> Seen:
    processes, hit = _running(run, rng)
    who = rng.choice(range(len(processes)))
    processes[who].send(signal.SIGSTOP)
    time.sleep(rng.uniform(0.1, 0.8))
    processes[who].send(signal.SIGCONT)
    return Seen(hit, processes.all_end_well(run.patience))


def _busy(run: Run, rng: random.Random) -> Seen:
    processes, hit = _running(run, rng, 0.0)
    with busy_machine(run.scratch):
        processes.sleep(rng.uniform(0.5, 2.0))
    return Seen(hit, processes.all_end_well(run.patience))


def _clock_set_back(run: Run, rng: random.Random) -> Seen:
    # Files of the past are of the future then.
    future = time.time() + 7200
    for path in run.directory.glob("*"):
        os.utime(path, (future, future))
    fault = ["set_clock_back", {"step": rng.randint(1, 4), "seconds": 7200.0}]
    processes = run.start(json.dumps(fault))
    return Seen(True, processes.all_end_well(run.patience))


def _ends_with(run: Run, processes: Any, since: float, code: int, words: str) -> Seen:
    """What is seen of a run that must end by itself, with an error of one line."""
    status = processes.wait_first(LIMIT_S)
    seconds = time.monotonic() - since
    errors = processes[0].errors()
    problems = []
    if status == 0:
        return Seen(False, (), seconds)
    if status != code:
        problems.append(f"ended with {status} and not {code} in {seconds:.0f} s: {errors[-300:]}")
    elif words not in errors:
        problems.append(f"does not say {words!r}: {errors[-300:]}")
    if "Traceback" in errors:
        problems.append(f"a traceback: {errors[-600:]}")
    processes.kill_all()
    return Seen(True, tuple(problems), seconds)


def _full_disk(run: Run, rng: random.Random) -> Seen:
    processes, hit = _running(run, rng)
    if not hit:
        return Seen(False)
    began = time.monotonic()
    # What it prints may grow, and what it has to leave behind may not.
    limit = rng.choice([4096, 8192, 16384])
    resource.prlimit(processes[0].pid, resource.RLIMIT_FSIZE, (limit, limit))
    code = 2 if processes.wait_first(LIMIT_S) == 2 else 1
    return _ends_with(run, processes, began, code, "cannot be written")


def _read_only(run: Run, rng: random.Random) -> Seen:
    processes = run.start(json.dumps(["obey_permissions", {}]))
    processes.sleep(rng.uniform(0.0, run.usual_seconds))
    if not processes.are_alive():
        return Seen(False)
    began = time.monotonic()
    run.directory.mkdir(exist_ok=True)
    run.directory.chmod(0o555)
    try:
        code = 2 if processes.wait_first(LIMIT_S) == 2 else 1
        return _ends_with(run, processes, began, code, "cannot be written")
    finally:
        run.directory.chmod(0o755)


def _nan_shard(run: Run, rng: random.Random) -> Seen:
    # The next step: with what makes it in the graph, the sums of good steps are rounded otherwise.
    fault = ["nan_in_shard", {"step": run.first_step(), "shard": rng.randrange(2)}]
    processes = run.start(json.dumps(fault))
    # Its graph is built there, which takes long.
    processes.have_met(run.patience)
    began = time.monotonic()
    processes.wait_first(LIMIT_S)
    words = "not finite" if "not finite" in processes[0].errors() else "is nan"
    return _ends_with(run, processes, began, 1, words)


def _damage(how: str) -> Callable[[Run, random.Random], Seen]:
    def act(run: Run, rng: random.Random) -> Seen:
        newest = run.newest()
        assert newest is not None
        backup = shutil.copytree(run.directory, run.scratch / "backup")
        try:
            files = sorted(run.directory.glob(f"{newest}.*"))
            if how == "of another run":
                # What was killed before the manifest knew it is told from others by nothing.
                if not run.is_noted(newest):
                    return Seen(False)
                run.foreign(newest)
            else:
                _damage_somewhere(rng.choice(files), how, rng)
            return _is_refused_and_skipped(run, newest, backup)
        finally:
            shutil.rmtree(backup)

    return act


def _is_refused_and_skipped(run: Run, newest: str, backup: Path) -> Seen:
    # What earlier kills left half written goes at each start.
    remove_leftovers(str(run.directory))
    before = run.contents()
    began = time.monotonic()
    seen = _ends_with(run, run.start(), began, 2, f"{newest}, is damaged: ")
    if not seen.hit:
        return Seen(True, (f"{newest} was not found to be damaged",))
    problems = list(seen.problems)
    if run.contents() != before:
        problems.append("something was changed")
    processes = run.start(NONE, "--skip_damaged_checkpoint")
    if run.has_older(newest):
        problems += processes.all_end_well(run.patience)
        aside = {path.name for path in (run.directory / "damaged").glob("*")}
        if not any(name.startswith(newest) for name in aside):
            problems.append(f"{newest} was not put aside: {aside}")
        shutil.rmtree(run.directory / "damaged", ignore_errors=True)
    else:
        problems += _ends_with(run, processes, time.monotonic(), 2, "No older one").problems
        shutil.rmtree(run.directory)
        shutil.copytree(backup, run.directory)
    return Seen(True, tuple(problems), seen.seconds)


def _damage_somewhere(file: Path, how: str, rng: random.Random) -> None:
    damage(file, how, rng.randrange(1, max(2, file.stat().st_size)))


def _state_file(run: Run, rng: random.Random) -> Seen:
    state = run.directory / "checkpoint"
    _damage_somewhere(state, rng.choice(["gone", "emptied", "truncated"]), rng)
    return Seen(True, run.start().all_end_well(run.patience))


def _other_config(run: Run, rng: random.Random) -> Seen:
    remove_leftovers(str(run.directory))
    before = run.contents()
    began = time.monotonic()
    processes = run.start(config=settings.other_config(run.config))
    seen = _ends_with(run, processes, began, 2, "made by another configuration")
    if run.contents() != before:
        return seen._replace(problems=(*seen.problems, "something was changed"))
    return seen


def _lost(who: int, number: int) -> Callable[[Run, random.Random], Seen]:
    """A process of several is killed, or stands still for good."""

    def act(run: Run, rng: random.Random) -> Seen:
        processes = run.start()
        if not processes.have_met(60):
            ended = processes.wait_first(run.patience)
            problems = () if ended == 0 else (f"never met: {processes[0].errors()[-500:]}",)
            processes.kill_all()
            return Seen(bool(problems), problems)
        processes.sleep(rng.uniform(0, run.usual_seconds / 3))
        if not processes.are_alive():
            processes.kill_all()
            return Seen(False)
        began = time.monotonic()
        processes[who].send(number)
        other = processes[1 - who]
        status = other.wait(LIMIT_S)
        seconds = time.monotonic() - began
        problems = []
        if status == 0:
            processes.kill_all()
            return Seen(False)
        if status != 75:
            problems.append(
                f"the other ended with {status} in {seconds:.0f} s: {other.errors()[-500:]}"
            )
        elif f" {who} (" not in other.errors():
            problems.append(f"does not name {who}: {other.errors()[-500:]}")
        processes.kill_all()
        return Seen(True, tuple(problems), seconds)

    return act


def _nan_can_hit(runtime: settings.Runtime, config: str) -> bool:
    # SyncReplicasOptimizer takes no gradients through an operation that it does not know, and where
    # each process builds the graph, it is in the graph of process 0 alone.
    return config != "sync replicas" and (runtime.num_processes == 1 or bool(runtime.devices))


def _on_checkpoint(name: str, how: str) -> Fault:
    return Fault(name, _damage(how), damages=True, needs_checkpoint=True, afterwards=True)


OF_ANOTHER_CONFIG = (
    "checkpoint of another run under its name",
    "checkpoint of another configuration",
)

FAULTS: tuple[Fault, ...] = (
    Fault("SIGKILL at a random moment", _kill_at_random),
    Fault("SIGKILL at a chosen moment", _kill_at_moment),
    Fault("SIGTERM", _signal(signal.SIGTERM)),
    Fault("SIGINT", _signal(signal.SIGINT)),
    Fault("SIGSTOP, then SIGCONT", _stand_still),
    Fault("busy machine", _busy),
    Fault("clock set back", _clock_set_back),
    Fault("full disk", _full_disk),
    Fault("read-only directory", _read_only),
    Fault("NaN in a shard", _nan_shard, can_hit=_nan_can_hit),
    _on_checkpoint("truncated checkpoint file", "truncated"),
    _on_checkpoint("emptied checkpoint file", "emptied"),
    _on_checkpoint("missing checkpoint file", "gone"),
    _on_checkpoint("flipped bit in a checkpoint file", "one bit"),
    _on_checkpoint(OF_ANOTHER_CONFIG[0], "of another run"),
    Fault("damaged state file", _state_file, needs_checkpoint=True, afterwards=True),
    Fault(OF_ANOTHER_CONFIG[1], _other_config, needs_checkpoint=True),
    Fault("worker killed", _lost(1, signal.SIGKILL), processes=(2,)),
    Fault("chief killed", _lost(0, signal.SIGKILL), processes=(2,)),
    Fault("worker frozen", _lost(1, signal.SIGSTOP), processes=(2,)),
    Fault("chief frozen", _lost(0, signal.SIGSTOP), processes=(2,)),
)


def faults_for(runtime: settings.Runtime, config: str) -> list[Fault]:
    """The faults that can hit the runs of a runtime and a config."""
    return [
        fault
        for fault in FAULTS
        if runtime.num_processes in fault.processes and fault.can_hit(runtime, config)
    ]
