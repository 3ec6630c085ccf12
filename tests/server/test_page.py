"""The page in a browser: Debian's Chromium, on the fake engine; skipped where there is none."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from headwater.engines.fake import FakeEngine
from headwater.server.service import Service
from tests.server.served import over_a_socket, service, until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PICTURES = os.environ.get("HEADWATER_PICTURES")
"""A folder for pictures of the page, if they are wanted."""
HOSTILE = (
    "<img src=x onerror=window.hurt=1><script>window.hurt=1</script> [a](javascript:window.hurt=1) "
    "[b](https://example.org/x) **bold** `code`"
)

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]


class Talkative(FakeEngine):
    """Says something nasty when it is asked to, and takes its time when it is asked to."""

    slow_s = 0.0

    def decode(self, tokens: Any) -> str:
        time.sleep(self.slow_s)
        return super().decode(tokens)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        one = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield one
        one.close()


@pytest.fixture
def engine() -> Talkative:
    return Talkative(name="fake")


@pytest.fixture
def server(tmp_path: Path, engine: Talkative) -> Iterator[tuple[Service, str]]:
    served = service(tmp_path, engine, budget=400)
    with over_a_socket(served) as address:
        yield served, address


@pytest.fixture
def page(browser: Browser, server: tuple[Service, str]) -> Iterator[Page]:
    yield from opened(browser, server[1])


def opened(browser: Browser, address: str, **options: Any) -> Iterator[Page]:
    """The page, on which nothing may go wrong and which may ask no other host for anything."""
    context = browser.new_context(**options)
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request", lambda request: None if request.url.startswith((address, "blob:")) else wrong.append(request.url)
    )
    page.goto(address)
    expect(page.locator("html[data-ready]")).to_have_count(1)
    yield page
    context.close()
    assert not [text for text in wrong if "status of 400" not in text], "refusals are told on the page"


def say(page: Page, text: str) -> str:
    """Say it and wait for the answer."""
    count = page.locator("article").count()
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    expect(page.locator("article")).to_have_count(count + 2)
    idle(page)
    return page.locator("article").last.locator(".body").inner_text()


def idle(page: Page) -> None:
    """Wait for the end of an answer, and for what it shows afterwards."""
    expect(page.locator("body:not([data-busy])")).to_have_count(1)


def picture(page: Page, name: str) -> None:
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / f"{name}.png")


def test_a_conversation_past_the_window(page: Page, server: tuple[Service, str]):
    page.locator("summary").click()
    page.locator("#system").fill("You are brief.")
    for number in range(60):
        assert say(page, f"message {number}")
    (live,) = server[0].shelf.all()
    stats = live.chat.stats()
    label = page.locator("#map svg").get_attribute("aria-label") or ""
    assert f"holds {stats.held} of 400 tokens" in label
    assert f"{stats.evicted_turns} of 120 messages have left" in label
    assert stats.evicted_turns > 80
    assert page.locator("article.gone").count() == stats.evicted_turns
    widths = page.locator("#map rect").evaluate_all(
        "all => all.map(r => [r.getAttribute('class'), r.width.baseVal.value])"
    )
    shown = dict(widths[:4])
    assert shown["window"] == pytest.approx(1000 * (stats.held - stats.pinned) / 400, abs=3)
    assert shown["sinks"] == pytest.approx(1000 * stats.sinks / 400, abs=3)
    figures = page.locator("#figures").inner_text()
    assert re.search(r"perplexity\s+\d", figures)
    picture(page, "page")
    page.reload()
    expect(page.locator("article")).to_have_count(120)
    assert live.chat.system == "You are brief."
    assert say(page, "and one more")
    assert len(server[0].shelf.all()) == 1


def test_stop_edit_and_answer_again(page: Page, engine: Talkative, server: tuple[Service, str]):
    first = say(page, "hello")
    say(page, "more")
    engine.answer_tokens, engine.slow_s = None, 0.01
    page.get_by_label("Message", exact=True).fill("go on for ever")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("article")).to_have_count(6)
    expect(page.locator("article").last.locator(".body")).not_to_be_empty()
    page.keyboard.press("Escape")
    until(lambda: not server[0].shelf.busy)
    engine.answer_tokens, engine.slow_s = 24, 0.0
    idle(page)
    (live,) = server[0].shelf.all()
    assert live.chat.latest is not None and len(live.chat.latest.text) < 60
    assert say(page, "after the stop")
    page.get_by_role("button", name="Answer again").last.click()
    idle(page)
    expect(page.locator("article")).to_have_count(8)
    page.get_by_role("button", name="Edit").nth(3).click()
    page.locator("article textarea").fill("something else")
    page.get_by_role("button", name="Send").first.click()
    expect(page.locator("article")).to_have_count(8)
    expect(page.locator("article").nth(6)).to_contain_text("something else")
    idle(page)
    assert len(server[0].shelf.all()) == 1, "it stayed in its session"
    page.get_by_role("button", name="Edit").first.click()
    page.locator("article textarea").fill("hello again")
    page.get_by_role("button", name="Send").first.click()
    expect(page.locator("article")).to_have_count(2)
    idle(page)
    assert len(server[0].shelf.all()) == 1
    (live,) = server[0].shelf.all()
    assert [turn.role for turn in live.chat.turns] == ["user", "assistant"]
    assert first


def test_no_script_runs_from_what_is_said(page: Page):
    say(page, HOSTILE)
    said = page.locator("article.user .body")
    assert "<img src=x" in said.inner_text()
    assert page.evaluate("window.hurt") is None
    assert page.locator("article img, article script").count() == 0
    assert [link.get_attribute("href") for link in said.locator("a").all()] == ["https://example.org/x"]
    assert said.locator("strong").inner_text() == "bold"
    assert page.evaluate("""() => { try { return eval('1') } catch { return 'refused' } }""") in (1, "refused")


def test_sessions_are_listed_renamed_found_exported_and_deleted(page: Page):
    say(page, "about a boat")
    page.get_by_role("button", name="New conversation").click()
    say(page, "about a train")
    expect(page.locator("#sessions li")).to_have_count(2)
    page.get_by_label("Search names").fill("boat")
    expect(page.locator("#sessions li")).to_have_count(1)
    page.locator("#sessions button").click()
    expect(page.locator("article").first).to_contain_text("about a boat")
    page.get_by_role("button", name="Rename").click()
    page.locator("#asking-text").fill("The boat")
    page.keyboard.press("Enter")
    expect(page.locator("#name")).to_have_text("The boat")
    with page.expect_download() as download:
        page.get_by_role("link", name="Export").click()
    assert "about a boat" in Path(download.value.path()).read_text()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="OK").click()
    page.get_by_label("Search names").fill("")
    expect(page.locator("#sessions li")).to_have_count(1)
    expect(page.locator("article")).to_have_count(0)


def test_settings_say_what_they_cost(page: Page, server: tuple[Service, str]):
    for number in range(8):
        say(page, f"message {number}")
    page.get_by_role("button", name="Settings").click()
    page.locator("#budget").fill("200")
    expect(page.locator("#cost")).to_contain_text("1.6 kB of cache")
    picture(page, "settings")
    page.get_by_role("button", name="Apply").click()
    expect(page.locator("#model")).to_contain_text("200 tokens")
    expect(page.locator("#settings")).not_to_be_visible()
    assert server[0].manner.policy.budget == 200
    say(page, "and on")
    (live,) = server[0].shelf.all()
    assert live.chat.stats().budget == 200
    page.get_by_role("button", name="Settings").click()
    page.locator("#budget").fill("20")
    page.get_by_role("button", name="Apply").click()
    expect(page.locator("#settings-trouble")).to_contain_text("raise the budget")
    page.get_by_role("button", name="Close").click()


def test_a_key_is_asked_for(browser: Browser, server: tuple[Service, str]):
    key = server[0].keys.add("anna")
    context = browser.new_context()
    page = context.new_page()
    page.goto(server[1])
    page.locator("#asking-text").fill(key)
    page.keyboard.press("Enter")
    expect(page.locator("html[data-ready]")).to_have_count(1)
    assert say(page, "hello")
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_anyone_can_use_it(browser: Browser, server: tuple[Service, str], scheme: Any, width: int):
    """By rules of accessibility, in dark and light, on a desk and on a phone; and by keyboard alone."""
    from axe_playwright_python.sync_playwright import Axe

    for page in opened(browser, server[1], color_scheme=scheme, viewport={"width": width, "height": 800}):
        for number in range(12):
            say(page, f"message {number}")
        found = Axe().run(page)
        serious = [each for each in found.response["violations"] if each["impact"] in ("serious", "critical")]
        assert not serious, [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in serious]
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing is cut off"
        picture(page, f"page-{scheme}-{width}")
        if width < 500:
            page.get_by_role("button", name="Sessions").click()
            expect(page.locator("#sidebar")).to_be_visible()
            picture(page, f"sessions-{scheme}-{width}")
            page.get_by_role("button", name="New conversation").click()
            expect(page.locator("#sidebar")).not_to_be_visible()


def test_by_keyboard_alone(page: Page):
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#text")).to_be_focused()
    page.keyboard.type("hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two lines")
    page.keyboard.press("Enter")
    expect(page.locator("article")).to_have_count(2)
    assert "hello\ntwo lines" in page.locator("article").first.inner_text()


def test_the_endpoints_for_people(browser: Browser, server: tuple[Service, str]):
    for page in opened(browser, f"{server[1]}"):
        page.goto(f"{server[1]}/docs")
        expect(page.get_by_role("heading", name="POST /v1/chat/completions")).to_be_visible()
