"""`config.json` in transformers 4, installed into a folder of its own: the same logits and ids."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmtrain.checkpoint import save_model_folder
from llmtrain.model import ModelConfig, build_model
from llmtrain.tokenizer import byte_tokenizer

pytestmark = pytest.mark.slow

# The last of series 4, and the versions that it asks for.
PACKAGES = ["transformers==4.57.1", "huggingface_hub==0.36.2", "tokenizers==0.22.1"]
SHAPES = {
    "llama": {},
    "untied": {"tie_word_embeddings": False, "head_dim": 32},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "qwen2": {"attention_bias": True, "rope_theta": 1e6},
    "qwen3": {"qk_norm": True, "head_dim": 32},
}
READER = """
import sys, torch, transformers
assert transformers.__version__.startswith("4."), transformers.__version__
for folder in sys.argv[1:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    saved = torch.load(folder + ".pt", weights_only=True)
    with torch.no_grad():
        print(float((model(saved["ids"]).logits - saved["logits"]).abs().max()))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("你好 naïve") == saved["text"].tolist()
"""


@pytest.fixture(scope="module")
def transformers4(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("transformers4")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"transformers 4 cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return target


def test_transformers_4_reads_every_shape(transformers4, llama_tok, tmp_path):
    """And both kinds of tokenizer: ours, and one that begins every text with a token of its own."""
    ids = torch.randint(0, 262, (2, 100), generator=torch.Generator().manual_seed(2))
    for name, changes in SHAPES.items():
        config = ModelConfig(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.2,
            **changes,
        )
        model = build_model(config, seed=0).eval()
        tokenizer = llama_tok if name == "untied" else byte_tokenizer()
        save_model_folder(tmp_path / name, config=config, state_dict=model.state_dict(), tokenizer=tokenizer, info={})
        with torch.no_grad():
            saved = {
                "ids": ids,
                "logits": model(ids),
                "text": torch.tensor(tokenizer.begin(tokenizer.encode("你好 naïve"))),
            }
        torch.save(saved, tmp_path / f"{name}.pt")
    folders = [str(tmp_path / name) for name in SHAPES]
    environment = os.environ | {"PYTHONPATH": str(transformers4)}
    done = subprocess.run(
        [sys.executable, "-c", READER, *folders], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    differences = dict(zip(SHAPES, map(float, done.stdout.split()), strict=True))
    assert max(differences.values()) < 1e-4, differences
