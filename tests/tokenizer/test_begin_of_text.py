"""What other families put in front of a text: the same ids as AutoTokenizer, read, saved and in a chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from llmtrain.tokenizer import SPECIAL_TOKENS, Tokenizer, render_chat
from tests.conftest import llama_bytes

pytestmark = pytest.mark.medium  # importing transformers takes seconds

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(
    lambda text: not any(token in text for token in (*SPECIAL_TOKENS, "<s>", "</s>"))
)
IN_FRONT = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
# What a family's tokenizer.json does behind its model, what its tokenizer_config.json says, and what follows.
FAMILIES: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "llama-2": (IN_FRONT, {"bos_token": "<s>", "add_bos_token": True}, True),
    "llama-3": (
        processors.Sequence([processors.ByteLevel(trim_offsets=False), IN_FRONT]),
        {"bos_token": {"__type": "AddedToken", "content": "<s>", "special": True}},
        True,
    ),
    "said in the config alone": (None, {"bos_token": "<s>", "add_bos_token": True}, False),
    "denied in the config": (IN_FRONT, {"bos_token": "<s>", "add_bos_token": False}, True),
    "named and never used": (None, {"bos_token": "<s>"}, False),
    "qwen-2": (processors.ByteLevel(trim_offsets=False), {"bos_token": None, "add_bos_token": False}, False),
}


def write(folder: Path, post_processor: Any, config: dict[str, Any]) -> None:
    inner = llama_bytes()
    if post_processor is not None:
        inner.post_processor = post_processor
    folder.mkdir(parents=True)
    inner.save(str(folder / "tokenizer.json"))
    stated = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Our reading and AutoTokenizer's of three folders: the family's, as we save it, and that with role markers."""
    from transformers import AutoTokenizer

    post_processor, config, begins = FAMILIES[request.param]
    folder: Path = tmp_path_factory.mktemp("family") / "given"
    write(folder, post_processor, config)
    ours = Tokenizer.load(folder)
    ours.save(folder.with_name("saved"))
    with_markers = ours.with_special_tokens()
    with_markers.save(folder.with_name("chat"))
    folders = [folder, folder.with_name("saved"), folder.with_name("chat")]
    return [(Tokenizer.load(each), AutoTokenizer.from_pretrained(each)) for each in folders], begins


@settings(max_examples=50)
@given(text=TEXTS)
def test_a_text_has_the_same_ids_from_its_start(family: Any, text: str) -> None:
    pairs, begins = family
    for ours, theirs in pairs:
        ids = ours.begin(ours.encode(text))
        assert ids == theirs(text)["input_ids"]
        assert (ids[:1] == [0]) == begins


def test_the_names_are_kept(family: Any) -> None:
    pairs, begins = family
    (_, given), *others = pairs
    for ours, theirs in others:
        assert (theirs.bos_token, theirs.bos_token_id) == (given.bos_token, given.bos_token_id)
        assert (ours.bos_token, ours.bos_id, ours.add_bos_token) == (given.bos_token, given.bos_token_id, begins)
        assert (ours.eos_id, theirs.eos_token_id) == (1, 1)


@settings(max_examples=50)
@given(turns=st.lists(st.tuples(st.sampled_from(["user", "assistant"]), TEXTS), min_size=1, max_size=4))
def test_a_chat_has_the_same_ids(family: Any, turns: list[tuple[str, str]]) -> None:
    pairs, begins = family
    ours, theirs = pairs[-1]
    messages = [{"role": role, "content": content} for role, content in turns]
    ids, _ = render_chat(messages, ours, add_generation_prompt=True)
    their_ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, add_generation_prompt=True)
    assert ids == their_ids
    assert (ids[0] == 0) == begins


def test_llamas_own_class(tmp_path: Path) -> None:
    """As transformers itself saves it, and as it reads what we save of that."""
    from transformers import AutoTokenizer, LlamaTokenizer

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary |= {"▁": 259, "a": 260, "b": 261, "▁a": 262}
    LlamaTokenizer(vocab=vocabulary, merges=[("▁", "a")], add_bos_token=True).save_pretrained(tmp_path / "given")
    ours = Tokenizer.load(tmp_path / "given")
    ours.save(tmp_path / "saved")
    for folder in ("given", "saved"):
        theirs = AutoTokenizer.from_pretrained(tmp_path / folder)
        for text in ("a b", "好 ab", "b\n"):
            ids = theirs.encode(text)
            assert ids[0] == 1
            assert Tokenizer.load(tmp_path / folder).begin(ours.encode(text)) == ids
