"""Embeddings of tokens and their positions, whole or divided over the processes of a group.

    GPT2Embeddings(768, 50257, 1024)(torch.randint(50257, (2, 512)))           # (2, 512, 768)

Token ids are int32 or int64 (batch, seqlen). Positions count from 0 unless position_ids are given, (seqlen,) or (batch,
seqlen).
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from flash_attn._ops import checks, collectives, sharding
from flash_attn.utils.distributed import all_reduce, reduce_scatter


class GPT2Embeddings(nn.Module):
    """Word embeddings plus learned position embeddings.

    Arguments:
        embed_dim: features of the result.
        vocab_size: number of tokens.
        max_position_embeddings: number of positions; without position embeddings if 0 or less.
        padding_idx: a token, or None; its embedding is 0 at first and gets no gradient.
        word_embed_proj_dim: features of the word embeddings if these are fewer than embed_dim; project_in then maps
            them to embed_dim (as in OPT-350m).

    >>> from flash_attn.modules.embedding import GPT2Embeddings
    >>> GPT2Embeddings(64, 1000, 128)(torch.randint(1000, (2, 16))).shape
    torch.Size([2, 16, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        padding_idx: int | None = None,
        word_embed_proj_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        width = embed_dim if word_embed_proj_dim is None else word_embed_proj_dim
        self.word_embeddings = nn.Embedding(vocab_size, width, padding_idx=padding_idx, **factory)
        self.project_in = None
        if word_embed_proj_dim is not None:
            self.project_in = nn.Linear(word_embed_proj_dim, embed_dim, bias=False, **factory)
        self.max_position_embeddings = max_position_embeddings
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, **factory)

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Embeddings (batch, seqlen, embed_dim) of input_ids (batch, seqlen).

        position_ids: (batch, seqlen) or (seqlen,); 0, 1, ... if None.
        inputs_embeds: (batch, seqlen, features of the word embeddings), what stands for those of input_ids, which are
            then None.
        Raises TypeError or ValueError for ids of another dtype or shape, for more tokens than positions, and on the CPU
        for ids that have no embedding.
        """
        embeddings, tokens = _of_words(self.word_embeddings, input_ids, inputs_embeds)
        if self.project_in is not None:
            embeddings = self.project_in(embeddings)
        if self.max_position_embeddings > 0:
            embeddings = embeddings + _rows_of(
                self.position_embeddings, "position_ids", _positions(self, tokens, position_ids)
            )
        return embeddings


class BertEmbeddings(nn.Module):
    """Word embeddings plus learned position and token type embeddings; without dropout and norm.

    Arguments:
        type_vocab_size: number of token types; without their embeddings if 0 or less.
        The others are those of `GPT2Embeddings`.

    >>> from flash_attn.modules.embedding import BertEmbeddings
    >>> BertEmbeddings(64, 1000, 128, 2)(torch.randint(1000, (2, 16))).shape
    torch.Size([2, 16, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        type_vocab_size: int,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.word_embeddings = nn.Embedding(vocab_size, embed_dim, padding_idx=padding_idx, **factory)
        self.max_position_embeddings = max_position_embeddings
        self.type_vocab_size = type_vocab_size
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, **factory)
        if type_vocab_size > 0:
            self.token_type_embeddings = nn.Embedding(type_vocab_size, embed_dim, **factory)

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Embeddings (batch, seqlen, embed_dim) of input_ids (batch, seqlen); token types are 0 unless given.

        inputs_embeds: instead of input_ids, as in `GPT2Embeddings`. Raises what `GPT2Embeddings` raises.
        """
        embeddings, tokens = _of_words(self.word_embeddings, input_ids, inputs_embeds)
        if self.max_position_embeddings > 0:
            embeddings = embeddings + _rows_of(
                self.position_embeddings, "position_ids", _positions(self, tokens, position_ids)
            )
        if self.type_vocab_size > 0:
            if token_type_ids is None:
                token_type_ids = torch.zeros_like(tokens, dtype=torch.int64)
            _check_of_tokens("token_type_ids", token_type_ids, tokens)
            embeddings = embeddings + _rows_of(self.token_type_embeddings, "token_type_ids", token_type_ids)
        return embeddings


class VocabParallelEmbedding(nn.Embedding):
    """nn.Embedding with its rows divided: the process of rank r has tokens r * n to (r + 1) * n - 1.

    A process returns 0 for the tokens of others. The caller must add the results of all processes.

    Arguments:
        num_embeddings: tokens of all processes, divisible by their number.
        process_group: None makes it a plain nn.Embedding.
        padding_idx: must be None if there is more than one process.
        The others are those of nn.Embedding.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.modules.embedding import VocabParallelEmbedding
        >>> embedding = VocabParallelEmbedding(1000, 64, process_group=dist.group.WORLD)
        >>> embedding(torch.tensor([[1, 999]])).shape, embedding.weight.shape  # on 4 processes (250, 64)
        (torch.Size([1, 2, 64]), torch.Size([1000, 64]))
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        num_embeddings: int,
        *args: Any,
        process_group: ProcessGroup | None = None,
        padding_idx: int | None = None,
        **kwargs: Any,
    ) -> None:
        world_size = _processes("num_embeddings", num_embeddings, process_group)
        if world_size > 1 and padding_idx is not None:
            raise ValueError(f"padding_idx must be None where tokens are divided over processes, found {padding_idx}")
        super().__init__(num_embeddings // world_size, *args, **kwargs | {"padding_idx": padding_idx})
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        """Embeddings (..., features) of input (...), 0 for tokens of other processes."""
        if self.process_group is None:
            return super().forward(input)
        first = dist.get_rank(self.process_group) * self.num_embeddings
        own = (input >= first) & (input < first + self.num_embeddings)
        embeddings = _embedded(self, torch.where(own, input - first, 0))
        return embeddings.masked_fill(~own[..., None], 0.0)

    @property
    def divided_dims(self) -> dict[str, int]:
        """Along which dimension the weight is divided."""
        return {} if self.process_group is None else {"weight": 0}


class ColumnParallelEmbedding(nn.Embedding):
    """nn.Embedding with its columns divided: the process of rank r has features r * n to (r + 1) * n - 1.

    Arguments:
        num_embeddings: tokens.
        embedding_dim: features of all processes, divisible by their number.
        process_group: None makes it a plain nn.Embedding.
        The others are those of nn.Embedding.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.modules.embedding import ColumnParallelEmbedding
        >>> embedding = ColumnParallelEmbedding(1000, 64, process_group=dist.group.WORLD)
        >>> embedding(torch.tensor([[1, 999]])).shape  # on 4 processes (1, 2, 16)
        torch.Size([1, 2, 64])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *args: Any,
        process_group: ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        world_size = _processes("embedding_dim", embedding_dim, process_group)
        super().__init__(num_embeddings, embedding_dim // world_size, *args, **kwargs)
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        """Embeddings (..., features of this process) of input (...)."""
        return _embedded(self, input)

    @property
    def divided_dims(self) -> dict[str, int]:
        """Along which dimension the weight is divided."""
        return {} if self.process_group is None else {"weight": 1}


def _embedded(module: nn.Embedding, input: Tensor) -> Tensor:
    """The call of nn.Embedding with this process's part of a weight that may be a DTensor."""
    return F.embedding(
        input,
        sharding.local(module.weight),
        module.padding_idx,
        module.max_norm,
        module.norm_type,
        module.scale_grad_by_freq,
        module.sparse,
    )


class ParallelGPT2Embeddings(nn.Module):
    """`GPT2Embeddings` with tokens, and features of positions, divided over the processes of a group.

    Arguments:
        process_group: the group, not None.
        sequence_parallel: the first dimension of the result is divided over the processes, too.
        The others are those of `GPT2Embeddings`.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.modules.embedding import ParallelGPT2Embeddings
        >>> embeddings = ParallelGPT2Embeddings(64, 1000, 128, dist.group.WORLD, sequence_parallel=False)
        >>> embeddings(torch.randint(1000, (2, 16))).shape
        torch.Size([2, 16, 64])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        process_group: ProcessGroup,
        padding_idx: int | None = None,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.process_group(process_group)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size, embed_dim, padding_idx=padding_idx, process_group=process_group, **factory
        )
        self.max_position_embeddings = max_position_embeddings
        if max_position_embeddings > 0:
            self.position_embeddings = ColumnParallelEmbedding(
                max_position_embeddings, embed_dim, process_group=process_group, **factory
            )

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, combine_batch_seqlen_dim: bool = False
    ) -> Tensor:
        """Embeddings (batch, seqlen, embed_dim), or (batch * seqlen, embed_dim) with combine_batch_seqlen_dim.

        With sequence_parallel each process has its part of the first dimension.
        """
        _check_ids(input_ids)
        embeddings = self.word_embeddings(input_ids)
        if self.max_position_embeddings > 0:
            positions = self.position_embeddings(_positions(self, input_ids, position_ids))
            before = dist.get_rank(self.process_group) * positions.shape[-1]
            after = embeddings.shape[-1] - positions.shape[-1] - before
            embeddings = embeddings + nn.functional.pad(positions, (before, after))
        if combine_batch_seqlen_dim:
            embeddings = embeddings.flatten(0, 1)
        if collectives.size(self.process_group) == 1:
            return embeddings
        return (reduce_scatter if self.sequence_parallel else all_reduce)(embeddings, self.process_group)


def _processes(name: str, size: int, process_group: ProcessGroup | None) -> int:
    """The number of processes that share `size`, which it must divide."""
    world_size = 1 if process_group is None else dist.get_world_size(process_group)
    checks.number(name, size, size % world_size == 0, "divisible by the {} processes", world_size)
    return world_size


def _check_ids(input_ids: Any) -> None:
    checks.tensor("input_ids", input_ids, dtypes=checks.INTEGER_DTYPES)
    checks.ndim("input_ids", input_ids, "(batch, seqlen)")


def _of_words(table: Any, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Word embeddings (batch, seqlen, features), and a tensor with the shape and device of the tokens."""
    if inputs_embeds is None:
        _check_ids(input_ids)
        assert input_ids is not None
        return _rows_of(table, "input_ids", input_ids), input_ids
    if input_ids is not None:
        raise ValueError("input_ids must be None with inputs_embeds, found a tensor")
    checks.tensor("inputs_embeds", inputs_embeds, shape=(None, None, getattr(table, "embedding_dim", None)))
    return inputs_embeds, inputs_embeds[..., 0]


def _rows_of(table: nn.Embedding, name: str, ids: Tensor) -> Tensor:
    try:
        return table(ids)
    except IndexError as error:  # as the CPU raises it
        if not hasattr(table, "num_embeddings"):  # it is wrapped in a module that does not say
            raise
        raise checks.index_error(name, ids, table.num_embeddings) from error


def _check_of_tokens(name: str, ids: Tensor, input_ids: Tensor) -> None:
    """Check that ids are (seqlen,), (1, seqlen) or (batch, seqlen) for input_ids (batch, seqlen)."""
    checks.tensor(name, ids, dtypes=checks.INTEGER_DTYPES, device=input_ids.device)
    batch, seqlen = input_ids.shape
    if ids.shape not in ((seqlen,), (1, seqlen), (batch, seqlen)):
        raise ValueError(f"{name} must have shape ({seqlen},) or ({batch}, {seqlen}), found {tuple(ids.shape)}")


def _positions(module: Any, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
    """position_ids, or if they are None 0, 1, ... (seqlen,)."""
    if position_ids is not None:
        _check_of_tokens("position_ids", position_ids, input_ids)
        return position_ids
    seqlen, limit = input_ids.shape[1], module.max_position_embeddings
    checks.number("input_ids.shape[1]", seqlen, seqlen <= limit, "at most {}, the number of positions", limit)
    return torch.arange(seqlen, device=input_ids.device)
