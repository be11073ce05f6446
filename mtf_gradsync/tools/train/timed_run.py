"""Records where the time of a run's steps goes, for ``mtf-gradsync timeline``."""

from __future__ import annotations

import collections
import tempfile
from typing import Any, Callable

from mtf_gradsync.extension import tf
from mtf_gradsync.runtimes._common import SKIP_FLAG, TrainingError
from mtf_gradsync.runtimes._signals import Interruption
from mtf_gradsync.runtimes.starting import Start, choose_checkpoint
from mtf_gradsync.tools.timelines import Timeline, TimelineError
from mtf_gradsync.tools.train.config import RunConfig
from mtf_gradsync.tools.train.errors import raised_as
from mtf_gradsync.tools.train.resuming import adapt_start
from mtf_gradsync.tools.train.run import ALONE, RunRole
from mtf_gradsync.tools.train.runner import Runner, prepare, training_graph

# Named in errors in place of a flag of timeline, which may not move files of a run.
_SKIP_SETTING = f"`mtf-gradsync train {SKIP_FLAG}`"


def record_steps(
    config: RunConfig,
    model_dir: str | None = None,
    say: Callable[[str], None] = print,
    role: RunRole = ALONE,
    *,
    steps: int,
    warm_up: int,
    accepts_differences: bool = False,
) -> Timeline:
    """Makes steps after the newest checkpoint of model_dir, and returns a timeline of them.

    If `model_dir` is None, the steps begin with new initial values of the variables. No file in
    `model_dir` changes.

    Args:
      config: the settings of the run.
      model_dir: the directory of the run, or None.
      say: called with each line for the user.
      role: what this process does in a run of several processes.
      steps: the number of steps in the timeline.
      warm_up: the number of steps that are made before, and not recorded; at least 1, because the
        first step includes the compilation.
      accepts_differences: whether the steps may begin from a checkpoint of another configuration.

    Raises:
      ConfigError: if a setting cannot work, or the checkpoint is damaged or not accepted.
      TrainingError: if a step fails, or nothing can be recorded.
    """
    runtime, job, session = prepare(config, role.target)
    checkpoints = role.checkpoint_dir or model_dir
    start = Start()
    if checkpoints is not None:
        start = role.choose_start(lambda: choose_checkpoint(checkpoints, False, say, _SKIP_SETTING))
    say(f"steps run on {runtime}")
    job = job._replace(examples_before=start.step * job.model.batch_size)
    with Interruption() as stop, tf.Graph().as_default(), job.batches() as batches:
        _, _, make_runner = training_graph(job, batches, runtime, session)
        if start.path:
            say(f"from {start.path}")
            start = adapt_start(start, accepts_differences, say, "which is")
        with tempfile.TemporaryDirectory() as own:
            with make_runner(own, start, config) as runner:
                with raised_as(TrainingError, TimelineError, tf.errors.OpError):
                    before = _make_steps(runner, warm_up, stop)
                    timeline = runner.timeline()
                    with timeline:
                        made = _make_steps(runner, steps, stop)
                    timeline.mark_updates([*before[-1:], *made])
                    return timeline


def _make_steps(runner: Runner, count: int, stop: Interruption) -> list[int]:
    """Makes `count` steps as training does; returns how many updates were made by each step's end.

    The result is empty if no optimizer counts updates. `stop` is checked before each step, and
    raises KeyboardInterrupt if the process has received a signal.
    """
    pending: collections.deque[Callable[[], dict[str, Any]]] = collections.deque()
    made = []
    for _ in range(count):
        stop.check()
        pending.append(runner.dispatch())
        if len(pending) > runner.steps_ahead:
            made.append(pending.popleft()())
    made += [result() for result in pending]
    return [int(values["update_step"]) for values in made if "update_step" in values]
