"""The inspector's page in a real browser, opened from disk, over documents of every shape.

One Chromium serves all tests. Most documents are made by the schema (documents.py), one is of a real run.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.generation.params import SamplingParams
from llmtrain.generation.sampling import (
    BatchSampling,
    choose,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    most_likely,
    penalize_repetition,
)
from llmtrain.inspector import page as files
from tests.inspector.documents import VOCAB, made

selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install llmtrain[dev]")

from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

pytestmark = pytest.mark.medium

FLAGS = [
    "headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "disable-dev-shm-usage", "lang=en-US",
]  # fmt: skip
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'></script><!--<script>&lt;\u2028"
PARTS = ["tokens", "embedding", "position", "attention", "cache", "choice", "loop", "layers"]


class Page:
    """The page as a person uses it."""

    def __init__(self, browser: Any, folder: Path):
        self.browser, self.folder = browser, folder

    def open(self, document: dict[str, Any], **preferences: Any) -> Page:
        """Write it, and open it from disk in English and light unless told otherwise."""
        file = self.folder / "inspect.html"
        file.write_text(files.render(document), encoding="utf-8")
        self.browser.get(file.as_uri())
        kept = {"language": "en", "theme": "light"} | preferences
        self.script("localStorage.setItem('llmtrain.inspector', arguments[0])", json.dumps(kept))
        self.browser.get(file.as_uri())
        return self

    def script(self, code: str, *arguments: Any) -> Any:
        return self.browser.execute_script(code, *arguments)

    def one(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        return self.script(
            "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)", selector
        )

    def press(self, selector: str) -> None:
        self.script("document.querySelector(arguments[0]).click()", selector)

    def point(self, selector: str) -> None:
        over = "dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
        self.script(f"document.querySelector(arguments[0]).{over}", selector)

    def keys(self, *keys: str) -> None:
        self.one("body").send_keys(*keys)

    def move(self, name: str, value: float) -> None:
        """Move a slider."""
        self.script(
            "const field = document.getElementById(`slider-${arguments[0]}`); field.value = arguments[1];"
            "field.dispatchEvent(new Event('input'));", name, value,
        )  # fmt: skip

    def until(self, condition: Callable[[], Any]) -> Any:
        return WebDriverWait(self.browser, 20, 0.05).until(lambda _: condition())

    def size(self, width: int, height: int) -> None:
        self.width = width
        self.browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
        )

    def complete(self) -> None:
        """Every part is there, with its heading, its sentence and something in it, and no value that failed."""
        assert self.script("return [...document.querySelectorAll('.part')].map((each) => each.id)") == PARTS
        assert all(self.texts(".part h2"))
        assert all(self.texts(".part .head p"))
        assert all(
            count > 1
            for count in self.script(
                "return [...document.querySelectorAll('.part')].map((each) => each.children.length)"
            )
        )
        text = self.script("return document.body.innerText")
        assert not re.search(r"\b(undefined|NaN|Infinity|null)\b|\{\d\}", text)
        self.narrow_enough()

    def narrow_enough(self) -> None:
        # A phone widens its viewport to what does not fit, so the width is compared with what was asked for.
        assert self.script("return document.documentElement.scrollWidth") <= self.width


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Any]:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium, chromium-driver)")
    options = selenium.ChromeOptions()
    options.binary_location = program
    for flag in [*FLAGS, f"user-data-dir={tmp_path_factory.mktemp('browser')}"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = selenium.Chrome(options=options, service=Service(driver))
    started.set_script_timeout(60)
    yield started
    started.quit()


@pytest.fixture
def page(browser, tmp_path) -> Iterator[Page]:
    """The page; afterwards nothing was asked from anywhere, and the console is empty."""
    made_page = Page(browser, tmp_path)
    made_page.size(1280, 900)
    browser.get_log("browser")
    yield made_page
    asked = made_page.script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert all(each.startswith("data:") for each in asked), asked
    assert browser.get_log("browser") == []


def test_the_page_is_small_and_asks_for_nothing():
    html = files.render(made())
    assert len(files.render({}).encode()) < 150_000
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", html)
    assert "default-src 'none'" in html


def test_what_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.render({"value": float("nan")})


def test_all_parts_are_there_in_both_languages_and_themes(page):
    page.open(made()).complete()
    assert page.script("return document.documentElement.lang") == "en"
    english, paper = page.texts("h2"), page.script("return getComputedStyle(document.body).backgroundColor")
    page.press("#language")
    page.complete()
    assert page.script("return document.documentElement.lang") == "zh-CN"
    assert all(re.search("[\u4e00-\u9fff]", each) for each in page.texts("h2"))
    page.press("#theme")
    assert page.script("return getComputedStyle(document.body).backgroundColor") != paper
    page.press("#language")
    assert page.texts("h2") == english


def test_step_and_play_carry_every_part_along(page):
    document = made()
    page.open(document)
    prompt = len(document["tokens"]) - document["answer_tokens"]
    shown = [
        "#strip .at",
        ".token-detail",
        "#embedding .card",
        "#position h3",
        "#choice .after",
        "#layers h3",
        "#cache .facts",
    ]

    def state() -> list[list[str]]:
        return [page.texts(each) for each in shown]

    before = state()
    written = "return document.querySelectorAll('#strip .token:not(.later)').length"
    assert page.script(written) == prompt
    page.keys(Keys.ARROW_RIGHT)
    assert page.script(written) == prompt + 1
    assert all(old != new for old, new in zip(before, state(), strict=True))
    page.keys(Keys.ARROW_LEFT)
    assert state() == before
    page.press("#on")
    page.press("#back")
    assert state() == before
    page.keys(" ")
    page.until(lambda: page.script(written) == len(document["tokens"]))
    page.until(lambda: page.one("#play").get_attribute("aria-label") == "Play")
    assert "limit of 4 tokens" in page.texts(".ending p")[0]


def test_a_token_is_looked_at_by_pointing_and_by_key(page):
    page.open(made())
    page.press('#tokens .token[data-index="2"]')
    assert page.texts("#strip .at") == ["明"]
    assert page.texts("#attention .reading b") == ["明"]
    page.one('#tokens .token[data-index="2"]').send_keys(Keys.ARROW_LEFT)
    assert page.texts("#strip .at") == ["前"]
    page.point('#attention .token[data-index="3"]')
    assert page.texts("#attention .reading b") == ["月"]
    head = page.texts("#attention h3")
    page.script("document.querySelector('.picker button[aria-pressed=false]').click()")
    assert page.texts("#attention h3") != head


def test_ids_and_pieces_are_found_both_ways(page):
    document = made()
    page.open(document)
    token = document["tokens"][3]
    for asked in (token["text"], str(token["id"])):
        page.script(
            "const field = document.getElementById('lookup'); field.value = arguments[0];"
            "field.dispatchEvent(new Event('input'));", asked,
        )  # fmt: skip
        assert page.texts(".hit")[0] == f"{token['text']}{token['id']}"


def test_sliders_move_the_chances_and_can_be_put_back(page):
    document = made()
    page.open(document)
    shares, drawn = page.texts(".share"), page.texts("#choice tr.drawn code")
    assert drawn == [
        document["vocabulary"]["pieces"][document["steps"][0]["token"]]
    ]  # the page draws what the run drew
    page.move("temperature", 2)
    assert page.texts(".share") != shares
    page.move("top_k", 1)
    assert page.texts("#kept") == [f"1 of {VOCAB} pieces are left"]
    page.move("temperature", 0)
    assert "No random number" in page.texts("#choice .card")[1]
    page.press("#as-run")
    assert page.texts(".share") == shares
    page.one("#slider-temperature").send_keys(Keys.ARROW_RIGHT)
    assert page.texts(".slider output")[0] == "0.81"


def test_what_a_text_says_is_shown_and_not_run(page):
    page.open(made([HOSTILE, "{{script}}", "\n", "\u202eאב", "👩‍🚀", " "], prompt=HOSTILE))
    page.complete()
    assert page.script("return window.hacked") is None
    assert HOSTILE.replace("\u2028", "U+2028") in page.texts("#tokens .token")
    assert HOSTILE in page.texts(".hero .line")[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"pieces": ["床"]},
        {"pieces": ["床"], "answer": ["前"]},
        {"pieces": ["a"], "answer": []},
        {"pieces": [f"w{index} " for index in range(200)] * 5, "window": 160},
        {"layers": 1, "heads": 1, "kv_heads": 1},
        {"layers": 3, "heads": 16, "kv_heads": 16},
        {"position": "sinusoidal"},
        {"sampling": {"temperature": 0.0, "greedy": True}},
        {"top": 40},
    ],
    ids=["one", "one-one", "no-answer", "thousand", "one-head", "many-heads", "sinusoidal", "greedy", "top-scores"],
)
def test_pathological_runs_give_a_right_page(page, settings):
    page.open(made(**settings)).complete()
    page.script("const end = document.querySelectorAll('#player .extra')[1]; if (!end.disabled) end.click()")
    page.complete()
    page.size(390, 844)
    page.narrow_enough()


def test_a_phone_needs_no_scrolling_sideways(page):
    page.size(390, 844)
    for language in ("en", "zh"):
        page.open(made(["una", "believ", "ably" * 12, "x" * 60, "床前明月光"]), language=language).complete()


def cases() -> list[dict[str, Any]]:
    """Rows of scores with settings: small ones with many ties, and rows of a real vocabulary's size."""
    generator = torch.Generator().manual_seed(7)

    def one(size: int, tied: bool) -> dict[str, Any]:
        def pick(*values: Any) -> Any:
            return values[int(torch.randint(len(values), (1,), generator=generator))]

        def number() -> float:
            return float(torch.rand(1, generator=generator))

        logits = torch.randn(size, generator=generator) * pick(0.5, 3, 8)
        if tied:
            logits = (logits * 2).round() / 2
        if size > 4:
            logits[torch.randint(size, (2,), generator=generator)] = -torch.inf  # ids that are never chosen
        settings = {
            "temperature": pick(0.0, 1e-9, 0.3, 1.0, 0.05 + 1.9 * number()),
            "top_k": pick(0, 1, 5, size // 2, size + 9),
            "top_p": pick(1.0, 0.9, max(0.01, number())), "min_p": pick(0.0, 0.1, number()),
            "repetition_penalty": pick(1.0, 1.3, 0.7),
        }  # fmt: skip
        seen = torch.randint(size, (3,), generator=generator).tolist()
        return {"logits": logits, "settings": settings, "uniform": number(), "seen": sorted(set(seen))}

    return [one(2 + index % 63, index % 2 == 0) for index in range(600)] + [
        one(4096, index % 2 == 0) for index in range(16)
    ]


def test_the_arithmetic_of_the_page_is_the_engines(browser):
    given = cases()
    source = (files.FOLDER / "sampling.js").read_text(encoding="utf-8")
    found = browser.execute_script(
        source + "return arguments[0].map(({logits, settings, uniform, seen}) => {"
        "const row = Float32Array.from(logits, (each) => each ?? -Infinity);"
        "const {shares, id, greedyId} = sampling.choose(row, settings, uniform, seen);"
        "return {shares: [...shares], id, greedyId}; });",
        [
            {**each, "logits": [None if value == -torch.inf else value for value in each["logits"].tolist()]}
            for each in given
        ],
    )
    filtered = 0
    for case, result in zip(given, found, strict=True):
        logits, settings = case["logits"][None], case["settings"]
        seen = torch.zeros_like(logits, dtype=torch.bool)
        seen[0, case["seen"]] = True
        batch = BatchSampling.of([SamplingParams(**settings)])
        penalized = penalize_repetition(logits, seen, settings["repetition_penalty"])
        left = keep_top_k(penalized / batch.temperature, settings["top_k"])
        left = keep_min_p(keep_top_p(left, settings["top_p"]), settings["min_p"])
        greedy = int(most_likely(penalized)[0])
        shares = left.softmax(-1)[0]
        if settings["temperature"] == 0:
            shares = torch.nn.functional.one_hot(torch.tensor(greedy), len(shares)).float()
        chances = torch.tensor(result["shares"], dtype=torch.float32)
        assert chances.gt(0).equal(shares.gt(0)), settings
        torch.testing.assert_close(chances, shares, atol=1e-6, rtol=0)
        assert result["id"] == int(choose(logits, batch, torch.tensor([case["uniform"]]), seen)[0]), settings
        assert result["greedyId"] == greedy
        filtered += int((shares > 0).sum()) < len(shares) - 2
    assert filtered > len(given) / 2  # most settings leave something out


def test_a_recording_of_a_real_run_is_shown(page, tiny_config, byte_tok):
    inspector = pytest.importorskip("llmtrain.inspector.document")
    recording = pytest.importorskip("llmtrain.inspector.recording")
    from llmtrain.generation import Engine
    from llmtrain.model import build_model

    engine = Engine(build_model(tiny_config(), seed=0).eval(), byte_tok, max_rows=1, max_length=128)
    done = recording.record(engine, "<b>é</b>", SamplingParams(max_new_tokens=5, seed=1))
    document = inspector.document(engine, done, measure=False)
    page.open(document).complete()
    for step in document["steps"]:
        assert page.script("return document.querySelector('#choice tr.drawn').dataset.id") == str(step["token"])
        page.press("#on")
