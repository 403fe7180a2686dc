"""State dicts of the decoder divided over the processes of a tensor parallel model, and put together again.

A table says how each tensor is divided; `_Part` cuts and joins it.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn.models._checkpoints.key_map import TIED
from flash_attn.models._checkpoints.tied_weights import check_tied
from flash_attn.models._config import Settings, settings
from flash_attn.modules.mha._heads import can_be_divided, features_of_process, heads_of_process


class _Part(NamedTuple):
    """How a tensor is divided.

    cut: (tensor, settings, world_size, rank) -> the part of this process, None if it has none.
    join: (the parts of all processes, settings) -> the tensor.
    of_first: only the first process has it.
    """

    cut: Callable[[Tensor, Settings, int, int], Tensor | None]
    join: Callable[[list[Tensor], Settings], Tensor]
    of_first: bool = False


def shard_state_dict_tp(state_dict: dict[str, Tensor], config: Any, world_size: int, rank: int) -> dict[str, Tensor]:
    """Reduce a state dict, in place, to the part that one process of a tensor parallel model has.

    Arguments:
        state_dict: that of a whole model; tensors may be missing. It is changed and returned.
        config: the GPT2Config of the model.
        world_size, rank: the number of processes, and this one's number.

    Parts are copies, so that neither keeping nor saving a part keeps the whole tensor alive. Tied weights share the
    memory of their part. Heads are divided as evenly as possible, the first processes having
    more; where there are fewer key heads than processes, keys and values are divided by their features (`ParallelMHA`).
    Raises ValueError, before anything is changed, unless there are at least as many query heads as processes, and
    world_size divides the padded vocabulary, the features, those within the MLP, and those of keys and values if they
    are divided; and if weights that the configuration ties differ.

    Example:
        >>> from flash_attn.models.gpt import GPTLMHeadModel, shard_state_dict_tp
        >>> from transformers import GPT2Config
        >>> config = GPT2Config(vocab_size=100, n_embd=64, n_layer=1, n_head=4)
        >>> part = shard_state_dict_tp(GPTLMHeadModel(config).state_dict(), config, world_size=2, rank=0)
        >>> part["transformer.layers.0.mixer.Wqkv.weight"].shape
        torch.Size([96, 64])
    """
    s = settings(config)
    check_world_size(s, world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to {world_size - 1}, found {rank}")
    if s.tie_word_embeddings and all(name in state_dict for name in TIED):
        check_tied(TIED[0], state_dict[TIED[0]], TIED[1], state_dict[TIED[1]])
        state_dict[TIED[1]] = state_dict[TIED[0]]
    made: dict[Any, Tensor] = {}  # the parts, by what they were cut from
    for name in list(state_dict):
        part = _part(name)
        if part is None:
            continue
        whole = state_dict[name]
        cut = part.cut(whole, s, world_size, rank)
        if cut is None:
            del state_dict[name]
        elif cut.numel() < whole.numel():
            key = whole.data_ptr() or id(whole), whole.shape, whole.stride(), part
            state_dict[name] = made.setdefault(key, cut.clone(memory_format=torch.contiguous_format))
    return state_dict


def combine_state_dicts_tp(state_dicts: list[dict[str, Tensor]], config: Any) -> dict[str, Tensor]:
    """The state dict of the whole model from the parts of all ranks in order: the inverse of `shard_state_dict_tp`.

    Embeddings that are divided by columns, as in Meta's files, are put together, too. Raises ValueError for a number of
    processes that `shard_state_dict_tp` refuses, if one lacks its part of a tensor, and if its Wqkv has other rows.

    Example:
        >>> from flash_attn.models.gpt import GPTLMHeadModel, combine_state_dicts_tp, shard_state_dict_tp
        >>> from transformers import GPT2Config
        >>> config = GPT2Config(vocab_size=100, n_embd=64, n_layer=1, n_head=4)
        >>> model = GPTLMHeadModel(config)
        >>> parts = [shard_state_dict_tp(model.state_dict(), config, 2, rank) for rank in range(2)]
        >>> model.load_state_dict(combine_state_dicts_tp(parts, config))
        <All keys matched successfully>
    """
    s = settings(config)
    check_world_size(s, len(state_dicts))
    result = dict(state_dicts[0])
    for name in dict.fromkeys(name for each in state_dicts for name in each):
        part = _part(name)
        if part is None:
            continue
        parts = [each[name] for each in state_dicts if name in each]
        if len(parts) < len(state_dicts) and not part.of_first:
            raise ValueError(
                f"state_dicts must have the parts of all {len(state_dicts)} processes, found {len(parts)} of {name}"
            )
        result[name] = part.join(parts, s)
    return result


def check_world_size(s: Settings, world_size: int) -> None:
    """Raise ValueError, naming the field, if world_size processes cannot share the model."""
    if world_size < 1:
        raise ValueError(f"the number of processes must be positive, found {world_size}")
    if s.qk_norm_over_heads and world_size > 1:
        raise ValueError("config.qk_norm_over_heads must be False with several processes, found True")
    for name, size in {
        "vocab_size (rounded up to a multiple of config.pad_vocab_size_multiple)": s.padded_vocab_size,
        "n_embd": s.n_embd,
        "n_inner": s.inner,
    }.items():
        if size % world_size != 0:
            raise ValueError(f"config.{name} must be a multiple of the {world_size} processes, found {size}")
    if s.n_head < world_size:
        raise ValueError(f"config.n_head must be at least the number of processes, {world_size}, found {s.n_head}")
    if not can_be_divided(s.heads_kv, s.width_of_head, world_size):
        raise ValueError(
            f"config.n_head_kv must be at least the number of processes, {world_size}, or 2 * n_head_kv * head_dim a "
            f"multiple of {world_size}, found {s.heads_kv}"
        )


def _heads(s, world_size):
    return [heads_of_process(s.n_head, s.heads_kv, world_size, rank) for rank in range(world_size)]


def _even(dim):
    return _Part(
        cut=lambda x, s, world_size, rank: x.chunk(world_size, dim=dim)[rank],
        join=lambda parts, s: torch.cat(parts, dim=dim),
    )


def _join_vocabulary(parts, s):
    by_rows = len(parts[0]) * len(parts) == s.padded_vocab_size
    return torch.cat(parts, dim=0 if by_rows or parts[0].dim() == 1 else 1)


def _cut_columns_of_heads(x, s, world_size, rank):
    return x.split([len(heads.q) * s.width_of_head for heads in _heads(s, world_size)], dim=-1)[rank]


def _cut_qkv(x, s, world_size, rank):
    """The query heads of this process, and its key and value heads or, if these are too few, its part of their rows."""
    width = len(x) // (s.n_head + 2 * s.heads_kv)
    q, kv = x.split((s.n_head * width, 2 * s.heads_kv * width))
    own = heads_of_process(s.n_head, s.heads_kv, world_size, rank)
    if s.heads_kv < world_size:
        kv = kv.chunk(world_size)[rank]
    else:
        kv = kv.unflatten(0, (2, s.heads_kv, width))[:, own.kv.start : own.kv.stop].flatten(0, 2)
    return torch.cat([q[own.q.start * width : own.q.stop * width], kv])


def _join_qkv(parts, s):
    sizes = [features_of_process(own, s.heads_kv, s.width_of_head, len(parts)) for own in _heads(s, len(parts))]
    for rank, (part, size) in enumerate(zip(parts, sizes)):
        if len(part) != sum(size):
            raise ValueError(f"Wqkv of process {rank} of {len(parts)} must have {sum(size)} rows, found {len(part)}")
    q, kv = zip(*(part.split(size) for part, size in zip(parts, sizes)))
    if s.heads_kv >= len(parts):  # heads, and not rows: the values of each process follow its keys
        kv = [torch.cat(each) for each in zip(*(part.chunk(2) for part in kv))]
    return torch.cat([*q, *kv])


def _cut_fc1(x, s, world_size, rank):
    """This process's rows; with a gate, those of the value, then those of the gate."""
    halves = x.chunk(2) if s.gated else (x,)
    return torch.cat([half.chunk(world_size)[rank] for half in halves])


def _join_fc1(parts, s):
    if not s.gated:
        return torch.cat(parts)
    return torch.cat([torch.cat(half) for half in zip(*(part.chunk(2) for part in parts))])


_PARTS = {  # pattern of a name -> how its tensor is divided; what matches none is whole in every process
    r"(embeddings\.word_embeddings|^lm_head)\.(weight|bias)$": _even(0)._replace(join=_join_vocabulary),
    r"embeddings\.position_embeddings\.weight$": _even(-1),
    r"mixer\.Wqkv\.(weight|bias)$": _Part(_cut_qkv, _join_qkv),
    r"mixer\.out_proj\.weight$": _even(-1)._replace(cut=_cut_columns_of_heads),
    r"mlp\.fc1\.(weight|bias)$": _Part(_cut_fc1, _join_fc1),
    r"mlp\.fc2\.weight$": _even(-1),
    r"(mixer\.out_proj|mlp\.fc2)\.bias$": _Part(  # is added once, by the first process
        cut=lambda x, s, world_size, rank: x if rank == 0 else None, join=lambda parts, s: parts[0], of_first=True
    ),
}


def _part(name):
    return next((part for pattern, part in _PARTS.items() if re.search(pattern, name)), None)
