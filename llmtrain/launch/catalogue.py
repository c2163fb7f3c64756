"""What can be set: reads keys, defaults, comments and groups straight from the YAML files.

For `--help`, error messages and the tests of the configs. It does not compose anything and does not know Hydra or
OmegaConf (importing them would make `--help` slow); what it shows is the text of the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Setting:
    """One leaf of a YAML file: `key` is the full dotted key, `default` the text as it stands in the file."""

    key: str
    default: str
    comment: str
    file: Path
    line: int


@dataclass(frozen=True)
class Group:
    """A config group that a root uses: `default` is the option chosen unless told otherwise (None: none)."""

    name: str
    default: str | None
    options: tuple[str, ...]


def config_dir() -> Path:
    """The folder of the YAML files: `configs/` of the checkout, or the copy inside the installed package."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "configs"
    if (package.parent / "pyproject.toml").is_file() and checkout.is_dir():
        return checkout
    return package / "configs"


def group_options(configs: Path, group: str) -> tuple[str, ...]:
    """The options of a group by name; files that start with `_` are shared bases, not options."""
    folder = configs / group
    names = (path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))
    return tuple(sorted(name for name in names if not name.rpartition("/")[2].startswith("_")))


def read_groups(configs: Path, root: str) -> dict[str, Group]:
    """The groups that a command's root file lists in its defaults, by name, those of a root that it builds on too."""
    groups: dict[str, Group] = {}
    for group, option, _ in _defaults(configs / f"{root}.yaml"):
        if not group and option not in ("_self_", None):
            groups |= read_groups(configs, str(option))
        elif group:
            groups[group] = Group(group, option, group_options(configs, group))
    return groups


def read_settings(configs: Path, root: str, choices: Mapping[str, str | None] | None = None) -> dict[str, Setting]:
    """Every key of a command; a later file wins, as in Hydra.

    Args:
        configs: The folder of the YAML files.
        root: The command.
        choices: The option of each group; a group that is not named has its default.
    """
    found = _collect(configs, configs / f"{root}.yaml", "", "", choices or {})
    return {setting.key: setting for setting in found}


def read_file(path: Path, package: str = "") -> list[Setting]:
    """The leaves of one YAML file, the defaults list left out.

    Args:
        path: The file.
        package: Where Hydra puts its keys, as a dotted prefix; a `# @package` line in the file goes before it.
    """
    text = path.read_text(encoding="utf-8")
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(node, yaml.MappingNode):
        return []
    header = re.match(r"#\s*@package\s+(\S+)", text)
    if header:
        package = "" if header[1] == "_global_" else header[1].replace("/", ".")
    return list(_leaves(node, package, path, text.splitlines(), top=True))


def _leaves(
    node: yaml.MappingNode, prefix: str, path: Path, lines: list[str], *, top: bool = False
) -> Iterator[Setting]:
    for key_node, value in node.value:
        if top and key_node.value == "defaults":
            continue
        key = f"{prefix}.{key_node.value}" if prefix else str(key_node.value)
        if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
            yield from _leaves(value, key, path, lines)
        else:
            number = key_node.start_mark.line
            yield Setting(key, _text(value), _comment(key_node, value, lines), path, number + 1)


def _text(value: yaml.Node) -> str:
    if isinstance(value, yaml.ScalarNode):
        return value.value if value.value else ('""' if value.style else "null")
    if isinstance(value, yaml.SequenceNode):
        return "[" + ", ".join(_text(item) for item in value.value) + "]"
    pairs = (f"{key.value}: {_text(item)}" for key, item in value.value)
    return "{" + ", ".join(pairs) + "}"


def _comment(key: yaml.Node, value: yaml.Node, lines: list[str]) -> str:
    number = key.start_mark.line
    same_line = value.end_mark.line == number
    start = value.end_mark.column if same_line else key.end_mark.column
    found = re.search(r"(?:^|\s)#\s*(.*)$", lines[number][start:])
    return found[1].strip() if found else ""


def _defaults(path: Path) -> list[tuple[str, str | None, str]]:
    """The defaults list as (group, option, package); a file of the same folder has the group ""."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    entries: list[tuple[str, str | None, str]] = []
    for entry in (content or {}).get("defaults", []) if isinstance(content, dict) else []:
        if isinstance(entry, str):
            entries.append(("", entry, ""))
            continue
        for left, option in entry.items():
            words = left.split()
            if "override" in words:
                continue
            group, _, package = words[-1].partition("@")
            entries.append((group.lstrip("/"), None if option is None else str(option), package))
    return entries


def _collect(configs: Path, path: Path, group: str, package: str, choices: Mapping[str, str | None]) -> list[Setting]:
    """The settings of a file and of all that its defaults list brings in, in Hydra's order."""
    own = read_file(path, package)
    found: list[Setting] = []
    placed = False
    for sub_group, option, sub_package in _defaults(path):
        option = choices.get(sub_group, option) if sub_group else option
        if option == "_self_":
            found, placed = [*found, *own], True
        elif option is not None:
            name = f"{option}.yaml"
            file = configs / sub_group / name if sub_group else path.parent / name
            default_package = sub_group.replace("/", ".") if sub_group else package
            found += _collect(configs, file, sub_group or group, sub_package or default_package, choices)
    merged: dict[str, Setting] = {}
    for setting in found if placed else [*found, *own]:
        former = merged.get(setting.key)
        if former and not setting.comment:
            setting = replace(setting, comment=former.comment)
        merged[setting.key] = setting
    return list(merged.values())
