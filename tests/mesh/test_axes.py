"""Replica axes from mesh shape and layout."""

import pytest

import mtf_gradsync as gs
from mtf_gradsync import ReplicaAxes
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.mesh.axes import resolve_axes
from tests import harness


@pytest.mark.parametrize(
    "mesh_shape",
    ["batch:4;model:2", "batch:4,model:2", mtf.convert_to_shape("batch:4;model:2")],
)
@pytest.mark.parametrize(
    "layout",
    [
        "batch:batch;heads:model",
        mtf.convert_to_layout_rules("batch:batch;heads:model"),
        [("batch", "batch"), ("heads", "model")],
    ],
)
def test_every_form_that_mesh_tf_takes(mesh_shape, layout):
    axes = ReplicaAxes(mesh_shape, layout)
    assert axes.shard_dims == (mtf.Dimension("batch", 4),)
    assert (axes.mesh_axes, axes.num_shards) == ((0,), 4)


def test_shards_over_two_axes_in_the_order_of_batch_dims():
    axes = ReplicaAxes("a:2;b:3;c:5", "outer:c;batch:a;hidden:b", ("outer", "batch"))
    assert axes.shard_dims == (mtf.Dimension("outer", 5), mtf.Dimension("batch", 2))
    assert (axes.mesh_axes, axes.num_shards) == ((2, 0), 10)


def test_batch_dims_as_a_comma_list():
    axes = ReplicaAxes("a:2;b:2", "x:a;y:b", "x, y")
    assert axes.num_shards == 4


def test_names_that_the_layout_does_not_split_add_no_axis():
    axes = ReplicaAxes("all:8", "batch:all", ("outer_batch", "batch"))
    assert axes.shard_dims == (mtf.Dimension("batch", 8),)


def test_one_processor_and_unsplit_batches_have_one_shard():
    assert ReplicaAxes("one:1", "").num_shards == 1
    assert ReplicaAxes("model:8", "heads:model", batch_dims=()).num_shards == 1


def test_free_shard_dims_skip_axes_that_split_the_tensor():
    axes = ReplicaAxes("a:2;b:4", "outer:a;batch:b;experts:b", ("outer", "batch"))
    shape = mtf.Shape([mtf.Dimension("experts", 8), mtf.Dimension("d", 3)])
    assert axes.free_shard_dims(shape) == (mtf.Dimension("outer", 2),)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("batch4", "batch:batch"), "mesh_shape.*batch4"),
        ((None, "batch:batch"), "mesh_shape.*None"),
        (("a:2;a:4", "batch:a"), "twice.*a"),
        (("a:0", "batch:a"), "dimension 'a' must be a whole number of 1 or more, got 0"),
        (("all:8", "batch"), "layout.*'batch'"),
        (("all:8", None), "layout.*None"),
        (("all:8", [("batch",)]), "layout"),
        (("all:8", "heads:all"), "None of the batch dimensions.*batch"),
        (("a:2;b:4", "batch:a;batch:b"), "'batch' is split over several"),
        (("a:2;b:4", "x:a;y:a", ("x", "y")), "'x' and 'y' are both split over.*'a'"),
        (("a:2", "x:a", ("x", "x")), "once.*x"),
        (("a:2", "x:a", (3,)), "batch_dims.*3"),
        (("a:2", "x:a", 3), "batch_dims.*3"),
    ],
)
def test_errors_name_what_is_wrong(arguments, words):
    with pytest.raises(ValueError, match=words):
        ReplicaAxes(*arguments)


def test_resolve_takes_one_form_or_none():
    axes = ReplicaAxes("all:8", "batch:all")
    assert resolve_axes() is None
    assert resolve_axes(axes) is axes
    assert resolve_axes(None, "all:8", "batch:all").num_shards == 8
    with pytest.raises(ValueError, match="not both"):
        resolve_axes(axes, mesh_shape="all:8")
    with pytest.raises(ValueError, match="layout is missing"):
        resolve_axes(mesh_shape="all:8")
    with pytest.raises(TypeError, match="ReplicaAxes"):
        resolve_axes("all:8")


def test_a_mesh_with_other_axes_is_refused():
    axes = ReplicaAxes("all:8", "batch:all")
    axes.check_mesh_impl(harness.placement("all:8", "batch:all;d:all"))
    with pytest.raises(ValueError, match="lowered on mesh"):
        axes.check_mesh_impl(harness.placement("all:4", "batch:all"))
    with pytest.raises(ValueError, match="'batch'"):
        axes.check_mesh_impl(harness.placement("all:8", "d:all"))


def make_mesh(mesh_shape, layout):
    devices = [""] * mtf.convert_to_shape(mesh_shape).size
    return mtf.placement_mesh_impl.PlacementMeshImpl(mesh_shape, layout, devices)


@pytest.mark.parametrize(
    "make",
    [
        lambda: gs.SyncReplicasOptimizer(mtf.optimize.SgdOptimizer(0.1), 4),
        lambda: gs.GradientAccumulationOptimizer(
            mtf.optimize.SgdOptimizer(0.1), 4, accumulate="local"
        ),
    ],
)
def test_a_wrapper_takes_the_mesh_that_the_program_has_made(make):
    with pytest.raises(ValueError, match="there is no mesh yet: give mesh_shape"):
        make()
    make_mesh("batch:4;model:2", "batch:batch;heads:model")
    for _ in range(2):
        assert make().axes.shard_dims == (mtf.Dimension("batch", 4),)
        make_mesh("batch:4;model:2", "batch:batch;heads:model")
    make_mesh("all:8", "batch:all")
    with pytest.raises(ValueError, match=r"several meshes \(Shape\[batch=4, model=2\].*all=8"):
        make()


def test_what_works_without_a_mesh_takes_none():
    make_mesh("all:8", "batch:all")
    opt = mtf.optimize.SgdOptimizer(0.1)
    assert gs.CrossShardOptimizer(opt).axes is None
    accumulation = gs.GradientAccumulationOptimizer(opt, 4)
    assert accumulation.axes is None
    assert accumulation.accumulate is None, "decided when gradients are applied"
