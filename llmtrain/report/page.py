"""The whole page, from run folders to one HTML file that asks for nothing else.

Knows the order of the sections, and how the file is put in its place: written beside it and renamed, so that whoever
opens it finds a whole one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtrain.report import sections
from llmtrain.report.markup import html, word
from llmtrain.report.runs import REPORT_FILE, Run, read_run

_HERE = Path(__file__).parent
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)

Differs = Callable[[Run], Mapping[str, Any]]


def write_report(
    folders: Sequence[str | Path], out: str | Path | None = None, *, differs: Differs | None = None
) -> Path:
    """Writes the report of some runs.

    Args:
        folders: The run folders, the first one first in every table.
        out: The file; `report.html` in the first folder unless given.
        differs: Of a run that did not write down which settings differ from the defaults: says so now.

    Returns:
        The file.

    Raises:
        ValueError: A folder is that of no training run.
    """
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        if differs is not None and run.config and "differs" not in run.facts:
            run.facts["differs"] = dict(differs(run))
    file = Path(out) if out is not None else Path(folders[0]) / REPORT_FILE
    text = page(runs, bases=[base for run in runs if (base := base_of(run)) is not None])
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8", errors="replace")
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)
    return file


def base_of(run: Run) -> Run | None:
    """The pretraining run that a fine-tuning began from, where its folder still is."""
    model = run.config.get("model") if run.command == "finetune" else None
    if model is None:
        return None
    given = Path(str(run.results.get("base_model") or model))
    for above in (Path(), *list(run.folder.resolve().parents)[2:3]):  # a path is from where the run was started
        path = above / given
        for folder in (path, *list(path.parents)[:3]):
            if (folder / "metrics.csv").is_file():
                return read_run(folder)
    return None


def page(runs: Sequence[Run], *, bases: Sequence[Run] = ()) -> str:
    """The text of the page.

    Args:
        runs: Those that it is about.
        bases: Further ones, for a row in the table of stages.
    """
    known = {run.folder.resolve() for run in runs}
    others = {base.folder.resolve(): base for base in bases if base.folder.resolve() not in known}
    parts = [
        sections.runs_table(runs),
        sections.stages([*others.values(), *runs]),
        sections.curves(runs),
        *(sections.answers(run) for run in runs),
        sections.samples(runs),
        sections.recall(runs),
        sections.data(runs),
        sections.settings(runs),
        sections.machine(runs),
        sections.again(runs),
        sections.missing(runs),
    ]
    name = ", ".join(run.name for run in runs)
    style, script = ((_HERE / file).read_text(encoding="utf-8") for file in ("page.css", "page.js"))
    return "\n".join([
        "<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html(name)} – llmtrain</title>", f"<style>{style}</style>", "</head>", "<body>",
        f'<header><h1>{word("report")} <span class="name">{html(name)}</span></h1>',
        '<nav><button id="language" type="button"><span class="en">中文</span><span class="zh">English</span></button>'
        f'<button id="theme" type="button">{word("theme")}</button></nav></header>',
        "<main>", *(part for part in parts if part), "</main>", f"<script>{script}</script>", "</body>", "</html>", "",
    ])  # fmt: skip
