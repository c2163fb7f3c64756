"""Learning a vocabulary, and keeping it."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.tokenizer import Tokenizer, byte_tokenizer, ensure_tokenizer, train_bpe


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_bytes(token_id).decode() for token_id in tokenizer.encode(text)]


def test_training_is_deterministic_and_reads_once(small_texts: list[str], small_bpe: Tokenizer) -> None:
    def stream() -> Iterator[str]:
        yield from small_texts

    assert train_bpe(stream(), vocab_size=420).hash == small_bpe.hash
    assert small_bpe.vocab_size == 420


def test_every_digit_is_a_token_of_its_own() -> None:
    tokenizer = train_bpe(["in 1984 and 1984, 1984 " * 50], vocab_size=300)
    assert pieces(tokenizer, "1984") == ["1", "9", "8", "4"]
    assert pieces(tokenizer, "in 1984")[-4:] == ["1", "9", "8", "4"]


def test_words_marks_and_indentation_stay_apart() -> None:
    text = "return x\n    if (y):\n        return z\n曰：“玄德曰：”\n"
    tokenizer = train_bpe([text * 50], vocab_size=320)
    assert pieces(tokenizer, "    return") == ["   ", " return"]
    assert pieces(tokenizer, "玄德曰：”\n") == ["玄德曰", "：", "”", "\n"]


def test_a_vocabulary_that_is_too_small_is_refused_before_reading() -> None:
    def never() -> Iterator[str]:
        raise AssertionError("was read")
        yield ""

    with pytest.raises(ValueError, match=r"tokenizer\.vocab_size=261 is too small: .* need at least 262"):
        train_bpe(never(), vocab_size=261)
    with pytest.raises(ValueError, match="too small"):
        ensure_tokenizer(kind="bpe", data_dir="nowhere", vocab_size=100, documents=never)
    assert not Path("nowhere").exists()


def test_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="the corpus is empty"):
        train_bpe(["", ""], vocab_size=300)


def test_a_pattern_that_does_not_compile_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.pattern does not compile"):
        train_bpe(["text"], vocab_size=300, pattern="(")


def test_a_vocabulary_that_cannot_be_filled_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = train_bpe(["abab abab"], vocab_size=1000)
    assert tokenizer.vocab_size < 300
    assert "tokenizer.vocab_size=1000 could not be filled: in 9 characters only" in caplog.text


def test_a_tokenizer_is_learned_once(tmp_path: Path, small_texts: list[str]) -> None:
    reads = []

    def documents() -> Iterator[str]:
        reads.append(1)
        yield from small_texts

    def ensure(**changes: object) -> tuple[Tokenizer, Path]:
        values: dict = {"kind": "bpe", "vocab_size": 300, "documents_fingerprint": "A"} | changes
        return ensure_tokenizer(data_dir=tmp_path, documents=documents, **values)

    first, folder = ensure()
    again, same = ensure()
    assert first.hash == again.hash
    assert folder == same
    assert folder.parent == tmp_path / "tokenizers"
    assert folder.name.startswith("bpe-")
    assert len(reads) == 1
    for change in ({"vocab_size": 310}, {"documents_fingerprint": "B"}, {"pattern": r"\S+|\s+"}):
        _, other = ensure(**change)
        assert other != folder
    assert len(reads) == 4
    assert not list((tmp_path / "tokenizers").glob(".*"))


def test_bytes_and_files(tmp_path: Path, small_bpe: Tokenizer) -> None:
    tokenizer, folder = ensure_tokenizer(kind="byte", data_dir=tmp_path)
    assert tokenizer.hash == byte_tokenizer().hash
    assert folder.name.startswith("byte-")
    small_bpe.save(tmp_path / "mine")
    given, kept = ensure_tokenizer(kind="file", data_dir=tmp_path, path=tmp_path / "mine")
    assert given.hash == small_bpe.hash
    assert Tokenizer.load(kept).hash == small_bpe.hash


def test_settings_that_do_not_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.kind=wordpiece is unknown: use bpe, characters, byte or file"):
        ensure_tokenizer(kind="wordpiece", data_dir=tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer=file needs tokenizer\.path"):
        ensure_tokenizer(kind="file", data_dir=tmp_path)
    with pytest.raises(ValueError, match=r"needs tokenizer\.vocab_size"):
        ensure_tokenizer(kind="bpe", data_dir=tmp_path)
    ensure_tokenizer(kind="byte", data_dir=tmp_path, vocab_size=500)
    assert "tokenizer.vocab_size is ignored with tokenizer.kind=byte" in caplog.text


def test_importing_the_tokenizer_is_light() -> None:
    heavy = "torch", "transformers", "lightning", "numpy"
    code = f"import sys, llmtrain.tokenizer; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
