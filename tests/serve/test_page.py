"""The chat page in a real browser, against a real server over a tiny model.

One Chromium serves all tests, and each begins with an empty store. What a tiny random model writes is mostly bytes that
are no text, which is what the page finds hardest; where a test needs a text of its own, it puts a stream of events in
the place of the browser's `fetch`.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llmtrain.serve import page as files
from llmtrain.serve.inside import Inside

selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install llmtrain[dev]")

from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

FLAGS = [
    "headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "disable-dev-shm-usage", "lang=en-US",
]  # fmt: skip
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>&lt;b&gt;"

# Every body that the page sends is kept in window.sent; the request itself goes its way.
RECORD = """
    window.sent = [];
    const real = window.fetch;
    window.fetch = (path, options) => {
      if (options?.body) window.sent.push({path, body: JSON.parse(options.body)});
      return real(path, options);
    };
"""
# Whatever the page asks for, it gets these events; with `open`, the stream never ends by itself.
FORCE = """
    const [events, open] = arguments;
    window.fetch = async (path, {signal}) => new Response(new ReadableStream({
      start(controller) {
        signal?.addEventListener("abort", () => controller.error(new DOMException("left", "AbortError")));
        for (const each of events) controller.enqueue(new TextEncoder().encode(`data: ${each}\\n\\n`));
        if (!open) controller.close();
      },
    }));
"""


class Page:
    """The page as a person uses it."""

    def __init__(self, browser: Any, url: str):
        self.browser, self.url = browser, url

    def open(self, **preferences: Any) -> Page:
        """Load it as new, in English unless told otherwise."""
        self.browser.get(f"{self.url}/style.css")  # of the same origin, but without the page's script
        self.script("localStorage.clear(); sessionStorage.clear();")
        if preferences:
            self.script("localStorage.setItem('llmtrain', arguments[0])", json.dumps(preferences))
        return self.reload()

    def reload(self) -> Page:
        self.browser.get(f"{self.url}/")
        self.until(lambda: self.all("#model option") or self.one("#key-field").is_displayed())
        self.script(RECORD)
        return self

    def script(self, code: str, *arguments: Any) -> Any:
        return self.browser.execute_script(code, *arguments)

    def one(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """The exact text of elements, white space included."""
        return self.script(
            "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)", selector
        )

    def click(self, selector: str) -> None:
        self.one(selector).click()

    def until(self, condition: Callable[[], Any]) -> Any:
        return WebDriverWait(self.browser, 30, 0.02).until(lambda _: condition())

    def send(self, text: str) -> None:
        field = self.one("#message")
        field.send_keys(text, Keys.ENTER)

    def ask(self, text: str) -> None:
        """Send a message and wait for the end of its answer."""
        self.send(text)
        self.finish()

    def finish(self) -> None:
        self.until(lambda: self.all(".exchange") and not self.all(".busy"))

    def answer(self) -> str:
        """The text of the last answer, without the signs of tokens that have none."""
        return self.script(
            "return [...[...document.querySelectorAll('.answer')].at(-1).childNodes]"
            ".filter((node) => !node.classList?.contains('mark') && !node.classList?.contains('given'))"
            ".map((node) => node.textContent).join('')"
        )

    def sent(self) -> Any:
        """The body of the last request."""
        return self.script("return window.sent.at(-1).body")

    def set(self, name: str, value: Any) -> None:
        """Move a slider, or fill a field of the settings."""
        self.script(
            "const field = document.getElementById(arguments[0]); field.value = arguments[1];"
            "field.dispatchEvent(new Event('input', {bubbles: true}));",
            name,
            value,
        )

    def force(self, *events: Any, open: bool = False) -> None:
        """Let the next answers be these documents."""
        texts = [each if isinstance(each, str) else json.dumps(each) for each in events]
        self.script(FORCE, texts if open else [*texts, "[DONE]"], open)

    def size(self, width: int, height: int, *, mobile: bool = False) -> None:
        self.browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile},
        )


def piece(data: str | bytes, text: str | None = None, *, p: float = 0.5, others: dict[str, float] | None = None) -> Any:
    """One chunk of a chat: a token, the text that came with it, and what else was likely."""
    data = data.encode() if isinstance(data, str) else data
    token = {"token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": math.log(p)}
    likely = [token] + [
        {"token": name, "bytes": list(name.encode()), "logprob": math.log(share)}
        for name, share in (others or {}).items()
    ]
    text = data.decode() if text is None else text
    choice = {"index": 0, "delta": {"content": text}, "logprobs": {"content": [{**token, "top_logprobs": likely}]}}
    return {"choices": [choice]}


def end(reason: str = "stop") -> Any:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


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
    started.set_script_timeout(30)
    yield started
    started.quit()


@pytest.fixture(scope="module")
def served(start) -> Any:
    """A server whose steps take their time, so that there is something to see and to stop."""
    made = start(max_rows=2)
    step = made.engine.step

    def slowly() -> bool:
        time.sleep(0.01)
        return step()

    made.engine.step = slowly
    return made


@pytest.fixture(scope="module")
def long(served) -> int:
    """A seed whose answer to "Hello" does not end by itself within a hundred tokens."""
    for seed in range(100):
        body = {"messages": [{"role": "user", "content": "Hello"}], "seed": seed, "temperature": 0.8, "max_tokens": 100}
        if served.post("/v1/chat/completions", **body).json()["choices"][0]["finish_reason"] == "length":
            return seed
    raise AssertionError("every answer ends early")


@pytest.fixture
def page(browser, served) -> Iterator[Page]:
    """The page, new; afterwards nothing was asked from anywhere else, and the console is clean."""
    yield from checked(Page(browser, served.url))


def checked(page: Page) -> Iterator[Page]:
    page.size(1200, 800)
    page.browser.get_log("browser")
    page.open()
    yield page
    asked = page.script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert all(each.startswith((page.url, "data:")) for each in asked), asked
    # A refused request is the network's to report, and no fault of the page.
    faults = [
        each for each in page.browser.get_log("browser") if each["level"] == "SEVERE" and each["source"] != "network"
    ]
    assert not faults


@pytest.mark.medium
def test_an_answer_streams_and_tells_its_figures(page, served, long):
    page.set("seed", long)
    page.set("max_tokens", 100)
    page.script(
        "window.told = []; new MutationObserver(() => told.push(document.getElementById('status').textContent))"
        ".observe(document.getElementById('status'), {childList: true});"
    )
    page.send("Hello")
    page.until(lambda: len(page.all(".token")) > 3)
    assert page.all(".busy")
    assert len(page.all(".token")) < 80  # it came piece by piece
    page.finish()

    body = {"messages": [{"role": "user", "content": "Hello"}], "seed": long, "temperature": 0.8, "max_tokens": 100}
    direct = served.post("/v1/chat/completions", **body).json()
    assert page.answer() == direct["choices"][0]["message"]["content"]
    assert sum(page.script("return [...document.querySelectorAll('.token')].map((each) => each.tokens.length)")) == 100
    figures = page.texts(".figures span")
    assert re.fullmatch(r"first token \d+ ms", figures[0])
    assert re.fullmatch(r"[\d.]+ tokens/s", figures[1])
    assert 10 < float(figures[1].split()[0]) < 101  # a step takes at least 10 ms
    assert figures[2:] == ["100 tokens", "prompt 7", f"seed {long}", "cut off at its limit"]
    # A screen reader hears that it began, and the answer once.
    assert page.script("return told") == ["The model is writing.", page.answer()]


@pytest.mark.medium
@pytest.mark.parametrize("way", ["escape", "button"])
def test_stopping_keeps_what_came_and_frees_the_row(page, served, long, way):
    page.set("seed", long)
    before = served.runner.metrics.requests["chat", "cancelled"]
    page.set("max_tokens", 200)
    page.send("Hello")
    page.until(lambda: len(page.all(".token")) > 2)
    assert page.one("#send").get_attribute("aria-label") == "Stop"
    if way == "escape":
        page.one("#message").send_keys(Keys.ESCAPE)
    else:
        page.click("#send")
    page.finish()
    assert 2 < len(page.all(".token")) < 190
    assert page.texts(".figures span")[-1] == "stopped by you"
    assert not page.all(".error")
    page.until(lambda: served.runner.metrics.requests["chat", "cancelled"] == before + 1)
    assert page.one("#send").get_attribute("aria-label") == "Send"


@pytest.mark.medium
def test_pointing_at_a_token_shows_what_it_beat(page):
    page.force(
        piece("The", p=0.25, others={" A": 0.5, "\n": 0.05}), piece(" end", p=0.0001, others={".": 0.9}),
        piece("<|end|>", "", p=1.0), end(),
    )  # fmt: skip
    page.ask("?")
    assert page.answer() == "The end"
    assert page.texts(".mark") == ["<|end|>"]
    first, second, mark = page.all(".token")
    popup = page.one("#considered")
    assert not popup.is_displayed()

    def rows() -> list[str]:
        return [" ".join(each.text.split()) for each in page.all("#considered li")]

    ActionChains(page.browser).move_to_element(first).perform()
    page.until(popup.is_displayed)
    assert rows() == ["␣A 50.0 %", "✓ The 25.0 %", "↵ 5.0 %"]
    widths = page.script("return [...document.querySelectorAll('#considered i')].map((bar) => bar.style.width)")
    assert widths == ["50%", "25%", "5%"]
    box = page.script("return document.getElementById('considered').getBoundingClientRect().toJSON()")
    assert box["left"] >= 0
    assert box["top"] >= 0
    ActionChains(page.browser).move_to_element(page.one("h1")).perform()
    page.until(lambda: not popup.is_displayed())

    # With the keyboard an answer is one stop of Tab, and the arrows walk along it.
    assert page.script("return [...document.querySelectorAll('.token')].map((each) => each.tabIndex)") == [0, -1, -1]
    page.script("arguments[0].focus()", first)
    assert rows()[1] == "✓ The 25.0 %"
    ActionChains(page.browser).send_keys(Keys.ARROW_RIGHT).perform()
    assert rows() == [". 90.0 %", "✓ ␣end < 0.1 %"]
    assert second.get_attribute("aria-describedby") == "considered"
    ActionChains(page.browser).send_keys(Keys.END).perform()
    assert rows() == ["✓ <|end|> 100.0 %"]
    ActionChains(page.browser).send_keys(Keys.ESCAPE).perform()
    assert not popup.is_displayed()

    second.click()  # as a finger does
    assert popup.is_displayed()
    page.click("#message")
    assert not popup.is_displayed()
    assert mark.is_displayed()


@pytest.mark.medium
def test_the_tokens_of_one_character_are_one_piece(page):
    last = end("length")
    last["choices"][0]["delta"] = {"content": "\ufffd"}
    page.force(
        piece(b"\xe9", ""), piece(b"\xa5", "", others={" a": 0.2}), piece(b"\x95", "饕"), piece("a"),
        piece(b"\xff", "\ufffd"), piece(b"\xe4", ""), piece(b"\xf0\x9f", "\ufffd"), piece(b"\x8c\x8d!", "🌍!"),
        piece("<|user|>", ""), piece("é"), piece(b"\xe4", ""), last,
    )  # fmt: skip
    page.ask("?")
    assert page.answer() == "饕a\ufffd\ufffd🌍!é\ufffd"
    assert page.texts(".token") == ["饕", "a", "\ufffd", "\ufffd", "🌍!", "<|user|>", "é", "\ufffd"]
    page.all(".token")[0].click()
    assert page.texts("#considered h3 span:first-child") == ["E9", "A5", "95"]
    assert page.one("#considered p").text == "One character, written in 3 tokens:"


@pytest.mark.medium
def test_text_that_the_server_holds_back_waits_with_its_tokens(page):
    page.force(piece("a", ""), piece("a", ""), piece("a", "aa"), piece("b", ""), end())  # "ab" ends the text
    page.ask("?")
    assert page.answer() == "aa"
    assert page.texts(".token:not(.mark)") == ["a", "a"]
    assert page.texts(".mark") == ["a", "b"]


@pytest.mark.medium
@pytest.mark.parametrize("mode", ["chat", "continue"])
def test_the_settings_arrive_in_the_request(page, mode):
    page.click(f"input[value={mode}]")
    page.click("#open-settings")
    values = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.2, "max_tokens": 7}
    for name, value in values.items():
        page.set(name, value)
    page.set("seed", "12x3")
    page.set("candidates", 3)
    shown = dict(zip(page.texts(".field .row label"), page.texts(".field output"), strict=True))
    assert {name: float(text) for name, text in shown.items()} == values | {"candidates": 3}
    assert all(len(text) > 15 for text in page.texts("#sliders p"))
    page.ask("Hello")
    sent = page.sent()
    assert {name: sent[name] for name in values} == values
    assert (sent["seed"], sent["stream"], sent["stream_options"], sent["model"]) == (
        123,
        True,
        {"include_usage": True},
        "tiny",
    )
    assert (sent["logprobs"], sent.get("top_logprobs")) == ((True, 3) if mode == "chat" else (3, None))
    assert not page.all(".error")

    page.reload()  # they are remembered
    page.ask("Hello")
    assert {name: page.sent()[name] for name in values} == values
    page.click("#open-settings")
    page.click("#defaults")
    page.ask("Hello")
    assert page.sent()["temperature"] == 0.8
    assert "seed" not in page.sent()


@pytest.mark.medium
def test_the_newest_line_stays_in_sight_unless_the_reader_scrolls_up(page):
    # `more(text)` sends one more piece of an answer that does not end.
    page.script(
        "window.fetch = async () => new Response(new ReadableStream({start(controller) {"
        "window.more = (text) => controller.enqueue(new TextEncoder().encode("
        "`data: ${JSON.stringify({choices: [{delta: {content: text}}]})}\\n\\n`)); }}));"
    )
    left = "const it = document.getElementById('transcript'); return it.scrollHeight - it.scrollTop - it.clientHeight"
    page.send("?")
    page.until(lambda: page.all(".busy"))
    for count in (100, 200):
        page.script("more(arguments[0])", "line\n" * 100)
        page.until(lambda: page.answer().count("line") == count)  # noqa: B023
        page.until(lambda: page.script(left) < 2)
    page.script("document.getElementById('transcript').scrollTop -= 500")
    time.sleep(0.1)
    page.script("more('end')")
    page.until(lambda: page.answer().endswith("end"))
    time.sleep(0.1)
    assert 400 < page.script(left) < 600
    page.script("document.getElementById('transcript').scrollTop = 1e6")
    time.sleep(0.1)
    page.script("more(arguments[0])", "\nline" * 100)
    page.until(lambda: page.script(left) < 2 and page.answer().endswith("line"))


@pytest.mark.medium
def test_a_model_or_an_adapter_is_chosen_and_remembered(page):
    listed = {"data": [{"id": "base", "parent": None, "max_model_len": 64}, {"id": "numbers", "parent": "base"}]}
    page.script(
        "const real = window.fetch; window.fetch = (path, options) => path === 'v1/models'"
        " ? Promise.resolve(new Response(arguments[0])) : real(path, options); ",
        json.dumps(listed),
    )
    page.click("#language")
    page.until(lambda: page.texts("#model option") == ["base", "numbers (适配器)"])
    page.click("#model option:nth-child(2)")
    page.ask("Hello")
    assert page.sent()["model"] == "numbers"
    assert page.sent()["max_tokens"] == 64  # no more than the context holds
    assert page.texts(".error") == ["There is no model 'numbers'; GET /v1/models lists them."]
    page.click("#language")
    page.until(lambda: page.texts("#model option") == ["base", "numbers (adapter)"])
    assert page.one("#model").get_property("value") == "numbers"


@pytest.mark.medium
def test_a_conversation_goes_on_and_can_be_mended(page):
    page.set("system", "Be brief.")
    page.set("max_tokens", 5)
    page.ask("one")
    first = page.answer()
    page.one("#message").send_keys("two", Keys.SHIFT, Keys.ENTER, Keys.NULL, "lines")
    page.script(
        "document.getElementById('message').dispatchEvent("
        "new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true}))"
    )
    assert len(page.all(".exchange")) == 1  # Enter of an input method takes a suggestion
    page.ask("")
    messages = [("system", "Be brief."), ("user", "one"), ("assistant", first), ("user", "two\nlines")]
    assert [(each["role"], each["content"]) for each in page.sent()["messages"]] == messages
    assert [len(each.find_elements(By.CSS_SELECTOR, ".actions button")) for each in page.all(".exchange")] == [0, 2]

    page.click(".actions button:nth-child(2)")  # retry
    page.finish()
    assert [each["content"] for each in page.sent()["messages"]] == [content for _, content in messages]
    assert len(page.all(".exchange")) == 2
    page.click(".actions button:nth-child(1)")  # edit
    assert len(page.all(".exchange")) == 1
    assert page.one("#message").get_property("value") == "two\nlines"
    page.ask("!")
    assert page.sent()["messages"][-1]["content"] == "two\nlines!"

    page.click("#new")
    assert not page.all(".exchange")
    assert page.one("#welcome").is_displayed()
    page.ask("three")
    assert [each["content"] for each in page.sent()["messages"]] == ["Be brief.", "three"]


@pytest.mark.medium
def test_a_text_is_continued_and_goes_on(page, served):
    page.click("input[value=continue]")
    assert page.one("#message").get_attribute("placeholder") == "Begin a text"
    page.set("max_tokens", 30)
    page.set("seed", 3)
    page.ask("Once ")
    assert page.sent()["prompt"] == "Once "
    direct = served.post("/v1/completions", prompt="Once ", seed=3, max_tokens=30, temperature=0.8).json()
    assert page.answer() == direct["choices"][0]["text"]
    made = direct["usage"]["completion_tokens"]
    assert page.texts(".given") == ["Once "]
    # Completions have no field for bytes; half a character is told from a real U+FFFD all the same.
    assert sum(page.script("return [...document.querySelectorAll('.token')].map((each) => each.tokens.length)")) == made
    marks = set(page.texts(".mark"))
    assert all(re.fullmatch(r"<.*>|∅", each) for each in marks), marks
    before = page.answer()
    page.click(".actions button:nth-child(3)")
    page.finish()
    assert page.sent()["prompt"] == "Once " + before
    assert len(page.all(".exchange")) == 1


@pytest.mark.medium
def test_stopping_before_the_first_token_and_a_new_chat_in_the_middle(page):
    page.force(open=True)
    page.send("Hello")
    page.until(lambda: page.all(".busy"))
    page.send("more")  # nothing is sent while an answer comes
    page.one("#message").send_keys(Keys.ESCAPE)
    page.finish()
    assert page.texts(".figures span") == ["stopped by you"]
    assert page.one("#message").get_property("value") == "more"
    page.force(piece("a"), open=True)
    page.send("")
    page.until(lambda: page.all(".token"))
    page.click("#new")
    page.until(lambda: not page.all(".exchange"))
    assert page.one("#send").get_attribute("aria-label") == "Send"


@pytest.mark.medium
def test_languages_and_themes_are_switched_and_remembered(page):
    assert page.one("html").get_attribute("lang") == "en"
    page.set("max_tokens", 3)
    page.ask("Hello")
    page.click("#language")
    page.click("#theme")
    page.click("#open-settings")
    assert page.one("html").get_attribute("lang") == "zh-CN"
    assert page.one("#settings h2").text == "设置"
    assert page.one(".figures").text.startswith("首个词元")
    assert page.texts(".actions button") == ["修改", "重试"]
    dark = page.script("return getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", dark))) < 150
    page.reload()
    assert page.one("#message").get_attribute("placeholder") == "写一条消息"
    assert page.script("return getComputedStyle(document.body).backgroundColor") == dark
    page.click("#language")
    page.click("#theme")
    assert page.one("#message").get_attribute("placeholder") == "Write a message"
    assert page.script("return getComputedStyle(document.body).backgroundColor") != dark

    words = page.script("return import('/words.js').then((module) => module.WORDS)")
    assert all(len(pair) == 2 and all(pair) for pair in words.values())
    unlike = [pair for name, pair in words.items() if name not in ("language", "otherLanguage")]
    assert all(re.search("[一-鿿]", chinese) and not re.search("[一-鿿]", english) for english, chinese in unlike)
    held = [set(re.findall(r"\{\d\}", text)) for pair in unlike for text in pair]
    assert held[::2] == held[1::2]


@pytest.mark.medium
@pytest.mark.parametrize(("spoken", "language"), [("zh-HK", "zh-CN"), ("de-DE", "en")])
def test_the_first_language_is_the_browsers(page, spoken, language):
    page.browser.execute_cdp_cmd("Emulation.setUserAgentOverride", {"userAgent": "test", "acceptLanguage": spoken})
    page.open()
    assert page.one("html").get_attribute("lang") == language
    page.browser.execute_cdp_cmd("Emulation.setUserAgentOverride", {"userAgent": "test", "acceptLanguage": "en-US"})


@pytest.mark.medium
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_the_first_theme_is_the_systems(page, scheme):
    feature = [{"name": "prefers-color-scheme", "value": scheme}]
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": feature})
    light = sum(map(int, re.findall(r"\d+", page.script("return getComputedStyle(document.body).backgroundColor"))))
    assert (light < 150) == (scheme == "dark")
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.medium
def test_a_refusal_is_one_sentence(page):
    page.ask("x" * 400)
    [sentence] = page.texts(".error")
    assert re.fullmatch(r"[A-Z][^{}<>]*256[^{}<>]*\.", sentence), sentence
    page.ask("y")  # what failed is no part of the conversation
    assert page.texts(".question") == ["y"]
    assert not page.all(".error")

    cut = "The connection ended before the answer did."
    page.force(piece("half"), {"error": {"message": "the server is shutting down"}})
    page.ask("z")
    assert (page.answer(), page.texts(".error")) == ("half", ["The server is shutting down."])
    page.script("window.fetch = async () => new Response('data: {\"choices\": []}\\n\\n')")
    page.ask("z")
    assert page.texts(".exchange:last-child .error") == [cut]
    page.script("window.fetch = async () => { throw new TypeError('no') }")
    page.ask("z")
    assert page.texts(".exchange:last-child .error") == ["The server cannot be reached: is it still running?"]
    page.script("window.fetch = async () => new Response('<html>', {status: 502})")
    page.ask("z")
    assert page.texts(".exchange:last-child .error") == ["The server answered with status 502 and no explanation."]
    page.script(
        "window.fetch = async () => new Response(JSON.stringify({error: {message: 'too many'}}),"
        " {status: 429, headers: {'Retry-After': '3'}})"
    )
    page.ask("z")
    assert page.texts(".exchange:last-child .error") == ["Too many. Try again in 3 s."]


@pytest.mark.medium
def test_nothing_that_is_written_is_ever_html(page):
    page.force(*(piece(each, others={HOSTILE: 0.1}) for each in re.findall(r".{1,7}", HOSTILE)), end())
    page.ask(HOSTILE)
    assert page.answer() == HOSTILE
    assert page.texts(".question .text") == [HOSTILE]
    page.all(".token")[0].click()
    assert HOSTILE.replace(" ", "␣") in page.texts("#considered .name")
    page.force({"error": {"message": HOSTILE}})
    page.ask(HOSTILE)
    assert page.texts(".error") == [f"{HOSTILE}."]
    page.script(
        "window.fetch = async () => new Response(arguments[0]);", json.dumps({"data": [{"id": HOSTILE, "parent": "x"}]})
    )
    page.click("#language")
    page.until(lambda: HOSTILE in page.texts("#model option")[0])
    assert not page.all("main script, main img, #considered img, #considered script")
    assert page.script("return window.hacked") is None


def test_the_page_has_no_way_to_make_html_of_text():
    paths = [files.FOLDER / name for name, _ in files.FILES.values()]
    assert {path.name for path in files.FOLDER.iterdir() if path.suffix in (".html", ".css", ".js")} == {
        path.name for path in paths
    }
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|Function\(|setHTML|DOMParser|srcdoc"
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert not re.search(forbidden, text), path
        # The name of SVG is an address that nobody fetches.
        assert set(re.findall(r"(?:https?:)?//[\w.]+\.\w+", text)) <= {"http://www.w3.org"}, path


@pytest.mark.medium
def test_a_key_is_asked_for_and_kept_for_the_tab_only(browser, start):
    served = start(api_key="secret")
    pages = checked(Page(browser, served.url))
    page = next(pages)
    page.until(lambda: page.one("#key").is_displayed())
    assert "asks for an API key" in page.one("#welcome-text").text
    page.one("#key").send_keys("wrong", Keys.TAB)
    page.until(lambda: page.script("return sessionStorage.getItem('key')") == "wrong")
    page.ask("Hello")
    assert page.texts(".error") == ["This server asks for an API key: enter it in the settings."]
    page.one("#key").clear()
    page.one("#key").send_keys("secret", Keys.TAB)
    page.until(lambda: page.all("#model option"))
    page.set("max_tokens", 3)
    page.ask("Hello")
    assert page.answer()
    assert "secret" not in page.script("return JSON.stringify(localStorage) + document.cookie")
    assert not list(pages)


SIDEWAYS = """
    return [document.documentElement.scrollWidth > innerWidth, ...[...document.querySelectorAll("body *")]
      .filter((each) => each.getBoundingClientRect().right > innerWidth + 1 && !each.closest(".unseen, h1"))
      .map((each) => each.outerHTML.slice(0, 80))];
"""
SMALL = """
    return [...document.querySelectorAll("button, select, input, textarea, .modes label, .switch")]
      .map((each) => [each, (each.closest(".switch, .modes label") ?? each).getBoundingClientRect()])
      .filter(([, box]) => box.width > 0 && (box.height < 40 || box.width < 40))
      .map(([each, box]) => [each.id || each.textContent || each.value, box.width, box.height]);
"""


@pytest.mark.medium
@pytest.mark.parametrize("language", ["en", "zh"])
def test_it_fits_a_phone(page, language):
    page.size(360, 640, mobile=True)
    page.open(language=language, showTokens=True)
    for mode in ("chat", "continue"):
        page.click(f"input[value={mode}]")
        assert page.script(SIDEWAYS) == [False]
        usage = {"completion_tokens": 12345, "prompt_tokens": 12345, "prompt_tokens_details": {"cached_tokens": 1234}}
        page.force(
            piece("x" * 300), piece("长" * 100), piece("<|end|>", "", p=1), end("length"),
            {"usage": usage, "llmtrain": {"seed": 2**32}},
        )  # fmt: skip
        page.ask("y" * 200)
        assert page.script(SIDEWAYS) == [False]
        assert page.script(SMALL) == []
        page.all(".token")[1].click()
        box = page.script("return document.getElementById('considered').getBoundingClientRect().toJSON()")
        assert 0 <= box["left"] < box["right"] <= 360
        assert 0 <= box["top"] < box["bottom"] <= 640
        page.click("#new")
    page.click("#open-settings")
    assert page.script(SIDEWAYS) == [False]
    assert page.script(SMALL) == []
    page.one("#close-settings").send_keys(Keys.ESCAPE)
    assert not page.one("#settings").is_displayed()
    assert page.script("return document.activeElement.id") == "open-settings"


# The contrast of every text with the ground it stands on, by WCAG 2's formula; a canvas turns any colour into numbers.
CONTRASTS = """
    const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const paint = (colours) => {
      pen.clearRect(0, 0, 1, 1);
      for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
      const part = (value) => value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4;
      const [red, green, blue] = [...pen.getImageData(0, 0, 1, 1).data].map(part);
      return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const found = {};
    for (const each of document.querySelectorAll("body *")) {
      const own = [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
      if (!own || each.closest(".unseen, noscript, option") || !each.getClientRects().length || each.disabled) continue;
      const grounds = [];
      for (let at = each; at; at = at.parentElement) grounds.unshift(getComputedStyle(at).backgroundColor);
      const [ink, ground] = [paint([...grounds, getComputedStyle(each).color]), paint(grounds)];
      const name = `${each.tagName}#${each.id}.${each.className}`;
      found[name] = Math.min(found[name] ?? 99, (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05));
    }
    return found;
"""


@pytest.mark.medium
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_stands_out_from_its_ground(page, theme):
    page.open(theme=theme, showTokens=True, mode="continue")
    page.click("#open-settings")
    welcome = page.script(CONTRASTS)
    page.force(piece("sure", p=1), piece("unlikely", p=1e-6, others={"other": 0.9}), {"error": {"message": "no"}})
    page.ask("Given")
    page.click("input[value=chat]")
    page.force(piece("sure", p=1), piece("<|end|>", "", p=1), end())
    page.ask("Asked")
    page.all(".token")[1].click()
    contrasts = welcome | page.script(CONTRASTS)
    assert len(contrasts) > 20
    assert {name: ratio for name, ratio in contrasts.items() if ratio < 4.5} == {}


@pytest.mark.medium
def test_looking_inside_an_answer_opens_the_inspectors_page(browser, start):
    made = start(max_rows=2)
    made.app.state.server.inside = Inside(made.runner, {})
    page = Page(browser, made.url)
    page.size(1200, 800)
    page.open()
    page.set("max_tokens", 6)
    page.ask("Hello <b>there</b>")
    told = page.answer()
    [button] = [each for each in page.all(".actions button") if each.text == "Look inside"]
    button.click()
    page.until(lambda: len(browser.window_handles) == 2)
    first, second = browser.window_handles
    browser.switch_to.window(second)
    try:
        page.until(lambda: "/inspect/" in browser.current_url and page.all("h2"))
        assert page.script("return document.documentElement.scrollWidth <= innerWidth")
        assert told.rstrip("\N{REPLACEMENT CHARACTER}") in page.script("return document.body.textContent")
        assert page.script("return window.opener") is None
    finally:
        browser.close()
        browser.switch_to.window(first)


@pytest.mark.medium
def test_there_is_nothing_to_look_into_unless_the_server_records(page):
    page.set("max_tokens", 2)
    page.ask("Hello")
    assert "Look inside" not in [each.text for each in page.all(".actions button")]
