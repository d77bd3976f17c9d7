"""How the chat page draws the text of an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from doubles.browser import Browser, find_chromium
from doubles.chat_page import LAST_ANSWER, LAST_TEXT, in_browser, keep_conversation
from doubles.served import ServedModel, Serving, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="no chromium on this machine"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(ServedModel(step_ms=30)) as running:
        yield running


HOSTILE = """<b>bold</b> <img src=x onerror="window.hurt=1"> <script>window.hurt=1</script>

[link](javascript:window.hurt=1) ![picture](https://example.invalid/x.png) [fine](https://example.org/)

| <i>a</i> | b |
|---|---|
| <svg onload="window.hurt=1"> | 2 |

```html"><script>window.hurt=1</script>
<script>window.hurt=1</script>
```
"""


@in_browser
async def test_markup_in_text_stays_text(browser: Browser, server: Any) -> None:
    await keep_conversation(browser, server, HOSTILE, HOSTILE)
    made = "document.querySelectorAll('.bubble *, .text :is(b, i, img, script), .text svg:not(.icon)').length"
    assert await browser.evaluate(made) == 0
    for text in ("<b>bold</b>", "<script>window.hurt=1</script>", "<svg onload="):
        assert text in await browser.evaluate(LAST_TEXT)
    links = await browser.evaluate(f"[...{LAST_ANSWER}.querySelectorAll('a')].map(link => link.href)")
    assert links == ["https://example.invalid/x.png", "https://example.org/"]
    assert await browser.evaluate("window.hurt === undefined")
    assert browser.problems == []


@in_browser
async def test_markdown(browser: Browser, server: Any) -> None:
    async def html(text: str) -> Any:
        return await browser.evaluate(
            "import('/page/markdown.js').then(({ MarkdownView }) => { const place = document.createElement('div');"
            f"new MarkdownView(place).update({json.dumps(text)});"
            "place.querySelectorAll('button').forEach(button => button.remove()); return place.innerHTML; })"
        )

    cases = {
        "plain": "<p>plain</p>",
        "a\nb\n\nc": "<p>a<br>b</p><p>c</p>",
        "# Title #\ntext": '<h4 class="level-1">Title</h4><p>text</p>',
        "**b** *i* ***both***": "<p><strong>b</strong> <em>i</em> <strong><em>both</em></strong></p>",
        "_u_ `c` ~~s~~": "<p><em>u</em> <code>c</code> <s>s</s></p>",
        "snake_case_name 2 * 3 * 4 ** 5": "<p>snake_case_name 2 * 3 * 4 ** 5</p>",
        r"\*no\* 1\. x": "<p>*no* 1. x</p>",
        "``a`b``": "<p><code>a`b</code></p>",
        "- a\n- b\n  - c\n\nend": "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><p>end</p>",
        "3. x\n4. y": '<ol start="3"><li>x</li><li>y</li></ol>',
        "1. a\n\n   more\n\n2. b": "<ol><li><p>a</p><p>more</p></li><li><p>b</p></li></ol>",
        "> q\n> r": "<blockquote><p>q<br>r</p></blockquote>",
        "---": "<hr>",
        "*unfinished": "<p>*unfinished</p>",
    }
    for text, expected in cases.items():
        assert await html(text) == expected, text
    code = await html("```py\nif a < b:\n\n    *x*")
    assert "<code>if a &lt; b:\n\n    *x*</code>" in code
    assert ">py<" in code
    nested = await html("1. a\n\n   ```\n   x\n     y\n   ```\n2. b")
    assert "<code>x\n  y</code>" in nested
    assert nested.count("<li>") == 2


@in_browser
async def test_text_that_grows_is_drawn_as_if_it_had_come_at_once(browser: Browser, server: Any) -> None:
    text = "# A\n\nSome *text*\n- one\n  - two\n\n1. x\n2. y\n\n| a | b |\n|--|--|\n| 1 | 2 |\n\n"
    text += "```c\nint x;\n```\n> q\n\nend"
    same = await browser.evaluate(
        "import('/page/markdown.js').then(({ MarkdownView }) => {"
        f"const text = {json.dumps(text)}; const grown = document.createElement('div');"
        "const view = new MarkdownView(grown);"
        "for (let end = 1; end <= text.length; end += 1) {"
        "  view.update(text.slice(0, end)); const whole = document.createElement('div');"
        "  new MarkdownView(whole).update(text.slice(0, end));"
        "  if (whole.innerHTML !== grown.innerHTML) return end; } return 'same'; })"
    )
    assert same == "same"


@in_browser
async def test_hostile_text_costs_no_time(browser: Browser, server: Any) -> None:
    texts = [mark * 20_000 for mark in ("*", "[", "> ", "| ", "- ", "_a", "~~a", "**a ", "[a](", "# ", "<")]
    for text in [*texts, "`" * 9_999 + "a", "# a" + " " * 20_000 + "b", "[a](" + "(" * 9_999]:
        took = await browser.evaluate(
            "import('/page/markdown.js').then(({ MarkdownView }) => { const start = performance.now();"
            f"new MarkdownView(document.createElement('div')).update({json.dumps(text)});"
            "return performance.now() - start; })"
        )
        assert took < 3000, f"{text[:8]!r}... took {took:.0f} ms"


@in_browser
async def test_answers_and_code_can_be_copied_as_they_were_written(browser: Browser, server: Any) -> None:
    code = "if a < b:\n\n    print('*x*')"
    answer = f"Some **text**:\n\n```python\n{code}\n```\n"
    await keep_conversation(browser, server, "Hello.", answer)
    await browser.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    await browser.evaluate("document.querySelector('[aria-label=\"Copy code\"]').click()")
    assert await browser.evaluate("window.copied") == code
    await browser.evaluate("document.querySelector('[aria-label=\"Copy answer\"]').click()")
    assert await browser.evaluate("window.copied") == answer
