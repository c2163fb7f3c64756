"""The yardsticks compute what `fit` computes: the same loss, the same step, in the bare loop and in transformers."""

import copy

import pytest
import torch

from llmtrain.bench.bare import BareLoop, our_loss_sum
from llmtrain.model import ModelConfig, build_model
from llmtrain.training.optim import build_optimizer

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)
ADAMW = {"name": "adamw", "lr": 1e-2}


def micro_batches(count: int = 1, rows: int = 4) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of one step; in every row the last labels are not trained, in each micro-batch another number."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for number in range(count):
        window = torch.randint(0, 64, (rows, 17), generator=generator)
        labels = window[:, 1:].clone()
        labels[:, 16 - 3 * number :] = -100
        batches.append({"input_ids": window[:, :-1], "labels": labels})
    trained = sum(int((batch["labels"] >= 0).sum()) for batch in batches)
    return [{**batch, "step_tokens": torch.tensor(trained)} for batch in batches]


@pytest.mark.parametrize("optimizer", [ADAMW, {"name": "muon", "lr": 1e-2, "muon_lr": 0.02}])
def test_a_step_is_the_plain_one(optimizer) -> None:
    model = build_model(CONFIG, seed=0)
    plain = copy.deepcopy(model)
    loop = BareLoop(model, our_loss_sum, optimizer=optimizer, precision="fp32", grad_clip=0.1)
    (batch,) = micro_batches()
    loop.step([batch])

    loss = our_loss_sum(plain, batch["input_ids"], batch["labels"]) / batch["step_tokens"]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    build_optimizer(plain, **optimizer).step()
    assert float(loop.loss) == pytest.approx(loss.item())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accumulation_is_the_big_batch(precision) -> None:
    parts = micro_batches(3)
    whole = {
        "input_ids": torch.cat([part["input_ids"] for part in parts]),
        "labels": torch.cat([part["labels"] for part in parts]),
        "step_tokens": parts[0]["step_tokens"],
    }
    losses, weights = [], []
    for step in (parts, [whole]):
        model = build_model(CONFIG, seed=0)
        loop = BareLoop(model, our_loss_sum, optimizer={"name": "adamw", "lr": 1e-4}, precision=precision)
        loop.step(step)
        losses.append(float(loop.loss))
        weights.append(model.model.layers[0].mlp.up_proj.weight.float())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    torch.testing.assert_close(weights[0], weights[1], atol=1e-3, rtol=0)


def test_bf16_steps_on_fp32_masters() -> None:
    """Steps too small for bf16 add up in the masters: 40 of 2⁻¹² move a weight near 1, where bf16 rounds to 2⁻⁸."""
    model = build_model(CONFIG, seed=0)
    loop = BareLoop(
        model, our_loss_sum, optimizer={"name": "adamw", "lr": 2**-12, "weight_decay": 0.0}, precision="bf16"
    )
    batches = micro_batches()
    for _ in range(40):
        loop.step(batches)
    norm = model.model.norm.weight
    assert norm.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (norm - 1).abs().max().item() > 0


def test_no_gradient_is_left_behind() -> None:
    model = build_model(CONFIG, seed=0)
    loop = BareLoop(model, our_loss_sum, optimizer=ADAMW, precision="bf16")
    loop.step(micro_batches())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.medium
@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"attention_bias": True}, {"tie_word_embeddings": False}])
def test_the_twin_in_transformers_takes_the_same_step(changes) -> None:
    from llmtrain.bench.peers import twin_loss_sum, twin_of

    config = ModelConfig(**{**CONFIG.to_dict(), "initializer_range": 0.2, **changes})
    ours = build_model(config, seed=0)
    twin = twin_of(ours)
    assert type(twin).__name__ == config.to_hf()["architectures"][0]
    loops = [
        BareLoop(model, loss_sum, optimizer=ADAMW, precision="fp32", grad_clip=1.0)
        for model, loss_sum in ((ours, our_loss_sum), (twin, twin_loss_sum))
    ]
    for _ in range(3):
        for loop in loops:
            loop.step(micro_batches(2))
        assert float(loops[0].loss) == pytest.approx(float(loops[1].loss), abs=1e-4)


def test_a_shape_without_a_twin_is_refused() -> None:
    from llmtrain.bench.peers import twin_of

    config = ModelConfig(**{**CONFIG.to_dict(), "position": "sinusoidal"})
    with pytest.raises(ValueError, match=r"model\.position=sinusoidal has no twin in transformers"):
        twin_of(build_model(config, seed=0))
