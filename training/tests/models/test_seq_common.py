"""The parts around sequence models against plain formulas."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from src.models.modules import seq_common as parts

BATCH, TOKENS, FEATURES = 3, 5, 4
LENGTHS = (5, 2, 1)


@pytest.fixture
def x():
    return torch.randn(BATCH, TOKENS, FEATURES, dtype=torch.float64)


def bool_matrix():
    return torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]


MASKS = {
    "no mask": lambda: None,
    "tensor": bool_matrix,
    "object": lambda: SimpleNamespace(bool_matrix=bool_matrix(), _lengths=torch.tensor(LENGTHS)),
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mode", ["MEAN", "SUM", "CLS", "LAST", "FLATTEN"])
def test_pooling(x, mode, mask, batch_first):
    rows = []
    for sequence, length in zip(x, LENGTHS if mask != "no mask" else [TOKENS] * BATCH):
        tokens = sequence[:length]
        rows.append(
            {
                "MEAN": tokens.sum(0) / length,
                "SUM": tokens.sum(0),
                "CLS": sequence[0],
                "LAST": tokens[-1],
                "FLATTEN": sequence.reshape(-1),
            }[mode]
        )
    given = x if batch_first else x.transpose(0, 1)
    torch.testing.assert_close(parts.pooling(given, mode, MASKS[mask](), batch_first), torch.stack(rows))


def test_padding_is_never_looked_at(x):
    x[~bool_matrix()] = float("nan")
    for mode in ("MEAN", "SUM", "LAST"):
        assert parts.pooling(x, mode, bool_matrix()).isfinite().all()


def test_other_pooling_modes_are_refused(x):
    with pytest.raises(ValueError, match=r"pooling_mode must be one of MEAN, .* found 'MAX'"):
        parts.pooling(x, "MAX")


def test_classification_heads(x):
    x, mask = x.float(), bool_matrix()
    pooled = parts.pooling(x, "MEAN", mask)
    linear = parts.ClassificationHeadLinear(FEATURES, 7, batch_first=True, unknown=1)
    torch.testing.assert_close(linear(x, mask, unknown=1), linear.out_proj(pooled))
    head = parts.ClassificationHead(FEATURES, 6, 7, dropout=0.5, batch_first=True)
    expected = head.out_proj(head.dense(pooled).relu())
    torch.testing.assert_close(head.eval()(x, mask), expected)
    assert not torch.equal(head.train()(x, mask), expected)
    torch.testing.assert_close(head.eval()(x.transpose(0, 1).contiguous().transpose(0, 1), mask), expected)


@pytest.mark.parametrize("interaction", ["NLI", None])
def test_dual_head(x, interaction):
    x = x.float()
    head = parts.ClassificationHeadDual(FEATURES, 6, 7, pooling_mode="CLS", batch_first=True, interaction=interaction)
    a, b = x[:, 0], x[:, 1]
    features = torch.cat([a, b, a * b, a - b] if interaction else [a, b], dim=1)
    expected = head.out_proj(head.dense(features).relu())
    torch.testing.assert_close(head(x, x[:, 1:]), expected)


@pytest.mark.parametrize("options", [{"pooling_mode": "LAST"}, {"interaction": "other"}])
def test_dual_head_refuses(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be .* found '{next(iter(options.values()))}'"):
        parts.ClassificationHeadDual(4, 6, 7, **options)


@pytest.mark.parametrize("bias", [True, False])
def test_lm_head(x, bias):
    head = parts.LMHead(FEATURES, 7, bias=bias)
    expected = x.float() @ head.lm_head.weight.T + (head.lm_head.bias if bias else 0)
    torch.testing.assert_close(head(x.float()).logits, expected)


@pytest.mark.parametrize("features", [6, 7])
def test_sinusoidal_table(features):
    table = parts.sinusoidal_init_(torch.empty(50, features, dtype=torch.float64))
    for position in (0, 1, 49):
        for i in range(features):
            angle = position / 10000 ** ((i - i % 2) / features)
            assert table[position, i].item() == pytest.approx(math.cos(angle) if i % 2 else math.sin(angle), abs=1e-12)


@pytest.mark.parametrize("batch_first", [True, False])
def test_positional_encoding(x, batch_first):
    encoding = parts.PositionalEncoding(FEATURES, dropout=0.0, max_len=8, batch_first=batch_first)
    given = (x if batch_first else x.transpose(0, 1)).float()
    y = encoding(given)
    added = (y - given) if batch_first else (y - given).transpose(0, 1)
    expected = parts.sinusoidal_init_(torch.empty(8, FEATURES))[:TOKENS]
    torch.testing.assert_close(added, expected.expand(BATCH, -1, -1))
    assert list(encoding.state_dict()) == ["pe"]
    assert not list(encoding.parameters())
    with pytest.raises(ValueError, match="at most max_len = 8 tokens, found 9"):
        encoding(torch.zeros(9, 9, FEATURES))


def test_learned_positional_encoding():
    initializer = {"_target_": "torch.nn.init.constant_", "val": 2.0}
    encoding = parts.PositionalEncoding(FEATURES, dropout=0.0, max_len=8, initializer=initializer)
    torch.testing.assert_close(encoding(torch.zeros(3, 1, FEATURES)), torch.full((3, 1, FEATURES), 2.0))
    assert [name for name, _ in encoding.named_parameters()] == ["pe"]


def halves(features):
    return nn.Linear(features, features // 2)


MLPS = {
    "Mlp": (lambda drop: parts.Mlp(4, 6, 5, drop=drop), lambda m, x: m.fc2(nn.functional.gelu(m.fc1(x)))),
    "Mlp with act_fn": (
        lambda drop: parts.Mlp(4, 6, 5, act_fn=torch.sin, drop=drop),
        lambda m, x: m.fc2(torch.sin(m.fc1(x))),
    ),
    "GluMlp": (
        lambda drop: parts.GluMlp(4, 6, 5, drop=drop),
        lambda m, x: m.fc2(m.fc1(x)[..., :3] * torch.sigmoid(m.fc1(x)[..., 3:])),
    ),
    "GatedMlp": (lambda drop: parts.GatedMlp(4, 6, 5, drop=drop), lambda m, x: m.fc2(nn.functional.gelu(m.fc1(x)))),
    "GatedMlp with gate": (
        lambda drop: parts.GatedMlp(4, 6, 5, gate_layer=halves, drop=drop),
        lambda m, x: m.fc2(m.gate(nn.functional.gelu(m.fc1(x)))),
    ),
}


@pytest.mark.parametrize("make, formula", MLPS.values(), ids=MLPS)
def test_mlps(make, formula):
    x = torch.randn(3, 2, 4)
    mlp = make(0.0)
    torch.testing.assert_close(mlp(x), formula(mlp, x))
    dropped = make(0.9)
    assert not torch.equal(dropped(x), dropped.eval()(x))


def test_big_mlp():
    mlp = parts.MlpBig(4, 3, 5, act_layer=nn.ReLU)
    assert [(layer.in_features, layer.out_features) for layer in mlp.layers] == [
        (4, 3),
        (3, 6),
        (6, 12),
        (12, 24),
        (24, 5),
    ]
    x = y = torch.randn(2, 4)
    for layer in mlp.layers[:-1]:
        y = layer(y).relu()
    torch.testing.assert_close(mlp(x), mlp.layers[-1](y))


def test_conv_mlp():
    mlp = parts.ConvMlp(4, 6, 5, norm_layer=nn.BatchNorm2d).eval()
    mlp.norm.running_mean.normal_()
    x = torch.randn(2, 4, 3, 3)
    pixels = x.permute(0, 2, 3, 1)
    hidden = pixels @ mlp.fc1.weight.flatten(1).T + mlp.fc1.bias
    hidden = ((hidden - mlp.norm.running_mean) / (mlp.norm.running_var + 1e-5).sqrt()).relu()
    expected = hidden @ mlp.fc2.weight.flatten(1).T + mlp.fc2.bias
    torch.testing.assert_close(mlp(x), expected.permute(0, 3, 1, 2))


def test_gates_are_open_at_first():
    mlp = parts.GluMlp(4, 6, act_layer=nn.Identity)
    mlp.init_weights()
    x = torch.randn(2, 4)
    torch.testing.assert_close(mlp(x), mlp.fc2(mlp.fc1(x)[..., :3]), rtol=1e-3, atol=1e-4)


def test_widths_default_to_the_first():
    for kind in (parts.Mlp, parts.MlpBig, parts.GluMlp, parts.GatedMlp):
        assert kind(4)(torch.zeros(2, 4)).shape == (2, 4)


@pytest.mark.parametrize("make", [parts.GluMlp, lambda *a: parts.GatedMlp(*a, gate_layer=halves)])
def test_what_is_halved_must_be_even(make):
    with pytest.raises(ValueError, match=r"hidden_features must be even.*found 5"):
        make(4, 5)
