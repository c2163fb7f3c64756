"""`llmtrain inspect "床前明月光，疑是"`: one answer and all that happened on the way, as inspect.json and a page.

Loads the model, records one request and writes what the inspector says of it; computes and draws nothing itself.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.launch.generate import read_prompts, warn_of_untrained_roles
from llmtrain.launch.inference import load_model, make_engine, sampling_params
from llmtrain.launch.terminal import visible

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from llmtrain.checkpoint import LoadedModel

logger = logging.getLogger(__name__)

JSON_FILE, PAGE_FILE = "inspect.json", "inspect.html"


def run(settings: DictConfig, run_dir: Path) -> dict[str, Any]:
    """Answers the prompt, and writes the document and its page.

    Returns:
        `prompt`, `text`, `token_ids`, `finish` and `seed` of the answer; `json` and `page`, the files; the largest
        errors (`checks`).

    Raises:
        ValueError: A setting is wrong, or the prompt cannot be continued.
    """
    sampling = sampling_params(settings.sampling)
    (prompt,) = read_prompts(settings.prompt, None)
    loaded = load_model(settings)
    engine = make_engine(loaded, max_rows=1, max_length=settings.max_length)
    ids: str | list[int] = prompt
    if settings.chat:
        from llmtrain.tokenizer import render_chat

        warn_of_untrained_roles(loaded)
        ids, _ = render_chat([{"role": "user", "content": prompt}], loaded.tokenizer, add_generation_prompt=True)
    from llmtrain.inspector import as_text, document, record
    from llmtrain.inspector.page import render

    recording = record(engine, ids, sampling)
    found = document(engine, recording, facts=model_facts(loaded), measure=settings.measure)
    if settings.as_text:
        print(visible(as_text(found)), flush=True)
    files = {"json": run_dir / JSON_FILE, "page": run_dir / PAGE_FILE}
    files["json"].write_text(json.dumps(found, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    files["page"].write_text(render(found), encoding="utf-8")
    logger.info("open %s in a browser", files["page"])
    return {
        "command": "inspect",
        "model": str(loaded.adapter_folder or loaded.folder),
        "prompt": prompt,
        "text": recording.completion.text,
        "token_ids": recording.completion.token_ids,
        "finish": found["finish"],
        "seed": recording.completion.seed,
        "checks": found["checks"],
        **{key: str(file) for key, file in files.items()},
    }


def model_facts(loaded: LoadedModel) -> dict[str, Any]:
    """What the document says of where the model came from."""
    folder = loaded.adapter_folder or loaded.folder
    adapter = None if loaded.adapter_folder is None else str(loaded.adapter_folder)
    # runs/pretrain/first/model is known as "first"
    name = folder.parent.name if folder.name in ("model", "adapter") else folder.name
    return {"name": name, "folder": str(loaded.folder), "adapter": adapter}
