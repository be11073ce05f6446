"""Programs that are compiled only are those that would run, and say so where one runs them."""

import pytest

from mtf_gradsync import simd
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.runtimes.simd.program import compiled_only
from mtf_gradsync.runtimes.xla.installed import why_no_xla
from tests.tools.planning.machines import LAYOUT, build

SHAPE = "batch:2;model:2"


@pytest.mark.xla
@pytest.mark.skipif(bool(why_no_xla()), reason=why_no_xla())
def test_a_core_has_the_same_program():
    from mtf_gradsync.runtimes.xla.topology.compiling import lower

    built = build(SHAPE, LAYOUT)
    full = lower(built.program, built.fetches)
    with tf.Graph().as_default() as graph, compiled_only():
        small = build(SHAPE, LAYOUT)
        assert lower(small.program, small.fetches) == full
    assert len(graph.get_operations()) < len(built.program.graph.get_operations())


def test_what_it_exchanges_is_the_same():
    full = simd.list_collectives(build(SHAPE, LAYOUT).program)
    with tf.Graph().as_default(), compiled_only():
        assert simd.list_collectives(build(SHAPE, LAYOUT).program) == full


def test_the_graph_grows_by_the_numbers_of_cores_alone():
    counts = []
    for cores in (2, 6):
        with tf.Graph().as_default() as graph, compiled_only():
            build(f"batch:{cores}", "batch:batch")
        counts.append(len(graph.get_operations()))
    # Each core's number is a constant.
    assert counts[1] - counts[0] == 4


def test_it_does_not_run():
    with compiled_only():
        program = build(SHAPE, LAYOUT).program
    with pytest.raises(simd.UnsupportedProgramError, match="built to be compiled and not to run"):
        program.session()
