"""One token per character: ids end where characters do, and nothing is unknown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain.tokenizer import Tokenizer, character_tokenizer, ensure_tokenizer

POEM = "床前明月光，疑是地上霜。\n举头望明月，低头思故乡。"
CHARACTERS = character_tokenizer([POEM, "\U00021484𪭢 e\u0301"], vocab_size=4096)


def test_every_character_of_the_text_is_one_token() -> None:
    ids = CHARACTERS.encode(POEM)
    assert len(ids) == len(POEM)
    assert CHARACTERS.decode(ids) == POEM
    assert [CHARACTERS.token_bytes(token_id).decode() for token_id in ids] == list(POEM)
    assert len(CHARACTERS.encode("𪭢 e\u0301")) == 4
    for cut in range(len(POEM)):
        assert CHARACTERS.encode(POEM[:cut]) + CHARACTERS.encode(POEM[cut:]) == ids


@settings(deadline=None, max_examples=50)
@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert CHARACTERS.decode(CHARACTERS.encode(text)) == text


def test_the_rarest_are_spelled_in_bytes_when_there_is_no_room() -> None:
    small = character_tokenizer(["好好你"], vocab_size=263)
    assert small.vocab_size == 263
    assert len(small.encode("好")) == 1
    assert len(small.encode("你")) == 3
    with pytest.raises(ValueError, match=r"tokenizer\.vocab_size=261 is too small"):
        character_tokenizer(["好"], vocab_size=261)
    with pytest.raises(ValueError, match="no text to take characters from"):
        character_tokenizer([], vocab_size=300)


def test_kept_by_corpus_and_size(tmp_path: Path) -> None:
    def make(fingerprint: str) -> tuple[Tokenizer, Path]:
        return ensure_tokenizer(
            kind="characters", data_dir=tmp_path, vocab_size=300,
            documents=lambda: [POEM], documents_fingerprint=fingerprint,
        )  # fmt: skip

    first, folder = make("a")
    assert make("a")[1] == folder
    assert make("b")[1] != folder
    assert first.hash == character_tokenizer([POEM], vocab_size=300).hash
    assert json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["ignore_merges"] is True


@pytest.mark.medium
def test_transformers_gets_the_same_ids(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    CHARACTERS.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    text = f"{POEM} new 词"
    assert theirs.encode(text, add_special_tokens=False) == CHARACTERS.encode(text)
