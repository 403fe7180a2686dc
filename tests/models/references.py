"""BTLM and Baichuan, which transformers does not have, written out in float32 from their formulas."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig

from flash_attn.modules.mha import get_alibi_slopes


class BtlmConfig(PretrainedConfig):
    model_type = "btlm"

    def __init__(self, position_embedding_type="learned", **kwargs):
        super().__init__(**kwargs)
        self.position_embedding_type = position_embedding_type
        self.n_inner = 100
        self.activation_function = "swiglu"
        self.layer_norm_epsilon = 1e-5
        self.resid_pdrop = self.embd_pdrop = self.attn_pdrop = 0.0
        self.mup_width_scale = 0.5
        self.mup_embeddings_scale = 3.0
        self.mup_output_alpha = 1.5
        self.mup_scale_qk_dot_by_d = True


class BaichuanConfig(PretrainedConfig):
    model_type = "baichuan"

    def __init__(self, intermediate_size=96, **kwargs):
        super().__init__(**kwargs)
        self.intermediate_size = intermediate_size
        self.hidden_act = "silu"
        self.rms_norm_eps = 1e-6
        self.max_position_embeddings = 64
        self.model_max_length = 64
        self.tie_word_embeddings = False


def attend(q, k, v, scale, alibi):
    """Causal softmax(scale q k^T + bias) v of (batch, heads, seqlen, head_dim)."""
    heads, seqlen = q.shape[1:3]
    position = torch.arange(seqlen, device=q.device)
    scores = scale * q @ k.transpose(-1, -2)
    if alibi:
        slopes = torch.tensor(get_alibi_slopes(heads), device=q.device)[:, None, None]
        scores = scores - slopes * (position[:, None] - position).abs()
    scores = scores.masked_fill(position > position[:, None], -math.inf)
    return scores.softmax(-1).to(v.dtype) @ v


def split_heads(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Conv1D(nn.Module):
    """A linear layer that has its inputs first, as in GPT-2's checkpoints."""

    def __init__(self, inputs, outputs, std):
        super().__init__()
        self.weight = nn.Parameter(std * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class _BtlmBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        std = c.initializer_range
        self.ln_1, self.ln_2 = (nn.LayerNorm(c.n_embd, eps=c.layer_norm_epsilon) for _ in range(2))
        self.attn = nn.Module()
        self.attn.c_attn, self.attn.c_proj = Conv1D(c.n_embd, 3 * c.n_embd, std), Conv1D(c.n_embd, c.n_embd, std)
        self.mlp = nn.Module()
        self.mlp.c_fc, self.mlp.c_fc2 = (Conv1D(c.n_embd, c.n_inner, std) for _ in range(2))
        self.mlp.c_proj = Conv1D(c.n_inner, c.n_embd, std)
        self.c = c

    def forward(self, x):
        c = self.c
        q, k, v = (split_heads(each, c.n_head) for each in self.attn.c_attn(self.ln_1(x)).chunk(3, -1))
        out = attend(q, k, v, 1 / q.shape[-1], c.position_embedding_type == "alibi")
        x = x + self.attn.c_proj(out.transpose(1, 2).flatten(2))
        h = self.ln_2(x)
        return x + self.mlp.c_proj(self.mlp.c_fc(h) * F.silu(self.mlp.c_fc2(h)))


class Btlm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(c.vocab_size, c.n_embd)
        if c.position_embedding_type == "learned":
            self.transformer.wpe = nn.Embedding(c.n_positions, c.n_embd)
        self.transformer.h = nn.ModuleList(_BtlmBlock(c) for _ in range(c.n_layer))
        self.transformer.ln_f = nn.LayerNorm(c.n_embd, eps=c.layer_norm_epsilon)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        for embedding in [m for m in self.modules() if isinstance(m, nn.Embedding)]:
            nn.init.normal_(embedding.weight, std=c.initializer_range)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, ids):
        c = self.config
        x = self.transformer.wte(ids)
        if c.position_embedding_type == "learned":
            x = x + self.transformer.wpe(torch.arange(ids.shape[1], device=ids.device))
        x = x * c.mup_embeddings_scale
        for layer in self.transformer.h:
            x = layer(x)
        return transformers_output(self.lm_head(self.transformer.ln_f(x)) * (c.mup_output_alpha * c.mup_width_scale))


class _BaichuanBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps) for _ in range(2)
        )
        linear = lambda i, o: nn.Linear(i, o, bias=False)  # noqa: E731
        self.self_attn = nn.Module()
        self.self_attn.W_pack = linear(c.hidden_size, 3 * c.hidden_size)
        self.self_attn.o_proj = linear(c.hidden_size, c.hidden_size)
        self.mlp = nn.Module()
        self.mlp.gate_proj, self.mlp.up_proj = (linear(c.hidden_size, c.intermediate_size) for _ in range(2))
        self.mlp.down_proj = linear(c.intermediate_size, c.hidden_size)
        self.c = c

    def forward(self, x):
        c = self.c
        alibi = c.hidden_size >= 5000
        packed = self.self_attn.W_pack(self.input_layernorm(x))
        q, k, v = (split_heads(each, c.num_attention_heads) for each in packed.chunk(3, -1))
        if not alibi:
            q, k = rotated(q), rotated(k)
        out = attend(q, k, v, q.shape[-1] ** -0.5, alibi)
        x = x + self.self_attn.o_proj(out.transpose(1, 2).flatten(2))
        h = self.post_attention_layernorm(x)
        return x + self.mlp.down_proj(F.silu(self.mlp.gate_proj(h)) * self.mlp.up_proj(h))


def rotated(x):
    """Pairs half a head apart turn by position * 10000 ** (-2 pair / head_dim)."""
    width = x.shape[-1]
    angles = torch.outer(torch.arange(x.shape[-2]).float(), 10000.0 ** -(torch.arange(0, width, 2) / width))
    (a, b), cos, sin = x.chunk(2, -1), angles.cos().to(x), angles.sin().to(x)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Baichuan(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.model.layers = nn.ModuleList(_BaichuanBlock(c) for _ in range(c.num_hidden_layers))
        self.model.norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=c.initializer_range)

    def forward(self, ids):
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
        weight = self.lm_head.weight
        return transformers_output(F.linear(self.model.norm(x), F.normalize(weight) if len(weight) > 70000 else weight))


def transformers_output(logits):
    from transformers.modeling_outputs import CausalLMOutput

    return CausalLMOutput(logits=logits)
