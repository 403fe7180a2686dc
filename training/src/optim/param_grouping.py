"""Which parameters an optimizer decays, and which have options of their own."""

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from hydra.utils import get_object
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from flash_attn.modules.mha import MHA
from flash_attn.modules.mlp import GatedMlp
from flash_attn.ops.layer_norm import DropoutAddLayerNorm
from src.models.modules.seq_common import PositionalEncoding

_EMBEDDINGS = (nn.Embedding, PositionalEncoding)
_BESIDE_EMBEDDINGS = ("project_in", "project_out")
_NORMS = (nn.LayerNorm, nn.GroupNorm, _NormBase, nn.LocalResponseNorm, nn.RMSNorm, DropoutAddLayerNorm)


def group_parameters_for_optimizer(
    model: nn.Module,
    optimizer_cfg: Mapping[str, Any],
    bias_weight_decay: bool = False,
    normalization_weight_decay: bool = False,
    rms_norm_weight_decay: bool = False,
    apply_lr_multiplier: bool = False,
    orthogonalize: bool = False,
) -> Iterable[nn.Parameter] | list[dict[str, Any]]:
    """Groups of the trainable parameters, for the constructor of an optimizer.

    Each parameter is in one group; one that has several names counts under its first. The order depends on the names
    only, so that the state of an optimizer fits when a run is resumed. The first rule that applies decides:

        1. A parameter with an attribute `_optim` (a dict) is in a group with these options.
        2. Names in model.no_weight_decay(), or that contain one of model.no_weight_decay_keywords(): no decay.
        3. An attribute `_no_weight_decay` that is true: no decay.
        4. Biases: no decay, unless bias_weight_decay.
        5. Linear layers: decay.
        6. Embeddings: no decay. Norms: no decay, unless normalization_weight_decay.
        7. All others: decay.

    With orthogonalize, matrices are then taken out of these groups into others, with the same options and those that
    `src.optim.muon.Muon` reads. If there is nothing to decay and no `_optim`, the result is otherwise
    model.parameters().

    Arguments:
        model: its modules decide what a parameter is.
        optimizer_cfg: the optimizer's configuration. Its weight_decay, or else the default of the class that
            `_target_` names, is the decay; with ZeroRedundancyOptimizer, the default of the class in `optimizer_class`.
        bias_weight_decay: decay biases.
        normalization_weight_decay: decay the weights of all norms.
        rms_norm_weight_decay: decay the weights of RMS norms only, as flash-attention 2.4 did.
        apply_lr_multiplier: give groups with the option `lr_multiplier` this many times the learning rate of
            optimizer_cfg (muP, arXiv:2203.03466). By default the option is kept in the group and has no effect.
        orthogonalize: give weights of linear layers the option orthogonalize=True, except that of the output layer,
            which `model.get_output_embeddings()` is; and where queries, keys and values, or a value and its gate, are
            rows of one weight, `stacked`, the numbers of these rows. Projections between narrow embeddings and the
            layers, project_in and project_out, are as little hidden as embeddings, and are left to AdamW with them.

    Raises ValueError if apply_lr_multiplier is set and optimizer_cfg has no learning rate, and if orthogonalize is set
    and the model does not say which its output layer is, as one of images.
    """
    weight_decay = _weight_decay(optimizer_cfg)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if weight_decay == 0 and not orthogonalize and not any(hasattr(p, "_optim") for p in named.values()):
        return model.parameters()

    exempt_modules = _EMBEDDINGS if normalization_weight_decay else (*_EMBEDDINGS, *_NORMS)
    rms_norms_exempt = not (normalization_weight_decay or rms_norm_weight_decay)
    exempt_names = set(_call(model, "no_weight_decay"))
    exempt_keywords = tuple(_call(model, "no_weight_decay_keywords"))
    owners = _owners(model)

    def is_exempt(name: str) -> bool:
        owner = owners[name]
        if name in exempt_names or any(keyword in name for keyword in exempt_keywords):
            return True
        if getattr(named[name], "_no_weight_decay", False):
            return True
        if name.endswith("bias") and not bias_weight_decay:
            return True
        if isinstance(owner, nn.Linear):
            return False
        return rms_norms_exempt if _is_rms_norm(owner) else isinstance(owner, exempt_modules)

    ordinary = sorted(name for name, p in named.items() if not hasattr(p, "_optim"))
    exempt = [name for name in ordinary if is_exempt(name)]
    if weight_decay == 0 or not exempt:
        names_of = [(ordinary, {"weight_decay": weight_decay})]
    else:
        decayed = sorted(set(ordinary) - set(exempt))
        names_of = [(decayed, {"weight_decay": weight_decay}), (exempt, {"weight_decay": 0.0})]
    names_of += _special(named, optimizer_cfg, apply_lr_multiplier)
    if orthogonalize:
        names_of = _with_matrices_apart(model, names_of)
    return [{"params": [named[name] for name in names], **options} for names, options in names_of]


def _special(named, optimizer_cfg, apply_lr_multiplier):
    """(names, options) for each distinct `_optim`, in the order of their options."""
    names_of = defaultdict(list)
    for name in sorted(named):
        if hasattr(named[name], "_optim"):
            names_of[tuple(sorted(named[name]._optim.items()))].append(name)
    groups = [(names_of[key], dict(key)) for key in sorted(names_of, key=repr)]
    if apply_lr_multiplier:
        for _, options in groups:
            if "lr_multiplier" in options:
                options.setdefault("lr", _lr(optimizer_cfg) * options["lr_multiplier"])
    return groups


def _with_matrices_apart(model, names_of):
    """(names, options) where the matrices of the layers are in groups of their own."""
    head = _call(model, "get_output_embeddings") or None
    if head is None:
        raise ValueError(
            "orthogonalize (optimizer=muon) must be False for a model whose get_output_embeddings() gives no output "
            f"layer, found True for {type(model).__name__}, whose output layer would be orthogonalised as well"
        )
    rows_of = {
        f"{prefix}.weight".lstrip("."): _stacked_rows(model.get_submodule(prefix.rpartition(".")[0]), prefix)
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module.weight is not head.weight
        and prefix.rpartition(".")[2] not in _BESIDE_EMBEDDINGS
    }
    divided = []
    for names, options in names_of:
        alike = defaultdict(list)
        for name in names:
            alike[rows_of.get(name)].append(name)
        for rows, members in sorted(alike.items(), key=repr):
            of_muon = {} if rows is None else {"orthogonalize": True, "stacked": list(rows) or None}
            divided.append((members, options | of_muon))
    return divided


def _stacked_rows(parent, name):
    """How many rows each of the matrices has that a linear layer of this name has below each other; () if it is one."""
    layer = name.rpartition(".")[2]
    if isinstance(parent, MHA) and layer in ("Wqkv", "Wkv"):
        keys = parent.num_heads_kv * parent.head_dim
        return (*((parent.num_heads * parent.head_dim,) if layer == "Wqkv" else ()), keys, keys)
    if isinstance(parent, GatedMlp) and layer == "fc1":
        return (parent.fc1.weight.shape[0] // 2,) * 2
    return ()


def _owners(model):
    """The module of each parameter name: the one in which the parameter has its first name.

    That of a parametrized weight is the layer that has the weight, and not what holds its parts.
    """
    return {
        f"{prefix}.{name}" if prefix else name: model.get_submodule(_layer_of(prefix))
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }


def _layer_of(name):
    """The name of the layer that a module is a part of: the module itself, if it is not of a parametrization."""
    return f".{name}".partition(".parametrizations.")[0].removeprefix(".")


def _is_rms_norm(module):
    """Whether a module is an RMS norm: torch's, ours, or one of transformers' many classes of that name."""
    return "RMSNorm" in type(module).__name__


def _call(model, method):
    return getattr(model, method)() if hasattr(model, method) else ()


def _lr(optimizer_cfg):
    if "lr" not in optimizer_cfg:
        raise ValueError("apply_lr_multiplier needs the learning rate train.optimizer.lr, which is not set")
    return optimizer_cfg["lr"]


def _weight_decay(optimizer_cfg):
    """The decay of a configuration, or the default of the optimizer that it describes."""
    if "weight_decay" in optimizer_cfg:
        return optimizer_cfg["weight_decay"]
    inner = optimizer_cfg.get("optimizer_class")  # what ZeroRedundancyOptimizer divides over the ranks
    path = optimizer_cfg["_target_"] if inner is None else inner["path"]
    parameter = inspect.signature(get_object(path)).parameters.get("weight_decay")
    return 0.0 if parameter is None else parameter.default
