"""Recording: it changes nothing, costs nothing where nobody asked, and holds all that a choice was made from."""

import pytest
import torch

from llmtrain.generation import SamplingParams
from llmtrain.generation.sampling import BatchSampling, choose
from llmtrain.inspector import Recorder, choices, document, record, recording_of, unpacked

PROMPT = "床前明月光"
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "k": {"temperature": 1.3, "top_k": 7},
    "p": {"temperature": 0.7, "top_p": 0.6},
    "min": {"temperature": 2.0, "min_p": 0.2},
    "all": {"temperature": 1.5, "top_k": 60, "top_p": 0.9, "min_p": 0.02},
    "penalty": {"temperature": 0.9, "repetition_penalty": 1.4},
}


def logits_seen(engine, monkeypatch):
    """All scores that the engine's loop chooses from, whoever asked for them."""
    seen, of_loop = [], engine._loop._choose

    def watched(rows, logits, settings):
        seen.append(logits.clone())
        return of_loop(rows, logits, settings)

    monkeypatch.setattr(engine._loop, "_choose", watched)
    return seen


@pytest.mark.parametrize("position", ["rope", "sinusoidal"])
def test_recording_changes_no_bit_of_any_score(make_engine, monkeypatch, position):
    params = SamplingParams(seed=5, max_new_tokens=20)
    runs = []
    for recorded in (False, True):
        engine = make_engine(position=position)
        seen = logits_seen(engine, monkeypatch)
        if recorded:
            recording = record(engine, PROMPT, params)
            answer = recording.completion
            document(engine, recording, measure=False)  # nor does reading the text once more, for who asks next
            again = engine.generate([PROMPT], params)[0]
            assert again.token_ids == answer.token_ids
            assert all(torch.equal(one[0], step.logits) for one, step in zip(seen, recording.steps, strict=False))
            del seen[20:]
        else:
            answer = engine.generate([PROMPT], params)[0]
        runs.append((answer.token_ids, seen))
    (plain, scores), (observed, same) = runs
    assert plain == observed
    assert len(scores) == len(same) == 20
    assert all(torch.equal(one, other) for one, other in zip(scores, same, strict=True))


def test_a_request_that_nobody_observes_is_told_nothing(engine, monkeypatch):
    def never(*_, **__):
        raise AssertionError("details were worked out")

    monkeypatch.setattr(torch.Tensor, "log_softmax", never)
    assert len(engine.generate([PROMPT], SamplingParams(max_new_tokens=4))[0].token_ids) == 4
    with pytest.raises(AssertionError, match="details"):
        record(engine, PROMPT, SamplingParams(max_new_tokens=4))


def test_an_observer_among_others_sees_its_own_request_only(engine):
    params = SamplingParams(seed=3, max_new_tokens=8)
    alone = record(engine, "b", params)
    recorder = Recorder()
    engine.submit("a", SamplingParams(temperature=0.0, max_new_tokens=12))
    request = engine.submit("b", params, observer=recorder)
    while engine.step():
        pass
    recording = recording_of(request, recorder)
    assert recording.completion.token_ids == alone.completion.token_ids
    assert [step.uniform for step in recording.steps] == [step.uniform for step in alone.steps]
    for one, other in zip(recording.steps, alone.steps, strict=True):
        torch.testing.assert_close(one.logits, other.logits, atol=1e-5, rtol=1e-5)


def redone(step, sampling):
    """The token that the engine's own arithmetic gives for the scores, settings and number in the document."""
    params = SamplingParams(**{key: sampling[key] for key in ("temperature", "top_k", "top_p", "min_p")})
    logits = unpacked(step["scores"]["logits"])[None]
    uniform = None if step["uniform"] is None else torch.tensor([step["uniform"]])
    place = int(choose(logits, BatchSampling.of([params]), uniform))
    return place if step["scores"]["kind"] == "all" else int(unpacked(step["scores"]["ids"])[place])


@pytest.mark.parametrize("name", SETTINGS)
def test_the_stored_scores_give_every_token_again(engine, name):
    recording = record(engine, PROMPT, SamplingParams(**SETTINGS[name], seed=11, max_new_tokens=30))
    found = document(engine, recording, measure=False)
    assert [step["token"] for step in found["steps"]] == recording.completion.token_ids
    for step in found["steps"]:
        assert redone(step, found["sampling"]) == step["token"]
        assert (step["uniform"] is None) == (name == "greedy")
        logits = unpacked(step["scores"]["logits"])
        assert step["greedy"] == int(logits.argmax())
        assert logits[step["token"]] == pytest.approx(
            next(each["logit"] for each in step["candidates"] if each["id"] == step["token"]), rel=1e-6
        )
        assert step["rank"] == int((logits > logits[step["token"]]).sum()) + 1
    if name == "greedy":
        assert all(step["kept"] == 1 and step["token"] == step["greedy"] for step in found["steps"])
    if name == "k":
        assert {step["kept"] for step in found["steps"]} == {7}


def test_probabilities_are_the_models_own_and_chances_those_of_the_settings(engine):
    params = SamplingParams(temperature=0.5, top_k=4, seed=2, max_new_tokens=5)
    recording = record(engine, PROMPT, params)
    for step, entry in zip(recording.steps, choices.step_entries(recording), strict=True):
        own = step.logits.softmax(-1)
        for each in entry["candidates"]:
            assert each["probability"] == pytest.approx(float(own[each["id"]]), rel=1e-5)
        kept = (step.logits + recording.excluded).topk(4)
        expected = dict(zip(kept.indices.tolist(), (kept.values / 0.5).softmax(-1).tolist(), strict=True))
        chances = {each["id"]: each["chance"] for each in entry["candidates"] if each["chance"] > 0}
        assert chances == pytest.approx(expected, rel=1e-4)


def test_where_not_all_scores_fit_the_likeliest_give_the_token_again(engine, monkeypatch):
    monkeypatch.setattr(choices, "LOGITS_BYTES", 20 * 8 * 40)
    recording = record(engine, PROMPT, SamplingParams(top_k=30, temperature=1.2, seed=4, max_new_tokens=20))
    found = document(engine, recording, measure=False)
    assert found["left_out"]["scores_per_step"] == 320 - 40
    for index, step in enumerate(found["steps"]):
        scores = step["scores"]
        ids = unpacked(scores["ids"]).tolist()
        assert (scores["kind"], len(ids), ids) == ("top", 40, sorted(ids))
        assert redone(step, found["sampling"]) == step["token"]
        whole = recording.choosable(index)
        assert scores["rest"] == int(whole.isfinite().sum()) - 40
        both = torch.logsumexp(torch.cat([unpacked(scores["logits"]), torch.tensor([scores["rest_logsumexp"]])]), 0)
        assert float(both) == pytest.approx(float(whole.logsumexp(-1)), abs=1e-5)


def test_scores_that_are_not_finite_are_a_sentence(engine):
    with torch.no_grad():
        engine.model.lm_head.weight[70] = float("nan")
    with pytest.raises(ValueError, match="are not finite"):
        record(engine, PROMPT, SamplingParams(max_new_tokens=4))
