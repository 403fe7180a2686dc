"""The fields that the decoder reads from a configuration, with their defaults and limits.

A configuration is a `transformers.GPT2Config` with additional fields; `GPT2ConfigLike` where transformers is missing.
"""

import dataclasses
import importlib.util
import numbers
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

_ALIASES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
_GATED = ("glu", "swiglu", "geglu", "geglu_tanh")

# Options of generation, which older files keep in the configuration.
_OF_GENERATION = """
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
""".split()

# Fields of transformers' configurations without effect on what the model computes.
WITHOUT_EFFECT = frozenset(_OF_GENERATION) | frozenset(
    """
    architectures attention_softmax_in_fp32 auto_map bos_token_id cache_implementation chunk_size_feed_forward
    classifier_dropout cross_attention_hidden_size decoder_start_token_id dtype eos_token_id finetuning_task
    gradient_checkpointing id2label is_decoder keys_to_ignore_at_inference label2id max_batch_size max_sequence_length
    model_type multi_query n_ctx name_or_path output_attentions output_hidden_states output_past pad_token_id prefix
    pretraining_tp problem_type reorder_and_upcast_attn return_dict scale_attention_softmax_in_fp32 sep_token_id
    source_config summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params tf_legacy_loss tie_encoder_decoder tokenizer_class torch_dtype torchscript transformers_version
    use_bfloat16 use_cache
    """.split()
)

# Fields that many families' files set to False or 0 although the model would be the same without them.
OFF_IS_USUAL = frozenset(
    """
    activation_dropout attention_bias attention_dropout attention_probs_dropout_prob embd_pdrop hidden_dropout
    hidden_dropout_prob mlp_bias qk_layernorm resid_pdrop rope_interleaved use_mrope use_qk_norm use_sliding_window
    """.split()
)

# Fields that would make another model, and the values for which they do not.
ONLY: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "is_causal": (True,),
    "is_encoder_decoder": (False, None),
    "quantization_config": (None,),
    "pruned_heads": (None, {}),
    "use_bidirectional_attention": (None, False),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the decoder is built from, each field with the default that it has where a configuration lacks it.

    Fields that neither GPT-2 nor the arguments of `MHA` and `Block` explain:

    activation_function: of the MLP; "glu", "swiglu", "geglu" and "geglu_tanh" are gated, with n_inner features rounded
        up to a multiple of mlp_multiple_of.
    prenorm: norms before attention and MLP, and one at the end; else norms after the residual additions.
    input_norms: with prenorm, whether there are norms before attention and MLP.
    output_norms: with prenorm, norms of the outputs of attention and MLP before these are added (Gemma 2, OLMo 2).
    norm_bias: whether a LayerNorm has a bias. norm_zero_centered: an RMSNorm multiplies by 1 + its weight.
    sliding_window: how many tokens a token sees, itself included.
    rotary_emb_fraction: the part of each head that rotates; 0 for no rotary embedding.
    sliding_window, rotary_emb_fraction, rotary_emb_base, rotary_emb_scaling, mlp_checkpoint_lvl: one value for all
        layers, or a list with one for each.
    rotary_emb_scaling: see `flash_attn.models._rope`.
    attn_logit_softcapping, final_logit_softcapping: scores, and logits, x become cap * tanh(x / cap).
    mup_...: factors of softmax_scale (attn), of the embeddings, of what is added to the residual stream (residual), and
        of the input of the head (output, width).
    """

    vocab_size: int
    n_embd: int
    n_layer: int
    n_head: int
    n_positions: int
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    use_flash_attn: bool = False
    fused_bias_fc: bool = False
    fused_mlp: bool = False
    fused_dense_sqrelu_dense: bool = False
    mlp_checkpoint_lvl: int | Sequence[int] = 0
    mlp_fc1_bias: bool = True
    mlp_fc2_bias: bool = True
    mlp_multiple_of: int = 128
    fused_dropout_add_ln: bool = False
    residual_in_fp32: bool = False
    prenorm: bool = True
    input_norms: bool = True
    output_norms: bool = False
    rms_norm: bool = False
    norm_zero_centered: bool = False
    norm_bias: bool = True
    parallel_block: bool = False
    parallel_block_tied_norm: bool = False
    head_dim: int | None = None
    n_head_kv: int | None = None
    qk_norm: bool = False
    qk_norm_over_heads: bool = False
    attn_logit_softcapping: float | None = None
    qkv_proj_bias: bool = True
    out_proj_bias: bool = True
    attn_dwconv: bool = False
    sliding_window: int | Sequence[int | None] | None = None
    rotary_emb_fraction: float | Sequence[float] = 0.0
    rotary_emb_base: float | Sequence[float] = 10000.0
    rotary_emb_scale_base: float | None = None
    rotary_emb_interleaved: bool = False
    rotary_emb_scaling: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None
    use_alibi: bool = False
    alibi_scaled: bool = False
    mup_scale_qk_dot_by_d: bool = False
    mup_attn_multiplier: float = 1.0
    mup_embeddings_multiplier: float = 1.0
    mup_residual_multiplier: float = 1.0
    mup_width_scale: float = 1.0
    mup_output_multiplier: float = 1.0
    pad_vocab_size_multiple: int = 1
    word_embed_proj_dim: int | None = None
    tie_word_embeddings: bool = True
    lm_head_bias: bool = False
    norm_head: bool = False
    final_logit_softcapping: float | None = None
    sequence_parallel: bool = True
    gradient_checkpointing: bool = False

    @property
    def heads_kv(self) -> int:
        return self.n_head if self.n_head_kv is None else self.n_head_kv

    @property
    def width_of_head(self) -> int:
        return self.n_embd // self.n_head if self.head_dim is None else self.head_dim

    def rotary_dim(self, layer_idx: int | None) -> int:
        return int(self.of_layer("rotary_emb_fraction", layer_idx) * self.width_of_head)

    @property
    def padded_vocab_size(self) -> int:
        return round_up(self.vocab_size, self.pad_vocab_size_multiple)

    @property
    def gated(self) -> bool:
        return self.activation_function in _GATED

    @property
    def inner(self) -> int:
        """The features within the MLP."""
        if not self.gated:
            return 4 * self.n_embd if self.n_inner is None else self.n_inner
        inner = int(8 * self.n_embd / 3) if self.n_inner is None else self.n_inner
        return round_up(inner, self.mlp_multiple_of)

    def of_layer(self, field: str, layer_idx: int | None) -> Any:
        """The value of a field that is one for all layers, or a sequence with one for each."""
        value = getattr(self, field)
        return value[layer_idx or 0] if isinstance(value, (list, tuple)) else value


def settings(config: Any) -> Settings:
    """Read a configuration. Raises ValueError, naming the field, for what the model does not support."""
    if isinstance(config, Settings):
        return config
    values = {}
    for field in dataclasses.fields(Settings):
        value = getattr(config, field.name, None)
        if value is None and field.name in _ALIASES:
            value = getattr(config, _ALIASES[field.name], None)
        if value is None and field.default is dataclasses.MISSING:
            raise ValueError(f"config.{field.name} must be given, found None")
        if value is not None:
            values[field.name] = value
    result = Settings(**values)
    _refuse_other_models(config)
    _check(result, getattr(config, "rotary_emb_dim", None))
    return result


def _refuse_other_models(config):
    for name, allowed in ONLY.items():
        refuse_unless(name, getattr(config, name, allowed[0]), allowed)


def refuse_unless(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise ValueError unless a field has one of the values that are covered."""
    if value not in allowed:
        expected = " or ".join(map(repr, allowed))
        raise ValueError(f"config.{name} must be {expected}, since this model supports nothing else, found {value!r}")


def _check(s, rotary_emb_dim):
    def check(field, condition, expected):
        if not condition:
            raise ValueError(f"config.{field} must be {expected}, found {getattr(s, field)!r}")

    for field in ("vocab_size", "n_embd", "n_head", "pad_vocab_size_multiple", "mlp_multiple_of"):
        check(field, getattr(s, field) > 0, "positive")
    for field in ("n_layer", "initializer_range"):
        check(field, getattr(s, field) >= 0, "at least 0")
    for field in ("head_dim", "n_inner", "word_embed_proj_dim"):
        check(field, getattr(s, field) is None or getattr(s, field) > 0, "positive or None")
    for field in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        check(field, 0 <= getattr(s, field) <= 1, "from 0 to 1")
    fits = s.head_dim is not None or s.n_embd % s.n_head == 0
    check("n_embd", fits, f"a multiple of n_head, {s.n_head}, without head_dim")
    check("n_head_kv", s.heads_kv > 0 and s.n_head % s.heads_kv == 0, f"a divisor of n_head, {s.n_head}")
    check("fused_mlp", not (s.fused_mlp and s.fused_dense_sqrelu_dense), "False with fused_dense_sqrelu_dense")
    levels = s.mlp_checkpoint_lvl if isinstance(s.mlp_checkpoint_lvl, (list, tuple)) else [s.mlp_checkpoint_lvl]
    check("mlp_checkpoint_lvl", s.fused_mlp or s.fused_dense_sqrelu_dense or not any(levels), "0 without fused_mlp")
    check(
        "parallel_block_tied_norm", s.parallel_block or not s.parallel_block_tied_norm, "False without parallel_block"
    )
    check("residual_in_fp32", s.prenorm or not s.residual_in_fp32, "False without prenorm")
    check("parallel_block", s.prenorm or not s.parallel_block, "False without prenorm")
    one_by_one = s.prenorm and not s.parallel_block
    check("input_norms", one_by_one or s.input_norms, "True without prenorm and with parallel_block")
    check("output_norms", one_by_one or not s.output_norms, "False without prenorm and with parallel_block")
    fits = s.mup_residual_multiplier == 1 or (one_by_one and not s.output_norms)
    check("mup_residual_multiplier", fits, "1 without prenorm, and with parallel_block or output_norms")
    check("norm_zero_centered", s.rms_norm or not s.norm_zero_centered, "False without rms_norm")
    check("norm_bias", not s.rms_norm or s.norm_bias, "True with rms_norm, which has no bias in any case")
    check("qk_norm_over_heads", s.qk_norm or not s.qk_norm_over_heads, "False without qk_norm")
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        check(field, getattr(s, field) is None or getattr(s, field) > 0, "positive or None")
    check("attn_logit_softcapping", s.use_flash_attn or s.attn_logit_softcapping is None, "None without use_flash_attn")
    check("use_alibi", s.use_flash_attn or not s.use_alibi, "False without use_flash_attn")
    check("alibi_scaled", s.use_alibi or not s.alibi_scaled, "False without use_alibi")
    check("sliding_window", s.use_flash_attn or s.sliding_window is None, "None without use_flash_attn")
    for field in _OF_LAYERS:
        value = getattr(s, field)
        fits = not isinstance(value, (list, tuple)) or len(value) == s.n_layer
        check(field, fits, f"one value, or one for each of the {s.n_layer} layers")
    windows = s.sliding_window if isinstance(s.sliding_window, (list, tuple)) else [s.sliding_window]
    fits = all(each is None or (isinstance(each, numbers.Integral) and each > 0) for each in windows)
    check("sliding_window", fits, "None or a positive integer in each layer")
    even = f"such that an even number of the {s.width_of_head} channels rotates"
    for i in range(s.n_layer):
        check("rotary_emb_fraction", 0 <= s.of_layer("rotary_emb_fraction", i) <= 1, "from 0 to 1")
        check("rotary_emb_fraction", s.rotary_dim(i) % 2 == 0, even)
        check("rotary_emb_base", s.of_layer("rotary_emb_base", i) > 0, "positive")
        scaling = s.of_layer("rotary_emb_scaling", i)
        fits = scaling is None or (isinstance(scaling, dict) and "rope_type" in scaling)
        check("rotary_emb_scaling", fits, "a dict with 'rope_type'")
    turns = any(s.rotary_dim(i) > 0 for i in range(s.n_layer))
    check("rotary_emb_scaling", turns or not s.rotary_emb_scaling, "None without rotary_emb_fraction")
    if rotary_emb_dim not in (None, 0, s.rotary_dim(0)):
        raise ValueError(
            f"config.rotary_emb_dim must be left out, since rotary_emb_fraction sets how many channels rotate, "
            f"found {rotary_emb_dim}"
        )


# Fields that may be a list with a value for each layer.
_OF_LAYERS = ("sliding_window", "mlp_checkpoint_lvl", "rotary_emb_fraction", "rotary_emb_base", "rotary_emb_scaling")
FIELDS = frozenset(field.name for field in dataclasses.fields(Settings))


def round_up(n: int, multiple_of: int) -> int:
    return (n + multiple_of - 1) // multiple_of * multiple_of


def warn_of_unknown(config: Any) -> None:
    """Warn of fields of a GPT2Config that are not known, such as misspelt ones."""
    of_rope = {"rope_parameters"} if getattr(config, "rope_scaling", None) else set()  # made of it by transformers 5
    warn_of_unread(config, {*FIELDS, *_ALIASES.values(), "rotary_emb_dim"} | of_rope)


def is_gpt2_config(config: Any) -> bool:
    """Whether `config` is a transformers.GPT2Config, or what `gpt2_config` makes where transformers is missing."""
    return isinstance(config, GPT2ConfigLike) or any(cls.__name__ == "GPT2Config" for cls in type(config).__mro__)


class GPT2ConfigLike(types.SimpleNamespace):
    """Takes the place of transformers.GPT2Config where transformers is missing: the same names, aliases included."""

    model_type = "gpt2"

    def __getattr__(self, name: str) -> Any:
        names = {alias: field for field, alias in _ALIASES.items()}
        if name in names:
            return getattr(self, names[name])
        raise AttributeError(name)

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": self.model_type} | vars(self)


def gpt2_config(**fields: Any) -> Any:
    """A transformers.GPT2Config with these fields; without transformers, an object like it."""
    if importlib.util.find_spec("transformers") is None:
        defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
        defaults = {name: value for name, value in defaults.items() if value is not dataclasses.MISSING}
        return GPT2ConfigLike(**defaults | fields)
    from transformers import GPT2Config

    return GPT2Config(**fields)


class Reader:
    """Reads fields of a configuration by the first of several names that it has, and remembers which were read."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.read: set[str] = set()

    def __call__(self, *names: str, default: Any = None) -> Any:
        """The first value that is there and not None, or else the default."""
        self.read.update(names)
        for name in names:
            value = getattr(self.config, name, None)
            if value is not None:
                return value
        return default

    def needed(self, *names: str) -> Any:
        value = self(*names)
        if value is None:
            raise ValueError(f"config.{names[0]} must be given, found None")
        return value


def warn_of_unread(config: Any, read: set[str]) -> None:
    """Warn of fields that were not read, unless they are as by default in their class, or empty."""
    try:
        defaults = vars(type(config)())
    except Exception:  # a class that needs arguments has no defaults to compare with
        defaults = {}
    unread = [
        name
        for name, value in vars(config).items()
        if not (name.startswith("_") or name in read or name in WITHOUT_EFFECT or name in ONLY)
        and not (value == defaults[name] if name in defaults else _says_nothing(name, value))
    ]
    if unread:
        warnings.warn(
            f"{type(config).__name__}: these fields are not known, and have no effect: {unread}", stacklevel=3
        )


def _says_nothing(name, value):
    """Whether a field without a default is empty. False and 0 may turn something off that is on here, so they count."""
    return value in (None, "", [], {}) or (name in OFF_IS_USUAL and value in (False, 0))


@dataclasses.dataclass(frozen=True)
class ConfigMap:
    """How the configuration of a family becomes a GPT2Config.

    copied: from our fields to theirs, or to several names that theirs may have, older ones first. Absent ones are left
        out.
    constant: from our fields to their values.
    computed: functions of a `Reader` of their configuration that return fields of ours.
    only: fields of theirs of which the model supports only these values.
    without_effect: fields of theirs that change nothing in the model.
    """

    copied: dict[str, str | tuple[str, ...]]
    constant: dict[str, Any] = dataclasses.field(default_factory=dict)
    computed: Sequence[Callable[[Reader], dict[str, Any]]] = ()
    only: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    without_effect: Sequence[str] = ()

    def __call__(self, config: Any) -> Any:
        """The GPT2Config. Raises ValueError, naming the field, for what the model does not support."""
        read = Reader(config)
        _refuse_other_models(config)
        for name, allowed in self.only.items():
            refuse_unless(name, read(name, default=allowed[0]), allowed)
        fields = dict(self.constant)
        for field, names in (_COPIED_BY_ALL | self.copied).items():
            value = read(*((names,) if isinstance(names, str) else names))
            if value is not None:
                fields[field] = value
        for compute in self.computed:
            fields |= compute(read)
        warn_of_unread(config, read.read | set(self.without_effect))
        result = gpt2_config(**fields)
        result.source_config = as_dict(config)
        settings(result)
        return result


_COPIED_BY_ALL = {
    "vocab_size": "vocab_size",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "initializer_range": "initializer_range",
}


def as_dict(config: Any) -> dict[str, Any]:
    """The fields of a configuration as config.json has them."""
    fields = config.to_dict() if hasattr(config, "to_dict") else dict(vars(config))
    return {"model_type": getattr(config, "model_type", None)} | fields
