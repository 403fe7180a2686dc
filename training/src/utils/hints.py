"""Hints for wrong arguments of the command line: unknown options of groups, and mistyped names."""

import difflib
import pathlib
from collections.abc import Iterable, Sequence

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


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
        if override.key_or_group in groups:
            for option in _options(override.value()):
                if option not in groups[override.key_or_group]:
                    lines.append(_line(f"{override.key_or_group}={option}", option, groups[override.key_or_group]))
    known = [o for o in overrides if o.key_or_group in groups]
    config = None if lines else _composed(configs, [o.input_line for o in known])
    for override in overrides:
        if config is not None and override.key_or_group not in groups and not override.is_add():
            lines += _unknown_key(override.key_or_group, config, groups)
    return lines


def nulls(configs: pathlib.Path, arguments: Sequence[str]) -> list[str]:
    """A line for each argument that sets a group to null: Hydra would only show where in its code it failed."""
    groups = _groups(configs)
    return [
        f"{each.key_or_group} must be the name of an option, found null; ~{each.key_or_group} leaves the group out"
        for each in _parsed(arguments)
        if each.key_or_group in groups and each.value() is None and not each.is_delete()
    ]


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


def _composed(configs, overrides) -> DictConfig | None:
    try:
        with initialize_config_dir(str(configs), version_base="1.3"):
            return compose("config", overrides)
    except (HydraException, OmegaConfBaseException):
        return None


def _unknown_key(key, config, groups) -> list[str]:
    """The line for a key that the configuration does not have; no line if it has it."""
    node, seen = config, []
    for part in key.split("@")[0].split("."):
        if not OmegaConf.is_dict(node):
            return []
        if part not in node.keys():  # `in node` is false for mandatory values (???)
            there = list(node) if seen else [*node, *(group for group in groups if "/" not in group)]
            return [_line(key, part, there, prefix="".join(f"{each}." for each in seen))]
        seen.append(part)
        node = node._get_node(part)
    return []


def _line(what, name, names: Iterable[str], prefix=""):
    near = difflib.get_close_matches(name, [str(each) for each in names], n=4, cutoff=0.5)
    if not near:
        return f"{what}: there is nothing of a similar name."
    return f"{what}: did you mean {' or '.join(prefix + each for each in near)}?"
