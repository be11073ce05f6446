"""A small model, and a machine that only counts what it is asked."""

import contextlib
import gc
import os

from mtf_gradsync import simd
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.runtimes.xla.hlo_collectives import HloCollective
from mtf_gradsync.runtimes.xla.topology.compiling import LoweredProgram
from mtf_gradsync.runtimes.xla.topology.estimate import CostEstimate
from mtf_gradsync.tools import planning
from mtf_gradsync.tools.planning.machines import Compiled, StepCost

LAYOUT = "batch:batch;hidden:model"


def build(mesh_shape, layout, batch=12, wrap=lambda optimizer: optimizer):
    """A layer with its gradient added to it."""
    x = tf.placeholder(tf.float32, [batch, 8])
    with simd.tpu_program(mesh_shape, layout) as program:
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        rows, inputs = mtf.Dimension("batch", batch), mtf.Dimension("inputs", 8)
        w = mtf.get_variable(mesh, "w", [inputs, mtf.Dimension("hidden", 8)])
        h = mtf.einsum([mtf.import_tf_tensor(mesh, x, [rows, inputs]), w], reduced_dims=[inputs])
        loss = mtf.reduce_mean(mtf.square(h))
        updates = wrap(mtf.optimize.SgdOptimizer(0.1)).apply_grads(
            mtf.gradients([loss], [w]), graph.trainable_variables
        )
        lowering = mtf.Lowering(graph, {mesh: program.mesh_impl})
        tf_loss = lowering.export_to_tf_tensor(loss)
        for update in updates:
            lowering.lowered_operation(update)
    return planning.Built(program, [tf_loss], batch)


def interrupted_and_dropped(number):
    """Sends this process a signal where Python drops what its handler raises."""

    def signalled(phase, info):
        if phase == "start":
            os.kill(os.getpid(), number)

    gc.callbacks.append(signalled)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(signalled)


class Counting:
    """A machine of four cores on which an all-reduce of a byte takes a second."""

    peak_flops_per_core = 100.0
    bytes_per_second_per_core = 25.0
    estimate_source = "made up"
    slices = 1
    chips = 2
    dcn_bytes_per_second = float("inf")

    def __init__(self, name="four", cores=4, module=None, memory=1000, before=None, skipped=None):
        self.name, self.cores, self.memory_per_core = name, cores, memory
        self.module, self.before, self.skipped = module, before, skipped
        self.estimate = 2.0
        self.lowered, self.compiled = 0, []

    def lower(self, program, fetches):
        self.lowered += 1
        return LoweredProgram(self.cores, self.module or str(program.mesh_impl.shape))

    def compile(self, lowered, begun):
        with contextlib.ExitStack() as stack:
            if self.before is not None:
                self.before(lowered, begun, stack)
        self.compiled.append(lowered.module)
        groups = ((0, 1), (2, 3))
        return Compiled(
            bytes_per_core=600,
            step=StepCost(
                CostEstimate(200.0, 50.0, self.estimate),
                (HloCollective("all-reduce", "r", 3, groups, "main", ()),),
            ),
            skipped=self.skipped,
            seconds=0.5,
        )

    def seconds(self, operation, groups, size):
        return float(size)
