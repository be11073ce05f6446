"""Joins several processes, whose devices together make one mesh."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
from typing import Any, Callable, Mapping, TypeVar

from mtf_gradsync.runtimes._private.jax import (
    backends_are_initialized,
    detected_cluster,
    distributed_is_initialized,
    use_cpu_collectives,
)
from mtf_gradsync.runtimes._signals import preserve_handler, signal_of
from mtf_gradsync.runtimes.processes.meeting import MeetingAddress, meet_at
from mtf_gradsync.runtimes.processes.members import Member, ProcessesError, all_given
from mtf_gradsync.runtimes.processes.watchdog import Alarm, Membership, Watchdog
from mtf_gradsync.runtimes.xla import gathering
from mtf_gradsync.runtimes.xla.core_devices import (
    check_jaxlib_for_processes,
    leave_absent_tpus_alone,
)
from mtf_gradsync.runtimes.xla.gathering import may_be_from_another_process
from mtf_gradsync.runtimes.xla.installed import check_installed
from mtf_gradsync.runtimes.xla.runner.jax_devices import exchange_at, make_cpu_devices

_FRAMES = 5
# The signals that faulthandler handles, by what it writes first.
_FATAL = {
    "Aborted": "SIGABRT",
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}


def alarm_before_abort() -> tuple[Alarm | None, Callable[[], None]]:
    """Makes a crash of this process known to its watchdog before the process ends.

    After this call, a fatal signal (SIGSEGV or SIGABRT, for example) does not end this process at
    once, but some seconds later. In these seconds the watchdog can tell the other processes.

    Returns:
      Two values. The first is an `Alarm`, from which the watchdog learns of a crash; None if the
      program uses faulthandler itself, or if the system is not POSIX. The second is a function that
      restores the previous signal handlers.
    """
    try:
        library = ctypes.CDLL(None)
        sleep, set_handler = library.sleep, library.signal
    except (OSError, AttributeError):  # no POSIX
        return None, lambda: None
    # An instruction that faulted runs again when the handler returns, so the handler may be called
    # only once. If C's library has no such handlers, only `abort` waits.
    set_once = getattr(library, "sysv_signal", None)
    is_taken = faulthandler.is_enabled()
    # The handler's argument is the signal's number: the C function sleeps as many seconds, 4 to 11.
    # Unlike Python code, it may be called whatever the thread was doing.
    handler = ctypes.cast(sleep, ctypes.c_void_p)
    undo = contextlib.ExitStack()
    for name in _FATAL.values():
        number = getattr(signal, name)
        setter = set_handler if number == signal.SIGABRT else set_once
        if setter is None or (is_taken and setter is set_once):  # faulthandler keeps what it found
            continue
        undo.enter_context(preserve_handler(number))
        setter.restype, setter.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
        setter(number, handler)
    if is_taken:
        return None, undo.close
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    # faulthandler's handlers then call the previous handlers, which sleep.
    faulthandler.enable(writing)
    undo.callback(os.close, writing)
    undo.callback(faulthandler.disable)
    return Alarm(reading, _describe_crash), undo.close


def _describe_crash(traceback: str) -> str:
    """Returns a text about a crash, made from the traceback that faulthandler wrote.

    The text says which signal ended the process, the versions of jax and jaxlib, and which Python
    code the main thread was running.
    """
    import jax
    import jaxlib

    first = traceback.partition("\n")[0].rpartition(": ")[2]
    name = _FATAL.get(first.strip(), "a fatal signal")
    # The newest thread is listed first, and the main thread, which makes the steps, last.
    main = traceback.rpartition("most recent call first")[2]
    own = [line.strip() for line in main.splitlines() if line.startswith("  File ")][:_FRAMES]
    where = f" The main thread stood at {'; '.join(own)}." if own else ""
    wrote = ", whose own message about the error is just before" if name == "SIGABRT" else ""
    return (
        f"{name} inside jax {jax.__version__}, jaxlib {jaxlib.__version__} or a library of "
        f"theirs, such as gloo{wrote}; it is not known which collective was running.{where}"
    )


_Result = TypeVar("_Result")


class Processes(Membership):
    """This process as a member of a job. Use it as a context manager around all work on the mesh.

    If an exception leaves the ``with`` block, the other processes of the job end, too. The other
    processes also end if this process dies. When the interpreter exits without an error, `close` is
    called.

    Attributes:
      process_index: this process's number, from 0.
      num_processes: the number of processes.
    """

    def __init__(
        self, me: Member, num_processes: int, watchdog: Watchdog, undo: Callable[[], None]
    ):
        self.process_index = me.index
        self.num_processes = num_processes
        self._undo = undo
        self._exit_code: int | None = None
        # Registered last, so that it runs before jax's own function, which waits for all processes.
        super().__init__(watchdog)

    def in_turn(self, work: Callable[[], _Result]) -> _Result:
        """Calls a function on process 0, and then on all other processes at the same time.

        Args:
          work: the function; all processes have to call this method.

        Returns:
          The function's result on this process.

        Raises:
          ProcessesError: on other processes, when the function failed on process 0. Process 0
            raises the function's own error.
        """
        if self.process_index == 0:
            return gathering.call_on_all_processes(work)
        gathering.call_on_all_processes(lambda: None)
        return work()

    def check_equal(self, what: str, value: str, advice: str = "") -> None:
        """Checks that a short text is the same on all processes, which all have to call this.

        Args:
          what: the name of the text, for the error.
          value: the text of this process.
          advice: the error's last sentence.

        Raises:
          ProcessesError: on every process, when the texts differ. The error names the values.
        """
        gathering.check_equal(what, value, advice)

    def _leave(self) -> None:
        import jax

        super()._leave()
        jax.distributed.shutdown()
        self._undo()

    def _may_be_caused_by_loss(self, error: BaseException) -> bool:
        return may_be_from_another_process(error)

    def _fail(self, error: BaseException) -> None:
        if not self._closed:
            code = error.code if isinstance(error, SystemExit) else 1
            if isinstance(error, KeyboardInterrupt):
                code = 128 + signal_of(error)
            self._exit_code = code if isinstance(code, int) else 1
        super()._fail(error)

    def _at_exit(self) -> None:
        super()._at_exit()
        if self._exit_code is not None:
            # jax would wait for processes that have ended.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._exit_code)


def start_processes(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    cpu_devices: int | None = None,
    timeout: float = 300.0,
    silence: float = 20.0,
    settings: Mapping[str, Any] | None = None,
) -> Processes:
    """Joins this process with the others of its job; returns when all have started.

    Call this function in every process of the job, before anything else uses jax. Without the first
    three arguments, jax finds the addresses and numbers of the processes from the cluster that they
    run in: SLURM, Open MPI, Kubernetes or Cloud TPU.

    After the call, a thread of each process watches over the other processes. A process counts as
    lost when it dies, or sends no heartbeat for `silence` seconds. Then all other processes write
    an error that names the lost process, and end with the exit code `LOST_PROCESS_EXIT_CODE`.

    Args:
      coordinator: address "host:port" at which the other processes can reach process 0. The port
        may be any free port of the machine of process 0.
      num_processes: how many processes there are.
      process_id: this process's number, from 0.
      cpu_devices: the number of CPU devices that this process makes; default the number in
        XLA_FLAGS, or 1.
      timeout: seconds to wait for the other processes.
      silence: seconds without a heartbeat after which a process counts as lost.
      settings: settings that have to be equal in all processes, such as the number of steps, by the
        names that users know. Values are numbers, texts, or other things that JSON can hold.

    Returns:
      A context manager; close it when the work is done.

    Raises:
      XlaMissingError: when jax is not installed.
      ProcessesError: when jax has begun already, when the version of jax cannot have CPU devices in
        several processes, when the processes cannot meet, or when their settings differ.
      ValueError: when arguments are missing or impossible, or when jax finds no cluster.
    """
    check_installed("jax", "jaxlib")
    if distributed_is_initialized():
        raise ProcessesError(
            "start_processes can be called only once in a process; this process has called it."
        )
    if backends_are_initialized():
        raise ProcessesError(
            "jax has begun already, without the other processes of the job. Call start_processes "
            "before anything that uses jax's devices, such as mtf_gradsync.xla.session."
        )
    if cpu_devices is not None:
        check_jaxlib_for_processes()
    end = time.monotonic() + timeout
    coordinator, num_processes, process_id, local_device_ids = _job_of(
        coordinator, num_processes, process_id, timeout
    )
    if cpu_devices is not None:
        make_cpu_devices(cpu_devices, replace=True)
    use_cpu_collectives("gloo")
    leave_absent_tpus_alone()
    import jax

    facts = {
        "num_processes": num_processes,
        "jax": jax.__version__,
        "cpu_devices": cpu_devices,
        **(settings or {}),
    }
    left = end - time.monotonic()
    met = meet_at(coordinator, num_processes, process_id, facts, left)
    if met.loopback:
        exchange_at(met.loopback)
    alarm, undo = alarm_before_abort()
    watchdog = Watchdog(met.me, met.peers, silence, alarm)
    processes = Processes(met.me, num_processes, watchdog, undo)
    try:
        with preserve_handler(signal.SIGTERM):  # jax sets a handler that ignores it
            jax.distributed.initialize(
                coordinator,
                num_processes,
                process_id,
                local_device_ids,
                initialization_timeout=max(30, int(end - time.monotonic())),
                coordinator_bind_address=met.bind_address,
            )
    except BaseException as error:
        processes.__exit__(type(error), error, error.__traceback__)
        raise
    return processes


def _job_of(
    coordinator: str | None, num_processes: int | None, process_id: int | None, timeout: float
) -> tuple[str, int, int, list[int] | None]:
    """Returns the job that the arguments describe, or the job that jax detects if all are None.

    `coordinator` is the address "host:port" of process 0, `num_processes` is the number of
    processes, and `process_id` is this process's number. The result has these three, and the
    numbers of the machine's devices that this process uses; None for all devices. To detect a job
    on a Cloud TPU, jax waits up to `timeout` seconds for the address of process 0.

    Raises a ValueError if only some of the first three arguments are given, if the arguments are
    impossible, or if jax detects no job.
    """
    devices = None
    job = dict(coordinator=coordinator, num_processes=num_processes, process_id=process_id)
    if not all_given("start_processes", "in a cluster that jax knows", **job):
        coordinator, num_processes, process_id, devices = detected_cluster(timeout)
    if coordinator is None or num_processes is None or process_id is None:
        raise ValueError(
            "jax finds no cluster (SLURM, Open MPI, Kubernetes or Cloud TPU) in which this process "
            "runs. Give coordinator, num_processes and process_id."
        )
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"process_id must be between 0 and {num_processes - 1} in a job of "
            f"{num_processes} processes, got {process_id}."
        )
    MeetingAddress.of(coordinator, "coordinator")
    return coordinator, num_processes, process_id, devices
