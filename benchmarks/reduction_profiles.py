"""The gradients that reductions are measured on, and each strategy's sums of them."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, NamedTuple, Sequence

from benchmarks import models
from mtf_gradsync import session_config
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.reduce import ProcessorGroups

FLOAT_BYTES = 4


class Profile(NamedTuple):
    """Gradients of one training step, as one processor holds them.

    Attributes:
      mesh_shape: Mesh-TF's mesh shape.
      reduced: the mesh dimension that gradients are summed along.
      shapes: the shape of each gradient's slice; float32.
    """

    mesh_shape: str
    reduced: str
    shapes: Sequence[Sequence[int]]

    @property
    def replica_bytes(self) -> int:
        """Bytes of all gradients on one processor."""
        return FLOAT_BYTES * sum(mtf.list_product(shape) for shape in self.shapes)

    @property
    def limit_bytes(self) -> int:
        """Bytes that sums must move: each group reads what its members have and writes one sum.

        Between CPU devices of one process the others read the sum where it is: a copy in every
        device moves nothing.
        """
        shape = mtf.convert_to_shape(self.mesh_shape)
        size = shape.get_dim_by_name(self.reduced).size
        return (size + 1) * self.replica_bytes * (shape.size // size)


def t5(devices: int) -> Profile:
    """Six layers of T5's small encoder with biases: 60 gradients, 75 MB."""
    matrices = [[512, 512]] * 4 + [[512, 2048], [2048, 512]]
    vectors = [[512], [512], [512], [2048]]
    return Profile(f"all:{devices}", "all", (matrices + vectors) * 6)


def tiny(devices: int) -> Profile:
    """30 layers of one small matrix and one bias: 60 gradients, 0.25 MB."""
    return Profile(f"all:{devices}", "all", [[32, 64], [64]] * 30)


def big(devices: int) -> Profile:
    """One matrix of 64 MiB."""
    return Profile(f"all:{devices}", "all", [[4096, 4096]])


def lm(devices: int) -> Profile:
    """The slices of configs/lm_cpu_mesh.gin's model, split two ways where there are 4 devices."""
    model = models.lm(layers=2)
    mesh_shape = f"batch:{devices // 2};model:2" if devices > 2 else "batch:2"
    names = [part.split(":")[0] for part in mesh_shape.split(";")]
    rules = [rule for rule in model.layout.split(";") if rule.split(":")[1] in names]
    with tf.Graph().as_default():
        graph = mtf.Graph()
        model.make_loss(mtf.Mesh(graph, "mesh"), tf.placeholder(tf.int32, model.batch.shape))
    impl = _mesh_impl(mesh_shape, ";".join(rules))
    shapes = [impl.slice_shape(v.shape) for v in graph.trainable_variables]
    return Profile(mesh_shape, "batch", shapes)


PROFILES: dict[str, Callable[[int], Profile]] = {"t5": t5, "tiny": tiny, "big": big, "lm": lm}
# What a processor has of each of them, in the few words that a legend has room for.
ABOUT = {
    "t5": "60 gradients, 75 MB",
    "tiny": "60 gradients, 0.25 MB",
    "big": "one gradient, 64 MiB",
    "lm": "19 of a transformer",
}


def _mesh_impl(mesh_shape: str, layout: str = "") -> Any:
    shape = mtf.convert_to_shape(mesh_shape)
    devices = [f"/device:CPU:{i}" for i in range(shape.size)]
    layout = mtf.convert_to_layout_rules(layout)
    return mtf.placement_mesh_impl.PlacementMeshImpl(shape, layout, devices)


class Sums(NamedTuple):
    """A strategy's sums in a graph.

    Attributes:
      done: makes them and puts each on every device.
      results: for each gradient the sum on each processor.
      operations: graph operations that the strategy made.
    """

    done: tf.Operation
    results: Sequence[Sequence[tf.Tensor]]
    operations: int


#: From a mesh, gradients and groups to sums; `Strategy.all_reduce` is one.
AllReduceFn = Callable[[Any, Sequence[Any], ProcessorGroups], Sequence[Any]]


def build(profile: Profile, strategies: dict[str, AllReduceFn]) -> tuple[tf.Graph, dict[str, Sums]]:
    """Builds the sums of several strategies over the same variables, in one graph.

    Args:
      profile: the gradients.
      strategies: by name, how they are summed.

    Returns:
      The graph and each strategy's sums.
    """
    impl = _mesh_impl(profile.mesh_shape)
    axis = impl.shape.dimension_names.index(profile.reduced)
    groups = ProcessorGroups.along(impl, [axis])
    sums = {}
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(1)
        variables = [_variables(impl, i, shape) for i, shape in enumerate(profile.shapes)]
        for name, all_reduce in strategies.items():
            values = []
            for slices in variables:
                read = [_on(x.device, x.read_value) for x in slices]
                values.append(impl.LaidOutTensor(read))
            before = graph.version
            reduced = all_reduce(impl, values, groups)
            operations = graph.version - before
            results = [
                [_on(d, lambda x=x: tf.identity(x)) for x, d in zip(y.tensor_list, impl.devices)]
                for y in reduced
            ]
            done = tf.group(*[x.op for slices in results for x in slices])
            sums[name] = Sums(done, results, operations)
    return graph, sums


def _variables(impl: Any, number: int, shape: Sequence[int]) -> list[tf.Variable]:
    return [
        _on(
            device,
            lambda p=p: tf.get_variable(
                f"g{number}_{p}",
                initializer=tf.random.stateless_uniform(shape, [number, p], -1.0, 1.0),
                use_resource=True,
            ),
        )
        for p, device in enumerate(impl.devices)
    ]


def _on(device: str, fn: Callable[[], Any]) -> Any:
    with tf.device(device):
        return fn()


@contextlib.contextmanager
def running(graph: tf.Graph, devices: int) -> Iterator[tf.Session]:
    """A session with as many CPU devices, variables made, that runs the graph as it was built."""
    config = session_config(num_cpu_devices=devices)
    # Grappler would drop the copies on the devices and merge what strategies have in common.
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with graph.as_default(), tf.Session(config=config) as session:
        session.run(tf.global_variables_initializer())
        yield session
