"""Rendering a model's chat template, and tokenizing the result safely.

The Jinja environment is the one that Hugging Face's templates are written for. Where the field leaves room, the rules
of transformers hold: no BOS is added to a rendered chat (templates write it), fields that are None are left out.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from slipstream.core.errors import InvalidRequestError, LoadError
from slipstream.text.chat_messages import (
    checked_dicts,
    checked_messages,
    checked_variables,
    with_arguments_as_text,
    with_last_text,
)
from slipstream.text.look_alikes import strings_in, undisguised

if TYPE_CHECKING:
    import jinja2
    import jinja2.sandbox

    from slipstream.text.tokenizer import Tokenizer

# Put at the end of a message that is to be continued; the rendered text is cut there. The space shows whether the
# template trims messages.
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True)
class ChatInputs:
    """What a template sees of a request, checked."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    extra: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja text.
        bos_token: the text of BOS, "" if the model has none.
        eos_token: the text of EOS.
        special_tokens: further variables for the template, such as pad_token.

    Attributes:
        variables: the names that the template reads from outside.

    Raises:
        LoadError: the source is not valid Jinja.
    """

    def __init__(
        self, source: str, *, bos_token: str = "", eos_token: str = "", special_tokens: Mapping[str, str] | None = None
    ) -> None:
        import jinja2

        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token, **(special_tokens or {})}
        try:
            self._template = _environment().from_string(source)
            tree = _environment().parse(source)
            self.variables = _variables_of(tree)
        except (jinja2.TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            where = f" in line {line}" if line else ""
            raise LoadError(f"The chat template is not valid Jinja{where}: {_one_line(error)}.") from error
        self.takes_parts = _iterates_over_content(tree)
        self.constants = _string_constants(tree)

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str | None = None) -> ChatTemplate | None:
        """The template of a model, or `source` in its place; None if there is neither."""
        source = source if source is not None else tokenizer.chat_template
        if source is None:
            return None
        eos = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
        return cls(source, bos_token=tokenizer.text_of(tokenizer.bos_id), eos_token=tokenizer.text_of(eos))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Renders a chat.

        Args:
            messages: objects with `role` and `content` (a text, a list of text parts, or None beside tool calls).
                Parts go to the template as a list if it loops over contents, else joined with newlines.
            tools: JSON schemas of functions.
            documents: objects with `title` and `text`.
            add_generation_prompt: end with the beginning of the assistant's answer.
            continue_final_message: end within the last message; excludes `add_generation_prompt`.
            kwargs: further variables for the template, such as `enable_thinking`.

        Raises:
            InvalidRequestError: a message has a wrong shape, or the template does not accept the messages.
        """
        return self.render_inputs(
            self.check(
                messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **kwargs,
            )
        )

    def check(
        self,
        messages: Any,
        /,
        *,
        tools: Any = None,
        documents: Any = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> ChatInputs:
        """The checked inputs of `render`, same arguments and errors."""
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "A chat can continue its last message or begin a new answer, not both.", param="continue_final_message"
            )
        return ChatInputs(
            messages=checked_messages(messages, keep_parts=self.takes_parts),
            tools=checked_dicts(tools, "tools"),
            documents=checked_dicts(documents, "documents"),
            extra=checked_variables(kwargs, reserved=self._tokens),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def check_read(self, variable: str, param: str) -> None:
        """Raise InvalidRequestError for a variable that changes nothing, since the template never reads it.

        `render` takes such variables, as transformers does: what comes with a model may set more than a template reads.
        """
        if variable not in self.variables:
            raise InvalidRequestError(
                f"The model's chat template does not read {str(variable)[:40]!r}, so {param} must not set it.",
                param=param,
            )

    def render_inputs(self, inputs: ChatInputs) -> str:
        """Renders checked inputs."""
        messages, final = inputs.messages, ""
        if inputs.continue_final_message:
            messages, final = with_last_text(messages, _CONTINUE)
        try:
            try:
                text = self._rendered(messages, inputs)
            except Exception:
                # Some templates, such as DeepSeek's, add the arguments of tool calls to a text.
                as_text = with_arguments_as_text(messages)
                if as_text is None:
                    raise
                text = self._rendered(as_text, inputs)
        except Exception as error:  # a template may fail in any way, and does so because of the messages
            raise InvalidRequestError(
                f"The chat template does not accept these messages: {_one_line(error)}.", param="messages"
            ) from error
        return _cut_at_end_of(final, text) if inputs.continue_final_message else text

    def _rendered(self, messages: list[dict[str, Any]], inputs: ChatInputs) -> str:
        return self._template.render(
            messages=messages,
            tools=inputs.tools,
            documents=inputs.documents,
            add_generation_prompt=inputs.add_generation_prompt,
            **self._tokens,
            **inputs.extra,
        )


def encode_chat(
    tokenizer: Tokenizer, template: ChatTemplate | None, messages: Sequence[Mapping[str, Any]], /, **options: Any
) -> list[int]:
    """Renders a chat and tokenizes it: only what the template writes can become control tokens.

    The signs that fence control tokens are disguised in messages, tools, documents and template variables while the
    template is rendered, and shown again once the template's own control tokens have been found. Without look-alikes
    the ids equal those of transformers' `apply_chat_template`.

    Not covered: a template that itself puts a control token together around a request's text. Roles, where templates
    do so, can only be the known ones.

    Args:
        tokenizer: of the model.
        template: None if the model has none.
        messages: see `ChatTemplate.render`, as for the options.

    Raises:
        InvalidRequestError: see `ChatTemplate.render`; or there is no template.
    """
    if template is None:
        raise InvalidRequestError(
            "This model has no chat template, so it takes no messages; give it one with --chat-template.",
            param="messages",
        )
    inputs = template.check(messages, **options)
    given = [inputs.messages, inputs.tools, inputs.documents, inputs.extra]
    look_alikes = tokenizer.look_alikes
    if not look_alikes.possible_in(strings_in(given)):
        text = template.render_inputs(inputs)
        return tokenizer.encode(text, add_special_tokens=False, parse_control=True, param="messages")
    stand_ins = look_alikes.stand_ins([template.source, *strings_in(given)])
    names = ("messages", "tools", "documents", "extra")
    changes = {name: look_alikes.disguise(getattr(inputs, name), stand_ins, template.constants) for name in names}
    try:
        text = template.render_inputs(replace(inputs, **changes))
    except InvalidRequestError as error:
        raise InvalidRequestError(undisguised(error.message, stand_ins), param=error.param) from error
    return _encode_disguised(tokenizer, text, stand_ins)


def _encode_disguised(tokenizer: Tokenizer, text: str, stand_ins: dict[str, str]) -> list[int]:
    """Ids of a rendered text: control tokens where they stand undisguised, plain text between them."""
    ids: list[int] = []
    done = 0
    for start, end, token in [*tokenizer.control_spans(text, param="messages"), (len(text), len(text), -1)]:
        plain = undisguised(text[done:start], stand_ins)
        if plain:
            ids += tokenizer.encode(plain, add_special_tokens=False, continues=done > 0, param="messages")
        if token >= 0:
            ids.append(token)
        done = end
    return ids


def _cut_at_end_of(final: str, text: str) -> str:
    """Cuts a rendered text where its last message ends."""
    tag = _CONTINUE.strip()
    at = text.rfind(tag)
    if at < 0 or final.strip() not in text:
        raise InvalidRequestError(
            "The chat template leaves out or changes the last message, so it cannot be continued.",
            param="continue_final_message",
        )
    # Without its space, the tag shows that the template trims messages, and so would have trimmed this one.
    return text[:at] if text.startswith(_CONTINUE, at) else text[:at].rstrip()


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text.rstrip(".")[:300]


def _variables_of(tree: jinja2.nodes.Template) -> frozenset[str]:
    """The variables that a template reads from outside, as `jinja2.meta.find_undeclared_variables` finds them.

    That function's own generator computes constant expressions; this one does not.
    """
    from jinja2.meta import TrackingCodeGenerator

    environment = _environment()

    class Tracking(environment.code_generator_class, TrackingCodeGenerator):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            TrackingCodeGenerator.__init__(self, environment)
            self.optimizer = None

    tracking = Tracking()
    tracking.visit(tree)
    return frozenset(tracking.undeclared_identifiers)


def _iterates_over_content(tree: jinja2.nodes.Template) -> bool:
    """Whether a loop of the template runs over a message's content: then it understands lists of parts."""
    from jinja2 import nodes

    for loop in tree.find_all(nodes.For):
        for node in (loop.iter, *loop.iter.find_all(nodes.Node)):
            if isinstance(node, nodes.Getattr) and node.attr == "content":
                return True
            if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content":
                return True
            if isinstance(node, nodes.Name) and node.name == "content":
                return True
    return False


def _string_constants(tree: jinja2.nodes.Template) -> frozenset[str]:
    """The strings that a template may look for in a message, besides those that it only writes."""
    from jinja2 import nodes

    return frozenset(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))


@cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it: Hugging Face's settings, filters and functions, in a sandbox."""
    import jinja2
    import jinja2.ext
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """{% generation %} ... {% endgeneration %} marks the model's words for training; here only the body counts."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

        def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    class NoFolding(jinja2.compiler.CodeGenerator):
        """Jinja computes constant expressions while it compiles; a template must compute nothing when it is loaded."""

        def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
            if not isinstance(node, nodes.TemplateData):
                raise nodes.Impossible
            return super()._output_child_to_const(node, frame, finalize)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    environment.code_generator_class = NoFolding
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment
