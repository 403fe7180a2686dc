"""How tensors of a checkpoint become tensors of the model and back, from one table for both directions.

    KeyMap({"transformer.ln_f": "model.norm", **each_layer("model.layers.{i}.", {"norm1": "input_layernorm"})})

In this package "ours" are the tensors of our model, "theirs" those of a checkpoint in the format of transformers or
another library. A table has, for each name of ours, the name of theirs that holds the same tensor, or a `Rule` that
says which of theirs it is made of. A name stands for a weight and a bias, each of which may be missing. Everything that
is done to the rows of tensors (concatenating queries, keys and values, padding the vocabulary, reordering rotary pairs
or heads, repeating a head) is one operation: row j of ours is row index[j] of theirs, or zero. Its inverse follows from
the index.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn.models._checkpoints.tied_weights import check_tied
from flash_attn.models._config import Settings, round_up, settings

EMBEDDINGS = "transformer.embeddings.word_embeddings"
POSITIONS = "transformer.embeddings.position_embeddings"
FINAL_NORM = "transformer.ln_f"
HEAD = "lm_head"
TIED = (f"{EMBEDDINGS}.weight", f"{HEAD}.weight")
_LAYER = "transformer.layers.{i}."


class Order(NamedTuple):
    """Which rows of theirs are the rows of ours.

    take: (number of their rows, settings) -> for each row of ours the number of theirs, -1 for a row of zeros.
    length: (number of our rows, settings) -> number of theirs.
    """

    take: Callable[[int, Settings], Tensor]
    length: Callable[[int, Settings], int] = lambda rows, s: rows


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one of our tensors is made.

    sources: the names of theirs, which are concatenated along the first dimension.
    shares: settings -> in what proportion the sources share the rows of ours; evenly if None.
    transposed: whether their matrices are (inputs, outputs), while ours are (outputs, inputs).
    order: which of their rows become which of ours; unchanged if None.
    """

    sources: tuple[str, ...]
    shares: Callable[[Settings], Sequence[int]] | None = None
    transposed: bool = False
    order: Order | None = None

    def forward(self, theirs: list[Tensor], s: Settings) -> Tensor:
        theirs = [self._turned(tensor) for tensor in theirs]
        ours = theirs[0] if len(theirs) == 1 else torch.cat(theirs)
        if self.order is not None:
            ours = _take(ours, self.order.take(len(ours), s))
        return ours.contiguous()

    def inverse(self, ours: Tensor, s: Settings) -> list[Tensor]:
        if self.order is not None:
            rows = self.order.length(len(ours), s)
            ours = _take(ours, _inverse(self.order.take(rows, s), rows))
        shares = [1] * len(self.sources) if self.shares is None else self.shares(s)
        parts = ours.split([len(ours) // sum(shares) * share for share in shares])
        return [self._turned(part).contiguous() for part in parts]

    def _turned(self, tensor):
        return tensor.t() if self.transposed and tensor.dim() == 2 else tensor


def _made(name, rule, theirs, s):
    """One of our tensors. Raises ValueError if the shapes of theirs do not allow it."""
    try:
        return rule.forward(theirs, s)
    except (RuntimeError, IndexError) as error:
        found = ", ".join(f"{source} {tuple(tensor.shape)}" for source, tensor in zip(rule.sources, theirs))
        raise ValueError(f"{name} must be made of tensors that fit together and the model, found {found}") from error


def _take(x, index):
    """Rows of x by their numbers, zeros where the number is negative."""
    if torch.equal(index, torch.arange(len(x))):
        return x
    there = (index >= 0).nonzero().squeeze(1)
    if len(there) == len(index):
        return x[index.to(x.device)]
    out = x.new_zeros(len(index), *x.shape[1:])
    out[there.to(x.device)] = x[index[there].to(x.device)]
    return out


def _inverse(index, rows):
    """For each of `rows` rows, its first place in the index, or -1 if it is not there."""
    there = (index >= 0).nonzero().squeeze(1)
    nowhere = len(index)
    result = torch.full((rows,), nowhere).scatter_reduce(0, index[there], there, "amin")
    return torch.where(result == nowhere, -1, result)


# ---------------------------------------------------------------------------------------------------------------------
# What tables are made of


def each_layer(prefix: str, table: dict[str, "str | Rule"]) -> dict[str, "str | Rule"]:
    """The entries of a table for one layer, with the prefix of its tensors in the checkpoint, {i} for its number."""

    def prefixed(rule):
        if isinstance(rule, str):
            return prefix + rule
        return dataclasses.replace(rule, sources=tuple(prefix + source for source in rule.sources))

    return {_LAYER + ours: prefixed(theirs) for ours, theirs in table.items()}


def stacked(*sources: str, transposed: bool = False) -> Rule:
    """Tensors with equally many rows, concatenated."""
    return Rule(sources, transposed=transposed)


def transposed(source: str) -> Rule:
    return Rule((source,), transposed=True)


def reordered(source: str, order: Order) -> Rule:
    return Rule((source,), order=order)


def padded(source: str, *, from_rows: bool = False) -> Rule:
    """Rows of the vocabulary, with zeros up to the model's padded size, or, from_rows, up to the next multiple."""
    return Rule((source,), order=_OF_ROWS if from_rows else _OF_CONFIG)


def queries_keys_values(q: str, k: str, v: str, order: Order | None = None) -> Rule:
    return Rule((q, k, v), shares=lambda s: (s.n_head, s.heads_kv, s.heads_kv), order=order)


def _with_zeros(rows, wanted):
    index = torch.arange(wanted)
    return torch.where(index < rows, index, -1)


_OF_CONFIG = Order(lambda rows, s: _with_zeros(rows, s.padded_vocab_size), lambda rows, s: s.vocab_size)
_OF_ROWS = Order(
    lambda rows, s: _with_zeros(rows, round_up(rows, s.pad_vocab_size_multiple)),
    lambda rows, s: min(rows, s.vocab_size),
)


def _interleaved(rows, s):
    heads, width = s.n_head + s.heads_kv, s.width_of_head
    turning = torch.arange(heads * width).view(heads, 2, width // 2).transpose(1, 2)
    return torch.cat([turning.flatten(), torch.arange(heads * width, rows)])


def _interleaved_head(rows, s):
    return torch.arange(rows).view(2, rows // 2).t().flatten()


def _grouped(rows, s):
    """Their rows are grouped by key head: its query heads, the key, the value."""
    groups = torch.arange(rows).view(s.heads_kv, s.n_head // s.heads_kv + 2, -1)
    return torch.cat([groups[:, :-2].flatten(), groups[:, -2].flatten(), groups[:, -1].flatten()])


# For queries and keys: rotary pairs that are half a head apart in the checkpoint become neighbours.
INTERLEAVED = Order(_interleaved)
INTERLEAVED_HEAD = Order(_interleaved_head)  # the same for a tensor (head_dim,) that all heads share
GROUPED = Order(_grouped)


# ---------------------------------------------------------------------------------------------------------------------
# The map


class KeyMap:
    """A table of tensors in both directions.

    Arguments:
        table: from our names to theirs, or to rules.
        spellings: (pattern, replacement) for other spellings of their names, which become the usual ones first.
        dropped: patterns of names that are no parameters, such as buffers.
    """

    def __init__(
        self,
        table: dict[str, str | Rule] | Callable[[Settings], dict[str, str | Rule]],
        spellings: Sequence[tuple[str, str]] = (),
        dropped: Sequence[str] = (r"rotary_emb\.inv_freq$",),
    ):
        self.table = table if callable(table) else lambda s: table
        self.spellings = spellings
        self.dropped = dropped

    def rules(self, s: Settings) -> Iterator[tuple[str, Rule]]:
        """(our name, rule with their names) of every tensor that a checkpoint may have."""
        for ours, rule in self.table(s).items():
            rule = Rule((rule,)) if isinstance(rule, str) else rule
            for i in range(s.n_layer) if "{i}" in ours else (0,):
                for kind in ("weight", "bias"):
                    sources = tuple(f"{source}.{kind}".replace("{i}", str(i)) for source in rule.sources)
                    yield f"{ours}.{kind}".replace("{i}", str(i)), dataclasses.replace(rule, sources=sources)

    def spell(self, tensors: dict[str, Tensor]) -> None:
        """Give their tensors the usual names, and remove those that are no parameters."""
        spelled: dict[str, str] = {}  # the usual name -> that of the checkpoint
        for name in list(tensors):
            tensor, usual = tensors.pop(name), name
            for pattern, replacement in self.spellings:
                usual = re.sub(pattern, replacement, usual)
            if any(re.search(pattern, usual) for pattern in self.dropped):
                continue
            if usual in spelled:
                raise ValueError(f"tensors must have different names, found {spelled[usual]} and {name} for {usual}")
            spelled[usual] = name
            tensors[usual] = tensor

    def convert(self, tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        """Make ours from `tensors`, and remove what was used. The rest stays there, under its usual names.

        If embedding and head are tied, either may be missing; ValueError if they differ.
        """
        s = settings(config)
        self.spell(tensors)
        embedding, head = self.tied_sources(s)
        if head in tensors and embedding in tensors:
            check_tied(embedding, tensors[embedding], head, tensors.pop(head))
        elif head in tensors:
            tensors[embedding] = tensors.pop(head)
        result = {}
        for ours, rule in self.rules(s):
            if all(source in tensors for source in rule.sources):
                result[ours] = _made(ours, rule, [tensors.pop(source) for source in rule.sources], s)
        if s.tie_word_embeddings and TIED[0] in result:
            result[TIED[1]] = result[TIED[0]]
        return result

    def tied_sources(self, config: Any) -> tuple[str, str]:
        """The names of theirs that the embedding and the head are made of, if these are tied; else names of nothing."""
        if not settings(config).tie_word_embeddings:
            return "", ""
        embedding, head = (next(iter(self.sources(ours, config)), "") for ours in TIED)
        return embedding, head if head != embedding else ""

    def remap(self, state_dict: dict[str, Tensor], config: Any) -> "collections.OrderedDict[str, Tensor]":
        """Our state dict from theirs, which is emptied. Tensors with unknown names are kept under these."""
        result = self.convert(state_dict, config)
        result.update(state_dict)
        state_dict.clear()
        return collections.OrderedDict(result)

    def invert(self, state_dict: dict[str, Tensor], config: Any) -> "collections.OrderedDict[str, Tensor]":
        """Their state dict from ours, without vocabulary padding. Tensors with unknown names are kept under these."""
        s, rest = settings(config), dict(state_dict)
        result: collections.OrderedDict[str, Tensor] = collections.OrderedDict()
        for ours, rule in self.rules(s):
            if ours in rest:
                result.update(zip(rule.sources, rule.inverse(rest.pop(ours), s)))
        result.update(rest)
        return result

    def sources(self, ours: str, config: Any) -> tuple[str, ...]:
        """The names of theirs that one of our tensors is made of; none if its name is not known."""
        return next((rule.sources for name, rule in self.rules(settings(config)) if name == ours), ())
