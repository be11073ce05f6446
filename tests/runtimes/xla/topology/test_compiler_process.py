"""What is said of a compiler that crashed."""

import contextlib
import subprocess
from types import SimpleNamespace

import pytest

from mtf_gradsync.runtimes.xla.topology import compiler_process
from mtf_gradsync.runtimes.xla.topology.compiler_process import (
    CompilerDiedError,
    compile_in_process,
    reason_in,
)

CHECK_FAILED = """\
WARNING: could not determine TPU accelerator type.
F1125 18:06:47.356199   21985 fusion_emitter.cc:6395] Check failed: bounds.size() == 1 (3 vs. 1)
strides: (1, 64, 1)
F1125 18:06:47.357070   21986 fusion_emitter.cc:6395] Check failed: another thread
*** Check failure stack trace: ***
    @     0x7f993fc2ff84  (unknown)
https://symbolize.stripped_domain/r/?trace=7f993fc2ff84,7f993fc2ff37&map=
E1125 18:06:47.453692   21987 process_state.cc:808] RAW: Raising signal 6 with default behavior
"""
SEGMENTATION_FAULT = """\
WARNING: could not determine TPU accelerator type.
*** SIGSEGV (@0x0), see go/stacktraces#s15 received by PID 7 (TID 9) on cpu 1; stack trace: ***
PC: @     0x7f993fc2ff84  (unknown)  (unknown)
    @     0x7f993fc2ff38  (unknown)
E1125 18:06:47.453692   21987 process_state.cc:808] RAW: Raising signal 11 with default behavior
"""


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (CHECK_FAILED, "fusion_emitter.cc:6395] Check failed: bounds.size() == 1 (3 vs. 1)"),
        (SEGMENTATION_FAULT, SEGMENTATION_FAULT.splitlines()[1]),
        ("Traceback:\n  File one\nValueError: no such device\n\n", "ValueError: no such device"),
        ("", ""),
    ],
)
def test_the_reason_is_what_ended_it(output, reason):
    assert reason_in(output) == reason


def test_the_error_has_status_and_reason(monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"print({CHECK_FAILED!r})\nraise SystemExit(3)")
    monkeypatch.setattr(compiler_process.compiler_script, "__file__", str(script))
    with pytest.raises(CompilerDiedError, match=r"status 3 and no answer. It printed: fusion_em"):
        compile_in_process(str(tmp_path), None, "v5e:2x2", 0)


def test_an_interrupt_while_it_is_started_ends_it(monkeypatch, tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text("import time; time.sleep(120)")
    monkeypatch.setattr(compiler_process, "private", SimpleNamespace(__file__=str(slow)))
    start, started = subprocess.Popen, []

    def start_interrupted(*given, **named):
        started.append(start(*given, **named))
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", start_interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        compile_in_process(str(tmp_path), None, "v5e:2x2", 0)
    with started[0] as process:
        try:
            assert process.wait(60) == 1
        finally:
            process.kill()
