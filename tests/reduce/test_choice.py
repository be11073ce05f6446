"""The choice of a strategy on hand-made meshes, and the strategy that makes it."""

import logging
from unittest.mock import Mock

import gin
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mtf_gradsync as gs
from mtf_gradsync import reduce, simd
from mtf_gradsync._private.libraries import mtf, tf
from mtf_gradsync.reduce import choice
from mtf_gradsync.reduce.choice import GPU_BUCKET_BYTES
from tests import harness, models
from tests.mesh.devices import cpus, gpu, placement
from tests.reduce import on_mesh

LINKED = [gpu(i, [(i + 1) % 4, (i - 1) % 4]) for i in range(4)]
UNLINKED = [gpu(i) for i in range(4)]
GPUS = [a.name for a in LINKED]


def messages(caplog, level):
    return [r.getMessage() for r in caplog.records if r.levelno == level]


@pytest.mark.parametrize(
    ("devices", "attributes", "strategy", "why"),
    [
        (cpus(8), None, "FusedAllReduce", "each other's memory"),
        (cpus(1), None, "FusedAllReduce", "nothing to sum"),
        ([""], None, "FusedAllReduce", "nothing to sum"),
        (cpus(4, 0) + cpus(4, 1), None, "HierarchicalAllReduce", "one copy"),
        (GPUS, LINKED, "CollectiveAllReduce", "NCCL"),
        (GPUS, UNLINKED, "FusedAllReduce", "no links"),
        (GPUS, [], "FusedAllReduce", "not known"),
        (["gpu:0", "gpu:0"], LINKED, "FusedAllReduce", "share a GPU"),
        (
            GPUS[:2],
            [gpu(0, [1], bus="a"), gpu(1, [0], bus="a")],
            "FusedAllReduce",
            "share a GPU",
        ),
        ([d.replace("CPU", "GPU") for d in cpus(2, 0) + cpus(2, 1)], [], "Hierarchical", "copy"),
        ([f"/device:TPU:{i}" for i in range(4)], None, "FusedAllReduce", "all kinds"),
        (cpus(2) + GPUS[:2], LINKED, "FusedAllReduce", "all kinds"),
    ],
)
def test_choice_and_reason_by_devices(devices, attributes, strategy, why, caplog):
    caplog.set_level(logging.INFO, "mtf_gradsync")
    chosen = reduce.choose_the_best(placement(devices), device_attributes=attributes)
    assert type(chosen).__name__.startswith(strategy)
    (said,) = messages(caplog, logging.INFO)
    assert said.startswith(strategy)
    assert why in said
    assert not messages(caplog, logging.WARNING)


def test_gpus_without_links_get_larger_buckets():
    chosen = reduce.choose_the_best(placement(GPUS), device_attributes=UNLINKED)
    assert chosen.bucket_bytes == GPU_BUCKET_BYTES


def test_unknown_kinds_fall_back_with_one_warning(caplog):
    caplog.set_level(logging.INFO, "mtf_gradsync")
    for _ in range(3):
        mesh = placement(["/device:FPGA:0", "/device:FPGA:1"])
        assert isinstance(reduce.choose_the_best(mesh), reduce.FusedAllReduce)
    (warning,) = messages(caplog, logging.WARNING)
    assert "FPGA" in warning
    assert len(messages(caplog, logging.INFO)) == 3


def test_groups_within_a_process_need_no_levels():
    mesh = mtf.placement_mesh_impl.PlacementMeshImpl("a:2;b:4", "", cpus(4, 0) + cpus(4, 1))
    for axes, strategy in [((0,), "Hierarchical"), ((1,), "Fused"), ((0, 1), "Hierarchical")]:
        groups = reduce.ProcessorGroups.along(mesh, axes)
        chosen = reduce.choose_the_best(mesh, groups=groups)
        assert type(chosen).__name__ == f"{strategy}AllReduce"


def test_simd(caplog):
    caplog.set_level(logging.INFO, "mtf_gradsync")
    with simd.tpu_program("all:8", "batch:all") as program:
        chosen = reduce.choose_the_best(program.mesh_impl)
    assert isinstance(chosen, reduce.FusedAllReduce)
    assert "SIMD mesh of 8" in messages(caplog, logging.INFO)[0]


def test_sizes_are_logged_as_far_as_they_are_known(caplog):
    caplog.set_level(logging.INFO, "mtf_gradsync")
    mesh_impl = harness.placement("all:8", "batch:all")
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    tensor = mtf.zeros(mesh, [mtf.Dimension("batch", 8), mtf.Dimension("d", 2**18)])
    laid_out = mesh_impl.LaidOutTensor([tf.zeros([2**17], tf.float64)] * 8)
    for gradients in (
        [tensor, None, laid_out],
        [tf.zeros([2**18], tf.bfloat16)],
        [tf.placeholder(tf.float32, [None])],
        [object()],
        [],
        None,
        7,
    ):
        reduce.choose_the_best(mesh_impl, gradients)
    said = [text.split(" on ")[0].split(" for ")[1] for text in messages(caplog, logging.INFO)]
    assert said == [
        "2 gradients (float32 and float64, 2 MiB a processor)",
        "1 gradient (bfloat16, 0.5 MiB a processor)",
        "1 gradient, not all of known size",
        "1 gradient, not all of known size",
        *["gradients of unknown sizes"] * 3,
    ]


PART = st.sampled_from(["", "/job:worker", "/task:1", "/device:CPU:0", "/device:GPU:1", "gpu:0"])
DEVICE = st.one_of(st.lists(PART, max_size=3).map("".join), st.text(max_size=12), st.none())
ATTRIBUTES = st.lists(
    st.one_of(
        st.none(),
        st.builds(gpu, st.integers(0, 3), st.lists(st.integers(-1, 4)), st.text(max_size=3)),
    ),
    max_size=4,
)


@settings(max_examples=150)
@given(st.lists(DEVICE, min_size=1, max_size=6), st.none() | ATTRIBUTES, st.booleans())
@pytest.mark.slow
def test_it_never_fails(devices, attributes, whole_list):
    mesh_impl = placement(devices) if whole_list else placement(devices[:1])
    chosen = reduce.choose_the_best(mesh_impl, [object(), None], None, attributes)
    assert isinstance(chosen, reduce.Strategy)


class NoTruth:
    """As numpy arrays and tensors of a graph are: neither true nor false."""

    def __bool__(self):
        raise ValueError("ambiguous")


@pytest.mark.parametrize("gradients", [np.ones(3), NoTruth(), [np.ones(3)], "grads", 1.5])
def test_gradients_that_are_none_do_no_harm(gradients, caplog):
    caplog.set_level(logging.INFO, "mtf_gradsync")
    assert isinstance(reduce.choose_the_best(placement(cpus(2)), gradients), reduce.FusedAllReduce)
    assert len(messages(caplog, logging.INFO)) == 1
    assert not messages(caplog, logging.WARNING)


@pytest.mark.parametrize("mesh_impl", [None, object(), "all:8"])
def test_what_is_no_mesh_gets_a_strategy_and_one_warning(mesh_impl, caplog):
    for _ in range(2):
        assert isinstance(reduce.choose_the_best(mesh_impl), reduce.FusedAllReduce)
    assert len(messages(caplog, logging.WARNING)) == 1


@pytest.mark.mostly_slow
def test_training_by_a_wrapper_equals_the_default(mesh_kind):
    mesh_shape, layout, batch_dims = harness.MESHES["2x2"]

    def losses(strategy):
        def make():
            inner = models.OPTIMIZERS["sgd"]()
            return gs.CrossShardOptimizer(inner, reducer=strategy)

        build = models.train(make, batch_dims)
        fetched = harness.run(mesh_kind, mesh_shape, layout, build, models.mlp_batches(3)).fetched
        return [step["loss"] for step in fetched]

    # On this mesh the choice is the default, so that the bits are the same.
    assert losses(reduce.BestAllReduce()) == losses(None)


def test_sums_equal_numpy_and_the_choice_is_logged_once(mesh_kind, caplog):
    caplog.set_level(logging.INFO, "mtf_gradsync")
    data = [
        np.random.RandomState(i).randn(8, *shape).astype("f")
        for i, shape in enumerate([(3,), (2, 5), ()])
    ]
    strategy = reduce.BestAllReduce()

    def make(impl, values):
        on_mesh.sums(strategy)(impl, values)
        return on_mesh.sums(strategy)(impl, values)

    for x, out in zip(data, on_mesh.run(mesh_kind, "all:8", data, make)):
        # Seven additions in float32 of partial sums no larger than the sum of magnitudes.
        bound = 7 * 2.0**-24 * np.abs(x).sum(0)
        assert (np.abs(out - x.sum(0, dtype=float)) <= bound).all()
    assert len(messages(caplog, logging.INFO)) == 1


def test_another_choice_in_the_same_process_is_logged_too(caplog):
    caplog.set_level(logging.INFO, "mtf_gradsync")
    for devices in (cpus(4, 0), cpus(2, 0) + cpus(2, 1), cpus(4, 0)):
        mesh_impl = placement(devices)
        groups = reduce.ProcessorGroups.along(mesh_impl, [0])
        reduce.BestAllReduce()._chosen(mesh_impl, [], groups)
    first, second = messages(caplog, logging.INFO)
    assert "FusedAllReduce" in first
    assert "HierarchicalAllReduce" in second


def test_another_error_of_a_mesh_is_logged_too(caplog, monkeypatch):
    errors = ValueError("no place"), TypeError("no devices"), ValueError("no place")
    monkeypatch.setattr(choice, "topology_of", Mock(side_effect=errors))
    for _ in errors:
        assert isinstance(reduce.choose_the_best(placement(cpus(2, 0))), reduce.FusedAllReduce)
    assert len(messages(caplog, logging.WARNING)) == 2


def test_wire_dtype_is_that_of_the_choice():
    processes = placement(cpus(2, 0) + cpus(2, 1))
    best, groups = reduce.BestAllReduce(), reduce.ProcessorGroups.along(processes, [0])
    assert best.wire_dtype(processes, tf.bfloat16, groups) == tf.bfloat16
    with simd.tpu_program("all:16", "batch:all") as program:
        groups = reduce.ProcessorGroups.along(program.mesh_impl, [0])
        assert best.wire_dtype(program.mesh_impl, tf.bfloat16, groups) == tf.float32


def test_a_strategy_with_state_is_refused_by_name(monkeypatch):
    """Its state would have to be made before there is a choice."""
    quantized = choice.Choice(reduce.QuantizedAllReduce(), "it sends the least")
    monkeypatch.setattr(choice, "choose", lambda topology, groups: quantized)
    data = [np.ones([2, 3], "f")]

    with pytest.raises(TypeError, match=r"Give QuantizedAllReduce\(reducer=BestAllReduce\(\)\)"):
        on_mesh.run("simd", "all:2", data, on_mesh.sums(reduce.BestAllReduce()))


def test_a_strategy_with_state_leaves_other_sums_to_it(mesh_kind, caplog):
    caplog.set_level(logging.INFO, "mtf_gradsync")
    strategy = reduce.QuantizedAllReduce(reducer=reduce.BestAllReduce())
    data = [np.arange(6, dtype="f").reshape(2, 3)]

    (out,) = on_mesh.run(mesh_kind, "all:2", data, on_mesh.sums(strategy))
    # Whole numbers below 2^24 are exact.
    np.testing.assert_array_equal(out, np.broadcast_to(data[0].sum(0), np.shape(out)))
    assert "FusedAllReduce" in messages(caplog, logging.INFO)[0]


def test_gin_gives_it_to_a_wrapper():
    gin.clear_config()
    gin.parse_config(
        """
        CompressedAllReduce.reducer = @BestAllReduce()
        CrossShardOptimizer.reducer = @BestAllReduce()
        """
    )
    try:
        assert isinstance(reduce.CompressedAllReduce().reducer, reduce.BestAllReduce)
        gs.CrossShardOptimizer(mtf.optimize.SgdOptimizer(0.1))
    finally:
        gin.clear_config()
