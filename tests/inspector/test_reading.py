"""What is said of the reading is what the model did: attention against its own output, layers, rows and positions."""

import math

import pytest
import torch

from llmtrain.generation import Engine, SamplingParams
from llmtrain.inspector import document, reading, record, unpacked
from llmtrain.model import ModelConfig, build_model
from llmtrain.model.watching import WatchedAttention, read_watched
from tests.inspector.conftest import SHAPES

PROMPT = "床前明月光"
PARAMS = SamplingParams(seed=1, max_new_tokens=9)


@pytest.fixture(params=SHAPES)
def shaped(request, make_engine):
    return make_engine(**SHAPES[request.param])


def triangle(head, count):
    """The stored lower triangle as a square."""
    square = torch.zeros(count, count)
    square[torch.ones(count, count, dtype=torch.bool).tril()] = unpacked(head["weights"])
    return square


def test_the_stored_weights_are_those_that_the_layer_used(shaped):
    """Rows sum to 1, none looks ahead, and weights times values through the output projection is what it gave."""
    recording = record(shaped, PROMPT, PARAMS)
    found = document(shaped, recording, measure=False)
    model, ids = shaped.model, recording.ids[:-1]
    given = []
    handles = [
        layer.self_attn.register_forward_hook(lambda _, __, output: given.append(output[0]))
        for layer in model.model.layers
    ]
    watched = read_watched(model, ids)
    for handle in handles:
        handle.remove()
    config, count = model.config, found["attention"]["count"]
    assert count == len(ids)
    assert len(found["attention"]["layers"]) == config.num_hidden_layers
    for layer, entry in enumerate(found["attention"]["layers"]):
        weights = torch.stack([triangle(head, count) for head in entry["heads"]])  # (H, T, T)
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:2]), atol=1e-5, rtol=0)
        group = config.num_attention_heads // config.num_key_value_heads
        assert [head["kv_head"] for head in entry["heads"]] == [each // group for each in range(weights.shape[0])]
        value = watched.layers[layer].value.repeat_interleave(group, 0)
        attended = (weights @ value).transpose(0, 1).reshape(count, -1)
        with torch.no_grad():
            output = model.model.layers[layer].self_attn.o_proj(attended)
        torch.testing.assert_close(output, given[layer], atol=1e-5, rtol=0)
        entropy = -(weights * weights.clamp(min=1e-30).log()).sum(-1)
        for head in entry["heads"]:
            torch.testing.assert_close(unpacked(head["entropy"]), entropy[head["head"]], atol=1e-4, rtol=0)
            assert head["mean_entropy"] == pytest.approx(float(entropy[head["head"]].mean()), abs=1e-4)
    assert found["checks"]["above_diagonal"] == 0
    assert all(error < 1e-5 for error in found["checks"].values()), found["checks"]


def test_weights_that_were_not_used_are_noticed(engine):
    layer = read_watched(engine.model, [70, 80, 90, 100]).layers[0]
    assert layer.error(layer.weights()) < 1e-6
    unscaled = WatchedAttention(layer.query * 2, layer.key, layer.value, layer.attended)
    assert layer.error(unscaled.weights()) > 1e-3


def test_a_watched_model_is_left_as_it_was(engine):
    model, ids = engine.model, torch.tensor([[70, 80, 90]])
    with torch.no_grad():
        before = model(ids)
    read_watched(model, [70, 80, 90])
    with torch.no_grad():
        assert torch.equal(model(ids), before)
    assert not [each for each in model.modules() if each._forward_hooks or each._forward_pre_hooks]
    assert not [each for each in model.modules() if "_attend" in vars(each)]
    with pytest.raises(ValueError, match="300 tokens exceed the model's context of 256"):
        read_watched(model, [70] * 300)


def test_the_last_layer_says_what_the_engine_was_told(shaped):
    recording = record(shaped, PROMPT, SamplingParams(temperature=0.0, max_new_tokens=9))
    found = document(shaped, recording, measure=False)
    layers, ids = found["layer_lens"]["layers"], recording.ids
    assert len(layers) == shaped.model.config.num_hidden_layers + 1
    begin = len(recording.prompt_ids) - 1
    top, chances = (unpacked(layers[-1][key]) for key in ("ids", "probabilities"))
    for row, step in enumerate(recording.steps, begin):
        own = step.logits.softmax(-1)
        torch.testing.assert_close(chances[row], own[top[row].long()], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(chances[row], own.topk(5).values, atol=1e-5, rtol=1e-4)
        said, rank = (unpacked(layers[-1][key])[row] for key in ("next_probability", "next_rank"))
        assert float(said) == pytest.approx(float(own[ids[row + 1]]), rel=1e-4, abs=1e-6)
        assert int(rank) == int((own > own[ids[row + 1]]).sum()) + 1


def test_the_first_layer_of_the_lens_is_the_embedding(engine):
    model = engine.model
    recording = record(engine, PROMPT, PARAMS)
    lens = document(engine, recording, measure=False)["layer_lens"]["layers"][0]
    with torch.no_grad():
        logits = model.lm_head(model.model.norm(model.model.embed_tokens.weight[recording.ids[:-1]]))
    assert torch.equal(unpacked(lens["ids"])[:, 0].long(), logits.argmax(-1))


def test_neighbours_are_the_nearest_by_cosine_and_not_the_token_itself(engine):
    table = engine.model.model.embed_tokens.weight.detach()
    with torch.no_grad():
        table[101] = 3 * table[100]
        table[102] = -table[100]
    found = reading.embedding(engine.model, [100, 70, 100], None)
    assert (found["rows"], found["width"], found["tied"]) == (320, 64, True)
    assert [token["id"] for token in found["tokens"]] == [70, 100]
    token = found["tokens"][1]
    assert token["neighbours"][0] == {"id": 101, "cosine": pytest.approx(1.0, abs=1e-5)}
    assert not {100, 102} & {each["id"] for each in token["neighbours"]}
    assert torch.equal(unpacked(token["row"]), table[100])
    assert token["norm"] == pytest.approx(float(table[100].norm()), rel=1e-5)
    likeness = torch.nn.functional.cosine_similarity(table[70], table, dim=-1).topk(9)
    assert [each["id"] for each in found["tokens"][0]["neighbours"]] == likeness.indices[1:].tolist()


def test_a_rotation_turns_each_pair_by_position_times_frequency(engine):
    found = reading.positions(engine.model, 20)
    frequencies = unpacked(found["frequencies"])
    for pair in (0, 3, 7):
        assert float(frequencies[pair]) == pytest.approx(10_000 ** (-2 * pair / 16), rel=1e-5)
        angle = 13 * float(frequencies[pair])
        assert float(unpacked(found["cos"])[13, pair]) == pytest.approx(math.cos(angle), abs=1e-5)
        assert float(unpacked(found["sin"])[13, pair]) == pytest.approx(math.sin(angle), abs=1e-5)
    distance = found["distance"]
    assert len(set(distance["places"])) == 3
    for product in map(unpacked, distance["products"]):
        expected = [float(torch.cos(away * frequencies).mean()) for away in range(distance["furthest"] + 1)]
        torch.testing.assert_close(product, torch.tensor(expected), atol=1e-4, rtol=0)
    assert distance["largest_difference"] < 1e-4


def test_sinusoidal_vectors_are_the_models_own_and_their_product_depends_on_distance_only(make_engine):
    engine = make_engine(position="sinusoidal")
    found = reading.positions(engine.model, 20)
    assert torch.equal(unpacked(found["vectors"]), engine.model.model.table(torch.device("cpu"))[0][:20])
    assert float(unpacked(found["distance"]["products"][0])[0]) == pytest.approx(1.0, abs=1e-5)
    assert found["distance"]["largest_difference"] < 1e-4


@pytest.mark.medium
@pytest.mark.parametrize("dora", [False, True])
def test_a_request_with_an_adapter_is_read_with_it(engine, byte_tok, dora):
    from llmtrain.adapters import LowRank, lay_onto, merge_state_dict
    from llmtrain.adapters.deltas import AdapterDeltas

    model = engine.model
    torch.manual_seed(0)
    low_rank = {}
    for layer in ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj", "model.layers.1.mlp.down_proj"):
        rows, columns = model.get_submodule(layer).weight.shape
        magnitude = torch.rand(rows) + 1 if dora else None
        low_rank[layer] = LowRank(torch.randn(4, columns) * 0.3, torch.randn(rows, 4) * 0.3, 0.7, magnitude)
    table = "model.embed_tokens.weight"
    ids = byte_tok.encode(PROMPT)[:3]
    deltas = AdapterDeltas(low_rank, {table: ids}, {table: torch.randn(3, 64) * 0.3})
    engine.add_adapter("one", lay_onto(model, deltas))
    found = document(engine, record(engine, PROMPT, PARAMS, adapter="one"), measure=True)
    assert all(error < 1e-5 for error in found["checks"].values()), found["checks"]
    assert found["measured"]["lengths"]
    base = document(engine, record(engine, PROMPT, PARAMS), measure=False)
    assert base["attention"]["layers"][0] != found["attention"]["layers"][0]
    merged = build_model(model.config, seed=0).eval()
    weights = {key: value for key, value in model.state_dict().items() if key != "lm_head.weight"}
    merged.load_state_dict(merge_state_dict(weights, deltas), strict=False)
    merged.tie_weights()
    alone = Engine(merged, byte_tok)
    same = document(alone, record(alone, PROMPT, PARAMS), measure=False)
    assert same["answer"] == found["answer"]
    for one, other in zip(same["attention"]["layers"], found["attention"]["layers"], strict=True):
        for mine, theirs in zip(one["heads"], other["heads"], strict=True):
            torch.testing.assert_close(unpacked(mine["weights"]), unpacked(theirs["weights"]), atol=1e-4, rtol=0)
    for one, other in zip(same["embedding"]["tokens"], found["embedding"]["tokens"], strict=True):
        assert one["norm"] == pytest.approx(other["norm"], rel=1e-5)


def test_a_window_is_as_wide_as_its_bytes_allow(monkeypatch):
    config = ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    monkeypatch.setattr(reading, "ATTENTION_BYTES", 4 * 4 * 55)
    assert [reading.window(config, time) for time in (1, 10, 11, 30)] == [0, 0, 1, 20]
