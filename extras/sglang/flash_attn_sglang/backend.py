"""SGLang's attention by `flash_attn`: `--attention-backend flash_attn`.

A layer of a batch is one call of `flash_attn.flash_attn_varlen_func` over SGLang's pool of tokens, in which each page
has as many tokens as SGLang says. In a CUDA graph, lengths and pages are in tensors that each replay fills anew.
"""

from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

import flash_attn

try:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc
except ImportError:  # an SGLang whose pool takes the places themselves
    KVWriteLoc = None

__all__ = ["FlashAttentionBackend", "Metadata"]


class Metadata(NamedTuple):
    """The arguments that the calls of all layers of a batch share: see `flash_attn.flash_attn_varlen_func`."""

    cu_seqlens_q: Tensor
    max_seqlen_q: int | None
    seqused_k: Tensor
    max_seqlen_k: int | None
    block_table: Tensor


class FlashAttentionBackend(AttentionBackend):
    """Attention of decoders, and of encoders that read the pool, over keys and values in 16 bits or float8_e4m3fn.

    Arguments:
        runner: SGLang's model runner.

    Raises:
        NotImplementedError: for a model with latent attention, a pool in float8_e5m2, a pool with a part for windows,
            context parallelism, or speculative decoding.
        RuntimeError: if SGLang asks for deterministic inference and flash_attn has no levels of batch invariance.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        pool = runner.token_to_kv_pool
        if getattr(runner, "use_mla_backend", False):
            raise NotImplementedError(
                "use_mla_backend must be False, found True: latent attention is not computed here"
            )
        if hasattr(pool, "swa_kv_pool"):
            raise NotImplementedError(
                f"token_to_kv_pool must have one part, found a {type(pool).__name__}: start SGLang with "
                "--disable-hybrid-swa-memory"
            )
        dtype = getattr(runner, "kv_cache_dtype", torch.bfloat16)
        if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn):
            raise NotImplementedError(
                f"kv_cache_dtype must be torch.float16, torch.bfloat16 or torch.float8_e4m3fn, found {dtype}"
            )
        self._in_float8 = dtype == torch.float8_e4m3fn
        arguments = getattr(runner, "server_args", None)
        for name in ("attn_cp_size", "dcp_size"):
            if (getattr(arguments, name, None) or 1) > 1:
                raise NotImplementedError(
                    f"{name} must be 1, found {getattr(arguments, name)}: context parallelism is not computed here"
                )
        self.forward_metadata: Metadata | None = None
        self.page_size: int = runner.page_size
        self.device = runner.device
        self.max_context_len: int = runner.model_config.context_len
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, pool
        self.attention_chunk: int = getattr(runner, "attention_chunk_size", None) or 0
        self._of_graphs: Metadata | None = None
        if getattr(arguments, "enable_deterministic_inference", False):
            if not hasattr(flash_attn, "set_batch_invariant"):
                raise RuntimeError(
                    "enable_deterministic_inference must be off with a flash_attn without set_batch_invariant, "
                    "found it on"
                )
            if flash_attn.get_batch_invariant() == 0:
                flash_attn.set_batch_invariant(2)  # at which it does not matter how a prompt is cut

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Of a batch that runs without a graph."""
        self._check(forward_batch)
        lengths = forward_batch.seq_lens.int()
        longest = _longest(forward_batch.seq_lens_cpu)
        rows = None if forward_batch.forward_mode.is_decode() else forward_batch.extend_seq_lens
        if rows is None:  # decoding; or no request, where another process has some
            ends, most = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device), 1
        else:
            ends = torch.nn.functional.pad(rows.cumsum(0), (1, 0)).int()
            most = _longest(getattr(forward_batch, "extend_seq_lens_cpu", None))
        table = self._pages(forward_batch.req_pool_indices, longest)
        self.forward_metadata = Metadata(ends, most, lengths, longest, table)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the tensors that graphs read, for batches of up to max_bs requests."""
        pages = -(-self.max_context_len // self.page_size)
        self._of_graphs = Metadata(
            torch.arange(max_bs + 1, dtype=torch.int32, device=self.device),
            1,
            torch.ones(max_bs, dtype=torch.int32, device=self.device),
            None,
            torch.zeros(max_bs, pages, dtype=torch.int32, device=self.device),
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a capture and before each replay: fill those tensors."""
        self._check(forward_batch)
        if self._of_graphs is None:
            raise RuntimeError("init_cuda_graph_state must be called before graphs are captured, found no such call")
        if not forward_batch.forward_mode.is_decode():
            raise NotImplementedError(
                f"forward_mode must be DECODE in a CUDA graph, found {forward_batch.forward_mode}"
            )
        n = forward_batch.batch_size
        all_, lengths = self._of_graphs, self._of_graphs.seqused_k[:n]
        lengths.copy_(forward_batch.seq_lens[:n])
        # Columns behind the longest entry keep what they had: nothing looks there.
        pages = self._pages(forward_batch.req_pool_indices[:n], _longest(forward_batch.seq_lens_cpu))
        all_.block_table[:n, : pages.shape[1]].copy_(pages)
        self.forward_metadata = Metadata(all_.cu_seqlens_q[: n + 1], 1, lengths, None, all_.block_table[:n])

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of an entry that pads a batch."""
        return 1

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Tensor:
        """One new token of each request; see `forward_extend`."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Tensor:
        """Attention of new tokens, (tokens, heads * head_dim), over the pool, in which k and v are stored before.

        Keywords: sinks, (heads,); return_lse, which also returns softmax_lse (tokens, heads).

        Raises:
            NotImplementedError: for cross-attention, and other keywords that are neither None nor False.
        """
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _forward(self, q, k, v, layer, forward_batch, save_kv_cache, kwargs):
        sinks, return_lse = kwargs.pop("sinks", None), kwargs.pop("return_lse", False)
        for name, value in kwargs.items():
            if value is not None and value is not False:
                raise NotImplementedError(f"{name} must be None, found a {type(value).__name__}: it is not computed")
        if getattr(layer, "is_cross_attention", False):
            raise NotImplementedError("is_cross_attention must be False, found True: it is not computed here")
        if getattr(layer, "xai_temperature_len", -1) > 0:
            raise NotImplementedError(
                f"xai_temperature_len must not be above 0, found {layer.xai_temperature_len}: it is not computed here"
            )
        if layer.logit_cap and getattr(layer, "logit_capping_method", "tanh") != "tanh":
            raise NotImplementedError(f"logit_capping_method must be 'tanh', found {layer.logit_capping_method!r}")
        scales = (getattr(layer, "k_scale", None), getattr(layer, "v_scale", None)) if self._in_float8 else ()
        if save_kv_cache and k is not None:
            place = forward_batch.out_cache_loc
            place = place if KVWriteLoc is None else KVWriteLoc(place)
            self.token_to_kv_pool.set_kv_buffer(layer, place, k, v, *scales)
        keys, values = (
            x.view(-1, self.page_size, *x.shape[1:])
            for x in (
                self.token_to_kv_pool.get_key_buffer(layer.layer_id),
                self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            )
        )
        kind = getattr(layer, "attn_type", None)
        causal = getattr(kind, "value", kind) not in ("encoder_only", "decoder_bidirectional")
        window = getattr(layer, "sliding_window_size", None)
        left = -1 if window is None or window < 0 else window  # of other keys, as SGLang counts
        metadata = self.forward_metadata
        result = flash_attn.flash_attn_varlen_func(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            keys,
            values,
            metadata.cu_seqlens_q,
            max_seqlen_q=metadata.max_seqlen_q,
            max_seqlen_k=metadata.max_seqlen_k,
            softmax_scale=layer.scaling,
            causal=causal,
            window_size=(left, 0 if causal and left >= 0 else left),
            softcap=layer.logit_cap or 0.0,
            block_table=metadata.block_table,
            learnable_sink=sinks,
            attention_chunk=self.attention_chunk if getattr(layer, "use_irope", False) else 0,
            seqused_k=metadata.seqused_k,
            return_lse=bool(return_lse),
            **dict(zip(("k_descale", "v_descale"), scales)),
        )
        out, lse = result if return_lse else (result, None)
        out = out.view(-1, layer.tp_q_head_num * layer.v_head_dim)
        return out if lse is None else (out, lse.T.contiguous())

    def _pages(self, requests: Tensor, longest: int | None) -> Tensor:
        """int32 (requests, pages): the pages of each request. None is longer than longest, if that is known."""
        tokens = self.max_context_len if longest is None else max(longest, 1)
        first = self.req_to_token_pool.req_to_token[requests, : tokens : self.page_size]
        return torch.div(first, self.page_size, rounding_mode="floor").int()

    @staticmethod
    def _check(forward_batch: Any) -> None:
        mode = forward_batch.forward_mode
        if getattr(forward_batch, "spec_info", None) is not None:
            raise NotImplementedError(f"spec_info must be None, found one in {mode}: use another backend for drafts")


def _longest(lengths: Any) -> int | None:
    """The largest of lengths on the CPU; None if they are not there."""
    if lengths is None:
        return None
    return max(lengths.tolist() if isinstance(lengths, Tensor) else lengths, default=0)
