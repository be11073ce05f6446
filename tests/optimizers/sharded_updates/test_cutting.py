"""Which dimensions are split over the replicas."""

import re

import pytest

import mtf_gradsync as gs
from mtf_gradsync._private.libraries import mtf
from mtf_gradsync.optimizers.sharded_updates.cutting import shape_of_part, split_twice, why_whole

AXES = gs.ReplicaAxes("batch:4;model:2", "batch:batch;d_ff:model;experts:batch")
TWO = gs.ReplicaAxes("a:2;b:4", "outer:a;batch:b", ("outer", "batch"))


@pytest.mark.parametrize(
    ("axes", "shape", "part"),
    [
        (AXES, "d_model=8,d_ff=6", "batch=8,d_ff=6"),
        (AXES, "d_ff=6,d_model=8", "d_ff=6,batch=8"),
        (AXES, "odd=6,d_model=8", "odd=6,batch=8"),
        (AXES, "stack=8,d_model=8", "stack=8,batch=8"),
        (TWO, "x=8,y=6", "batch=8,outer=6"),
        (TWO, "x=6", "outer=6"),
    ],
)
def test_first_dimension_that_can_be_split_gets_the_shard_dims_name(axes, shape, part):
    assert shape_of_part(_shape(shape), axes, kept=["stack"]) == _shape(part)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ("", "is a scalar"),
        ("odd=6", "has no dimension left that 4 divides"),
        ("d_ff=8", "has no dimension that is not split already"),
        ("experts=4,d_ff=8,d_model=8", "is split over the replica axes already"),
        ("d_model=4", "has fewer than 5 elements"),
        ("stack=8", "knows .'stack'. by name"),
    ],
)
def test_what_stays_whole(shape, why):
    shape = _shape(shape)
    assert shape_of_part(shape, AXES, ["stack"], min_size=5) == shape
    assert re.search(why, why_whole(shape, AXES, ["stack"], min_size=5))


def test_a_dimension_of_the_model_is_split_over_the_replicas_too():
    splitting = split_twice(_shape("layers=3,d_ff=16"), AXES)
    assert splitting.apart == _shape("layers=3,d_ff=2,d_ff_batch=4,d_ff_rest=2")
    assert splitting.part == _shape("layers=3,d_ff=2,batch=4,d_ff_rest=2")
    assert split_twice(_shape("d_ff=12"), AXES) is None
    assert split_twice(_shape("d_ff=16"), AXES, min_size=17) is None


def _shape(text):
    pairs = [dim.split("=") for dim in text.split(",") if dim]
    return mtf.Shape([mtf.Dimension(name, int(size)) for name, size in pairs])
