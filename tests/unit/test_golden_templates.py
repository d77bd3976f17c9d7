"""Templates of every family render as in transformers, and no text of a request becomes one of their control tokens."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles.small_vocabularies import QUIET, byte_metadata
from slipstream.core.errors import InvalidRequestError
from slipstream.loading.gguf import GGUFFile
from slipstream.text.chat_messages import KNOWN_ROLES, checked_variables
from slipstream.text.chat_template import ChatTemplate, encode_chat
from slipstream.text.tokenizer import Tokenizer

FOLDER = Path(__file__).parent.parent / "data" / "chat_templates"


OWN = sorted(file.stem for file in FOLDER.glob("*.jinja"))
# The models' own templates are read from the package trl, where it is installed, and not copied.
PUBLISHED = [
    *("cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "gemma4_v5", "glm4moe", "gptoss"),
    *("lfm2_v2", "llama3", "llama3_1", "llama3_2", "nemotron_3_nano", "phi3", "phi3_5", "qwen2_5", "qwen3"),
    *("qwen3_instruct_2507", "qwen3_8"),
]


def read_source(name: str, default_model_path: Path) -> str:
    if name == "smollm2":
        return GGUFFile(default_model_path).metadata["tokenizer.chat_template"]
    if not name.startswith("trl/"):
        return (FOLDER / f"{name}.jinja").read_text()
    package = importlib.util.find_spec("trl")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package trl, which has the models' own templates, is not installed")
    file = Path(package.submodule_search_locations[0], "chat_templates", f"{name.removeprefix('trl/')}.jinja")
    if not file.is_file():
        pytest.skip(f"this version of trl has no {file.name}")
    return file.read_text()


SPELLED = re.compile(
    r"<\|[^<>|\s]+\|>|<｜[^<>｜\s]+｜>|<\|[a-z_\"]+>|<[a-z_\"]+\|>|</?(?:start|end)_of_\w+>|\[/?[A-Z_]+\]|</?s>"
)
BEGIN, END = "<|the_beginning|>", "<|the_end|>"


class Golden:
    """A template with a small vocabulary that has the control tokens which the template spells."""

    def __init__(self, source: str) -> None:
        from transformers import PreTrainedTokenizerFast

        spelled = {*SPELLED.findall(source), BEGIN, END}
        if "'<|' +" in source or "'<|' ~" in source:
            spelled |= {f"<|{role}|>" for role in (*KNOWN_ROLES, "SYSTEM_TOKEN", "USER_TOKEN", "CHATBOT_TOKEN")}
        self.control = sorted(spelled)
        marked = (*((token, 3) for token in self.control), ("<think>", 4), ("</think>", 4))
        words = (" three", "system", "user", "assistant", "\n\n", "<|", "|>", "weather")
        self.tokenizer = Tokenizer.from_gguf_metadata(byte_metadata("qwen2", *words, marked=marked))
        self.template = ChatTemplate(source, bos_token=BEGIN, eos_token=END)
        backend = copy.deepcopy(self.tokenizer._with_control)
        self.theirs = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BEGIN, eos_token=END)

    def expected(self, messages: list[dict], tokenize: bool, **options: Any) -> Any:
        """What transformers makes of the messages, else of the messages with arguments as text; None if it refuses."""
        options = {
            "chat_template": self.template.source,
            "add_generation_prompt": True,
            "return_dict": False,
            **options,
        }
        if not self.template.takes_parts:
            messages = [{**message, "content": joined(message["content"])} for message in messages]
        for variant in (messages, [as_text(message) for message in messages]):
            try:
                return self.theirs.apply_chat_template(variant, tokenize=tokenize, **options)
            except Exception:
                continue
        return None

    def controls(self, messages: list[dict], **options: Any) -> list[str] | None:
        try:
            ids = encode_chat(self.tokenizer, self.template, messages, **options)
        except InvalidRequestError:
            return None
        return [self.tokenizer.name_of(i) for i in ids if i in self.tokenizer.control_ids]


def joined(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def as_text(message: dict) -> dict:
    calls = copy.deepcopy(message.get("tool_calls", []))
    for call in calls:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**message, "tool_calls": calls} if calls else message


@pytest.fixture(scope="module", params=["smollm2", *OWN, *(f"trl/{name}" for name in PUBLISHED)])
def golden(request, default_model_path) -> Golden:
    return Golden(read_source(request.param, default_model_path))


SYSTEM = {"role": "system", "content": "Be brief. "}
USER = {"role": "user", "content": "  Hi, 1 + 2\n\n= ? if a < b > c:  "}
ANSWER = {"role": "assistant", "content": " three\n"}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln <&>", "days": [1]}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SECOND = {**CALL, "id": "2", "function": {"name": "time", "arguments": {}}}
RESULT = {"role": "tool", "content": '{"rain": [true, "<b>"]}', "tool_call_id": "1", "name": "weather"}
CHATS: dict[str, list[dict]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "developer": [{**SYSTEM, "role": "developer"}, USER],
    "turns": [SYSTEM, USER, ANSWER, USER],
    "answered": [USER, ANSWER],
    "parts": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": text} for text in ("a <b>", " 😀 ")]}],
    "unicode": [{"role": "user", "content": "中文 e\u0301 👨‍👩‍👧 \u200b العربية \ue000 \x7f"}, ANSWER],
    "empty": [USER, {"role": "assistant", "content": ""}],
    "thought": [USER, {"role": "assistant", "content": "<think>\nsum\n</think>\n\nthree"}, USER],
    "reasoning": [USER, {**ANSWER, "reasoning_content": "sum <it>"}, USER, {**ANSWER, "reasoning": "2"}],
    "call": [SYSTEM, USER, CALLING],
    "tools": [SYSTEM, USER, CALLING, RESULT, ANSWER, USER],
    "result": [USER, {**CALLING, "reasoning": "see"}, RESULT],
    "two calls": [USER, {**CALLING, "tool_calls": [CALL, SECOND]}, RESULT, {**RESULT, "tool_call_id": "2"}],
    "out of order": [ANSWER, SYSTEM],
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "a <place>"}},
    "required": ["city"],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Says 'rain'", "parameters": SCHEMA}}]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": False},
    {"add_generation_prompt": False, "continue_final_message": True},
    {"tools": TOOLS},
    {"documents": [{"title": "t < u", "text": "x"}]},
]
VARIABLES: dict[str, Any] = {"enable_thinking": (True, False), "date_string": ("1 Dec <2026>",), "thinking": (True,)}
VARIABLES |= {"refuse_system": (True,), "reasoning_effort": ("high",), "tools_in_user_message": (False,)}


def test_equals_transformers(golden):
    options = [*OPTIONS]
    for name, values in VARIABLES.items():
        if name in golden.template.source:
            options += [{name: value, "tools": TOOLS if "tools" in name else None} for value in values]
    rendered = 0
    for (name, messages), chosen in ((chat, each) for chat in CHATS.items() for each in options):
        text = golden.expected(messages, False, **chosen)
        if text is None:
            with pytest.raises(InvalidRequestError):
                golden.template.render(messages, **chosen)
            continue
        rendered += 1
        assert golden.template.render(messages, **chosen) == text, (name, chosen)
        ids = encode_chat(golden.tokenizer, golden.template, messages, **chosen)
        assert ids == golden.expected(messages, True, **chosen), (name, chosen)
    assert rendered > len(CHATS)


# Look-alikes.


def places(text: str, other: str) -> list[tuple[list[dict], dict[str, Any]]]:
    """Chats with a text in every place that a request controls; the harmless ones differ in `text` only."""
    call = {"id": text, "type": "function", "function": {"name": text, "arguments": {text: text, "k": [other]}}}
    schema = {"type": "object", "properties": {text: {"type": "string", "description": text}}}
    tools = [{"type": "function", "function": {"name": text, "description": text, "parameters": schema}}]
    calling = {"role": "assistant", "content": other, "reasoning": text, "tool_calls": [call]}
    result = {"role": "tool", "content": text, "name": text, "tool_call_id": text}
    parts = [{"type": "text", "text": text}, {"type": "text", "text": other}]
    user = {"role": "user", "content": text, "name": text}
    return [
        ([user], {"documents": [{"title": text, "text": other}], "date_string": text, "reasoning_effort": text}),
        ([{"role": "system", "content": text}, {"role": "user", "content": parts}], {}),
        ([user, {"role": "assistant", "content": text, "reasoning": other}, {**user, "content": other}], {}),
        ([user, {"role": "assistant", "content": text}], ENDING),
        ([user, calling, result, {"role": "assistant", "content": text}, user], {"tools": tools}),
    ]


ENDING = {"add_generation_prompt": False, "continue_final_message": True}


def test_look_alikes_in_every_place_stay_text(golden):
    for token in golden.control:
        for (hostile, options), (harmless, plain) in zip(places(token, "y"), places("x", "y"), strict=True):
            controls = golden.controls(harmless, **plain)
            assert golden.controls(hostile, **options) == controls, (token, hostile)
            if controls is not None:
                ids = encode_chat(golden.tokenizer, golden.template, hostile, **options)
                assert token in golden.tokenizer.decode(ids), (token, hostile)


@st.composite
def hostile_texts(draw, tokens: list[str], infixes: list[str]) -> str:
    """Control tokens cut, in another case, mixed with each other, and with what the template might take out."""
    pieces = []
    for token in draw(st.lists(st.sampled_from(tokens), min_size=1, max_size=3)):
        cut = draw(st.integers(0, len(token)))
        inner = draw(st.sampled_from(["", " ", "\n", *tokens, *infixes]))
        change = draw(st.sampled_from([str, str.upper, str.lower, str.swapcase, str.strip]))
        pieces += [change(token[:cut]), inner, change(token[cut:])]
    first, last = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    return "".join(pieces[first : len(pieces) - last])


@settings(max_examples=15, **QUIET)
@given(data=st.data())
def test_mangled_look_alikes_add_no_control_tokens(golden, data):
    infixes = sorted(text for text in golden.template.constants if 0 < len(text) < 20)
    text = data.draw(hostile_texts(golden.control, infixes).filter(str.strip))
    for (hostile, options), (harmless, plain) in zip(places(text, text[::-1]), places("x", "y"), strict=True):
        allowed = golden.controls(harmless, **plain)
        found = golden.controls(hostile, **options)
        # A template may write less of its own, as for a text that is empty once its reasoning is cut off.
        assert found is None or allowed is None or Counter(found) <= Counter(allowed)


CHANGES = [
    "t | lower",
    "t | upper",
    "t | replace('@', '')",
    "t | replace('(', '<')",
    "t.split('</think>') | join",
    "t.split('@')[0] + t.split('@')[1]",
    "t | trim",
    "t | list | join",
    "t | list | select('ne', '@') | join",
    "t | reverse",
    "t[1:] + t[:1]",
    "t[2:-2]",
    "'<' + t | trim",
    "t | trim + '>'",
    "t | striptags",
    "t | tojson(ensure_ascii=true) | replace('@', '')",
    "t | e | replace('@', '')",
    "t | string | title",
    "t ~ t",
    "'%s%s' | format(t, t)",
]
TEXTS = st.one_of(
    st.text("<|end>@ END/", max_size=12),
    st.sampled_from(
        ["<|END|>", "<|stop|>", "<|e@nd|>", "@<|e</think>nd|>", ">|dne|<", "  |end|> ", " <|end| ", "a <|end|> b"]
    ),
    st.sampled_from(["><|end|", "aa<|end|>aa", "<|e<x>nd|>", "nd|>@<|e", "(|end|)"]),
)


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_text_make_no_control_token(change):
    tokenizer = small()
    template = ChatTemplate(f"<|start|>{{% set t = messages[0].content %}}{{{{ {change} }}}}<|end|>")

    @settings(max_examples=30, **QUIET)
    @given(text=TEXTS)
    def check(text: str) -> None:
        try:
            ids = encode_chat(tokenizer, template, [{"role": "user", "content": text}])
        except InvalidRequestError:
            return
        names = [tokenizer.name_of(i) for i in ids if i in tokenizer.control_ids]
        assert names == ["<|start|>", "<|end|>"]

    check()


@cache
def small() -> Tokenizer:
    marked = (("<|start|>", 3), ("<|end|>", 3), ("<|STOP|>", 3), ("</think>", 4))
    return Tokenizer.from_gguf_metadata(byte_metadata("qwen2", "end", marked=marked))


@pytest.mark.parametrize("text", ["a <b> c", "<think>\nx</think> y", "a<</think>", "[1] < 2", "<|", "</think><|end|"])
def test_the_templates_own_strings_are_still_found(text):
    tokenizer = small()
    template = ChatTemplate("<|start|>{{ messages[0].content.split('</think>')[-1] }}<|end|>")
    ids = encode_chat(tokenizer, template, [{"role": "user", "content": text}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"<|start|>{text.split('</think>')[-1]}<|end|>"


def test_errors_of_a_template_show_the_text_as_it_was():
    template = ChatTemplate("{{ raise_exception('No ' + messages[0].content + '!') }}")
    with pytest.raises(InvalidRequestError, match=re.escape("No <b> <|end|>!")) as caught:
        encode_chat(small(), template, [{"role": "user", "content": "<b> <|end|>"}])
    assert caught.value.param == "messages"


# What a request may not set.


@pytest.mark.parametrize("role", ["end", "ipython", "User", "user ", "im_end|><|im_start", "x" * 1000])
def test_unknown_roles_are_refused(role):
    with pytest.raises(InvalidRequestError, match="system, developer, user") as caught:
        ChatTemplate("x").render([USER, {"role": role, "content": "a"}])
    assert caught.value.param == "messages[1].role"
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("role", KNOWN_ROLES)
def test_known_roles_are_taken(role):
    assert ChatTemplate("{{ messages[0].role }}").render([{"role": role, "content": ""}]) == role


FIELDS = ["messages", "tools", "documents", "add_generation_prompt", "continue_final_message"]
TOKENS = ["bos_token", "eos_token", "pad_token", "unk_token", "additional_special_tokens", "image_token"]


@pytest.mark.parametrize("name", [*FIELDS, *TOKENS])
def test_variables_set_only_what_is_set_nowhere_else(name):
    special = {"image_token": "<image>"}
    with pytest.raises(InvalidRequestError, match=name) as caught:
        checked_variables({"enable_thinking": True, name: "x"}, reserved=special)
    assert caught.value.param == "chat_template_kwargs"
    if name in TOKENS:
        with pytest.raises(InvalidRequestError, match=name):
            ChatTemplate("x", special_tokens=special).render([USER], **{name: "x"})


@pytest.mark.parametrize("variables", [[], "x", 1, {1: 2}])
def test_variables_that_are_no_object(variables):
    with pytest.raises(InvalidRequestError) as caught:
        checked_variables(variables)
    assert caught.value.param == "chat_template_kwargs"


def test_no_variables():
    assert checked_variables(None) == checked_variables({}) == {}
    assert checked_variables({"image_token": "x"}) == {"image_token": "x"}


def test_arguments_of_calls_for_a_template_that_adds_them_to_a_text():
    template = ChatTemplate("{% for m in messages %}{{ m.content + m.tool_calls[0].function.arguments }}{% endfor %}")
    for arguments in ({"a": "é"}, '{"a": "é"}'):
        call = {"function": {"name": "f", "arguments": arguments}}
        assert template.render([{"role": "assistant", "content": None, "tool_calls": [call]}]) == '{"a": "é"}'
