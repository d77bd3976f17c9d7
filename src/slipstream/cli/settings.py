"""Where a setting's value comes from: the command line, else the environment, else a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.cli.flags import BY_NAME, ENGINE, FLAGS, SAMPLING, SERVER, Flag, parse
from slipstream.core.config import env_value
from slipstream.core.errors import ConfigError


@dataclass
class Settings:
    """What was given, by whatever way; what nobody gave is absent. `flags` names what the command line gave."""

    engine: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)

    def name_model(self, model: str) -> None:
        """Take the model that was given as an argument; it is worth as much as --model."""
        if "model" in self.flags:
            raise ConfigError(f"the model is given twice: {self.engine['model']} and {model}", param="model")
        self.engine["model"] = model


def resolve(names: Iterable[str], given: Mapping[str, Any]) -> Settings:
    """Settings of a command that takes the flags `names`. `given` holds the command line's values by flag name.

    Raises ConfigError for a value that cannot be read and for an unknown key in the file.
    """
    names = list(names)
    path = given.get("config") or env_value("config")
    from_file = read_file(Path(path)) if path else {}
    settings = Settings(flags={name for name in names if given.get(name) is not None})
    with_sampling = any(BY_NAME[name].group == SAMPLING for name in names)
    for name in names:
        flag = BY_NAME[name]
        value = _value(flag, given, from_file, str(path))
        if value is None:
            continue
        # One seed is enough: where requests are made here, it is theirs.
        if flag.group == ENGINE and not (name == "seed" and with_sampling):
            settings.engine[name] = value
        elif flag.group == SERVER:
            settings.server[name] = value
        else:
            settings.sampling[name] = value
    return settings


def _value(flag: Flag, given: Mapping[str, Any], from_file: Mapping[str, Any], path: str) -> Any:
    if given.get(flag.name) is not None:
        return parse(flag, given[flag.name], flag.option)
    own = env_value(flag.name)
    if own is not None:
        return parse(flag, own, flag.env)
    if from_file.get(flag.name) is not None:
        return parse(flag, from_file[flag.name], f"{path}: {flag.name}")
    return None


def read_file(path: Path) -> dict[str, Any]:
    """Values of a YAML file by flag name, its other spellings included. Raises ConfigError."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: {path} cannot be read ({error.strerror})", param="config") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config: {path} is not YAML ({reason})", param="config") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {path} must hold settings of the form `name: value`", param="config")
    spellings = _spellings()
    values: dict[str, Any] = {}
    for key, value in content.items():
        found = spellings.get(str(key).replace("_", "-"))
        if found is None:
            raise ConfigError(f"--config: {path} has an unknown setting {key!r}", param=str(key))
        name, inverted = found
        if name in values:
            raise ConfigError(f"--config: {path} gives {name} twice", param=name)
        if inverted:
            value = not parse(BY_NAME[name], value, f"{path}: {key}")
        values[name] = value
    return values


def _spellings() -> dict[str, tuple[str, bool]]:
    """Every spelling without its dashes -> flag name, and whether it means the opposite."""
    spellings: dict[str, tuple[str, bool]] = {}
    for flag in FLAGS:
        if flag.name == "config":
            continue
        for spelling in (flag.option, *flag.aliases):
            spellings[spelling.removeprefix("--")] = (flag.name, False)
        for spelling in flag.off_aliases:
            spellings[spelling.removeprefix("--")] = (flag.name, True)
    return spellings
