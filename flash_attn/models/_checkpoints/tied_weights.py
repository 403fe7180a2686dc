"""Weights that a model has under two names, as those of the embedding and the head: they stay one tensor."""

import warnings
from typing import Any, TypeVar

from torch import Tensor, nn

from flash_attn._ops import checks
from flash_attn._torch_private import uncompiled, without_compiled

Self = TypeVar("Self", bound="TiedWeights")


class _Tie:
    """Marks two modules that a constructor tied. A copy of both has one of its own, a copy of one differs from it."""


class TiedWeights(nn.Module):
    """A model that keeps its tied weights tied.

    - The configuration decides when a model is made, when weights are loaded, and when `tie_weights` is called: with
      tie_word_embeddings, the weight of the head is that of the word embeddings.
    - This holds for the two modules that the constructor made. What has taken the place of one, such as another layer,
      an adapter around it or a copy that is trained apart, and a weight of another shape, are left alone.
    - Parameters that are one tensor, by the configuration or by hand, are one after `to`, `to_empty`, a copy, and
      `load_state_dict` with or without assign. A state dict may have any of their names, or all with equal values.
    - Each entry of `state_dict` has memory of its own, as safetensors needs it, unless keep_vars is set.
    """

    _has_warned = False  # of an adapter

    def _tied_modules(self) -> list[tuple[str, str]]:
        """Names of pairs of modules that the configuration ties: the second has the weight of the first."""
        return []

    @property
    def _tied_weights_keys(self) -> dict[str, str]:
        """As peft asks which weights are tied to those of the embedding: not those of a layer that has replaced one.

        peft asks again when it has put a wrapper around one of the two, whose weight is no parameter.
        """
        may_be_tied = [names for names, *_ in self._tied_pairs()]
        apart = []
        for names, first, second in self._pairs():
            one, other = _weight(first), _weight(second)
            if names not in may_be_tied and one is not None and other is not None and one is not other:
                apart.append(names)
        tied = [names for names in self._tied_modules() if names not in apart]
        return {f"{second}.weight": f"{first}.weight" for first, second in tied}

    def _mark_tied(self) -> None:
        """Say that the constructor made these modules."""
        for names in self._tied_modules():
            tie = _Tie()
            for name in names:
                vars(self.get_submodule(name))["_tie"] = tie

    def _pairs(self) -> list[tuple[tuple[str, str], nn.Module, nn.Module]]:
        """The names of tied modules, and what is now in their places, without torch.compile around it."""
        pairs = []
        for names in self._tied_modules():
            try:
                first, second = (uncompiled(self.get_submodule(name)) for name in names)
            except AttributeError:  # something else is in the place of a module around it
                continue
            pairs.append((names, first, second))
        return pairs

    def _tied_pairs(self) -> list[tuple[tuple[str, str], nn.Module, nn.Module]]:
        """The pairs that are still as the constructor made them, and so may be tied."""
        pairs = []
        for names, first, second in self._pairs():
            of_constructor = "_tie" in vars(first) and vars(first)["_tie"] is vars(second).get("_tie")
            one, other = _weight(first), _weight(second)
            if of_constructor and one is not None and other is not None and one.shape == other.shape:
                pairs.append((names, first, second))
        return pairs

    @property
    def is_tied(self) -> bool:
        """Whether all weights that the configuration ties are one tensor, whatever modules have them."""
        pairs = [(_weight(first), _weight(second)) for _, first, second in self._pairs()]
        return len(pairs) == len(self._tied_modules()) and all(one is not None and one is other for one, other in pairs)

    def tie_weights(self) -> None:
        """Use the weight of the word embeddings in the head, if the configuration ties them.

        A head or an embedding that has replaced that of the constructor is left alone.
        """
        for _, first, second in self._tied_pairs():
            second.weight = first.weight

    def train(self: Self, mode: bool = True) -> Self:
        """As that of every module, but warns once of an adapter on one of two tied layers, which merging gives to both.

        mode: whether to train.
        """
        if mode and not self._has_warned:
            for names, *modules in self._pairs():
                # peft's name for the layer within an adapter. Where both have one, they are meant to be the same.
                bases = [getattr(module, "base_layer", module) for module in modules]
                adapted = [name for name, module, base in zip(names, modules, bases) if module is not base]
                if len(adapted) == 1 and _weight(bases[0]) is _weight(bases[1]) is not None:
                    self._has_warned = True
                    (other,) = set(names) - set(adapted)
                    warnings.warn(
                        f"{adapted[0]} has an adapter, and its weight is also that of {other}: merging the adapter "
                        "changes both. Leave it out, as by LoraConfig(exclude_modules="
                        f"[{adapted[0].rpartition('.')[2]!r}]), or make the model with tie_word_embeddings=False",
                        stacklevel=2,
                    )
        return super().train(mode)

    def _owners(self, *, by_configuration: bool) -> list[list[tuple[str, nn.Module, str]]]:
        """The parameters with several names, each as a list of (name, module, name within it).

        by_configuration: with those that should be tied but are not; else these only if they have no values to lose.
        """
        owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
        for prefix, module in self.named_modules(remove_duplicate=False):
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    name = f"{prefix}.{leaf}" if prefix else leaf
                    owners.setdefault(id(parameter), []).append((name, module, leaf))
        for _, first, second in self._tied_pairs():
            one, other = first.weight, second.weight
            if one is not other and (by_configuration or (one.is_meta and other.is_meta)):
                owners[id(one)] += owners.pop(id(other))
        return [each for each in owners.values() if len(each) > 1]

    def _apply(self, fn: Any, recurse: bool = True) -> "TiedWeights":
        """What moves and converts a module: of two names of one parameter, it would replace each by itself."""
        shared = self._owners(by_configuration=False)
        super()._apply(fn, recurse)
        for owners in shared:
            _share(owners)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        """Part of load_state_dict, also that of a module which has this one: `state_dict` is a copy."""
        configured = {f"{name}.weight" for names in self._tied_modules() for name in names}
        for owners in self._owners(by_configuration=True):
            keys = [prefix + name for name, _, _ in owners]
            found = [key for key in keys if key in state_dict]
            if not found:
                continue
            value = state_dict[found[0]]
            is_configured = all(without_compiled(name) in configured for name, _, _ in owners)
            for key in found[1:]:
                check_tied(found[0], value, key, state_dict[key], is_configured)
            if value.shape != _parameter(owners).shape:  # an error of the key that is there
                continue
            _share(owners)
            if local_metadata.get("assign_to_params_buffers") and not isinstance(value, nn.Parameter):
                value = nn.Parameter(value, _parameter(owners).requires_grad)
            state_dict.update(dict.fromkeys(keys, value))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """As that of every module, but tied weights have memory of their own in it, as safetensors needs it.

        With keep_vars, entries are the parameters themselves.
        """
        result = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        for owners in () if keep_vars or args else self._owners(by_configuration=False):
            for name, _, _ in owners[1:]:
                if prefix + name in result:
                    result[prefix + name] = result[prefix + name].clone()
        return result


def check_tied(name: str, value: Tensor, other: str, other_value: Tensor, is_configured: bool = True) -> None:
    """Raise ValueError unless two tensors that will be one are equal. Those without values count as equal.

    is_configured: it is the configuration that ties them.
    """
    instead = " (tie_word_embeddings=False in its configuration would keep two)" if is_configured else ""
    expected = f"equal, as the model has one tensor for both{instead}"
    checks.number(f"{name} and {other}", "different values", _are_equal(value, other_value), expected)


def _are_equal(a, b):
    if a is b or a.is_meta or b.is_meta or hasattr(a, "fake_mode"):
        return True
    if hasattr(a, "to_local") and hasattr(b, "to_local"):  # DTensors
        a, b = a.to_local(), b.to_local()
    if a.shape != b.shape:
        return False
    a, b = a.detach(), b.detach().to(a)
    return a.equal(b) or (a.isnan().equal(b.isnan()) and a.nan_to_num().equal(b.nan_to_num()))


def _weight(module):
    """The parameter of this name: a weight that is computed, as by a parametrization or an adapter, is none."""
    return module._parameters.get("weight")


def _parameter(owners):
    """That of the first owner."""
    _, module, leaf = owners[0]
    return module._parameters[leaf]


def _share(owners):
    """Give the parameter of the first owner to the others."""
    for _, other, name in owners[1:]:
        other._parameters[name] = _parameter(owners)
