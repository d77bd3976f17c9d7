"""Makes command-line options of the flags in the table."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from slipstream.cli.flags import BY_NAME, Flag, Kind, shown_default
from slipstream.cli.settings import resolve
from slipstream.core.errors import ConfigError

_REPEATED = (Kind.TEXTS, Kind.IDS, Kind.BIASES)


def takes_flags(names: Iterable[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the flags `names` and --config. The command gets them resolved, as its argument `settings`."""
    names = list(names)
    spellings = [item for name in ("config", *names) for item in _spellings(BY_NAME[name])]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"]

        @functools.wraps(command)
        def wrapper(**arguments: Any) -> Any:
            given = _given(spellings, arguments)
            return command(**arguments, settings=resolve(names, given))

        parameters = own + [spelling.parameter for spelling in spellings]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


def _default(flag: Flag) -> str:
    """A flag's default for its help, unless its text says it or there is none."""
    default = shown_default(flag)
    return f" (default: {default})" if default and "default" not in flag.help else ""


class _Spelling:
    """One spelling of a flag as a parameter of its own, so that help shows the flag once."""

    def __init__(self, flag: Flag, key: str, declaration: str, *, inverted: bool = False, hidden: bool = True) -> None:
        self.flag = flag
        self.inverted = inverted
        self.declaration = declaration
        switch = flag.kind is Kind.SWITCH
        option = typer.Option(
            declaration,
            metavar=None if switch else flag.kind.value,
            help=flag.help + _default(flag),
            rich_help_panel=flag.group,
            show_default=False,
            hidden=hidden,
        )
        kind: Any = bool | None if switch else (list[str] | None if flag.kind in _REPEATED else str | None)
        self.parameter = inspect.Parameter(
            key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
        )


def _spellings(flag: Flag) -> list[_Spelling]:
    declaration = flag.option
    if flag.kind is Kind.SWITCH:
        declaration += "/" + flag.off_option
    spellings = [_Spelling(flag, f"flag_{flag.name}", declaration, hidden=False)]
    for index, alias in enumerate(flag.aliases):
        spellings.append(_Spelling(flag, f"flag_{flag.name}__{index}", alias))
    for index, alias in enumerate(flag.off_aliases):
        spellings.append(_Spelling(flag, f"flag_{flag.name}__off_{index}", alias, inverted=True))
    return spellings


def _given(spellings: list[_Spelling], arguments: dict[str, Any]) -> dict[str, Any]:
    """Take the flags out of a call's arguments. -> their values by flag name."""
    given: dict[str, Any] = {}
    by: dict[str, str] = {}
    for spelling in spellings:
        value = arguments.pop(spelling.parameter.name)
        if value is None or value == [] or value == ():
            continue
        name, shown = spelling.flag.name, spelling.declaration.partition("/")[0]
        if name in given:
            raise ConfigError(f"{by[name]} and {shown} are the same setting; give one of them", param=name)
        given[name], by[name] = (not value if spelling.inverted else value), shown
    return given
