"""A plan as text, as JSON and as a picture."""

import dataclasses
import json

from mtf_gradsync.tools import planning


def row(mesh_shape, step, **changes):
    facts = {
        "mesh_shape": mesh_shape,
        "layout": "batch:batch",
        "machine": "v5e:2x4",
        "cores": 8,
        "fits": True,
        "bytes_per_core": 4_000_000_000,
        "memory_per_core": 16_000_000_000,
        "flops": 3e12,
        "bytes_accessed": 2e9,
        "estimate_seconds": step / 2,
        "unknown_operations": 0,
        "traffic": (planning.AxisTraffic("batch", 3, 5_000_000, step / 2),),
        "link_seconds": step / 2,
        "step_seconds": step,
        "overlapped_seconds": step / 2,
        "tokens_per_second": 1000 / step,
        "share_of_peak": 0.25,
        "build_seconds": 1.0,
        "compile_seconds": 2.0,
        "is_repeated": False,
    }
    return planning.PlanRow(**{**facts, **changes})


PLAN = planning.Plan(
    (
        row("batch:8", 0.02),
        row("batch:4;model:2", 0.04, unknown_operations=2, unknown_names=("kernel",)),
    ),
    (planning.Refused("batch:2;model:4", "batch:batch", "v5e:2x4", "4 does not divide heads"),),
)


def test_as_text():
    lines = str(PLAN).splitlines()
    assert " ".join(lines[0].split()) == (
        "mesh on fits GB/core GFLOP GB touched estimate ms by links: MB, ms step ms at best "
        "tokens/s HFU"
    )
    assert " ".join(lines[2].split()) == (
        "batch:8 v5e:2x4 yes 4 (25%) 3,000 2 10 roofline batch 5, 10 20 10 50,000 25%"
    )
    assert "  batch:2;model:4 on v5e:2x4: 4 does not divide heads" in lines
    assert "Up to 2 custom calls of a program count with their bytes alone (kernel)." in lines
    assert "It does not know what overlaps" in " ".join(str(PLAN).split())
    assert "stopped" not in str(PLAN)


def test_a_price_adds_what_tokens_cost():
    known = {"mfu": 0.2, "dollars_per_hour": 9.0}
    priced = row("batch:8", 0.02, tokens_per_dollar=2e7, **known)
    (_, _, line, *_) = lines = str(planning.Plan((priced,))).splitlines()
    assert lines[0].split()[-7:] == ["tokens/s", "MFU", "HFU", "$", "/", "1e9", "tokens"]
    assert line.split()[-4:] == ["50,000", "20%", "25%", "50"]
    assert any(line.startswith("MFU is the share of the chips' peak that") for line in lines)
    by_hour = str(planning.Plan((row("batch:8", 0.02, tokens_per_second=None, **known),)))
    assert by_hour.splitlines()[0].endswith("$ / hour")
    assert "$" not in str(PLAN)


def test_a_reason_that_several_meshes_have_is_said_once():
    shapes = "batch:8", "batch:4", "batch:2"
    reasons = "no file", "too many heads", "no file"
    refused = [planning.Refused(s, "batch:batch", "v5e", r) for s, r in zip(shapes, reasons)]
    assert str(planning.Plan((), tuple(refused))).splitlines()[3:] == [
        "  no file",
        "    batch:8 on v5e",
        "    batch:2 on v5e",
        "  batch:4 on v5e: too many heads",
    ]


def test_it_says_where_figures_are_those_of_an_update_step():
    said = "The figures of programs with conditionals are those of a step with the update."
    assert said in str(planning.Plan((row("batch:8", 0.02, is_of_update=True),))).splitlines()
    assert said not in str(PLAN)


def test_an_estimate_in_doubt_is_said_to_be(tmp_path):
    wrong = row("batch:8", 0.02, doubt="below its roofline of 30 ms")
    said = (
        "Not ranked: batch:8, batch:batch, on v5e:2x4: the estimate is below its roofline of 30 ms."
    )
    assert said in str(planning.Plan((wrong,))).splitlines()
    assert "Not ranked" not in str(PLAN)


def test_means_over_the_steps_of_an_update_have_a_column_and_a_line():
    facts = {"steps_per_update": 4, "skipped_step_seconds": 0.01, "mean_step_seconds": 0.0125}
    lines = str(planning.Plan((row("batch:8", 0.02, parameters=1234567, **facts),))).splitlines()
    header, cells = (" ".join(lines[n].split()) for n in (0, 2))
    assert "step ms at best mean ms tokens/s" in header
    assert "20 10 12.5 50,000" in cells
    assert "1,234,567 parameters." in lines
    assert any("means over 4 steps, one with the update" in line for line in lines)
    assert "mean" not in str(PLAN)
    assert "parameters" not in str(PLAN)


def test_an_empty_plan_says_so():
    assert str(planning.Plan(())).startswith("no mesh can be planned")


def test_it_says_when_fewer_messages_pay():
    def slices(dcn, outer, step):
        ways = [("OuterOptimizer", outer), ("islands", step / 2)]
        fewer = tuple(planning.FewerMessages(way, 10, s, 0.03) for way, s in ways)
        return row("batch:8", step, slices=2, dcn_seconds=dcn, fewer_messages=fewer)

    lines = str(planning.Plan((slices(0.01, 0.016, 0.02), slices(0.001, 0.039, 0.04)))).splitlines()
    (at,) = [i for i, x in enumerate(lines) if x.startswith("ms a step if TPU slices exchange")]
    assert lines[at + 1].split() == (
        ["mesh", "every", "step", "of", "it", "DCN", "OuterOptimizer,", "10", "islands,", "10"]
    )
    assert lines[at + 3].split() == ["batch:8", "on", "v5e:2x4", "20", "10", "16", "10"]
    words = "OuterOptimizer takes less than a sum in each step from"
    assert lines[at + 5 : at + 7] == [
        f"  batch:8 on v5e:2x4: {words} 4 inner steps on; islands with 10 saves 50% of a step.",
        f"  batch:8 on v5e:2x4: {words} 31 inner steps on; islands with 10 saves 50% of a step.",
    ]
    alone = dataclasses.replace(
        slices(0.001, 0.039, 0.04),
        fewer_messages=(planning.FewerMessages("OuterOptimizer", 10, 0.039, 0.03),),
    )
    assert "do not pay (at most 2.5%)" in str(planning.Plan((alone,)))
    assert "fewer messages" not in str(PLAN)


def test_as_json():
    content = json.loads(PLAN.to_json())
    assert set(content) == {"rows", "refused", "is_partial", "not_reached", "stopped_by"}
    assert content["rows"][0] == {
        **{name: getattr(PLAN.rows[0], name) for name in PLAN.rows[0].__dataclass_fields__},
        "unknown_names": [],
        "fewer_messages": [],
        "skipped_step_traffic": [],
        "traffic": [
            {"axis": "batch", "collectives": 3, "bytes_per_core": 5_000_000, "seconds": 0.01}
        ],
    }
    assert content["refused"][0]["reason"] == "4 does not divide heads"
    assert content["is_partial"] is False


def test_several_layouts_are_told_apart(tmp_path, monkeypatch):
    other = "batch:batch;heads:model"
    rows = (row("batch:8", 0.02), row("batch:8", 0.04, layout=other, loops_counted_once=1))
    plan = planning.Plan(rows, (planning.Refused("batch:4", other, "v5e:2x4", "none"),))
    assert f"  batch:4, {other}, on v5e:2x4: none" in str(plan).splitlines()
    assert "Some loops run an unknown number of times" in str(plan)
    drawn = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure)
    )
    plan.plot(str(tmp_path / "plan.png"))
    (axes,) = drawn[0].axes
    assert len({bar.get_y() for bar in axes.patches}) == 2
    assert f"batch:8, {other}, on v5e:2x4" in [label.get_text() for label in axes.get_yticklabels()]
    assert [text.get_text() for text in axes.texts] == [" 20.0 ms", " 40.0 ms"]
    planning.Plan((row("batch:8", 0.1), row("batch:4", 0.00123))).plot(str(tmp_path / "plan.png"))
    assert [text.get_text() for text in drawn[1].axes[0].texts] == [" 100.00 ms", " 1.23 ms"]


def test_as_a_picture(tmp_path):
    path = tmp_path / "plan.png"
    PLAN.plot(str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
