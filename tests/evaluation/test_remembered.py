"""Next lines asked for: which are asked, what counts as right, and that one document does not answer another."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from llmtrain.evaluation.remembered import next_lines, recall
from llmtrain.tokenizer import byte_tokenizer

BYTES = byte_tokenizer()
POEMS = ["one.\ntwo.\nthree.", "four.\nfive.\n", "six."]


@pytest.fixture
def shards(stream):
    """The poems as a shard folder has them, `<|endoftext|>` behind each."""
    documents = [[*BYTES.encode(poem), BYTES.eos_id] for poem in POEMS]
    made = stream([token for document in documents for token in document], len("".join(POEMS)))
    made.num_documents = len(documents)
    made.document = lambda index: np.array(documents[index])
    return made


def answering(model, answers: dict[str, str]):
    """Stands for an engine that knows some next lines; what it is asked is kept."""
    asked = []

    def generate(prompts, settings):
        asked.extend(zip(prompts, settings, strict=True))
        return [SimpleNamespace(text=answers.get(BYTES.decode(ids), "")) for ids in prompts]

    return SimpleNamespace(model=model, tokenizer=BYTES, generate=generate, asked=asked)


def test_every_line_but_the_first_is_asked_with_what_stands_before_it(shards):
    questions = next_lines([shards], BYTES, limit=100, room=64)
    assert [(BYTES.decode(each.before), each.line) for each in questions] == [
        ("one.\n", "two."), ("one.\ntwo.\n", "three."), ("four.\n", "five."),
    ]  # fmt: skip
    assert [each.most for each in questions] == [5, 7, 6]
    assert BYTES.decode(next_lines([shards], BYTES, limit=100, room=12)[1].before) == "two.\n"  # the nearest fit
    assert [each.line for each in next_lines([shards], BYTES, limit=100, room=6)] == ["two."]  # no room to ask
    assert [each.line for each in next_lines([shards], BYTES, limit=2, room=64)] == ["two.", "five."]


def test_only_the_exact_line_is_right(shards, tiny_model):
    engine = answering(tiny_model, {"one.\n": "two.", "one.\ntwo.\n": "three", "four.\n": "five.."})
    found = recall(engine, [shards], limit=100, sequence_length=64)
    assert (found["asked"], found["right"]) == (3, 1)
    assert found["loss"] == pytest.approx(math.log(320), abs=0.5)  # random weights
    settings = engine.asked[0][1]
    assert settings.greedy
    assert settings.stop == ("\n",)
    assert settings.max_new_tokens == 5  # one more than the line has, so that an answer that goes on is wrong
