"""Parameter groups, schedules, AdamW and Muon on one process, whole and sliced."""

import copy
import math

import pytest
import torch
from torch import nn

from llmtrain.model import ModelConfig, build_model
from llmtrain.training.optim import Muon, build_optimizer, parameter_groups, resolve_warmup, schedule
from llmtrain.training.optim.muon import _plan, orthogonalize, update_scale


def tiny(tied: bool = True) -> nn.Module:
    config = ModelConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        attention_bias=True,
    )
    return build_model(config, seed=0)


def names_of(model: nn.Module, group: dict) -> set[str]:
    ids = {id(p) for p in group["params"]}
    return {name for name, p in model.named_parameters() if id(p) in ids}


# --- groups -----------------------------------------------------------------------------------------


def test_every_trainable_parameter_is_in_one_group() -> None:
    model = tiny(tied=False)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    groups = parameter_groups(model, lr=1.0, weight_decay=0.1, muon=True)
    listed = [name for group in groups for name in names_of(model, group)]
    assert sorted(listed) == sorted(n for n, p in model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("tied", [True, False])
def test_norms_biases_and_embeddings_are_not_decayed(tied: bool) -> None:
    model = tiny(tied)
    groups = {g["name"]: g for g in parameter_groups(model, lr=1.0, weight_decay=0.1)}
    vectors = names_of(model, groups["vectors"])
    assert groups["vectors"]["weight_decay"] == 0.0
    assert groups["matrices"]["weight_decay"] == 0.1
    assert "model.embed_tokens.weight" in vectors
    assert "model.layers.0.self_attn.q_proj.bias" in vectors
    assert ("lm_head.weight" in names_of(model, groups["matrices"])) == (not tied)


def test_muon_takes_hidden_matrices_only_and_keeps_equal_shapes_together() -> None:
    model = tiny(tied=False)
    groups = {g["name"]: g for g in parameter_groups(model, lr=1e-3, weight_decay=0.1, muon=True, muon_lr=0.02)}
    hidden = names_of(model, groups["muon"])
    assert all("_proj.weight" in name for name in hidden)
    assert len(hidden) == 14
    assert groups["muon"]["lr"] == 0.02
    assert groups["matrices"]["lr"] == 1e-3
    assert names_of(model, groups["matrices"]) == {"lm_head.weight"}
    shapes = [tuple(p.shape) for p in groups["muon"]["params"]]
    assert len({s for s, t in zip(shapes, [None, *shapes], strict=False) if s != t}) == len(set(shapes))


def test_trained_rows_of_an_embedding_count_as_embedding() -> None:
    model = nn.Module()
    model.trainable_tokens_delta = nn.Parameter(torch.zeros(3, 8))
    (group,) = parameter_groups(model, lr=1.0, weight_decay=0.1, muon=True)
    assert group["name"] == "vectors"


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        parameter_groups(tiny().requires_grad_(False), lr=1.0, weight_decay=0.0)


# --- schedules --------------------------------------------------------------------------------------


def curve(name: str, **settings: float) -> list[float]:
    return [schedule(name, step=s, total_steps=100, **settings) for s in range(100)]


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_and_reaches_one(name: str) -> None:
    values = curve(name, warmup_steps=10)
    assert values[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(values) == 1.0


def test_cosine_falls_to_the_minimum_at_the_last_step() -> None:
    values = curve("cosine", warmup_steps=10, min_lr_ratio=0.1)
    assert values[-1] == pytest.approx(0.1)
    assert values[9:] == sorted(values[9:], reverse=True)
    assert values[54] == pytest.approx(0.55)  # half-way between 1 and 0.1


def test_wsd_stays_then_falls_linearly() -> None:
    values = curve("wsd", warmup_steps=10, min_lr_ratio=0.0, decay_fraction=0.2)
    assert values[10:80] == [1.0] * 70
    assert values[80:] == pytest.approx([1 - (i + 1) / 20 for i in range(20)])


def test_after_the_last_step_the_factor_stays() -> None:
    assert schedule("cosine", step=500, total_steps=100, min_lr_ratio=0.1) == pytest.approx(0.1)
    assert schedule("wsd", step=500, total_steps=100, min_lr_ratio=0.1) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "linear"}, "choose one of cosine, wsd, constant"),
        ({"name": "cosine", "warmup_steps": 101}, "between 0 and the run's 100 steps"),
        ({"name": "cosine", "min_lr_ratio": 1.5}, "min_lr_ratio=1.5 must be between 0 and 1"),
        ({"name": "wsd", "decay_fraction": 0.0}, "decay_fraction=0.0 must be above 0"),
        ({"name": "wsd", "warmup_steps": 60, "decay_fraction": 0.5}, "do not fit into 100 steps"),
    ],
)
def test_impossible_schedules_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(step=0, total_steps=100, **settings)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_lambda_schedule_scales_every_group_from_its_own_lr(name: str) -> None:
    model = tiny()
    optimizer = build_optimizer(model, name=name, lr=1e-3, muon_lr=0.02)
    initial = [group["lr"] for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: schedule("cosine", step=step, total_steps=10, warmup_steps=2)
    )
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([lr / 2 for lr in initial])
    take_step(model, optimizer)
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx(initial)


# --- Muon -------------------------------------------------------------------------------------------


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    ids = torch.randint(0, 64, (4, 9), generator=torch.Generator().manual_seed(seed))
    logits = model(ids[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 24, 8), (2, 8, 24)])
def test_newton_schulz_gives_nearly_orthogonal_matrices_with_the_same_singular_vectors(shape: tuple) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonalize(matrices)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.3
    assert values.max() < 1.3
    u, _, vt = torch.linalg.svd(matrices, full_matrices=False)
    core = u.mT @ result @ vt.mT  # diagonal, if the singular vectors are kept
    assert (core - torch.diag_embed(core.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-3


def test_a_batch_equals_its_matrices_one_by_one() -> None:
    matrices = torch.randn(5, 12, 20, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([orthogonalize(m[None]) for m in matrices])
    torch.testing.assert_close(orthogonalize(matrices), alone, rtol=1e-5, atol=1e-6)


def test_a_zero_matrix_stays_zero() -> None:
    assert not orthogonalize(torch.zeros(1, 4, 4)).any()


def test_the_scale_grows_with_tall_matrices_only() -> None:
    assert update_scale(64, 16) == 2.0
    assert update_scale(16, 64) == 1.0


def test_muon_agrees_with_torch_muon_and_adamw() -> None:
    """torch's own Muon (whole matrices, bf16 products) and AdamW take the same five steps.

    The gradients are random, hence well-conditioned; both Muons round to bf16 but in different places, so
    a path of five steps may differ by about 1 % of its length, and 3 % are allowed.
    """
    ours, theirs = tiny(), tiny()
    optimizer = build_optimizer(ours, name="muon", lr=1e-3, weight_decay=0.1, muon_dtype=torch.bfloat16)
    groups = {g["name"]: g for g in parameter_groups(theirs, lr=1e-3, weight_decay=0.1, muon=True)}
    muon = torch.optim.Muon(groups["muon"]["params"], lr=0.02, weight_decay=0.1, momentum=0.95)
    adamw = torch.optim.AdamW(groups["vectors"]["params"], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        optimizer.step()
        muon.step()
        adamw.step()
    start = dict(tiny().named_parameters())
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert (a - b).norm() < 0.03 * (b - start[name]).norm(), name


def sliced(optimizer: Muon, world: int, rank: int) -> list[torch.Tensor]:
    """Replaces each group's parameters by this rank's flat slice, as ZeRO 1 and 2 do."""
    flats = []
    for group in optimizer.param_groups:
        whole = torch.cat([p.detach().flatten() for p in group["params"]])
        padded = math.ceil(whole.numel() / (2 * world)) * 2 * world
        whole = nn.functional.pad(whole, (0, padded - whole.numel()))
        flat = nn.Parameter(whole.view(world, -1)[rank].clone())
        group["params"] = [flat]
        flats.append(flat)
    return flats


def test_one_flat_slice_equals_whole_matrices() -> None:
    whole, flat = tiny(), tiny()
    a = build_optimizer(whole, name="muon", lr=1e-3)
    b = build_optimizer(flat, name="muon", lr=1e-3)
    members = [list(group["params"]) for group in b.param_groups]
    flats = sliced(b, world=1, rank=0)
    for seed in range(3):
        ids = torch.randint(0, 64, (4, 9), generator=torch.Generator().manual_seed(seed))
        nn.functional.cross_entropy(whole(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        for vector, group in zip(flats, a.param_groups, strict=True):
            gradient = torch.cat([p.grad.flatten() for p in group["params"]])
            vector.grad = nn.functional.pad(gradient, (0, vector.numel() - gradient.numel()))
        a.step()
        b.step()
        a.zero_grad()
    for vector, group, names in zip(flats, a.param_groups, members, strict=True):
        expected = torch.cat([p.detach().flatten() for p in group["params"]])
        assert len(names) == len(group["params"])
        torch.testing.assert_close(vector.detach()[: expected.numel()], expected, rtol=1e-5, atol=1e-7)


def test_the_plan_covers_a_slice_with_whole_matrices() -> None:
    shapes = ((4, 4), (4, 4), (4, 4), (2, 8), (6, 2))
    total = 16 * 4 + 12
    for world in (1, 2, 3, 5):
        size = math.ceil(total / (2 * world)) * 2
        seen = []
        for rank in range(world):
            for run in _plan(shapes, rank * size, (rank + 1) * size):
                numel = math.prod(run.shape)
                assert (run.stop - run.start) % numel == 0
                assert run.start <= run.lo < run.hi <= run.stop
                assert run.lo - run.start < numel
                assert run.stop - run.hi < numel
                seen += range(run.lo, run.hi)
        assert seen == list(range(total))


def test_a_slice_of_another_layout_is_noticed() -> None:
    optimizer = build_optimizer(tiny(), name="muon", lr=1e-3)
    (flat, *_) = sliced(optimizer, world=1, rank=0)
    optimizer.param_groups[0]["params"] = [nn.Parameter(flat.detach()[:-2].clone())]
    with pytest.raises(AssertionError, match="cannot read a slice"):
        optimizer.step()


def test_muon_state_survives_a_save() -> None:
    first = tiny()
    optimizer = build_optimizer(first, name="muon", lr=1e-3)
    take_step(first, optimizer)
    second = tiny()
    second.load_state_dict(first.state_dict())
    restored = build_optimizer(second, name="muon", lr=1e-3)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take_step(first, optimizer, seed=1)
    take_step(second, restored, seed=1)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_closure_is_called_with_gradients_on() -> None:
    model = tiny()
    optimizer = build_optimizer(model, name="muon", lr=1e-3)

    def closure() -> torch.Tensor:
        loss = model(torch.arange(8)[None]).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "sgd"}, "choose one of adamw, muon"),
        ({"name": "adamw", "lr": 0.0}, "optim.lr=0.0 must be above 0"),
        ({"name": "muon", "muon_momentum": 1.0}, "muon_momentum=1.0"),
        ({"name": "adamw", "weight_decay": -1.0}, "must not be negative"),
    ],
)
def test_impossible_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizer(tiny(), **{"lr": 1e-3, **settings})


def test_the_warm_up_suits_a_short_run():
    assert [resolve_warmup("auto", steps) for steps in (5, 40, 499, 500, 1500, 10**9)] == [0, 4, 49, 50, 50, 50]
    assert resolve_warmup(20, 40) == 20
    with pytest.raises(
        ValueError, match=r"optim\.warmup_steps=50 must be .* the run's 40 steps; .* give optim\.warmup_s"
    ):
        schedule("cosine", step=0, total_steps=40, warmup_steps=50)
