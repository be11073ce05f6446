"""Which TensorFlow can make HLO, and what is refused before a compiler is asked."""

import pytest

from mtf_gradsync import simd, xla
from mtf_gradsync._private.libraries import tf
from mtf_gradsync.xla.lowering.bridge import check_tensorflow

OLD = tuple(map(int, tf.__version__.split(".")[:2])) < (2, 18)


def a_program():
    with simd.tpu_program("all:4", "batch:all") as program:
        y = tf.ones([])
    return program, y


@pytest.mark.skipif(not OLD, reason="this TensorFlow is new enough")
def test_an_old_tensorflow_is_named():
    with pytest.raises(xla.TensorFlowTooOldError, match=r"needs TensorFlow 2\.18 or later; this"):
        check_tensorflow()
    program, y = a_program()
    with pytest.raises(xla.TensorFlowTooOldError):
        xla.compile_for_tpu(program, [y])
    assert "2.18" in xla.why_no_tpu_compiler()


@pytest.mark.skipif(OLD, reason="this TensorFlow is too old to compile")
def test_a_new_tensorflow_is_taken():
    check_tensorflow()


@pytest.mark.parametrize("topology", ["v3", "3:2x2", "v1:2x2", "", None])
def test_a_topology_that_is_none_is_refused_before_anything_else(topology):
    program, y = a_program()
    with pytest.raises(ValueError, match="'v3:2x2'"):
        xla.compile_for_tpu(program, [y], topology)
