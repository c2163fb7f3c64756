"""An engine with a compiled decode step says what the plain one says; and what it says where it cannot be made."""

import pytest
import torch

from llmtrain.generation import Engine, SamplingParams
from llmtrain.model import CompiledOneToken
from tests.generation.conftest import ids_of, random_prompts
from tests.model.test_compiled import needs_compiler

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@needs_compiler
@pytest.mark.medium
def test_a_compiled_engine_says_the_same(model, tok):
    prompts = random_prompts(5)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=12)
    plain, compiled = (Engine(model, tok, max_rows=4, compile=compile) for compile in (False, True))
    assert ids_of(compiled.generate(prompts, greedy)) == ids_of(plain.generate(prompts, greedy))
    assert isinstance(compiled._loop._one_token, CompiledOneToken)


def test_what_cannot_be_compiled_is_refused_before_work_starts(model, tok):
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(ValueError, match=r"needs a C\+\+ compiler.*leave compile=true out"),
    ):
        Engine(model, tok, compile=True)
    with pytest.raises(ValueError, match="compile=true is for a model on a CPU in fp32 or bf16"):
        Engine(model.half(), tok, compile=True)
