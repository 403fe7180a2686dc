"""Parts around sequence models: pooling, heads, position encodings, and MLPs in the manner of timm.

Sequences are (batch, tokens, features) with batch_first, otherwise (tokens, batch, features).
"""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hydra.utils import call
from torch import Tensor, nn

_POOLING_MODES = ("MEAN", "SUM", "CLS", "LAST", "FLATTEN")


def pooling(
    x: Tensor, pooling_mode: str = "CLS", key_padding_mask: Any | None = None, batch_first: bool = True
) -> Tensor:
    """One vector for each sequence: (batch, features), or (batch, tokens * features) with FLATTEN.

    Arguments:
        x: sequences.
        pooling_mode: MEAN or SUM over the tokens, CLS for the first token, LAST for the last one, or FLATTEN.
        key_padding_mask: which tokens there are, for MEAN, SUM and LAST. A bool tensor (batch, tokens), true for
            tokens; or an object with such a tensor as `bool_matrix`, and the lengths (batch,) as `_lengths`. For LAST
            the tokens must be in front of the padding. All tokens count if None.
        batch_first: see above.

    Raises ValueError for another pooling_mode.
    """
    if pooling_mode not in _POOLING_MODES:
        raise ValueError(f"pooling_mode must be one of {', '.join(_POOLING_MODES)}, found {pooling_mode!r}")
    if not batch_first:
        x = x.transpose(0, 1)
    if pooling_mode == "CLS":
        return x[:, 0]
    if pooling_mode == "FLATTEN":
        return x.flatten(1)
    if key_padding_mask is None:
        return {"MEAN": lambda: x.mean(dim=1), "SUM": lambda: x.sum(dim=1), "LAST": lambda: x[:, -1]}[pooling_mode]()
    keep, lengths = _mask(key_padding_mask)
    if pooling_mode == "LAST":
        return x[torch.arange(len(x), device=x.device), lengths - 1]
    total = x.masked_fill(~keep.unsqueeze(-1), 0).sum(dim=1)
    return total if pooling_mode == "SUM" else total / lengths.unsqueeze(-1)


def _mask(key_padding_mask):
    """(bool matrix, lengths) of either kind of mask."""
    if isinstance(key_padding_mask, Tensor):
        return key_padding_mask, key_padding_mask.sum(dim=1)
    return key_padding_mask.bool_matrix, key_padding_mask._lengths


class ClassificationHeadLinear(nn.Module):
    """Logits (batch, num_classes) of pooled sequences of d_model features. Further arguments have no effect."""

    def __init__(
        self, d_model: int, num_classes: int, pooling_mode: str = "MEAN", batch_first: bool = False, **kwargs: Any
    ) -> None:
        super().__init__()
        self.pooling_mode, self.batch_first = pooling_mode, batch_first
        self.out_proj = nn.Linear(d_model, num_classes)

    def forward(self, hidden_states: Tensor, key_padding_mask: Any | None = None, **kwargs: Any) -> Tensor:
        """hidden_states: sequences; key_padding_mask: as for `pooling`."""
        return self.out_proj(pooling(hidden_states, self.pooling_mode, key_padding_mask, self.batch_first))


class ClassificationHead(nn.Module):
    """Logits (batch, num_classes) of pooled sequences, with a hidden layer of d_inner features."""

    def __init__(
        self,
        d_model: int,
        d_inner: int,
        num_classes: int,
        dropout: float = 0.0,
        pooling_mode: str = "MEAN",
        batch_first: bool = False,
    ) -> None:
        super().__init__()
        self.pooling_mode, self.batch_first = pooling_mode, batch_first
        self.dense = nn.Linear(d_model, d_inner)
        self.dropout = nn.Dropout(dropout)
        self.out_proj = nn.Linear(d_inner, num_classes)

    def forward(self, hidden_states: Tensor, key_padding_mask: Any | None = None, **kwargs: Any) -> Tensor:
        """hidden_states: sequences; key_padding_mask: as for `pooling`."""
        return self.classify(pooling(hidden_states, self.pooling_mode, key_padding_mask, self.batch_first))

    def classify(self, pooled: Tensor) -> Tensor:
        """Logits of pooled features."""
        hidden = F.relu(self.dense(self.dropout(pooled)))
        return self.out_proj(self.dropout(hidden))


class ClassificationHeadDual(ClassificationHead):
    """Logits (batch, num_classes) of pairs of sequences.

    The arguments are those of `ClassificationHead`, and:
        pooling_mode: MEAN, SUM or CLS.
        interaction: "NLI" for the features (a, b, a * b, a - b) of the pooled sequences a and b, None for (a, b).

    Raises ValueError for other values.
    """

    def __init__(
        self,
        d_model: int,
        d_inner: int,
        num_classes: int,
        dropout: float = 0.0,
        pooling_mode: str = "MEAN",
        batch_first: bool = False,
        interaction: str | None = "NLI",
    ) -> None:
        if pooling_mode not in ("MEAN", "SUM", "CLS"):
            raise ValueError(f"pooling_mode must be MEAN, SUM or CLS, found {pooling_mode!r}")
        if interaction not in ("NLI", None):
            raise ValueError(f"interaction must be 'NLI' or None, found {interaction!r}")
        features = d_model * (4 if interaction else 2)
        super().__init__(features, d_inner, num_classes, dropout, pooling_mode, batch_first)
        self.interaction = interaction

    def forward(
        self,
        hidden_states1: Tensor,
        hidden_states2: Tensor,
        key_padding_mask1: Any | None = None,
        key_padding_mask2: Any | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """hidden_states: sequences; key_padding_mask: as for `pooling`."""
        a = pooling(hidden_states1, self.pooling_mode, key_padding_mask1, self.batch_first)
        b = pooling(hidden_states2, self.pooling_mode, key_padding_mask2, self.batch_first)
        return self.classify(torch.cat([a, b, a * b, a - b] if self.interaction else [a, b], dim=-1))


class LMOutput(NamedTuple):
    """What a language model returns."""

    logits: Tensor


class LMHead(nn.Module):
    """Logits of every token, as a named tuple `(logits,)`. batch_first has no effect."""

    def __init__(self, d_model: int, num_classes: int, batch_first: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.lm_head = nn.Linear(d_model, num_classes, bias=bias)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> LMOutput:
        """hidden_states: (..., d_model)."""
        return LMOutput(self.lm_head(hidden_states))


def sinusoidal_init_(tensor: Tensor) -> Tensor:
    """Fill a table (positions, features): sines in even columns, cosines in odd ones (arXiv:1706.03762)."""
    positions, features = tensor.shape
    position = torch.arange(positions, dtype=torch.float64).unsqueeze(1)
    frequency = torch.exp(torch.arange(0, features, 2, dtype=torch.float64) * (-math.log(10000.0) / features))
    with torch.no_grad():
        tensor[:, 0::2] = torch.sin(position * frequency).to(tensor)
        tensor[:, 1::2] = torch.cos(position * frequency[: features // 2]).to(tensor)
    return tensor


class PositionalEncoding(nn.Module):
    """Adds a vector for each position, then applies dropout.

    Arguments:
        d_model: features.
        dropout: its probability.
        max_len: the longest sequence.
        batch_first: see the top of this file.
        initializer: None for fixed sines and cosines, in the buffer `pe`. Otherwise `pe` is learned, and this is the
            configuration of what fills it, a table (max_len, d_model): hydra.utils.call(initializer, table).
    """

    def __init__(
        self,
        d_model: int,
        dropout: float = 0.1,
        max_len: int = 5000,
        batch_first: bool = False,
        initializer: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.dropout = nn.Dropout(dropout)
        table = torch.empty(max_len, d_model)
        if initializer is None:
            self.register_buffer("pe", sinusoidal_init_(table).unsqueeze(self._batch_dim))
        else:
            call(initializer, table)
            self.pe = nn.Parameter(table.unsqueeze(self._batch_dim))

    @property
    def _batch_dim(self):
        return 0 if self.batch_first else 1

    def forward(self, x: Tensor) -> Tensor:
        """x: sequences of at most max_len tokens; ValueError if they are longer."""
        tokens_dim = 1 - self._batch_dim
        tokens, limit = x.shape[tokens_dim], self.pe.shape[tokens_dim]
        if tokens > limit:
            raise ValueError(f"x must have at most max_len = {limit} tokens, found {tokens}")
        return self.dropout(x + self.pe.narrow(tokens_dim, 0, tokens))


class Mlp(nn.Module):
    """y = drop(fc2(drop(act(fc1(x))))).

    Arguments:
        in_features, hidden_features, out_features: the last two are in_features if None.
        act_layer: makes the activation.
        act_fn: the activation itself, in place of act_layer's.
        drop: probability of dropout.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        act_layer: Callable[[], nn.Module] = nn.GELU,
        act_fn: Callable[[Tensor], Tensor] | None = None,
        drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden_features = hidden_features or in_features
        self.fc1 = nn.Linear(in_features, hidden_features, device=device, dtype=dtype)
        self.act = act_layer() if act_fn is None else act_fn
        self.fc2 = nn.Linear(hidden_features, out_features or in_features, device=device, dtype=dtype)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        """y (..., out_features) of x (..., in_features)."""
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class MlpBig(nn.Module):
    """Four hidden layers, each twice as wide as the one before, beginning with hidden_features. Arguments as `Mlp`."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        act_layer: Callable[[], nn.Module] = nn.GELU,
        act_fn: Callable[[Tensor], Tensor] | None = None,
        drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden_features = hidden_features or in_features
        widths = [in_features, *(hidden_features * 2**i for i in range(4)), out_features or in_features]
        self.layers = nn.ModuleList(nn.Linear(m, n, device=device, dtype=dtype) for m, n in itertools.pairwise(widths))
        self.act = act_layer() if act_fn is None else act_fn
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        """y (..., out_features) of x (..., in_features)."""
        *hidden, last = self.layers
        for layer in hidden:
            x = self.drop(self.act(layer(x)))
        return self.drop(last(x))


class GluMlp(nn.Module):
    """y = drop(fc2(drop(value * act(gate)))), where fc1(x) is the value, then its gate. Arguments as `Mlp`.

    Raises ValueError if hidden_features, which value and gate share, is odd.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        act_layer: Callable[[], nn.Module] = nn.Sigmoid,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        hidden_features = hidden_features or in_features
        if hidden_features % 2:
            raise ValueError(f"hidden_features must be even, found {hidden_features}")
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = act_layer()
        self.fc2 = nn.Linear(hidden_features // 2, out_features or in_features)
        self.drop = nn.Dropout(drop)

    def init_weights(self) -> None:
        """Let the gates be open at first: weights near 0 and a bias of 1."""
        half = self.fc1.out_features // 2
        with torch.no_grad():
            self.fc1.weight[half:].normal_(std=1e-6)
            self.fc1.bias[half:].fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """y (..., out_features) of x (..., in_features)."""
        value, gate = self.fc1(x).chunk(2, dim=-1)
        return self.drop(self.fc2(self.drop(value * self.act(gate))))


class GatedMlp(nn.Module):
    """y = drop(fc2(gate(drop(act(fc1(x)))))), as in gMLP. Arguments as `Mlp`, and:

    gate_layer: called with hidden_features, makes a module that halves them; None for none.

    Raises ValueError if there is a gate and hidden_features is odd.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        act_layer: Callable[[], nn.Module] = nn.GELU,
        gate_layer: Callable[[int], nn.Module] | None = None,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        hidden_features = hidden_features or in_features
        if gate_layer is not None and hidden_features % 2:
            raise ValueError(f"hidden_features must be even with a gate_layer, found {hidden_features}")
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = act_layer()
        self.gate = nn.Identity() if gate_layer is None else gate_layer(hidden_features)
        gated_features = hidden_features if gate_layer is None else hidden_features // 2
        self.fc2 = nn.Linear(gated_features, out_features or in_features)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        """y (..., out_features) of x (..., in_features)."""
        return self.drop(self.fc2(self.gate(self.drop(self.act(self.fc1(x))))))


class ConvMlp(nn.Module):
    """fc2(drop(act(norm(fc1(x))))) of images (batch, in_features, height, width), with 1x1 convolutions.

    Arguments as `Mlp`, and:
        norm_layer: called with hidden_features, makes a norm; None for none.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        act_layer: Callable[[], nn.Module] = nn.ReLU,
        norm_layer: Callable[[int], nn.Module] | None = None,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        hidden_features = hidden_features or in_features
        self.fc1 = nn.Conv2d(in_features, hidden_features, kernel_size=1)
        self.norm = nn.Identity() if norm_layer is None else norm_layer(hidden_features)
        self.act = act_layer()
        self.drop = nn.Dropout(drop)
        self.fc2 = nn.Conv2d(hidden_features, out_features or in_features, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, out_features, height, width)."""
        return self.fc2(self.drop(self.act(self.norm(self.fc1(x)))))
