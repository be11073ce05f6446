from mtf_gradsync.tools.train.data.vocabulary import EOS_ID, PAD_ID, ByteVocabulary


def test_text_comes_back_and_special_ids_do_not_show():
    vocabulary = ByteVocabulary()
    ids = vocabulary.encode("né\n")
    assert vocabulary.decode([PAD_ID, EOS_ID, *ids, 2]) == "né\n"
    assert max(vocabulary.encode("\U0010ffff")) < vocabulary.vocab_size == 259


def test_bytes_are_counted_even_where_a_character_is_cut():
    vocabulary = ByteVocabulary()
    half = vocabulary.encode("é")[:1]
    assert vocabulary.num_bytes([EOS_ID, *half]) == 1
    assert vocabulary.decode(half) == "\ufffd"
