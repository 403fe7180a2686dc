"""Multi-head attention with its projections.

mha = MHA(embed_dim=768, num_heads=12, causal=True, use_flash_attn=True, rotary_emb_dim=64)
out = mha(torch.randn(2, 512, 768))                                        # (2, 512, 768)
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from flash_attn._ops import checks, fusing, invariance
from flash_attn.modules.mha._base import MultiHeadAttention
from flash_attn.ops.fused_dense import FewRowsLinear, FusedDense, Linear, fused_dense_func


class LinearResidual(FewRowsLinear):
    """`nn.Linear` that returns (output, input).

    >>> from flash_attn.modules.mha import LinearResidual
    >>> out, residual = LinearResidual(8, 4)(torch.zeros(2, 8))
    """

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """(input W^T + bias, input) for input (..., in_features)."""
        return super().forward(input), input


class MHA(MultiHeadAttention):
    """Multi-head attention with its projections.

    Arguments:
        embed_dim: features of the input and the output, a multiple of num_heads unless head_dim is given.
        num_heads: query heads.
        num_heads_kv: key and value heads, a divisor of num_heads (GQA, MQA); None means num_heads.
        cross_attn: keys and values have a projection of their own, so that they can come from another tensor.
        qkv_proj_bias, out_proj_bias: whether the projections have a bias.
        dropout: probability that an attention weight is dropped, in training.
        softmax_scale: factor of the scores, head_dim ** -0.5 if None.
        causal: a query sees keys up to its own position.
        layer_idx: the key of this layer's cache, needed for decoding; no two layers of a model may share it.
        dwconv: add a causal convolution of each channel over 3 tokens after the first projection (Primer,
            arXiv:2109.08668).
        rotary_emb_dim: channels of each head that rotate with the position; 0 for no rotary embedding.
        rotary_emb_base, rotary_emb_scale_base, rotary_emb_interleaved: as in `RotaryEmbedding`, so that pairs are
            halves by default; with a cache, too, where `flash_attn_with_kvcache` has the other default.
        use_alibi: add a bias linear in the distance; see `get_alibi_slopes`. Needs use_flash_attn.
        window_size: (left, right) as in `flash_attn_func`. Needs use_flash_attn.
        fused_bias_fc: use `FusedDense` for the projections.
        use_flash_attn: use `flash_attn_func` and its like.
        return_residual: return (out, x) instead of out. If a skip connection uses this x, the gradients of its two uses
            are added within a kernel.
        checkpointing: compute attention again in the backward instead of saving what the backward needs.
        head_dim: features of a head; embed_dim / num_heads if None.
        qk_norm: normalise the queries and the keys of each head, by an `RMSNorm` over head_dim each, before they rotate
            (as in Qwen3). Not with cross_attn.
        qk_norm_eps: the eps of these norms.
        qk_norm_zero_centered: they multiply by 1 + their weight (as in Gemma 3).
        qk_norm_over_heads: normalise the queries of all heads together, and the keys too (as in OLMo 2): the weights
            are then (heads * head_dim,) and (heads_kv * head_dim,).
        softcap: above 0, a score s becomes softcap * tanh(s / softcap) (as in Gemma 2). Needs use_flash_attn.

    Parameters: Wqkv ((heads + 2 heads_kv) * head_dim, embed_dim), with the rows of all query heads, then of all key
    heads, then of all value heads; with cross_attn instead Wq and Wkv. out_proj (embed_dim, heads * head_dim). With
    dwconv also dwconv_qkv; if cross_attn or if there are fewer key heads, dwconv_q and dwconv_kv instead. With qk_norm
    also q_norm and k_norm (head_dim,), which all heads share.

    Raises TypeError or ValueError for sizes and options that do not go together.

    >>> from flash_attn.modules.mha import MHA
    >>> MHA(64, 4, num_heads_kv=2, causal=True, rotary_emb_dim=16)(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
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
        super().__init__(
            embed_dim,
            num_heads,
            num_heads_kv,
            None,
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
        if cross_attn and rotary_emb_dim > 0:
            raise ValueError(f"rotary_emb_dim must be 0 with cross_attn, found {rotary_emb_dim}")
        if cross_attn and qk_norm:
            raise ValueError("qk_norm must be False with cross_attn, found True")
        self.cross_attn = cross_attn
        self.dwconv = dwconv
        self.return_residual = return_residual
        self._add_projections(qkv_proj_bias, out_proj_bias, fused_bias_fc, device=device, dtype=dtype)

    def _add_projections(self, qkv_proj_bias: bool, out_proj_bias: bool, fused_bias_fc: bool, **factory: Any) -> None:
        linear_cls: Callable[..., nn.Linear] = FusedDense if fused_bias_fc else Linear
        q_dim, kv_dim = self.num_heads * self.head_dim, 2 * self.num_heads_kv * self.head_dim
        if self.cross_attn:
            self.Wq = linear_cls(self.embed_dim, q_dim, bias=qkv_proj_bias, **factory)
            self.Wkv = linear_cls(self.embed_dim, kv_dim, bias=qkv_proj_bias, **factory)
        else:
            self.Wqkv = linear_cls(self.embed_dim, q_dim + kv_dim, bias=qkv_proj_bias, **factory)
        if self.dwconv and not self.cross_attn and self.num_heads_kv == self.num_heads:
            self.dwconv_qkv = _depthwise_conv(q_dim + kv_dim, **factory)
        elif self.dwconv:
            self.dwconv_q = _depthwise_conv(q_dim, **factory)
            self.dwconv_kv = _depthwise_conv(kv_dim, **factory)
        self.out_proj = linear_cls(q_dim, self.embed_dim, bias=out_proj_bias, **factory)

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | Tensor | None = None,
        mixer_subset: slice | list[int] | Tensor | None = None,
        inference_params: Any = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of x.

        Arguments:
            x: (batch, seqlen, embed_dim), or (total, embed_dim) with cu_seqlens.
            x_kv: (batch, seqlen_k, embed_dim), what keys and values are projected from; x if None. Needs cross_attn.
            key_padding_mask: (batch, seqlen_k) bool, true for tokens that count. Not with use_flash_attn.
            cu_seqlens: int32 (batch + 1,), where each sequence starts in x. Needs use_flash_attn.
            max_seqlen: the greatest length of a sequence, with cu_seqlens.
            mixer_subset: a slice or list that selects the tokens of x that are queries. Needs cross_attn.
            inference_params: an `InferenceParams` of `flash_attn.utils.generation`: x follows the tokens that the cache
                holds, and is appended to them. The caller must advance seqlen_offset after the step.
            kwargs: more arguments of the inner attention: causal, and for cross attention with cu_seqlens
                cu_seqlens_k and max_seqlen_k. They have no effect with inference_params. Also cp_plan, a
                `flash_attn.context_parallel.Plan`: x are then the tokens of one rank of it, (batch, cp_plan.tokens,
                embed_dim). Needs use_flash_attn; not with cross_attn, dwconv, cu_seqlens or inference_params.

        Returns (batch, seqlen, embed_dim) or (total, embed_dim), with mixer_subset only the tokens that it selects;
        with return_residual a pair of it and all of x. Raises TypeError or ValueError for arguments that do not fit
        together, before the cache is written.
        """
        self._check_call(x, x_kv, key_padding_mask, cu_seqlens, max_seqlen, mixer_subset, inference_params)
        if kwargs.get("cp_plan") is not None:
            self._refuse_with_plan(cross_attn=self.cross_attn, dwconv=self.dwconv)
        if cu_seqlens is not None:
            kwargs = dict(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen) | kwargs
        elif key_padding_mask is not None:
            kwargs = dict(key_padding_mask=key_padding_mask) | kwargs
        if self.cross_attn:
            q, kv, residual = self._projected_apart(x, x_kv, mixer_subset)
            context = self._cross_attention(q, kv, inference_params, **kwargs)
        else:
            qkv, residual = self._projected_together(x)
            context = self._self_attention(qkv, inference_params, **kwargs)
        out = self.out_proj(context)
        return out if residual is None else (out, residual)

    @staticmethod
    def _refuse_with_plan(**options: bool) -> None:
        for name, value in options.items():
            if value:
                raise ValueError(f"cp_plan can be given only without {name}, whose tokens may be on another rank")

    def _projected_apart(
        self, x: Tensor, x_kv: Tensor | None, subset: slice | list[int] | Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """q (..., heads, head_dim), kv (..., 2, heads_kv, head_dim), and the residual if it is returned."""
        q, residual = self._projected(self.Wq, x if subset is None else x[:, subset])
        if residual is not None and subset is not None:
            residual = x
        kv = self.Wkv(x if x_kv is None else x_kv)
        if self.dwconv:
            q, kv = _convolved(self.dwconv_q, q), _convolved(self.dwconv_kv, kv)
        return torch.unflatten(q, -1, (-1, self.head_dim)), torch.unflatten(kv, -1, (2, -1, self.head_dim)), residual

    def _projected_together(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """qkv (..., (heads + 2 heads_kv) * head_dim), and the residual if it is returned."""
        qkv, residual = self._projected(self.Wqkv, x)
        if self.dwconv and self.num_heads_kv == self.num_heads:
            qkv = _convolved(self.dwconv_qkv, qkv)
        elif self.dwconv:
            q_dim = self.num_heads * self.head_dim
            q, kv = qkv.split((q_dim, qkv.shape[-1] - q_dim), dim=-1)
            qkv = torch.cat([_convolved(self.dwconv_q, q), _convolved(self.dwconv_kv, kv)], dim=-1)
        return qkv, residual

    def _projected(self, linear: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(linear(x), x) if the residual is returned, else (linear(x), None)."""
        if not self.return_residual:
            return linear(x), None
        if fusing.may_fuse(linear, (FusedDense,), x):  # adds the two gradients of x
            return cast(tuple[Tensor, Tensor], fused_dense_func(x, linear.weight, linear.bias, return_residual=True))
        return linear(x), x

    def _check_call(
        self,
        x: Tensor,
        x_kv: Tensor | None,
        key_padding_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | Tensor | None,
        mixer_subset: slice | list[int] | Tensor | None,
        inference_params: Any,
    ) -> None:
        checks.tensor("x", x)
        checks.has_shape("x", x, (None,) * (2 if cu_seqlens is None else 1) + (self.embed_dim,))
        if cu_seqlens is not None and max_seqlen is None:
            raise ValueError("max_seqlen must be given with cu_seqlens, found None")
        if x_kv is not None and not self.cross_attn:
            raise ValueError("x_kv can be given only with cross_attn")
        if mixer_subset is not None and not self.cross_attn:
            raise ValueError("mixer_subset can be given only with cross_attn")
        if key_padding_mask is not None:
            if self.use_flash_attn:
                raise ValueError(
                    "key_padding_mask can be given only without use_flash_attn: pack the tokens by "
                    "flash_attn.bert_padding.unpad_input, and give cu_seqlens and max_seqlen"
                )
            if inference_params is not None:
                raise ValueError("key_padding_mask can be given only without inference_params")
        if cu_seqlens is not None:
            if not self.use_flash_attn:
                raise ValueError("cu_seqlens can be given only with use_flash_attn")
            if key_padding_mask is not None:
                raise ValueError("cu_seqlens can be given only without key_padding_mask")
            if inference_params is not None:
                raise ValueError("cu_seqlens can be given only without inference_params")
            if mixer_subset is not None:
                raise ValueError("cu_seqlens can be given only without mixer_subset")
            if self.dwconv:
                raise ValueError("cu_seqlens can be given only without dwconv")
        if inference_params is not None and self.dwconv:
            raise ValueError("inference_params can be given only without dwconv")
        leftpad = getattr(inference_params, "leftpad_per_sample", None)
        if self.cross_attn and leftpad is not None:
            raise ValueError("inference_params.leftpad_per_sample must be None with cross_attn, found a tensor")
        if x_kv is not None:
            leading = (x.shape[0], None) if cu_seqlens is None else (None,)
            checks.tensor("x_kv", x_kv, shape=(*leading, self.embed_dim))


def _depthwise_conv(channels: int, **factory: Any) -> nn.Conv1d:
    return nn.Conv1d(channels, channels, kernel_size=3, padding=2, groups=channels, **factory)


def _convolved(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """x (batch, seqlen, channels) convolved causally over seqlen: the two outputs after the last token are dropped."""
    invariance.refuse_convolutions("dwconv")
    return conv(x.transpose(1, 2))[..., :-2].transpose(1, 2)
