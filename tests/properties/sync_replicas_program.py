"""A program with synchronous replicas that is built once and runs many schedules."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, NamedTuple

import numpy as np

import mtf_gradsync as gs
from mtf_gradsync import session_config, simd
from mtf_gradsync._tf_compat import mtf, tf
from tests import harness, models
from tests.properties.sync_replicas_schedules import Schedule

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
      pending: whether the wrapper gets pending gradients, or per-shard ones with poison added.
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


class Program:
    """A session whose variables are set from outside between steps."""

    def __init__(self, session: Any, inputs: dict[str, Any], operations: dict[str, Any]):
        self._session, self._inputs = session, inputs
        self._operations = operations
        self._start = self.variables()

    def variables(self) -> dict[str, np.ndarray]:
        """Every variable, by name."""
        self._session.run(self._operations["to_masters"])
        return self._session.run(self._operations["masters"])

    def load(self, values: dict[str, np.ndarray]) -> None:
        """Sets variables. All masters have to be as new as the slices, as after `variables`."""
        placeholders, assignments = self._operations["placeholders"], self._operations["assign"]
        feed = {placeholders[name]: value for name, value in values.items()}
        self._session.run([assignments[name] for name in values], feed)
        self._session.run(self._operations["to_slices"])

    def run(self, schedule: Schedule) -> Iterator[dict[str, np.ndarray]]:
        """Every variable after each step of a schedule, from the initial values on."""
        self.load(self._start)
        found = self._start
        for feed in schedule.feeds():
            lag = feed.pop("lag")
            if np.any(lag):
                steps = found["sync_replicas/local_step"]
                self.load({"sync_replicas/local_step": steps - lag.reshape(steps.shape)})
            feed = {self._inputs[name]: value for name, value in feed.items()}
            self._session.run(self._operations["step"], feed)
            found = self.variables()
            yield found


def train(setup: Setup, mesh: mtf.Mesh, inputs: dict[str, tf.Tensor]) -> list[mtf.Operation]:
    """Operations of a step of the model of `tests.models`."""
    axes = setup.axes
    # The loss is the mean over the whole batch; a replica's own is the mean over its part.
    loss = models.mlp_loss(mesh, inputs, axes.batch_dims) * axes.num_shards
    variables = mesh.graph.trainable_variables
    grads = mtf.gradients([loss], [v.value for v in variables])
    if not setup.pending:
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
        variable_averages=AVERAGE_DECAY,
        variables_to_average=variables,
    )
    return opt.apply_gradients(list(zip(grads, variables)))


@contextlib.contextmanager
def program(setup: Setup) -> Iterator[Program]:
    """Builds the program and opens a session."""
    mesh_shape, layout, _ = harness.MESHES[setup.mesh]
    with tf.Graph().as_default(), contextlib.ExitStack() as stack:
        feed = Schedule(setup.shard_sizes, setup.replicas_to_aggregate, 1).feeds()[0]
        inputs = {
            name: tf.placeholder(tf.as_dtype(value.dtype), value.shape)
            for name, value in feed.items()
            if name != "lag"
        }
        cores = simd.replicas(mesh_shape, layout)
        with cores if setup.kind == "simd" else contextlib.nullcontext() as cores:
            mesh_impl = cores.mesh_impl if cores else harness.placement(mesh_shape, layout)
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            operations = train(setup, mesh, inputs)
            lowering = mtf.Lowering(graph, {mesh: mesh_impl})
            step = [lowering.lowered_operation(op) for op in operations]
        masters = {v.op.name: v for v in tf.global_variables()}
        placeholders = {k: tf.placeholder(v.dtype.base_dtype, v.shape) for k, v in masters.items()}
        assign = {k: tf.assign(v, placeholders[k]) for k, v in masters.items()}
        to_slices = lowering.copy_masters_to_slices()
        to_masters = lowering.copy_slices_to_masters()
        if cores:
            session = stack.enter_context(cores.session(lowering))
        else:
            init = tf.global_variables_initializer()
            config = session_config(num_cpu_devices=mesh_impl.size)
            session = stack.enter_context(tf.Session(config=config))
            session.run(init)
            session.run(to_slices)
        yield Program(
            session,
            inputs,
            {
                "step": step,
                "masters": masters,
                "placeholders": placeholders,
                "assign": assign,
                "to_slices": to_slices,
                "to_masters": to_masters,
            },
        )
