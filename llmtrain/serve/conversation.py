"""A conversation as the engine sees it: token ids that only grow at the end, until they no longer fit the context.

One rule decides what fits: the system message stays, the oldest turns go, each a question with its answer, and a
message that does not fit without them is refused. An answer stays as the ids that the model gave, since its text
encoded again may give others: so the prompt of a turn begins with the ids of the turn before, and an engine that still
holds those reads only the rest. Knows the chat template and completions; does not know terminals, HTTP, or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llmtrain.generation import Completion
from llmtrain.tokenizer import Tokenizer, render_chat
from llmtrain.tokenizer.chat import END, ROLE_TOKENS


def turn_markers(tokenizer: Tokenizer) -> list[int]:
    """The role markers, which must end an answer: else the model would go on as the user."""
    return sorted(tokenizer.special_ids[marker] for marker in (*ROLE_TOKENS.values(), END))


class Prompt(NamedTuple):
    """What to submit for the next answer.

    Attributes:
        ids: All that is remembered and the new message, up to the marker after which the answer begins.
        dropped: How many of the oldest turns had to go for it, for good.
    """

    ids: list[int]
    dropped: int


@dataclass(frozen=True)
class Turn:
    """A question with its answer; `ids` is the question as rendered, the answer's ids and the end of the turn."""

    question: str
    answer: str
    ids: list[int] = field(repr=False)


class Conversation:
    """A system message and turns.

    Args:
        tokenizer: One with the role markers.
        max_length: The most tokens of prompt and answer together, as the engine has it.
        system: The system message; None begins without one.
        room: How many tokens are kept free for an answer; None keeps a quarter of `max_length`.

    Raises:
        ValueError: The tokenizer has no role markers, `room` leaves none for a prompt, or the system message leaves
            none for anything else.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, max_length: int, system: str | None = None, room: int | None = None
    ) -> None:
        self.system = system
        self.turns: list[Turn] = []
        self._tokenizer = tokenizer
        self._room = max(1, max_length // 4) if room is None else room
        self._limit = max_length - self._room
        if self._room < 1 or self._limit < 1:
            raise ValueError(
                f"a context of {max_length} tokens cannot keep {self._room} for an answer and any for a prompt: "
                "raise max_length"
            )
        opening = [] if system is None else [{"role": "system", "content": system}]
        self._opening, _ = render_chat(opening, tokenizer)
        if len(self._opening) >= self._limit:
            raise ValueError(
                f"the system message has {len(self._opening)} tokens, and of a context of {max_length} the prompt may "
                f"take {self._limit}: shorten it"
            )

    @property
    def stop_ids(self) -> list[int]:
        """What must end an answer."""
        return turn_markers(self._tokenizer)

    def ask(self, message: str) -> Prompt:
        """The prompt for an answer to `message`; drops the oldest turns for good where they do not fit any more.

        Raises:
            ValueError: The message does not fit, even alone with the system message; nothing is dropped then.
        """
        question = self._question(message)
        least = len(self._opening) + len(question)
        if least > self._limit:
            beside = f", {len(self._opening)} more come before it" if self._opening else ""
            raise ValueError(
                f"the message has {len(question)} tokens with its markers{beside}, and the prompt may have "
                f"{self._limit}, {self._room} being kept for the answer: shorten it"
            )
        kept = len(self.turns)
        size = least + sum(len(turn.ids) for turn in self.turns)
        while size > self._limit:
            size -= len(self.turns[-kept].ids)
            kept -= 1
        dropped = len(self.turns) - kept
        del self.turns[:dropped]
        history = [token for turn in self.turns for token in turn.ids]
        return Prompt([*self._opening, *history, *question], dropped)

    def add(self, message: str, completion: Completion) -> None:
        """Remembers a turn, also one whose answer was broken off: it then ends where it was.

        Args:
            message: What `ask` was given.
            completion: What became of its prompt.
        """
        answer = list(completion.token_ids)
        special = frozenset(self._tokenizer.special_ids.values())
        if answer and answer[-1] in special:  # the one that ended it: other than <|end|>, it is no part of a turn
            answer.pop()
        end = self._tokenizer.special_ids[END]
        self.turns.append(Turn(message, completion.text, [*self._question(message), *answer, end]))

    def messages(self) -> list[dict[str, str]]:
        """What is remembered, as messages with "role" and "content"."""
        found = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns:
            found += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
        return found

    def _question(self, message: str) -> Sequence[int]:
        ids, _ = render_chat([{"role": "user", "content": message}], self._tokenizer, add_generation_prompt=True)
        return ids[len(self._tokenizer.begin([])) :]
