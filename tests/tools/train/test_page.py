"""The page of a run, without a browser; `check_in_browser` has one."""

import html.parser
import re

import numpy as np
import pytest

from mtf_gradsync.tools.timelines import Table
from mtf_gradsync.tools.timelines.table import tabulate_times
from mtf_gradsync.tools.train.page import Ended, write_page
from mtf_gradsync.tools.train.plots import Series, draw_traffic, series_of, thin_out
from mtf_gradsync.tools.train.run_files import (
    REPORT_FILE,
    TIMELINE_FILE,
    RecordedSteps,
    RunFacts,
    read_facts,
    read_recorded_steps,
    remove_later_recorded,
    write_facts,
    write_recorded_steps,
)
from mtf_gradsync.tools.train.traffic import Traffic, TrafficRow
from tests.tools.timelines.recordings import two_cores

pytest.importorskip("jinja2")

_VOID = {"meta", "link", "br"}
_LOADS = {"src", "href", "xlink:href", "data", "poster", "action"}


class Page(html.parser.HTMLParser):
    """What a page holds; raises AssertionError for elements that are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts, self.references = [], [], {}, []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.references += [v for k, v in attributes if k in _LOADS]
        self.references += re.findall(r"url\(([^)]*)\)", dict(attributes).get("style", ""))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts[self.open[-1]] = self.texts.get(self.open[-1], "") + data

    def of(self, tag):
        return [attributes for t, attributes in self.elements if t == tag]


TRAFFIC = Traffic(
    every_step=30,
    update_step=130,
    rows=[
        TrafficRow("CrossReplicaSum", "batch", "gradients", True, 19, 1, 100),
        TrafficRow("CrossReplicaSum", "model", "forward and backward", False, 3, 3, 30),
    ],
    scalars={"traffic/bytes_of_update_step": 130.0, "traffic/bytes_of_other_step": 30.0},
)
FACTS = RunFacts(
    mesh="batch:4",
    layout="batch:batch",
    runtime="XLA devices",
    optimizers=["SyncReplicasOptimizer", "AdafactorOptimizer"],
    parameters=1234567,
    tokens_per_step=256,
    versions={"Python": "3.11"},
    traffic=TRAFFIC,
)


def rows_of(steps, shards=4):
    return [
        {
            "step": step,
            "loss": 5.0 / step,
            "tokens_per_second": 100.0,
            "learning_rate": 0.1,
            "gradient_norm/before_clipping": 100.0 / step,
            "gradient_norm/applied": 1.0,
            "gradient_norm/of_shards": [1.0 + s for s in range(shards)],
            "accumulation/skipped": step // 2,
            "gradient_noise_scale": 10.0 + step,
            "loss_scale/scale": 1024.0,
            "loss_scale/skipped": step // 3,
            "sync_replicas/contributions": [step] * shards,
            "sync_replicas/dropped": [0] * (shards - 1) + [step],
        }
        for step in range(1, steps + 1)
    ]


def page_of(directory, rows, ended=None, facts=FACTS, **kwargs):
    ended = ended or Ended(len(rows), 10, "stopped early", {})
    path = write_page(directory, rows, ended, facts, **kwargs)
    assert path == directory / REPORT_FILE
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    identifiers = [a["id"] for _, a in page.elements if "id" in a]
    assert len(set(identifiers)) == len(identifiers)
    # Inside the page, or nothing at all.
    assert all(r.startswith("#") or r == "data:," for r in page.references), page.references
    assert {r[1:] for r in page.references if r[0] == "#"} <= set(identifiers)
    assert not page.of("script")
    assert "@import" not in text
    for plot in page.of("svg"):
        assert plot["role"] == "img"
        assert plot["aria-label"]
    return page


@pytest.mark.parametrize("shards", [4, 40])
@pytest.mark.mostly_slow
def test_all_of_a_run(tmp_path, shards):
    result = {
        "held_out": {"perplexity": 3.5, "nats_per_token": 1.25, "bits_per_byte": 1.8},
        "unigram": {"perplexity": 20.0, "nats_per_token": 3.0, "bits_per_byte": 4.3},
        "seconds": 12.0,
        "tokens_per_second": 4321.0,
    }
    rows = [*rows_of(20, shards), {"step": 20, "held_out_nats": 1.25}]
    page = page_of(tmp_path, rows, Ended(20, 20, "finished", result), unigram_nats=3.0)
    assert page.texts["h3"] == (
        "LossSpeedLearning rateNorm of the gradientNorms of the shards' gradients"
        "Gradient noise scaleLoss scaleMicrobatch steps skippedSteps skipped"
        "Steps without a contributionBytes by kind and mesh axis"
    )
    assert len(page.of("figure")) == len(page.of("svg")) == 11
    labels = " ".join(plot["aria-label"] for plot in page.of("svg"))
    assert "training: 5 at step 1, 0.25 at step 20" in labels
    assert f"{shards} shards" in labels
    assert "CrossReplicaSum over batch for gradients: 0.100 kB" in labels
    for number in ("1.250", "3.500", "1.800 bits per byte", "3.000", "4,321", "1,234,567", "0.130"):
        assert number in page.texts["dd"]


# To draw takes a second.
WITHOUT_PLOTS = FACTS._replace(traffic=None)
RECORDED = RecordedSteps(6, 7, "batch:4", tabulate_times([two_cores()]))


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        (RECORDED, "Steps 6 to 7 were recorded, 1 of them with an update, on the mesh "),
        (RECORDED._replace(first=7), "Step 7 was recorded"),
    ],
)
def test_the_recorded_steps_are_named(tmp_path, recorded, said):
    page = page_of(tmp_path, [], facts=WITHOUT_PLOTS, recorded=recorded)
    assert said in page.texts["p"]
    assert page.texts["code"].startswith("batch:4")
    assert "now" not in page.texts.get("strong", "")


def test_steps_that_were_recorded_on_another_mesh(tmp_path):
    page = page_of(
        tmp_path, [], facts=WITHOUT_PLOTS, recorded=RECORDED._replace(mesh="batch:2;model:2")
    )
    assert page.texts["code"].startswith("batch:2;model:2")
    assert "the run is on the mesh batch:4 now" in page.texts["strong"]


def test_recorded_steps_are_kept(tmp_path):
    write_recorded_steps(tmp_path, RECORDED)
    assert read_recorded_steps(tmp_path) == RECORDED
    text = (tmp_path / TIMELINE_FILE).read_text()
    assert Table.from_json(text) == RECORDED.table
    remove_later_recorded(tmp_path, 7)
    assert read_recorded_steps(tmp_path) == RECORDED
    # They are made once more.
    remove_later_recorded(tmp_path, 6)
    assert not (tmp_path / TIMELINE_FILE).exists()
    # Of unknown steps, as earlier versions wrote it.
    (tmp_path / TIMELINE_FILE).write_text(RECORDED.table.to_json())
    assert read_recorded_steps(tmp_path) is None


@pytest.mark.parametrize("facts", [None, FACTS._replace(traffic=None)])
def test_nothing_to_plot(tmp_path, facts):
    page = page_of(tmp_path, [], Ended(0, 10, "ended by an error, no data", {}), facts)
    assert not page.of("svg")
    assert "0 of 10 steps: ended by an error, no data" in page.texts["p"]
    assert "Nothing was measured yet" in page.texts["p"]


def test_an_update_that_is_not_looked_into_is_no_number(tmp_path):
    page = page_of(tmp_path, [], facts=FACTS._replace(traffic=TRAFFIC._replace(is_complete=False)))
    assert page.texts["strong"] == "without what an update sends:"
    assert "130" not in page.texts["dd"]


@pytest.mark.slow
def test_no_section_about_replicas_where_none_contributes(tmp_path):
    rows = [{"step": 1, "loss": 5.0}]
    assert "Replicas" not in page_of(tmp_path, rows, facts=WITHOUT_PLOTS).texts["h2"]
    page = page_of(tmp_path, rows_of(1), facts=WITHOUT_PLOTS)
    assert "Replicas" in page.texts["h2"]
    assert "Steps without a contribution" in page.texts["h3"]


def test_every_bar_is_to_be_seen():
    def row(size, number):
        return TrafficRow("CrossReplicaSum", f"axis{number}", "", False, 1, 1, size)

    # As of configs/lm_cpu_mesh.gin, the largest first.
    rows = [row(size, n) for n, size in enumerate([2_631_680, 888_320, 6_792, 16, 4])]
    plot = draw_traffic(TRAFFIC._replace(rows=rows))
    assert "axis1: 888.320 kB" in plot.svg
    assert "axis2" not in plot.svg
    assert "too little for a bar, 6.812 kB in all" in plot.caption
    plot = draw_traffic(TRAFFIC._replace(rows=rows[:2]))
    assert "too little" not in plot.caption
    assert draw_traffic(TRAFFIC._replace(rows=[])) is None


def test_samples_and_config_are_text_whatever_they_hold(tmp_path):
    markup = "</pre><script>alert(1)</script>&amp;<img src=x onerror=y>{{ 7 * 7 }}"
    hostile, shown = f"{markup}\x00\x1b\ud800\u202e\r\n", markup + 4 * "\ufffd" + "\n"
    directory = tmp_path / "<b>&run"
    ended = Ended(1, 2, hostile, {})
    page = page_of(directory, rows_of(1), ended, samples=hostile, config=hostile)
    assert not page.of("img")
    assert page.texts["pre"] == shown * 2
    assert page.texts["h1"] == "<b>&run"


def test_facts_come_back(tmp_path):
    assert read_facts(tmp_path) is None
    for facts in (FACTS, FACTS._replace(traffic=None)):
        write_facts(tmp_path, facts)
        assert read_facts(tmp_path) == facts
    (tmp_path / "facts.json").write_text('{"mesh": 3}')
    assert read_facts(tmp_path) is None


def test_series_of_lines():
    rows = [{"step": 1, "x": [1, 2]}, {"step": 2}, {"step": 3, "x": [1, 2, 3]}]
    found = series_of(rows, "x")
    assert found.steps.tolist() == [3]
    assert found.last.tolist() == [1, 2, 3]
    assert series_of(rows, "y") is None
    assert series_of([{"step": 1, "x": float("nan")}], "x") is None


def test_no_slot_beside_a_plot_is_empty(tmp_path):
    rows = [{"step": step, "loss": 5.0 / step, "learning_rate": 0.1} for step in (1, 2)]
    page = page_of(tmp_path, rows, facts=WITHOUT_PLOTS)
    assert [figure.get("class") for figure in page.of("figure")] == [None, None]
    # The loss takes both columns of a wide window, where the others fill theirs.
    rows = [{**row, "tokens_per_second": 100.0} for row in rows]
    page = page_of(tmp_path, rows, facts=WITHOUT_PLOTS)
    assert [figure.get("class") for figure in page.of("figure")] == ["wide", None, None]
    boxes = [[float(x) for x in plot["viewbox"].split()] for plot in page.of("svg")]
    assert [round(box[2]) for box in boxes] == [374, 770, 374, 374]


def test_a_phone_sees_bytes_per_core_first(tmp_path):
    text = write_page(tmp_path, [], Ended(0, 1, "", {}), FACTS).read_text(encoding="utf-8")
    table = text[text.index("In one update step") :]
    row = re.search(r"<tbody>\s*<tr>(.*)</tr>", table)[1]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", row)
    assert cells == ["0.100", "batch", "gradients", "updates", "1", "19", "CrossReplicaSum"]


@pytest.mark.parametrize("shape", [[1001], [1001, 2]])
def test_many_points_become_means_and_counts_do_not(shape):
    values = np.arange(np.prod(shape), dtype=float).reshape(shape)
    full = Series(np.arange(1, 1002), values)
    fewer, counts = thin_out(full), thin_out(full, is_count=True)
    assert len(fewer.steps) == len(counts.steps) == 334
    assert fewer.steps_per_point == 3
    np.testing.assert_allclose(fewer.values[0], values[:3].mean(axis=0))
    np.testing.assert_allclose(fewer.values[-1], values[999:].mean(axis=0))
    assert fewer.steps[-1] == counts.steps[-1] == 1001
    np.testing.assert_array_equal(counts.last, values[-1])
