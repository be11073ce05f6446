"""Builds a config's training step with and without wrappers, and lists what each exchanges."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any, Callable, NamedTuple

from mtf_gradsync import simd
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.optimizers import Wrapper
from mtf_gradsync.train.comparison.parts import PARTS, parts_of
from mtf_gradsync.train.job import TrainingJob, placeholders
from mtf_gradsync.train.train_graph import build_simd, build_train_graph


class Step(NamedTuple):
    """The communication of one training step.

    Attributes:
      optimizers: class names, outermost first.
      collectives: those of the SIMD program.
      part: the one of `PARTS` to which each row of `collectives` belongs, by the row's name.
      transfers: copies between the devices of a placement mesh; None if they were not listed.
    """

    optimizers: tuple[str, ...]
    collectives: simd.CommunicationReport
    part: dict[str, str]
    transfers: simd.CommunicationReport | None

    def of_part(self, part: str) -> simd.CommunicationReport:
        """Returns the collectives of one part."""
        rows = tuple(row for row in self.collectives.rows if self.part[row.name] == part)
        return simd.CommunicationReport(rows, self.collectives.mesh)


class Comparison(NamedTuple):
    """A training step with the innermost optimizer alone and with the config's, on the same mesh.

    Both are one object if the config's optimizer is no wrapper.
    """

    mesh: str
    bare: Step
    wrapped: Step

    def to_json(self) -> str:
        """Returns all rows and totals as JSON text; see `simd.CommunicationReport.to_json`."""
        content: dict[str, Any] = {"mesh": self.mesh}
        for name, step in (("bare", self.bare), ("wrapped", self.wrapped)):
            collectives = json.loads(step.collectives.to_json())
            for row in collectives["rows"]:
                row["part"] = step.part[row["name"]]
            collectives["totals"]["by_part"] = {
                part: dataclasses.asdict(step.of_part(part).update_step) for part in PARTS
            }
            transfers = None if step.transfers is None else json.loads(step.transfers.to_json())
            content[name] = {
                "optimizers": list(step.optimizers),
                "collectives": collectives,
                "transfers": transfers,
            }
        return json.dumps(content, indent=2)


def compare(
    job: TrainingJob, with_transfers: bool = True, done: Callable[[], Any] = lambda: None
) -> Comparison:
    """Builds a training step with and without wrappers, and lists what it exchanges.

    Nothing is trained and no data is read. with_transfers builds it on a placement mesh too, whose
    graph grows with the number of devices. `done` is called after each of the two steps was built.
    """
    # First, so that an error in the config names the config's own optimizer.
    wrapped, is_wrapped = _list(job, with_transfers)
    done()
    bare = wrapped
    if is_wrapped:
        bare, _ = _list(job._replace(optimizer=innermost_of(job.optimizer)), with_transfers)
    done()
    return Comparison(wrapped.collectives.mesh, bare, wrapped)


def innermost_of(optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a factory of the innermost optimizer of the stacks that a factory makes."""

    def make(learning_rate: Any) -> Any:
        made = optimizer(learning_rate=learning_rate)
        return made.innermost() if isinstance(made, Wrapper) else made

    return make


def _list(job: TrainingJob, with_transfers: bool) -> tuple[Step, bool]:
    """Returns one step, and whether its optimizer is a wrapper."""
    with tf.Graph().as_default():
        graph, program = build_simd(job)
        collectives = simd.list_collectives(program, lowering=graph.lowering)
    step = Step(
        optimizers=tuple(type(opt).__name__ for opt in graph.optimizers),
        collectives=collectives,
        part=parts_of(graph, collectives),
        transfers=_list_transfers(job) if with_transfers else None,
    )
    return step, isinstance(graph.optimizers[0], Wrapper)


def _list_transfers(job: TrainingJob) -> simd.CommunicationReport:
    mesh = job.model.mesh
    # Not the config's devices, which may all be the same: copies do not depend on them.
    devices = [f"/device:CPU:{core}" for core in range(mesh.shape.size)]
    mesh_impl = mesh.placement_mesh(devices)
    with tf.Graph().as_default():
        features = placeholders(job)
        graph = build_train_graph(job, features, lambda: contextlib.nullcontext(mesh_impl))
        return simd.list_transfers([graph.loss, graph.step], mesh_impl)
