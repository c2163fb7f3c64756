"""Text to token ids and back, by a byte-level BPE, bytes alone or any given tokenizer.json; and the one chat template.

Knows nothing of corpora, shards, models or settings files; needs only the standard library and `tokenizers`.
"""

from llmtrain.tokenizer.chat import CHAT_TEMPLATE, render_chat
from llmtrain.tokenizer.table import character_spans, display_width, token_table
from llmtrain.tokenizer.tokenizer import SPECIAL_TOKENS, Tokenizer
from llmtrain.tokenizer.train import PATTERN, byte_tokenizer, character_tokenizer, ensure_tokenizer, train_bpe

__all__ = [
    "CHAT_TEMPLATE",
    "PATTERN",
    "SPECIAL_TOKENS",
    "Tokenizer",
    "byte_tokenizer",
    "character_spans",
    "character_tokenizer",
    "display_width",
    "ensure_tokenizer",
    "render_chat",
    "token_table",
    "train_bpe",
]
