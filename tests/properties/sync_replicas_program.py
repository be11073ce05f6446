"""A program with synchronous replicas that is built once and runs many schedules."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterator, NamedTuple

import numpy as np

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.optimizers.state import scalar_state
from tests import harness, models
from tests.properties.sync_replicas_schedules import Schedule
from tests.sessions import session_of, step

AVERAGE_DECAY = 0.9
# With Adam's usual epsilon of 1e-6, rounding of a gradient near 0 grows 1000 times in the update.
ADAM_EPSILON = 1e-3
OPTIMIZERS = {
    "momentum": models.OPTIMIZERS["momentum"],
    "adafactor": models.OPTIMIZERS["adafactor"],
    "adam": lambda: mtf.optimize.AdamWeightDecayOptimizer(0.01, 0.01, epsilon=ADAM_EPSILON),
}


class Setup(NamedTuple):
    """What a program is built for.

    Attributes:
      kind: "placement" or "simd".
      mesh: name in `harness.MESHES`.
      replicas_to_aggregate: contributions that an update needs.
      optimizer: name in `OPTIMIZERS`.
      pending: whether the wrapper gets pending gradients and a tf global step, or per-shard ones
        with poison added and a mesh variable.
    """

    kind: str
    mesh: str
    replicas_to_aggregate: int
    optimizer: str
    pending: bool

    @property
    def axes(self) -> gs.ReplicaAxes:
        """The replica axes."""
        return gs.ReplicaAxes(*harness.MESHES[self.mesh])

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """As in `Schedule`."""
        return tuple(d.size for d in self.axes.shard_dims)


def train(setup: Setup, mesh: mtf.Mesh, inputs: dict[str, tf.Tensor]) -> Any:
    """A `harness.Build`, but for the setup: a step of the model of `tests.models`."""
    axes = setup.axes
    grads, variables = models.gradients(models.mlp_loss(mesh, inputs, axes.batch_dims))
    if setup.pending:
        global_step = tf.train.get_or_create_global_step()
    else:
        global_step = scalar_state(mesh, "global_step")
        shape = mtf.Shape(list(axes.shard_dims))
        poison = [
            mtf.import_tf_tensor(
                mesh, tf.reshape(inputs[f"poison_{v.name}"], shape.to_integer_list), shape
            )
            for v in variables
        ]
        shards = gs.per_shard(grads, axes)
        grads = [g + mtf.broadcast(p, g.shape) for g, p in zip(shards, poison)]
    opt = gs.SyncReplicasOptimizer(
        OPTIMIZERS[setup.optimizer](),
        setup.replicas_to_aggregate,
        axes=axes,
        contributes=inputs["contributes"],
        local_steps=inputs["local_steps"],
        variable_averages=AVERAGE_DECAY,
        variables_to_average=variables,
    )
    return opt.apply_gradients(list(zip(grads, variables)), global_step), {}


@contextlib.contextmanager
def program(setup: Setup) -> Iterator[Callable[[Schedule], Iterator[dict[str, np.ndarray]]]]:
    """Builds the program and opens a session; yields a function that runs a schedule.

    The function gives every variable after each step of a schedule, from the initial values on.
    """
    mesh_shape, layout, _ = harness.MESHES[setup.mesh]
    feed = Schedule(setup.shard_sizes, setup.replicas_to_aggregate, 1).feeds()[0]
    feed["local_steps"] = feed.pop("lag")
    build = functools.partial(train, setup)
    made = harness.built(setup.kind, mesh_shape, layout, build, feed)
    with session_of(made) as session:
        start = session.variables()

        def run(schedule: Schedule) -> Iterator[dict[str, np.ndarray]]:
            session.write(start)
            found = start
            for feed in schedule.feeds():
                # Replicas that lag are handed what was meant for an older step.
                feed["local_steps"] = found["sync_replicas/local_step"].ravel() - feed.pop("lag")
                found = step(made, session, feed)
                yield found

        yield run
