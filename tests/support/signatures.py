"""The signatures of all public functions, and of the private ones that other packages call, by module and name.

Callers rely on the names, the order and the defaults of parameters. Annotations are free to change and are not shown;
a default that is a function or a class stands as its name.
"""

_HEAD = (  # of BERT
    "self, input_ids=None, *, position_ids=None, token_type_ids=None, attention_mask=None, inputs_embeds=None, "
    "labels=None, num_items_in_batch=None, return_dict=None, **options"
)
# Of ring-flash-attention: the beginnings of names and what follows the tensors, the ends and the tensors, and the rest.
_RING_LENGTHS = {
    **dict.fromkeys(("ring_flash_attn_", "zigzag_ring_flash_attn_", "stripe_flash_attn_"), ""),
    **dict.fromkeys(("ring_flash_attn_varlen_", "zigzag_ring_flash_attn_varlen_"), "cu_seqlens, max_seqlen, "),
    "llama3_flash_attn_varlen_": (
        "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice, "
    ),
}
_RING_TENSORS = {"func": "q, k, v", "kvpacked_func": "q, kv", "qkvpacked_func": "qkv"}
_RING_OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None, deterministic=False, "
    "return_attn_probs=False, group=None"
)

SIGNATURES = {
    "flash_attn.batch_invariance": {
        "batch_invariant": "level=1",
        "get_batch_invariant": "",
        "set_batch_invariant": "level",
    },
    "flash_attn.bert_padding": {
        "index_first_axis": "input, indices",
        "index_put_first_axis": "values, indices, first_axis_dim",
        "index_first_axis_residual": "input, indices",
        "IndexFirstAxis.apply": "input, indices",
        "IndexFirstAxis.forward": "ctx, input, indices",
        "IndexFirstAxis.backward": "ctx, grad_output",
        "IndexPutFirstAxis.apply": "values, indices, first_axis_dim",
        "IndexPutFirstAxis.forward": "ctx, values, indices, first_axis_dim",
        "IndexPutFirstAxis.backward": "ctx, grad_output",
        "IndexFirstAxisResidual.apply": "input, indices",
        "IndexFirstAxisResidual.forward": "ctx, input, indices",
        "IndexFirstAxisResidual.backward": "ctx, grad_output, grad_residual",
        "unpad_input": "hidden_states, attention_mask, unused_mask=None",
        "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
        "pad_input": "hidden_states, indices, batch, seqlen",
    },
    "flash_attn.context_parallel": {
        "Plan": (
            "seqlens, group, *, layout='auto', method='auto', granularity=128, pad_to=None, head_groups=None, "
            "each_document=False, heads=None, heads_k=None, "
            "window_size=(-1, -1), loss_group=None, device=None"
        ),
        "Plan.shard": "self, x, dim=1, fill=0",
        "Plan.unshard": "self, x, dim=1",
        "Plan.shard_batch": "self, batch, dims=None",
        "Plan.shift_labels": "self, labels, ignore_index=-100",
        "Plan.mean_loss": "self, loss_sum, count, group=None",
        "Plan.rotary": "self, cos, sin",
        "Plan.intervals": "self, source=None, causal=True, window_size=(-1, -1)",
        "cp_attn_func": (
            "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
            "alibi_slopes=None, deterministic=False, return_attn_probs=False, *, plan, learnable_sink=None, "
            "attention_chunk=0, return_lse=False"
        ),
        "cp_attn_kvpacked_func": (
            "q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
            "alibi_slopes=None, deterministic=False, return_attn_probs=False, *, plan, learnable_sink=None, "
            "attention_chunk=0, return_lse=False"
        ),
        "cp_attn_qkvpacked_func": (
            "qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
            "alibi_slopes=None, deterministic=False, return_attn_probs=False, *, plan, learnable_sink=None, "
            "attention_chunk=0, return_lse=False"
        ),
        "cp_attn_with_kvcache": (
            "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
            "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
            "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
            "return_softmax_lse=False, *, group, cp_interleave=1, divided_heads=False, learnable_sink=None, "
            "attention_chunk=0"
        ),
        "heads_to_seq": "x, group",
        "merge_attention": "outs, lses",
        "seq_to_heads": "x, group",
    },
    "flash_attn.context_parallel.compat.ring_flash_attn": {
        "llama3_flash_attn_prepare_cu_seqlens": "cu_seqlens, causal, rank, world_size",
        "substitute_hf_flash_attn": "process_group, heads_k_stride",
        "update_ring_flash_attn_params": "cu_seqlens, process_group",
        **{
            f"{begin}{end}": f"{tensors}, {lengths}{_RING_OPTIONS}"
            for begin, lengths in _RING_LENGTHS.items()
            for end, tensors in _RING_TENSORS.items()
        },
    },
    "flash_attn.context_parallel.compat.yunchang": {
        "LongContextAttention": (
            "scatter_idx=2, gather_idx=1, ring_impl_type='basic', use_pack_qkv=False, use_sync=False, attn_type=None, "
            "attn_processor=None"
        ),
        "LongContextAttention.forward": (
            "self, query, key, value, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), "
            "softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, *args"
        ),
        "LongContextAttentionQKVPacked": (
            "scatter_idx=3, gather_idx=1, ring_impl_type='basic', use_sync=False, attn_type=None"
        ),
        "LongContextAttentionQKVPacked.forward": "self, qkv, *args, **kwargs",
        "UlyssesAttention": (
            "sequence_process_group=None, scatter_idx=2, gather_idx=1, use_sync=False, attn_type=None"
        ),
        "basic_extract_local": "value, rank, world_size, *args, dim=1, **kwargs",
        "set_seq_parallel_pg": "sp_ulysses_degree, sp_ring_degree, rank, world_size, use_ulysses_low=True",
        "stripe_extract_local": "value, rank, world_size, rd, ud, *args, dim=1, **kwargs",
        "zigzag_extract_local": "value, rank, world_size, rd, ud, dim=1, *args, **kwargs",
    },
    "flash_attn.cute.interface": {  # of extras/flash-attn-4
        "flash_attn_func": (
            "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None), "
            "learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, "
            "score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, "
            "block_sparse_tensors_bwd=None, return_lse=False"
        ),
        "flash_attn_varlen_func": (
            "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
            "min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
            "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, "
            "num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, "
            "block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, "
            "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False"
        ),
        "flash_attn_combine": (
            "out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None, "
            "virtual_batch_idx=None, return_lse=True"
        ),
        "get_scheduler_metadata": (
            "max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, headdim_v=None, pack_gqa=None, "
            "causal=False, window_size_left=None, window_size_right=None, seqlen_k_new=0, cu_seqlens_q=None, "
            "cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, leftpad_k=None, "
            "seqlen_k_per_split=None, _arch=None"
        ),
        "_flash_attn_fwd": (  # the original has options of its tiles before num_splits
            "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
            "max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, "
            "causal=False, softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None, "
            "*, num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None, "
            "return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None, q_descale=None, "
            "k_descale=None, v_descale=None, gather_kv_indices=None, scheduler_metadata=None, "
            "seqlen_k_per_split=None, disable_scheduler_metadata=False"
        ),
        "_flash_attn_bwd": (  # and here before cu_seqlens_q
            "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, "
            "window_size_right=None, *, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
            "max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None, "
            "score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, "
            "dlse=None, learnable_sink=None"
        ),
        "_validate_head_dims": "head_dim, head_dim_v, compute_capability, alignment",
    },
    "flash_attn.flash_attn_interface": {
        "flash_attn_func": (
            "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
            "alibi_slopes=None, deterministic=False, return_attn_probs=False, "
            "*, learnable_sink=None, attn_bias=None, key_ranges=None, attention_chunk=0, seqused_q=None, "
            "seqused_k=None, return_lse=False, return_max_logit=False"
        ),
        "flash_attn_kvpacked_func": (
            "q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
            "alibi_slopes=None, deterministic=False, return_attn_probs=False, "
            "*, learnable_sink=None, attn_bias=None, key_ranges=None, attention_chunk=0, seqused_q=None, "
            "seqused_k=None, return_lse=False, return_max_logit=False"
        ),
        "flash_attn_qkvpacked_func": (
            "qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
            "alibi_slopes=None, deterministic=False, return_attn_probs=False, "
            "*, learnable_sink=None, attn_bias=None, key_ranges=None, attention_chunk=0, seqused_q=None, "
            "seqused_k=None, return_lse=False, return_max_logit=False"
        ),
        "flash_attn_varlen_func": (
            "q, k, v, cu_seqlens_q, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, dropout_p=0.0, "
            "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
            "deterministic=False, return_attn_probs=False, block_table=None, "
            "*, learnable_sink=None, attn_bias=None, key_ranges=None, attention_chunk=0, seqused_q=None, "
            "seqused_k=None, return_lse=False, return_max_logit=False, out=None, return_softmax_lse=False, "
            "num_splits=0, scheduler_metadata=None, qv=None, q_v=None, q_descale=None, k_descale=None, v_descale=None"
        ),
        "flash_attn_varlen_kvpacked_func": (
            "q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, "
            "causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
            "return_attn_probs=False, "
            "*, learnable_sink=None, attn_bias=None, key_ranges=None, attention_chunk=0, seqused_q=None, "
            "seqused_k=None, return_lse=False, return_max_logit=False"
        ),
        "flash_attn_varlen_qkvpacked_func": (
            "qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), "
            "softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, "
            "*, learnable_sink=None, attn_bias=None, key_ranges=None, attention_chunk=0, seqused_q=None, "
            "seqused_k=None, return_lse=False, return_max_logit=False"
        ),
        "flash_attn_with_kvcache": (
            "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
            "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
            "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
            "return_softmax_lse=False, *, learnable_sink=None, attn_bias=None, key_ranges=None, attention_chunk=0, "
            "return_max_logit=False, cu_seqlens_q=None, max_seqlen_q=None, out=None, scheduler_metadata=None, qv=None, "
            "q_v=None, q_descale=None, k_descale=None, v_descale=None"
        ),
        "get_scheduler_metadata": (
            "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
            "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, "
            "page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, "
            "has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0"
        ),
        "_flash_attn_forward": (
            "q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, "
            "return_softmax"
        ),
        "_flash_attn_varlen_forward": (
            "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, "
            "window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, "
            "block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0"
        ),
        "_flash_attn_backward": (
            "dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, "
            "window_size_right, softcap, alibi_slopes, deterministic, rng_state=None"
        ),
        "_flash_attn_varlen_backward": (
            "dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
            "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, "
            "deterministic, rng_state=None, zero_tensors=False"
        ),
        "maybe_contiguous": "x",
        "round_multiple": "x, m",
        "FlashAttnFunc.apply": "*args",
        "FlashAttnKVPackedFunc.apply": "*args",
        "FlashAttnQKVPackedFunc.apply": "*args",
        "FlashAttnVarlenFunc.apply": "*args",
        "FlashAttnVarlenKVPackedFunc.apply": "*args",
        "FlashAttnVarlenQKVPackedFunc.apply": "*args",
    },
    "flash_attn.functional": {
        "column_sums": "q, k, last_rows=None, **options",
        "combine": "outs, lses, *, out=None, out_dtype=None",
        "entropy": (
            "q, k, *, softmax_scale=None, causal=False, window_size=(-1, -1), key_ranges=None, attention_chunk=0"
        ),
        "float8_descale": "x, *, per_head=True",
        "merge_attn_states": "out, lse, out_a, lse_a, out_b, lse_b, *, heads_first=None",
        "row_max": "q, k, **options",
        "row_max_and_sum": "q, k, **options",
        "to_float8": "x, descale=1.0",
        "weights": "q, k, softmax_lse=None, **options",
    },
    "flash_attn.integrations.diffusers": {
        "register": "name='fused_attention'",
        "attention": (
            "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, "
            "window_size=(-1, -1), return_lse=False, _parallel_config=None"
        ),
    },
    "flash_attn.integrations.torch": {
        "register": "name='fused_attention'",
    },
    "flash_attn.integrations.transformers": {
        "register": "name='fused_attention'",
        "float8_cache": "margin=2.0",
        "attention": (
            "module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None, "
            "is_causal=None, s_aux=None, position_bias=None, sinks=None, cu_seq_lens_q=None, cu_seq_lens_k=None, "
            "max_length_q=None, max_length_k=None, cache=None, output_attentions=None, indices=None, "
            "block_indices=None, head_mask=None, cp_plan=None, **_"
        ),
        "mask": (
            "batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None, *, "
            "use_vmap=False, device='cpu', config=None, **_"
        ),
    },
    "flash_attn.masks": {
        "chunks": "size, seqlen_q, seqlen_k=None, device=None",
        "document_ids": "ids",
        "documents": "cu_seqlens, seqlen",
        "image_groups": "ids, window=-1",
        "prefix_lm": "prefix, seqlen_q, seqlen_k=None, device=None",
        "sink_and_window": "sinks, window_size, seqlen_q, seqlen_k=None, device=None",
        "to_bool": "key_ranges, seqlen_k",
        "from_bool": "keep",
        "top_left_causal": "seqlen_q, device=None",
    },
    "flash_attn.flash_attn_triton": {
        "flash_attn_func": "q, k, v, bias=None, causal=False, softmax_scale=None",
        "flash_attn_kvpacked_func": "q, kv, bias=None, causal=False, softmax_scale=None",
        "flash_attn_qkvpacked_func": "qkv, bias=None, causal=False, softmax_scale=None",
    },
    "flash_attn.fused_softmax": {
        "scaled_upper_triang_masked_softmax": "inputs, _, scale",
        "scaled_masked_softmax": "inputs, mask, scale",
        "ScaledUpperTriangMaskedSoftmax.apply": "inputs, scale",
        "ScaledMaskedSoftmax.apply": "inputs, mask, scale",
        "FusedScaleMaskSoftmax": (
            "input_in_fp16, input_in_bf16, attn_mask_type, scaled_masked_softmax_fusion, mask_func, softmax_in_fp32, "
            "scale"
        ),
        "FusedScaleMaskSoftmax.forward": "self, input, mask",
    },
    "flash_attn.layers.patch_embed": {
        "PatchEmbed": (
            "img_size=224, patch_size=16, in_chans=3, embed_dim=768, norm_layer=None, flatten=True, bias=True, "
            "fused_bias_fc=False"
        ),
        "PatchEmbed.forward": "self, x",
    },
    "flash_attn.layers.rotary": {
        "rotate_half": "x, interleaved=False",
        "apply_rotary_emb_torch": "x, cos, sin, interleaved=False",
        "apply_rotary_emb": (
            "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None"
        ),
        "apply_rotary_emb_func": (
            "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None"
        ),
        "apply_rotary_emb_qkv_": (
            "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None, "
            "cu_seqlens=None, max_seqlen=None"
        ),
        "apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
        "ApplyRotaryEmb.apply": (
            "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None"
        ),
        "ApplyRotaryEmbQKV_.apply": (
            "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None, "
            "cu_seqlens=None, max_seqlen=None"
        ),
        "ApplyRotaryEmbKV_.apply": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
        "RotaryEmbedding": (
            "dim, base=10000.0, interleaved=False, scale_base=None, device=None, *, pos_idx_in_fp32=True"
        ),
        "RotaryEmbedding.forward": (
            "self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None, cu_seqlens=None"
        ),
    },
    "flash_attn.losses.cross_entropy": {
        "CrossEntropyLoss": (
            "ignore_index=-100, reduction='mean', label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0, "
            "inplace_backward=False, process_group=None, return_z_loss=False, gradient_in_forward=None"
        ),
        "CrossEntropyLoss.forward": "self, input, target, precomputed_lse=None",
    },
    "flash_attn.losses.linear_cross_entropy": {
        "linear_cross_entropy": (
            "hidden, weight, labels, bias=None, *, num_classes=None, ignore_index=-100, reduction='mean', "
            "label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0, return_z_loss=False, chunk_size=None, "
            "process_group=None, sequence_parallel=True, softcap=0.0, token_weights=None, chunk_bytes=None"
        ),
        "cross_entropy_of_logits": (
            "logits, labels, *, num_classes=None, ignore_index=-100, reduction='mean', label_smoothing=0.0, "
            "logit_scale=1.0, lse_square_scale=0.0, return_z_loss=False, process_group=None, softcap=0.0, "
            "token_weights=None"
        ),
        "LinearCrossEntropyLoss": (
            "ignore_index=-100, reduction='mean', label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0, "
            "process_group=None, return_z_loss=False, num_classes=None, chunk_size=None, sequence_parallel=True, "
            "chunk_bytes=None"
        ),
        "LinearCrossEntropyLoss.forward": (
            "self, hidden, weight, labels, bias=None, *, softcap=0.0, token_weights=None"
        ),
        "LinearCrossEntropyLoss.of_logits": "self, logits, labels, *, softcap=0.0, token_weights=None",
    },
    "flash_attn.losses.linear_log_probs": {
        "linear_log_probs": (
            "hidden, weight, labels, bias=None, *, temperature=1.0, num_classes=None, ignore_index=-100, softcap=0.0, "
            "chunk_size=None, chunk_bytes=None, process_group=None, sequence_parallel=True"
        ),
        "LogProbs": "log_probs, entropy, lse",
    },
    "flash_attn.models.baichuan": {
        "baichuan_config_to_gpt2_config": "baichuan_config",
        "remap_state_dict_hf_baichuan": "state_dict, config",
        "inv_remap_state_dict_hf_baichuan": "state_dict, config",
    },
    "flash_attn.models.bert": {
        "create_mixer_cls": "config, cross_attn=False, return_residual=False",
        "create_mlp_cls": "config, layer_idx=None, return_residual=False",
        "create_block": "config, layer_idx=None",
        "BertEncoder": "config",
        "BertEncoder.forward": "self, hidden_states, key_padding_mask=None, subset_mask=None",
        "BertPooler": "config",
        "BertPooler.forward": "self, hidden_states, pool=True",
        "BertPredictionHeadTransform": "config",
        "BertPredictionHeadTransform.forward": "self, hidden_states",
        "BertLMPredictionHead": "config",
        "BertLMPredictionHead.forward": "self, hidden_states",
        "BertPreTrainingHeads": "config",
        "BertPreTrainingHeads.forward": "self, sequence_output, pooled_output",
        "BertPreTrainedModel": "config, *inputs, **kwargs",
        "BertPreTrainedModel.from_pretrained": (
            "model_name, config=None, *inputs, strict=False, device=None, dtype=None, torch_dtype=None, **kwargs"
        ),
        "BertModel": "config, add_pooling_layer=True",
        "BertModel.forward": (
            "self, input_ids=None, position_ids=None, token_type_ids=None, attention_mask=None, "
            "masked_tokens_mask=None, *, inputs_embeds=None, return_dict=None, **options"
        ),
        "BertForPreTraining": "config",
        "BertForPreTraining.forward": (
            "self, input_ids=None, position_ids=None, token_type_ids=None, attention_mask=None, labels=None, "
            "next_sentence_label=None, *, inputs_embeds=None, return_dict=None, **options"
        ),
        "BertForMaskedLM": "config",
        "BertForMaskedLM.forward": _HEAD,
        "BertForSequenceClassification": "config",
        "BertForSequenceClassification.forward": _HEAD,
        "BertForTokenClassification": "config",
        "BertForTokenClassification.forward": _HEAD,
        "BertForNextSentencePrediction": "config",
        "BertForNextSentencePrediction.forward": _HEAD,
        "BertForMultipleChoice": "config",
        "BertForMultipleChoice.forward": _HEAD,
        "BertForQuestionAnswering": "config",
        "BertForQuestionAnswering.forward": (
            "self, input_ids=None, *, position_ids=None, token_type_ids=None, attention_mask=None, inputs_embeds=None, "
            "start_positions=None, end_positions=None, num_items_in_batch=None, return_dict=None, **options"
        ),
        "remap_state_dict": "state_dict, config",
        "inv_remap_state_dict": "state_dict, config, legacy_names=True",
    },
    "flash_attn.models.bigcode": {
        "bigcode_config_to_gpt2_config": "bigcode_config",
        "remap_state_dict_hf_bigcode": "state_dict, config",
        "inv_remap_state_dict_hf_bigcode": "state_dict, config",
    },
    "flash_attn.models.btlm": {
        "btlm_config_to_gpt2_config": "btlm_config",
        "remap_state_dict_hf_btlm": "state_dict, config",
        "inv_remap_state_dict_hf_btlm": "state_dict, config",
    },
    "flash_attn.models.cohere": {
        "cohere_config_to_gpt2_config": "cohere_config",
        "remap_state_dict_hf_cohere": "state_dict, config",
        "inv_remap_state_dict_hf_cohere": "state_dict, config",
    },
    "flash_attn.models.falcon": {
        "falcon_config_to_gpt2_config": "falcon_config",
        "remap_state_dict_hf_falcon": "state_dict, config",
        "inv_remap_state_dict_hf_falcon": "state_dict, config",
    },
    "flash_attn.models.gemma2": {
        "gemma2_config_to_gpt2_config": "gemma2_config",
        "remap_state_dict_hf_gemma2": "state_dict, config",
        "inv_remap_state_dict_hf_gemma2": "state_dict, config",
    },
    "flash_attn.models.gpt": {
        "GPTLMHeadModel": "config, process_group=None, device=None, dtype=None",
        "GPTLMHeadModel.forward": (
            "self, input_ids=None, position_ids=None, inference_params=None, num_last_tokens=0, labels=None, *, "
            "attention_mask=None, inputs_embeds=None, loss_fn=None, num_items_in_batch=None, return_dict=None, "
            "cp_plan=None, cu_seqlens=None, max_seqlen=None, **options"
        ),
        "GPTModel": "config, process_group=None, device=None, dtype=None",
        "GPTModel.forward": (
            "self, input_ids=None, position_ids=None, inference_params=None, *, attention_mask=None, "
            "inputs_embeds=None, cp_plan=None, cu_seqlens=None, max_seqlen=None"
        ),
        "GPTPreTrainedModel": "config, *inputs, **kwargs",
        "GPTPreTrainedModel.from_config": "config, *, dtype=None, torch_dtype=None, **kwargs",
        "GPTPreTrainedModel.from_pretrained": (
            "model_name, config=None, *args, strict=True, device=None, dtype=None, world_size=1, rank=0, family=None, "
            "progress=True, torch_dtype=None, **kwargs"
        ),
        "GPTLMHeadModel.activation_checkpointing_enable": (
            "self, activation_checkpointing_kwargs=None, every_n_layers=1, offload=False"
        ),
        "GPTLMHeadModel.gradient_checkpointing_disable": "self",
        "GPTLMHeadModel.gradient_checkpointing_enable": (
            "self, gradient_checkpointing_kwargs=None, *, every_n_layers=1, offload=False, keep_attention=False"
        ),
        "GPTLMHeadModel.prepare_inputs_for_generation": "self, input_ids, attention_mask=None, **kwargs",
        "GPTLMHeadModel.set_input_embeddings": "self, value",
        "GPTLMHeadModel.set_output_embeddings": "self, new_embeddings",
        "GPTLMHeadModel.generate": (
            "self, input_ids, max_length=None, top_k=1, top_p=0.0, temperature=1.0, return_dict_in_generate=False, "
            "output_scores=False, *, max_new_tokens=None, **kwargs"
        ),
        "combine_state_dicts_tp": "state_dicts, config",
        "create_block": "config, layer_idx=None, process_group=None, device=None, dtype=None",
        "create_mixer_cls": "config, layer_idx=None, process_group=None, device=None, dtype=None",
        "create_mlp_cls": "config, layer_idx=None, process_group=None, device=None, dtype=None",
        "inv_remap_state_dict_hf_gpt2": "state_dict, config",
        "inv_remap_state_dict_megatron": "state_dict, config",
        "remap_state_dict_hf_gpt2": "state_dict, config",
        "remap_state_dict_hf_gpt_neox": "state_dict, config",
        "remap_state_dict_hf_gptj": "state_dict, config",
        "remap_state_dict_hf_llama": "state_dict, config",
        "remap_state_dict_hf_opt": "state_dict, config",
        "remap_state_dict_megatron": "state_dict, config",
        "shard_state_dict_tp": "state_dict, config, world_size, rank",
    },
    "flash_attn.models.gpt_neox": {
        "gpt_neox_config_to_gpt2_config": "gpt_neox_config",
        "inv_remap_state_dict_hf_gpt_neox": "state_dict, config",
    },
    "flash_attn.models.gptj": {
        "gptj_config_to_gpt2_config": "gptj_config",
        "inv_remap_state_dict_hf_gptj": "state_dict, config",
    },
    "flash_attn.models.llama": {
        "llama_config_to_gpt2_config": "llama_config",
        "inv_remap_state_dict_hf_llama": "state_dict, config",
        "remap_state_dict_meta_llama": "state_dict, config",
        "inv_remap_state_dict_meta_llama": "state_dict, config",
        "config_from_meta_checkpoint": "checkpoint_path, model_name",
        "config_from_hf_checkpoint": "checkpoint_path, model_name",
        "config_from_checkpoint": "checkpoint_path, model_name, checkpoint_format='meta'",
        "state_dicts_from_checkpoint": "checkpoint_path, model_name",
    },
    "flash_attn.models.olmo2": {
        "olmo2_config_to_gpt2_config": "olmo2_config",
        "remap_state_dict_hf_olmo2": "state_dict, config",
        "inv_remap_state_dict_hf_olmo2": "state_dict, config",
    },
    "flash_attn.models.opt": {
        "opt_config_to_gpt2_config": "opt_config",
        "inv_remap_state_dict_hf_opt": "state_dict, config",
    },
    "flash_attn.models.phi": {
        "phi_config_to_gpt2_config": "phi_config",
        "remap_state_dict_hf_phi": "state_dict, config",
        "inv_remap_state_dict_hf_phi": "state_dict, config",
    },
    "flash_attn.models.phi3": {
        "phi3_config_to_gpt2_config": "phi3_config",
        "remap_state_dict_hf_phi3": "state_dict, config",
        "inv_remap_state_dict_hf_phi3": "state_dict, config",
    },
    "flash_attn.models.stablelm": {
        "stablelm_config_to_gpt2_config": "stablelm_config",
        "remap_state_dict_hf_stablelm": "state_dict, config",
        "inv_remap_state_dict_hf_stablelm": "state_dict, config",
    },
    "flash_attn.models.starcoder2": {
        "starcoder2_config_to_gpt2_config": "starcoder2_config",
        "remap_state_dict_hf_starcoder2": "state_dict, config",
        "inv_remap_state_dict_hf_starcoder2": "state_dict, config",
    },
    "flash_attn.models.vit": {
        "VisionTransformer": (
            "img_size=224, patch_size=16, in_chans=3, num_classes=1000, global_pool='token', embed_dim=768, depth=12,"
            " num_heads=12, mlp_ratio=4.0, qkv_bias=True, init_values=None, class_token=True, no_embed_class=False, "
            "pre_norm=False, fc_norm=None, drop_rate=0.0, attn_drop_rate=0.0, drop_path_rate=0.0, weight_init='', "
            "embed_layer=PatchEmbed, norm_layer=None, act_layer=None, use_flash_attn=False, fused_bias_fc=False, "
            "fused_mlp=False, fused_dropout_add_ln=False"
        ),
        "VisionTransformer.from_pretrained": (
            "model_name, architecture=None, *, strict=True, device=None, dtype=None, progress=True, **kwargs"
        ),
        "VisionTransformer.save_pretrained": "self, folder, max_shard_size=5000000000",
        "VisionTransformer.forward": "self, x",
        "create_block": (
            "embed_dim, num_heads, mlp_ratio, qkv_bias, drop_rate, attn_drop_rate, drop_path1, drop_path2, "
            "norm_layer, act_layer, use_flash_attn, fused_bias_fc, fused_mlp, fused_dropout_add_ln, layer_idx=None, "
            "n_layer=None, last_layer_subset=False"
        ),
        "create_mixer_cls": "num_heads, qkv_bias, attn_drop, use_flash_attn, fused_bias_fc, cross_attn=False",
        "create_mlp_cls": "embed_dim, mlp_ratio, act_layer, fused_mlp",
        "init_weights_vit_timm": "module, name=''",
        "inv_remap_state_dict_timm": "state_dict, model",
        "remap_state_dict_timm": "state_dict, model",
        "vit_base_patch16_224": "pretrained=False, **kwargs",
        "vit_base_patch32_224": "pretrained=False, **kwargs",
        "vit_huge_patch14_224": "pretrained=False, **kwargs",
        "vit_large_patch16_224": "pretrained=False, **kwargs",
        "vit_small_patch16_224": "pretrained=False, **kwargs",
        "vit_tiny_patch16_224": "pretrained=False, **kwargs",
    },
    "flash_attn.modules.block": {
        "StochasticDepth": "p",
        "StochasticDepth.forward": "self, x",
        "Block": (
            "dim, mixer_cls=None, mlp_cls=None, norm_cls=LayerNorm, dropout_cls=Dropout, prenorm=True, "
            "resid_dropout1=0.0, resid_dropout2=0.0, drop_path1=0.0, drop_path2=0.0, fused_dropout_add_ln=False, "
            "return_residual=False, residual_in_fp32=False, sequence_parallel=False, mark_shared_params=False, *, "
            "output_cls=None"
        ),
        "Block.forward": "self, hidden_states, residual=None, mixer_subset=None, mixer_kwargs=None",
        "ParallelBlock": (
            "dim, mixer_cls=None, mlp_cls=None, norm_cls=LayerNorm, dropout_cls=Dropout, resid_dropout1=0.0, "
            "resid_dropout2=0.0, tied_norm=False, fused_dropout_add_ln=False, residual_in_fp32=False, "
            "sequence_parallel=False, mark_shared_params=False"
        ),
        "ParallelBlock.forward": "self, hidden_states1, hidden_states2=None, residual=None, mixer_kwargs=None",
        "Block.allocate_inference_cache": "self, batch_size, max_seqlen, dtype=None, **kwargs",
    },
    "flash_attn.modules.embedding": {
        "GPT2Embeddings": (
            "embed_dim, vocab_size, max_position_embeddings, padding_idx=None, word_embed_proj_dim=None, device=None,"
            " dtype=None"
        ),
        "GPT2Embeddings.forward": "self, input_ids=None, position_ids=None, *, inputs_embeds=None",
        "BertEmbeddings": (
            "embed_dim, vocab_size, max_position_embeddings, type_vocab_size, padding_idx=None, device=None, dtype=None"
        ),
        "BertEmbeddings.forward": (
            "self, input_ids=None, position_ids=None, token_type_ids=None, *, inputs_embeds=None"
        ),
        "VocabParallelEmbedding": "num_embeddings, *args, process_group=None, padding_idx=None, **kwargs",
        "VocabParallelEmbedding.forward": "self, input",
        "ColumnParallelEmbedding": "num_embeddings, embedding_dim, *args, process_group=None, **kwargs",
        "ParallelGPT2Embeddings": (
            "embed_dim, vocab_size, max_position_embeddings, process_group, padding_idx=None, sequence_parallel=True,"
            " device=None, dtype=None"
        ),
        "ParallelGPT2Embeddings.forward": "self, input_ids, position_ids=None, combine_batch_seqlen_dim=False",
    },
    "flash_attn.modules.mha": {
        "get_alibi_slopes": "nheads",
        "FlashSelfAttention": (
            "causal=False, softmax_scale=None, attention_dropout=0.0, window_size=(-1, -1), alibi_slopes=None, "
            "deterministic=False, softcap=0.0"
        ),
        "FlashSelfAttention.forward": "self, qkv, causal=None, cu_seqlens=None, max_seqlen=None, cp_plan=None",
        "FlashCrossAttention": (
            "causal=False, softmax_scale=None, attention_dropout=0.0, alibi_slopes=None, window_size=(-1, -1), "
            "deterministic=False, softcap=0.0"
        ),
        "FlashCrossAttention.forward": (
            "self, q, kv, causal=None, cu_seqlens=None, max_seqlen=None, cu_seqlens_k=None, max_seqlen_k=None, "
            "cp_plan=None"
        ),
        "CrossAttention": "causal=False, softmax_scale=None, attention_dropout=0.0",
        "CrossAttention.forward": "self, q, kv, causal=None, key_padding_mask=None, same_tokens=False",
        "SelfAttention": "causal=False, softmax_scale=None, attention_dropout=0.0",
        "SelfAttention.forward": "self, qkv, causal=None, key_padding_mask=None",
        "LinearResidual": "in_features, out_features, bias=True, device=None, dtype=None",
        "LinearResidual.forward": "self, input",
        "MHA": (
            "embed_dim, num_heads, num_heads_kv=None, cross_attn=False, qkv_proj_bias=True, out_proj_bias=True, "
            "dropout=0.0, softmax_scale=None, causal=False, layer_idx=None, dwconv=False, rotary_emb_dim=0, "
            "rotary_emb_base=10000.0, rotary_emb_scale_base=None, rotary_emb_interleaved=False, use_alibi=False, "
            "window_size=(-1, -1), fused_bias_fc=False, use_flash_attn=False, return_residual=False, "
            "checkpointing=False, device=None, dtype=None, *, head_dim=None, qk_norm=False, qk_norm_eps=1e-06, "
            "qk_norm_zero_centered=False, qk_norm_over_heads=False, softcap=0.0"
        ),
        "MHA.forward": (
            "self, x, x_kv=None, key_padding_mask=None, cu_seqlens=None, max_seqlen=None, mixer_subset=None, "
            "inference_params=None, **kwargs"
        ),
        "ParallelMHA": (
            "embed_dim, num_heads, process_group, num_heads_kv=None, qkv_proj_bias=True, out_proj_bias=True, "
            "dropout=0.0, softmax_scale=None, causal=False, layer_idx=None, rotary_emb_dim=0, "
            "rotary_emb_base=10000.0, rotary_emb_scale_base=None, rotary_emb_interleaved=False, use_alibi=False, "
            "window_size=(-1, -1), use_flash_attn=False, checkpointing=False, sequence_parallel=True, device=None, "
            "dtype=None, *, head_dim=None, qk_norm=False, qk_norm_eps=1e-06, qk_norm_zero_centered=False, "
            "qk_norm_over_heads=False, softcap=0.0"
        ),
        "ParallelMHA.forward": "self, x, seqlen=None, inference_params=None, **kwargs",
        "_update_kv_cache": "kv, inference_params, layer_idx",
    },
    "flash_attn.modules.mlp": {
        "Mlp": (
            "in_features, hidden_features=None, out_features=None, activation=gelu, bias1=True, bias2=True, "
            "return_residual=False, device=None, dtype=None"
        ),
        "ParallelMLP": (
            "in_features, hidden_features=None, out_features=None, activation=gelu, process_group=None, "
            "sequence_parallel=True, bias1=True, bias2=True, device=None, dtype=None"
        ),
        "GatedMlp": (
            "in_features, hidden_features=None, out_features=None, activation=sigmoid, bias1=True, bias2=True, "
            "multiple_of=128, return_residual=False, device=None, dtype=None"
        ),
        "ParallelGatedMlp": (
            "in_features, process_group, hidden_features=None, out_features=None, activation=sigmoid, bias1=True, "
            "bias2=True, multiple_of=128, sequence_parallel=True, device=None, dtype=None"
        ),
    },
    "flash_attn.ops.activations": {
        "bias_gelu": "y, bias",
        "bias_gelu_back": "g, y, bias",
        "bias_gelu_impl": "input, bias",
        "gelu_fwd": "x",
        "gelu_bwd": "g, x",
        "fast_gelu_impl": "input",
        "relu_bwd": "g, x",
        "sqrelu_fwd": "x",
        "sqrelu_bwd": "g, x",
        "swiglu_fwd": "x, y",
        "swiglu_bwd": "x, y, g",
        "swiglu": "x, y",
        "swiglu_of_halves": "x",
        "GeLUFunction.apply": "input, bias",
        "FastGeLUFunction.apply": "input",
        "SwiGLUFunction.apply": "x, y",
    },
    "flash_attn.ops.fused_dense": {
        "fused_dense_func": "x, weight, bias=None, return_residual=False, process_group=None, sequence_parallel=True",
        "FusedDenseFunc.apply": (
            "x, weight, bias=None, return_residual=False, process_group=None, sequence_parallel=True"
        ),
        "fused_mlp_func": (
            "x, weight1, weight2, bias1=None, bias2=None, activation='gelu_approx', save_pre_act=True, "
            "return_residual=False, checkpoint_lvl=0, heuristic=0, process_group=None, sequence_parallel=True"
        ),
        "FusedMLPFunc.apply": (
            "x, weight1, bias1, weight2, bias2, activation='gelu_approx', save_pre_act=True, return_residual=False, "
            "checkpoint_lvl=0, heuristic=0, process_group=None, sequence_parallel=True"
        ),
        "Linear": "in_features, out_features, bias=True, device=None, dtype=None",
        "Linear.forward": "self, input",
        "FewRowsLinear": "in_features, out_features, bias=True, device=None, dtype=None",
        "FewRowsLinear.forward": "self, input",
        "FusedDense": "in_features, out_features, bias=True, return_residual=False, device=None, dtype=None",
        "FusedDense.forward": "self, x, process_group=None",
        "ColumnParallelLinear": (
            "in_features, out_features, process_group, bias=True, sequence_parallel=True, multiple_of=1, device=None,"
            " dtype=None, *, share=None"
        ),
        "ColumnParallelLinear.forward": "self, x",
        "RowParallelLinear": (
            "in_features, out_features, process_group, bias=True, sequence_parallel=True, multiple_of=1, device=None,"
            " dtype=None, *, share=None"
        ),
        "RowParallelLinear.forward": "self, x",
        "FusedMLP": (
            "in_features, hidden_features=None, out_features=None, bias1=True, bias2=True, activation='gelu_approx', "
            "return_residual=False, checkpoint_lvl=0, heuristic='auto', device=None, dtype=None"
        ),
        "FusedMLP.forward": "self, x, process_group=None",
        "ParallelFusedMLP": (
            "in_features, hidden_features=None, out_features=None, activation='gelu_approx', process_group=None, "
            "bias1=True, bias2=True, sequence_parallel=True, checkpoint_lvl=0, heuristic='auto', device=None, "
            "dtype=None"
        ),
        "ParallelFusedMLP.forward": "self, x",
    },
    "flash_attn.ops.layer_norm": {
        "layer_norm": "x, weight, bias, epsilon",
        "dropout_add_layer_norm": (
            "x0, residual, weight, bias, dropout_p, epsilon, rowscale=None, layerscale=None, prenorm=False, "
            "residual_in_fp32=False, return_dropout_mask=False"
        ),
        "dropout_add_layer_norm_subset": (
            "x0, residual, weight, bias, dropout_p, epsilon, layerscale=None, x0_subset=None, out_subset=None, "
            "rowscale_const=1.0, out_numrows=0, prenorm=False, residual_in_fp32=False, return_dropout_mask=False"
        ),
        "dropout_add_layer_norm_parallel_residual": (
            "x0, x1, residual, weight0, bias0, weight1, bias1, dropout_p, epsilon, prenorm=False, "
            "residual_in_fp32=False, return_dropout_mask=False"
        ),
        "DropoutAddLayerNormFn.apply": (
            "x0, residual, gamma, beta, rowscale, colscale, dropout_p, epsilon, residual_in_fp32=False, "
            "prenorm=False, is_rms_norm=False, return_dmask=False"
        ),
        "DropoutAddLayerNormSubsetFn.apply": (
            "x0, residual, gamma, beta, colscale, x0_subset, out_subset, dropout_p, epsilon, rowscale_const, "
            "out_numrows, residual_in_fp32=False, prenorm=False, is_rms_norm=False, return_dmask=False"
        ),
        "DropoutAddLayerNormParallelResidualFn.apply": (
            "x0, x1, residual, gamma0, beta0, gamma1, beta1, dropout_p, epsilon, residual_in_fp32=False, "
            "prenorm=False, is_rms_norm=False, return_dmask=False"
        ),
        "DropoutAddLayerNorm": (
            "hidden_size, prenorm=False, p=0.0, eps=1e-05, residual_in_fp32=False, device=None, dtype=None"
        ),
        "DropoutAddLayerNorm.forward": "self, x0, residual=None",
        "maybe_align": "x, alignment_in_bytes=16",
    },
    "flash_attn.ops.rms_norm": {
        "rms_norm": "x, weight, epsilon",
        "dropout_add_rms_norm": (
            "x0, residual, weight, bias, dropout_p, epsilon, rowscale=None, layerscale=None, prenorm=False, "
            "residual_in_fp32=False, return_dropout_mask=False"
        ),
        "dropout_add_rms_norm_subset": (
            "x0, residual, weight, bias, dropout_p, epsilon, layerscale=None, x0_subset=None, out_subset=None, "
            "rowscale_const=1.0, out_numrows=0, prenorm=False, residual_in_fp32=False, return_dropout_mask=False"
        ),
        "dropout_add_rms_norm_parallel_residual": (
            "x0, x1, residual, weight0, bias0, weight1, bias1, dropout_p, epsilon, prenorm=False, "
            "residual_in_fp32=False, return_dropout_mask=False"
        ),
        "DropoutAddRMSNorm": (
            "hidden_size, prenorm=False, p=0.0, eps=1e-05, residual_in_fp32=False, device=None, dtype=None"
        ),
        "RMSNorm": "hidden_size, eps=1e-05, device=None, dtype=None",
        "RMSNorm.forward": "self, x",
    },
    "flash_attn.ops.triton.cross_entropy": {
        "cross_entropy_loss": (
            "logits, labels, precomputed_lse=None, label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0, "
            "ignore_index=-100, inplace_backward=False, process_group=None, gradient_in_forward=False"
        ),
        "CrossEntropyLoss.apply": (
            "logits, labels, precomputed_lse=None, label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0, "
            "ignore_index=-100, inplace_backward=False, process_group=None, gradient_in_forward=False"
        ),
    },
    "flash_attn.ops.triton.k_activations": {
        "get_triton_activation_kernel": "activation",
        "get_triton_activation_bwd_kernel": "activation",
    },
    "flash_attn.ops.triton.layer_norm": {
        "layer_norm_fn": (
            "x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-06, dropout_p=0.0, "
            "rowscale=None, prenorm=False, residual_in_fp32=False, zero_centered_weight=False, is_rms_norm=False, "
            "return_dropout_mask=False, out_dtype=None, out=None, residual_out=None"
        ),
        "rms_norm_fn": (
            "x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-06, dropout_p=0.0, "
            "rowscale=None, prenorm=False, residual_in_fp32=False, zero_centered_weight=False, "
            "return_dropout_mask=False, out_dtype=None, out=None, residual_out=None"
        ),
        "LayerNormFn.apply": (
            "x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-06, dropout_p=0.0, "
            "rowscale=None, prenorm=False, residual_in_fp32=False, zero_centered_weight=False, is_rms_norm=False, "
            "return_dropout_mask=False, out_dtype=None, out=None, residual_out=None"
        ),
        "layer_norm_linear_fn": (
            "x, norm_weight, norm_bias, linear_weight, linear_bias, residual=None, eps=1e-06, prenorm=False, "
            "residual_in_fp32=False, is_rms_norm=False"
        ),
        "LayerNormLinearFn.apply": (
            "x, norm_weight, norm_bias, linear_weight, linear_bias, residual=None, eps=1e-06, prenorm=False, "
            "residual_in_fp32=False, is_rms_norm=False"
        ),
        "RMSNorm": "hidden_size, eps=1e-05, dropout_p=0.0, zero_centered_weight=False, device=None, dtype=None",
        "RMSNorm.forward": "self, x, residual=None, prenorm=False, residual_in_fp32=False",
        "layer_norm_ref": (
            "x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-06, dropout_p=0.0, "
            "rowscale=None, prenorm=False, zero_centered_weight=False, dropout_mask=None, dropout_mask1=None, "
            "upcast=False"
        ),
        "rms_norm_ref": (
            "x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-06, dropout_p=0.0, "
            "rowscale=None, prenorm=False, zero_centered_weight=False, dropout_mask=None, dropout_mask1=None, "
            "upcast=False"
        ),
    },
    "flash_attn.ops.triton.linear": {
        "triton_linear_act": "x, weight, bias=None, activation='id', save_act_input=False",
        "triton_dgrad_act": "grad_output, weight, activation='id', act_input=None",
        "init_to_zero": "name",
        "get_configs_io_bound": "",
    },
    "flash_attn.ops.triton.mlp": {
        "fused_dense_sqrelu_dense_function": "x, weight1, bias1, weight2, bias2, checkpoint_lvl=0",
        "FusedDenseSqreluDenseFunc.apply": "x, weight1, bias1, weight2, bias2, checkpoint_lvl=0",
        "FusedDenseSqreluDense": (
            "in_features, hidden_features=None, out_features=None, bias1=True, bias2=True, checkpoint_lvl=0, "
            "device=None, dtype=None"
        ),
        "FusedDenseSqreluDense.forward": "self, x",
    },
    "flash_attn.ops.linear": {
        "batch_invariant_layers": "",
        "batch_invariant_linear": "x, weight, bias=None",
    },
    "flash_attn.ops.triton.rotary": {
        "apply_rotary": (
            "x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, interleaved=False, inplace=False, "
            "conjugate=False"
        ),
    },
    "flash_attn.precision": {
        "use_exact_gradients": "mode=True",
        "uses_exact_gradients": "",
    },
    "flash_attn.utils.benchmark": {
        "benchmark_forward": (
            "fn, *inputs, repeats=10, desc='', verbose=True, amp=False, amp_dtype=torch.float16, **kwinputs"
        ),
        "benchmark_backward": (
            "fn, *inputs, grad=None, repeats=10, desc='', verbose=True, amp=False, amp_dtype=torch.float16, **kwinputs"
        ),
        "benchmark_combined": (
            "fn, *inputs, grad=None, repeats=10, desc='', verbose=True, amp=False, amp_dtype=torch.float16, **kwinputs"
        ),
        "benchmark_fwd_bwd": (
            "fn, *inputs, grad=None, repeats=10, desc='', verbose=True, amp=False, amp_dtype=torch.float16, **kwinputs"
        ),
        "benchmark_all": (
            "fn, *inputs, grad=None, repeats=10, desc='', verbose=True, amp=False, amp_dtype=torch.float16, **kwinputs"
        ),
        "pytorch_profiler": (
            "fn, *inputs, trace_filename=None, backward=False, amp=False, amp_dtype=torch.float16, cpu=False, "
            "verbose=True, **kwinputs"
        ),
        "benchmark_memory": "fn, *inputs, desc='', verbose=True, **kwinputs",
    },
    "flash_attn.parallel": {
        "Meshes": "whole, dp_replicate, dp_shard, cp, tp, batch, fsdp, loss, hsdp",
        "build_mesh": "dp_replicate=1, dp_shard=-1, cp=1, tp=1, *, device_type=None",
        "chunked": "module, x, chunks, parameters=None",
        "set_mlp_chunks": "model, chunks",
        "to_dtensor": "model, tp_mesh",
    },
    "flash_attn.utils.recompute": {
        "keep_attention": "offload=False",
        "state_of_forward": "x",
    },
    "flash_attn.utils.distributed": {
        "all_gather_raw": "input_, process_group, async_op=False",
        "reduce_scatter_raw": "input_, process_group, async_op=False",
        "all_reduce_raw": "input_, process_group, async_op=False",
        "all_gather": "input_, process_group",
        "reduce_scatter": "input_, process_group",
        "all_reduce": "input_, process_group",
        "replicated": "input_, process_group",
        "sync_shared_params": "model, process_group",
        "allreduce_sequence_parallel_grad": "model, process_group",
        "get_dim_for_local_rank": "dim, world_size, local_rank, multiple_of=1",
        "backends_of": "process_group=None",
        "host_group": "process_group",
        "device_of": "process_group",
    },
    "flash_attn.utils.generation": {
        "InferenceParams": (
            "max_seqlen, max_batch_size, seqlen_offset=0, batch_size_offset=0, key_value_memory_dict=<factory>, "
            "lengths_per_sample=None, leftpad_per_sample=None, writers=<factory>, block_table=None"
        ),
        "GreedySearchDecoderOnlyOutput": "sequences, scores=None",
        "SampleDecoderOnlyOutput": "sequences, scores=None",
        "modify_logits_for_top_k_filtering": "logits, top_k",
        "modify_logits_for_top_p_filtering": "logits, top_p",
        "modify_logits_for_repetition_penalty": "logits, tokens, repetition_penalty",
        "sample": "logits, top_k=1, top_p=0.0, temperature=1.0",
        "sample_speculative": "logits, logits_draft, tokens_draft, top_k=1, top_p=0.0, temperature=1.0",
        "decode": (
            "input_ids, model, max_length, top_k=1, top_p=0.0, temperature=1.0, eos_token_id=None, "
            "teacher_outputs=None, vocab_size=None, tensor_parallel=1, cg=False, enable_timing=False, "
            "repetition_penalty=1.0, output_scores=True, streamer=None, attention_mask=None, pad_token_id=None, *, "
            "page_size=None, num_pages=None"
        ),
        "decode_speculative": (
            "input_ids, model, model_draft, max_length, speculative_lookahead=3, top_k=1, top_p=0.0, temperature=1.0,"
            " eos_token_id=None, vocab_size=None, tensor_parallel=1, cg=False, enable_timing=False, debug=False, "
            "streamer=None, *, page_size=None, num_pages=None"
        ),
        "GenerationMixin": "",
        "allocate_inference_cache": "max_batch_size, max_seqlen, nheads, headdim, layers, device, dtype=torch.float16",
        "DecodingCGCache": (
            "max_batch_size=0, max_seqlen=0, device=None, dtype=None, callables=<factory>, mempool=None, "
            "inference_params=None, autocast=None, addresses=<factory>, pool=None, level=0"
        ),
        "update_graph_cache": (
            "model, cache, batch_size, seqlen_og, max_seqlen, decoding_seqlens=(1,), tensor_parallel=1, dtype=None, "
            "n_warmups=2, *, page_size=None, num_pages=None"
        ),
        "PageAllocator": "num_pages, page_size",
        "copy_pages": "caches, copies",
        "capture_graph": (
            "model, inference_params, batch_size, max_seqlen, decoding_seqlen=1, mempool=None, n_warmups=2"
        ),
        "GenerationMixin.generate": (
            "self, input_ids, max_length=None, top_k=1, top_p=0.0, temperature=1.0, return_dict_in_generate=False, "
            "output_scores=False, *, max_new_tokens=None, **kwargs"
        ),
    },
    "flash_attn.utils.library": {
        "triton_op": "name, fn=None, /, *, mutates_args, schema=None, allow_decomposition=True",
    },
    "flash_attn.utils.pretrained": {
        "state_dict_from_pretrained": "model_name, device=None, dtype=None, **hub",
        "checkpoint_files": "model_name, **hub",
        "config_of_pretrained": "model_name, name='config.json', **hub",
        "dtype_of_pretrained": "model_name, **hub",
        "config_is_missing": "model_name, needed='config', **hub",
        "existing_device": "device",
        "load_file": "path, device=None, dtype=None",
        "pieces_of_file": "path",
    },
    "flash_attn.utils.testing": {
        "generate_random_padding_mask": "max_seqlen, batch_size, device, mode='random', zero_lengths=False",
        "generate_qkv": (
            "q, k, v, query_padding_mask=None, key_padding_mask=None, qv=None, kvpacked=False, qkvpacked=False, "
            "query_unused_mask=None, key_unused_mask=None"
        ),
        "construct_local_mask": (
            "seqlen_q, seqlen_k, window_size=(-1, -1), sink_token_length=0, query_padding_mask=None, "
            "key_padding_mask=None, key_leftpad=None, device=None"
        ),
        "construct_chunk_mask": (
            "seqlen_q, seqlen_k, attention_chunk, query_padding_mask=None, key_padding_mask=None, key_leftpad=None, "
            "device=None"
        ),
        "attention_ref": (
            "q, k, v, query_padding_mask=None, key_padding_mask=None, key_leftpad=None, attn_bias=None, "
            "dropout_p=0.0, dropout_mask=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,"
            " window_size=(-1, -1), attention_chunk=0, sink_token_length=0, softcap=0.0, upcast=True, "
            "reorder_ops=False, intermediate_dtype=None"
        ),
    },
    "flash_attn.utils.torch": {
        "custom_amp_decorator": "dec, cuda_amp_deprecated",
        "custom_fwd": "*args, **kwargs",
        "custom_bwd": "*args, **kwargs",
    },
    "dropout_layer_norm": {
        "dropout_add_ln_fwd": (
            "x0, residual, gamma, beta_, rowscale_, colscale_, x0_subset_, z_subset_, dropout_p, epsilon, "
            "rowscale_const, z_numrows, gen_, residual_in_fp32=False, is_rms_norm=False"
        ),
        "dropout_add_ln_parallel_residual_fwd": (
            "x0, x1_, residual, gamma0, beta0_, gamma1_, beta1_, dropout_p, epsilon, gen_, residual_in_fp32=False, "
            "is_rms_norm=False"
        ),
        "dropout_add_ln_bwd": (
            "dz, dx_, x, x0_, dmask_, mu, rsigma, gamma, rowscale_, colscale_, x0_subset_, z_subset_, dropout_p, "
            "rowscale_const, x0_numrows, has_residual, is_rms_norm=False"
        ),
        "dropout_add_ln_parallel_residual_bwd": (
            "dz0, dz1_, dx_, x, dmask0_, dmask1_, mu, rsigma, gamma0, gamma1_, dropout_p, has_x1, has_residual, "
            "is_rms_norm=False"
        ),
    },
    "flash_attn_sglang.interface": {  # of extras/sglang
        "flash_attn_varlen_func": (
            "q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None, "
            "seqused_k=None, page_table=None, softmax_scale=None, causal=False, qv=None, q_descale=None, "
            "k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, "
            "pack_gqa=None, only_qv=False, sm_margin=0, return_softmax_lse=False, sinks=None, out=None"
        ),
        "flash_attn_with_kvcache": (
            "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
            "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
            "max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, "
            "softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=None, softcap=0.0, "
            "rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, only_qv=False, "
            "sm_margin=0, return_softmax_lse=False, sinks=None, out=None"
        ),
    },
    "flash_attn_sglang": {"register": ""},
    "flash_attn_vllm.interface": {  # of extras/vllm
        "flash_attn_varlen_func": (
            "q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, "
            "dropout_p=0.0, softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None, "
            "deterministic=False, return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, "
            "scheduler_metadata=None, q_descale=None, k_descale=None, v_descale=None, num_splits=0, "
            "output_scale=None, fa_version=2, s_aux=None, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None, "
            "mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_tensor_leading_dims=None, "
            "dynamic_causal=None, gather_kv_indices=None, gather_kv_valid_length=None"
        ),
        "get_scheduler_metadata": (
            "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
            "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, "
            "page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), has_softcap=False, num_splits=0, "
            "pack_gqa=None, sm_margin=0"
        ),
    },
    "flash_attn_vllm": {"register": ""},
    "flash_attn_interface": {  # of extras/flash-attn-3; s_aux and what is after other * is not the original's
        "flash_attn_func": (
            "q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
            "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
            "sm_margin=0, return_attn_probs=False, *, s_aux=None"
        ),
        "flash_attn_varlen_func": (
            "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, "
            "softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
            "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
            "sm_margin=0, return_attn_probs=False, *, s_aux=None, sinks=None, page_table=None, out=None, "
            "return_softmax_lse=False, only_qv=False"
        ),
        "flash_attn_qkvpacked_func": (
            "qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, "
            "window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, "
            "sm_margin=0, return_attn_probs=False, *, s_aux=None"
        ),
        "flash_attn_with_kvcache": (
            "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
            "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
            "max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, "
            "softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
            "rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
            "return_softmax_lse=False, *, s_aux=None, sinks=None, out=None, only_qv=False"
        ),
        "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
        "get_scheduler_metadata": (
            "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
            "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, "
            "page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, "
            "has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0"
        ),
        "round_up_headdim": "head_size",
        "_flash_attn_forward": (
            "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, "
            "cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, "
            "page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, "
            "seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, "
            "window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
            "scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0, "
            "*, out=None, window_size=None, s_aux=None"
        ),
        "_flash_attn_backward": (
            "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, "
            "max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, "
            "window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0, "
            "*, causal=None, window_size=None"
        ),
    },
    "flash_attn_2_cuda": {
        "bwd": (
            "dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes, dropout_p, softmax_scale, causal, "
            "window_left, window_right, softcap, deterministic, generator=None, rng_state=None, /"
        ),
        "fwd": (
            "q, k, v, out, alibi_slopes, dropout_p, softmax_scale, causal, window_left, window_right, softcap, "
            "return_softmax, generator=None, /"
        ),
        "fwd_kvcache": (
            "q, k_cache, v_cache, k, v, cache_seqlens, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, "
            "block_table, alibi_slopes, out, softmax_scale, causal, window_left, window_right, softcap, "
            "rotary_interleaved, num_splits, /"
        ),
        "varlen_bwd": (
            "dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q, "
            "max_seqlen_k, dropout_p, softmax_scale, zero_tensors, causal, window_left, window_right, softcap, "
            "deterministic, generator=None, rng_state=None, /"
        ),
        "varlen_fwd": (
            "q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, max_seqlen_q,"
            " max_seqlen_k, dropout_p, softmax_scale, zero_tensors, causal, window_left, window_right, softcap, "
            "return_softmax, generator=None, num_splits=0, /"
        ),
    },
    "fused_dense_lib": {
        "linear_bias_wgrad": "input, d_output, has_d_bias, /",
        "linear_act_forward": "input, weight, bias, is_gelu, save_pre_act, heuristic, /",
        "bias_act_linear_dgrad_bgrad": "weight, d_output, pre_act, is_gelu, heuristic, /",
    },
    "fused_softmax_lib": {
        "scaled_masked_softmax_forward": "input, mask, scale, /",
        "scaled_masked_softmax_backward": "output_grads, softmax_results, scale, /",
        "scaled_masked_softmax_get_batch_per_block": "query_seq_len, key_seq_len, batches, attn_heads, /",
        "scaled_upper_triang_masked_softmax_forward": "input, scale, /",
        "scaled_upper_triang_masked_softmax_backward": "output_grads, softmax_results, scale, /",
    },
    "rotary_emb": {
        "apply_rotary": "x1, x2, cos, sin, out1, out2, conj, /",
    },
    "xentropy_cuda_lib": {
        "forward": "input, labels, smoothing, total_classes=-1",
        "backward": "grad_loss, logits, max_log_sum_exp, labels, smoothing, inplace, total_classes=-1",
    },
}

# What others import besides the functions and layers above: other classes, constants, and names under a second path.
OTHER_NAMES = {
    "flash_attn.utils.generation": "OutOfPages",
    "flash_attn": (
        "flash_attn_func flash_attn_kvpacked_func flash_attn_qkvpacked_func flash_attn_varlen_func "
        "flash_attn_varlen_kvpacked_func flash_attn_varlen_qkvpacked_func flash_attn_with_kvcache"
    ),
    "flash_attn.bert_padding": "IndexFirstAxis IndexFirstAxisResidual IndexPutFirstAxis",
    "flash_attn.context_parallel.compat.yunchang": "AttnType EXTRACT_FUNC_DICT RING_IMPL_QKVPACKED_DICT",
    "flash_attn.flash_attn_interface": (
        "FlashAttnFunc FlashAttnKVPackedFunc FlashAttnQKVPackedFunc FlashAttnVarlenFunc FlashAttnVarlenKVPackedFunc "
        "FlashAttnVarlenQKVPackedFunc USE_TRITON_ROCM flash_attn_gpu"
    ),
    "flash_attn.fused_softmax": "AttnMaskType ScaledMaskedSoftmax ScaledUpperTriangMaskedSoftmax",
    "flash_attn.integrations.transformers": "Mask",
    "flash_attn.layers.rotary": "ApplyRotaryEmb ApplyRotaryEmbKV_ ApplyRotaryEmbQKV_",
    "flash_attn.models.bert": (
        "BertForPreTrainingOutput BertForQuestionAnsweringOutput BertHeadOutput BertModelOutput Config _init_weights"
    ),
    "flash_attn.models.gpt": "_init_weights remap_state_dict_hf_bigcode remap_state_dict_hf_falcon",
    "flash_attn.models.gpt_neox": "remap_state_dict_hf_gpt_neox",
    "flash_attn.models.gptj": "remap_state_dict_hf_gptj",
    "flash_attn.models.llama": "remap_state_dict_hf_llama",
    "flash_attn.models.opt": "remap_state_dict_hf_opt",
    "flash_attn.modules.mha": (
        "ColumnParallelLinear FusedDense RotaryEmbedding RowParallelLinear flash_attn_kvpacked_func "
        "flash_attn_qkvpacked_func flash_attn_varlen_kvpacked_func flash_attn_varlen_qkvpacked_func "
        "flash_attn_with_kvcache get_dim_for_local_rank"
    ),
    "flash_attn.modules.mlp": "FusedMLP ParallelFusedMLP",
    "flash_attn.ops.activations": "FastGeLUFunction GeLUFunction SwiGLUFunction",
    "flash_attn.ops.fused_dense": "FusedDenseFunc FusedMLPFunc",
    "flash_attn.ops.layer_norm": (
        "DropoutAddLayerNormFn DropoutAddLayerNormParallelResidualFn DropoutAddLayerNormSubsetFn"
    ),
    "flash_attn.ops.triton.cross_entropy": "CrossEntropyLoss",
    "flash_attn.ops.triton.k_activations": "Activation",
    "flash_attn.ops.triton.layer_norm": "LayerNormFn LayerNormLinearFn",
    "flash_attn.ops.triton.mlp": "FusedDenseSqreluDenseFunc",
    "flash_attn.utils.distributed": "AllGatherFunc AllReduceFunc ReduceScatterFunc ReplicatedFunc",
}
