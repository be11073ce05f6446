"""`mtf-gradsync plan --best`: finds the best division of a config, and writes it as gin lines."""

from __future__ import annotations

import contextlib
import itertools
import math
import types
from typing import Any, Callable, Iterator, Sequence

from mtf_gradsync.extension import (
    Wrapper,
    describe,
    mtf,
    settings_by_global_step,
    tf,
    without_frozen,
)
from mtf_gradsync.runtimes import simd
from mtf_gradsync.runtimes._common import ConfigError
from mtf_gradsync.runtimes.simd.program import compiled_only
from mtf_gradsync.tools import planning
from mtf_gradsync.tools._private.gin import bindings, bound, unread_bindings
from mtf_gradsync.tools.planning.best import (
    MOST_RULES,
    Best,
    Checked,
    Choice,
    all_choices,
    best_of,
    sort_key,
)
from mtf_gradsync.tools.planning.costs import Predictor, StepCosts, read_costs
from mtf_gradsync.tools.planning.machines import Machine, shapes_of
from mtf_gradsync.tools.planning.search import Candidate, rules_of, search
from mtf_gradsync.tools.planning.stacks import StackSettings
from mtf_gradsync.tools.train import gin_files
from mtf_gradsync.tools.train.config import RunConfig
from mtf_gradsync.tools.train.config_stack import (
    JOINS,
    MICROBATCHES,
    OUTER,
    REDUCES,
    SHARDS,
    bound_value,
    follow_macros,
    stack_of_config,
)
from mtf_gradsync.tools.train.mesh_settings import axes_of
from mtf_gradsync.tools.train.model import MeshModel, placeholders, resolve_job
from mtf_gradsync.tools.train.train_graph import (
    build_simd,
    model_and_optimizer,
    optimizer_and_rate,
    steps_per_update,
)
from mtf_gradsync.tools.train.verifying import verify_config
from mtf_gradsync.tools.verification import Verification

# Names of the dimensions of examples; microbatch steps divide the last.
_BATCH = ("outer_batch", "batch")
# No schedule has this number by chance: what divides steps by it, once it is K, counts updates.
_UNLIKELY_K = 7919
# Settings that count steps, or batches of a step; each microbatch step is a step.
_LENGTHS = (
    *("train_steps", "total_run_steps", "save_checkpoints_steps", "log_steps"),
    *("perplexity_eval_steps", "max_steps_without_decrease", "watch_copies_steps"),
)
# The largest sizes of a model, mesh, number of steps and sequence in a proof on this machine.
_SMALLER = {
    "num_layers": 2,
    "d_model": 64,
    "hidden_size": 128,
    "num_heads": 4,
    "key_value_size": 16,
}
_MOST_REPLICAS, _MOST_PARTS, _MOST_STEPS, _LENGTH = 4, 2, 4, 16
# Mesh-TensorFlow raises the last two where it cannot split an array.
_REFUSALS = (ConfigError, ValueError, NotImplementedError)
# A model with more layers than this is compiled with this many.
_COMPILED_LAYERS = 2


class BestDivision:
    """A search for the best division of the training that gin describes, with a proof of it."""

    def __init__(self, layouts: Sequence[str], most_steps: int, completes: bool = False):
        """Reads gin's configuration; raises ConfigError if --best cannot divide its training.

        `layouts` are the layouts that the search tries, each as a text of layout rules. The search
        tries updates of at most `most_steps` microbatch steps. With `completes` the search adds
        rules if no layout splits the batch, and tries more layouts if none splits the model.
        """
        self._completes = completes
        self._config = gin_files.bound_run_config()
        self._stack = stack_of_config()
        self._layouts = layouts
        job = resolve_job(self._config)
        self._own_steps = self._steps_of_config()
        self._batch = job.model.batch_size * self._own_steps
        self._sequences = max(1, job.model.outer_batch_size)
        self._counts = self._used_counts()
        self.fixed = self._why_steps_are_fixed()
        self.steps = (
            [self._own_steps]
            if self.fixed
            else [k for k in range(1, most_steps + 1) if self._batch % (k * self._sequences) == 0]
        )

    def _selector(self, name: str) -> str:
        return next((key.selector for key in bindings() if key.name == name), "")

    def _steps_of_config(self) -> int:
        if JOINS not in self._stack.dividing:
            return 1
        count = bound_value(self._stack.scope.rstrip("/"), self._selector(JOINS), MICROBATCHES)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(
                "--best needs a fixed number of microbatch steps, and "
                f"{JOINS}.{MICROBATCHES} is {count!r}"
            )
        if count > 1 and self._stack.outside:
            raise ConfigError(
                f"--best puts {JOINS} around all other wrappers, and {self._stack.outside[0]} "
                f"stands around {JOINS}, where it gets the gradients of each of {count} microbatch "
                "steps and not their sum: put it inside, or compare meshes by plan without --best"
            )
        return count

    def _used_counts(self) -> list[str]:
        """Returns the names of the bindings of K, such as "per_update.backward_passes_per_step".

        K is the number of microbatch steps of an update. The binding of the accumulation is left
        out, and so are bindings of configurables that the training does not call.
        """
        there = [str(x) for x in bindings() if x.parameter == MICROBATCHES and x.name != JOINS]
        if not there:
            return []
        with bound([*self._undivided_lines(), *_one_core_lines()]), tf.Graph().as_default():
            _optimizer_alone(gin_files.bound_run_config())
            unread = unread_bindings()
        return [key for key in there if key not in unread]

    def _count_lines(self, steps: int) -> list[str]:
        """Returns gin lines by which the training counts one update in each `steps` steps."""
        return [f"{key} = {steps}" for key in self._counts]

    def _why_steps_are_fixed(self) -> str:
        """Returns, in words for the user, why the number of microbatch steps has to stay.

        The result is "" if the search may choose another number of microbatch steps.
        """
        selector, scope = self._selector(JOINS), self._stack.scope.rstrip("/")
        if self._own_steps > 1 and not bound_value(scope, selector, "average_aggregated_gradients"):
            return "it adds up gradients (average_aggregated_gradients is not set)"
        counts = self._count_lines(_UNLIKELY_K)
        if self._config.schedule_step and counts:
            return f"train.run.schedule_step and {counts[0].split()[0]} both count updates"
        lines = [*self._undivided_lines(), *counts, *self._schedule_step_lines()]
        with bound([*lines, *_one_core_lines()]), tf.Graph().as_default():
            opt, rate = _optimizer_alone(gin_files.bound_run_config())
            innermost = opt.innermost() if isinstance(opt, Wrapper) else opt
            if settings_by_global_step(types.SimpleNamespace(rate=rate), _UNLIKELY_K):
                return "its learning rate follows microbatch steps"
            for owner, names in settings_by_global_step(innermost, _UNLIKELY_K).items():
                return f"{names[0]} of {owner} follows microbatch steps"
        return ""

    def _schedule_step_lines(self) -> list[str]:
        """Returns the gin line that makes learning rate schedules count updates, in a list.

        The list is empty if the config accumulates gradients already, binds schedule_step, or binds
        a number of microbatch steps for another configurable than the accumulation. In these cases
        learning rate schedules go on to count what they count in the config.
        """
        is_there = self._own_steps > 1 or self._config.schedule_step or self._counts
        return [] if is_there else ["train.run.schedule_step = @get_update_step"]

    def _undivided_lines(self) -> list[str]:
        """Returns gin lines for the config's stack without the wrappers that divide an update.

        The wrappers that divide an update reduce, accumulate or shard gradients. The other wrappers
        of the stack stay.
        """
        first = (*self._stack.around, *self._stack.inside)
        return [f"train.run.optimizer = {self._scoped(first[0])}", *self._nesting_lines(first)]

    def step_costs(self) -> tuple[StepCosts, list[mtf.Variable]]:
        """Returns the costs of one step on the whole batch of an update, and the trained variables.

        The costs are the sizes of tensors and the operations of the step, from which times are
        predicted. Both results are read from an mtf graph for one core; nothing is trained.
        """
        lines = [*self._undivided_lines(), f"train.run.batch_size = {self._batch}"]
        lines += [*self._count_lines(1), *_one_core_lines()]
        with bound(lines), tf.Graph().as_default():
            job = resolve_job(gin_files.bound_run_config())
            model = MeshModel(job.model)
            step = tf.identity(tf.train.get_or_create_global_step().read_value())
            loss, pairs, opt, _ = model_and_optimizer(job, model, placeholders(job), step)
            grads, variables = [g for g, _ in pairs], [v for _, v in pairs]
            opt.apply_grads(grads, variables)
            inner = opt.innermost() if isinstance(opt, Wrapper) else opt
            trained = without_frozen(inner, grads, variables)
            size = self._batch // self._sequences
            return read_costs(loss, trained, variables, _BATCH, size), variables

    def predict_choices(
        self,
        costs: StepCosts,
        machine: Machine,
        mesh_shapes: Sequence[str] | None,
        inner_steps: Sequence[int] = (),
    ) -> tuple[list[Choice], dict[str, str]]:
        """Returns all divisions that are possible on a machine, with their predicted times.

        Args:
          costs: the sizes of tensors and the operations of one step, as `step_costs` returns them.
          machine: the chips on which the training is to run.
          mesh_shapes: the mesh shapes to try; None tries all that have the mesh axes of the
            config's mesh.
          inner_steps: the numbers of inner steps to try.

        Returns:
          A pair. The first is a list of the divisions, the fastest first, each with its predicted
          time and memory. The second is a dictionary from the name of each impossible mesh and
          layout to the reason why it is impossible.
        """
        axes, layouts = list(axes_of(self._config.mesh_shape)), list(self._layouts)
        rules = [rule for one in layouts for rule in rules_of(one) if rule[-1] in axes]
        if self._completes and not any(rule[0] in _BATCH for rule in rules):
            rules.append((_BATCH[-1], _unused_axis(axes, rules, "batch")))
            layouts = [";".join(filter(None, [":".join(rules[-1]), one])) for one in layouts]
        of_batch = {rule[-1] for rule in rules if rule[0] in _BATCH}

        def choices(layouts: Sequence[str], shapes: Sequence[str]) -> Any:
            return all_choices(
                costs, machine, axes, layouts, self.steps, inner_steps, shapes, progress=True
            )

        found, why = choices(layouts, mesh_shapes or ())
        if self._completes and all(rule[-1] in of_batch for rule in rules):
            axis = _unused_axis(axes, rules, "model")
            shapes = mesh_shapes or shapes_of(machine.cores, axes, machine.slices)
            divided = [
                x for x in shapes
                if any(d.name == axis and d.size > 1 for d in mtf.convert_to_shape(x).dims)
            ]  # fmt: skip
            # A dimension that lies along the batch's axis, as experts do, stays there.
            own = {rule[0] for rule in rules if rule[0] not in _BATCH}
            free = [name for name in costs.largest_dims if name not in own]
            more = [(name, axis) for name in free[: max(0, MOST_RULES - len(own))]]
            if divided:
                # Without the rules for mesh axes that the config's mesh does not have.
                together = ";".join(":".join(rule) for rule in dict.fromkeys([*rules, *more]))
                others, _ = choices([together], divided)
                found = sorted([*found, *others], key=sort_key)
        return found, why

    def gin_lines(self, choice: Choice) -> list[str]:
        """Returns the gin lines that change the configuration to the division `choice`."""
        stack, own = choice.stack, self._stack
        names = [f"@{name}" for name in self._dividing_wrappers(stack)]
        whole = list(own.around) + list(own.inside)
        if stack.sharded_updates:
            whole.insert(len(own.around), f"@{SHARDS}")
            names.remove(f"@{SHARDS}")
        whole = [*names, *whole]
        scale = stack.steps / self._own_steps
        lengths = {name: getattr(self._config, name) for name in _LENGTHS}
        lines = [
            f'train.run.mesh_shape = "{choice.mesh_shape}"',
            f'train.run.layout_rules = "{choice.layout}"',
            f"train.run.batch_size = {self._batch // stack.steps}",
        ]
        if self._config.mesh_devices is not None:  # the devices of another mesh
            lines.append("train.run.mesh_devices = None")
        if scale != 1:
            lines += [
                f"train.run.{name} = {math.ceil(value * scale)}"
                for name, value in lengths.items()
                if value is not None
            ]
        lines += [f"train.run.optimizer = {self._scoped(whole[0])}", *self._nesting_lines(whole)]
        if stack.steps > 1:
            lines += [
                f"{own.scope}{JOINS}.{MICROBATCHES} = {stack.steps}",
                f'{own.scope}{JOINS}.accumulate = "{stack.sums}"',
            ]
            if not self.fixed:
                lines.append(f"{own.scope}{JOINS}.average_aggregated_gradients = True")
        if stack.reducer == "hierarchical":
            lines.append(f"{own.scope}{whole[0][1:]}.reducer = @HierarchicalAllReduce()")
        if stack.inner_steps:
            lines.append(f"{own.scope}{OUTER}.inner_steps = {stack.inner_steps}")
        if stack.steps > 1:
            lines += self._schedule_step_lines()
        lines += self._count_lines(stack.steps)
        return lines + gin_files.mesh_lines(choice.mesh_shape, choice.layout)

    @staticmethod
    def _dividing_wrappers(stack: StackSettings) -> list[str]:
        """Returns the class names of the wrappers that a division needs, the outermost first.

        `stack` is how the division divides an update: its numbers of microbatch steps and inner
        steps, and whether updates are sharded.
        """
        if stack.inner_steps:
            return [OUTER]
        joins = [JOINS] if stack.steps > 1 else []
        return joins + ([SHARDS] if stack.sharded_updates else [] if joins else [REDUCES])

    def _scoped(self, name: str) -> str:
        return f"@{self._stack.scope}{name[1:]}" if "/" not in name else name

    def _nesting_lines(self, names: Sequence[str]) -> list[str]:
        """Returns gin lines that make each optimizer the inner optimizer of the one before it.

        `names` are gin references to the optimizers, such as "@CrossShardOptimizer", the outermost
        first. For "@A" and "@B" the result is ["A.opt = @B"].
        """
        return [f"{self._stack.scope}{a.split('/')[-1].lstrip('@')}.opt = {b}"
                for a, b in itertools.pairwise(names)]  # fmt: skip

    def make_check(self, machine: Machine, costs: StepCosts) -> Any:
        """Returns the function by which `best_of` checks a division with the TPU compiler.

        The function compiles the training step of a `Choice` for `machine`, and returns a
        `Checked`. The `Checked` has the memory of a core and the time of an update by the
        compiler's figures, or the reason why the compiler refuses the division. If the model has
        more than 2 layers, the same model with 2 layers is compiled. The compiler's figures are
        then scaled up: they are multiplied by the prediction for the whole model, and divided by
        the prediction for the small model. `costs` has the sizes of tensors and the operations of
        one step, as `step_costs` returns them.
        """
        fewer, words = _smaller_model_lines({"num_layers": _COMPILED_LAYERS})
        compiled_costs = costs
        if fewer:
            with bound(fewer):
                compiled_costs, _ = self.step_costs()

        def check(choice: Choice) -> Checked:
            with self._bound(choice, fewer):
                candidate = Candidate(choice.mesh_shape, choice.layout, machine)
                found = search(self._build, [candidate], refusals=_REFUSALS)
            if found.is_partial:  # a signal that `search` has turned into a partial plan
                raise KeyboardInterrupt(found.stopped_by)
            if not found.rows:
                return Checked(refused=found.refused[0].reason if found.refused else "stopped")
            (row,) = found.rows
            layout = choice.mesh_shape, choice.layout
            small = Predictor(compiled_costs, machine, *layout).predict(choice.stack)
            mean = row.mean_step_seconds or row.step_seconds
            seconds = mean * choice.stack.steps
            return Checked(
                row.bytes_per_core / small.bytes_per_core * choice.predicted.bytes_per_core,
                seconds / small.seconds * choice.predicted.seconds,
                f"with {words}: its figures over those predicted of that model, times those "
                "predicted of the whole"
                if fewer
                else "with the whole model",
            )

        return check

    @contextlib.contextmanager
    def _bound(self, choice: Choice, more: Sequence[str] = ()) -> Iterator[RunConfig]:
        with bound([*self.gin_lines(choice), *more]):
            yield gin_files.bound_run_config()

    @staticmethod
    def _build(mesh_shape: str, layout: str) -> planning.Built:
        job = resolve_job(gin_files.bound_run_config())
        with compiled_only():
            graph, program = build_simd(job)
        per_update = steps_per_update(graph.optimizers)
        return planning.Built(
            program, [graph.loss], job.tokens_per_step, graph.num_parameters, per_update
        )

    def describe_optimizer(self, choice: Choice, variables: Sequence[mtf.Variable]) -> str:
        """Returns the text of `gs.describe` on what the optimizer of a division does in a step.

        `choice` is the division, and `variables` are the variables that the optimizer updates.
        """
        mesh = choice.mesh_shape, choice.layout
        with self._bound(choice) as config, tf.Graph().as_default(), simd.tpu_program(*mesh):
            opt, _ = _optimizer_alone(config)
            return str(describe(opt, *mesh, variables))

    def prove(self, choice: Choice, replica_axes: Sequence[str]) -> tuple[str, Verification]:
        """Verifies on this machine that the division `choice` trains the same as one core does.

        The model, mesh and batch are made smaller. `replica_axes` are the names of the mesh axes
        that the batch is split over. Returns a text that names the smaller sizes, and the result of
        `mtf_gradsync.verify`.
        """
        lines, words = _smaller_model_lines(_SMALLER)
        dims = mtf.convert_to_shape(choice.mesh_shape).dims
        sizes = {
            d.name: min(d.size, _MOST_REPLICAS if d.name in replica_axes else _MOST_PARTS)
            for d in dims
        }
        mesh_shape = ";".join(f"{name}:{size}" for name, size in sizes.items())
        shards = math.prod(sizes[axis] for axis in replica_axes)
        stack = choice.stack._replace(
            steps=min(choice.stack.steps, _MOST_STEPS),
            inner_steps=min(choice.stack.inner_steps, _MOST_STEPS),
        )
        batch = 2 * shards * self._sequences
        lengths = resolve_job(self._config).model.sequence_length
        small = {name: min(size, _LENGTH) for name, size in lengths.items()}
        said = [f"mesh {mesh_shape}" if mesh_shape != choice.mesh_shape else "", words]
        said.append(f"K {stack.steps}" if stack.steps < choice.stack.steps else "")
        if stack.inner_steps < choice.stack.inner_steps:
            said.append(f"outer steps after {stack.inner_steps} steps")
        said.append(f"batches of {batch} sequences of {max(small.values())} tokens")
        lines += [f"train.run.batch_size = {batch}", f"train.run.sequence_length = {small!r}"]
        with self._bound(choice._replace(mesh_shape=mesh_shape, stack=stack), lines):
            found = verify_config(divisions=())
        return ", ".join(filter(None, said)), found


def _optimizer_alone(config: RunConfig) -> tuple[Any, Any]:
    """Makes the optimizer of `config` in the default graph, but not the model of the config.

    Returns the optimizer, and the learning rate of the step: a number or a scalar of tf or mtf, or
    None if the optimizer has a learning rate of its own.
    """
    step = tf.identity(tf.train.get_or_create_global_step().read_value())
    return optimizer_and_rate(resolve_job(config), step, mtf.Mesh(mtf.Graph(), "mesh"))


def _unused_axis(axes: list[str], rules: Sequence[Sequence[str]], name: str) -> str:
    """Returns the first of the mesh axes that no layout rule uses.

    If there is none, an axis is added to `axes`: `name`, or a name like it.
    """
    unused = [axis for axis in axes if axis not in {rule[-1] for rule in rules}]
    if not unused:
        unused.append(name if name not in axes else f"{name}_2")
        axes += unused
    return unused[0]


def _one_core_lines() -> list[str]:
    return [
        'train.run.mesh_shape = "all:1"',
        'train.run.layout_rules = ""',
        "train.run.mesh_devices = None",
        "train.run.mesh_impl = None",
        *gin_files.mesh_lines("all:1", ""),
    ]


def _smaller_model_lines(most: dict[str, int]) -> tuple[list[str], str]:
    """Returns gin lines that make a large model smaller, and a text that names the changes.

    `most` is a dictionary from the names of parameters of the model's layers, such as "num_layers",
    to the largest values that they may have in the smaller model. A parameter whose value in the
    config is not larger gets no line. If no parameter gets a line, both results are empty.
    """
    lines, words = {}, {}
    for binding, given in bindings().items():
        parameter = binding.parameter
        if parameter not in most or not binding.selector.startswith("mesh_tensorflow."):
            continue
        key, value = follow_macros(str(binding), given)
        if isinstance(value, int) and value > most[parameter]:
            lines[key] = f"{key} = {most[parameter]}"
            words[parameter] = f"{parameter} {most[parameter]} in place of {value}"
    return list(lines.values()), ", ".join(words.values())


def find_and_prove(
    machine: Machine,
    layouts: Sequence[str],
    mesh_shapes: Sequence[str] | None = None,
    budget: float | None = None,
    most_steps: int = 64,
    inner_steps: Sequence[int] = (),
    prove: bool = True,
    say: Callable[[str], Any] = print,
    completes: bool = False,
) -> tuple[Best, int]:
    """Finds the best division of the training that gin's configuration describes, and proves it.

    Args:
      machine: the chips on which the training is to run.
      layouts: layouts to try, each a text of layout rules. Each is also tried without some of its
        rules that split the model.
      mesh_shapes: mesh shapes to try; None tries all meshes of the chips that have the axes of the
        config's mesh.
      budget: bytes of memory that a core may use; None for what the chip lets a program use.
      most_steps: the most microbatch steps of an update.
      inner_steps: numbers of inner steps (DiLoCo) to try, besides divisions without outer steps.
        Outer steps change what is trained.
      prove: whether to verify the division on this machine.
      say: a function that is called with each part of the answer, as text, once it is known.
      completes: whether the search adds rules if no layout splits the batch, and tries more layouts
        if none splits the model.

    Returns:
      The best division, and the command's exit code. The code is 0 if a division was found and, if
      `prove` is True, proved. It is 1 if no division fits, or if the proof finds the division NOT
      EQUAL. It is 3 if the proof does not show whether the division is equal.

    Raises:
      ConfigError: the config's training cannot be divided in another way.
    """
    limits = [x for x in (budget, machine.memory_per_core) if x is not None]
    best = BestDivision(layouts, most_steps, completes)
    costs, variables = best.step_costs()
    choices, why = best.predict_choices(costs, machine, mesh_shapes, inner_steps)
    if not choices:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(why.items())[:3])
        raise ConfigError(f"No mesh of {machine.name} divides the model: {reasons}")
    check = best.make_check(machine, costs)
    found = best_of(choices, machine, min(limits, default=None), check)
    if best.fixed:
        say(f"Microbatch steps stay {best.steps[0]}: {best.fixed}.")
    say(str(found))
    if found.chosen is None:
        return found, 1
    choice = found.chosen
    say("\n".join(["", "Lines for the end of the config:", "", *best.gin_lines(choice)]))
    say(f"\nWhat its optimizer does:\n\n{best.describe_optimizer(choice, variables)}")
    if choice.stack.inner_steps:
        say(
            "\nOuter steps change what is trained. The proof below is of a step without outer "
            "steps, and says nothing about how well the model learns with them."
        )
    if not prove:
        say("\nNot proved: --no_proof.")
        return found, 0
    replica_axes = Predictor(costs, machine, choice.mesh_shape, choice.layout).replica_axes
    where, verification = best.prove(choice, replica_axes)
    say(f"\nThe same stack on this machine, against one core without wrappers ({where}):\n")
    say(str(verification))
    return found, verification.exit_code
