"""The suite's own tools: the oracle against torch, samples, what is left out, and that a wrong result is noticed."""

import itertools
import types

import oracle
import pytest
import torch
from cases import LAYOUTS, Case, cover, laid_out, repeated
from compare import assert_error_ratio


def test_attention_equals_scaled_dot_product_attention():
    q, k, v, _ = (x.double() for x in Case(seqlen_q=5, seqlen_k=7, heads=4, heads_k=2).tensors("cpu"))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=oracle.allowed_keys(5, 7, causal=True), enable_gqa=True
    )
    torch.testing.assert_close(oracle.attention(q, k, v, causal=True)[0], expected.transpose(1, 2))


@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, options, rows",
    [
        (2, 5, dict(causal=True), ["11110", "11111"]),
        (5, 2, dict(causal=True), ["00", "00", "00", "10", "11"]),
        (3, 4, dict(window_size=(1, 0)), ["1100", "0110", "0011"]),
        (3, 4, dict(window_size=(0, 1)), ["0110", "0011", "0001"]),
        (3, 4, dict(window_size=(0, 1), causal=True), ["0100", "0010", "0001"]),
        (2, 3, dict(window_size=(-1, 0)), ["110", "111"]),
        (2, 3, dict(window_size=(1, -1)), ["111", "011"]),
    ],
)
def test_allowed_keys_drawn_by_hand(seqlen_q, seqlen_k, options, rows):
    allowed = oracle.allowed_keys(seqlen_q, seqlen_k, **options)
    assert ["".join("01"[x] for x in row.tolist()) for row in allowed] == rows


def test_empty_rows_have_no_gradient_and_infinite_lse():
    q, k, v, dout = (x.double() for x in Case(seqlen_q=5, seqlen_k=2).tensors("cpu"))
    out, lse, grads = oracle.gradients(lambda *x: oracle.attention(*x, causal=True), (q, k, v), dout)
    assert (out[:, :3] == 0).all() and (lse[:, :, :3] == float("inf")).all() and lse[:, :, 3:].isfinite().all()
    assert all(x.isfinite().all() for x in grads) and (grads[0][:, :3] == 0).all()


def test_varlen_of_equal_lengths_equals_batched():
    q, k, v, _ = (x.double() for x in Case(batch=3, seqlen_q=5, seqlen_k=7).tensors("cpu"))
    cu_seqlens_q, cu_seqlens_k = torch.arange(4) * 5, torch.arange(4) * 7
    out, lse = oracle.varlen_attention(*(x.flatten(0, 1) for x in (q, k, v)), cu_seqlens_q, cu_seqlens_k, causal=True)
    expected, expected_lse = oracle.attention(q, k, v, causal=True)
    torch.testing.assert_close(out.unflatten(0, (3, 5)), expected)
    torch.testing.assert_close(lse, expected_lse.transpose(0, 1).flatten(1))


def test_dropout_mask_keeps_the_documented_share():
    keep = oracle.dropout_keep(1234, 32, batch=2, heads=3, seqlen_q=100, seqlen_k=130, dropout_p=0.17)
    assert keep.shape == (2, 3, 100, 130)
    assert abs(keep.double().mean().item() - 212 / 256) < 0.005


def test_cover_meets_every_pair():
    factors = dict(a=[1, 2, 3], b="xyz", c=[True, False], d=[0.5, None])
    rows = cover(factors, valid=lambda row: not (row["a"] == 1 and row["b"] == "x"))
    seen = {(n, row[n], m, row[m]) for row in rows for n, m in itertools.permutations(factors, 2)}
    wanted = {(n, x, m, y) for n, m in itertools.permutations(factors, 2) for x in factors[n] for y in factors[m]} - {
        ("a", 1, "b", "x"),
        ("b", "x", "a", 1),
    }
    assert seen == wanted
    assert len(rows) <= 12


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_keep_the_values(layout):
    x = torch.randn(2, 3, 4, 5)
    assert torch.equal(laid_out(x, layout), x)


@pytest.mark.parametrize("wrong", [0.3, float("nan"), float("inf")])
def test_a_wrong_element_is_reported(wrong):
    exact = torch.randn(4, 5, dtype=torch.float64)
    ours = exact.bfloat16()
    assert_error_ratio(ours, exact, baseline=exact.bfloat16())
    ours[2, 3] += wrong
    with pytest.raises(AssertionError, match=r"out: .*(\n.*)?\(2, 3\)"):
        assert_error_ratio(ours, exact, baseline=exact.bfloat16(), name="out")


class Item(types.SimpleNamespace):
    __hash__ = object.__hash__


def items_of(parameters, *names):
    """Tests as pytest has them, of all combinations of the parameters' values, whose marker has the names."""
    mark = types.SimpleNamespace(args=names)
    return [
        Item(
            nodeid=f"test[{number}]",
            callspec=types.SimpleNamespace(params=dict(zip(parameters, values))),
            get_closest_marker=dict(same_on_cpu=mark).get,
        )
        for number, values in enumerate(itertools.product(*parameters.values()))
    ]


def test_what_repeats_others_on_the_cpu():
    """All pairs of values of the other parameters stay, and all values of those that the marker names."""
    cases = [Case(head_dim=head_dim, causal=causal) for head_dim in (64, 128) for causal in (False, True)]
    items = items_of(dict(case=cases, kernel="abc", varlen=[False, True]), "head_dim", "kernel")
    left_out = repeated(items)
    kept = [item.callspec.params for item in items if item not in left_out]
    pairs = {(each["case"].causal, each["varlen"]) for each in kept}
    assert len(kept) == len(pairs) == 4
    assert {each["case"].head_dim for each in kept} == {64, 128} and {each["kernel"] for each in kept} == set("abc")


def test_of_tests_that_differ_in_a_case_alone_one_stays():
    items = items_of(dict(case=[Case(seqlen_q=n) for n in range(5)]), "case")
    assert len(repeated(items)) == 4


def test_a_marker_that_names_no_parameter():
    items = items_of(dict(varlen=[False, True]), "valren")
    with pytest.raises(ValueError, match=r"test\[0\]: same_on_cpu names \['valren'\], which it has not"):
        repeated(items)
