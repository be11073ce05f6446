"""Some steps of a run, recorded: where their time goes. Nothing of the run changes."""

from __future__ import annotations

import collections
import tempfile
from typing import Any, Callable, Sequence

from mtf_gradsync._private.libraries import tf
from mtf_gradsync._signals import Interruption
from mtf_gradsync.runtimes.errors import SKIP_FLAG, TrainingError
from mtf_gradsync.runtimes.saving import check_configuration, describe
from mtf_gradsync.runtimes.starting import Start, choose_checkpoint
from mtf_gradsync.session import session_config
from mtf_gradsync.timelines import Timeline, TimelineError
from mtf_gradsync.train.config import RunConfig
from mtf_gradsync.train.model import resolve_job
from mtf_gradsync.train.run import ALONE, NOTHING, Accepted, Part, training_graph
from mtf_gradsync.train.runner import Runner, choose_runtime

# It moves files of the run, which a timeline may not.
_SKIP_SETTING = f"`mtf-gradsync train {SKIP_FLAG}`"


class TimedRun:
    """Records some steps of a run, called as `run` is.

    It makes `warm_up` steps before, at least one: the first step compiles.
    """

    def __init__(self, steps: int, warm_up: int):
        self._steps, self._warm_up = steps, warm_up

    def __call__(
        self,
        config: RunConfig,
        model_dir: str | None = None,
        say: Callable[[str], None] = print,
        accepted: Accepted = NOTHING,
        part: Part = ALONE,
    ) -> Timeline:
        """Records steps after the newest checkpoint of model_dir; None begins with new values.

        Raises:
          ConfigError: if a setting cannot work, or the checkpoint is damaged or not accepted.
          TrainingError: if a step fails, or nothing can be recorded.
        """
        runtime = choose_runtime(config, part.target)
        job = resolve_job(config)._replace(reports=config.reports, noise_scale=config.noise_scale)
        session = session_config(num_cpu_devices=job.model.mesh.num_cpu_devices)
        checkpoints = part.checkpoint_dir or model_dir
        start = Start()
        if checkpoints is not None:
            start = part.chosen(lambda: choose_checkpoint(checkpoints, False, say, _SKIP_SETTING))
        say(f"steps run on {runtime}")
        with Interruption() as stop, tf.Graph().as_default(), job.batches() as batches:
            _, _, make_runner = training_graph(job, batches, runtime)
            if start.path:
                say(f"from {start.path}")
                found = check_configuration(start.path, tf.global_variables(), accepted.differences)
                if any(found):
                    say(f"which is of another configuration:\n{describe(found)}")
                new = (name for name in found.new if name not in found.adapted)
                start = start._replace(new=tuple(new))
            with tempfile.TemporaryDirectory() as own:
                with make_runner(own, start, config, session) as runner:
                    try:
                        return self._recorded(runner, stop)
                    except (TimelineError, tf.errors.OpError) as error:
                        raise TrainingError(str(error)) from error

    def _recorded(self, runner: Runner, stop: Interruption) -> Timeline:
        before = _make(runner, self._warm_up, stop)
        timeline = runner.timeline()
        with timeline:
            made = _make(runner, self._steps, stop)
        timeline.mark_updates([*before[-1:], *made])
        return timeline


def _make(runner: Runner, count: int, stop: Interruption) -> Sequence[int]:
    """Makes steps as training does; returns the updates made by each, where they are counted."""
    updates: list[int] = []
    pending: collections.deque[Callable[[], dict[str, Any]]] = collections.deque()

    def look() -> None:
        values = pending.popleft()()
        if "update_step" in values:
            updates.append(int(values["update_step"]))

    for _ in range(count):
        stop.check()
        pending.append(runner.dispatch())
        while len(pending) > runner.steps_ahead:
            look()
    while pending:
        look()
    return updates
