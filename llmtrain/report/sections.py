"""The sections of the report, each from runs to HTML. Knows which figures belong together, and no files."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from llmtrain.report.charts import Line, chart
from llmtrain.report.markup import (
    Html,
    compact,
    count,
    duration,
    figure,
    html,
    note,
    section,
    size,
    table,
    word,
)
from llmtrain.report.runs import Run

_CURVES = (
    ("loss", ("train/loss", "val/loss"), False),
    ("bpb", ("val/bpb",), False),
    ("lr", ("train/lr",), False),
    ("grad_norm", ("train/grad_norm",), True),
    ("speed", ("train/tokens_per_second",), False),
    ("memory", ("train/memory_bytes",), False),
    ("mfu", ("train/mfu",), False),
)
_AGAINST_TIME = ("loss", "bpb")
_MOST_ITEMS = 60
_LONGEST_TEXT = 2000


def letter(number: int) -> str:
    """A, B, … and after Z a number."""
    return chr(ord("A") + number) if number < 26 else str(number + 1)


def runs_table(runs: Sequence[Run]) -> Html:
    """The runs, with the letter and the colour that each has in the charts, and where they stand."""
    rows = []
    for number, run in enumerate(runs):
        results = run.results
        state = "open" if not results else "stopped" if results.get("stopped_by") else "finished"
        mark = Html(f'<b class="mark" style="color:var(--line-{number % 7})">{letter(number)}</b> {html(run.name)}')
        rows.append((
            mark, run.command, word(state), count(run.last("step")),
            compact(run.last("tokens")), duration(run.last("seconds")), figure(run.last("train/loss")),
            figure(results.get("val_loss", run.last("val/loss"))), figure(results.get("val_bpb", run.last("val/bpb"))),
        ))  # fmt: skip
    names = ("run", "command", "state", "step", "tokens", "time", "train_loss", "val_loss", "val_bpb")
    return section("runs", table([word(name) for name in names], rows))


def curves(runs: Sequence[Run]) -> Html:
    """All charts that there are figures for."""
    drawn = []
    for key, columns, logarithmic in _CURVES:
        for against in ("tokens", "seconds") if key in _AGAINST_TIME else ("tokens",):
            lines = _lines(runs, columns, against)
            svg = chart(f"{key}-{against}", lines, x=against, logarithmic=logarithmic)
            if svg is not None:
                drawn.append(f"<figure><figcaption>{word(key)}</figcaption>{svg}</figure>")
    if not drawn:
        return section("curves", note("no_figures"))
    return section("curves", note("thinned"), f'<div class="charts">{"".join(drawn)}</div>')


def _lines(runs: Sequence[Run], columns: Sequence[str], against: str) -> list[Line]:
    lines = []
    for number, run in enumerate(runs):
        for column in columns:
            held_out = column.startswith("val/")
            label = letter(number) if len(runs) > 1 else ""
            if len(runs) == 1 and len(columns) > 1:
                label = "@val@" if held_out else "@train@"
            colour = number + (held_out and len(columns) > 1 and len(runs) == 1)
            lines.append(Line(run.column(column, against), label, colour, marked=held_out))
    return lines


def samples(runs: Sequence[Run]) -> Html:
    """What each run said to its fixed prompts, prompt by prompt, step by step."""
    parts = []
    for run in runs:
        grown: dict[str, list[tuple[Any, str]]] = {}
        for step, pairs in run.samples:
            for prompt, text in pairs:
                grown.setdefault(prompt, []).append((step, text))
        for each in _mappings(run.results.get("samples")):
            grown.setdefault(str(each.get("prompt")), []).append((word("at_the_end"), str(each.get("text"))))
        if not grown:
            continue
        if len(runs) > 1:
            parts.append(f"<h3>{html(run.name)}</h3>")
        for number, (prompt, texts) in enumerate(grown.items()):
            rows = "".join(
                f"<dt>{word('step') if isinstance(step, int) else ''} {html(step)}</dt>"
                f'<dd dir="auto"><b>{html(prompt)}</b>{html(text[:_LONGEST_TEXT])}</dd>'
                for step, text in texts
            )
            opened = " open" if number == 0 else ""
            parts.append(f'<details{opened}><summary dir="auto">{html(prompt)}</summary><dl>{rows}</dl></details>')
    return section("samples", note("samples_note"), *parts) if parts else Html("")


def recall(runs: Sequence[Run]) -> Html:
    """What each run that was asked knows by heart, of what it was trained on and of what it never read."""
    rows = []
    for run in runs:
        for key, found in _mapping(run.results.get("recall")).items():
            right, asked = _mapping(found).get("right"), _mapping(found).get("asked")
            which = word(key) if key in ("trained_on", "held_out") else key
            shown = Html(f"{count(right)} {word('of')} {count(asked)}")
            rows.append((run.name, which, shown, figure(_mapping(found).get("loss"))))
    names = ("run", "source", "lines_right", "loss_each")
    return section("recall", note("recall_note"), table([word(name) for name in names], rows)) if rows else Html("")


def answers(run: Run) -> Html:
    """The held-out items of a fine-tuning: scores, and the answers of base and fine-tuned model side by side."""
    results = run.results
    scores = _mapping(results.get("scores"))
    rows = [(word(name) if name in ("base", "finetuned", "chance") else name, figure(score))
            for name, score in scores.items()]  # fmt: skip
    parts: list[str] = []
    if rows:
        title = f"{results.get('task', '')}: {results.get('metric', '')}".replace("_", " ")
        parts.append(table([title, word("score")], rows))
    losses, ended = _mapping(results.get("held_out_loss")), _mapping(results.get("stopped"))
    if losses:
        both = [(word("held_out_loss"), figure(losses.get("base")), figure(losses.get("finetuned"))),
                (word("ended"), figure(ended.get("base"), 2), figure(ended.get("finetuned"), 2))]  # fmt: skip
        parts.append(table(["", word("base"), word("finetuned")], both))
    if run.answers:
        shown = run.answers[:_MOST_ITEMS]
        parts.append(f"<p>{word('items_shown')}: {len(shown)} {word('of')} {len(run.answers)}</p>")
        items = []
        for item in shown:
            right = item.get("points") == item.get("possible")
            mark = Html(
                f'<span aria-hidden="true">{"✓" if right else "✗"}</span> {word("right" if right else "wrong")}'
            )
            texts = [_text(item.get(key)) for key in ("prompt", "reference", "base_prediction", "prediction")]
            items.append((*texts, mark))
        head = [word(name) for name in ("prompt", "wanted", "base", "finetuned", "score")]
        parts.append(table(head, items, kind="texts"))
    return section("answers", *parts) if parts else Html("")


def _text(value: Any) -> Html:
    return Html(f'<bdi class="said">{html(str(value)[:_LONGEST_TEXT])}</bdi>')


# A run's files may be damaged, or of another version: what has not the expected shape is taken for empty.
def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in _list(value) if isinstance(each, Mapping)]


def stages(runs: Sequence[Run]) -> Html:
    """Pretraining against fine-tuning: a row for each run, as measured."""
    if not any(run.command == "finetune" for run in runs):
        return Html("")
    rows = []
    for run in runs:
        weights = run.weights.get("adapter") or run.weights.get("model") or {}
        trainable = run.facts.get("trainable_parameters") or run.results.get("trainable_parameters")
        if trainable is None and run.command == "pretrain":
            trainable = weights.get("parameters")
        seconds = run.results.get("train_seconds", run.last("seconds"))
        rows.append((
            word(run.command) if run.command in ("pretrain", "finetune") else run.command, run.name, _data_of(run),
            count(run.results.get("tokens", run.last("tokens"))), count(trainable), duration(seconds),
            size(run.last("train/memory_bytes")), size(weights.get("bytes")),
        ))  # fmt: skip
    names = ("kind", "run", "data", "tokens_trained", "trainable", "time", "memory", "file_size")
    return section("table", note("table_note"), table([word(name) for name in names], rows))


def _data_of(run: Run) -> str:
    names = [str(each.get("name")) for each in _mappings(run.facts.get("sources"))]
    return str(run.config.get("data.kind") or ", ".join(names) or "?")


def data(runs: Sequence[Run]) -> Html:
    """What was trained on, and what the tokenizer makes of it."""
    parts: list[str] = []
    for run in runs:
        facts = run.facts
        title = f"<h3>{html(run.name)}</h3>" if len(runs) > 1 else ""
        sources = [
            (each.get("name"), _percent(each.get("share")), count(each.get("tokens")), count(each.get("documents")),
             count(each.get("characters")), size(each.get("bytes")))
            for each in _mappings(facts.get("sources"))
        ]  # fmt: skip
        if sources:
            names = ("source", "share", "tokens", "documents", "characters", "bytes")
            parts.append(title + table([word(name) for name in names], sources))
            title = ""
        tokenizer = _mapping(facts.get("tokenizer"))
        pairs = [
            ("held_out", count(facts.get("held_out_tokens"))), ("examples", count(facts.get("examples"))),
            ("vocabulary", count(tokenizer.get("ids"))), ("chars_per_token", figure(facts.get("chars_per_token"))),
            ("bytes_per_token", figure(facts.get("bytes_per_token"))),
        ]  # fmt: skip
        lines: list[tuple[Any, Any]] = [(word(key), value) for key, value in pairs if value is not None]
        longest = _list(tokenizer.get("longest"))
        if longest:
            pieces = " ".join(f'<code class="piece">{html(piece)}</code>' for piece in longest)
            lines.append((word("longest"), Html(f'<span class="pieces">{pieces}</span>')))
        if lines:
            body = "".join(f"<dt>{name}</dt><dd>{html(value)}</dd>" for name, value in lines)
            parts.append(f'{title}<dl class="facts">{body}</dl>')
    return section("data", *parts) if parts else Html("")


def _percent(share: Any) -> str | None:
    return f"{share:.1%}" if isinstance(share, int | float) else None


def settings(runs: Sequence[Run]) -> Html:
    """What differs from the defaults, what differs between the runs, and everything in a fold."""
    parts = []
    if len(runs) > 1:
        keys = list(dict.fromkeys(key for run in runs for key in run.config))
        between = [
            (key, *(_shown(run.config.get(key)) for run in runs))
            for key in keys
            if len({_shown(run.config.get(key)) for run in runs}) > 1
        ]
        letters = [letter(number) for number in range(len(runs))]
        parts.append(f"<h3>{word('between')}</h3>")
        parts.append(table([word("key"), *letters], between) if between else f"<p>{word('nothing')}</p>")
    for run in runs:
        name = f" – {html(run.name)}" if len(runs) > 1 else ""
        parts.append(f"<h3>{word('differs')}{name}</h3>")
        rows = [(key, _shown(value[0]), _shown(value[1])) for key, value in _differs(run).items()]
        head = [word("key"), word("default"), word("here")]
        parts.append(table(head, rows) if rows else f"<p>{word('nothing')}</p>")
        everything = table([word("key"), word("here")], [(key, _shown(value)) for key, value in run.config.items()])
        parts.append(f"<details><summary>{word('all_settings')}</summary>{everything}</details>")
    return section("settings", *parts)


def _differs(run: Run) -> dict[str, list[Any]]:
    return {
        key: pair
        for key, pair in _mapping(run.facts.get("differs")).items()
        if isinstance(pair, list) and len(pair) == 2
    }


def _shown(value: Any) -> str:
    words = {"None": "null", "True": "true", "False": "false"}
    return words.get(str(value), str(value))[:_LONGEST_TEXT]


def machine(runs: Sequence[Run]) -> Html:
    """The machine and the versions that each run wrote down, a column for each."""
    both = [
        {
            str(key): str(value)
            for part in ("machine", "versions")
            for key, value in _mapping(run.facts.get(part)).items()
        }
        for run in runs
    ]
    keys = list(dict.fromkeys(key for each in both for key in each))
    if not keys:
        return Html("")
    names = [run.name if len(runs) == 1 else letter(number) for number, run in enumerate(runs)]
    return section("machine", table(["", *names], [(key, *(each.get(key) for each in both)) for key in keys]))


def again(runs: Sequence[Run]) -> Html:
    """The commands that made the runs."""
    parts: list[str] = []
    for run in runs:
        commands = [str(each) for each in _list(run.facts.get("commands"))]
        if len(runs) > 1:
            parts.append(f"<h3>{html(run.name)}</h3>")
        if not commands:
            parts.append(note("rebuilt"))
            pairs = [f"{key}={_shown(value)}" for key, (_, value) in _differs(run).items()]
            commands = [shlex.join(["llmtrain", run.command, *pairs])]
        parts += [f"<pre>{html(command)}</pre>" for command in commands]
    return section("again", note("again_note"), *parts)


def missing(runs: Sequence[Run]) -> Html:
    """The files that a report would have read."""
    rows = [(run.name, ", ".join(run.missing)) for run in runs if run.missing]
    return section("missing", note("missing_note"), table([word("run"), ""], rows)) if rows else Html("")
