"""Every family: logits as those of transformers' model, state dicts there and back, tensor parallel parts."""

import copy
import functools
import importlib

import pytest
import torch
from compare import assert_error_ratio
from families import CASES, ids_of

from flash_attn.models._family import families, find_family
from flash_attn.models.gpt import GPTLMHeadModel, combine_state_dicts_tp, shard_state_dict_tp

NAMES = list(CASES)
SMALL = [name for name in NAMES if name != "baichuan 13B"]  # whose tensors have the names of the other one's


def converted(case, **options):
    """(reference, ours with its weights, the configuration of ours)."""
    config, reference, gpt2_config = case.build()
    for name, value in options.items():
        setattr(gpt2_config, name, value)
    ours = GPTLMHeadModel(gpt2_config).eval()
    state_dict = find_family(name=case.family).keys.remap(dict(reference.state_dict()), gpt2_config)
    ours.load_state_dict(state_dict)
    return config, reference, ours


def assert_same_logits(reference, ours, ids):
    with torch.no_grad():
        expected, found = reference(ids).logits, ours(ids).logits
    vocab = expected.shape[-1]
    assert (found[..., :vocab] - expected).abs().max() < 1e-4
    assert expected.std() > 0.1  # or anything would do


@pytest.mark.parametrize("name", NAMES)
def test_logits(name):
    config, reference, ours = converted(CASES[name])
    assert_same_logits(reference, ours, ids_of(config))


FUSED = dict(fused_bias_fc=True, fused_dropout_add_ln=True, use_flash_attn=True)


@pytest.mark.parametrize("name", SMALL)
def test_logits_of_fused_layers_and_padded_vocabulary(name):
    """The options that people turn on for speed change nothing."""
    case = CASES[name]
    gpt2_config = case.ours()
    prenorm = getattr(gpt2_config, "prenorm", True)
    options = FUSED | dict(pad_vocab_size_multiple=40, residual_in_fp32=prenorm)
    if gpt2_config.activation_function in ("gelu_new", "relu", "gelu_pytorch_tanh"):
        options["fused_mlp"] = True
    config, reference, ours = converted(case, **options)
    assert_same_logits(reference, ours, ids_of(config))


def mask_of(ids, padding):
    """A mask of a batch of three, with so much padding before and after the tokens of each row."""
    mask = torch.ones_like(ids)
    for row, (before, after) in enumerate(padding):
        mask[row, :before] = 0
        mask[row, ids.shape[1] - after :] = 0
    return mask


PADDED = {
    "none": ((0, 0), (0, 0), (0, 0)),
    "left": ((5, 0), (0, 0), (19, 0)),
    "right": ((0, 5), (0, 0), (0, 19)),
    "both": ((5, 3), (0, 0), (7, 0)),
}
# BigCode's gradients of repeated heads are several for one of transformers'.
TRAINED = [name for name in NAMES if not name.startswith(("btlm", "baichuan", "bigcode"))]
ALL_PADDINGS = "gpt2", "llama gqa", "mistral", "gemma2", "opt", "falcon alibi"  # each kind of position and of mask


@pytest.mark.parametrize(
    "name, padding",
    [
        pytest.param(name, padding, marks=() if padding == "both" or name in ALL_PADDINGS else pytest.mark.slow)
        for name in TRAINED
        for padding in PADDED
    ],
)
def test_loss_and_gradients(name, padding):
    """Those of transformers, of batches with padding too; positions count from the first token of a row."""
    config, reference, ours = converted(CASES[name])
    ids = ids_of(config, batch=3)
    mask = mask_of(ids, PADDED[padding])
    labels = ids.masked_fill(mask == 0, -100).masked_fill(mask.cumsum(1) == 1, -100)
    expected = reference(
        ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), labels=labels, use_cache=False
    )
    with torch.no_grad():
        difference = ours(ids, attention_mask=mask).logits - expected.logits
    assert difference[mask.bool()].abs().max() < 1e-4
    loss = ours(ids, attention_mask=mask, labels=ids).loss  # padding does not count by itself
    assert abs(loss - expected.loss) < 1e-4
    expected.loss.backward()
    loss.backward()
    gradients = {key: parameter.grad for key, parameter in ours.named_parameters()}
    found = find_family(name=CASES[name].family).keys.invert(gradients, ours.config)
    for key, parameter in reference.named_parameters():
        if parameter.grad is not None:
            scale = max(1.0, parameter.grad.abs().max().item())
            assert (found[key] - parameter.grad).abs().max() < 1e-4 * scale, key


@functools.cache
def state_dict_of(name):
    """The tensors of a reference, in every test the same ones: nobody may change them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return dict(CASES[name].build()[1].state_dict())


@pytest.mark.parametrize("padding", [1, 40])
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.cover(1)
def test_state_dict_there_and_back(name, padding):
    case = CASES[name]
    theirs, gpt2_config = state_dict_of(name), case.ours()
    gpt2_config.pad_vocab_size_multiple = padding
    keys = find_family(name=case.family).keys
    ours = keys.remap(dict(theirs), gpt2_config)
    assert set(ours) == set(GPTLMHeadModel(gpt2_config, device="meta").state_dict())
    back = keys.invert(ours, gpt2_config)
    if case.family == "opt":  # the positions that no token has
        theirs = copy.deepcopy(theirs)
        theirs["model.decoder.embed_positions.weight"][:2] = 0
    assert back.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert torch.equal(back[key], tensor), key
    again = keys.remap(dict(back), gpt2_config)
    assert again.keys() == ours.keys()
    assert all(torch.equal(again[key], ours[key]) for key in ours)


@pytest.mark.parametrize("name", SMALL)
def test_parts_of_a_state_dict(name):
    """Each process has the tensors of the module that it has, and all together have all."""
    gpt2_config = CASES[name].ours()
    gpt2_config.pad_vocab_size_multiple = 8
    whole = find_family(name=CASES[name].family).keys.remap(dict(state_dict_of(name)), gpt2_config)
    for world_size in (1, 2, 4):
        if world_size > 1 and getattr(gpt2_config, "qk_norm_over_heads", False):
            with pytest.raises(ValueError, match=r"config.qk_norm_over_heads must be False with several processes"):
                shard_state_dict_tp(dict(whole), gpt2_config, world_size, 0)
            continue
        if gpt2_config.n_head < world_size:
            with pytest.raises(ValueError, match=r"config.n_head must be at least the number of processes"):
                shard_state_dict_tp(dict(whole), gpt2_config, world_size, 0)
            continue
        parts = [shard_state_dict_tp(dict(whole), gpt2_config, world_size, rank) for rank in range(world_size)]
        again = combine_state_dicts_tp(parts, gpt2_config)
        assert again.keys() == whole.keys()
        for key, tensor in whole.items():
            assert torch.equal(again[key], tensor), key


@pytest.mark.parametrize("name", [family.name for family in families()])
def test_functions_by_name(name):
    """Each family has functions under the names that people import."""
    module = importlib.import_module(f"flash_attn.models.{'gpt' if name == 'gpt2' else name}")
    case = next(each for each in CASES if CASES[each].family == name)
    keys, theirs, gpt2_config = find_family(name=name).keys, state_dict_of(case), CASES[case].ours()
    ours = getattr(module, f"remap_state_dict_hf_{name}")(dict(theirs), gpt2_config)
    expected = keys.remap(dict(theirs), gpt2_config)
    assert ours.keys() == expected.keys() and all(torch.equal(ours[key], x) for key, x in expected.items())
    back = getattr(module, f"inv_remap_state_dict_hf_{name}")(ours, gpt2_config)
    expected = keys.invert(ours, gpt2_config)
    assert back.keys() == expected.keys() and all(torch.equal(back[key], x) for key, x in expected.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.same_on_cpu("dtype")
def test_16_bits(name, dtype, device):
    """The error is at most three times that of the reference in the same dtype."""
    prenorm = getattr(CASES[name].ours(), "prenorm", True)
    config, reference, ours = converted(CASES[name], **FUSED, residual_in_fp32=prenorm)
    reference, ours, ids = reference.to(device), ours.to(device, dtype), ids_of(config, device=device)
    with torch.no_grad():
        exact = copy.deepcopy(reference).double()(ids).logits
        assert_error_ratio(ours(ids).logits, exact, reference.to(dtype)(ids).logits, at_most=3.0)


def test_all_families_have_cases():
    assert {family.name for family in families()} == {case.family for case in CASES.values()}
