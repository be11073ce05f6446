"""What sending less does to training, and to a step over a slow link between two processes."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import sys
import tempfile
import time
from typing import Any, Callable, Iterator, NamedTuple

import numpy as np

import mtf_gradsync as gs
from benchmarks import models, report, timing
from benchmarks.cluster import LocalCluster
from benchmarks.slow_link import SlowLink
from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.tools.train.data.texts import read_python_topics as read_python_topics
from mtf_gradsync.tools.train.data.texts import split_documents

# mesh_tf_defaults: whether Adam and the embedding are as Mesh-TF has them, 0 or 1.
SETTINGS = {"steps": 1500, "seeds": 2, "megabits": 20.0, "mesh_tf_defaults": 0}
RATE, WARM_UP, HELD_OUT = 3e-3, 50, 8


class Method(NamedTuple):
    """A way to train.

    Attributes:
      name: for tables.
      wrap: an optimizer, from the inner one and mesh_shape and layout; None where this version of
        the package does not have it.
      period: steps in which all that is sent on some steps only is sent once.
    """

    name: str
    wrap: Callable[[Any, dict[str, str]], Any] | None
    period: int = 1


def methods() -> list[Method]:
    """All ways, the one that sends all on every step first."""

    def every_step(name: str, **reducer: Any) -> Method:
        return Method(name, lambda opt, mesh: gs.CrossShardOptimizer(opt, **reducer, **mesh))

    def outer(period: int, rate: float, momentum: float, fragments: int = 1, **more: Any) -> Method:
        what = f"every {period}, {rate:g}, {momentum:g}"
        what += f", {fragments} fragments" if fragments > 1 else ""
        what += ", 8 bits" if more else ""
        make = getattr(gs, "OuterOptimizer", None)

        def wrap(opt: Any, mesh: dict[str, str]) -> Any:
            return make(
                opt,
                inner_steps=period,
                outer_learning_rate=rate,
                outer_momentum=momentum,
                fragments=fragments,
                **more,
                **mesh,
            )

        return Method(what, wrap if make else None, period)

    return [
        every_step("float32"),
        every_step("8 bits", reducer=gs.QuantizedAllReduce()),
        every_step("8 bits, no feedback", reducer=gs.QuantizedAllReduce(error_feedback=False)),
        every_step("4 bits", reducer=gs.QuantizedAllReduce(bits=4)),
        every_step("rank 16", reducer=gs.LowRankAllReduce(rank=16, min_compression_rate=1.0)),
        every_step("rank 4", reducer=gs.LowRankAllReduce(rank=4)),
        every_step("rank 1", reducer=gs.LowRankAllReduce(rank=1)),
        outer(10, 0.7, 0.5),
        outer(36, 0.7, 0.5),
        outer(36, 0.7, 0.9),
        outer(36, 0.3, 0.9),
        outer(36, 1.0, 0.0),
        outer(36, 0.7, 0.5, fragments=4),
        outer(36, 0.7, 0.5, reducer=gs.QuantizedAllReduce()),
    ]


def chosen(options: report.Options) -> list[Method]:
    """The methods that were asked for; with --quick three of them at most."""
    names = options.only.get("methods", available())
    if options.quick:
        names = [name for name in names if name in ("float32", "8 bits", "rank 4")] or names[:1]
    return [method for method in methods() if method.name in names]


def available() -> list[str]:
    """Names of the methods that this version of the package has."""
    return [method.name for method in methods() if method.wrap is not None]


def language_model(options: report.Options, replicas: int) -> models.Model:
    """A byte-level transformer, data parallel over some replicas."""
    size = dict(layers=1, d_model=32, length=16) if options.quick else dict(layers=2, d_model=64)
    return models.lm(
        batch=8 * replicas,
        mesh_shape=f"batch:{replicas}",
        layout="batch:batch",
        scaled_embedding=not options.settings.get("mesh_tf_defaults"),
        **size,
    )


@functools.lru_cache(maxsize=None)
def text(split: str) -> np.ndarray:
    """Bytes of Python's documentation."""
    documents = split_documents(read_python_topics(), split, 10)
    return np.frombuffer(b"\n".join(documents), np.uint8)


def batch_of(split: str, shape: tuple[int, ...], rng: np.random.RandomState) -> np.ndarray:
    """Windows of the text, `[batch, length]`."""
    data, (batch, length) = text(split), shape
    starts = rng.randint(0, len(data) - length, batch)
    return np.stack([data[start : start + length] for start in starts]).astype("i")


def schedule(step: int, steps: int) -> float:
    """A warm-up and half a cosine."""
    return RATE * min(1.0, (step + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def bias_correction(step: int) -> float:
    """A factor of Adam's rate, which Mesh-TF's Adam does not have.

    Without it the first steps are several times as large, which costs outer steps more than others.
    """
    return math.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))


class Adam(mtf.optimize.AdamWeightDecayOptimizer):
    """Mesh-TF's Adam, with a rate that a placeholder of the program has."""

    def apply_grad(self, grad: Any, var: Any) -> Any:
        """See `mtf.optimize.Optimizer.apply_grad`."""
        rate = tf.get_default_graph().get_tensor_by_name("rate:0")
        self.learning_rate = mtf.import_fully_replicated(var.mesh, rate, mtf.Shape([]))
        return super().apply_grad(grad, var)


def measure(options: report.Options) -> report.Table:
    """Trains by each method from several seeds, and asks for the loss on held-out text."""
    steps = 10 if options.quick else int(options.settings.get("steps", SETTINGS["steps"]))
    seeds = 1 if options.quick else int(options.settings.get("seeds", SETTINGS["seeds"]))
    model = language_model(options, 4)
    has_defaults = bool(options.settings.get("mesh_tf_defaults"))
    rows: list[report.Row] = []
    curves = {}
    for method in timing.progress(chosen(options), "methods"):
        losses, sent = [], 0.0
        for seed in range(seeds):
            curve, sent = train(model, method, steps, seed, not has_defaults)
            losses.append(curve[-1][1])
            curves.setdefault(method.name, curve)
        row: report.Row = {"sent": method.name, "bytes a step": round(sent)}
        row["of float32"] = sent / rows[0]["bytes a step"] if rows else 1.0
        row["held-out nats"] = float(np.mean(losses))
        row["by seed"] = ", ".join(f"{loss:.3f}" for loss in losses)
        rows.append(row)
    return report.Table(
        name="less_communication" + ("_mesh_tf_defaults" if has_defaults else ""),
        title="A byte-level language model on 4 replicas"
        + (" with the defaults of Mesh-TF" if has_defaults else "")
        + f", {steps} steps of Adam",
        rows=rows,
        notes=(
            '"bytes a step" is what one core puts into collectives. A sum counts twice, because'
            " terms are sent and the result is sent back.",
            "The bytes of an outer step are divided by the number of steps from one outer step to"
            " the next.",
            'A row "every H, rate, momentum" is OuterOptimizer with H inner steps, this outer'
            " learning rate, and this Nesterov momentum.",
            "The optimizer is Adam without bias correction, and embeddings begin at a scale of 1."
            if has_defaults
            else "The optimizer is Adam with bias correction, and embeddings begin like the weights"
            " of a classifier.",
        ),
        plot=lambda axes: _plot(axes, curves),
    )


def train(
    model: models.Model, method: Method, steps: int, seed: int, corrects_bias: bool = True
) -> tuple[list[tuple[int, float]], float]:
    """Held-out losses by step, and bytes that a core gives to collectives in a step."""
    program, built = program_of(_wrapped(model, method), models.BARE, seed)
    rng = np.random.RandomState(seed)
    # An outer step's values are those that count: asked for where a round ends.
    each = max(method.period, steps // 10 // method.period * method.period)
    curve = []
    with session_of(program, built) as session, held_out_loss_of(model) as held_out_loss:
        for step in range(steps):
            x = batch_of("train", model.batch.shape, rng)
            rate = schedule(step, steps) * (bias_correction(step) if corrects_bias else 1)
            with built.graph.as_default():
                session.run([built.loss, built.update], {built.x: x, "rate:0": rate})
            if (step + 1) % each == 0 or step + 1 == steps:
                curve.append((step + 1, held_out_loss(session)))
    sent = 0.0
    for row in simd.list_collectives(program, lowering=built.lowering).rows:
        times = 2 if row.operation == "CrossReplicaSum" else 1
        sent += times * (row.bytes_per_step or 0) / (method.period if row.is_conditional else 1)
    return curve, sent


@contextlib.contextmanager
def held_out_loss_of(model: models.Model) -> Iterator[Callable[[Any], float]]:
    """Opens a function of a training session: the loss of its variables on held-out text.

    It is computed by a program without an optimizer, since running any of a training program's
    tensors makes a step.
    """
    program, built = program_of(model, models.FLOOR, 0)
    rng = np.random.RandomState(5)
    asked = [batch_of("validation", model.batch.shape, rng) for _ in range(HELD_OUT)]
    with tempfile.TemporaryDirectory() as directory, session_of(program, built) as session:

        def loss(trained: Any) -> float:
            session.restore(trained.save(os.path.join(directory, "variables")))
            return float(np.mean([session.run(built.loss, {built.x: x}) for x in asked]))

        yield loss


def program_of(model: models.Model, variant: str, seed: int) -> tuple[simd.Program, models.Program]:
    """A SIMD program of a model with the placeholder "rate:0"; `seed` is that of variables."""
    made: list[simd.Program] = []

    @contextlib.contextmanager
    def block() -> Iterator[Any]:
        tf.set_random_seed(seed + 1)
        tf.placeholder(tf.float32, [], name="rate")
        with simd.tpu_program(model.mesh_shape, model.layout) as program:
            made.append(program)
            yield program.mesh_impl

    built = models.build(model, variant, block)
    return made[0], built


@contextlib.contextmanager
def session_of(program: simd.Program, built: models.Program) -> Iterator[Any]:
    """A session on XLA devices, or on CPU replicas where there is no jax."""
    with built.graph.as_default():
        if xla.why_no_xla():
            opened = program.session(built.lowering)
        else:
            opened = xla.session(program, built.lowering, cache_dir=None)
    with opened as session:
        yield session


def measure_link(options: report.Options) -> report.Table:
    """Steps over two processes whose link has a stated bandwidth."""
    megabits = float(options.settings.get("megabits", SETTINGS["megabits"]))
    model = language_model(options, 2)
    rows: list[report.Row] = []
    with SlowLink(megabits) as link:

        def route(task: int, ports: list[int]) -> list[int]:
            return [p if i == task else link.port_to(p, ports[task]) for i, p in enumerate(ports)]

        with LocalCluster(2, 1, route) as cluster:
            for method in timing.progress(chosen(options), "methods over the link"):
                # A whole period, or several steps.
                count = method.period if method.period > 1 else max(3, options.rounds // 3)
                seconds, sent = over_link(cluster, link, model, method, count)
                rows.append(
                    {
                        "sent": method.name,
                        "bytes on the link a step": round(sent),
                        "step ms": 1e3 * seconds,
                        "tokens/s": model.batch.size / seconds,
                        "step/float32": 1e3 * seconds / rows[0]["step ms"] if rows else 1.0,
                    }
                )
    return report.Table(
        name="less_communication_link",
        title=f"The same model on 2 processes over a link of {megabits:g} Mbit/s each way",
        rows=rows,
        notes=("The bytes on the link include those of the network protocol.",),
    )


def over_link(
    cluster: LocalCluster, link: SlowLink, model: models.Model, method: Method, count: int
) -> tuple[float, float]:
    """Seconds and bytes of a step, mean of some."""

    @contextlib.contextmanager
    def block() -> Iterator[Any]:
        tf.placeholder(tf.float32, [], name="rate")
        # Variables live in the servers: those of one name would be one variable of all programs.
        with tf.get_default_graph().container(re.sub("[^a-z0-9]+", "_", method.name)):
            yield gs.placement_mesh_impl(model.mesh_shape, model.layout, cluster.devices)

    built = models.build(_wrapped(model, method), models.BARE, block)
    with built.graph.as_default():
        start = [tf.global_variables_initializer(), tf.local_variables_initializer()]
        to_slices = built.lowering.copy_masters_to_slices()
    config = gs.session_config(num_cpu_devices=1)
    with tf.Session(cluster.target, graph=built.graph, config=config) as session:
        session.run(start)
        session.run(to_slices)
        feed = {built.x: model.batch, "rate:0": RATE}
        # The first step is slow: TensorFlow places and rewrites the graph. With the last of a
        # period the next one begins.
        for _ in range(method.period):
            session.run(built.update, feed)
        before, began = sum(link.sent.values()), time.perf_counter()
        for _ in range(count):
            session.run(built.update, feed)
        seconds = time.perf_counter() - began
        return seconds / count, (sum(link.sent.values()) - before) / count


def _wrapped(model: models.Model, method: Method) -> models.Model:
    mesh = {"mesh_shape": model.mesh_shape, "layout": model.layout}
    assert method.wrap is not None  # or it is not chosen
    wrap = method.wrap
    return model._replace(make_optimizer=lambda: wrap(Adam(learning_rate=RATE), mesh))


def _plot(axes: Any, curves: dict[str, list[tuple[int, float]]]) -> None:
    for number, (name, curve) in enumerate(curves.items()):
        # matplotlib has ten colors.
        axes.plot(*zip(*curve), "-" if number < 10 else "--", label=name)
    axes.set_xlabel("steps")
    axes.set_ylabel("held-out nats a byte, first seed")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


if __name__ == "__main__":
    command = "python -m benchmarks.less_communication"
    parts = {"methods": available()}
    sys.exit(report.main([measure, measure_link], command, parts, SETTINGS))
