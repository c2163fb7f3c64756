"""Which runs one command line asks for: `seed=1,2,3 optim=muon,adamw` are six.

The grammar is Hydra's (`1,2,3`, `choice(…)`, `range(…)`), but for keys that hold free text or paths: a comma belongs to
those, and only `choice(…)` makes several of a path. Every run is composed here, before the first one starts. Knows
nothing of processes or folders.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.launch.composing import Composed, SettingsError, compose, declared_sweeps
from llmtrain.launch.reading import TEXT_NAMES, holds_text

_PARAMS = "hydra.sweeper.params."
_LONGEST_NAME = 120


@dataclass(frozen=True)
class Job:
    """One run of several: its folder's name, what sets it apart, and all its overrides."""

    name: str
    swept: dict[str, str]
    overrides: list[str]


@dataclass(frozen=True)
class Sweep:
    """The runs of one command line.

    Attributes:
        jobs: The runs, in the order of the values as typed; the last key changes fastest.
        hydra: Overrides of Hydra's own settings, such as its launcher.
        composed: The settings of each.
    """

    jobs: list[Job]
    hydra: list[str]
    composed: list[Composed]

    @property
    def first(self) -> Composed:
        """The settings of the first run."""
        return self.composed[0]


def read_sweep(command: str, overrides: Sequence[str], configs: Path | None = None) -> Sweep:
    """Reads the overrides of several runs and checks each of them.

    Args:
        command: The command, which is also the name of its root file.
        overrides: `key=value` arguments as the user wrote them, Hydra's own (`hydra.…`) among them.
        configs: The folder of the YAML files; the package's own unless given.

    Raises:
        SettingsError: A run that cannot be composed, or a sweep that is not a list of values.
    """
    own = [each for each in overrides if not _is_hydras(each)]
    hydra = [each for each in overrides if _is_hydras(each) and not each.startswith(_PARAMS)]
    _check_hydra(hydra)
    params = [each.removeprefix(_PARAMS) for each in overrides if each.startswith(_PARAMS)]
    declared = [f"{key}={value}" for key, value in declared_sweeps(command, _plain(own), configs).items()]
    values: dict[str, list[str]] = {}
    for override in [*declared, *params, *own]:
        key, _, text = override.partition("=")
        values.pop(key, None)  # the last one for a key wins
        values[key] = _values(key, text)
    swept = [key for key, texts in values.items() if len(texts) > 1]
    jobs = []
    for combination in itertools.product(*values.values()):
        chosen = dict(zip(values, combination, strict=True))
        apart = {key: chosen[key] for key in swept}
        jobs.append(Job(_name(apart), apart, [f"{key}={text}" for key, text in chosen.items()]))
    jobs = _distinct(jobs)
    return Sweep(jobs, hydra, [_compose(command, job, configs) for job in jobs])


def _is_hydras(override: str) -> bool:
    return bool(re.match(r"[+~]*hydra[./@]", override))


def _check_hydra(overrides: Iterable[str]) -> None:
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key == "hydra/sweeper" and value != "basic":
            raise SettingsError(
                f"{override}: the only sweeper is Hydra's basic one, every combination of the values; write the values "
                "as key=1,2,3"
            )


def _plain(overrides: Sequence[str]) -> list[str]:
    """The overrides that give one value."""
    return [each for each in overrides if len(_values(*each.split("=", 1))) == 1]


def _values(key: str, text: str) -> list[str]:
    """The values that `key=text` gives, each as it would be written alone."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import QuotedString
    from hydra.errors import HydraException

    name = key.rpartition(".")[2]
    if name in TEXT_NAMES or (holds_text(key) and not re.fullmatch(r"\s*choice\(.*\)\s*", text, re.DOTALL)):
        return [text]
    try:
        override = OverridesParser.create().parse_override(f"key={text}")
        if not override.is_sweep_override():
            return [text]
        if override.is_interval_sweep():
            raise SettingsError(f"{key}={text} is a stretch of numbers; write out values, as {key}=1,2,3 or range(1,4)")
        if holds_text(key):
            return [each.text if isinstance(each, QuotedString) else str(each) for each in override.sweep_iterator()]
        return [{"True": "true", "False": "false"}.get(each, each) for each in override.sweep_string_iterator()]
    except HydraException:  # what its grammar cannot read is text
        return [text]


def _compose(command: str, job: Job, configs: Path | None) -> Composed:
    try:
        return compose(command, job.overrides, configs)
    except SettingsError as error:
        raise SettingsError(f"run {job.name}: {error}" if job.swept else str(error)) from error


def _name(swept: dict[str, str]) -> str:
    """`seed=1,optim=adamw`, without what a folder's name should not hold."""
    text = ",".join(f"{key}={value}" for key, value in swept.items()) or "one"
    return re.sub(r"[^\w=,.+@-]+", "-", text).strip(".-")


def _distinct(jobs: list[Job]) -> list[Job]:
    """Numbers in front of the names, where they are long or alike."""
    names = [job.name for job in jobs]
    if len(set(names)) == len(names) and max(map(len, names)) <= _LONGEST_NAME:
        return jobs
    width = len(str(len(jobs)))
    return [
        Job(f"{number:0{width}}-{job.name[:_LONGEST_NAME]}", job.swept, job.overrides)
        for number, job in enumerate(jobs, 1)
    ]
