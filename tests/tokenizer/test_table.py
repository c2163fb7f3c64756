"""The table of tokens."""

from __future__ import annotations

from llmtrain.tokenizer import byte_tokenizer, token_table, train_bpe
from llmtrain.tokenizer.table import display_width

BYTES = byte_tokenizer()


def test_parts_of_characters_show_what_they_belong_to() -> None:
    lines = token_table(BYTES.encode("a好"), BYTES).splitlines()
    assert [line.split() for line in lines] == [
        ["piece", "id", "bytes"],
        ["a", "103", "61"],
        ["‹好", "1/3›", "235", "e5"],
        ["‹好", "2/3›", "171", "a5"],
        ["‹好", "3/3›", "195", "bd"],
    ]


def test_a_part_may_be_longer_than_a_byte_and_share_its_token() -> None:
    """E5 A5 | BD 61 cannot be made by our pre-tokenizer, but another's vocabulary can hold it."""
    from llmtrain.tokenizer.table import _pieces

    assert _pieces([b"\xe5\xa5", b"\xbda"]) == ["‹好 1-2/3›", "‹好 3/3›a"]
    assert _pieces([b"\xf0", b"\x9f\x8c", b"\x8d"]) == ["‹🌍 1/4›", "‹🌍 2-3/4›", "‹🌍 4/4›"]
    assert _pieces([b"\xff", b"\xe5", b"", b"a"]) == ["\ufffd", "\ufffd", "", "a"]


def test_white_space_and_controls_are_visible() -> None:
    pieces = [line.split()[0] for line in token_table(BYTES.encode(" \n\t\r\x00"), BYTES).splitlines()[1:]]
    assert pieces == ["␣", "⏎", "⇥", "␍", "U+0000"]


def test_columns_line_up_on_a_terminal() -> None:
    tokenizer = train_bpe(["你好，大模型 unhappiness" * 20], vocab_size=320)
    lines = token_table(tokenizer.encode("unhappiness 你好，大模型"), tokenizer).splitlines()
    places = {display_width(line[: line.rindex("  ")]) for line in lines[1:]}
    assert len(places) == 1
    assert display_width("你好，a") == 7
    assert display_width("e\u0301\u200d") == 1


def test_special_tokens_have_their_names() -> None:
    assert "<|endoftext|>" in token_table([0], BYTES)
    assert token_table([], BYTES) == "piece  id  bytes"
