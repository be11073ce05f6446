import json
import re

import pytest

from mtf_gradsync.tools.train.cli import main as cli
from tests.tools.train.conftest import NO_ATTENTION, TINY, accumulates

LAYOUT = "'batch:batch,d_ff:model,heads:model,vocab:model'"
ACCUMULATION = accumulates(mesh_shape="'batch:2;model:2'", layout=LAYOUT)


@pytest.fixture
def report(tmp_path, capsys, monkeypatch):
    """Runs the command on tiny.gin with more bindings; returns what it printed and its JSON.

    The terminal is narrow.
    """
    monkeypatch.setenv("COLUMNS", "80")

    def call(*bindings, flags=()):
        path = tmp_path / "report.json"
        params = [f"--gin_param={binding}" for binding in bindings]
        arguments = ["report", f"--gin_file={TINY}", *params, f"--json={path}", *flags]
        assert cli.main(arguments) == 0
        return capsys.readouterr().out, json.loads(path.read_text())

    return call


def gradient_rows(step):
    return [row for row in step["collectives"]["rows"] if row["part"] == "gradients"]


def without_gradients(step):
    """Totals of the parts that no wrapper touches."""
    parts = step["collectives"]["totals"]["by_part"]
    return {name: total for name, total in parts.items() if name != "gradients"}


@pytest.mark.slow
def test_wrapper_sums_the_same_bytes_in_one_group(report, tmp_path):
    picture = tmp_path / "report.png"
    text, content = report(flags=[f"--png={picture}"])
    bare, wrapped = content["bare"], content["wrapped"]
    assert content["mesh"] == "batch:2;model:2"
    assert bare["optimizers"] == ["AdafactorOptimizer"]
    assert wrapped["optimizers"] == ["CrossShardOptimizer", "AdafactorOptimizer"]

    # Eleven variables cross the batch axis, the sliced positional embedding among them; wrapped,
    # they are one group.
    before = bare["collectives"]["totals"]["by_part"]["gradients"]
    after = wrapped["collectives"]["totals"]["by_part"]["gradients"]
    assert (before["operations"], before["groups"]) == (11, 11)
    assert (after["operations"], after["groups"]) == (11, 1)
    # One core's slices in float32: positions, embedding (vocab split), three norms, q, k, v and o,
    # two dense kernels (d_ff split).
    numbers = 16 * 16 + 260 // 2 * 16 + 3 * 16 + 4 * 16 * 8 + 2 * 16 * 16
    assert before["bytes_per_core"] == after["bytes_per_core"] == 4 * numbers
    reduce, update = (line["what"] for line in wrapped["does"])
    told = f"reduce over batch, 2 shards: fused, {4 * numbers / 1000:.3g} kB in 1 group"
    assert reduce == told
    assert "What the optimizer does\n\nevery step  reduce over batch, 2 shards: fused," in text
    # The norms are one stacked variable of the model, and so is what layers share.
    assert re.fullmatch(r"update \d+ variables by Adafactor", update)
    assert [line["what"] for line in bare["does"]] == ["update by Adafactor"]
    assert {row["group"] for row in gradient_rows(bare) + gradient_rows(wrapped)} == {"batch"}
    assert without_gradients(bare) == without_gradients(wrapped)
    whole = wrapped["collectives"]["totals"]
    assert whole["every_step"] == whole["update_step"]
    assert whole["conditional"]["operations"] == 0

    before, after = (step["transfers"]["totals"]["every_step"] for step in (bare, wrapped))
    assert 0 < after["operations"] < before["operations"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "CrossShardOptimizer > AdafactorOptimizer" in text
    assert "Collectives that sum gradients, wrapped: 11 operations in 1 group" in text
    # Norms have one shape and one stack: they read alike, and are one row that names them.
    listed = text.partition("11 operations in 1 group\n")[2]
    assert "at sum_gradients" in listed
    rows = [line.split() for line in listed.splitlines() if line.lstrip()[:1].isdigit()]
    assert sum(int(row[0]) for row in rows) == 11
    assert len(rows) < 11
    for name in ("SelfAttention/q", "SelfAttention/k", "SelfAttention/v"):
        assert name in re.sub(r"/\s+", "/", listed)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.slow
def test_accumulation_sums_gradients_in_update_steps_only(report):
    text, content = report(*ACCUMULATION, flags=["--no_placement", "--rows"])
    bare, wrapped = content["bare"], content["wrapped"]
    assert wrapped["transfers"] is None
    sums = gradient_rows(wrapped)
    # The accumulators of all variables are reduced together, when there is an update.
    assert len({row["together"] for row in sums}) == 1
    assert all(row["branches"] for row in sums)
    expected = sum(row["bytes_per_core"] for row in gradient_rows(bare))
    assert sum(row["bytes_per_core"] for row in sums) == expected
    assert not any(row["branches"] for row in bare["collectives"]["rows"])
    parts = [step["collectives"]["totals"]["by_part"] for step in (bare, wrapped)]
    assert parts[0]["model"] == parts[1]["model"]
    assert parts[0]["optimizer"] == parts[1]["optimizer"]
    # The update's own collectives wait for the update too.
    totals = wrapped["collectives"]["totals"]
    optimizer = totals["by_part"]["optimizer"]
    assert optimizer["operations"] > 0
    assert totals["conditional"]["operations"] == len(sums) + optimizer["operations"]
    assert (
        totals["every_step"]["bytes_per_core"]
        < (bare["collectives"]["totals"]["every_step"]["bytes_per_core"])
    )
    assert "in branches" in text
    assert "All collectives, bare" in text
    assert max(map(len, text.splitlines())) <= 80


def test_optimizer_without_wrapper_is_listed_once(report):
    text, content = report(
        "train.run.optimizer = @AdafactorOptimizer", NO_ATTENTION, flags=["--no_placement"]
    )
    assert content["bare"] == content["wrapped"]
    assert "has no wrapper" in text


@pytest.mark.slow
def test_microbatches_count_every_turn_of_the_loop(report):
    _, content = report(
        "utils.serialize_num_microbatches.tokens_per_microbatch_per_replica = 16",
        NO_ATTENTION,
        flags=["--no_placement"],
    )
    rows = content["wrapped"]["collectives"]["rows"]
    assert {row["turns"] for row in rows if row["loops"]} == {4}
    # Bare, the positions' gradient is padded, and for that summed, in every turn of the loop.
    bare, wrapped = gradient_rows(content["bare"]), gradient_rows(content["wrapped"])
    (inside,) = [row for row in bare if row["loops"]]
    assert (inside["turns"], inside["bytes_per_core"]) == (4, 4 * 16 * 16)
    # Wrapped, gradients add up unsummed while the loop turns, and are reduced behind it.
    assert len({row["together"] for row in wrapped}) == 1
    assert not any(row["loops"] for row in wrapped)
    sizes = [sum(row["bytes_per_core"] for row in rows) for rows in (bare, wrapped)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--gin_param=train.run.batch_size = 7", "train.run.batch_size = 7"),
        ("--gin_param=train.run.optimizer = @ByteVocabulary", "cannot be called with"),
        ("--gin_param=Unitransformer.max_length = 4", "max_length"),
        ("--gin_file=no_such.gin", "no_such.gin"),
        ("--json=/no/such/directory/report.json", "--json=/no/such/directory/report.json"),
        ("--png=/no/such/directory/report.png", "--png=/no/such/directory/report.png"),
    ],
)
def test_bad_config_is_one_message(capsys, argument, message):
    code = cli.main(["report", f"--gin_file={TINY}", "--no_placement", argument])
    assert code == cli.EXIT_BAD_CONFIG
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_missing_bindings_are_named(capsys):
    assert cli.main(["report", "--gin_param=train.run.train_steps = 1"]) == cli.EXIT_BAD_CONFIG
    error = capsys.readouterr().err
    assert "Missing in the config: train.run." in error
    assert "train.run.mesh_shape" in error
