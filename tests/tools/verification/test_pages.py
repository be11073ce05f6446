"""The programs of pages and examples have the verdicts that they must have.

Pages and examples name their mesh in the program, so that here it is replaced by a division's.
"""

import contextlib
import io
import sys
from typing import Any, Callable, NamedTuple
from unittest import mock

import numpy as np
import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf, tf
from tests import documents


class Spec(NamedTuple):
    """What a model_fn returns, as far as it is read."""

    loss: tf.Tensor
    train_op: Any


@contextlib.contextmanager
def on_mesh(names, params, **more):
    """The names of an example or page have a division's mesh, of some of the devices it names."""
    kind = mtf.placement_mesh_impl.PlacementMeshImpl
    init = kind.__init__

    def on_some(self, shape, layout, devices):
        init(self, shape, layout, devices[: mtf.convert_to_shape(shape).size])

    given = {"MESH_SHAPE": params["mesh_shape"], "LAYOUT": params["layout"], **more}
    given = {k: v for k, v in given.items() if k in names}
    with mock.patch.dict(names, given):
        with mock.patch.object(kind, "__init__", on_some):
            yield


@contextlib.contextmanager
def fed(*tensors):
    """The program's placeholders are these, in their order."""
    with mock.patch.object(tf, "placeholder", side_effect=tensors):
        yield


def size_of(x):
    return int(x.shape[0])


def example(name):
    """The names of an example."""
    names: dict[str, Any] = {}
    path = documents.ROOT / "examples" / name
    with mock.patch.object(sys, "path", [str(path.parent), *sys.path]):
        exec(compile(path.read_text(encoding="utf-8"), name, "exec"), names)
    return names


def of_accumulate():
    names = example("accumulate.py")

    def program(features, labels, mode, params):
        trainer = object.__new__(names["Trainer"])
        with on_mesh(names, params), fed(features, labels):
            trainer._build(size_of(features), names["MICRO_STEPS"])
        return Spec(trainer.fields["loss"], tf.group(*trainer.update))

    return program


def of_from_v1():
    names = example("from_v1.py")

    def program(features, labels, mode, params):
        with on_mesh(names, params, BATCH=size_of(features)):
            loss, update, *_ = names["mesh_model"](features, labels)
        return Spec(loss, update)

    return program


def of_model_fn(names, takes_batch):
    def program(features, labels, mode, params, config):
        more = {"BATCH": size_of(labels)} if takes_batch else {}
        with on_mesh(names, params, **more):
            return names["model_fn"](features, labels, mode, params, config)

    return program


def of_sync_replicas():
    """Its data come by replica, and its loss is not shown."""
    names = example("sync_replicas.py")

    def program(features, labels, mode, params):
        axes = gs.ReplicaAxes(params["mesh_shape"], params["layout"])
        (replica,) = axes.shard_dims
        rows = size_of(features) // replica.size
        x, y = (
            tf.reshape(z, [replica.size, rows, *z.shape.as_list()[1:]]) for z in (features, labels)
        )
        trainer = object.__new__(names["Trainer"])
        with on_mesh(names, params, AXES=axes, REPLICA_BATCH=rows), fed(x, y):
            trainer._build(names["sync_replicas"])
        return Spec(tf.zeros([]), tf.group(*trainer.update))

    return program


def page(path, wanted):
    """The names that a page's first blocks leave behind, up to one that makes `wanted`."""
    names: dict[str, Any] = {}
    for block in documents.blocks(path):
        if wanted not in names:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block.code, block.place, "exec"), names)
    return names


def of_faster_page():
    names = page("docs/guides/faster.md", "build")

    def program(features, labels, mode, params, mesh_impl):
        with on_mesh(names, params):
            mesh, loss, updates = names["build"](features, gs.CrossShardOptimizer)
        return lowered(mesh, loss, updates, params, mesh_impl)

    return program


def lowered(mesh, loss, updates, params, mesh_impl):
    if mesh_impl is None:
        count = mtf.convert_to_shape(params["mesh_shape"]).size
        devices = [f"/device:CPU:{number}" for number in range(count)]
        mesh_impl = gs.placement_mesh_impl(params["mesh_shape"], params["layout"], devices)
    lowering = mtf.Lowering(mesh.graph, {mesh: mesh_impl})
    update = tf.group(*(lowering.lowered_operation(op) for op in updates))
    return Spec(lowering.export_to_tf_tensor(loss), update)


def of_no_optimizer_page():
    names = page("docs/guides/no_optimizer.md", "train_step")

    def program(mesh, inputs, params):
        batch, width = (
            mtf.Dimension(*x) for x in zip(("batch", "width"), inputs["x"].shape.as_list())
        )
        x = mtf.import_tf_tensor(mesh, inputs["x"], [batch, width])
        init = tf.glorot_uniform_initializer()
        w = mtf.get_variable(mesh, "w", [width, mtf.Dimension("hidden", 6)], initializer=init)
        out = mtf.einsum([mtf.einsum([x, w], reduced_dims=[width]), w], x.shape)
        loss = mtf.reduce_mean(mtf.square(out - x))
        return loss, names["train_step"](loss, 0.1, every=2)

    return program


def script(path, until, mesh_shape):
    """A page that is one script, up to the line that begins with `until`."""
    block = next(block for block in documents.blocks(path) if f"\n{until}" in block.code)
    code, _, _ = block.code.partition(f"\n{until}")

    def program(features, labels, mode, params, mesh_impl):
        names: dict[str, Any] = {}
        text = code.replace(mesh_shape, params["mesh_shape"])
        with mock.patch.object(tf, "set_random_seed"):
            exec(compile(text, path, "exec"), names)
        return lowered(names["mesh"], names["loss"], names["update_ops"], params, mesh_impl)

    return program


def images(features=64, rows=64, named=False):
    def batches():
        rng = np.random.RandomState(0)
        while True:
            x = rng.rand(rows, features).astype("f")
            yield ({"image": x} if named else x), rng.randint(10, size=rows).astype("i")

    return batches


def of_page():
    rng = np.random.RandomState(0)
    while True:
        yield {"x": rng.randn(16, 8).astype("f")}, rng.randn(16, 4).astype("f")


def rows_of(count, width):
    def batches():
        rng = np.random.RandomState(0)
        while True:
            yield {"x": rng.rand(count, width).astype("f")}

    return batches


ROWS = {"mesh_shape": "rows:2;cols:2", "layout": "batch:rows;hidden:cols"}
FOUR, EIGHT = (
    {"mesh_shape": f"batch:{shards};model:2", "layout": "batch:batch;hidden:model"}
    for shards in (2, 4)
)


class Case(NamedTuple):
    """A program, and what `verify` is given.

    Attributes:
      program: makes the program.
      batches: its batches.
      params: its settings.
      runtime: where it runs; a program that lowers itself has a placement mesh.
      divisions: that are tried beside its own.
    """

    program: Callable[[], Any]
    batches: Callable[[], Any]
    params: dict[str, Any]
    runtime: str = "placement_mesh"
    divisions: tuple[str, ...] = ("batch", "wrappers")


# All are equal: the pages and examples are right.
CASES = {
    "examples/accumulate.py": Case(of_accumulate, images(rows=32), FOUR),
    "examples/from_v1.py": Case(of_from_v1, images(), FOUR),
    "examples/model_fn.py": Case(
        lambda: of_model_fn(example("model_fn.py"), True), images(rows=16, named=True),
        {**ROWS, "rate": 0.003},
        "cpu_replicas", ("batch", "wrappers", "microbatches"),
    ),
    "examples/sync_replicas.py": Case(
        of_sync_replicas, images(), EIGHT, divisions=("wrappers", "masked")
    ),
    "docs/guides/model_fn.md": Case(
        lambda: of_model_fn(page("docs/guides/model_fn.md", "model_fn"), False), of_page,
        {**ROWS, "rate": 0.05}, "cpu_replicas",
    ),
    "docs/guides/no_optimizer.md": Case(of_no_optimizer_page, rows_of(8, 4), ROWS, "cpu_replicas"),
    "docs/guides/faster.md": Case(
        of_faster_page, lambda: iter([np.random.RandomState(0).rand(16, 16).astype("f")] * 9), ROWS,
        "cpu_replicas",
    ),
    "README.md": Case(
        lambda: script("README.md", "devices =", "rows:4;cols:2"), images(rows=16),
        {"mesh_shape": "rows:4;cols:2", "layout": "batch:rows;hidden:cols"}, "cpu_replicas",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_its_program_is_the_same_however_it_is_divided(name):
    case = CASES[name]
    found = gs.verify(
        case.program(), case.batches, case.params, divisions=case.divisions, runtime=case.runtime
    )
    assert {line.verdict for line in found.lines} == {"equal"}, str(found)
    assert found.is_equal
    assert len(found.lines) > 1, str(found)
