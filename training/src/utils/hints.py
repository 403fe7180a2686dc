"""Hints where Hydra's messages fall short: unknown options of groups, mistyped names, modules that fail to import."""

import difflib
import pathlib
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException, InstantiationException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

_AT_MOST = 4  # names in a line


def hints(configs: pathlib.Path, arguments: Sequence[str]) -> list[str]:
    """A line for each argument that names no option or key of the configuration, with the nearest ones that exist.

    Arguments:
        configs: the folder with config.yaml.
        arguments: of the command line; those that are no overrides are ignored.
    """
    groups = _groups(configs)
    overrides = _parsed(arguments)
    lines = []
    for override in overrides:
        group = override.key_or_group
        if group in groups:
            for option in _options(override.value()):
                if option not in groups[group]:
                    lines.append(did_you_mean(f"{group}={option}", option, groups[group]))
    if lines:
        return lines
    config = _composed(configs, [o.input_line for o in overrides if o.key_or_group in groups])
    if config is None:
        return []
    there = set(_keys(config))
    options = {key: names for key, names in _options_by_key(configs).items() if key not in there}
    must_exist = [o.key_or_group for o in overrides if o.type in (OverrideType.CHANGE, OverrideType.DEL)]
    return [
        _unknown_key(key, there, options, groups)
        for key in must_exist
        if key not in there and key not in groups and not key.startswith(("hydra.", "hydra/"))
    ]


def nulls(configs: pathlib.Path, arguments: Sequence[str]) -> list[str]:
    """A line for each argument that sets a group to null: Hydra would only show where in its code it failed."""
    groups = _groups(configs)
    return [
        f"{group} must be the name of an option, found null; "
        f"{f'{group}=none' if 'none' in groups[group] else f'~{group}'} leaves the group out"
        for each in _parsed(arguments)
        if (group := each.key_or_group) in groups and each.value() is None and not each.is_delete()
    ]


def failed_imports(error: BaseException | None) -> list[str]:
    """A line with the error for which Hydra could not make an object: it only says which object, if that is its own.

    Arguments:
        error: raised in consequence. The result is empty if it has no such error behind it.
    """
    while error is not None and not isinstance(error, InstantiationException):
        error = error.__cause__ or error.__context__
    cause = error
    while cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is None or cause is error:
        return []
    frames = [each for each in traceback.extract_tb(cause.__traceback__) if not each.filename.startswith("<")]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return [f"{type(cause).__name__}: {cause}{place}"]


def did_you_mean(what: str, name: str, names: Iterable[str], prefix: str = "") -> str:
    """A line about `what`, with those names, behind a prefix, that are nearest to the one that was given."""
    near = difflib.get_close_matches(name, set(names), n=_AT_MOST, cutoff=0.5)
    if not near:
        return f"{what}: there is nothing of a similar name."
    return f"{what}: did you mean {' or '.join(prefix + each for each in near)}?"


def _groups(configs):
    """The options of each group: a folder, with its files in folders too."""
    folders = [folder for folder in configs.rglob("*") if folder.is_dir()]
    return {
        folder.relative_to(configs).as_posix(): sorted(
            file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml")
        )
        for folder in folders
    }


def _parsed(arguments):
    parser, overrides = OverridesParser.create(), []
    for argument in arguments:
        try:
            if "=" in argument and not argument.startswith("-"):
                overrides.append(parser.parse_override(argument))
        except HydraException:  # Hydra has said what is wrong with it
            continue
    return overrides


def _options(value):
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str)]


def _composed(configs, overrides) -> Any:
    try:
        with initialize_config_dir(str(configs), version_base="1.3"):
            return OmegaConf.to_container(compose("config", overrides))
    except (HydraException, OmegaConfBaseException):
        return None


def _keys(config, prefix="") -> Iterator[str]:
    """All keys of a configuration, as they are typed."""
    for name, value in config.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")


def _options_by_key(configs) -> dict[str, list[str]]:
    """{key: the options that have it}, such as strategy=ddp, of all groups but recipes, which have keys of others."""
    found: dict[str, list[str]] = {}
    for file in sorted(configs.glob("*/*.yaml"), key=lambda file: file.with_suffix("")):
        package = re.match(r"# @package (\S+)", file.read_text())
        prefix = package[1] if package else file.parent.name
        if prefix != "_global_":
            for key in (prefix, *_keys(OmegaConf.to_container(OmegaConf.load(file)), f"{prefix}.")):
                found.setdefault(key, []).append(f"{file.parent.name}={file.stem}")
    return found


def _unknown_key(key, there, options, groups) -> str:
    """The line for a key that is not there: where else one of this name is, or which are like it."""
    same = [each for each in (*sorted(there), *options) if f".{each}".endswith(f".{key}")]
    if same:
        return f"{key}: there is {' or '.join(_with_options(each, options) for each in same[:_AT_MOST])}."
    anywhere, parts = {*there, *options}, key.split(".")
    known = next(i for i in range(len(parts)) if ".".join(parts[: i + 1]) not in anywhere)
    prefix = "".join(f"{each}." for each in parts[:known])
    beside = {each.removeprefix(prefix).partition(".")[0] for each in anywhere if each.startswith(prefix)}
    if not prefix:
        beside |= {group for group in groups if "/" not in group}
    return did_you_mean(key, parts[known], beside, prefix)


def _with_options(key, options):
    return f"{key} with {' or '.join(options[key][:_AT_MOST])}" if key in options else key
