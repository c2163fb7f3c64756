"""Every key of every command, with the kind of its values: what null, a word, infinity or a list is refused by.

`composing` checks each composed configuration against this table, so no command meets a value of the wrong kind. What
needs to know more (that a shape fits together, that a path is there) is checked where it is used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from llmtrain.launch.kinds import (
    ANY_TEXT,
    ANYTHING,
    LABEL,
    MAPPING,
    SWITCH,
    TEXT,
    Kind,
    as_written,
    list_of,
    number,
    one_of,
    whole,
)

SEED = whole(0, 2**63 - 1)
COUNT = whole(1)
SHARE = number(least=0, below=1)
LONGEST_TIMEOUT = 10**9  # seconds, 31 years; torch counts milliseconds in 64 bits and dates end before those do
LARGEST_VOCABULARY = 2**20  # `tokenizer.train`'s limit, whose import would cost every command 40 ms; a test compares
MOST_COMPLETIONS = 100_000

_COMMANDS: dict[str, Kind] = {
    "name": TEXT.or_null(),
    "seed": SEED,
    "init": TEXT.or_null(),
    "resume": TEXT.or_null(),
    "model": TEXT,
    "device": TEXT,
    "precision": TEXT,
    # generate
    "prompt": ANY_TEXT.or_null(),
    "prompt_file": TEXT.or_null(),
    "chat": SWITCH,
    "num_samples": whole(1, MOST_COMPLETIONS),
    "show_candidates": SWITCH,
    "candidates": COUNT,
    "max_length": COUNT.or_null(),
    "max_rows": COUNT,
    "compile": SWITCH,
    # inspect
    "as_text": SWITCH,
    "measure": SWITCH,
    # chat
    "system": ANY_TEXT.or_null(),
    # serve
    "served_name": TEXT,
    "inspect": SWITCH,
    "adapters": MAPPING,
    "host": TEXT,
    "port": whole(0, 65535),
    "allowed_hosts": list_of(TEXT),
    "api_key_file": TEXT.or_null(),
    "max_waiting": whole(0, 10**6),
    "max_tokens": COUNT,
    "max_body_bytes": COUNT,
    "request_timeout": number(above=0, most=LONGEST_TIMEOUT),
    "shutdown_grace": number(least=0, most=LONGEST_TIMEOUT),
    # evaluate
    "shards_dir": TEXT.or_null(),
    "sequence_length": COUNT.or_null(),
    "batch_size": COUNT,
    "evaluation.max_rows": COUNT,
    "tasks.names": list_of(TEXT).or_word("auto", "all"),
    "tasks.examples": COUNT.or_null(),
    "tasks.settings": MAPPING,
    "tasks.metric": TEXT.or_null(),
    "tasks.also": list_of(TEXT),
    "tasks.files": list_of(TEXT),
    "devices": COUNT.or_word("auto"),
    "harness.tasks": list_of(TEXT),
    "harness.include_path": TEXT.or_null(),
    "harness.limit": COUNT.or_null(),
    "harness.num_fewshot": whole(0).or_null(),
    "harness.chat": SWITCH,
    # compare
    "a": TEXT.or_null(),
    "b": TEXT.or_null(),
    "shown": whole(0),
    # report
    "runs": list_of(TEXT),
    "out": TEXT.or_null(),
    "report_every": number(least=0, most=10**9).or_null(),
    # tokenize
    "text": ANY_TEXT.or_null(),
    "ids": ANYTHING,  # also one id, or several in one text
    # show-batch
    "run": TEXT.or_null(),
    "step": COUNT.or_null(),
    "samples": list_of(whole(0)).or_null(),
    "limit": COUNT.or_null(),
    # plan
    "plan.device": TEXT,
    "plan.memory_gb": number(above=0, most=10**6).or_null(),
    "plan.mfu": number(above=0, most=1),
    "plan.price_per_hour": number(above=0, most=10**9).or_null(),
    "plan.probe": SWITCH,
    # verify-resume
    "verify.steps": COUNT,
    "verify.kill_at": COUNT.or_null(),
    "verify.stop_at": COUNT.or_null(),
    "verify.tolerance": number(least=0, most=1),
    "verify.keep": SWITCH,
    # bench and smoke
    "which": list_of(TEXT),
    "pretrain": list_of(TEXT),
    "rounds": COUNT,
    "threads": whole(1, 4096).or_null(),
    "steps": COUNT,
    "prompt_tokens": COUNT,
    "new_tokens": COUNT,
    "batch_sizes": list_of(COUNT, least=1),
    "generate_models": list_of(TEXT),
    "generate_batch_sizes": list_of(COUNT, least=1),
    "generate_compile": SWITCH,
    "generate_requests": COUNT,
    "peers_python": TEXT,
    "megabytes": number(above=0, most=10**6),
    "memory_megabytes": list_of(number(above=0, most=10**6)),
    "training_memory": list_of(TEXT),
}
_COMMANDS |= {
    f"stages.{name}": list_of(TEXT) for name in ("prepare", "tokenizer", "pretrain", "finetune", "evaluate", "generate")
}
_DATA = {
    "kind": TEXT,
    "name": TEXT,
    "path": TEXT.or_null(),
    "paths": list_of(TEXT),
    "data_dir": TEXT,
    "data_files": list_of(TEXT).or_null(),
    "test_paths": list_of(TEXT).or_null(),
    "validation_paths": list_of(TEXT).or_null(),
    "weights": list_of(number(above=0, most=10**9)).or_null(),
    "text_field": TEXT,
    "encoding": TEXT,
    "source": one_of("auto", "npm", "fortunes"),
    "split": TEXT,
    "validation_split": TEXT.or_null(),
    "validation_fraction": SHARE,
    "validation_last": whole(0),
    "sequence_length": COUNT,
    "streaming": SWITCH,
    "revision": TEXT.or_null(),
    "max_documents": COUNT.or_null(),
    "train_examples": COUNT,
    "test_examples": COUNT,
    "first_year": whole(1000, 9999),
    "last_year": whole(1000, 9999),
    "max_number": whole(0, 10**8 - 1),
    "max_length": COUNT,
    "pieces": whole(0),
    "drills": whole(0),
    "languages": list_of(TEXT, least=1),
    "longest_text": COUNT,
    "most_answers": COUNT,
    "chains": whole(0),
    "metric": TEXT,
    "skip_malformed": SWITCH,
    "seed": whole(0),
}
_MODEL = {
    "vocab_size": COUNT.or_null(),
    "hidden_size": COUNT,
    "intermediate_size": COUNT,
    "num_hidden_layers": COUNT,
    "num_attention_heads": COUNT,
    "num_key_value_heads": COUNT,
    "head_dim": COUNT.or_null(),
    "max_position_embeddings": COUNT,
    "rms_norm_eps": number(least=0, most=1),
    "rope_theta": number(least=1, most=1e12),
    "rope_scaling": MAPPING.or_null(),
    "position": one_of("rope", "sinusoidal"),
    "attention_bias": SWITCH,
    "qk_norm": SWITCH,
    "tie_word_embeddings": SWITCH,
    "dropout": SHARE,
    "initializer_range": number(least=0, most=100),
}
_OPTIM = {
    "name": one_of("adamw", "muon"),
    "lr": number(above=0, most=1000),
    "weight_decay": number(least=0, most=1000),
    "betas": list_of(SHARE),
    "eps": number(least=0, most=1000),
    "muon_lr": number(above=0, most=1000),
    "muon_momentum": SHARE,
    "muon_steps": whole(1, 100),
    "schedule": one_of("cosine", "wsd", "constant"),
    "warmup_steps": whole(0).or_word("auto"),
    "min_lr_ratio": number(least=0, most=1),
    "decay_fraction": number(above=0, most=1),
    "grad_clip": number(above=0).or_null(),
}
_TRAINER = {
    "max_steps": COUNT.or_null(),
    "max_tokens": COUNT.or_null(),
    "max_epochs": number(above=0, most=10**9).or_null(),
    "batch_tokens": COUNT,
    "batch_examples": COUNT,
    "micro_batch_size": COUNT.or_null(),
    "packing_length": COUNT.or_null(),
    "accelerator": one_of("auto", "cpu", "gpu"),
    "devices": COUNT.or_word("auto"),
    "num_nodes": COUNT.or_word("auto"),
    "timeout": number(least=1, most=LONGEST_TIMEOUT),
    "precision": one_of("auto", "bf16", "fp32"),
    "log_every": COUNT,
    "val_examples": whole(0).or_null(),
    "val_every": COUNT.or_null(),
    "checkpoint_every": COUNT.or_null(),
    "keep_last": COUNT.or_null(),
    "max_skipped_steps": COUNT.or_null(),
    "spike_alarm": number(above=0).or_null(),
    "sample_every": COUNT.or_null(),
    "compile": SWITCH,
    "gradient_checkpointing": SWITCH,
}
_SAMPLING = {
    "temperature": number(least=0, most=1000),
    "top_k": whole(0),
    "top_p": number(above=0, most=1),
    "min_p": number(least=0, most=1),
    "repetition_penalty": number(least=0.01, most=100),
    "max_new_tokens": COUNT,
    "stop": list_of(TEXT),
    "stop_ids": list_of(whole(0)),
    "seed": SEED.or_null(),
    "ignore_eos": SWITCH,
}
_SECTIONS: dict[str, dict[str, Kind]] = {
    "paths": {"runs_dir": TEXT, "data_dir": TEXT, "run_dir": TEXT.or_null()},
    "data": _DATA,
    "tokenizer": {
        "kind": one_of("bpe", "characters", "byte", "file"),
        "vocab_size": whole(1, LARGEST_VOCABULARY),
        "sample_characters": COUNT,
        "pattern": TEXT.or_null(),
        "path": TEXT.or_null(),
    },
    "model": _MODEL,
    "optim": _OPTIM,
    "trainer": _TRAINER,
    "strategy": {
        "name": one_of("single", "deepspeed_1", "deepspeed_2", "deepspeed_3"),
        "grad_accum_dtype": one_of("fp32", "bf16"),
        "offload_optimizer": SWITCH,
        "offload_parameters": SWITCH,
    },
    "logger": {"kind": one_of("csv", "wandb"), "project": LABEL, "mode": one_of("auto", "online", "offline")},
    "callbacks": {"prompts": list_of(ANY_TEXT).or_word("auto"), "max_new_tokens": COUNT, "recall": whole(0)},
    "sampling": _SAMPLING,
    "adapter": {
        "kind": one_of("lora", "none"),
        "r": COUNT,
        "lora_alpha": number(above=0, most=10**6),
        "lora_dropout": SHARE,
        "target_modules": list_of(TEXT, least=1),
        "use_rslora": SWITCH,
        "use_dora": SWITCH,
        "train_tokens": one_of("auto", "none"),
    },
}
KINDS: dict[str, Kind] = _COMMANDS | {
    f"{section}.{name}": kind for section, kinds in _SECTIONS.items() for name, kind in kinds.items()
}
# What a command, or an option of `data`, takes otherwise than the others.
_OTHERWISE = {
    ("bench", "model"): TEXT.or_null(),
    ("chat", "model"): TEXT.or_null(),
    ("chat", "candidates"): whole(0),
    ("tokenize", "model"): TEXT.or_null(),
    ("huggingface", "data.name"): TEXT.or_null(),
    ("jsonl", "data.test_examples"): COUNT.or_null(),
}
# Text in these is checked where it is used, which can say more than that it is not UTF-8.
_SPOKEN = ("prompt", "text", "system")


class KindError(ValueError):
    """A value is not of its key's kind."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


def check_kinds(command: str, settings: Mapping[str, Any], sections: Collection[str]) -> None:
    """Refuses every value that is not of its key's kind.

    Args:
        command: Whose settings they are.
        settings: All of them, as plain values.
        sections: The groups of the command, which are no single values even if another command has such a key.

    Raises:
        KindError: One sentence on the first such value, with the limit.
    """
    of_data = _mapping(settings.get("data")).get("kind")
    for key, value, kind in _leaves(settings, "", sections):
        kind = _OTHERWISE.get((command, key)) or _OTHERWISE.get((str(of_data), key)) or kind
        if key not in _SPOKEN:
            _check_utf8(key, value)
        wanted = kind.wants(value)
        if wanted is not None:
            raise KindError(f"{key}={as_written(value)} must be {wanted}", key)


def _leaves(settings: Mapping[str, Any], prefix: str, sections: Collection[str]) -> Iterator[tuple[str, Any, Kind]]:
    """Each key with its value and kind; settings of tasks below `tasks.settings` have the kinds of `data`."""
    for name, value in settings.items():
        key = f"{prefix}{name}"
        kind = None if key in sections else KINDS.get(key)
        if kind is not None:
            yield key, value, kind
        elif isinstance(value, dict):
            yield from _leaves(value, f"{key}.", sections)
        for task, inner in _mapping(value).items() if key == "tasks.settings" else ():
            yield f"{key}.{task}", inner, MAPPING
            for setting, given in _mapping(inner).items():
                usual = _DATA.get(str(setting), ANYTHING)
                yield f"{key}.{task}.{setting}", given, _OTHERWISE.get((str(task), f"data.{setting}"), usual)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _check_utf8(key: str, value: Any) -> None:
    if isinstance(value, list):
        for each in value:
            _check_utf8(key, each)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise KindError(
                f"{key}={value!r} is not UTF-8 from character {error.start + 1} on: write it in UTF-8, and give a file "
                "or folder of that name another one",
                key,
            ) from None
