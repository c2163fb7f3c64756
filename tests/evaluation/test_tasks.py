"""Task scores: asked through the chat template, compared by the metric, never better for a failed request."""

import json
import logging

import pytest

from llmtrain.data.examples import Conversation, encode_examples
from llmtrain.data.questions import Question, read_questions
from llmtrain.evaluation import METRICS, score_choices, score_task
from llmtrain.evaluation.metrics import words
from llmtrain.generation import Completion, Engine, SamplingParams
from llmtrain.tokenizer import render_chat

ITEMS = [
    {"prompt": "1+1", "completion": "2"},
    {"prompt": "2+2", "completion": "4"},
    {"prompt": "1+3", "completion": "4"},
]


class AnsweringEngine:
    """Stands for an engine whose model knows some answers by heart; remembers what it was asked and how."""

    def __init__(self, tokenizer, answers):
        self.tokenizer = tokenizer
        self.answers = answers
        self.asked = []
        self.sampling = None

    def generate(self, prompts, sampling):
        self.asked, self.sampling = prompts, sampling
        return [self._complete(self.tokenizer.decode(prompt)) for prompt in prompts]

    def _complete(self, prompt):
        if prompt not in self.answers:
            return Completion("", [], "error", 0, None, error="does not fit")
        return Completion(self.answers[prompt], [], "stop", len(prompt), 0)


def test_the_score_is_points_over_possible_points(byte_tok):
    engine = AnsweringEngine(byte_tok, {"1+1": " 2 ", "2+2": "5", "1+3": "4"})
    result = score_task(engine, ITEMS, metric="exact_match")
    assert result["score"] == pytest.approx(2 / 3)
    assert result["chance"] == pytest.approx(2 / 3)  # "4" to everything
    assert (result["n"], result["errors"], result["stopped"]) == (3, 0, 1.0)
    assert result["items"][1] == {
        "prompt": "2+2",
        "reference": "4",
        "prediction": "5",
        "metric": "exact_match",
        "points": 0,
        "possible": 1,
        "also": {},
        "details": {},
        "finish_reason": "stop",
        "error": None,
    }


def test_items_are_asked_as_the_user_of_a_chat_and_answered_greedily(byte_tok):
    engine = AnsweringEngine(byte_tok, {})
    score_task(engine, ITEMS)
    expected = [
        render_chat([{"role": "user", "content": item["prompt"]}], byte_tok, add_generation_prompt=True)[0]
        for item in ITEMS
    ]
    assert engine.asked == expected
    assert engine.sampling == SamplingParams(temperature=0.0, max_new_tokens=1 + 8)
    examples, _ = encode_examples(ITEMS, byte_tok, max_length=64)
    score_task(engine, examples)
    assert engine.asked == expected


def test_a_conversation_is_asked_for_its_last_answer(byte_tok):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    engine = AnsweringEngine(byte_tok, {"be briefabc": "d"})
    result = score_task(engine, [Conversation(messages)])
    assert engine.asked == [render_chat(messages[:-1], byte_tok, add_generation_prompt=True)[0]]
    assert result["score"] == 1.0


def test_items_that_cannot_be_asked_score_nothing_and_are_counted(byte_tok, caplog):
    engine = AnsweringEngine(byte_tok, {"1+1": "2"})
    with caplog.at_level(logging.WARNING):
        result = score_task(engine, ITEMS, guess="2")
    assert result["score"] == pytest.approx(1 / 3)
    assert result["chance"] == pytest.approx(1 / 3)  # "2" to everything
    assert result["errors"] == 2
    assert "2 of 3 items could not be answered and score 0: does not fit" in caplog.text


@pytest.mark.parametrize(
    ("metric", "prediction", "reference", "expected"),
    [
        ("exact_match", " 42\n", "42", (1, 1)),
        ("exact_match", "42!", "42", (0, 1)),
        ("prefix_match", " 42 and more", "42", (1, 1)),
        ("prefix_match", "4", "42", (0, 1)),
        ("shared_prefix", "2010-06-11", "2010-06-01", (8, 10)),
        ("shared_prefix", "", "ab", (0, 2)),
        ("shared_prefix", "abcdef", "ab", (2, 2)),
        ("syllable_accuracy", "nǐ hǎo", "nǐ hǎo ma", (2, 3)),
        ("syllable_accuracy", "hǎo ma", "nǐ hǎo ma", (2, 3)),
        ("syllable_accuracy", "a b c d e f g", "zài jiàn", (0, 2)),
        ("token_f1", "the cat sat", "The cat!", (4 / 5, 1)),
        ("token_f1", "我很好", "我好 ", (4 / 5, 1)),
        ("token_f1", "", "", (1, 1)),
        ("token_f1", "…", "a", (0, 1)),
        ("character_error_rate", "kitten", "sitting", (3, 7)),
        ("character_error_rate", "", "ab", (2, 2)),
        ("character_error_rate", " 天下大势 ", "天下大事", (1, 4)),
    ],
)
def test_metrics(metric, prediction, reference, expected):
    assert METRICS[metric](prediction, reference) == pytest.approx(expected)


def test_words_are_runs_of_letters_and_single_chinese_characters():
    assert words("ＧＰＴ-4 很好！naïve カナ") == ["gpt", "4", "很", "好", "naïve", "カ", "ナ"]


def test_several_metrics_of_one_answer_and_the_guess_by_each(byte_tok):
    engine = AnsweringEngine(byte_tok, {"1+1": "2", "2+2": "5", "1+3": "4"})
    result = score_task(engine, ITEMS, metric=["exact_match", "character_error_rate"])
    assert result["score"] == result["metrics"]["exact_match"]["score"] == pytest.approx(2 / 3)
    errors = result["metrics"]["character_error_rate"]
    assert errors["score"] == pytest.approx(1 / 3)
    assert errors["chance"] == pytest.approx(1 / 3)  # "4" to everything
    assert result["items"][1]["also"] == {"character_error_rate": (1, 1)}
    low, high = result["interval"]
    assert low <= result["score"] <= high
    assert (low, high) == score_task(engine, ITEMS)["interval"]


def test_an_item_that_cannot_be_asked_counts_as_an_empty_answer(byte_tok):
    result = score_task(AnsweringEngine(byte_tok, {}), ITEMS, metric="character_error_rate")
    assert result["score"] == 1.0


QUESTIONS = [
    Question([{"role": "user", "content": "pick"}], ("a", "bbbb", "cc"), 1),
    Question([{"role": "user", "content": "choose"}], ("x", "y"), 0),
]


def test_choices_are_scored_by_likelihood_raw_and_per_character(byte_tok, tiny_model):
    engine = Engine(tiny_model, byte_tok)
    result = score_choices(engine, QUESTIONS)
    assert result["chance"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert set(result["metrics"]) == {"accuracy", "accuracy_norm"}
    for question, item in zip(QUESTIONS, result["items"], strict=True):
        ids, _ = render_chat(question.messages, byte_tok, add_generation_prompt=True)
        expected = [engine.score([(ids, byte_tok.encode(choice))])[0].logprob_sum for choice in question.choices]
        assert item["details"]["logprobs"] == pytest.approx(expected, abs=1e-4)
        best = max(range(len(expected)), key=expected.__getitem__)
        per_character = [value / len(choice) for value, choice in zip(expected, question.choices, strict=True)]
        normalised = max(range(len(expected)), key=per_character.__getitem__)
        assert item["prediction"] == question.choices[best]
        assert item["points"] == (best == question.answer)
        assert item["also"]["accuracy_norm"] == (int(normalised == question.answer), 1)


def test_a_question_too_long_for_the_context_is_an_error_and_scores_nothing(byte_tok, tiny_model, caplog):
    long = Question([{"role": "user", "content": "x" * 400}], ("a", "b"), 0)
    with caplog.at_level(logging.WARNING):
        result = score_choices(Engine(tiny_model, byte_tok), [long, *QUESTIONS])
    assert result["errors"] == 1
    assert result["items"][0]["points"] == 0
    assert "1 of 3 items could not be answered" in caplog.text


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"prompt": "p", "choices": ["a"], "answer": 0},
            r'a\.jsonl:1 .*"choices" must be a list of at least two texts',
        ),
        ({"prompt": "p", "choices": ["a", "b"], "answer": 2}, '"answer" must be the number of the right choice, 0 … 1'),
        ({"prompt": "p", "choices": ["a", "b"]}, '"answer" must be .* got None'),
        ({"prompt": " ", "choices": ["a", "b"], "answer": 0}, "cannot be asked: the user text is empty"),
        ({"choices": ["a", "b"], "answer": 0}, "is no item to evaluate on"),
    ],
)
def test_malformed_questions_are_refused_by_file_and_line(tmp_path, record, message):
    (tmp_path / "a.jsonl").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_questions(tmp_path / "a.jsonl")


def test_wrong_requests_are_refused(byte_tok):
    engine = AnsweringEngine(byte_tok, {})
    with pytest.raises(ValueError, match="there are no items to score"):
        score_task(engine, [])
    with pytest.raises(ValueError, match="there is no metric 'best': choose one of exact_match"):
        score_task(engine, ITEMS, metric="best")


def test_a_real_engine_answers_every_item(tiny_model, byte_tok):
    result = score_task(Engine(tiny_model, byte_tok), ITEMS, sampling=SamplingParams(temperature=0.0, max_new_tokens=4))
    assert result["n"] == 3
    assert result["errors"] == 0
