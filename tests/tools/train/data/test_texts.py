import logging

import pytest

from mtf_gradsync.runtimes._common import ConfigError
from mtf_gradsync.tools.train.data import texts


def texts_of(documents, which, every):
    """The texts of a split of documents that are texts or UTF-8."""
    encoded = {n: x if isinstance(x, bytes) else x.encode() for n, x in documents.items()}
    return [bytes(x).decode() for x in texts.split_documents(encoded, which, every)]


def paragraphs(texts):
    return {
        " ".join(p.split()) for t in texts for p in t.split("\n\n") if len(" ".join(p.split())) > 60
    }


def test_no_held_out_paragraph_of_the_documentation_is_trained_on():
    topics = texts.read_python_topics()
    train = texts_of(topics, "train", 10)
    held_out = texts_of(topics, "validation", 10)
    assert paragraphs(held_out)
    assert not paragraphs(train) & paragraphs(held_out)
    size = sum(map(len, held_out))
    assert 0.03 < size / (size + sum(map(len, train))) < 0.3


def test_split_depends_on_names_alone():
    documents = {f"name{i}": f"text {i}" for i in range(40)}
    shuffled = dict(reversed(list(documents.items())))
    for split in ("train", "validation"):
        assert texts_of(documents, split, 4) == texts_of(shuffled, split, 4)
    more = {**documents, "new": "text"}
    assert set(texts_of(documents, "train", 4)) <= set(texts_of(more, "train", 4))


def test_shared_paragraph_goes_to_the_held_out_side_only():
    shared = "this paragraph is quoted by another document, word for word"
    documents = {f"d{i}": f"{shared}\n\nown text, number {i}, of this document" for i in range(20)}
    assert not any(shared in t for t in texts_of(documents, "train", 5))
    assert any(shared in t for t in texts_of(documents, "validation", 5))


def test_single_document_is_cut_at_a_paragraph(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(f"paragraph {i}" for i in range(20)))
    documents = texts.read_files([str(path)])
    (train,) = texts_of(documents, "train", 4)
    (held_out,) = texts_of(documents, "validation", 4)
    assert train.startswith("paragraph 0")
    assert held_out.strip().startswith("paragraph 1")
    assert train.split()[-1] not in held_out.split()


ONE_BLANK_LINE = "station,day,celsius\n\n" + "".join(
    f"{i % 7},{i},{i % 31 - 5}\n" for i in range(12_000)
)
PARAGRAPHS = [f"{i}: the quick brown fox jumps over the lazy dog" for i in range(400)]


def two(documents, every=10):
    """The texts to train on and the held-out ones, each joined."""
    return ["".join(texts_of(documents, split, every)) for split in ("train", "validation")]


@pytest.mark.parametrize(
    ("text", "every"),
    [
        (ONE_BLANK_LINE, 10),
        (ONE_BLANK_LINE, 3),
        ("heading\n\n" + "x" * 50_000, 10),  # no line to cut at
        ("a\n" * 100 + "\n\n" + "b\n" * 9_000, 10),
        ("\n\n".join(PARAGRAPHS), 4),
        ("\n \t\n".join(PARAGRAPHS), 2),
        ("b" * 40_000 + "\n\nthe end", 10),
    ],
)
def test_the_last_part_of_a_text_is_held_out_within_bounds(text, every):
    train, held_out = two({"log.csv": text}, every)
    share = len(held_out) / len(text)
    assert 0.5 / every <= share <= 1.5 / every
    # Paragraphs may be joined anew; nothing is lost, and whole lines are cut where there are any.
    assert (train + held_out).split() == text.split()
    if text.count("\n") > 10:
        assert held_out[0] == "\n"
        assert not train.endswith("\n")


@pytest.mark.parametrize(
    "lengths",
    [
        [1_000, 1_000_000],
        [1_000_000, 1_000],
        [50_000] * 3,
        [100] * 40 + [100_000],
        [40, 40],
    ],
)
def test_of_documents_about_a_tenth_is_held_out_whatever_their_lengths(lengths):
    documents = {f"name{i}": f"{i} " * (size // 2) for i, size in enumerate(lengths)}
    train, held_out = two(documents)
    total = sum(map(len, documents.values()))
    assert len(train) + len(held_out) == total
    assert 0.05 <= len(held_out) / total <= 0.2


def test_how_much_there_is_of_each_is_logged(caplog):
    caplog.set_level(logging.INFO, "mtf_gradsync.tools.train")
    train, held_out = two({"log.csv": ONE_BLANK_LINE})
    said = f"{len(train):,} bytes to train on and {len(held_out):,} held out (10.0 %)"
    assert [r.getMessage() for r in caplog.records] == [f"The text has {said}"] * 2
    caplog.clear()
    refrain = "the same line at the end of every verse of this poem"
    poem = "\n\n".join(f"{one}\n\n{refrain}" if i % 9 == 0 else one
        for i, one in enumerate(PARAGRAPHS))  # fmt: skip
    train, held_out = two({"poem": poem})
    assert refrain in held_out
    assert refrain not in train
    removed = len(refrain) * (poem.count(refrain) - held_out.count(refrain))
    assert caplog.messages[0].endswith(f"; {removed:,} in both are not trained on")


def test_a_text_that_repeats_itself_is_no_training_data():
    with pytest.raises(ConfigError, match=r"of the [\d,]+ bytes to train on are paragraphs"):
        texts_of({"a": "\n\n".join(PARAGRAPHS[:3] * 200)}, "train", 10)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: texts_of({"a": "b"}, "test", 10),
            'must be "train" or "validation"',
        ),
        (lambda: texts_of({"a": "b", "c": "d"}, "train", 1), "at least 2"),
        (lambda: texts_of({}, "train", 10), "train split is empty: no text"),
        (lambda: texts.read_files("a.txt"), "must be a list"),
        (lambda: texts.read_files(["/no/such/file"]), "cannot read '/no/such/file'"),
    ],
)
def test_says_what_is_wrong(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_files_that_are_no_text_are_named(tmp_path):
    good, empty, latin = (tmp_path / name for name in ("good", "empty", "latin"))
    good.write_text("text")
    empty.write_text(" \n")
    latin.write_bytes("é".encode("latin-1"))
    for bad, said in (
        (empty, f"'{empty}' is empty"),
        (latin, f"cannot read '{latin}' as UTF-8: 'utf-8'"),
    ):
        with pytest.raises(ConfigError, match=said):
            texts.read_files([str(good), str(bad)])


@pytest.mark.parametrize("text", ["é 😀\n" * 9, "word " * 9, "x" * 40, "日本語" * 9, "\n\n\n"])
def test_long_texts_are_cut_between_characters_behind_lines_or_words(text, monkeypatch):
    monkeypatch.setattr(texts, "_PIECE", 7)
    pieces = list(texts.pieces_of(text.encode()))
    assert "".join(piece.decode() for piece in pieces) == text
    assert len(pieces) > 1 or len(text) < 7
    assert all(piece.endswith((b"\n", b" ")) for piece in pieces) or " " not in text
    # However it is cut, equal paragraphs are equal.
    twice = text.encode() + b"...." + text.encode()
    keys = (
        texts._paragraph_key(twice, 0, len(twice) // 2 - 2),
        texts._paragraph_key(twice, len(twice) // 2 + 2, len(twice)),
    )
    assert keys[0] == keys[1]


def test_lines_end_as_in_a_text_file(tmp_path):
    path = tmp_path / "dos.txt"
    path.write_bytes("é\r\nb\rc\n".encode())
    assert texts.read_files([str(path)]) == {str(path): "é\nb\nc\n".encode()}
    path.write_bytes("é".encode()[:1])
    with pytest.raises(ConfigError, match="unexpected end of data"):
        texts.read_files([str(path)])
