"""Signals that end work at once, and are not lost."""

import concurrent.futures
import faulthandler
import os
import signal
import sys
import time

import pytest

from mtf_gradsync.runtimes import _signals
from mtf_gradsync.runtimes._signals import Interruption, StopSignal, signal_of
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
    assert signal_of(KeyboardInterrupt("the user's own words")) == signal.SIGINT


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_begins_with_a_signal_that_was_dropped_before_it():
    with Interruption():
        with StopSignal() as stop:
            assert stop.received is None
        interrupted_and_dropped(signal.SIGINT)
        with StopSignal() as stop:
            assert stop.received == signal.SIGINT


def test_an_error_that_a_library_raises_in_place_of_the_interrupt_is_replaced_by_it():
    def interrupted_in_a_library():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except:  # noqa: E722
            raise TypeError("Cannot find maximum value") from None

    with pytest.raises(KeyboardInterrupt) as raised, Interruption():
        interrupted_in_a_library()
    assert signal_of(raised.value) == signal.SIGTERM
    assert isinstance(raised.value.__cause__, TypeError)


def test_an_interrupt_that_python_drops_is_raised_again():
    def work():
        interrupted_and_dropped(signal.SIGTERM)
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt) as raised, Interruption():
        work()
    assert signal_of(raised.value) == signal.SIGTERM


def test_the_second_signal_of_a_loop_is_raised_again_if_python_drops_it(monkeypatch):
    monkeypatch.setattr(_signals, "_SAME_KEYSTROKE_SECONDS", 0.0)

    def work():
        os.kill(os.getpid(), signal.SIGINT)
        interrupted_and_dropped(signal.SIGTERM)
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt) as raised, StopSignal() as stop:
        work()
    assert signal_of(raised.value) == signal.SIGTERM
    assert stop.received == signal.SIGINT


def test_an_interrupt_that_python_drops_at_the_end_of_a_block_is_raised_by_the_block():
    before = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), Interruption():
        interrupted_and_dropped(signal.SIGINT)
    assert sys.unraisablehook is before
    time.sleep(0.1)  # and not once more


def test_a_dropped_interrupt_that_a_check_has_raised_is_not_raised_once_more():
    with Interruption() as stop:
        interrupted_and_dropped(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            stop.check()
        time.sleep(0.1)


def test_errors_without_a_signal_stay_as_they_are():
    with pytest.raises(TypeError), Interruption():
        raise TypeError("no signal")
