"""`llmtrain chat`: a conversation with a fine-tuned model, in the terminal or through a pipe.

Joins a console, a conversation and the engine, and reads lines that begin with a slash as commands. What fits the
context is `llmtrain.serve.conversation`'s to decide; it samples and decodes nothing itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.launch.console import Console, foreground
from llmtrain.launch.generate import candidate_line
from llmtrain.launch.inference import load_model, make_engine, roles_trained, sampling_params
from llmtrain.launch.reading import check_text, literal
from llmtrain.launch.runs import LATEST
from llmtrain.launch.terminal import visible
from llmtrain.launch.transcript import save_transcript

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.checkpoint import LoadedModel
    from llmtrain.generation import Completion, SamplingParams
    from llmtrain.serve.conversation import Conversation

logger = logging.getLogger(__name__)

CHAT_DATA = ("chatterbot", "jsonl")
"""Kinds of `data` whose fine-tuned models are taken for chat models."""

_CANDIDATES = 5
_ROOM_SHARE = 4  # an answer may count on a quarter of the context


def run(settings: DictConfig, run_dir: Path) -> dict[str, Any]:
    """Talks until the input ends.

    Returns:
        `turns` (answers given), `stopped` (how many of them ended by themselves), `tokens` and `seeds` of the answers,
        `prompt_tokens` and `cached_tokens` of them, `dropped_turns`, and the engine's figures.

    Raises:
        ValueError: A setting is wrong, or there is no model to talk with.
    """
    sampling = sampling_params(settings.sampling)
    if sampling.ignore_eos:
        raise ValueError("sampling.ignore_eos=true would let no answer end: leave it out for a chat")
    if settings.system is not None:
        check_text(settings.system, "system")
    if settings.model is None:
        settings.model = literal(str(latest_chat_model(Path(settings.paths.runs_dir) / "finetune")))
    loaded = load_model(settings)
    if not roles_trained(loaded):
        logger.warning(
            "%s was never trained on the role markers of a chat, so expect no answer; fine-tune it first "
            '(make finetune ARGS="experiment=chat")',
            loaded.folder,
        )
    session = Session(loaded, settings, sampling, Console())
    with foreground():
        return session.run()


def latest_chat_model(runs: Path) -> Path:
    """The newest model below a folder of fine-tuning runs that was trained on conversations, or else the latest one.

    Raises:
        ValueError: There is none.
    """
    from llmtrain.checkpoint import read_info

    files = [file for file in runs.glob("*/model/llmtrain.json") if file.parts[-3] != LATEST]
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        data = (read_info(file.parent).get("config") or {}).get("data") or {}
        if data.get("kind") in CHAT_DATA:
            return file.parent
    if not files:
        raise ValueError(
            f'there is no fine-tuned model in {runs}: make one to talk with (make finetune ARGS="experiment=chat"), '
            "or give one with model=…"
        )
    logger.info("no run in %s was fine-tuned on conversations; the latest is taken", runs)
    return runs / LATEST


class Session:
    """One run of the command: the conversation, how answers are sampled, and what to report at the end.

    Args:
        loaded: The model.
        settings: Those of the command.
        sampling: `settings.sampling`, checked.
        console: Where lines come from.
    """

    def __init__(self, loaded: LoadedModel, settings: DictConfig, sampling: SamplingParams, console: Console) -> None:
        context = loaded.config.max_position_embeddings
        length = settings.max_length or min(loaded.info.get("trained_length") or context, context)
        self._loaded = loaded
        self._console = console
        self._sampling = sampling
        self._seed = sampling.seed
        self._candidates: int = settings.candidates
        self._room = max(1, min(sampling.max_new_tokens, length // _ROOM_SHARE))
        self._engine = make_engine(loaded, max_rows=1, max_length=length, compile=settings.compile)
        self._conversation = self._begin(settings.system)
        self._number = 0  # of the next answer since the conversation began
        self._completions: list[Completion] = []
        self._dropped = 0
        self._commands: dict[str, tuple[str, str, Callable[[str], str]]] = {
            "/reset": ("", "forget all turns; the system message stays", self._reset),
            "/system": ("[TEXT]", "begin anew with a system message, or without one", self._system),
            "/save": ("FILE.jsonl", "add the conversation to a file that finetune data=jsonl reads", self._save),
            "/seed": (
                "[NUMBER|off]",
                "answers that can be had again; alone: the seed of the last answer",
                self._reseed,
            ),
            "/candidates": ("[NUMBER]", "show so many likeliest tokens of every step; 0 or again: no more", self._show),
            "/help": ("", "this list; a message that begins with a slash is written with two", self._help),
            "/quit": ("", "end (Ctrl-D, too)", self._help),
        }

    def run(self) -> dict[str, Any]:
        """Reads and answers until the input ends or says `/quit`; returns the results."""
        if self._console.interactive:
            print("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends", flush=True)
        while (line := self._console.read()) is not None:
            line = line.strip()
            if line.split()[:1] == ["/quit"]:
                break
            try:
                check_text(line, "the message")
                if line.startswith("/") and not line.startswith("//"):
                    print(visible(self.command(line)), flush=True)
                elif line:
                    self.answer(line.removeprefix("/") if line.startswith("//") else line)
            except ValueError as error:  # of this line; the conversation goes on
                logger.warning("%s", error)
        return self._results()

    def command(self, line: str) -> str:
        """Does what a line with a slash says.

        Returns:
            What there is to say about it.

        Raises:
            ValueError: There is no such command, or its argument cannot be used.
        """
        name, _, argument = line.partition(" ")
        if name not in self._commands:
            raise ValueError(f"there is no command {name}; /help lists them, and //… sends a text that begins with /")
        return self._commands[name][2](argument.strip())

    def answer(self, message: str) -> None:
        """Streams the model's answer to one message, and remembers both.

        Raises:
            ValueError: The message is too long.
        """
        prompt = self._conversation.ask(message)
        if prompt.dropped:
            self._dropped += prompt.dropped
            logger.info(
                "the context is full: the oldest %s forgotten", f"{prompt.dropped} turns are" if prompt.dropped > 1 else
                "turn is",
            )  # fmt: skip
        seed = None if self._seed is None else self._seed + self._number
        sampling = replace(self._sampling, seed=seed, stop_ids=(*self._sampling.stop_ids, *self._conversation.stop_ids))
        request = self._engine.submit(
            prompt.ids, sampling, candidates=self._candidates, logprobs=bool(self._candidates), streamed=True
        )
        step = 0
        with self._console.stoppable() as asked:
            for event in self._engine.events(request):
                if not self._candidates:
                    print(visible(event.text), end="", flush=True)
                elif event.token_id is not None:
                    step += 1
                    print(candidate_line(step, self._engine.tokenizer.token_bytes(event.token_id), event), flush=True)
                if asked and not request.done:
                    self._engine.cancel(request)
        completion = request.result()
        print(visible(completion.text) if self._candidates else "", flush=True)
        self._remember(message, completion)

    def _remember(self, message: str, completion: Completion) -> None:
        self._completions.append(completion)
        self._number += 1
        if completion.finish_reason == "error":
            logger.warning("this answer broke off and is not remembered: %s", completion.error)
        elif completion.finish_reason == "cancelled" and not completion.token_ids:
            logger.info("stopped before it began; the message is not remembered")
        else:
            self._conversation.add(message, completion)
            ends = {
                "cancelled": "stopped; what was said so far is remembered",
                "length": f"cut off at sampling.max_new_tokens={self._sampling.max_new_tokens}",
                "context": f"cut off: the context of {self._engine.max_length} tokens is full",
            }
            if completion.finish_reason in ends:
                logger.info("(%s)", ends[completion.finish_reason])

    # Commands

    def _begin(self, system: str | None) -> Conversation:
        from llmtrain.serve.conversation import Conversation

        if system is not None and not roles_trained(self._loaded, "system"):
            logger.warning("%s was never trained on a system message, so expect no effect", self._loaded.folder)
        return Conversation(self._engine.tokenizer, max_length=self._engine.max_length, system=system, room=self._room)

    def _reset(self, argument: str) -> str:
        self._conversation = self._begin(self._conversation.system)
        self._number = 0
        return "(a new conversation)"

    def _system(self, argument: str) -> str:
        self._conversation = self._begin(argument or None)
        self._number = 0
        return f"(a new conversation, {'with that' if argument else 'without a'} system message)"

    def _save(self, argument: str) -> str:
        return save_transcript(argument, self._conversation.messages())

    def _reseed(self, argument: str) -> str:
        if argument == "off":
            self._seed = None
            return "(a fresh seed for every answer)"
        if argument:
            if not argument.isdecimal() or int(argument) >= 2**62:
                raise ValueError(f"/seed {argument}: give a whole number from 0 to 2^62 − 1, or off")
            self._seed = int(argument)
            return f"(answer i of a conversation has the seed {self._seed} + i, counted from 0)"
        if not self._completions:
            return "(no answer yet)"
        return f"(the last answer had the seed {self._completions[-1].seed})"

    def _show(self, argument: str) -> str:
        most = self._engine.tokenizer.vocab_size
        if argument and (not argument.isdecimal() or int(argument) > most):
            raise ValueError(f"/candidates {argument}: give a whole number from 0 to {most}")
        self._candidates = int(argument) if argument else 0 if self._candidates else _CANDIDATES
        return f"({self._candidates or 'no'} candidates for every token)"

    def _help(self, argument: str) -> str:
        shown = {f"{name} {hint}".strip(): text for name, (hint, text, _) in self._commands.items()}
        return "\n".join(f"  {left:<20} {right}" for left, right in shown.items())

    def _results(self) -> dict[str, Any]:
        stats = self._engine.stats
        return {
            "command": "chat",
            "model": str(self._loaded.adapter_folder or self._loaded.folder),
            "turns": len(self._completions),
            "stopped": sum(each.finish_reason == "stop" for each in self._completions),
            "tokens": sum(len(each.token_ids) for each in self._completions),
            "seeds": [each.seed for each in self._completions],
            "prompt_tokens": sum(each.num_prompt_tokens for each in self._completions),
            "cached_tokens": sum(each.num_cached_tokens for each in self._completions),
            "dropped_turns": self._dropped,
            "ttft_seconds": stats.ttft_seconds,
            "decode_tokens_per_second": stats.decode_tokens_per_second,
        }
