"""One side of `llmtrain bench which=[peers]` that runs in another environment: litgpt's or llama.cpp's greedy decoding.

Called as a file by that environment's Python, so it imports nothing of ours, and litgpt, llama.cpp and `gguf` only when
their side is asked for. It reads JSON lines and answers each with one: first what to load, then prompts. Does not know
clocks: an answer is timed by who waits for it.

Shapes: H heads, D head size, I in features.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

Decode = Callable[[list[int], int], list[int]]
LITGPT, LLAMA_CPP = "litgpt", "llama.cpp"

# The names in GGUF's architecture `llama`, by ours (which are Hugging Face's).
_GGUF_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """`blk.3.attn_q.weight` for `model.layers.3.self_attn.q_proj.weight`.

    Raises:
        KeyError: The architecture `llama` has no such weight.
    """
    stem = name.removesuffix(".weight")
    if stem in _GGUF_TOP:
        return f"{_GGUF_TOP[stem]}.weight"
    number, _, inner = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{_GGUF_LAYER[inner]}.weight"


def interleave_heads(weight: Any, heads: int) -> Any:
    """Reorders the rows of a query or key projection (H·D, I) so that the two numbers of a rotary pair are neighbours.

    Ours, like Hugging Face's, turns number j of a head with number j + D/2; llama.cpp turns 2j with 2j + 1.
    """
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def gguf_tensors(weights: dict[str, Any], config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and arrays as llama.cpp wants them; a tied output table is not written twice."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in weights.items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        kind = name.split(".")[-2]
        yield gguf_name(name), interleave_heads(weight, heads[kind]) if kind in heads else weight


def litgpt_shape(config: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `litgpt.Config` for a Llama configuration."""
    return {
        "name": "llmtrain",
        "block_size": config["max_position_embeddings"],
        "vocab_size": config["vocab_size"],
        "padded_vocab_size": config["vocab_size"],
        "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "n_query_groups": config["num_key_value_heads"],
        "head_size": config["head_dim"],
        "n_embd": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "norm_class_name": "RMSNorm",
        "norm_eps": config["rms_norm_eps"],
        "mlp_class_name": "LLaMAMLP",
        "rope_base": int(config["rope_theta"]),
        "rotary_percentage": 1.0,
        "parallel_residual": False,
        "bias": False,
    }


def load_litgpt(wanted: dict[str, Any]) -> tuple[str, Decode]:
    """litgpt's model and its own `generate`, as `litgpt generate` runs it without `--compile`."""
    import torch
    from litgpt import Config
    from litgpt.generate.base import generate
    from litgpt.model import GPT
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
    from safetensors.torch import load_file

    torch.set_num_threads(wanted["threads"])
    shape = Config(**litgpt_shape(wanted["config"]))
    state: dict[str, Any] = {}
    copy_weights_hf_llama(shape, {}, state, load_file(wanted["weights"]))
    model = GPT(shape)
    model.load_state_dict(state)
    model = model.to(getattr(torch, wanted["dtype"])).eval()
    model.max_seq_length = wanted["length"]
    model.set_kv_cache(batch_size=1, dtype=getattr(torch, wanted["dtype"]))

    def decode(prompt: list[int], new_tokens: int) -> list[int]:
        ids, length = torch.tensor(prompt), len(prompt) + new_tokens
        return generate(model, ids, length, temperature=0.0, include_prompt=False).tolist()

    return f"litgpt {metadata.version('litgpt')}, torch {torch.__version__}", decode


def write_gguf(path: Path, wanted: dict[str, Any]) -> None:
    """The weights as a GGUF file without a vocabulary: ids go in and out. Norms stay fp32, as llama.cpp wants them."""
    import gguf
    from safetensors.numpy import load_file

    config = wanted["config"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("no_vocab")
    kind = gguf.GGMLQuantizationType[_GGML_TYPES[wanted["dtype"]]]
    for name, weight in gguf_tensors(load_file(wanted["weights"]), config):
        stored = kind if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(weight, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_GGML_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def load_llama_cpp(wanted: dict[str, Any]) -> tuple[str, Decode]:
    """llama.cpp through its C functions, sampling included; Python only passes the tokens on."""
    import gguf
    import llama_cpp as api

    path = Path(wanted["scratch"]) / f"{wanted['dtype']}.gguf"
    write_gguf(path, wanted)
    api.llama_backend_init()
    model_settings, settings = api.llama_model_default_params(), api.llama_context_default_params()
    model_settings.n_gpu_layers = 0
    settings.n_ctx = settings.n_batch = settings.n_ubatch = wanted["length"]
    settings.n_threads = settings.n_threads_batch = wanted["threads"]
    # The cache in the same precision as the weights, as on the other sides.
    settings.type_k = settings.type_v = int(gguf.GGMLQuantizationType[_GGML_TYPES[wanted["dtype"]]])
    settings.offload_kqv = False
    model = api.llama_model_load_from_file(str(path).encode(), model_settings)
    context = api.llama_init_from_model(model, settings) if model else None
    if not context:
        raise RuntimeError("llama.cpp could not load the GGUF file; its reason stands above")
    sampler = api.llama_sampler_init_greedy()

    def decode(prompt: list[int], new_tokens: int) -> list[int]:
        api.llama_memory_clear(api.llama_get_memory(context), True)
        step, said = prompt, []
        for _ in range(new_tokens):
            ids = (api.llama_token * len(step))(*step)
            if api.llama_decode(context, api.llama_batch_get_one(ids, len(step))) != 0:
                raise RuntimeError("llama_decode failed; its reason stands above")
            said.append(int(api.llama_sampler_sample(sampler, context, -1)))
            step = said[-1:]
        return said

    return f"llama.cpp of llama-cpp-python {metadata.version('llama-cpp-python')}", decode


LOADERS: dict[str, Callable[[dict[str, Any]], tuple[str, Decode]]] = {LITGPT: load_litgpt, LLAMA_CPP: load_llama_cpp}


def answer(lines: TextIO, replies: TextIO, loaders: dict[str, Callable[[dict[str, Any]], tuple[str, Decode]]]) -> None:
    """Loads what the first line wants, then decodes for every further one. An error is answered, and ends it."""

    def reply(**values: Any) -> None:
        replies.write(json.dumps(values) + "\n")
        replies.flush()

    try:
        wanted = json.loads(lines.readline())
        version, decode = loaders[wanted["side"]](wanted)
        reply(version=version)
        for line in lines:
            request = json.loads(line)
            reply(tokens=decode(request["prompt"], request["new_tokens"]))
    except Exception as error:  # whatever a foreign library raises is for the other end to show
        reply(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    # Libraries print; the pipe is for replies alone, so what they print goes where errors go.
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    answer(sys.stdin, pipe, LOADERS)
