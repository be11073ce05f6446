"""The command line of an exported step."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from .files import as_savable, check_free, dtype_of, read_manifest
from .jax_devices import StepError, describe, exchange_at, make_cpu_devices
from .step import Fetched, Input, Step, inputs_of

# Steps that wait on the devices while the host reads the fetches of an earlier one.
_AHEAD = 2


def main(argv: Sequence[str], folder: str, meet_at: Callable[..., Any] | None = None) -> int:
    """Runs an exported step as the command line asks; returns the exit code.

    Args:
      argv: the arguments of the command line.
      folder: the folder of the step to run if the arguments name none.
      meet_at: the function with which several processes find each other, from the folder's copy of
        `mtf_gradsync.runtimes.processes.meeting`. If it is None, jax alone joins the processes.

    Returns:
      0 if there was no error; 2 after an error, which has been printed.
    """
    flags = parser(folder).parse_args(argv)
    try:
        _run(flags, meet_at)
    except StepError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    return 0


def parser(folder: str) -> argparse.ArgumentParser:
    """Returns the parser of the command line; `folder` is the step to run if users name none."""
    made = argparse.ArgumentParser(
        prog="run.py", description="Runs training steps that mtf_gradsync exported."
    )
    add = made.add_argument
    add("folder", nargs="?", default=folder, help="the exported step; default: that of run.py")
    add("--steps", type=int, help="default: as many as --inputs has batches for, or 1")
    add("--inputs", metavar="FILE", help=".npz with an array for each input, a step a row")
    add("--repeat", action="store_true", help="begin --inputs again when they are used up")
    add("--random-inputs", action="store_true", help="make up inputs, to see how fast it is")
    add("--below", type=int, default=2, help="made-up whole numbers are below this; default 2")
    add("--fetches", metavar="FILE", help="write what the steps returned to this .npz")
    add("--save", metavar="FOLDER", help="write the new values, as a folder to go on from")
    add("--replace", action="store_true", help="let --save take the place of a folder")
    add("--time", action="store_true", help="say how long a step takes")
    add("--list", action="store_true", help="say what the step reads and returns, and end")
    add("--platform", help="cpu, gpu (cuda, rocm) or tpu; default: jax's choice")
    group = made.add_argument_group("several processes, which all run this command")
    add = group.add_argument
    add("--coordinator", metavar="HOST:PORT", help="of process 0, for the others to find")
    add("--num_processes", type=int)
    add("--process_id", type=int)
    add("--distributed", action="store_true", help="let jax find these by itself")
    add("--cpu_devices", type=int, help="CPU devices of this process")
    return made


def _run(flags: argparse.Namespace, meet_at: Callable[..., Any] | None) -> None:
    manifest = read_manifest(Path(flags.folder))
    if flags.list:
        _print_contents(manifest)
        return
    count, batches = _batches(flags, inputs_of(manifest), manifest["steps"])
    if flags.save:
        check_free(Path(flags.save), flags.replace)
    _start_jax(flags, manifest["cores"], count, meet_at)
    begun = time.perf_counter()
    step = Step.load(flags.folder, platform=flags.platform)
    speaks = 0 in step.cores
    say: Callable[[str], None] = print if speaks else lambda text: None
    say(f"{describe(step.devices)}; loaded in {time.perf_counter() - begun:.1f} s")
    returned: list[dict[str, np.ndarray]] = []
    waiting: list[tuple[int, Fetched]] = []
    first_done = 0.0

    def finish() -> None:
        number, fetched = waiting.pop(0)
        values = dict(fetched)
        say(" ".join([f"step {number}", *(f"{n} {_as_text(v)}" for n, v in values.items())]))
        if flags.fetches:
            returned.append(values)

    begun = time.perf_counter()
    for made, inputs in zip(range(count), batches):
        waiting.append((step.steps + 1, step(inputs)))
        if made == 0:
            step.wait()
            first_done = time.perf_counter()
        if len(waiting) > _AHEAD:
            finish()
    while waiting:
        finish()
    step.wait()
    if flags.time and count:
        say(f"first step {(first_done - begun) * 1e3:.2f} ms")
        if count > 1:
            each = (time.perf_counter() - first_done) / (count - 1)
            say(f"each of the other {count - 1} steps {each * 1e3:.2f} ms")
    if flags.fetches and speaks:
        names = returned[0] if returned else {}
        arrays: dict[str, Any] = {n: np.stack([as_savable(r[n]) for r in returned]) for n in names}
        np.savez(flags.fetches, **arrays)
    if flags.save:
        step.save(flags.save, flags.replace)
        say(f"saved after step {step.steps}: {flags.save}")


# Seconds to wait for the other processes, as jax does.
_TIMEOUT = 300.0


def _start_jax(
    flags: argparse.Namespace, cores: int, steps: int, meet_at: Callable[..., Any] | None
) -> None:
    """Asks jax for CPU devices; joins the other processes if the flags are for several processes.

    Args:
      flags: the parsed command line.
      cores: how many cores the step has.
      steps: how many steps are to be made; it has to be equal in all processes.
      meet_at: the function with which several processes find each other; None if jax alone joins
        them.
    """
    processes = flags.num_processes or 1
    if flags.cpu_devices or not flags.distributed:
        make_cpu_devices(flags.cpu_devices or -(-cores // processes))
    if not (flags.coordinator or flags.distributed or processes > 1):
        return
    try:
        import jax
    except ImportError:
        return  # find_devices raises an error for this
    with contextlib.suppress(AttributeError):
        # Older versions have no default for how CPU devices exchange values.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    job = flags.coordinator, flags.num_processes, flags.process_id
    ends = signal.getsignal(signal.SIGTERM)
    try:
        with contextlib.ExitStack() as stack:
            bind_address = None
            if meet_at is not None and None not in job:
                if not 0 <= flags.process_id < processes:
                    raise ValueError(
                        f"--process_id must be between 0 and {processes - 1}; got "
                        f"{flags.process_id}."
                    )
                same = {"--num_processes": processes, "jax": jax.__version__, "steps": steps}
                met = meet_at(*job, same, _TIMEOUT)
                for connection in met.peers.values():
                    stack.callback(connection.close)
                bind_address = met.bind_address
                if met.loopback:
                    exchange_at(met.loopback)
            jax.distributed.initialize(*job, coordinator_bind_address=bind_address)
        signal.signal(signal.SIGTERM, ends or signal.SIG_DFL)  # jax sets a handler that ignores it
    except (RuntimeError, ValueError) as error:
        raise StepError(
            f"This process cannot join the others: {' '.join(str(error).split())} Give each "
            "process --coordinator, --num_processes and --process_id."
        ) from error


def _batches(
    flags: argparse.Namespace, inputs: Sequence[Input], seed: int
) -> tuple[int, Iterator[dict[str, Any]]]:
    """Returns the number of steps to make, and an iterator over the inputs of each step.

    `flags`, the parsed command line, says whether the inputs are read from a file or made up. The
    iterator yields, for each step, a dict from the names of inputs to arrays. `inputs` are all
    inputs that the step reads, and `seed` is the seed of made-up numbers. Raises a StepError if the
    step needs inputs and the flags say nothing about them.
    """
    needed = [i for i in inputs if i.default is None]
    if flags.inputs:
        return _from_file(flags, inputs)
    count = 1 if flags.steps is None else flags.steps
    if not needed:
        return count, ({} for _ in range(count))
    if not flags.random_inputs:
        raise StepError(
            f"The step reads {'; '.join(map(str, needed))}. Give them with --inputs FILE.npz, "
            "which has one more dimension in front for the steps, or --random-inputs."
        )
    # Made once: making them would take longer than a small step.
    made = _random_inputs(needed, flags.below, np.random.RandomState(seed))
    return count, (made for _ in range(count))


def _random_inputs(
    needed: Sequence[Input], below: int, random: np.random.RandomState
) -> dict[str, np.ndarray]:
    found: dict[str, Any] = {}
    for i in needed:
        if i.dtype.kind in "iub":
            found[i.name] = random.randint(0, 2 if i.dtype.kind == "b" else below, i.shape)
        else:
            found[i.name] = random.uniform(size=i.shape)
        found[i.name] = np.asarray(found[i.name]).astype(i.dtype)
    return found


def _from_file(
    flags: argparse.Namespace, inputs: Sequence[Input]
) -> tuple[int, Iterator[dict[str, Any]]]:
    try:
        with np.load(flags.inputs, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError) as error:
        raise StepError(f"{flags.inputs} cannot be read as an .npz file: {error}") from error
    lengths = {name: len(a) if a.ndim else 0 for name, a in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise StepError(
            f"The arrays of {flags.inputs} must have as many rows as each other, one for each "
            f"step; they have {lengths}."
        )
    there = next(iter(lengths.values()))
    count = there if flags.steps is None else flags.steps
    if count > there and not (flags.repeat and there):
        raise StepError(
            f"{flags.inputs} has inputs for {there} steps of {count}. Give more, or --repeat."
        )
    for i in inputs:
        # numpy's files hold the bits of dtypes that numpy does not know.
        if i.name in arrays and i.dtype.kind == "V":
            bits = arrays[i.name].dtype
            if bits.kind == "u" and bits.itemsize == i.dtype.itemsize:
                arrays[i.name] = arrays[i.name].view(i.dtype)
    return count, ({n: a[k % there] for n, a in arrays.items()} for k in range(count))


def _print_contents(manifest: dict[str, Any]) -> None:
    print(f"{manifest['cores']} cores, mesh {manifest['mesh']}, after step {manifest['steps']}")
    for p in manifest["parameters"]:
        rows = max(p["rows"]) + 1
        note = f", {rows} different on the cores" if rows > 1 else ""
        note += {"kept": ", kept in the folder", "step": ", the step counter"}.get(
            p.get("default"), ""
        )
        print(f"{p['kind']} {p['name']}: {dtype_of(p['dtype']).name}{p['shape']}{note}")
    for name in manifest["fetches"]:
        result = next(r for r in manifest["results"] if name in r["fetches"])
        print(f"fetch {name}: {result['dtype']}{result['shape']}")


def _as_text(value: np.ndarray) -> str:
    if np.ndim(value) == 0:
        return str(value)
    return np.array2string(np.asarray(value), threshold=8, separator=",").replace("\n", "")
