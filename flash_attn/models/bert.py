"""BERT (Devlin et al., arXiv:1810.04805), with the heads and the checkpoints of transformers.

    model = BertForSequenceClassification.from_pretrained("path/to/checkpoint")
    logits = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits

Configurations are transformers' `BertConfig`, or any object with its fields. Additional fields, each with a default
(see `OPTIONS` in _bert_config.py), choose how the model computes: with `use_flash_attn`, padding is removed from a
batch before the layers and put back after them; with `dense_seq_output` and `last_layer_subset`, the head for masked
tokens and the last layer skip all other tokens. A field that asks for what this model does not support raises an error.

With use_flash_attn and an attention mask, hidden states of padding are zero; without, they are like transformers'.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_attn._ops import checks, xentropy
from flash_attn.bert_padding import index_first_axis, index_put_first_axis, pad_input, unpad_input
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.models._bert_config import TANH_GELUS, Config, check_config, option, padded_vocab_size
from flash_attn.models._checkpoints import bert as checkpoints
from flash_attn.models._checkpoints.bert import inv_remap_state_dict, remap_state_dict
from flash_attn.models._checkpoints.tied_weights import TiedWeights
from flash_attn.models._outputs import ModelOutput
from flash_attn.models._trainers import (
    LayerStack,
    TrainerMethods,
    as_asked,
    check_options,
    divided_by_items,
    tokens_of,
)
from flash_attn.modules.block import Block, _add_and_norm, _Branch
from flash_attn.modules.embedding import BertEmbeddings
from flash_attn.modules.mha import MHA
from flash_attn.modules.mlp import FusedMLP, Mlp
from flash_attn.ops.fused_dense import FusedDense

__all__ = [
    "BertEncoder",
    "BertForMaskedLM",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForPreTrainingOutput",
    "BertForQuestionAnswering",
    "BertForQuestionAnsweringOutput",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertHeadOutput",
    "BertLMPredictionHead",
    "BertModel",
    "BertModelOutput",
    "BertPooler",
    "BertPreTrainedModel",
    "BertPreTrainingHeads",
    "BertPredictionHeadTransform",
    "Config",
    "create_block",
    "create_mixer_cls",
    "create_mlp_cls",
    "inv_remap_state_dict",
    "remap_state_dict",
]

# ---------------------------------------------------------------------------------------------------------------------
# Layers


def create_mixer_cls(
    config: Config, cross_attn: bool = False, return_residual: bool = False
) -> Callable[[int], nn.Module]:
    """Returns a function hidden_size -> the attention of a layer.

    Arguments:
        config: a BertConfig.
        cross_attn: queries have a projection of their own.
        return_residual: the attention returns (output, input).

    Example:
        >>> from flash_attn.models.bert import create_mixer_cls
        >>> from transformers import BertConfig
        >>> config = BertConfig(hidden_size=64, num_attention_heads=4)
        >>> create_mixer_cls(config)(64)(torch.randn(2, 7, 64)).shape
        torch.Size([2, 7, 64])
    """
    rotary = {}
    if option(config, "position_embedding_type") == "rotary":
        dim = option(config, "rotary_emb_dim")
        rotary = dict(
            rotary_emb_dim=config.hidden_size // config.num_attention_heads if dim is None else dim,
            rotary_emb_base=option(config, "rotary_emb_base"),
            rotary_emb_scale_base=option(config, "rotary_emb_scale_base"),
            rotary_emb_interleaved=option(config, "rotary_emb_interleaved"),
        )
    return functools.partial(
        MHA,
        num_heads=config.num_attention_heads,
        cross_attn=cross_attn,
        dropout=config.attention_probs_dropout_prob,
        causal=False,
        fused_bias_fc=option(config, "fused_bias_fc"),
        use_flash_attn=option(config, "use_flash_attn"),
        return_residual=return_residual,
        **rotary,
    )


def create_mlp_cls(
    config: Config, layer_idx: int | None = None, return_residual: bool = False
) -> Callable[[int], nn.Module]:
    """Returns a function hidden_size -> the MLP of a layer.

    Arguments:
        config: a BertConfig.
        layer_idx: the number of the layer, which selects from config.mlp_checkpoint_lvl if that is a sequence.
        return_residual: the MLP returns (output, input).

    Example:
        >>> from flash_attn.models.bert import create_mlp_cls
        >>> from transformers import BertConfig
        >>> config = BertConfig(hidden_size=64, num_attention_heads=4)
        >>> create_mlp_cls(config)(64)(torch.randn(2, 7, 64)).shape
        torch.Size([2, 7, 64])
    """
    options: dict[str, Any] = dict(hidden_features=config.intermediate_size, return_residual=return_residual)
    if not option(config, "fused_mlp"):
        return functools.partial(Mlp, activation=_activation(config), **options)
    level = option(config, "mlp_checkpoint_lvl")
    if not isinstance(level, int):
        if layer_idx is None:
            raise ValueError("layer_idx must be given if config.mlp_checkpoint_lvl is a sequence, found None")
        level = level[layer_idx]
    return functools.partial(FusedMLP, checkpoint_lvl=level, **options)


def create_block(config: Config, layer_idx: int | None = None) -> Block:
    """The layer number layer_idx. With config.last_layer_subset, the last one projects queries apart.

    config: a BertConfig.

    Example:
        >>> from flash_attn.models.bert import create_block
        >>> from transformers import BertConfig
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
        >>> create_block(config)(torch.randn(2, 7, 64)).shape
        torch.Size([2, 7, 64])
    """
    subset = option(config, "last_layer_subset") and layer_idx == config.num_hidden_layers - 1
    # A mixer or an MLP that also returns its input adds the gradient of the residual within its own backward product.
    # With a subset this is not possible: queries are projected from other tokens than keys and values.
    return_residual = not subset
    return Block(
        config.hidden_size,
        create_mixer_cls(config, cross_attn=subset, return_residual=return_residual),
        create_mlp_cls(config, layer_idx, return_residual=return_residual),
        norm_cls=functools.partial(nn.LayerNorm, eps=config.layer_norm_eps),
        prenorm=False,
        resid_dropout1=config.hidden_dropout_prob,
        resid_dropout2=config.hidden_dropout_prob,
        fused_dropout_add_ln=option(config, "fused_dropout_add_ln"),
        return_residual=return_residual,
    )


def _activation(config):
    return functools.partial(F.gelu, approximate="tanh" if config.hidden_act in TANH_GELUS else "none")


def _linear_cls(config):
    return FusedDense if option(config, "fused_bias_fc") else nn.Linear


def _normed(config, norm, x):
    (out,), _ = _add_and_norm([norm], [_Branch(x)], None, fused=option(config, "fused_dropout_add_ln"))
    return out


def _init_weights(module: nn.Module, initializer_range: float = 0.02) -> None:
    """Draw the weight of a linear layer or an embedding from a normal distribution; a bias and padding are zero."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=initializer_range)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        with torch.no_grad():
            module.weight[module.padding_idx].zero_()


class BertEncoder(LayerStack):
    """The layers of BERT.

    Example:
        >>> from flash_attn.models.bert import BertEncoder
        >>> from transformers import BertConfig
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
        >>> BertEncoder(config)(torch.randn(2, 7, 64)).shape
        torch.Size([2, 7, 64])
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.use_flash_attn = option(config, "use_flash_attn")
        self.last_layer_subset = option(config, "last_layer_subset")
        self.gradient_checkpointing = option(config, "gradient_checkpointing")
        self.layers = nn.ModuleList([create_block(config, layer_idx=i) for i in range(config.num_hidden_layers)])

    def forward(
        self, hidden_states: Tensor, key_padding_mask: Tensor | None = None, subset_mask: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the last layer.

        Arguments:
            hidden_states: (batch, seqlen, hidden_size).
            key_padding_mask: (batch, seqlen) bool, true for tokens, false for padding.
            subset_mask: (batch, seqlen) bool, true for tokens whose hidden states are wanted; None means all.

        Returns (batch, seqlen, hidden_size), or with a subset_mask (number of true elements, hidden_size). With
        use_flash_attn and a key_padding_mask, rows of padding are zero.
        """
        if key_padding_mask is not None and self.use_flash_attn:
            return self._without_padding(hidden_states, key_padding_mask, subset_mask)
        kwargs = {} if key_padding_mask is None else dict(key_padding_mask=key_padding_mask)
        hidden_states = self._run_layers(len(self.layers), hidden_states, kwargs)
        return hidden_states if subset_mask is None else _rows(hidden_states, subset_mask)

    def _without_padding(self, hidden_states, key_padding_mask, subset_mask):
        batch, seqlen = key_padding_mask.shape
        hidden_states, indices, cu_seqlens, max_seqlen, _ = unpad_input(hidden_states, key_padding_mask)
        lengths = dict(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        last = len(self.layers) - 1
        hidden_states = self._run_layers(last if self.last_layer_subset else last + 1, hidden_states, lengths)
        if self.last_layer_subset:
            of_keys = dict(cu_seqlens_k=cu_seqlens, max_seqlen_k=max_seqlen)
            if subset_mask is not None:
                return self._last_layer_of_subset(hidden_states, of_keys, key_padding_mask, subset_mask)
            hidden_states = self._run_layer(last, self.layers[-1], hidden_states, mixer_kwargs=lengths | of_keys)
        hidden_states = pad_input(hidden_states, indices, batch, seqlen)
        return hidden_states if subset_mask is None else _rows(hidden_states, subset_mask)

    def _run_layers(self, count, hidden_states, mixer_kwargs):
        """The first `count` layers."""
        for i, layer in enumerate(self.layers[:count]):
            hidden_states = self._run_layer(i, layer, hidden_states, mixer_kwargs=mixer_kwargs)
        return hidden_states

    def _last_layer_of_subset(self, hidden_states, of_keys, key_padding_mask, subset_mask):
        """The last layer with the tokens of the subset as queries, and all tokens (total, hidden_size) as keys."""
        row_of_token = key_padding_mask.flatten().cumsum(0).view_as(key_padding_mask) - 1
        rows, _, cu_seqlens, max_seqlen, _ = unpad_input(row_of_token, key_padding_mask & subset_mask)
        queries = index_first_axis(hidden_states, rows)
        of_queries = dict(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        options = dict(x_kv=hidden_states, **of_queries, **of_keys)
        out = self._run_layer(len(self.layers) - 1, self.layers[-1], queries, mixer_kwargs=options)
        is_token = key_padding_mask[subset_mask]
        places = is_token.nonzero_static(size=rows.shape[0]).squeeze(1)
        return index_put_first_axis(out, places, is_token.shape[0])


def _rows(hidden_states, mask):
    """(tokens, hidden_size) of hidden_states (batch, seqlen, hidden_size) where the mask is true."""
    return index_first_axis(hidden_states.flatten(0, 1), mask.flatten().nonzero().squeeze(1))


class BertPooler(nn.Module):
    """A linear layer and tanh on the first token of each sequence.

    Example:
        >>> from flash_attn.models.bert import BertPooler
        >>> from transformers import BertConfig
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
        >>> BertPooler(config)(torch.randn(2, 7, 64)).shape
        torch.Size([2, 64])
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dense = _linear_cls(config)(config.hidden_size, config.hidden_size)
        self.activation = nn.Tanh()

    def forward(self, hidden_states: Tensor, pool: bool = True) -> Tensor:
        """(batch, hidden_size), from (batch, seqlen, hidden_size), or with pool=False from the first tokens alone."""
        return self.activation(self.dense(hidden_states[:, 0] if pool else hidden_states))


class BertPredictionHeadTransform(nn.Module):
    """A linear layer, the activation and a norm, before the decoder of `BertLMPredictionHead`.

    Example:
        >>> from flash_attn.models.bert import BertPredictionHeadTransform
        >>> from transformers import BertConfig
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
        >>> BertPredictionHeadTransform(config)(torch.randn(2, 7, 64)).shape
        torch.Size([2, 7, 64])
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.dense = _linear_cls(config)(config.hidden_size, config.hidden_size)
        self.transform_act_fn = _activation(config)
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., hidden_size) to the same shape."""
        return _normed(self.config, self.layer_norm, self.transform_act_fn(self.dense(hidden_states)))


class BertLMPredictionHead(nn.Module):
    """The head that predicts masked tokens.

    Example:
        >>> from flash_attn.models.bert import BertLMPredictionHead
        >>> from transformers import BertConfig
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
        >>> BertLMPredictionHead(config)(torch.randn(2, 7, 64)).shape
        torch.Size([2, 7, 100])
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = _linear_cls(config)(config.hidden_size, padded_vocab_size(config))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Logits (..., vocab_size) of (..., hidden_size)."""
        return self.decoder(self.transform(hidden_states))


class BertPreTrainingHeads(nn.Module):
    """The head that predicts masked tokens, and the one that tells whether a sentence follows another.

    Example:
        >>> from flash_attn.models.bert import BertPreTrainingHeads
        >>> from transformers import BertConfig
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
        >>> logits, relationship = BertPreTrainingHeads(config)(torch.randn(2, 7, 64), torch.randn(2, 64))
        >>> logits.shape, relationship.shape
        (torch.Size([2, 7, 100]), torch.Size([2, 2]))
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def forward(self, sequence_output: Tensor, pooled_output: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (..., vocab_size) and (batch, 2) of (..., hidden_size) and (batch, hidden_size)."""
        return self.predictions(sequence_output), self.seq_relationship(pooled_output)


class _MaskedLMHead(nn.Module):
    """The head that predicts masked tokens, under the name it has in transformers' checkpoints."""

    def __init__(self, config):
        super().__init__()
        self.predictions = BertLMPredictionHead(config)

    def forward(self, sequence_output):
        return self.predictions(sequence_output)


class _NextSentenceHead(nn.Module):
    """The head that tells whether a sentence follows another, under the name it has in transformers' checkpoints."""

    def __init__(self, config):
        super().__init__()
        self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def forward(self, pooled_output):
        return self.seq_relationship(pooled_output)


# ---------------------------------------------------------------------------------------------------------------------
# What models return


class BertModelOutput(ModelOutput):
    """last_hidden_state (batch, seqlen, hidden_size), or (masked tokens, hidden_size) of these alone; pooler_output
    (batch, hidden_size), or None without a pooler.

    Example:
        >>> from flash_attn.models.bert import BertModelOutput
        >>> output = BertModelOutput(last_hidden_state=torch.zeros(2, 7, 64), pooler_output=torch.zeros(2, 64))
        >>> hidden_states, pooled = output
        >>> output.pooler_output.shape, list(output.keys())
        (torch.Size([2, 64]), ['last_hidden_state', 'pooler_output'])
    """

    last_hidden_state: Tensor
    pooler_output: Tensor | None = None


class BertForPreTrainingOutput(ModelOutput):
    """loss, a scalar or None; prediction_logits (batch, seqlen, vocab_size), or (masked tokens, vocab_size);
    seq_relationship_logits (batch, 2).

    Example:
        >>> from flash_attn.models.bert import BertForPreTrainingOutput
        >>> output = BertForPreTrainingOutput(
        ...     prediction_logits=torch.zeros(2, 7, 100), seq_relationship_logits=torch.zeros(2, 2))
        >>> words, follows = output  # without labels there is no loss
        >>> words.shape, output.seq_relationship_logits.shape, output.loss
        (torch.Size([2, 7, 100]), torch.Size([2, 2]), None)
    """

    loss: Tensor | None = None
    prediction_logits: Tensor
    seq_relationship_logits: Tensor


class BertHeadOutput(ModelOutput):
    """loss, a scalar or None without labels; logits, (batch, seqlen, classes), (masked tokens, classes),
    (batch, classes) or (batch, choices).

    Example:
        >>> from flash_attn.models.bert import BertHeadOutput
        >>> loss, logits = BertHeadOutput(loss=torch.tensor(0.5), logits=torch.zeros(2, 3))
        >>> BertHeadOutput(logits=logits)[0].shape  # without labels the logits come first
        torch.Size([2, 3])
    """

    loss: Tensor | None = None
    logits: Tensor


class BertForQuestionAnsweringOutput(ModelOutput):
    """loss, a scalar or None without positions; start_logits and end_logits, (batch, seqlen).

    Example:
        >>> from flash_attn.models.bert import BertForQuestionAnsweringOutput
        >>> output = BertForQuestionAnsweringOutput(start_logits=torch.zeros(2, 7), end_logits=torch.zeros(2, 7))
        >>> start, end = output  # without positions there is no loss
        >>> start.shape, output.end_logits.shape
        (torch.Size([2, 7]), torch.Size([2, 7]))
    """

    loss: Tensor | None = None
    start_logits: Tensor
    end_logits: Tensor


# ---------------------------------------------------------------------------------------------------------------------
# Models

Self = TypeVar("Self", bound="BertPreTrainedModel")


class BertPreTrainedModel(TiedWeights, TrainerMethods):
    """What all models here share: their configuration, checkpoints of transformers, and what trainers call.

    With config.tie_word_embeddings, the weight of the decoder of the head for masked tokens is that of the word
    embeddings, by the same rule as in `flash_attn.models.gpt.GPTLMHeadModel`.

    Raises TypeError or ValueError for a configuration that lacks fields or asks for what is not supported.

    Example:
        >>> import tempfile
        >>> from flash_attn.models.bert import BertModel, BertPreTrainedModel
        >>> from transformers import BertConfig
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
        >>> model, folder = BertModel(config), tempfile.mkdtemp()
        >>> model.save_pretrained(folder)
        >>> isinstance(model, BertPreTrainedModel), BertModel.from_pretrained(folder).config.hidden_size
        (True, 64)
    """

    main_input_name = "input_ids"

    bert: "BertModel"  # of the models with heads
    cls: BertPreTrainingHeads | _MaskedLMHead | _NextSentenceHead  # of those with heads of the pre-training

    def __init__(self, config: Config, *inputs: Any, **kwargs: Any) -> None:
        super().__init__()
        check_config(config)
        self.config = config

    @classmethod
    def from_pretrained(
        cls: type[Self],
        model_name: str | pathlib.Path,
        config: Config | None = None,
        *inputs: Any,
        strict: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        **kwargs: Any,
    ) -> Self:
        """A model with the parameters of a checkpoint, in training mode like any new module: call eval() for inference.

        Arguments:
            model_name: a folder, or a name on the Hugging Face hub; see `state_dict_from_pretrained`.
            config: the configuration; that of the checkpoint if None.
            strict: heads and pooler must be exactly those of the checkpoint. Otherwise those that the checkpoint lacks
                are drawn at random, and those that the model lacks are left out, both with a warning in the log.
            device, dtype: of the parameters; torch's defaults if None. A dtype may be a name such as "bfloat16"; "auto"
                is the one in config.json, or else that of the checkpoint's tensors.
            torch_dtype: the older name of dtype in transformers; gives a warning.
            kwargs: fields that override those of the configuration, such as use_flash_attn=True or num_labels=3; and
                arguments of the model. A configuration that is given is not changed. Also revision, token, cache_dir
                and local_files_only, for a name on the hub.
            inputs: more arguments of the model.

        Raises ValueError, before parameters are allocated, if tensors are missing, unknown or of another shape; OSError
        if there is no checkpoint; TypeError for a keyword argument that is neither a field of the configuration nor an
        argument of the model, with similar names.
        """
        return checkpoints.load(cls, model_name, config, inputs, kwargs, strict, device, dtype, torch_dtype)

    def save_pretrained(self, folder: str | pathlib.Path) -> None:
        """Write config.json and model.safetensors, which transformers' `from_pretrained` and that of this class read.

        Needs the package safetensors. A checkpoint of more than 5 GB becomes several files. Raises ValueError with
        rotary positions, which transformers' BERT does not have.
        """
        checkpoints.save(self, folder)

    def _input_name(self) -> str:
        return f"{'bert.' if hasattr(self, 'bert') else ''}embeddings.word_embeddings"

    def _output_name(self) -> str | None:
        has_decoder = hasattr(getattr(self, "cls", None), "predictions")
        return "cls.predictions.decoder" if has_decoder else None

    def _tied_modules(self) -> list[tuple[str, str]]:
        decoder = self._output_name()
        if decoder is None or not option(self.config, "tie_word_embeddings"):
            return []
        return [(self._input_name(), decoder)]

    def _first_weights(self) -> Callable[[nn.Module], None]:
        return functools.partial(_init_weights, initializer_range=self.config.initializer_range)

    def _finish(self):
        """Draw all parameters and tie weights: the last step of each constructor."""
        self.apply(self._first_weights())
        self._mark_tied()
        self.tie_weights()


class BertModel(BertPreTrainedModel):
    """BERT without heads.

    Arguments:
        config: transformers' `BertConfig`, or any object with its fields. Its vocab_size is rounded up to a multiple of
            pad_vocab_size_multiple, in place, and the original is kept as orig_vocab_size.
        add_pooling_layer: whether there is a `BertPooler`.

    >>> from flash_attn.models.bert import BertModel
    >>> from transformers import BertConfig
    >>> config = BertConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...                     intermediate_size=128)
    >>> model = BertModel(config).eval()
    >>> model(torch.randint(100, (2, 7))).last_hidden_state.shape
    torch.Size([2, 7, 64])
    """

    def __init__(self, config: Config, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        if not hasattr(config, "orig_vocab_size"):
            config.orig_vocab_size = config.vocab_size  # type: ignore[attr-defined]  # a field of ours
        config.vocab_size = padded_vocab_size(config)
        self.embeddings = BertEmbeddings(
            config.hidden_size,
            config.vocab_size,
            config.max_position_embeddings,
            config.type_vocab_size,
            padding_idx=config.pad_token_id,
        )
        self.emb_drop = nn.Dropout(config.hidden_dropout_prob)
        self.emb_ln = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        self._finish()

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        masked_tokens_mask: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        return_dict: bool | None = None,
        **options: Any,
    ) -> BertModelOutput:
        """Hidden states of the last layer.

        Arguments:
            input_ids: (batch, seqlen), token ids.
            position_ids: (seqlen,) or (batch, seqlen); 0 to seqlen - 1 if None. The second argument here, where
                transformers' BertModel has attention_mask: give both by name.
            token_type_ids: (batch, seqlen); 0 if None.
            attention_mask: (batch, seqlen), bool or integers, 0 for padding.
            masked_tokens_mask: (batch, seqlen) bool, the tokens of which hidden states are wanted.
            inputs_embeds: (batch, seqlen, hidden_size), instead of input_ids: what get_input_embeddings()(input_ids)
                would give.
            return_dict: False gives a plain tuple, without what is None.
            options: what else transformers' models take may be given where it asks for nothing, as use_cache=False.

        Returns a BertModelOutput. last_hidden_state is (batch, seqlen, hidden_size), or with masked_tokens_mask that of
        these tokens in order, (tokens, hidden_size). Raises TypeError or ValueError for inputs of another dtype or
        shape, and for options that ask for something else, with what to do instead.
        """
        check_options(self, options, is_encoder=True)
        tokens = tokens_of(input_ids, inputs_embeds)
        mask = None if attention_mask is None else _token_mask(attention_mask, tokens)
        if masked_tokens_mask is not None:
            _check_like("masked_tokens_mask", masked_tokens_mask, tokens, (torch.bool,))
        hidden_states = self.embeddings(
            input_ids, position_ids=position_ids, token_type_ids=token_type_ids, inputs_embeds=inputs_embeds
        )
        return as_asked(self._encoded(hidden_states, mask, masked_tokens_mask), return_dict)

    def _encoded(self, hidden_states, mask, masked_tokens_mask):
        """The output of embeddings with these masks."""
        hidden_states = self.emb_drop(_normed(self.config, self.emb_ln, hidden_states))
        if masked_tokens_mask is None:
            hidden_states = self.encoder(hidden_states, mask)
            pooled = None if self.pooler is None else self.pooler(hidden_states)
            return BertModelOutput(last_hidden_state=hidden_states, pooler_output=pooled)
        if self.pooler is None:
            return BertModelOutput(last_hidden_state=self.encoder(hidden_states, mask, masked_tokens_mask))
        first = torch.zeros_like(masked_tokens_mask)
        first[:, 0] = True
        subset = masked_tokens_mask | first
        hidden_states = self.encoder(hidden_states, mask, subset)
        # With a static size, because torch.compile cannot know that the subset has one first token of each sequence.
        first_places = first[subset].nonzero_static(size=first.shape[0]).squeeze(1)
        pooled = self.pooler(hidden_states[first_places], pool=False)
        return BertModelOutput(last_hidden_state=hidden_states[masked_tokens_mask[subset]], pooler_output=pooled)


class _BertWithHead(BertPreTrainedModel):
    """A model that has an encoder, `bert`."""

    accepts_loss_kwargs = True  # transformers.Trainer: forward takes num_items_in_batch

    def _encode(self, masked, *inputs, **options):
        """What the encoder returns. With dense_seq_output, hidden states of the masked tokens alone, if any are given.

        masked: (batch, seqlen) bool, or None.
        """
        if masked is None or not option(self.config, "dense_seq_output"):
            return self.bert(*inputs, **options)
        if option(self.config, "last_layer_subset"):
            return self.bert(*inputs, **options, masked_tokens_mask=masked)
        encoded = self.bert(*inputs, **options)
        return encoded._replace(last_hidden_state=_rows(encoded.last_hidden_state, masked))

    def _vocab_size(self):
        """How many classes labels of tokens have: without the padding of the vocabulary."""
        return getattr(self.config, "orig_vocab_size", self.config.vocab_size)

    def _prediction_loss(self, logits, labels, masked, ignore_index, num_items_in_batch=None):
        """Mean cross entropy of logits (..., vocab_size), of all tokens or the masked ones, and labels."""
        if option(self.config, "dense_seq_output"):
            # With the size of the logits, because torch.compile cannot know that two counts of masked tokens are equal.
            places = masked.flatten().nonzero_static(size=logits.shape[0]).squeeze(1)
            labels = labels.flatten()[places]
        options = dict(ignore_index=ignore_index, reduction=_reduction(num_items_in_batch))
        loss = self._cross_entropy(inplace=True, **options)(logits.flatten(0, -2), labels.flatten())
        return _of_items(loss, num_items_in_batch)

    def _cross_entropy(self, inplace=False, **options):
        if option(self.config, "use_xentropy"):
            return CrossEntropyLoss(inplace_backward=inplace, **options)
        return nn.CrossEntropyLoss(**options)


class BertForPreTraining(_BertWithHead):
    """BERT with the two heads of its pre-training.

    Example:
        >>> from flash_attn.models.bert import BertForPreTraining
        >>> from transformers import BertConfig
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
        >>> tokens = torch.randint(1, 100, (2, 7))
        >>> model = BertForPreTraining(config)
        >>> output = model(tokens, labels=tokens, next_sentence_label=torch.tensor([0, 1]))
        >>> output.loss.shape, output.prediction_logits.shape, output.seq_relationship_logits.shape
        (torch.Size([]), torch.Size([2, 7, 100]), torch.Size([2, 2]))
    """

    accepts_loss_kwargs = False  # its loss is the sum of two means

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.cls = BertPreTrainingHeads(config)
        self._finish()

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        return_dict: bool | None = None,
        **options: Any,
    ) -> BertForPreTrainingOutput:
        """Logits of both heads, and the sum of their losses if both kinds of labels are given.

        Arguments:
            input_ids, position_ids, token_type_ids, attention_mask, inputs_embeds, return_dict, options: as in
                `BertModel`.
            labels: (batch, seqlen) int64, the ids of masked tokens; 0 and less for tokens that are not masked: unlike
                elsewhere, the label 0 does not count, no more than -100 does.
            next_sentence_label: (batch,) int64, 0 or 1; -1 where there is none.

        Returns a BertForPreTrainingOutput. With dense_seq_output and labels, prediction_logits are those of masked
        tokens alone, (tokens, vocab_size).
        """
        masked, tokens = None, tokens_of(input_ids, inputs_embeds)
        if labels is not None:
            _check_like("labels", labels, tokens, (torch.int64,))
            labels = labels.clamp(min=0)
            xentropy.check_classes(labels, self._vocab_size())
            masked = labels > 0
        if next_sentence_label is not None:
            _check_labels("next_sentence_label", next_sentence_label, tokens.shape[:1])
            xentropy.check_classes(next_sentence_label, 2, -1, "next_sentence_label")
        encoded = self._encode(
            masked, input_ids, position_ids, token_type_ids, attention_mask, inputs_embeds=inputs_embeds, **options
        )
        predictions, relationship = self.cls(encoded.last_hidden_state, encoded.pooler_output)
        loss = None
        if labels is not None and next_sentence_label is not None:
            prediction_loss = self._prediction_loss(predictions, labels, masked, ignore_index=0)
            relationship_loss = self._cross_entropy(ignore_index=-1)(relationship, next_sentence_label)
            loss = prediction_loss.float() + relationship_loss.float()
        output = BertForPreTrainingOutput(
            loss=loss, prediction_logits=predictions, seq_relationship_logits=relationship
        )
        return as_asked(output, return_dict)


class BertForMaskedLM(_BertWithHead):
    """BERT with the head that predicts masked tokens.

    Example:
        >>> from flash_attn.models.bert import BertForMaskedLM
        >>> from transformers import BertConfig
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
        >>> tokens = torch.randint(1, 100, (2, 7))
        >>> labels = tokens.where(torch.rand(2, 7) < 0.15, -100)
        >>> BertForMaskedLM(config)(tokens.where(labels < 0, 4), labels=labels).logits.shape
        torch.Size([2, 7, 100])
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.cls = _MaskedLMHead(config)
        self._finish()

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **options: Any,
    ) -> BertHeadOutput:
        """Logits (batch, seqlen, vocab_size), and with labels the mean cross entropy of tokens that have one.

        Arguments:
            labels: (batch, seqlen) int64, -100 for tokens that are not masked.
            num_items_in_batch: the loss is a sum divided by this number, instead of by that of the labels that count,
                so that losses of several batches add up to the mean over all of them.
            input_ids, position_ids, token_type_ids, attention_mask, inputs_embeds, return_dict, options: as in
                `BertModel`.

        Returns a BertHeadOutput. With dense_seq_output and labels, logits are those of masked tokens alone, (tokens,
        vocab_size).
        """
        masked = None
        if labels is not None:
            _check_like("labels", labels, tokens_of(input_ids, inputs_embeds), (torch.int64,))
            xentropy.check_classes(labels, self._vocab_size())
            masked = labels != -100
        encoded = self._encode(
            masked, input_ids, position_ids, token_type_ids, attention_mask, inputs_embeds=inputs_embeds, **options
        )
        logits = self.cls(encoded.last_hidden_state)
        loss = None if labels is None else self._prediction_loss(logits, labels, masked, -100, num_items_in_batch)
        return as_asked(BertHeadOutput(loss=loss, logits=logits), return_dict)


class BertForNextSentencePrediction(_BertWithHead):
    """BERT with the head that tells whether a sentence follows another.

    Example:
        >>> from flash_attn.models.bert import BertForNextSentencePrediction
        >>> from transformers import BertConfig
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
        >>> model = BertForNextSentencePrediction(config)
        >>> model(torch.randint(1, 100, (2, 7)), labels=torch.tensor([0, 1])).logits.shape
        torch.Size([2, 2])
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.cls = _NextSentenceHead(config)
        self._finish()

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **options: Any,
    ) -> BertHeadOutput:
        """Logits (batch, 2), and with labels the mean cross entropy of sequences that have one.

        Arguments:
            labels: (batch,) int64, 0 if the second sentence follows the first, 1 if it is any other; -100 for sequences
                that do not count.
            num_items_in_batch: the loss is a sum divided by this number, instead of by that of the labels that count,
                so that losses of several batches add up to the mean over all of them.
            input_ids, position_ids, token_type_ids, attention_mask, inputs_embeds, return_dict, options: as in
                `BertModel`.

        Returns a BertHeadOutput.
        """
        encoded = self.bert(
            input_ids, position_ids, token_type_ids, attention_mask, inputs_embeds=inputs_embeds, **options
        )
        logits = self.cls(encoded.pooler_output)
        loss = None if labels is None else _loss_of_sequences(logits, labels, num_items_in_batch)
        return as_asked(BertHeadOutput(loss=loss, logits=logits), return_dict)


class _BertClassifier(_BertWithHead):
    """BERT with dropout and a linear layer of num_labels classes."""

    def __init__(self, config, add_pooling_layer, num_labels):
        super().__init__(config)
        self.num_labels = num_labels
        self.bert = BertModel(config, add_pooling_layer=add_pooling_layer)
        dropout = option(config, "classifier_dropout")
        self.dropout = nn.Dropout(config.hidden_dropout_prob if dropout is None else dropout)
        self.classifier = nn.Linear(config.hidden_size, num_labels)
        self._finish()


class BertForSequenceClassification(_BertClassifier):
    """BERT with a classifier of whole sequences, or a regression: config.num_labels classes or numbers.

    Example:
        >>> from flash_attn.models.bert import BertForSequenceClassification
        >>> from transformers import BertConfig
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        ...                     num_labels=3)
        >>> model = BertForSequenceClassification(config)
        >>> model(torch.randint(1, 100, (2, 7)), labels=torch.tensor([0, 2])).logits.shape
        torch.Size([2, 3])
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config, add_pooling_layer=True, num_labels=option(config, "num_labels"))

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **options: Any,
    ) -> BertHeadOutput:
        """Logits (batch, num_labels), and with labels the loss that config.problem_type names.

        Arguments:
            labels: for "single_label_classification" (batch,) int64; for "multi_label_classification"
                (batch, num_labels) floats 0 and 1; for "regression" floats (batch, num_labels), or (batch,) if that is
                1. If problem_type is None: regression if num_labels is 1, else by dtype, int64 for a single label and
                floats for several.
            num_items_in_batch: the loss is a sum divided by this number, instead of by that of the labels that count,
                so that losses of several batches add up to the mean over all of them.
            input_ids, position_ids, token_type_ids, attention_mask, inputs_embeds, return_dict, options: as in
                `BertModel`.

        Returns a BertHeadOutput.
        """
        encoded = self.bert(
            input_ids, position_ids, token_type_ids, attention_mask, inputs_embeds=inputs_embeds, **options
        )
        logits = self.classifier(self.dropout(encoded.pooler_output))
        loss = None if labels is None else self._loss(logits, labels, num_items_in_batch)
        return as_asked(BertHeadOutput(loss=loss, logits=logits), return_dict)

    def _loss(self, logits, labels, num_items_in_batch):
        kind = option(self.config, "problem_type")
        if kind is None:
            single = "multi_label" if labels.is_floating_point() else "single_label"
            kind = "regression" if self.num_labels == 1 else f"{single}_classification"
        if kind == "single_label_classification":
            return _loss_of_sequences(logits, labels, num_items_in_batch)
        labels = labels.view_as(logits) if self.num_labels == 1 else labels
        checks.tensor("labels", labels, shape=logits.shape, device=logits.device)
        losses = {"regression": nn.MSELoss, "multi_label_classification": nn.BCEWithLogitsLoss}
        if kind not in losses:
            raise ValueError(f"config.problem_type must be one of {', '.join(losses)}, found {kind!r}")
        loss = losses[kind](reduction=_reduction(num_items_in_batch))(logits, labels.to(logits.dtype))
        return _of_items(loss, num_items_in_batch)


class BertForTokenClassification(_BertClassifier):
    """BERT with a classifier of each token, as for named entities: config.num_labels classes.

    Example:
        >>> from flash_attn.models.bert import BertForTokenClassification
        >>> from transformers import BertConfig
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4,
        ...                     num_labels=5)
        >>> BertForTokenClassification(config)(torch.randint(1, 100, (2, 7))).logits.shape
        torch.Size([2, 7, 5])
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config, add_pooling_layer=False, num_labels=option(config, "num_labels"))

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **options: Any,
    ) -> BertHeadOutput:
        """Logits (batch, seqlen, num_labels), and with labels the mean cross entropy of tokens that have one.

        Arguments:
            labels: (batch, seqlen) int64, -100 for tokens that do not count.
            num_items_in_batch: the loss is a sum divided by this number, instead of by that of the labels that count,
                so that losses of several batches add up to the mean over all of them.
            input_ids, position_ids, token_type_ids, attention_mask, inputs_embeds, return_dict, options: as in
                `BertModel`.

        Returns a BertHeadOutput.
        """
        if labels is not None:
            _check_like("labels", labels, tokens_of(input_ids, inputs_embeds), (torch.int64,))
            xentropy.check_classes(labels, self.num_labels)
        encoded = self.bert(
            input_ids, position_ids, token_type_ids, attention_mask, inputs_embeds=inputs_embeds, **options
        )
        logits = self.classifier(self.dropout(encoded.last_hidden_state))
        loss = None
        if labels is not None:
            loss = nn.CrossEntropyLoss(reduction=_reduction(num_items_in_batch))(logits.flatten(0, 1), labels.flatten())
            loss = _of_items(loss, num_items_in_batch)
        return as_asked(BertHeadOutput(loss=loss, logits=logits), return_dict)


class BertForMultipleChoice(_BertClassifier):
    """BERT that chooses one of several sequences: with a logit for each of them.

    Example:
        >>> from flash_attn.models.bert import BertForMultipleChoice
        >>> from transformers import BertConfig
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
        >>> tokens = torch.randint(1, 100, (2, 4, 7))  # 2 questions with 4 answers each
        >>> BertForMultipleChoice(config)(tokens, labels=torch.tensor([3, 0])).logits.shape
        torch.Size([2, 4])
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config, add_pooling_layer=True, num_labels=1)

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **options: Any,
    ) -> BertHeadOutput:
        """Logits (batch, choices), and with labels the mean cross entropy of rows that have one.

        Arguments:
            labels: (batch,) int64, the number of the right choice; -100 for rows that do not count.
            num_items_in_batch, return_dict: as in `BertForSequenceClassification`.
            input_ids: (batch, choices, seqlen), token ids.
            position_ids: (seqlen,) or like input_ids.
            token_type_ids, attention_mask: like input_ids.
            inputs_embeds: (batch, choices, seqlen, hidden_size), instead of input_ids.
            options: as in `BertModel`.

        Returns a BertHeadOutput.
        """
        tokens = tokens_of(input_ids, inputs_embeds, "(batch, choices, seqlen)")
        of_tokens = dict(position_ids=position_ids, token_type_ids=token_type_ids, attention_mask=attention_mask)
        for name, given in of_tokens.items():
            is_for_all = name == "position_ids" and isinstance(given, Tensor) and given.dim() < 3
            if given is not None and not is_for_all:  # BertModel checks what is for all
                checks.tensor(name, given, shape=tokens.shape)
        inputs = options | of_tokens | dict(input_ids=input_ids, inputs_embeds=inputs_embeds)
        flat = {name: x.flatten(0, 1) if isinstance(x, Tensor) and x.dim() >= 3 else x for name, x in inputs.items()}
        pooled = self.bert(**flat).pooler_output
        logits = self.classifier(self.dropout(pooled)).view(tokens.shape[:2])
        loss = None if labels is None else _loss_of_sequences(logits, labels, num_items_in_batch)
        return as_asked(BertHeadOutput(loss=loss, logits=logits), return_dict)


class BertForQuestionAnswering(_BertWithHead):
    """BERT that finds an answer in a text: with logits of each token as its first and as its last.

    Example:
        >>> from flash_attn.models.bert import BertForQuestionAnswering
        >>> from transformers import BertConfig
        >>> config = BertConfig(vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
        >>> output = BertForQuestionAnswering(config)(torch.randint(1, 100, (2, 7)))
        >>> output.start_logits.shape, output.end_logits.shape
        (torch.Size([2, 7]), torch.Size([2, 7]))
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        num_labels = option(config, "num_labels")
        checks.number("config.num_labels", num_labels, num_labels == 2, "2, the first and the last token of an answer")
        self.bert = BertModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, num_labels)
        self._finish()

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **options: Any,
    ) -> BertForQuestionAnsweringOutput:
        """Logits (batch, seqlen) twice, and with both kinds of positions the mean of their two cross entropies.

        Arguments:
            start_positions, end_positions: (batch,) int64, the first and the last token of an answer. Those of seqlen
                and more do not count; negative ones are 0, as in transformers.
            num_items_in_batch: the loss is a sum divided by this number, instead of by that of the labels that count,
                so that losses of several batches add up to the mean over all of them.
            input_ids, position_ids, token_type_ids, attention_mask, inputs_embeds, return_dict, options: as in
                `BertModel`.

        Returns a BertForQuestionAnsweringOutput. The cross entropies are over all tokens, padding too, as in
        transformers. The logits of padding are others with use_flash_attn, which has zeros as its hidden states.
        """
        batch, seqlen = tokens_of(input_ids, inputs_embeds).shape
        for name, given in (("start_positions", start_positions), ("end_positions", end_positions)):
            if given is not None:
                _check_labels(name, given, (batch,))
        encoded = self.bert(
            input_ids, position_ids, token_type_ids, attention_mask, inputs_embeds=inputs_embeds, **options
        )
        logits = self.qa_outputs(encoded.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            cross_entropy = nn.CrossEntropyLoss(ignore_index=seqlen, reduction=_reduction(num_items_in_batch))
            start, end = (
                cross_entropy(each, right.clamp(0, seqlen))
                for each, right in zip(logits, (start_positions, end_positions), strict=True)
            )
            loss = _of_items((start + end) / 2, num_items_in_batch)
        return as_asked(
            BertForQuestionAnsweringOutput(loss=loss, start_logits=logits[0], end_logits=logits[1]), return_dict
        )


def _reduction(num_items_in_batch):
    return "mean" if num_items_in_batch is None else "sum"


def _of_items(loss, num_items_in_batch):
    return loss if num_items_in_batch is None else divided_by_items(loss, num_items_in_batch)


def _loss_of_sequences(logits, labels, num_items_in_batch=None):
    """Mean cross entropy of logits (batch, classes) and labels, without those that are -100."""
    _check_labels("labels", labels, logits.shape[:1])
    xentropy.check_classes(labels, logits.shape[1])
    loss = nn.CrossEntropyLoss(reduction=_reduction(num_items_in_batch))(logits, labels)
    return _of_items(loss, num_items_in_batch)


def _token_mask(attention_mask, input_ids):
    dtypes = (torch.bool, torch.uint8, torch.int8, torch.int16, *checks.INTEGER_DTYPES)
    _check_like("attention_mask", attention_mask, input_ids, dtypes)
    return attention_mask if attention_mask.dtype == torch.bool else attention_mask != 0


def _check_like(name, value, input_ids, dtypes):
    checks.tensor(name, value, dtypes=dtypes, shape=input_ids.shape, device=input_ids.device)


def _check_labels(name, labels, shape):
    checks.tensor(name, labels, dtypes=(torch.int64,), shape=tuple(shape))
