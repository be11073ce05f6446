import pytest

from mtf_gradsync.runtimes.errors import ConfigError
from mtf_gradsync.train.data import datasets


def paragraphs(texts):
    return {
        " ".join(p.split()) for t in texts for p in t.split("\n\n") if len(" ".join(p.split())) > 60
    }


def test_no_held_out_paragraph_of_the_documentation_is_trained_on():
    topics = datasets.read_python_topics()
    train = datasets.split_documents(topics, "train", 10)
    held_out = datasets.split_documents(topics, "validation", 10)
    assert paragraphs(held_out)
    assert not paragraphs(train) & paragraphs(held_out)
    size = sum(map(len, held_out))
    assert 0.03 < size / (size + sum(map(len, train))) < 0.3


def test_split_depends_on_names_alone():
    documents = {f"name{i}": f"text {i}" for i in range(40)}
    shuffled = dict(reversed(list(documents.items())))
    for split in ("train", "validation"):
        assert datasets.split_documents(documents, split, 4) == datasets.split_documents(
            shuffled, split, 4
        )
    more = {**documents, "new": "text"}
    assert set(datasets.split_documents(documents, "train", 4)) <= set(
        datasets.split_documents(more, "train", 4)
    )


def test_shared_paragraph_goes_to_the_held_out_side_only():
    shared = "this paragraph is quoted by another document, word for word"
    documents = {f"d{i}": f"{shared}\n\nown text of {i}" for i in range(20)}
    assert not any(shared in t for t in datasets.split_documents(documents, "train", 5))
    assert any(shared in t for t in datasets.split_documents(documents, "validation", 5))


def test_single_document_is_cut_at_a_paragraph(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(f"paragraph {i}" for i in range(20)))
    documents = datasets.read_files([str(path)])
    (train,) = datasets.split_documents(documents, "train", 4)
    (held_out,) = datasets.split_documents(documents, "validation", 4)
    assert train.startswith("paragraph 0")
    assert held_out.strip().startswith("paragraph 1")
    assert train.split()[-1] not in held_out.split()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: datasets.split_documents({"a": "b"}, "test", 10),
            'must be "train" or "validation"',
        ),
        (lambda: datasets.split_documents({"a": "b", "c": "d"}, "train", 1), "at least 2"),
        (lambda: datasets.split_documents({}, "train", 10), "train split is empty: 0 documents"),
        (lambda: datasets.read_files("a.txt"), "must be a list"),
        (lambda: datasets.read_files(["/no/such/file"]), "cannot read '/no/such/file'"),
    ],
)
def test_says_what_is_wrong(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
