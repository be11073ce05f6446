"""The benchmark of reductions measures what it says."""

import numpy as np
import pytest
from matplotlib import figure

from benchmarks import reduction_profiles, reductions, reductions_plot, report, timing
from mtf_gradsync._private.libraries import tf


@pytest.mark.parametrize(
    ("name", "gradients", "megabytes"),
    [("t5", 60, (75, 76)), ("tiny", 60, (0.25, 0.26)), ("big", 1, (67.1, 67.2))],
)
def test_profiles_are_as_large_as_the_table_says(name, gradients, megabytes):
    profile = reduction_profiles.PROFILES[name](8)
    assert len(profile.shapes) == gradients
    assert megabytes[0] <= profile.replica_bytes / 1e6 <= megabytes[1]
    assert profile.limit_bytes == 9 * profile.replica_bytes


def test_the_language_model_is_split_as_its_layout_says():
    whole, split = reduction_profiles.lm(2), reduction_profiles.lm(8)
    assert split.mesh_shape == "batch:4;model:2"
    assert len(whole.shapes) == len(split.shapes) == 19
    # Two groups of four, each of which reads four slices and writes a sum.
    assert split.limit_bytes == 2 * 5 * split.replica_bytes
    halves = [a != b for a, b in zip(whole.shapes, split.shapes)]
    # Each layer has four matrices of attention and two of the feed-forward pair; one embedding.
    assert sum(halves) == 2 * 6 + 1


def test_wrong_sums_are_refused():
    profile = reduction_profiles.Profile("all:2", "all", [[3], [4, 2]])

    def wrong(mesh_impl, values, groups):
        return [mesh_impl.slicewise(lambda a: a + 1e-3, x) for x in bare(mesh_impl, values, groups)]

    bare = reductions.strategies(2)[reductions.BARE]
    for name, strategy, error in [("right", bare, None), ("wrong", wrong, RuntimeError)]:
        graph, sums = reduction_profiles.build(profile, {reductions.BARE: bare, name: strategy})
        with reduction_profiles.running(graph, 2) as session:
            if error is None:
                reductions.check(session, sums)
            else:
                with pytest.raises(error, match="wrong is off"):
                    reductions.check(session, sums)


@pytest.mark.slow
def test_a_small_table_has_all_strategies_and_can_be_written(tmp_path, monkeypatch):
    def few(devices):
        return reduction_profiles.Profile(f"all:{devices}", "all", [[3], [40, 2], [], [16, 16]])

    monkeypatch.setitem(reduction_profiles.PROFILES, "tiny", few)
    monkeypatch.setattr(reductions, "COPIED_BYTES", 1 << 20)
    only = {"profiles": ("tiny",), "devices": (2, 4)}
    table = reductions.measure(report.Options(rounds=2, quick=True, only=only))
    names = [*reductions.strategies(2), reductions.LIMIT]
    assert [row["strategy"] for row in table.rows] == names
    assert {row["devices"] for row in table.rows} == {2}
    assert all(row["time/ring"].median > 0 for row in table.rows)
    by_name = {row["strategy"]: row for row in table.rows}
    assert by_name[reductions.BARE]["time/ring"] == (1, 1, 1)
    assert by_name[reductions.BEST]["graph ops"] == by_name["FusedAllReduce"]["graph ops"]
    written = report.as_json(table, report.Options(2, True, only))
    assert written["options"]["only"] == only
    assert reductions.BARE in report.as_text(table)
    report._draw(table, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_targets_compare_with_the_fastest_that_is_as_exact():
    seconds = {
        reductions.BARE: [1.0, 1.0],
        "good": [0.1, 0.1],
        reductions.COMPRESSED: [0.01, 0.01],
        reductions.BEST: [0.2, 0.3],
        reductions.LIMIT: [0.001, 0.001],
    }
    rows = [
        {
            "strategy": name,
            "time/ring": reductions.timing.ratio(seconds, name, reductions.BARE),
            "time/limit": reductions.timing.ratio(seconds, name, reductions.LIMIT),
            "graph ops": 5,
        }
        for name in seconds
    ]
    found = {t.what: t.value for t in reductions._targets("t5", 8, rows, seconds)}
    assert np.isclose(found["choose_the_best over good on t5, 8 devices"], 2.5)
    assert np.isclose(found["choose_the_best over the ring on t5, 8 devices"], 0.25)
    assert np.isclose(found["choose_the_best over the limit on t5, 8 devices"], 250)


def test_copying_moves_all_bytes():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        reductions.copying(1001, pool, 2)()
        moved = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(np, "copyto", lambda a, b: moved.append(a.nbytes + b.nbytes))
            reductions.copying(1 << 20, pool, 2)()
    assert sum(moved) == 1 << 20


def test_the_graph_has_nothing_but_variables_in_common():
    profile = reduction_profiles.Profile("all:2", "all", [[3]])
    strategies = reductions.strategies(2)
    graph, sums = reduction_profiles.build(profile, strategies)
    assert sum(op.type == "VarHandleOp" for op in graph.get_operations()) == 2
    assert list(sums) == list(strategies)
    assert all(isinstance(some.done, tf.Operation) for some in sums.values())


def test_the_picture_says_what_each_set_of_gradients_is():
    assert set(reduction_profiles.ABOUT) == set(reduction_profiles.PROFILES)
    axes = figure.Figure().add_subplot()
    rows = [
        {"devices": 8, "strategy": s, "profile": p, "time/ring": timing.Spread(1.0, 1.0, 1.0)}
        for p in reduction_profiles.PROFILES
        for s in ("ring", "other")
    ]
    reductions_plot.plot(axes, rows, "ring", reduction_profiles.ABOUT)
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    assert named == [f"{p}: {about}" for p, about in reduction_profiles.ABOUT.items()]
