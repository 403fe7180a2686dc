"""Embeddings: what they add up, parameters, errors. Divided over processes: test_parallel.py."""

import pytest
import torch

from flash_attn.modules.embedding import (
    BertEmbeddings,
    ColumnParallelEmbedding,
    GPT2Embeddings,
    ParallelGPT2Embeddings,
    VocabParallelEmbedding,
)


def shapes(module):
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("positions", [0, 9])
def test_gpt2(positions, projected, device):
    module = GPT2Embeddings(8, 20, positions, word_embed_proj_dim=4 if projected else None, device=device)
    ids = torch.randint(20, (2, 5), device=device)
    expected = module.word_embeddings.weight[ids]
    if projected:
        expected = expected @ module.project_in.weight.t()
    if positions:
        torch.testing.assert_close(module(ids, ids % 9), expected + module.position_embeddings.weight[ids % 9])
        expected = expected + module.position_embeddings.weight[:5]
    torch.testing.assert_close(module(ids), expected)
    words = {"word_embeddings.weight": (20, 4 if projected else 8)} | (
        {"project_in.weight": (8, 4)} if projected else {}
    )
    assert shapes(module) == words | ({"position_embeddings.weight": (9, 8)} if positions else {})
    assert projected or module.project_in is None


@pytest.mark.parametrize("types", [0, 2])
def test_bert(types, device):
    module = BertEmbeddings(8, 20, 9, types, padding_idx=3, device=device)
    ids = torch.randint(20, (2, 5), device=device)
    expected = module.word_embeddings.weight[ids] + module.position_embeddings.weight[:5]
    if types:
        chosen = torch.randint(types, (2, 5), device=device)
        torch.testing.assert_close(
            module(ids, token_type_ids=chosen), expected + module.token_type_embeddings.weight[chosen]
        )
        expected = expected + module.token_type_embeddings.weight[0]
    torch.testing.assert_close(module(ids), expected)
    assert not module.word_embeddings.weight[3].any()
    assert ("token_type_embeddings.weight" in shapes(module)) == bool(types)
    assert "position_embeddings.weight" not in shapes(BertEmbeddings(8, 20, 0, types))


def test_without_a_group():
    assert VocabParallelEmbedding(20, 8, padding_idx=1)(torch.tensor([[1, 2]])).shape == (1, 2, 8)
    assert ColumnParallelEmbedding(20, 8)(torch.tensor([[1, 2]])).shape == (1, 2, 8)


def test_errors():
    module = GPT2Embeddings(8, 20, 9)
    for ids, error, message in (
        (torch.zeros(2, 5), TypeError, "input_ids must have dtype"),
        (torch.zeros(5, dtype=torch.int64), ValueError, r"input_ids must have 2 dimensions \(batch, seqlen\)"),
        (torch.tensor([[3, 20]]), ValueError, "input_ids must be at least 0 and less than 20, found 20"),
        (torch.zeros(1, 10, dtype=torch.int64), ValueError, r"input_ids.shape\[1\] must be at most 9"),
    ):
        for each in (module, BertEmbeddings(8, 20, 9, 2)):
            with pytest.raises(error, match=message):
                each(ids)
    ids = torch.zeros(2, 5, dtype=torch.int64)
    for name, wrong, error, message in (
        ("position_ids", [0], TypeError, "position_ids must be a torch.Tensor, found list"),
        ("position_ids", ids.float(), TypeError, "position_ids must have dtype"),
        ("position_ids", ids[:, :1], ValueError, r"position_ids must have shape \(5,\) or \(2, 5\), found \(2, 1\)"),
        ("position_ids", ids[None], ValueError, "position_ids must have shape"),
        ("position_ids", ids - 1, ValueError, "position_ids must be at least 0 and less than 9, found -1"),
        ("token_type_ids", ids[:, :4], ValueError, "token_type_ids must have shape"),
        ("token_type_ids", ids + 2, ValueError, "token_type_ids must be at least 0 and less than 2, found 2"),
    ):
        with pytest.raises(error, match=message):
            BertEmbeddings(8, 20, 9, 2)(ids, **{name: wrong})
    for right in (ids[0], ids[:1], ids):
        assert torch.equal(module(ids, right), module(ids, ids))
    with pytest.raises(TypeError, match=r"process_group must be a .* group, found None"):
        ParallelGPT2Embeddings(8, 20, 9, None)
