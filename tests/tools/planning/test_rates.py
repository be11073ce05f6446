"""Formulas of rings and links against figures worked by hand."""

import pytest

from mtf_gradsync import xla
from mtf_gradsync.tools import planning
from mtf_gradsync.tools.planning.machines import HOP_SECONDS, Torus, bytes_sent, sequential_hops

CHIPS = {chip.name: chip for chip in planning.CHIPS}


def grid(*directions, cores=1):
    """Places of all cores of a grid of chips, the last direction first, as libtpu numbers them."""
    places = [()]
    for size in reversed(directions):
        places = [(x, *place) for place in places for x in range(size)]
    return [(*place, core) for place in places for core in range(cores)]


def test_every_generation_has_figures_with_their_sources():
    assert [c.name for c in planning.CHIPS] == [g.name for g in xla.GENERATIONS]
    for chip in planning.CHIPS:
        assert len(chip.sources) == 2
        assert all(source.startswith("https://") for source in chip.sources)


def test_figures_are_those_of_the_chip_that_libtpu_has():
    # The compiler leaves a program a little less memory than is published, on each core.
    for chip, generation in zip(planning.CHIPS, xla.GENERATIONS):
        cores = {"v2": 2, "v3": 2, "tpu7x": 2}.get(chip.name, 1)
        assert 0.9 < cores * generation.memory_per_core / chip.hbm_bytes < 1.07


@pytest.mark.parametrize(
    ("operation", "members", "size", "sent"),
    [
        # Reduce-scatter, then all-gather: 3 quarters of it each.
        ("all-reduce", 4, 800, 1200),
        ("reduce-scatter", 4, 800, 600),
        # Its own part and two that it received.
        ("all-gather", 4, 100, 300),
        ("all-to-all", 2, 800, 400),
        # Each 16th goes 4 links far on average, if both ways round are used.
        ("all-to-all", 16, 1600, 6400),
        ("collective-permute", 4, 800, 800),
        ("all-reduce", 1, 800, 0),
    ],
)
def test_bytes_over_a_ring(operation, members, size, sent):
    assert bytes_sent(operation, members, size) == sent


def test_an_unknown_collective_is_an_error():
    with pytest.raises(ValueError, match="no formula for 'gossip'"):
        bytes_sent("gossip", 4, 1)


def test_hops_of_a_ring():
    assert [sequential_hops(o, 4) for o in ("all-reduce", "all-gather", "collective-permute")] == [
        6,
        3,
        1,
    ]
    assert sequential_hops("all-reduce", 1) == 0


class TestTorus:
    def test_an_open_line_uses_its_links_one_way(self):
        torus = Torus(CHIPS["v5e"], grid(4, 4))
        # 2 * 3/4 of 50 MB at 50 GB/s.
        row = torus.seconds("all-reduce", [[0, 1, 2, 3]], 50e6)
        assert row == pytest.approx(1.5e-3)

    def test_a_line_around_the_pod_closes_and_is_used_both_ways(self):
        torus = Torus(CHIPS["v5e"], grid(16, 16))
        # 2 * 15/16 of 16 MB at 2 * 50 GB/s.
        row = torus.seconds("all-reduce", [range(16)], 16e6)
        assert row == pytest.approx(0.3e-3)
        # Over both directions at once, twice as many links: 2 * 255/256 of 256 MB.
        everyone = torus.seconds("all-reduce", [range(256)], 256e6)
        assert everyone == pytest.approx(2 * 255e6 / 200e9)

    @pytest.mark.parametrize(
        ("directions", "closed"), [((4, 4, 4), True), ((4, 4, 8), True), ((2, 2, 4), False)]
    )
    def test_optical_switches_close_full_cubes(self, directions, closed):
        chip = CHIPS["v5p"]
        torus = Torus(chip, grid(*directions))
        count = directions[0] * directions[1] * directions[2]
        links = torus.links(range(count))
        assert links.bytes_per_second == (2 if closed else 1) * 3 * chip.link_bytes_per_second

    def test_groups_that_lie_in_each_other_share_links(self):
        torus = Torus(CHIPS["v5e"], grid(4, 1))
        # 0 and 2, with 1 in between: of the box of three, two are its own.
        two = torus.seconds("all-reduce", [[0, 2], [1, 3]], 1e6)
        assert two == pytest.approx(1e6 / (50e9 * 2 / 3))

    def test_cores_of_one_chip_need_no_link(self):
        torus = Torus(CHIPS["v3"], grid(2, 2, cores=2))
        assert torus.cores_per_chip == 2
        assert torus.seconds("all-reduce", [[0, 1], [2, 3]], 1e9) == 0
        # First cores alone share the links with second cores: 2 * 1/2 of 82 MB at 41 GB/s.
        assert torus.seconds("all-reduce", [[0, 2], [1, 3]], 82e6) == pytest.approx(2e-3)
        # All four together reduce on their chip first.
        assert torus.seconds("all-reduce", [[0, 1, 2, 3]], 82e6) == pytest.approx(1e-3)

    @pytest.mark.parametrize(
        ("operation", "microseconds"),
        [
            # Each chip gets the 2 MB of each of the three others.
            ("all-gather", 60),
            # A chip puts in 2 MB. Each quarter goes one link far on average.
            ("all-to-all", 20),
            # Each chip adds up its cores' MB first, and sends 3 quarters of the sum.
            ("reduce-scatter", 7.5),
            ("all-reduce", 15),
            # The root's MB, which its chip's other core reads there.
            ("collective-broadcast", 10),
        ],
    )
    def test_cores_of_a_chip_send_sums_together_and_all_else_apart(self, operation, microseconds):
        # 4 chips of 2 cores, 1 MB a core, over an open link of 50 GB/s in each of two directions.
        torus = Torus(CHIPS["v4"], grid(2, 2, 1, cores=2))
        seconds = torus.seconds(operation, [range(8)], 1e6)
        assert seconds == pytest.approx(1e-6 * microseconds)

    def test_pairs_of_a_permutation_share_the_links_between_their_chips(self):
        torus = Torus(CHIPS["v4"], grid(2, 2, 1, cores=2))
        # 2 MB from chip to chip over one link.
        both = torus.seconds("collective-permute", [[0, 2], [1, 3]], 1e6)
        assert both == pytest.approx(40e-6)

    def test_cores_that_gather_apart_share_the_links(self):
        torus = Torus(CHIPS["v4"], grid(2, 2, 1, cores=2))
        # First and second cores: each chip gets three other MB of each, as in one group.
        apart = torus.seconds("all-gather", [[0, 2, 4, 6], [1, 3, 5, 7]], 1e6)
        assert apart == pytest.approx(60e-6)

    def test_next_to_no_data_takes_the_hops(self):
        torus = Torus(CHIPS["v5e"], grid(4, 4))
        assert torus.seconds("all-reduce", [[0, 1, 2, 3]], 4) == 6 * HOP_SECONDS
