"""Signals that end work at once, and are not lost."""

import concurrent.futures
import faulthandler
import os
import signal

import pytest

from mtf_gradsync.runtimes._signals import Interruption, signal_of
from tests.tools.planning.machines import interrupted_and_dropped


def handlers():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_a_keyboard_interrupt_that_has_its_number(number):
    before = handlers()
    with pytest.raises(KeyboardInterrupt) as raised, Interruption() as stop:
        os.kill(os.getpid(), number)
    assert signal_of(raised.value) == stop.received == number
    assert handlers() == before


def test_handlers_of_c_code_are_restored_too(tmp_path):
    """Python does not know them: it takes the handler for the default one."""
    number, before = signal.SIGTERM, handlers()
    with open(tmp_path / "traceback", "w+") as file:
        faulthandler.register(number, file)
        try:
            with pytest.raises(KeyboardInterrupt), Interruption():
                os.kill(os.getpid(), number)
            with Interruption():
                pass
            os.kill(os.getpid(), number)
            file.seek(0)
            assert "test_handlers_of_c_code_are_restored_too" in file.read()
        finally:
            faulthandler.unregister(number)
    assert handlers() == before


def test_without_a_number_it_stands_for_ctrl_c():
    assert signal_of(KeyboardInterrupt()) == signal.SIGINT


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_the_garbage_collector_drops_is_raised_by_the_next_check():
    with Interruption() as stop:
        stop.check()
        interrupted_and_dropped(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            stop.check()


def test_outside_the_main_thread_nothing_is_changed():
    def entered():
        with Interruption():
            return handlers()

    with concurrent.futures.ThreadPoolExecutor(1) as other:
        assert other.submit(entered).result() == handlers()
