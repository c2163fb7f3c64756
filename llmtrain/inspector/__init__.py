"""What happens between a prompt and its answer, with the numbers of that very run: recorded, and told as one document.

`record` answers a prompt through the engine with an observer on it, `document` says everything about the answer as
plain values for JSON (docs/inspect.md has the schema), `as_text` the essentials for a terminal. Knows engines, models
and tokenizers; not files or settings.
"""

from llmtrain.inspector.arrays import packed, unpacked
from llmtrain.inspector.document import SCHEMA, document
from llmtrain.inspector.recording import Recorder, Recording, record, recording_of
from llmtrain.inspector.text import as_text

__all__ = ["SCHEMA", "Recorder", "Recording", "as_text", "document", "packed", "record", "recording_of", "unpacked"]
