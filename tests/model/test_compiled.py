"""The compiled decode step beside the plain one, for one row, few and many."""

import pytest
import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from llmtrain.model import CompiledOneToken, KVCache, OneToken
from tests.model.test_transformer import make


def _has_compiler():
    try:
        return bool(get_cpp_compiler())
    except InvalidCxxCompiler:
        return False


pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="this machine has no C++ compiler")


@needs_compiler
@pytest.mark.medium
@pytest.mark.parametrize(
    ("shape", "rows_in_turn"),
    [({"qk_norm": True}, (1, 2, 5, 15, 16, 18, 3, 1)), ({"position": "sinusoidal"}, (1, 1)), ({}, (16, 1, 7, 16))],
    ids=["qk_norm", "sinusoidal", "sixteen"],
)
def test_a_compiled_step_equals_the_plain_one(shape, rows_in_turn):
    torch._dynamo.reset()  # what was compiled before makes torch expect other sizes, and hides what fails without
    model = make(**shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    most = max(rows_in_turn)
    with torch.inference_mode():
        caches = [KVCache.allocate(model.config, most, 32) for _ in range(2)]
        plain, compiled = OneToken(model), CompiledOneToken(model, caches[1])
        assert caches[1].lengths == [0] * most
        tokens = torch.randint(0, 256, (most, 12), generator=torch.Generator().manual_seed(3))
        lengths = [1 + row % 12 for row in range(most)]
        for cache in caches:
            model(tokens, cache=cache, rows=(0, most), new_lengths=lengths)
        for rows in rows_in_turn:
            one = plain(tokens[:rows, 0], caches[0], rows)
            other = compiled(tokens[:rows, 0], caches[1], rows)
            assert (one - other).abs().max() < 1e-5 * one.abs().max()
            assert caches[0].lengths == caches[1].lengths
