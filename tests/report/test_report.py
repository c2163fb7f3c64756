"""The run report from hand-made folders: what it shows, what it says is missing, and that nothing in it runs."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
import shutil
import struct
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from llmtrain.report import read_run, sections, write_report
from llmtrain.report.charts import Line, chart, thin
from llmtrain.report.page import page
from llmtrain.report.words import WORDS

HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'> $\\frac{1}$ ]]> &lt;b&gt; \u202eabc"
)
HEAD = "step,train/loss,train/lr,train/grad_norm,train/tokens_per_second,train/memory_bytes"
HEAD += ",tokens,seconds,val/loss,val/bpb"


def weights(file: Path, **shapes: list[int]) -> None:
    """A safetensors file: a header, and no more bytes than it says."""
    place, header = 0, {}
    for name, shape in shapes.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [place, place + 4 * math.prod(shape)]}
        place += 4 * math.prod(shape)
    text = json.dumps(header).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(place))


def pretrained(folder: Path, *, lr: float = 0.003, steps: int = 20, text: str = "hello") -> Path:
    folder.mkdir(parents=True)
    config = f"data:\n  kind: sanguo\noptim:\n  lr: {lr}\npaths:\n  runs_dir: runs\nname: {folder.name}\nseed: 0\n"
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    rows = [HEAD]
    for step in range(1, steps + 1):
        held_out = f"{8 - step / 10},{2.5 - step / 100}" if step % 5 == 0 else ","
        rows.append(f"{step},{8 - step / 5},{lr},{1 + step % 3},1000,{2**28},{step * 1024},{step * 2.5},{held_out}")
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    grown = "".join(f"## step {step}\n\n**{text}** one {step}\n\n**second** two\n\n" for step in (5, 10))
    (folder / "samples.md").write_text(grown, encoding="utf-8")
    results = {"command": "pretrain", "val_loss": 6.0, "val_bpb": 2.3, "tokens": steps * 1024, "train_seconds": 50.0}
    results["samples"] = [{"prompt": text, "text": " the last word"}]
    results["recall"] = {
        "trained_on": {"asked": 1254, "right": 1250, "loss": 0.3},
        "held_out": {"asked": 32, "right": 0, "loss": 9.5},
    }
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    facts = {
        "command": "pretrain", "commands": ["llmtrain pretrain optim.lr=0.003"],
        "differs": {"optim.lr": [0.001, lr]}, "machine": {"processors": 2}, "versions": {"torch": "2.13.0"},
        "sources": [{"name": "sanguo", "share": 0.75, "tokens": 900}, {"name": text, "share": 0.25, "tokens": 300}],
        "tokenizer": {"ids": 4096, "longest": [text, "却说"]}, "chars_per_token": 1.2, "bytes_per_token": 3.6,
    }  # fmt: skip
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    weights(folder / "model" / "model.safetensors", embedding=[64, 8], head=[8, 8])
    return folder


def finetuned(folder: Path, base: Path, *, text: str = "七") -> Path:
    folder.mkdir(parents=True)
    config = f"adapter:\n  kind: lora\ndata:\n  kind: zh_number\nmodel: {base / 'model'}\n"
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    (folder / "metrics.csv").write_text(f"{HEAD}\n1,2.0,0.001,1,500,1000,100,3,,\n", encoding="utf-8")
    results = {
        "command": "finetune", "task": "zh_number", "metric": "exact_match", "base_model": str(base / "model"),
        "scores": {"base": 0.0, "finetuned": 0.5, "chance": 0.1}, "held_out_loss": {"base": 9.5, "finetuned": 0.25},
        "stopped": {"base": 0.0, "finetuned": 1.0}, "tokens": 12345, "train_seconds": 61, "trainable_parameters": 776,
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    items = [
        {"prompt": text, "reference": "7", "prediction": "7", "points": 1, "possible": 1, "base_prediction": text},
        {"prompt": "八", "reference": "8", "prediction": "9", "points": 0, "possible": 1, "base_prediction": "曹操"},
    ]
    lines = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
    (folder / "answers.jsonl").write_text(lines + '{"prompt": "cut sh', encoding="utf-8")
    weights(folder / "adapter" / "adapter_model.safetensors", a=[97, 8])
    return folder


class Reader(HTMLParser):
    """The tags of a page, what it asks for, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.asked: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data") and not (value or "").startswith("#"):
                self.asked.append(f"{tag} {name}={value}")
            assert not name.startswith("on"), (tag, name)

    def handle_data(self, data):
        self.texts.append(data)


def report(*folders: Path, **arguments) -> Reader:
    return Reader(write_report(folders, **arguments).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Reader:
    return report(pretrained(tmp_path_factory.mktemp("runs") / "first"))


def test_the_page_has_every_part_and_asks_for_nothing(whole):
    for key in ("loss", "bpb", "lr", "grad_norm", "speed", "memory", "samples", "data", "settings", "machine", "again"):
        for word in WORDS[key]:
            assert word in whole.text, word
    assert whole.tags.count("svg") == 8
    assert whole.asked == []
    assert "link" not in whole.tags
    assert "img" not in whole.tags


def test_the_figures_are_those_of_the_run(whole):
    assert "20.5 k" in whole.text  # tokens
    assert "2.300" in whole.text  # bits per byte of the finished model
    assert "75.0%" in whole.text
    assert "1,250 of 共 1,254 0.300" in whole.text  # next lines by heart
    assert "0 of 共 32 9.500" in whole.text
    assert "one 10" in whole.text
    assert "the last word" in whole.text
    assert "llmtrain pretrain optim.lr=0.003" in whole.text
    assert "optim.lr 0.001 0.003" in whole.text
    assert WORDS["finished"][0] in whole.text
    assert WORDS["missing"][0] not in whole.text


def test_several_runs_lie_over_each_other(tmp_path):
    first, second = pretrained(tmp_path / "one"), pretrained(tmp_path / "two", lr=0.5, steps=10)
    page = report(first, second, out=tmp_path / "both.html")
    assert "A one" in page.text
    assert "B two" in page.text
    assert "optim.lr 0.003 0.5" in page.text  # of all settings, the one that differs
    assert page.tags.count("svg") == 8
    assert not (first / "report.html").exists()


def test_a_run_that_was_killed(tmp_path):
    run = pretrained(tmp_path / "killed")
    for name in ("results.json", "facts.json", "samples.md"):
        (run / name).unlink()
    with (run / "metrics.csv").open("a", encoding="utf-8") as file:
        file.write("21,3.14159,0.0")
    page = report(run)
    assert read_run(run).last("step") == 20
    assert WORDS["open"][0] in page.text
    assert "killed results.json, facts.json, samples.md" in page.text
    assert WORDS["rebuilt"][0] in page.text


@pytest.mark.parametrize("damage", ["", "{", "[]", "\0\xff", "a,b\n\n,,,\n"])
def test_damaged_files_are_said_and_stop_nothing(tmp_path, damage):
    run = pretrained(tmp_path / "run")
    for name in ("results.json", "facts.json", "samples.md", "config.yaml", "metrics.csv"):
        (run / name).write_text(damage, encoding="utf-8")
    (run / "model" / "model.safetensors").write_text(damage, encoding="utf-8")
    page = report(run)
    assert "results.json (" in page.text
    assert WORDS["no_figures"][0] in page.text


def test_a_folder_of_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds neither metrics.csv nor config.yaml: give the folder"):
        write_report([tmp_path])
    with pytest.raises(ValueError, match="does not exist"):
        write_report([tmp_path / "nowhere"])


def test_what_users_and_models_write_is_shown_and_not_run(tmp_path):
    run = pretrained(tmp_path / "<img src=x>", text=HOSTILE.replace("*", ""))
    tuned = finetuned(tmp_path / "tuned", run, text=HOSTILE)
    page = report(run, tuned)
    assert page.tags.count("script") == 1  # the page's own
    assert "img" not in page.tags
    assert page.text.count(" ".join(HOSTILE.split())) >= 5


def test_base_against_fine_tuned_and_the_table_of_both(tmp_path):
    run = pretrained(tmp_path / "base-run")
    page = report(finetuned(tmp_path / "tuned", run))
    assert "zh number: exact match" in page.text
    assert "七 7 七 7 ✓" in page.text
    assert "八 8 曹操 9 ✗" in page.text
    assert f"{WORDS['held_out_loss'][1]} 9.500 0.250" in page.text
    # Both stages, each with what was measured: tokens, trainable parameters, time, memory, the size of its file.
    size = (run / "model" / "model.safetensors").stat().st_size / 1e6
    assert f"base-run sanguo 20,480 576 0:50 268.4 MB {size:.1f} MB" in page.text
    assert "tuned zh_number 12,345 776 1:01 0.0 MB 0.0 MB" in page.text


def test_a_report_replaces_the_former_one_whole(tmp_path, monkeypatch):
    run = pretrained(tmp_path / "run")
    file = write_report([run])
    former = file.read_bytes()
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        write_report([run])
    assert file.read_bytes() == former
    assert [each.name for each in run.glob(".*")] == []


def places(value, path=()):
    """Where something stands in plain JSON: keys and numbers."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


@pytest.mark.parametrize("kind", ["pretrain", "finetune"])
@pytest.mark.parametrize("wrong", [None, "<x>", [], [1], {}, {"a": 1}, 5, math.inf], ids=repr)
def test_files_of_another_shape_leave_a_page_all_the_same(kind, wrong, tmp_path, monkeypatch):
    monkeypatch.setattr(sections, "curves", lambda runs: "")  # slow, and of figures only
    run = pretrained(tmp_path / "base")
    if kind == "finetune":
        run = finetuned(tmp_path / "tuned", run)
    read = read_run(run)
    for name in ("facts", "results"):
        for path in list(places(getattr(read, name)))[1:]:
            changed = copy.deepcopy(getattr(read, name))
            *above, last = path
            inner = changed
            for key in above:
                inner = inner[key]
            inner[last] = wrong
            assert "</html>" in page([dataclasses.replace(read, **{name: changed})]), path


def test_the_held_out_curve_of_each_of_several_runs_has_its_letter(tmp_path):
    runs = [read_run(pretrained(tmp_path / name, lr=lr)) for name, lr in (("one", 0.1), ("two", 0.2))]
    loss = sections.curves(runs).split("</figure>")[0]
    assert [len(re.findall(f">{letter}<", loss)) for letter in "AB"] == [2, 2]  # training, and held out


def test_long_curves_keep_their_spikes():
    points = [(x, 1.0) for x in range(100_000)]
    points[77_777] = (77_777, 9.0)
    points[33_333] = (33_333, -9.0)
    points[5] = (5, float("nan"))
    kept = thin(points, 400)
    assert len(kept) <= 400
    assert {points[77_777], points[33_333], points[0], points[-1]} <= set(kept)
    assert kept == sorted(kept)


def test_a_chart_has_text_as_text_and_colours_of_the_page():
    svg = chart("one", [Line([(0, 1.0), (5000, 2.0)], "A"), Line([(0, 1.0), (5000, 2.01)], "B", 1)], x="tokens")
    assert svg is not None
    assert re.search(r'>tokens</tspan><tspan class="zh">词元数<', svg)
    assert not re.search("#[0-9a-f]{6}", svg.replace("#000000", ""))
    assert "var(--line-0)" in svg
    assert "http" not in re.sub(r'xmlns(:xlink)?="[^"]*"', "", svg)
    heights = [float(height) for height in re.findall(r"translate\([\d.]+ ([\d.]+)\)[^>]*>[AB]<", svg)]
    heights = heights or [float(each) for each in re.findall(r'y="([\d.]+)"[^>]*>[AB]<', svg)]
    assert len(heights) == 2
    assert abs(heights[0] - heights[1]) >= 10  # their lines end at one place, their labels do not lie on each other
    assert chart("none", [Line([(1, float("nan"))])], x="tokens") is None


def test_every_word_is_in_both_languages():
    assert all(english and chinese and english != chinese for english, chinese in WORDS.values())


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Any]:
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install llmtrain[dev]")
    from selenium.webdriver.chrome.service import Service

    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium, chromium-driver)")
    options = selenium.ChromeOptions()
    options.binary_location = program
    flags = ["headless=new", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking"]
    flags += ["disable-component-update", "disable-sync", "disable-dev-shm-usage", "lang=en-US"]
    for flag in [*flags, f"user-data-dir={tmp_path_factory.mktemp('browser')}"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = selenium.Chrome(options=options, service=Service(driver))
    yield started
    started.quit()


@pytest.mark.medium
def test_the_page_in_a_browser(browser, tmp_path):
    """On a phone, in both languages and both themes, with hostile text in it: nothing runs, nothing sticks out."""
    run = pretrained(tmp_path / "run", text=HOSTILE.replace("*", "") + "很" * 400)
    file = write_report([finetuned(tmp_path / "tuned", run, text="w" * 500 + HOSTILE), run])
    browser.get_log("performance")
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    browser.get(file.as_uri())
    script = browser.execute_script
    ground = "return getComputedStyle(document.body).backgroundColor"
    shown = "return document.querySelector('h2').innerText"
    before, english = script(ground), script(shown)
    script("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert script("return document.documentElement.scrollWidth") <= 390
    script("document.getElementById('theme').click(); document.getElementById('language').click()")
    assert script(ground) != before
    assert (english, script(shown)) == WORDS["runs"]
    assert script("return document.documentElement.scrollWidth") <= 390
    assert script("return window.hacked") is None
    words = script("return [...document.querySelectorAll('svg .zh')].map((each) => getComputedStyle(each).display)")
    assert words
    assert "none" not in words
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
    assert {url for url in asked if not url.startswith("chrome")} <= {file.as_uri()}  # the browser's own window
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
