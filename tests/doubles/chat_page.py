"""The chat page in a browser: opening it, writing into it, and answers that no sound server would give.

`in_browser` needs a fixture `server` with the address in `url`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from doubles.browser import Browser

IDLE = "!document.querySelector('#send.stop')"
LAST_ANSWER = "[...document.querySelectorAll('.answer')].at(-1)"
LAST_TEXT = f"{LAST_ANSWER}.querySelector('.text').textContent"
LAST_NOTICE = f"{LAST_ANSWER}.querySelector('.notice:not([hidden]) p')?.textContent ?? ''"

PLANNED_ANSWERS = """
(() => {
  const real = window.fetch;
  window.sent = [];
  window.planned = [];
  const stream = ({ events, cut, pause = 0 }, signal) => new ReadableStream({
    async start(controller) {
      signal.addEventListener("abort", () => controller.error(signal.reason));
      const encoder = new TextEncoder();
      for (const event of events) {
        await new Promise((done) => setTimeout(done, pause));
        if (signal.aborted) return;
        const text = { choices: [{ index: 0, delta: { content: event }, finish_reason: null }] };
        const data = JSON.stringify(typeof event === "string" ? text : event);
        controller.enqueue(encoder.encode(`data: ${data}\\n\\n`));
      }
      if (cut) return controller.error(new TypeError("network error"));
      controller.enqueue(encoder.encode("data: [DONE]\\n\\n"));
      controller.close();
    },
  });
  window.fetch = async (path, options) => {
    if (path !== "v1/chat/completions") return real(path, options);
    window.sent.push({ ...JSON.parse(options.body), raw: options.body });
    const plan = window.planned.shift();
    if (!plan) return real(path, options);
    if (plan.unreachable) throw new TypeError("Failed to fetch");
    if (plan.error) {
      return new Response(JSON.stringify({ error: plan.error }), { status: plan.status, headers: plan.headers ?? {} });
    }
    return new Response(stream(plan, options.signal), { status: 200 });
  };
})()
"""
END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 40,
        "completion_tokens": 3,
        "total_tokens": 43,
        "prompt_tokens_details": {"cached_tokens": 32},
    },
}

Scenario = Callable[[Browser, Any], Awaitable[None]]


def in_browser(scenario: Scenario) -> Callable[[Any], None]:
    """A test that runs the scenario on the opened page, in a browser of its own."""

    async def drive(server: Any) -> None:
        async with Browser() as browser:
            await browser.show(1280, 800)
            await open_page(browser, server)
            await scenario(browser, server)

    def test(server: Any) -> None:
        asyncio.run(drive(server))

    test.__name__ = scenario.__name__
    test.__doc__ = scenario.__doc__
    return test


async def open_page(browser: Browser, server: Any) -> None:
    await browser.goto(server.url)
    await browser.wait_for("document.getElementById('state').dataset.state === 'ready'", 120)
    await browser.evaluate(PLANNED_ANSWERS)


async def say(browser: Browser, text: str, *, wait: bool = True) -> None:
    """Send a message by keyboard."""
    await browser.evaluate("document.getElementById('prompt').focus()")
    await browser.type(text)
    await browser.press("Enter")
    if wait:
        await browser.wait_for(IDLE, 120)


async def plan(browser: Browser, *answers: dict[str, Any]) -> None:
    """What the page gets for its next chat requests in place of the server's answer."""
    await browser.evaluate(f"window.planned = {json.dumps(answers)}")


async def fill(browser: Browser, name: str, value: str) -> None:
    await browser.evaluate(f"document.getElementById('set-{name}').select()")
    await browser.press("Backspace")
    await browser.type(value)


async def keep_conversation(browser: Browser, server: Any, *messages: str) -> None:
    """Open the page with a conversation that was kept earlier: question, answer, question, answer."""
    kept = [
        {"role": "assistant" if at % 2 else "user", "content": text, "finish": "stop"}
        for at, text in enumerate(messages)
    ]
    # The page saves when it is left, so the storage is written on the way in.
    script = f"sessionStorage.setItem('slipstream.messages', JSON.stringify({json.dumps(kept)}))"
    added = await browser.command("Page.addScriptToEvaluateOnNewDocument", source=script)
    await open_page(browser, server)
    await browser.command("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])
