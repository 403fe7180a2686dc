"""Families of models: which checkpoints belong to one, and its tables of fields and of tensors."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence

from flash_attn.models._checkpoints.key_map import KeyMap

# Modules with a FAMILY; looked up when a checkpoint is loaded.
_MODULES = """
    gpt2 llama gemma2 olmo2 cohere stablelm phi3 phi starcoder2 opt gptj gpt_neox falcon bigcode btlm baichuan
""".split()


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models.

    name: as in the names of its functions, such as remap_state_dict_hf_<name>.
    model_types: the model_type of its configurations.
    hub_names: what the names of its checkpoints on the hub start with.
    to_gpt2_config: turns its configuration into a GPT2Config.
    keys: turns its tensors into ours and back.
    """

    name: str
    model_types: Sequence[str]
    hub_names: Sequence[str]
    to_gpt2_config: Callable
    keys: KeyMap


def families() -> list[Family]:
    modules = ("_gpt2" if name == "gpt2" else name for name in _MODULES)
    return [importlib.import_module(f"flash_attn.models.{name}").FAMILY for name in modules]


def find_family(*, name: str | None = None, model_type: str | None = None, hub_name: str | None = None) -> Family:
    """The family with this name; else the one with this model_type; else the one whose hub_names fit `hub_name`.

    Raises ValueError for a name that no family has, or if nothing says which family it is, and NotImplementedError for
    a model_type that no family has.
    """
    known = families()
    names = ", ".join(each.name for each in known)
    if name is not None:
        for family in known:
            if family.name == name:
                return family
        raise ValueError(f"family must be one of {names}, found {name!r}")
    for family in known:
        by_name = model_type is None and hub_name is not None and hub_name.startswith(tuple(family.hub_names))
        if by_name or model_type in family.model_types:
            return family
    if model_type is None:
        raise ValueError(f"family must be given, as neither config.json nor the name says which it is: one of {names}")
    types = ", ".join(each for family in known for each in family.model_types)
    what = "this configuration" if hub_name is None else f"the checkpoint {hub_name!r}"
    raise NotImplementedError(f"no family is known for {what}: model_type must be one of {types}, found {model_type!r}")
