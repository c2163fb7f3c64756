"""Text ↔ ids for our own tokenizers and those of other families."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from llmtrain.tokenizer import SPECIAL_TOKENS, Tokenizer, byte_tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
BYTES = byte_tokenizer()


def test_the_special_tokens_have_the_first_ids(small_bpe: Tokenizer) -> None:
    for tokenizer in (small_bpe, BYTES):
        assert tokenizer.special_ids == {token: number for number, token in enumerate(SPECIAL_TOKENS)}
        assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.end_id) == (0, 1, 5)


@settings(max_examples=200)
@given(text=TEXTS)
def test_any_text_comes_back(small_bpe: Tokenizer, text: str) -> None:
    for tokenizer in (small_bpe, BYTES):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize(
    "text", ["", " ", "\r\n\t\x00", "\ufeff好", "👩‍👧 naïve Ａ", "a" * 70_000, "<|end|>\n<|user|>"]
)
def test_odd_texts_come_back(small_bpe: Tokenizer, text: str) -> None:
    assert small_bpe.decode(small_bpe.encode(text)) == text
    assert BYTES.decode(BYTES.encode(text)) == text


@settings(max_examples=100)
@given(before=TEXTS, special=st.sampled_from(SPECIAL_TOKENS), after=TEXTS)
def test_a_special_token_in_a_text_is_ordinary_text(
    small_bpe: Tokenizer, before: str, special: str, after: str
) -> None:
    for tokenizer in (small_bpe, BYTES):
        ids = tokenizer.encode(before + special + after)
        assert not set(ids) & set(tokenizer.special_ids.values())
        assert tokenizer.encode_batch([before + special + after]) == [ids]


def test_the_byte_tokenizer_numbers_bytes_from_six() -> None:
    assert BYTES.vocab_size == 262
    assert BYTES.encode("a好") == [6 + byte for byte in "a好".encode()]
    assert [BYTES.token_bytes(6 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert BYTES.token_bytes(0) == b"<|endoftext|>"


def test_broken_utf8_becomes_the_replacement_character() -> None:
    assert BYTES.decode([6 + byte for byte in b"a\xe5\xa5b\xff"]) == "a\ufffdb\ufffd"


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [0, *BYTES.encode("x"), 5]
    assert BYTES.decode(ids) == "x"
    assert BYTES.decode(ids, skip_special=False) == "<|endoftext|>x<|end|>"


@pytest.mark.parametrize("wrong", [-1, 262, 10**9])
def test_an_id_outside_the_vocabulary_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match=rf"id {wrong} is outside the vocabulary: ids go from 0 to 261"):
        BYTES.decode([7, wrong])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        BYTES.token_bytes(wrong)


def test_a_lone_surrogate_is_refused_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"lone surrogate \(U\+D83D, character 2\)"):
        BYTES.encode("ab\ud83d")
    with pytest.raises(ValueError, match=r"lone surrogate \(U\+DC00, character 0\)"):
        BYTES.encode_batch(["good", "\udc00"])


def test_saved_and_loaded_it_is_the_same(small_bpe: Tokenizer, tmp_path: Path) -> None:
    small_bpe.save(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert loaded.hash == small_bpe.hash
        assert loaded.encode("话说 times 12") == small_bpe.encode("话说 times 12")
    assert pickle.loads(pickle.dumps(small_bpe)).hash == small_bpe.hash


def test_the_hash_is_of_the_content_not_of_the_layout(small_bpe: Tokenizer, tmp_path: Path) -> None:
    small_bpe.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(dict(reversed(content.items()))))
    assert Tokenizer.load(tmp_path).hash == small_bpe.hash
    content["model"]["merges"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path).hash != small_bpe.hash


def test_the_byte_tokenizer_has_one_hash_for_ever() -> None:
    """Shards on disk name it: a change here makes all of them useless."""
    assert BYTES.hash == "8e98a4793b19253ca219648e1395ac85e094d4c6c82718eda0503eee4808ffde"


def test_truncation_and_padding_in_a_file_are_not_obeyed(small_bpe: Tokenizer, tmp_path: Path) -> None:
    small_bpe.save(tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=9)
    inner.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode("it was the best of times") == small_bpe.encode("it was the best of times")
    assert loaded.hash == small_bpe.hash


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Llama 2's kind: `▁` for a space, `<0xE5>` for bytes of what the vocabulary lacks, `<s>` put in front."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary |= {"▁": 259, "a": 260, "b": 261, "▁a": 262}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return inner


def test_a_tokenizer_of_another_family(tmp_path: Path) -> None:
    sentencepiece_like().save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.eos_token, loaded.pad_token, loaded.end_id) == ("</s>", "</s>", None)
    ids = loaded.encode("b a好")
    assert ids[:2] == [261, 262]  # of a piece of text; of a text from its start <s> stands in front
    assert loaded.begin(ids) == [1, *ids]
    assert (loaded.bos_token, loaded.bos_id, loaded.add_bos_token) == ("<s>", 1, True)
    assert b"".join(map(loaded.token_bytes, ids)) == "b a好".encode()
    assert loaded.decode(ids) == "b a好"
    assert loaded.encode("</s>")[0] != loaded.eos_id
    loaded.save(tmp_path / "saved")
    assert not (tmp_path / "saved" / "chat_template.jinja").exists()
    again = Tokenizer.load(tmp_path / "saved")
    assert (again.eos_token, again.begin([7])) == ("</s>", [1, 7])
    assert pickle.loads(pickle.dumps(loaded)).begin([7]) == [1, 7]


def test_nothing_is_put_in_front_of_ours(small_bpe: Tokenizer, tmp_path: Path) -> None:
    small_bpe.save(tmp_path)
    for tokenizer in (BYTES, small_bpe, Tokenizer.load(tmp_path)):
        assert (tokenizer.bos_token, tokenizer.bos_id, tokenizer.add_bos_token) == ("<|endoftext|>", 0, False)
        assert tokenizer.begin([7, 8]) == [7, 8]
    assert "bos_token" not in (tmp_path / "chat_template.jinja").read_text()


def test_several_tokens_in_front_are_refused(tmp_path: Path) -> None:
    inner = sentencepiece_like()
    special = [("<s>", 1), ("</s>", 2)]
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> </s> $A", special_tokens=special)
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="puts 2 tokens in front of a text, and at most one is supported"):
        Tokenizer.load(tmp_path)


def test_missing_special_tokens_can_be_added(tmp_path: Path) -> None:
    sentencepiece_like().save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path, add_special_tokens=True)
    assert loaded.eos_token == "</s>"
    assert loaded.pad_token == "<|pad|>"
    assert loaded.end_id == loaded.vocab_size - 1 == 263 + 4
    assert "<|endoftext|>" not in loaded.special_ids
    assert loaded.encode("b a") == [261, 262]


def test_the_declared_end_of_text_is_taken(tmp_path: Path) -> None:
    inner = sentencepiece_like()
    inner.add_special_tokens(["<|stop|>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|stop|>"}, "pad_token": null}')
    assert Tokenizer.load(tmp_path).eos_token == "<|stop|>"


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer at .*tokenizer\.json: give a tokenizer\.json, a folder"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: this tokenizer\.json cannot be read by tokenizers"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    tokenizers.Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="has no end-of-text token"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("vocabulary", "sentence"),
    [
        ({"a": 0}, r"cannot encode every text \(WordLevel error.*put its unk_token into the vocabulary"),
        ({}, "an empty"),
    ],
)
def test_a_vocabulary_that_cannot_take_every_text_is_refused(tmp_path, vocabulary, sentence):
    inner = tokenizers.Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="[UNK]"))
    (tmp_path / "tokenizer.json").write_text(inner.to_str())
    with pytest.raises(ValueError, match=sentence):
        Tokenizer.load(tmp_path, add_special_tokens=True)
