"""What a run's directory says that it was made with, held against what starts there again."""

import shutil

import gin
import pytest

from mtf_gradsync.runtimes._common import CONFIG_FILE, ConfigError
from mtf_gradsync.runtimes.starting import choose_checkpoint
from mtf_gradsync.tools.train import gin_files, run_files
from mtf_gradsync.tools.train.model import resolve_job
from mtf_gradsync.tools.train.resuming import changed_settings, check_data
from mtf_gradsync.tools.train.run_files import REPORT_FILE, read_facts
from tests.tools.train.conftest import NO_EVAL, QUICK, TINY

OF_TEXT = """
train.run.train_dataset_fn = @text_files
train.run.vocabulary = @ByteVocabulary()
train.run.train_steps = 3
FILE = "there.txt"
text_files.files = [%FILE]
text_files.held_out_every = 10
"""


@pytest.fixture
def there(tmp_path):
    """The directory of a run on there.txt; gin has the same configuration."""
    gin.parse_config(OF_TEXT)
    (tmp_path / CONFIG_FILE).write_text(gin.config_str())
    return tmp_path


@pytest.mark.parametrize(
    ("now", "named"),
    [
        ("FILE = 'here.txt'", ["FILE = 'there.txt' there and 'here.txt' here"]),
        ("text_files.files = ['a']", ["text_files.files = [%FILE] there and ['a'] here"]),
        (
            "train.run.train_dataset_fn = @python_topics",
            ["train_dataset_fn = @text_files there and @python_topics here"],
        ),
        ("text_files.held_out_every = 5", ["text_files.held_out_every = 10 there and 5 here"]),
        ("train.run.train_steps = 4", []),
    ],
)
def test_other_examples_are_refused_where_settings_of_the_data_differ(there, now, named):
    said = []
    with gin.unlock_config():
        gin.parse_config(now)
    ((name, line),) = changed_settings(there).items()
    assert line.endswith(" here")
    assert line.startswith(f"{name} = ")
    assert line.split(" there and ")[1][: -len(" here")] in now
    # The same examples under other names, and a run that says nothing of them.
    assert check_data(there, ["a", "b"], ["a"], False, said.append)
    assert check_data(there, [], ["a"], False, said.append)
    assert not said
    if named:
        with pytest.raises(ConfigError, match="was made with other data") as error:
            check_data(there, ["a", "b"], ["a", "c"], False, said.append)
        assert all(line in str(error.value) for line in named)
        assert "--accept_checkpoint_differences" in str(error.value)
        assert not check_data(there, ["a"], ["c"], True, said.append)
        assert not said
    else:
        assert not check_data(there, ["a"], ["c"], False, said.append)
        assert "does not begin with the examples that" in said[0]


def test_the_first_examples_are_hashed_without_losing_the_place():
    gin_files.load([TINY], QUICK)
    job = resolve_job(gin_files.bound_run_config())
    rows = lambda batches: [row.tolist() for row in next(iter(batches.next().values()))]  # noqa: E731
    with job.batches() as batches:
        batches.placeholders()
        batches.begin(0, 0)
        first, second = rows(batches), rows(batches)
        hashes = batches.first_examples()
        third = rows(batches)
        assert len(hashes) == len({*hashes}) == 8
        for made, examples in ((1, second), (2, third)):
            batches.begin(made, made * len(first))
            assert batches.first_examples() == hashes
            assert rows(batches) == examples
    # A run that goes on begins with the third batch, and looks at the first before.
    with job._replace(model=job.model._replace(batch_size=4)).batches() as batches:
        batches.placeholders()
        batches.begin(4, 2 * len(first))
        assert batches.first_examples() == hashes[:4]
        assert rows(batches) == third[:4]
        assert batches.first_examples() == hashes[:4]


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_data_and_keeps_its_results(train, tmp_path):
    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_text("".join(f"{i} one line of many\n" for i in range(400)))
    other.write_text("".join(f"other words, {i} times\n" for i in range(900)))
    short = [
        "train.run.perplexity_eval_steps = 2",
        "train.sample.max_tokens = 2",
        *(f"train.run.{name}_dataset_fn = @text_files" for name in ("train", "eval")),
    ]
    files = lambda path: f"text_files.files = ['{path}']"  # noqa: E731
    steps = "train.run.train_steps = {}".format
    first, directory, said = train(*short, files(text), steps(2))
    assert not [line for line in said if "made with" in line]
    assert len(read_facts(directory).first_examples) == 8

    def contents():
        names = (
            run_files.RESULT_FILE,
            run_files.SAMPLES_FILE,
            REPORT_FILE,
            CONFIG_FILE,
            "facts.json",
        )
        return {name: (directory / name).read_bytes() for name in names}

    before = contents()
    # A finished run, again, with another seed of its samples, and with another text.
    again, _, said = train(*short, files(text), steps(2), "train.sample.seed = 3")
    assert again.held_out == first.held_out
    assert "nothing was trained, and the results in" in said[-1]
    assert "sample.seed = 0 there and 3 here" in "\n".join(said)
    assert contents() == before
    for more in (2, 4):
        with pytest.raises(ConfigError, match=r"text.txt.* there and .*other.txt.* here"):
            train(*short, files(other), steps(more))
        assert contents() == before
        assert choose_checkpoint(str(directory), False, print).step == 2
    # What is missing is made.
    (directory / run_files.RESULT_FILE).unlink()
    train(*short, files(text), steps(2))
    assert contents().keys() == before.keys()
    # The same text elsewhere is no other text.
    moved = shutil.copy(text, tmp_path / "moved.txt")
    _, _, said = train(*short, files(moved), steps(4), NO_EVAL)
    (line,) = [line for line in said if "these settings are not those that" in line]
    assert "train.run.train_steps = 2 there and 4 here" in line
    # Another text under the same name is told of.
    shutil.copy(other, moved)
    _, _, said = train(*short, files(moved), steps(5), NO_EVAL)
    assert any("does not begin with the examples" in line for line in said)
