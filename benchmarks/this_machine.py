"""CPU devices of this machine as what is planned for: their rates are fitted to sample steps.

`benchmarks.plan` holds the order that is predicted against steps that run.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import math
import tempfile
import time
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np
from tqdm import tqdm

from benchmarks.hlo import stablehlo_flops
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.cross_shard import CrossShardOptimizer
from mtf_gradsync.runtimes._private.jax import compiled_hlo, cost_numbers, memory_bytes
from mtf_gradsync.runtimes.simd.graph_facts import UnsupportedProgramError
from mtf_gradsync.runtimes.simd.program import Program, tpu_program
from mtf_gradsync.runtimes.xla.core_devices import devices_for
from mtf_gradsync.runtimes.xla.executable import Cache, CoreModule, loaded, lowered
from mtf_gradsync.runtimes.xla.hlo import read_module
from mtf_gradsync.runtimes.xla.hlo_collectives import find_hlo_collectives
from mtf_gradsync.runtimes.xla.replica_program import replica_program
from mtf_gradsync.runtimes.xla.topology.compiled import CoreMemory
from mtf_gradsync.runtimes.xla.topology.compiling import LoweredProgram
from mtf_gradsync.runtimes.xla.topology.estimate import CostEstimate
from mtf_gradsync.runtimes.xla.xla_session import session
from mtf_gradsync.tools.planning.machines import Begun, Compiled, StepCost

Mesh = tuple[int, int]
_HEADS = 4
_VOCAB = 256
_LAYOUT = "batch:batch;heads:model;hidden:model;vocab:model"


class Size(NamedTuple):
    """How large a step of a decoder-only transformer is."""

    layers: int  # blocks of attention and a dense part
    width: int  # of the vectors
    batch: int  # sequences of all cores together
    length: int  # tokens in a sequence


class Samples(NamedTuple):
    """Steps of about one length; their sizes differ in what takes most of the time.

    That is products, passes over memory, or new memory (see `MeasuredWork.new_bytes`).
    """

    sizes: tuple[Size, ...]
    rounds: int  # how often each is measured


# Of about 0.1 s. What a shorter step takes is mostly what it costs to begin one.
_SHORT = Samples(
    (Size(2, 128, 32, 64), Size(1, 256, 16, 64), Size(2, 192, 16, 64), Size(3, 96, 16, 128)),
    rounds=8,
)
# Of about 3 s. Bytes cost more where neither caches nor the C library keep them from step to step.
_LONG = Samples((Size(1, 512, 64, 256), Size(2, 384, 48, 256)), rounds=2)
# Floating-point operations of all cores in the shorter one of these two.
_LONG_FLOPS = 2.8e11


class SampleStep(NamedTuple):
    """A step that was built."""

    program: Program
    lowering: mtf.Lowering
    loss: tf.Tensor  # the update runs with it
    feed: dict[tf.Tensor, np.ndarray]


def samples_like(flops: float) -> Samples:
    """The steps that tell most of one with so many floating-point operations of all cores."""
    return _LONG if flops >= _LONG_FLOPS else _SHORT


def choose_samples(count: int, sizes: Sequence[Size]) -> list[tuple[Mesh, Size]]:
    """Meshes of batch and model, each with a size, of the steps to run on up to `count` devices.

    They are on few cores, on half of all and on all, each divided in every way that heads allow.
    """
    cores = sorted({n for n in (1, 2, 4, count // 2, count) if n and count % n == 0})
    meshes = [(n // model, model) for n in cores for model in (1, 2, _HEADS) if n % model == 0]
    return [(mesh, size) for size in sizes for mesh in meshes]


def build_sample(mesh: Mesh, size: Size) -> SampleStep:
    """Builds a step in a graph of its own; a batch that the mesh does not divide is made larger."""
    # Every core has the same number of sequences.
    shape = (-(-size.batch // mesh[0]) * mesh[0], size.length)
    with tf.Graph().as_default():
        tokens = tf.placeholder(tf.int32, shape)
        with tpu_program(f"batch:{mesh[0]};model:{mesh[1]}", _LAYOUT) as program:
            loss = _loss(mtf.Mesh(mtf.Graph(), "mesh"), tokens, size)
            variables = loss.mesh.graph.trainable_variables
            grads = mtf.gradients([loss], [variable.outputs[0] for variable in variables])
            inner = mtf.optimize.AdafactorOptimizer(learning_rate=0.01)
            updates = CrossShardOptimizer(inner).apply_grads(grads, variables)
            lowering = mtf.Lowering(loss.mesh.graph, {loss.mesh: program.mesh_impl})
            loss = tf.cast(lowering.export_to_tf_tensor(loss), tf.float32)
            with tf.control_dependencies([lowering.lowered_operation(op) for op in updates]):
                loss = tf.identity(loss)
    batch = np.random.RandomState(0).randint(0, _VOCAB, shape)
    return SampleStep(program, lowering, loss, {tokens: batch.astype("i")})


def _loss(mesh: mtf.Mesh, tokens: tf.Tensor, size: Size) -> mtf.Tensor:
    """Predicts each token from those before it, by the embedding's transpose."""
    dims = [mtf.Dimension(*dim) for dim in zip(("batch", "length"), tokens.shape.as_list())]
    batch, length = dims
    before = mtf.Dimension("before", length.size)
    vocab, width = mtf.Dimension("vocab", _VOCAB), mtf.Dimension("width", size.width)
    heads, depth = mtf.Dimension("heads", _HEADS), mtf.Dimension("depth", size.width // _HEADS)
    hidden = mtf.Dimension("hidden", 4 * size.width)

    def weight(name: str, *dims: mtf.Dimension) -> mtf.Tensor:
        start = tf.random_normal_initializer(stddev=size.width**-0.5)
        return mtf.get_variable(mesh, name, mtf.Shape(dims), initializer=start)

    def normed(x: mtf.Tensor, name: str) -> mtf.Tensor:
        scale = weight(name, width) + 1.0
        return x * mtf.rsqrt(mtf.reduce_mean(mtf.square(x), reduced_dim=width) + 1e-6) * scale

    ids = mtf.import_tf_tensor(mesh, tokens, mtf.Shape(dims))
    embedding = weight("embedding", vocab, width)
    x = mtf.gather(embedding, ids, vocab)
    steps = [mtf.range(mesh, dim, tf.int32) for dim in (length, before)]
    later = mtf.cast(mtf.less(*steps, mtf.Shape([length, before])), tf.float32) * -1e9
    for layer in range(size.layers):
        with tf.variable_scope(f"layer_{layer}"):
            y = normed(x, "scale_attention")
            query, key, value = (
                mtf.einsum([y, weight(n, width, heads, depth)], [batch, length, heads, depth])
                for n in ("query", "key", "value")
            )
            key, value = (mtf.rename_dimension(t, "length", "before") for t in (key, value))
            scores = mtf.einsum([query, key], [batch, heads, length, before])
            shares = mtf.softmax(scores * depth.size**-0.5 + later, before)
            mixed = mtf.einsum([shares, value], [batch, length, heads, depth])
            x += mtf.einsum([mixed, weight("back", heads, depth, width)], [batch, length, width])
            y = normed(x, "scale_dense")
            y = mtf.relu(mtf.einsum([y, weight("in", width, hidden)], [batch, length, hidden]))
            x += mtf.einsum([y, weight("out", hidden, width)], [batch, length, width])
    logits = mtf.einsum([normed(x, "scale"), embedding], [batch, length, vocab])
    predicted = mtf.shift(ids, -1, length, wrap=True)
    losses = mtf.layers.softmax_cross_entropy_with_logits(
        logits, mtf.one_hot(predicted, vocab, dtype=tf.float32), vocab
    )
    return mtf.reduce_mean(losses)


# Cores that meet in fewer of their operations than this share have their work for themselves.
_SELDOM = 0.02
# A correction is a mean of few errors, one of each size of step: it counts with as many that are
# none.
_STEPS_WITHOUT_ERROR = 2
# What C's library of Linux keeps when it is freed: a larger block goes back to the system, which
# gives each of its pages anew, as zeros, when the next step touches it.
_KEPT_BYTES = 32 << 20
# They name values and run nothing.
_NAMES = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast"))


class MeasuredWork(NamedTuple):
    """What a step's time is predicted from; what a loop repeats counts once."""

    cores: int
    flops: float  # of one core, by the compiler's count
    bytes: float  # that one core's operations read and write, by the compiler's count
    operations: int  # that one core starts
    # Collectives in which a core waits for others, each counted as its members' share of all cores:
    # where there are more groups than one, others work while one waits.
    meetings: float
    # That one core puts into these collectives.
    exchanged_bytes: float = 0.0
    # Of temporary memory that the system gives one core anew in each step.
    new_bytes: float = 0.0
    divided: int = 0  # operations of one core that XLA divides among the machine's threads
    group: int = 1  # cores in a group of most of these collectives; 1 where they are few

    def terms(self) -> tuple[float, ...]:
        """What each of `FittedRates` is multiplied with, in its order."""
        all_cores = self.cores * self.flops, self.cores * self.bytes, self.cores * self.operations
        rest = self.exchanged_bytes, self.new_bytes, self.divided
        return (*all_cores, self.bytes, self.meetings, *(self.cores * one for one in rest))


class FittedRates(NamedTuple):
    """Seconds on the clock of each part of a step's work.

    The cores share the machine's processors. So a step takes the work of all cores together, and
    the time in which processors are idle, because a core's operations follow each other (which
    counts where there are few cores), and because cores wait for each other.
    """

    flop: float  # of any core
    byte: float  # that any core reads or writes
    operation: float  # of any core, however small
    # What a byte of one core takes more, as its operations follow each other. Products of matrices
    # have no such part, because all processors compute a large one.
    core_byte: float
    meeting: float  # in which processors are idle when all cores meet in a collective
    exchanged_byte: float  # that any core puts into a collective
    new_byte: float  # of memory that the system gives any core anew
    division: float  # of an operation of any core among threads

    def seconds(self, work: MeasuredWork) -> float:
        """Predicted time of a step."""
        return float(np.dot(self, work.terms()))


class Calibration(NamedTuple):
    """What steps of about one length take on the devices of this machine."""

    rates: FittedRates
    # By cores and `MeasuredWork.group`: how many times as long as by `rates` sample steps took.
    corrections: Mapping[tuple[int, int], float]
    took: float = 0.0  # seconds, all of it

    def seconds(self, work: MeasuredWork) -> float:
        """Predicted time of a step."""
        return self.rates.seconds(work) * self.corrections.get((work.cores, work.group), 1.0)


def work_of(executable: Any, cores: int) -> MeasuredWork:
    """Counts the work of a step in XLA's executable for CPU devices, which all `cores` run."""
    hlo, cost = compiled_hlo(executable), cost_numbers(executable)
    entry = read_module(hlo).entry
    operations = sum(i.opcode not in _NAMES for i in entry.instructions)
    divided = sum(i.opcode == "call" for i in entry.instructions)  # as XLA's CPU compiler writes it
    collectives = [c for c in find_hlo_collectives(hlo) if meetings(c.groups, cores)]
    met = sorted(meetings(c.groups, cores) for c in collectives)
    often = len(met) > _SELDOM * operations
    temporary = memory_bytes(executable)["temporaries"]
    return MeasuredWork(
        cores,
        flops=cost.get("flops", 0.0),
        bytes=cost.get("bytes accessed", 0.0),
        operations=operations,
        meetings=sum(met),
        exchanged_bytes=sum(c.bytes_per_core for c in collectives),
        new_bytes=temporary if temporary > _KEPT_BYTES else 0,
        divided=divided,
        group=round(met[len(met) // 2] * cores) if often else 1,
    )


def meetings(groups: Sequence[Sequence[int]], cores: int) -> float:
    """How much of `MeasuredWork.meetings` a collective is; 0 where nobody waits for another.

    It is the largest group's share of the cores. No groups stand for one group of all cores.
    """
    members = max(map(len, groups), default=cores)
    return members / cores if members > 1 else 0.0


def fit(works: Sequence[MeasuredWork], seconds: Sequence[float]) -> FittedRates:
    """Finds the rates by which steps take the times that were measured for each.

    They have the least sum of squared relative errors, and none is negative.
    """
    from scipy.optimize import nnls  # jax needs it, too

    terms = np.array([work.terms() for work in works]) / np.asarray(seconds)[:, None]
    # Terms differ by orders of magnitude.
    sizes = np.maximum(np.linalg.norm(terms, axis=0), np.finfo(float).tiny)
    rates, _ = nnls(terms / sizes, np.ones(len(works)))
    return FittedRates(*map(float, rates / sizes))


def corrections(
    works: Sequence[MeasuredWork], seconds: Sequence[float], rates: FittedRates
) -> dict[tuple[int, int], float]:
    """Returns `Calibration.corrections`: how far `rates`, fitted to these steps, are off for them.

    There is a factor for each way to divide work among cores; `seconds` are the measured times.
    """
    errors = collections.defaultdict(list)
    for work, measured in zip(works, seconds):
        errors[work.cores, work.group].append(np.log(measured / rates.seconds(work)))
    return {
        mesh: float(np.exp(sum(mine) / (len(mine) + _STEPS_WITHOUT_ERROR)))
        for mesh, mine in errors.items()
    }


@functools.lru_cache(maxsize=None)
def measure(devices: tuple[Any, ...], samples: Samples) -> Calibration:
    """Runs training steps, once in a process, and fits rates and corrections to them.

    The steps run on all of jax's CPU devices that are given, and on the first ones.
    """
    start = time.monotonic()
    works, steps = [], []
    with contextlib.ExitStack() as stack:
        cache_dir = stack.enter_context(tempfile.TemporaryDirectory())
        cache = Cache(cache_dir)
        # One step is compiled while the next is built.
        compiler = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1))
        begun = []
        chosen = choose_samples(len(devices), samples.sizes)
        for mesh, size in tqdm(chosen, "steps to measure with", leave=False, disable=None):
            step = build_sample(mesh, size)
            with step.loss.graph.as_default():
                replica = replica_program(step.program, [step.loss])
                program = CoreModule(lowered(replica, cache).module, 0, (), False)
            mine = devices[: mesh[0] * mesh[1]]
            begun.append((step, mine, compiler.submit(loaded, program, mine, cache)))
        for step, mine, compiled in begun:
            works.append(work_of(compiled.result().executable, len(mine)))
            with step.loss.graph.as_default():
                # It finds the compiled program in the cache.
                opened = session(step.program, step.lowering, devices=mine, cache_dir=cache_dir)
            run = stack.enter_context(opened).run
            steps.append(functools.partial(run, [step.loss], step.feed))
        seconds = _timed(steps, samples.rounds)
    rates = fit(works, seconds)
    return Calibration(rates, corrections(works, seconds, rates), time.monotonic() - start)


def _timed(steps: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Median of each one's seconds; a round runs all of them, every other in reverse.

    A median is what a step mostly takes: what it takes at best orders meshes otherwise.
    """
    seconds = np.zeros((rounds, len(steps)))
    with tqdm(total=seconds.size, desc="measuring", leave=False, disable=None) as bar:
        for number in range(rounds):
            for place in range(len(steps))[:: (-1) ** number]:
                steps[place]()  # fills caches and memory
                start = time.perf_counter()
                steps[place]()
                seconds[number, place] = time.perf_counter() - start
                bar.update()
    return [float(median) for median in np.median(seconds, axis=0)]


def cores_of(name: str) -> int:
    """The number in "cpu:8"; ValueError when there is none."""
    number = name.partition(":")[2]
    if not number.isdigit() or not int(number):
        raise ValueError(f'CPU devices are named with their number, as in "cpu:8"; got {name!r}')
    return int(number)


class CpuMachine:
    """CPU devices of this process; see `Machine`."""

    def __init__(
        self, name: str, cores: int, most: int | None = None, cache_dir: str | None = None
    ):
        """Makes the devices, which are calibrated when the first program comes.

        That takes some minutes, once in a process for short steps and once for long ones. `most`
        devices are made, where others of this process need more than `cores`. Compiled
        programs are kept in `cache_dir`.
        """
        self.name, self.cores = name, cores
        self.slices, self.dcn_bytes_per_second = 1, math.inf
        self.memory_per_core: int | None = None
        self.peak_flops_per_core: float | None = None
        self.bytes_per_second_per_core: float | None = None
        self.estimate_source = "measured"
        self._calibrated = tuple(devices_for(max(cores, most or 0), "cpu"))
        self._devices = self._calibrated[:cores]
        self._cache = Cache(cache_dir)
        self.calibration: Calibration | None = None

    def lower(self, program: Program, fetches: Sequence[object]) -> LoweredProgram:
        """See `Machine`. Before the first program is compiled, steps about as long are measured."""
        replica = replica_program(program, fetches)
        try:
            made = lowered(replica, self._cache)
        except UnsupportedProgramError as error:
            return LoweredProgram(replica.num_replicas, None, str(error))
        # Here, where no other program is built, and where Ctrl-C ends it.
        self._calibration_for(made.module)
        return LoweredProgram(replica.num_replicas, made.module)

    def compile(self, lowered: LoweredProgram, begun: Begun) -> Compiled:
        """See `Machine`. The estimate is made of the measured rates."""
        del begun
        start = time.monotonic()
        assert lowered.module is not None  # it would have been refused
        program = CoreModule(lowered.module, 0, (), False)
        try:
            executable = loaded(program, self._devices, self._cache).executable
        except UnsupportedProgramError as error:
            return Compiled(error=str(error))
        calibration = self._calibration_for(lowered.module)
        work = work_of(executable, self.cores)
        collectives = tuple(find_hlo_collectives(compiled_hlo(executable)))
        # What `seconds` says comes on top of the estimate.
        elsewhere = sum(self.seconds(c.operation, c.groups, c.bytes_per_core) for c in collectives)
        return Compiled(
            bytes_per_core=CoreMemory(**memory_bytes(executable)).total,
            step=StepCost(
                CostEstimate(
                    work.flops,
                    work.bytes,
                    max(0.0, calibration.seconds(work) - elsewhere),
                    loops_counted_once=lowered.module.count("stablehlo.while"),
                ),
                collectives,
            ),
            seconds=time.monotonic() - start,
        )

    def seconds(self, operation: str, groups: Sequence[Sequence[int]], size: float) -> float:
        """See `Machine`. Waiting for each other, and handing on data; the estimate has the rest."""
        del operation
        assert self.calibration is not None  # a program was lowered
        met, rates = meetings(groups, self.cores), self.calibration.rates
        handing_on = self.cores * size * rates.exchanged_byte if met else 0.0
        return met * rates.meeting + handing_on

    def _calibration_for(self, module: str) -> Calibration:
        """The calibration, by steps like the first program's: other meshes' are about as long."""
        if self.calibration is None:
            flops = stablehlo_flops(module, self._devices[0]) * self.cores
            self.calibration = measure(self._calibrated, samples_like(flops))
        return self.calibration
