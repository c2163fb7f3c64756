"""Turns the arguments of one command into settings, or into one sentence that says what is wrong with them.

Hydra composes the root file and the chosen groups; the values of single keys are read by `reading` and set afterwards,
so that a key such as `model` can be a group in one command and a path in another. Unknown keys are refused. Knows
nothing of run folders or the terminal.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.launch import catalogue
from llmtrain.launch.keys import KindError, check_kinds
from llmtrain.launch.reading import SweepError, read_value

if TYPE_CHECKING:
    from omegaconf import DictConfig

_ARGUMENT = re.compile(r"(?P<sign>\+\+|[+~]?)(?P<key>[A-Za-z_][\w./@-]*)=(?P<value>.*)", re.DOTALL)


class SettingsError(ValueError):
    """The settings of a command are wrong; the message is one sentence for the user."""


class UnknownKeyError(SettingsError):
    """There is no such key, so perhaps the argument, which it holds, was no setting."""

    def __init__(self, message: str, argument: str) -> None:
        super().__init__(message)
        self.argument = argument


@dataclass(frozen=True)
class Composed:
    """The settings of one command, and which option each of its groups has."""

    settings: DictConfig
    choices: dict[str, str | None]


def is_override(argument: str) -> bool:
    """Whether an argument has the form `key=value` (or Hydra's `+key=value`, `~key`)."""
    return bool(_ARGUMENT.fullmatch(argument)) or bool(re.fullmatch(r"~[A-Za-z_][\w./@-]*", argument))


def compose(root: str, overrides: Sequence[str], configs: Path | None = None) -> Composed:
    """Composes the settings of a command.

    Args:
        root: The command, which is also the name of its root file.
        overrides: `key=value` arguments as the user wrote them; the last one for a key wins.
        configs: The folder of the YAML files; the package's own unless given.

    Raises:
        SettingsError: An unknown key or option, a value of the wrong kind, or a required key that is missing.
    """
    configs = configs or catalogue.config_dir()
    groups = catalogue.read_groups(configs, root)
    choices: list[str] = []
    values: list[tuple[str, str]] = []
    for argument in overrides:
        key, value = _split(argument)
        if key in groups:
            _check_option(groups[key], value)
            choices.append(f"{key}={value}")
        else:
            values.append((key, value))
    composed = _compose_groups(root, choices, configs)
    for key, value in values:
        _set(composed.settings, key, value, groups, root)
    _check_complete(composed, configs, root)
    return composed


def declared_sweeps(root: str, overrides: Sequence[str], configs: Path | None = None) -> dict[str, str]:
    """What the YAML files sweep over themselves (`hydra.sweeper.params` of an experiment): values by key."""
    from omegaconf import OmegaConf

    configs = configs or catalogue.config_dir()
    groups = catalogue.read_groups(configs, root)
    chosen = [(key, value) for key, value in map(_split, overrides) if key in groups]
    for key, value in chosen:
        _check_option(groups[key], value)
    choices = [f"{key}={value}" for key, value in chosen]
    params = OmegaConf.select(_hydra_compose(root, choices, configs), "hydra.sweeper.params")
    return {} if params is None else {str(key): str(value) for key, value in params.items()}


def _split(argument: str) -> tuple[str, str]:
    match = _ARGUMENT.fullmatch(argument)
    if match is None or match["sign"] == "~":
        raise SettingsError(f"{argument!r} is not of the form key=value; nothing can be removed, only set")
    return match["key"], match["value"]


def _check_option(group: catalogue.Group, option: str) -> None:
    if option in group.options or (option == "null" and group.default is None):
        return
    raise SettingsError(
        f"{group.name}={option}: there is no such option{_guess(option, group.options, cutoff=0.6)}; "
        f"{group.name} is one of {', '.join(group.options)}"
    )


def _compose_groups(root: str, choices: list[str], configs: Path) -> Composed:
    from omegaconf import open_dict

    settings = _hydra_compose(root, choices, configs)
    chosen = settings.hydra.runtime.choices
    options = {name: chosen[name] for name in chosen if not str(name).startswith("hydra/")}
    with open_dict(settings):
        del settings["hydra"]
    return Composed(settings, options)


def _hydra_compose(root: str, choices: list[str], configs: Path) -> DictConfig:
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    OmegaConf.register_new_resolver("llmtrain.question_marks", lambda: "???", replace=True)
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(config_dir=str(configs.resolve()), version_base="1.3"):
            return hydra.compose(root, overrides=choices, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        sentence = " ".join(str(error).partition("\n\n")[0].split())  # what follows is the search path
        raise SettingsError(f"the settings do not fit together: {sentence}") from error


def _set(settings: DictConfig, key: str, text: str, groups: Iterable[str], root: str) -> None:
    from omegaconf import DictConfig, OmegaConf

    known = known_keys(settings)
    if key not in known:
        _refuse_unknown(key, text, known, groups, root)
    try:
        value = read_value(key, text)
    except SweepError as error:
        remedy = "start one run for each" if _is_number(known.get(key)) else f"a list is written {key}=[{text}]"
        raise SettingsError(f"{key}={text} gives several values where one is taken; {remedy}") from error
    former = known.get(key)
    if isinstance(former, DictConfig) and len(former):
        _check_section(key, value, former, known, groups, root)
    else:
        value = _fit(key, text, value, former)
    both = isinstance(former, DictConfig) and isinstance(value, dict)
    free = _is_free(key, known) or (isinstance(former, DictConfig) and not len(former))
    OmegaConf.update(settings, key, value, merge=both, force_add=free)


def known_keys(settings: DictConfig) -> dict[str, Any]:
    """Every key, sections included, with its value as it stands (an interpolation stays its text)."""
    from omegaconf import DictConfig, OmegaConf

    known: dict[str, Any] = {}

    def walk(node: DictConfig, prefix: str) -> None:
        for name in map(str, node):
            key = f"{prefix}{name}"
            missing = OmegaConf.is_missing(node, name)
            value = None if missing or OmegaConf.is_interpolation(node, name) else node[name]
            known[key] = value
            if isinstance(value, DictConfig):
                walk(value, f"{key}.")

    walk(settings, "")
    return known


def _is_free(key: str, known: dict[str, Any]) -> bool:
    """Whether a key lies below a mapping that the YAML leaves empty for the user's own keys (`{}`)."""
    from omegaconf import DictConfig

    parts = key.split(".")
    parents = (known.get(".".join(parts[:count])) for count in range(1, len(parts)))
    return any(isinstance(parent, DictConfig) and not len(parent) for parent in parents)


def _refuse_unknown(key: str, text: str, known: dict[str, Any], groups: Iterable[str], root: str) -> None:
    if _is_free(key, known):
        return
    parent, _, name = key.rpartition(".")
    if parent in known and known[parent] is None:
        raise SettingsError(f"{key}={text}: {parent} is null here; set it whole, as {parent}={{{name}: {text}}}")
    raise UnknownKeyError(
        f"unknown key {key!r}{_guess(key, [*known, *groups])}; `llmtrain {root} --help` lists all keys", f"{key}={text}"
    )


def _check_section(
    key: str, value: Any, former: DictConfig, known: dict[str, Any], groups: Iterable[str], root: str
) -> None:
    if not isinstance(value, dict):
        names = ", ".join(str(name) for name in former)
        raise SettingsError(f"{key} is a section, not a single value; set one of its keys: {names}")
    for name, inner in value.items():
        inner_key = f"{key}.{name}"
        if inner_key not in known:
            _refuse_unknown(inner_key, str(inner), known, groups, root)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fit(key: str, text: str, value: Any, former: Any) -> Any:
    """Checks a value against the kind of the default: a number for a number, true or false for a switch."""
    if value is None or value == "auto" or (isinstance(value, str) and value.startswith("${")):
        return value
    if isinstance(former, bool):
        if not isinstance(value, bool):
            raise SettingsError(f"{key}={text}: expected true or false")
    elif _is_number(former):
        if not _is_number(value):
            raise SettingsError(f"{key}={text}: expected a number, such as {former}")
        if isinstance(former, int) and isinstance(value, float) and value.is_integer():
            return int(value)  # 1e6 steps
    elif former is None and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _check_complete(composed: Composed, configs: Path, root: str) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values: Any = OmegaConf.to_container(composed.settings, resolve=True)
        missing = sorted(OmegaConf.missing_keys(composed.settings))
    except OmegaConfBaseException as error:
        raise SettingsError(f"a setting refers to another that is not there: {str(error).splitlines()[0]}") from error
    if missing:
        about = _about(missing[0], composed, configs, root)
        raise SettingsError(f"{missing[0]} has no default and must be given: {missing[0]}=…{about}")
    try:
        check_kinds(root, values, composed.choices)
    except KindError as error:
        raise SettingsError(f"{error}{_about(error.key, composed, configs, root)}") from error


def _about(key: str, composed: Composed, configs: Path, root: str) -> str:
    """What a key means, in brackets, from its comment in the YAML."""
    setting = catalogue.read_settings(configs, root, composed.choices).get(key)
    return f" ({setting.comment})" if setting and setting.comment else ""


def _guess(word: str, words: Iterable[str], cutoff: float = 0.7) -> str:
    """` (did you mean a or b?)`, or nothing when no word is close; the last part of a dotted key may stand for it."""
    pool = list(dict.fromkeys(words))
    ends = [(candidate.rpartition(".")[2], candidate) for candidate in pool]
    close = [candidate for end, candidate in ends if end == word][:3]
    close = close or difflib.get_close_matches(word, pool, n=3, cutoff=cutoff)
    if not close:
        near = difflib.get_close_matches(word.rpartition(".")[2], [end for end, _ in ends], n=1, cutoff=cutoff)
        close = [candidate for end, candidate in ends if end in near][:3]
    return f" (did you mean {' or '.join(close)}?)" if close else ""
