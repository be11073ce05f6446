"""Faults that a program does to itself, at moments that nobody outside can hit."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import threading
import time
from typing import Any, Callable

from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.runtimes import saving
from mtf_gradsync.tools.train import loop, train_graph
from mtf_gradsync.tools.train.metrics import MetricsFile

_PR_SET_SECUREBITS, _NO_ROOT = 28, 1 | 2


_set: Callable[[Any, str, Any], None] = setattr


def install(fault: str, set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Prepares this process for a fault.

    Args:
      fault: JSON: the name of a function below, and its arguments; "null" for none.
      set_attribute: replaces attributes of modules and classes.
    """
    global _set
    _set = set_attribute
    asked = json.loads(fault)
    if asked:
        name, arguments = asked
        _FAULTS[name](**arguments)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    _set(owner, name, make(getattr(owner, name)))


def _at_call(number: int, before: Callable[..., None]) -> Callable[[Any], Any]:
    """Calls `before` when a function is called for the n-th time, counted from 1."""
    calls = [0]

    def make(original: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                before(*args, **kwargs)
            return original(*args, **kwargs)

        return called

    return make


def kill_in_save(save: int, after: float) -> None:
    """A kill some seconds after a checkpoint begins to be written: in its write, or its rename."""

    def soon(*unused_args: Any, **unused_kwargs: Any) -> None:
        threading.Timer(after, _die).start()

    _replace(tf.train.Saver, "save", _at_call(save, soon))


def kill_before_state(save: int) -> None:
    """A kill between a checkpoint and its state file."""
    from tensorflow.python.checkpoint import checkpoint_management

    before = _at_call(save, lambda *a, **k: _die())
    _replace(checkpoint_management, "update_checkpoint_state_internal", before)


def kill_in_state(save: int) -> None:
    """A kill between the state file's contents and its rename."""
    from tensorflow.python.lib.io import file_io

    count = [0]

    def make(original: Any) -> Any:
        def renamed(old: Any, new: Any, *args: Any, **kwargs: Any) -> Any:
            count[0] += str(new).endswith("/checkpoint")
            if count[0] == save:
                _die()
            return original(old, new, *args, **kwargs)

        return renamed

    _replace(file_io, "rename", make)


def kill_in_cleanup(save: int) -> None:
    """A kill when the first file of an old checkpoint is gone, and others are still there."""
    from tensorflow.python.lib.io import file_io

    def make(original: Any) -> Any:
        calls = [0]

        def deleted(*args: Any, **kwargs: Any) -> Any:
            original(*args, **kwargs)
            calls[0] += 1
            if calls[0] >= save:
                _die()

        return deleted

    _replace(file_io, "delete_file", make)


def kill_before_manifest(save: int) -> None:
    """A kill between a checkpoint and the manifest."""
    _replace(saving, "add_to_manifest", _at_call(save, lambda *a, **k: _die()))


def kill_in_metrics(line: int) -> None:
    """A kill in the middle of a line of the metrics file."""

    def half(self: Any, step: int, **unused_values: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f'{{"step": {step}, "lo')
        _die()

    _replace(MetricsFile, "write", _at_call(line, half))


def set_clock_back(step: int, seconds: float) -> None:
    """The time of day jumps back in the middle of a run."""
    real, set_back = time.time, [False]

    def jump(*unused_args: Any) -> None:
        set_back[0] = True

    _replace(loop.TrainingLoop, "_make_step", _at_call(step, jump))
    time.time = lambda: real() - (seconds if set_back[0] else 0.0)


def obey_permissions() -> None:
    """Takes root's power over read-only directories from this process; others have none."""
    if os.geteuid() == 0:
        library = ctypes.CDLL(None, use_errno=True)
        library.prctl(_PR_SET_SECUREBITS, _NO_ROOT, 0, 0, 0)
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        if library.capset(header, (ctypes.c_uint32 * 6)()):
            raise OSError(ctypes.get_errno(), "capset")


def nan_in_shard(step: int, shard: int) -> None:
    """One shard's part of the first gradient is not a number, at one step."""

    def make(original: Any) -> Any:
        def made(optimizer: Any, rate: Any) -> Any:
            return _Poisoned(original(optimizer, rate), step, shard)

        return made

    _replace(train_graph, "_make_optimizer", make)


class _Poisoned(mtf.optimize.Optimizer):
    def __init__(self, opt: Any, step: int, shard: int):
        self._opt, self._step, self._shard = opt, step, shard

    def apply_grads(self, grads: Any, variables: Any) -> Any:
        first = _NotANumber(grads[0], self._step, self._shard).outputs[0]
        return self._opt.apply_grads([first, *grads[1:]], variables)


class _NotANumber(mtf.Operation):
    def __init__(self, grad: mtf.Tensor, step: int, shard: int):
        super().__init__([grad], name="not_a_number")
        self._outputs = [mtf.Tensor(self, grad.shape, grad.dtype)]
        self._step, self._shard = step, shard
        self._now = tf.train.get_global_step().read_value()

    def lower(self, lowering: mtf.Lowering) -> None:
        mesh_impl = lowering.mesh_impl(self)
        given = lowering.tensors[self.inputs[0]]
        is_lazy = isinstance(given, mtf.LazyAllreduceSum)

        def poison(values: tf.Tensor, coordinate: tf.Tensor) -> tf.Tensor:
            hit = tf.equal(coordinate, self._shard) & tf.equal(self._now, self._step)
            return values * tf.cast(tf.where(hit, float("nan"), 1.0), values.dtype)

        values = given.laid_out_input if is_lazy else given
        values = mesh_impl.slicewise(
            poison, values.to_laid_out_tensor(), mesh_impl.laid_out_pcoord(0)
        )
        if is_lazy:
            values = mtf.LazyAllreduceSum(mesh_impl, values, given.mesh_axes)
        lowering.set_tensor_lowering(self.outputs[0], values)


_FAULTS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        kill_in_save,
        kill_before_state,
        kill_in_state,
        kill_in_cleanup,
        kill_before_manifest,
        kill_in_metrics,
        set_clock_back,
        obey_permissions,
        nan_in_shard,
    )
}


def random_moment(rng: random.Random, saves: int) -> tuple[str, dict[str, Any]]:
    """A kill at a chosen moment.

    Args:
      rng: chooses.
      saves: how many checkpoints the run would write.

    Returns:
      What `install` takes, before JSON.
    """
    name = rng.choice(
        [
            "kill_in_save",
            "kill_before_state",
            "kill_in_state",
            "kill_in_cleanup",
            "kill_before_manifest",
            "kill_in_metrics",
        ]
    )
    if name == "kill_in_metrics":
        return name, {"line": rng.randint(1, 6)}
    save = {"save": rng.randint(1, max(1, saves))}
    return name, {**save, "after": rng.uniform(0, 0.02)} if name == "kill_in_save" else save
