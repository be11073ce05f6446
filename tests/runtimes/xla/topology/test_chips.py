"""Names of TPU slices, and what they stand for; needs no compiler but where it is asked."""

import pytest

from mtf_gradsync import xla
from mtf_gradsync.runtimes.xla.topology.chips import CHIPS, peak_flops_of
from mtf_gradsync.runtimes.xla.topology.compiling import places_of
from mtf_gradsync.runtimes.xla.topology.slices import slice_of

GIB = 2**30
no_compiler = xla.why_no_tpu_compiler()


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        # As in Google Cloud's tables of each generation.
        ("v2-8", "v2:2x2"),
        ("v2-512", "v2:16x16"),
        ("v3-8", "v3:2x2"),
        ("v3-64", "v3:4x8"),
        ("v3-2048", "v3:32x32"),
        ("v4-8", "v4:2x2x1"),
        ("v4-16", "v4:2x2x2"),
        ("v4-32", "v4:2x2x4"),
        ("v4-64", "v4:2x4x4"),
        ("v4-128", "v4:4x4x4"),
        ("v4-4096", "v4:8x16x16"),
        ("v5litepod-1", "v5e:1x1"),
        ("v5litepod-4", "v5e:2x2"),
        ("v5litepod-8", "v5e:2x4"),
        ("v5litepod-128", "v5e:8x16"),
        ("v5e-16", "v5e:4x4"),
        ("v5p-8", "v5p:2x2x1"),
        ("v5p-8192", "v5p:16x16x16"),
        ("v6e-8", "v6e:2x4"),
        ("v6e-256", "v6e:16x16"),
        ("tpu7x:2x2x1", "tpu7x:2x2x1"),
    ],
)
def test_slices_by_their_names(name, topology):
    found = slice_of(name)
    assert found.topology == topology
    assert found.chip.name == found.generation.name == topology.partition(":")[0]


def test_a_core_of_v4_is_a_chip_unless_two_are_asked_for():
    chip = next(chip for chip in CHIPS if chip.name == "v4")
    whole, half = slice_of("v4-8"), slice_of("v4:2x2x1/two_cores")
    assert whole == slice_of("v4:2x2x1")
    assert (whole.config, half.config) == ("megacore", "default")
    assert whole.topology == half.topology
    # libtpu keeps a little of the 32 GiB for itself.
    assert 0.95 * chip.hbm_bytes < whole.generation.memory_per_core < chip.hbm_bytes
    assert 0.95 * chip.hbm_bytes < 2 * half.generation.memory_per_core < chip.hbm_bytes
    assert slice_of("v5p-8").config == ""


@pytest.mark.parametrize("name", ["v9:2x2", "v9-8", "v3", "v3:2x2/two_cores", "v4:2x2x1/", 7, ""])
def test_what_is_no_slice_is_an_error_that_says_how_to_name_one(name):
    with pytest.raises(ValueError, match=r"TPU generation and its chips, as in .* 'v4-8'"):
        slice_of(name)


@pytest.mark.parametrize("name", ["v5p-12288", "v4-24", "v4-7", "v5litepod-0"])
def test_a_name_that_does_not_say_the_arrangement_is_an_error(name):
    with pytest.raises(
        ValueError, match=f"'{name}' does not say how the chips are arranged: give the"
    ):
        slice_of(name)


def test_whether_a_program_fits_is_about_cores_as_the_topology_has_them():
    memory = xla.CoreMemory(20 * GIB, 0, 0, 0, 0)
    answer = xla.CompiledProgram("v4-8", "TPU v4", 4, "", (), (), (), memory, 0.0)
    halves = xla.CompiledProgram("v4:2x2x1/two_cores", "TPU v4", 8, "", (), (), (), memory, 0.0)
    assert (answer.fits()["v4"], halves.fits()["v4"]) == (True, False)
    assert answer.fits()["v3"] == halves.fits()["v3"] is False


@pytest.mark.tpu
@pytest.mark.skipif(bool(no_compiler), reason=no_compiler)
@pytest.mark.parametrize(
    ("name", "cores", "cores_per_chip"),
    [
        ("v4-8", 4, 1),
        pytest.param("v4:2x2x1/two_cores", 8, 2, marks=pytest.mark.slow),
        pytest.param("v4:2x1x1", 2, 1, marks=pytest.mark.slow),
        pytest.param("v5p-8", 4, 1, marks=pytest.mark.slow),
        pytest.param("v5litepod-8", 8, 1, marks=pytest.mark.slow),
        pytest.param("v3-8", 8, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_cores_are_those_that_programs_see(name, cores, cores_per_chip):
    places = places_of(name)
    assert len(places) == cores
    assert 1 + max(place[-1] for place in places) == cores_per_chip


@pytest.mark.parametrize(
    ("device_kind", "expected"),
    [
        ("TPU v2", 23e12),
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU7x", 1153.5e12),
        ("cpu", None),
        ("NVIDIA H100", None),
    ],
)
def test_the_peak_of_a_device_is_that_of_a_core(device_kind, expected):
    assert peak_flops_of(device_kind) == expected
