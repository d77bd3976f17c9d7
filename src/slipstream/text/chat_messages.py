"""Checking the messages of a chat and bringing them into the shape that templates expect."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from slipstream.core.errors import InvalidRequestError

# Names under which clients send an assistant's reasoning; templates read the first or the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Templates write roles between the fences of control tokens, as in "<|" + role + "|>": no role may be made up.
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Variables of a template that a request sets by its own fields, or the model sets.
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    | {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
    | {"additional_special_tokens"}
)


def checked_messages(messages: Any, *, keep_parts: bool) -> list[dict[str, Any]]:
    """New message dicts, ready for a template.

    Fields that are None are left out, text parts are joined with newlines (`keep_parts`: left as a list), the
    arguments of tool calls are turned from JSON text into objects, and reasoning is given under all its names.

    Raises:
        InvalidRequestError: a message has a wrong shape; `param` is the path to it, e.g. messages[2].content[0].type.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequestError("The messages must be a list of at least one message.", param="messages")
    return [_checked(message, f"messages[{index}]", keep_parts) for index, message in enumerate(messages)]


def checked_dicts(values: Any, param: str) -> list[dict[str, Any]] | None:
    """Tools or documents: a list of objects, or None."""
    if values is None:
        return None
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, dict) for value in values):
        raise InvalidRequestError(f"The {param} must be a list of objects.", param=param)
    return list(values)


def checked_variables(variables: Any, *, reserved: Collection[str] = ()) -> dict[str, Any]:
    """Further variables for a template (`chat_template_kwargs`): an object that sets nothing which is set elsewhere.

    Args:
        variables: from a request; None stands for none.
        reserved: names that the model sets, beside those that are always refused.

    Raises:
        InvalidRequestError: `variables` is no object, or has a name that is reserved.
    """
    param = "chat_template_kwargs"
    if variables is None:
        return {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise InvalidRequestError("The chat_template_kwargs must be an object.", param=param)
    for name in variables:
        if name in _RESERVED or name in reserved:
            raise InvalidRequestError(f"chat_template_kwargs cannot set {name}, which is set elsewhere.", param=param)
    return dict(variables)


def _checked(message: Any, path: str, keep_parts: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{path} must be an object with a role and a content.", param=path)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{path}.role must be a text.", param=f"{path}.role")
    if role not in KNOWN_ROLES:
        raise InvalidRequestError(
            f"{path}.role is {role[:40]!r}, but must be one of {', '.join(KNOWN_ROLES)}.", param=f"{path}.role"
        )
    kept = {key: value for key, value in message.items() if value is not None}
    if "content" in kept:
        kept["content"] = _content(kept["content"], f"{path}.content", keep_parts)
    elif not kept.get("tool_calls"):
        raise InvalidRequestError(
            f"{path}.content must be a text or a list of text parts; only a message with tool calls may lack it.",
            param=f"{path}.content",
        )
    if "tool_calls" in kept:
        kept["tool_calls"] = _tool_calls(kept["tool_calls"], f"{path}.tool_calls")
    reasoning = next((kept[name] for name in _REASONING if name in kept), None)
    if reasoning is not None:
        kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
    return kept


def _content(content: Any, path: str, keep_parts: bool) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise InvalidRequestError(f"{path} must be a text or a list of text parts.", param=path)
    for index, part in enumerate(content):
        where = f"{path}[{index}]"
        if not isinstance(part, dict):
            raise InvalidRequestError(f"{where} must be an object with a type.", param=where)
        if part.get("type") != "text":
            raise InvalidRequestError(
                f"{where}.type is {part.get('type')!r}, but this model takes text only.", param=f"{where}.type"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{where}.text must be a text.", param=f"{where}.text")
    if keep_parts:
        return [dict(part) for part in content]
    return "\n".join(part["text"] for part in content)


def _tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, (list, tuple)) or not all(isinstance(call, dict) for call in calls):
        raise InvalidRequestError(f"{path} must be a list of objects.", param=path)
    return [_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: dict[str, Any], path: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return dict(call)
    where = f"{path}.function.arguments"
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{where} must be a JSON object.", param=where)
    return {**call, "function": {**function, "arguments": arguments}}


def with_arguments_as_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """New messages with the arguments of tool calls as JSON text, and content beside them; None without tool calls."""
    if not any(message.get("tool_calls") for message in messages):
        return None
    return [
        {"content": "", **message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def with_last_text(messages: Sequence[dict[str, Any]], suffix: str) -> tuple[list[dict[str, Any]], str]:
    """New messages with `suffix` after the text of the last one, and that text without it.

    Raises:
        InvalidRequestError: the last message has no text.
    """
    last = messages[-1]
    content = last.get("content")
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": content + suffix}], content
    if not content:
        path = f"messages[{len(messages) - 1}].content"
        raise InvalidRequestError("The last message has no text to continue.", param=path)
    text = content[-1]["text"]
    parts = [*content[:-1], {**content[-1], "text": text + suffix}]
    return [*messages[:-1], {**last, "content": parts}], text
