"""Multi-head attention with its heads divided over processes.

mha = ParallelMHA(embed_dim=768, num_heads=12, process_group=group, causal=True, use_flash_attn=True)
out = mha(x, seqlen=512)                              # (batch * seqlen / processes, 768), as x
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flash_attn._ops import checks, fusing
from flash_attn.modules.mha._base import MultiHeadAttention
from flash_attn.modules.mha._heads import features_of_process
from flash_attn.ops.fused_dense import ColumnParallelLinear, RowParallelLinear
from flash_attn.ops.triton.layer_norm import RMSNorm, rms_norm_fn
from flash_attn.utils.distributed import all_gather, replicated


class ParallelMHA(MultiHeadAttention):
    """`MHA` with its heads divided over the processes of a group; if that is uneven, the first processes have more.

    Query heads stay with their key head. If there are fewer key heads than processes, as in multi-query attention,
    several processes have the query heads of one key head. Then the rows of Wqkv for keys and values are divided evenly
    and their outputs gathered in the forward, so that each parameter is in one process, and its gradient is whole.

    Arguments:
        process_group: the group.
        sequence_parallel: the first dimension of input and output is divided, too. Not for decoding.
        The others are those of `MHA`.

    Parameters of a process with h query heads and k key heads: Wqkv ((h + 2 k) * head_dim, embed_dim), its query, key
    and value heads, or, with fewer key heads than processes, ((h + 2 num_heads_kv / processes) * head_dim, embed_dim);
    out_proj.weight (embed_dim, h * head_dim); out_proj.bias in the first process only; q_norm and k_norm in every
    process, whose gradients are summed over the group in the backward.

    Raises TypeError or ValueError for sizes and options that do not go together.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.modules.mha import ParallelMHA
        >>> mha = ParallelMHA(64, 4, dist.group.WORLD, causal=True, use_flash_attn=True)
        >>> mha(torch.randn(2 * 10, 64), seqlen=10).shape  # the tokens of both sequences, divided over the processes
        torch.Size([20, 64])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        process_group: ProcessGroup,
        num_heads_kv: int | None = None,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        use_flash_attn: bool = False,
        checkpointing: bool = False,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        head_dim: int | None = None,
        qk_norm: bool = False,
        qk_norm_eps: float = 1e-6,
        qk_norm_zero_centered: bool = False,
        qk_norm_over_heads: bool = False,
        softcap: float = 0.0,
    ) -> None:
        checks.process_group(process_group)
        if qk_norm_over_heads:
            raise ValueError("qk_norm_over_heads must be False where heads are divided over processes, found True")
        super().__init__(
            embed_dim,
            num_heads,
            num_heads_kv,
            process_group,
            softmax_scale=softmax_scale,
            causal=causal,
            dropout=dropout,
            layer_idx=layer_idx,
            rotary_emb_dim=rotary_emb_dim,
            rotary_emb_base=rotary_emb_base,
            rotary_emb_scale_base=rotary_emb_scale_base,
            rotary_emb_interleaved=rotary_emb_interleaved,
            use_alibi=use_alibi,
            window_size=window_size,
            use_flash_attn=use_flash_attn,
            checkpointing=checkpointing,
            head_dim=head_dim,
            qk_norm=qk_norm,
            qk_norm_eps=qk_norm_eps,
            qk_norm_zero_centered=qk_norm_zero_centered,
            qk_norm_over_heads=qk_norm_over_heads,
            softcap=softcap,
            device=device,
            dtype=dtype,
        )
        self.process_group = process_group
        self.world_size, self.local_rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        factory: dict[str, Any] = {"sequence_parallel": sequence_parallel, "device": device, "dtype": dtype}
        self._gathers_kv = self.num_heads_kv < self.world_size
        q_features, kv_features = features_of_process(self._heads, self.num_heads_kv, self.head_dim, self.world_size)
        self.Wqkv = ColumnParallelLinear(
            self.embed_dim,
            (self.num_heads + 2 * self.num_heads_kv) * self.head_dim,
            process_group,
            bias=qkv_proj_bias,
            share=q_features + kv_features,
            **factory,
        )
        self.out_proj = RowParallelLinear(
            self.num_heads * self.head_dim,
            self.embed_dim,
            process_group,
            bias=out_proj_bias,
            share=q_features,
            **factory,
        )
        if qk_norm:
            for weight in (self.q_norm.weight, self.k_norm.weight):
                vars(weight)["_shared_params"] = True

    def _norm_of_heads(self, norm: RMSNorm, x: Tensor) -> Tensor:
        if fusing.may_fuse(norm, (RMSNorm,), x):
            weight = replicated(norm.weight, self.process_group)
            return rms_norm_fn(x, weight, None, eps=norm.eps, zero_centered_weight=norm.zero_centered_weight)
        if not torch.is_grad_enabled():
            return norm(x)
        shared = {
            f"{path}.{name}" if path else name: replicated(parameter, self.process_group)
            for path, module in norm.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
        }
        return torch.func.functional_call(norm, shared, (x,))

    def _with_gathered_kv(self, qkv: Tensor) -> Tensor:
        """qkv (..., (heads + 2 heads_kv) * head_dim) of this process's heads, with keys and values from all processes.

        The argument has, after the queries, an equal part of the keys and values of all heads, which other processes
        have the rest of: 2 * num_heads_kv * head_dim / processes features.
        """
        q_features = self.num_heads_per_rank * self.head_dim
        q, part = qkv.split((q_features, qkv.shape[-1] - q_features), dim=-1)
        kv = all_gather(part.movedim(-1, 0), self.process_group).movedim(0, -1)  # rows are what it gathers
        kv = torch.unflatten(kv, -1, (2, self.num_heads_kv, self.head_dim))
        own = kv[..., self._heads.kv.start : self._heads.kv.stop, :]
        return torch.cat([q, own.flatten(-3)], dim=-1)

    def forward(self, x: Tensor, seqlen: int | None = None, inference_params: Any = None, **kwargs: Any) -> Tensor:
        """Attention of x (batch, seqlen, embed_dim), or (batch * seqlen, embed_dim) if seqlen is given.

        With sequence_parallel, x and the result are this process's part of the first dimension. kwargs: more arguments
        of the inner attention, such as cu_seqlens and max_seqlen if seqlen is not given, or cp_plan, whose ranks all
        have the heads of this process and are another group than process_group. inference_params: as in `MHA`.
        Returns a tensor like x. Raises ValueError if seqlen does not divide the number of tokens.
        """
        qkv = self.Wqkv(x)
        if self._gathers_kv:
            qkv = self._with_gathered_kv(qkv)
        if seqlen is not None:
            fits = qkv.shape[0] % seqlen == 0
            checks.number("the number of tokens", qkv.shape[0], fits, "a multiple of seqlen, {}", seqlen)
            qkv = torch.unflatten(qkv, 0, (-1, seqlen))
        context = self._self_attention(qkv, inference_params, **kwargs)
        return self.out_proj(context if seqlen is None else context.flatten(0, 1))
