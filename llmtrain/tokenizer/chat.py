"""The one chat template: messages to token ids, and which of them are trained.

    [<|system|> text] (<|user|> text | <|assistant|> text <|end|>)*

In front stands what the tokenizer puts in front of every text (`Tokenizer.begin`); with ours that is nothing. Text
always stands between two special tokens and each piece is encoded as ordinary text, so no message can forge a role.
`chat_template` is the same template in Jinja for other programs: for messages that hold no special-token string they
get the same ids. Knows nothing of data sets, masks in batches, or which roles a task uses.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmtrain.tokenizer.tokenizer import Tokenizer

SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
ROLE_TOKENS = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}

# Written on one line per branch with "-" trimming everywhere, so that the template itself adds no white space.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- if not loop.first -%}{{- raise_exception('the system message must come first') -}}{%- endif -%}
{{- '<|system|>' + message['content'] -}}
{%- elif message['role'] == 'user' -%}
{{- '<|user|>' + message['content'] -}}
{%- elif message['role'] == 'assistant' -%}
{{- '<|assistant|>' + message['content'] + '<|end|>' -}}
{%- else -%}
{{- raise_exception('unknown role ' + message['role'] + ': use system, user or assistant') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def chat_template(*, bos: bool) -> str:
    """The template in Jinja; with `bos` the begin-of-text token stands in front, which other programs do not add."""
    return ("{{- bos_token -}}\n" if bos else "") + CHAT_TEMPLATE


def render_chat(
    messages: Sequence[Mapping[str, str]],
    tokenizer: "Tokenizer",
    *,
    add_generation_prompt: bool = False,
) -> tuple[list[int], list[bool]]:
    """Turns a conversation into token ids and marks those that are trained.

    Args:
        messages: mappings with "role" (system, user or assistant) and "content"; a system message may only come first.
        tokenizer: one that has the role markers.
        add_generation_prompt: ends with `<|assistant|>`, for the model to answer.

    Returns:
        ids, and a mask of the same length that is true exactly on the assistant's text and its `<|end|>`.

    Raises:
        ValueError: a message that is no mapping, an unknown role, a late system message, content that is no text, a
            tokenizer without role markers.
    """
    special = _role_ids(tokenizer)
    ids: list[int] = []
    trained: list[bool] = []

    def add(tokens: list[int], train: bool) -> None:
        ids.extend(tokens)
        trained.extend([train] * len(tokens))

    add(tokenizer.begin([]), False)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {index} is {message!r}: give a mapping with 'role' and 'content'")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in ROLE_TOKENS:
            raise ValueError(f"message {index} has the role {role!r}: use system, user or assistant")
        if not isinstance(content, str):
            raise ValueError(f"message {index} ({role}) has no text in 'content': give it a string")
        if role == "system" and index > 0:
            raise ValueError(f"message {index} is a system message: the system message must come first")
        add([special[ROLE_TOKENS[role]]], False)
        add(tokenizer.encode(content), role == "assistant")
        if role == "assistant":
            add([special[END]], True)
    if add_generation_prompt:
        add([special[ASSISTANT]], False)
    return ids, trained


def _role_ids(tokenizer: "Tokenizer") -> dict[str, int]:
    special = tokenizer.special_ids
    missing = [token for token in (*ROLE_TOKENS.values(), END) if token not in special]
    if missing:
        raise ValueError(
            f"the tokenizer has no {' '.join(missing)}: take one with role markers "
            "(tokenizer=file adds the missing ones to any tokenizer.json)"
        )
    return special
