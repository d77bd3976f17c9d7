"""The chat page in a browser against the server. What a sound server does not answer is put in its place."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from doubles.browser import Browser, find_chromium
from doubles.chat_page import (
    END,
    IDLE,
    LAST_ANSWER,
    LAST_NOTICE,
    LAST_TEXT,
    USAGE,
    fill,
    in_browser,
    keep_conversation,
    plan,
    say,
)
from doubles.served import ServedModel, Serving, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="no chromium on this machine"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(ServedModel(step_ms=30)) as running:
        yield running


def stats(server: Any) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url.rstrip('/')}/stats", timeout=10) as response:
        return dict(json.load(response))


async def until_idle(server: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while (await asyncio.to_thread(stats, server))["running"]:
        assert time.monotonic() < end, "the server still runs the request"
        await asyncio.sleep(0.1)


@in_browser
async def test_a_message_sent_by_keyboard_is_answered_with_figures(browser: Browser, server: Any) -> None:
    await fill(browser, "max_tokens", "24")
    await fill(browser, "seed", "1")
    await browser.evaluate("document.getElementById('prompt').focus()")
    await browser.type("Tell me about")
    await browser.press("Enter", shift=True)
    assert await browser.evaluate("document.querySelectorAll('.message').length") == 0, "Shift+Enter sent the message"
    await browser.type("the sea.")
    await browser.press("Enter")
    await browser.wait_for(f"{LAST_TEXT}.length > 0 && !({IDLE})", 60)
    early = await browser.evaluate(f"{LAST_TEXT}.length")
    await browser.wait_for(IDLE, 60)
    assert await browser.evaluate("document.querySelector('.bubble').textContent") == "Tell me about\nthe sea."
    assert await browser.evaluate(f"{LAST_TEXT}.length") > early, "the answer did not come bit by bit"
    figures = await browser.evaluate(
        f"Object.fromEntries([...{LAST_ANSWER}.querySelectorAll('[data-figure]')]"
        ".map(item => [item.dataset.figure, item.textContent]))"
    )
    assert set(figures) == {"rate", "first", "tokens", "prompt", "finish"}
    assert float(figures["rate"].split()[0].replace(",", "")) > 0
    shown = int(figures["tokens"].split()[0])
    assert 1 < shown <= 24
    sent = await browser.evaluate("window.sent[0]")
    assert sent["stream"] is True
    assert sent["stream_options"] == {"include_usage": True}
    assert browser.problems == []


@in_browser
async def test_the_rate_is_measured_between_the_first_token_and_the_last(browser: Browser, server: Any) -> None:
    await plan(browser, {"events": ["one ", "two ", "three", END, USAGE], "pause": 200})
    await say(browser, "Count.")
    rate = await browser.evaluate(f"{LAST_ANSWER}.querySelector('[data-figure=rate]').textContent")
    # Two tokens after the first one, 0.4 s or a little more.
    assert 3.0 < float(rate.split()[0]) <= 5.1
    prompt = await browser.evaluate(f"{LAST_ANSWER}.querySelector('[data-figure=prompt]').textContent")
    assert prompt == "prompt 40, 32 cached"


@in_browser
async def test_a_screen_reader_gets_whole_paragraphs(browser: Browser, server: Any) -> None:
    await plan(browser, {"events": ["One ", "and\n\n", "two ", "and ", "three.", END, USAGE], "pause": 30})
    await browser.evaluate(
        "window.said = []; new MutationObserver(changes => changes.forEach(change => change.addedNodes.forEach(node =>"
        " window.said.push(node.textContent)))).observe(document.getElementById('announcer'), { childList: true })"
    )
    await say(browser, "Count.")
    assert await browser.evaluate("window.said") == ["One and", "two and three.", "Answer complete."]
    assert await browser.evaluate(f"{LAST_ANSWER}.ariaBusy") == "false"


@in_browser
async def test_nothing_moves_for_who_wants_no_motion(browser: Browser, server: Any) -> None:
    moving = "document.getAnimations().filter(animation => animation.playState === 'running').length"
    await plan(browser, {"events": ["late", END, USAGE], "pause": 3000})
    await say(browser, "Wait.", wait=False)
    await browser.wait_for("!document.querySelector('.wait').hidden")
    assert await browser.evaluate(moving) > 0
    await browser.show(1280, 800, reduced_motion=True)
    # A change of width that had begun goes on to its end.
    await browser.wait_for(f"{moving} === 0", 2)
    assert not await browser.evaluate("document.querySelector('.wait').hidden")


@in_browser
async def test_escape_stops_the_answer_on_the_server_too(browser: Browser, server: Any) -> None:
    await fill(browser, "seed", "1")
    await say(browser, "Write a very long story about a lighthouse, with many chapters.", wait=False)
    await browser.wait_for(f"{LAST_TEXT}.length > 0", 60)
    assert stats(server)["running"] == 1
    await browser.press("Escape")
    await browser.wait_for(IDLE, 5)
    finish = await browser.evaluate(f"{LAST_ANSWER}.querySelector('[data-figure=finish]').textContent")
    assert finish == "stopped by you"
    await until_idle(server)
    assert await browser.evaluate(f"{LAST_TEXT}.length") > 0
    assert browser.problems == []


@in_browser
async def test_a_wrong_setting_is_explained_at_its_field(browser: Browser, server: Any) -> None:
    await fill(browser, "top_p", "7")
    await say(browser, "Hello.")
    error = await browser.evaluate("document.getElementById('set-top_p-error').textContent")
    assert "top_p" in error
    assert await browser.evaluate("document.getElementById('set-top_p-error').checkVisibility()")
    assert await browser.evaluate("document.getElementById('set-top_p').getAttribute('aria-invalid')") == "true"
    assert await browser.evaluate(LAST_NOTICE) == error
    await fill(browser, "top_p", "0.5")
    assert await browser.evaluate("document.getElementById('set-top_p-error').hidden")
    await fill(browser, "max_tokens", "few")
    await say(browser, "Hello again.")
    assert await browser.evaluate("window.sent.length") == 1, "a setting that is no number was sent"
    assert "whole number" in await browser.evaluate("document.getElementById('set-max_tokens-error').textContent")


@in_browser
async def test_settings_reach_the_request(browser: Browser, server: Any) -> None:
    usual = {"model", "messages", "stream", "stream_options"}
    await fill(browser, "max_tokens", "4")
    await fill(browser, "seed", "1")
    await say(browser, "Hello.")
    values = {
        "temperature": "0.5", "top_p": "0,75", "top_k": "40", "min_p": "0.05", "repetition_penalty": "1.1",
        "max_tokens": "3", "seed": "18446744073709551615", "stop": "###\nEND\\n",
    }  # fmt: skip
    for name, value in values.items():
        if name != "stop":
            await fill(browser, name, value)
    await browser.evaluate(f"document.getElementById('set-stop').value = {json.dumps(values['stop'])}")
    await fill(browser, "system", "Answer in one word.")
    await say(browser, "And now?")
    first, second = await browser.evaluate("window.sent")
    assert set(first) - {"raw"} == usual | {"max_tokens", "seed"}, "an empty field was sent"
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][0]["content"] == "Answer in one word."
    assert (second["temperature"], second["top_p"], second["top_k"], second["min_p"]) == (0.5, 0.75, 40, 0.05)
    assert (second["repetition_penalty"], second["max_tokens"]) == (1.1, 3)
    assert second["stop"] == ["###", "END\n"]
    assert '"seed":18446744073709551615' in second["raw"], "the seed lost digits"
    assert "Max tokens" in await browser.evaluate(LAST_NOTICE)
    assert browser.problems == []


@in_browser
async def test_the_defaults_of_the_server_are_shown(browser: Browser, server: Any) -> None:
    for name, value in stats(server)["defaults"].items():
        if value is not None and await browser.evaluate(f"document.getElementById('set-{name}') !== null"):
            shown = await browser.evaluate(f"document.getElementById('set-{name}').placeholder")
            assert float(shown) == value


@in_browser
async def test_a_reload_keeps_the_chat_the_settings_and_what_is_being_written(browser: Browser, server: Any) -> None:
    await fill(browser, "max_tokens", "8")
    await say(browser, "Say something.")
    await browser.type("Not sent yet")
    contents = "document.getElementById('messages').innerText"
    before = await browser.evaluate(contents)
    await browser.reload()
    await browser.wait_for("document.querySelector('.answer') !== null")
    assert await browser.evaluate(contents) == before
    assert await browser.evaluate("document.getElementById('prompt').value") == "Not sent yet"
    assert await browser.evaluate("document.getElementById('set-max_tokens').value") == "8"


@in_browser
async def test_regenerate_edit_and_new_chat(browser: Browser, server: Any) -> None:
    await plan(browser, *({"events": [text, END, USAGE]} for text in ("first", "second", "third")))
    await say(browser, "Question one")
    await browser.evaluate(f"{LAST_ANSWER}.querySelector('[aria-label=\"Regenerate answer\"]').click()")
    await browser.wait_for(f"{LAST_TEXT} === 'second'")
    await browser.wait_for(IDLE)
    await browser.evaluate("document.querySelector('[aria-label=\"Edit message\"]').click()")
    await browser.type(" changed")
    await browser.press("Enter")
    await browser.wait_for(f"{LAST_TEXT} === 'third'")
    await browser.wait_for(IDLE)
    asked = await browser.evaluate("window.sent.map(body => body.messages.map(message => message.content))")
    assert asked == [["Question one"], ["Question one"], ["Question one changed"]]
    await browser.evaluate("document.getElementById('new-chat').click()")
    assert await browser.evaluate("document.querySelectorAll('.message').length") == 0
    await browser.evaluate("document.querySelector('#toast button').click()")
    assert await browser.evaluate(LAST_TEXT) == "third"


@in_browser
async def test_a_busy_server_is_asked_again(browser: Browser, server: Any) -> None:
    busy = {"status": 503, "error": {"message": "The queue is full."}, "headers": {"Retry-After": "1"}}
    await plan(browser, busy, busy, {"events": ["done", END, USAGE]})
    await say(browser, "Hello.", wait=False)
    await browser.wait_for(f"({LAST_NOTICE}).includes('Trying again in 1 s')", 5)
    await browser.wait_for(f"{LAST_TEXT} === 'done'", 10)
    assert await browser.evaluate(LAST_NOTICE) == ""
    assert await browser.evaluate("window.sent.length") == 3


@in_browser
async def test_a_broken_answer_is_kept_and_said_to_be_broken(browser: Browser, server: Any) -> None:
    await plan(browser, {"events": ["some ", "words"], "cut": True}, {"unreachable": True},
               {"events": ["part", {"error": {"message": "The step failed."}}]})  # fmt: skip
    await say(browser, "Hello.")
    assert await browser.evaluate(LAST_TEXT) == "some words"
    assert "kept" in await browser.evaluate(LAST_NOTICE)
    await say(browser, "And now?")
    assert "cannot be reached" in await browser.evaluate(LAST_NOTICE)
    await say(browser, "A third time?")
    assert await browser.evaluate(LAST_TEXT) == "part"
    assert await browser.evaluate(LAST_NOTICE) == "The step failed."
    roles = await browser.evaluate("window.sent.at(-1).messages.map(message => message.content)")
    assert roles == ["Hello.", "some words", "A third time?"], "a question without an answer was sent along"


@in_browser
async def test_a_conversation_that_is_too_long_can_go_on(browser: Browser, server: Any) -> None:
    await keep_conversation(browser, server, "one", "1", "two", "2", "three", "3")
    too_long = {"message": "The prompt has 9000 tokens.", "code": "context_length_exceeded", "param": "messages"}
    await plan(browser, {"status": 400, "error": too_long}, {"events": ["4", END, USAGE]})
    await say(browser, "four")
    assert "9000 tokens" in await browser.evaluate(LAST_NOTICE)
    labels = await browser.evaluate(
        f"[...{LAST_ANSWER}.querySelectorAll('.notice button')].map(button => button.textContent)"
    )
    assert labels == ["Drop the oldest messages", "New chat"]
    await browser.evaluate(f"{LAST_ANSWER}.querySelector('.notice button').click()")
    await browser.wait_for(f"{LAST_TEXT} === '4'")
    sent = await browser.evaluate("window.sent.at(-1).messages.map(message => message.content)")
    assert sent == ["three", "3", "four"]
    assert await browser.evaluate("document.querySelectorAll('.question.dropped').length") == 2


@in_browser
async def test_a_key_is_asked_for_and_kept_for_the_tab(browser: Browser, server: Any) -> None:
    await plan(browser, {"status": 401, "error": {"message": "A key is needed."}}, {"events": ["open", END, USAGE]})
    await say(browser, "Hello.", wait=False)
    await browser.wait_for("document.getElementById('key-dialog').open")
    await browser.type("secret")
    await browser.press("Enter")
    await browser.wait_for(f"{LAST_TEXT} === 'open'")
    assert await browser.evaluate("sessionStorage.getItem('slipstream.key')") == '"secret"'
    assert await browser.evaluate("Object.values(localStorage).every(value => !value.includes('secret'))")


@in_browser
async def test_a_server_that_is_gone_is_noticed_and_found_again(browser: Browser, server: Any) -> None:
    await browser.evaluate(
        "window.realFetch = window.fetch; window.fetch = async () => { throw new TypeError('gone'); }"
    )
    await browser.wait_for("document.getElementById('state').dataset.state === 'gone'", 10)
    await browser.wait_for("!document.getElementById('banner').hidden", 10)
    assert "No connection" in await browser.evaluate("document.getElementById('banner').textContent")
    await browser.evaluate("window.fetch = window.realFetch; document.querySelector('#banner button').click()")
    await browser.wait_for("document.getElementById('banner').hidden", 10)
    assert await browser.evaluate("document.getElementById('state').dataset.state") == "ready"


@in_browser
async def test_a_reader_who_scrolls_up_is_left_alone(browser: Browser, server: Any) -> None:
    await plan(browser, {"events": [f"line {at}\n\n" for at in range(120)] + [END, USAGE], "pause": 15})
    await say(browser, "Many lines.", wait=False)
    at_end = (
        "(({ scrollHeight, clientHeight, scrollTop }) => scrollHeight - clientHeight - scrollTop < 2)"
        "(document.getElementById('scroller'))"
    )
    scrolled = "document.getElementById('scroller').scrollTop > 200"
    await browser.wait_for(f"{scrolled} && {at_end}")
    await browser.evaluate("document.getElementById('scroller').scrollTop -= 150")
    await asyncio.sleep(0.2)
    top = await browser.evaluate("document.getElementById('scroller').scrollTop")
    height = await browser.evaluate("document.getElementById('scroller').scrollHeight")
    await browser.wait_for(IDLE)
    assert await browser.evaluate("document.getElementById('scroller').scrollHeight") > height
    assert await browser.evaluate("document.getElementById('scroller').scrollTop") == top
    await browser.evaluate("document.getElementById('jump').click()")
    assert await browser.evaluate(at_end)


LONG = (
    "x" * 300
    + "\n\n```\n"
    + "y " * 200
    + "\n```\n\n| "
    + "wide | " * 12
    + "\n|"
    + "--|" * 12
    + "\n\n"
    + "`"
    + "z" * 200
    + "`"
)


@in_browser
async def test_nothing_is_wider_than_a_phone(browser: Browser, server: Any) -> None:
    await browser.show(360, 640, touch=True)
    widths = (
        "[document.documentElement,"
        " ...document.querySelectorAll('#scroller, #settings-form, #engine, .bar, #composer')]"
        ".filter(part => part.scrollWidth > part.clientWidth + 1).map(part => part.id || part.tagName)"
    )
    assert await browser.evaluate(widths) == []
    await keep_conversation(browser, server, LONG, LONG)
    assert await browser.evaluate("document.documentElement.clientWidth") == 360
    assert await browser.evaluate(widths) == []
    assert not await browser.evaluate("document.getElementById('engine').open"), "the figures do not fold on a phone"
    await browser.evaluate("document.querySelector('#engine summary').click()")
    await browser.evaluate("document.getElementById('side-toggle').click()")
    assert await browser.evaluate(widths) == []
    assert await browser.evaluate("document.activeElement.id") == "settings-close"
    await browser.press("Escape")
    assert await browser.evaluate("document.activeElement.id") == "side-toggle"


@in_browser
async def test_dark_and_light(browser: Browser, server: Any) -> None:
    brightness = "Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
    assert await browser.evaluate(brightness) > 200
    await browser.show(1280, 800, dark=True)
    assert await browser.evaluate(brightness) < 60
    await browser.evaluate("document.getElementById('theme').click()")
    assert await browser.evaluate(brightness) > 200
    await browser.reload()
    assert await browser.evaluate(brightness) > 200, "the choice did not survive the reload"


@in_browser
async def test_tab_reaches_every_control_and_shows_where_it_is(browser: Browser, server: Any) -> None:
    await keep_conversation(browser, server, "Hello.", "Hello.\n\n```\ncode\n```")
    controls = await browser.evaluate(
        "(() => { const kinds = 'button, input, textarea, summary, a[href], [tabindex]';"
        "window.controls = [...document.querySelectorAll(kinds)]"
        ".filter(part => part.checkVisibility({ visibilityProperty: true }) && !part.closest('[inert]'));"
        "return window.controls.length; })()"
    )
    assert controls > 18
    await browser.evaluate("document.activeElement.blur()")
    reached = set()
    for _ in range(controls + 4):
        await browser.press("Tab")
        at = await browser.evaluate("window.controls.indexOf(document.activeElement)")
        if at >= 0:
            reached.add(at)
            ring = await browser.evaluate(
                "[document.activeElement, document.activeElement.parentElement].some(part =>"
                " getComputedStyle(part).outlineStyle !== 'none' || part.matches('.composer-box:focus-within'))"
            )
            assert ring, await browser.evaluate("document.activeElement.outerHTML")
    missed = await browser.evaluate(
        f"window.controls.filter((_, at) => !{sorted(reached)}.includes(at)).map(part => part.outerHTML)"
    )
    assert missed == []


@in_browser
async def test_every_control_has_a_name(browser: Browser, server: Any) -> None:
    nameless = await browser.evaluate(
        "[...document.querySelectorAll('button, input, textarea')].filter(part => !part.getAttribute('aria-label')"
        " && !part.labels?.length && !part.textContent.trim()).map(part => part.outerHTML)"
    )
    assert nameless == []
