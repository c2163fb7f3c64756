"""`llmtrain generate`: continue prompts and stream the text to stdout.

Reads prompts and settings, prints what the engine says. All completions run together; the first is shown as it comes,
the others as soon as it is their turn. Does not load, sample or decode itself.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.launch.inference import load_model, make_engine, roles_trained, sampling_params
from llmtrain.launch.keys import MOST_COMPLETIONS
from llmtrain.launch.reading import check_text
from llmtrain.launch.terminal import visible

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.checkpoint import LoadedModel
    from llmtrain.generation import Completion, Engine, Event, GenerationRequest, SamplingParams

logger = logging.getLogger(__name__)

STDIN = "-"


@dataclass
class _Job:
    """One completion to be made: the prompt, which sample of it, and the request, or why there is none."""

    prompt: str
    sample: int
    request: GenerationRequest | None = None
    error: str | None = None


def run(settings: DictConfig, run_dir: Path) -> dict[str, Any]:
    """Generates, and prints text on stdout.

    Returns:
        `completions`, in the order of the prompts, each with `prompt`, `text`, `tokens` (their number), `token_ids`,
        `finish_reason` and `seed`; and the engine's figures.

    Raises:
        ValueError: A setting is wrong, or no prompt can be continued.
    """
    sampling = sampling_params(settings.sampling)
    if settings.num_samples > 1 and sampling.greedy:
        logger.warning(
            "sampling.temperature=0 always takes the likeliest token: the %d samples of a prompt will be equal",
            settings.num_samples,
        )
    prompts = read_prompts(settings.prompt, settings.prompt_file)
    if len(prompts) * settings.num_samples > MOST_COMPLETIONS:
        raise ValueError(
            f"num_samples={settings.num_samples} of {len(prompts):,} prompts are more than {MOST_COMPLETIONS:,} "
            "completions; lower num_samples or divide prompt_file"
        )
    loaded = load_model(settings)
    rows = min(settings.max_rows, len(prompts) * settings.num_samples)
    engine = make_engine(loaded, max_rows=rows, max_length=settings.max_length, compile=settings.compile)
    if settings.chat:
        warn_of_untrained_roles(loaded)
    candidates = settings.candidates if settings.show_candidates else 0
    jobs = _submit(engine, prompts, sampling, settings, candidates)
    several = len(jobs) > 1
    for number, job in enumerate(jobs):
        if several:
            _print_title(number, job, len(prompts), settings.num_samples)
        _print_completion(engine, job, echo=not settings.chat, table=bool(candidates))
    return _results(engine, jobs, loaded.adapter_folder or loaded.folder)


def warn_of_untrained_roles(loaded: LoadedModel) -> None:
    """Says so when no training ever touched the role markers: the answer to a chat is then noise."""
    if not roles_trained(loaded):
        logger.warning(
            "chat=true: %s was never trained on the role markers of a chat, so expect no answer; fine-tune it first "
            "(make finetune), or leave chat=true out",
            loaded.folder,
        )


def read_prompts(prompt: str | None, prompt_file: str | None) -> list[str]:
    """The prompts that the settings give; `prompt=-` reads one from standard input, whole.

    A .jsonl file has one {"prompt": …} per line; any other file one prompt per line, blank lines left out.

    Raises:
        ValueError: None given, or twice, or the file cannot be read as prompts.
    """
    if (prompt is None) == (prompt_file is None):
        given = "both prompt and prompt_file are given" if prompt is not None else "there is no prompt"
        raise ValueError(f'{given}; give one of prompt="…", prompt=- (standard input) and prompt_file=…')
    if prompt_file is not None:
        return _read_prompt_file(Path(prompt_file))
    assert prompt is not None
    if prompt == STDIN:
        prompt = _decoded(sys.stdin.buffer.read(), "standard input").removesuffix("\n")
    check_text(prompt, "the prompt")
    if not prompt:
        raise ValueError("the prompt is empty: give at least one character")
    return [prompt]


def _read_prompt_file(file: Path) -> list[str]:
    try:
        text = _decoded(file.read_bytes(), str(file))
    except OSError as error:
        raise ValueError(
            f"prompt_file={file} cannot be read ({error.strerror}): give a file with one prompt per line"
        ) from error
    prompts = []
    for number, line in enumerate(text.splitlines() if file.suffix != ".jsonl" else text.split("\n"), 1):
        if not line.strip():
            continue
        if file.suffix == ".jsonl":
            try:
                line = json.loads(line)["prompt"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(f'{file}, line {number}: each line must be {{"prompt": "…"}}') from error
            if not isinstance(line, str) or not line:
                raise ValueError(f'{file}, line {number}: "prompt" must be text that is not empty')
            check_text(line, f"{file}, line {number}: the prompt")
        prompts.append(line)
    if not prompts:
        raise ValueError(f"{file} holds no prompt: give one per line")
    return prompts


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 at byte {error.start}: convert it first") from error


def _submit(
    engine: Engine, prompts: list[str], sampling: SamplingParams, settings: DictConfig, candidates: int
) -> list[_Job]:
    """Queue every sample of every prompt; sample i of a stated seed s has the seed s + i."""
    from llmtrain.tokenizer import render_chat

    jobs = [_Job(prompt, sample) for prompt in prompts for sample in range(settings.num_samples)]
    for job in jobs:
        seed = None if sampling.seed is None else sampling.seed + job.sample
        ids: str | list[int] = job.prompt
        try:
            if settings.chat:
                message = {"role": "user", "content": job.prompt}
                ids, _ = render_chat([message], engine.tokenizer, add_generation_prompt=True)
            job.request = engine.submit(
                ids, replace(sampling, seed=seed), candidates=candidates, logprobs=bool(candidates), streamed=True
            )
        except ValueError as error:
            job.error = str(error)
    if all(job.request is None for job in jobs):
        raise ValueError(jobs[0].error)
    return jobs


def _print_title(number: int, job: _Job, prompts: int, samples: int) -> None:
    parts = []
    if prompts > 1:
        parts.append(f"prompt {number // samples + 1}")
    if samples > 1:
        parts.append(f"sample {job.sample + 1}")
    print(("\n" if number else "") + f"── {', '.join(parts)} ──", flush=True)


def _print_completion(engine: Engine, job: _Job, *, echo: bool, table: bool) -> None:
    if job.request is None:
        logger.warning("this prompt is left out: %s", job.error)
        return
    prompt = job.prompt if echo else ""
    if table:
        for step, event in enumerate(engine.events(job.request), 1):
            if event.token_id is not None:
                print(candidate_line(step, engine.tokenizer.token_bytes(event.token_id), event), flush=True)
        print(visible(prompt + job.request.result().text))
    else:
        print(visible(prompt), end="", flush=True)
        for event in engine.events(job.request):
            print(visible(event.text), end="", flush=True)
        print(flush=True)
    completion = job.request.result()
    if completion.error:
        logger.warning("this completion broke off: %s", completion.error)


def candidate_line(step: int, token: bytes, event: Event) -> str:
    """One step as a line: what was chosen, and what was likely, with the model's own probabilities."""
    assert event.logprob is not None
    assert event.candidates is not None
    listed = "  ".join(f"{_quoted(each.text)} {each.probability:.3f}" for each in event.candidates)
    return f"{step:4d}  {_quoted(token.decode('utf-8', 'replace')):<12} {math.exp(event.logprob):.3f}  of  {listed}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text.isprintable() else json.dumps(text)


def _results(engine: Engine, jobs: list[_Job], folder: Path) -> dict[str, Any]:
    stats = engine.stats
    completions = [_completion_result(job) for job in jobs]
    if stats.ttft_seconds is not None:
        speed = stats.decode_tokens_per_second
        logger.info(
            "first token after %.0f ms%s; seed %s",
            1000 * stats.ttft_seconds,
            f", then {speed:,.0f} tokens/s" if speed else "",
            ", ".join(str(completion["seed"]) for completion in completions if completion["seed"] is not None),
        )
    return {
        "command": "generate",
        "model": str(folder),
        "completions": completions,
        "ttft_seconds": stats.ttft_seconds,
        "prefill_tokens_per_second": stats.prefill_tokens_per_second,
        "decode_tokens_per_second": stats.decode_tokens_per_second,
        "cache_bytes": stats.cache_bytes,
    }


def _completion_result(job: _Job) -> dict[str, Any]:
    if job.request is None:
        empty = {"text": "", "tokens": 0, "token_ids": [], "finish_reason": "error", "seed": None, "error": job.error}
        return {"prompt": job.prompt, **empty}
    completion: Completion = job.request.result()
    result: dict[str, Any] = {
        "prompt": job.prompt,
        "text": completion.text,
        "tokens": len(completion.token_ids),
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
    }
    if completion.error:
        result["error"] = completion.error
    if completion.candidates is not None:
        result["candidates"] = [[each._asdict() for each in step] for step in completion.candidates]
    return result
