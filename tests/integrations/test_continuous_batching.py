"""transformers' continuous batching with attn_implementation="flash_attention_2", which then is this package.

Requests come and go, prompts are read in chunks beside decoding: attention of packed sequences over keys that
transformers gathers. If all requests decode, it is a call of flash_attn_with_kvcache, which appends to pages and finds
them by a block table. Batches of a captured step are padded by rows of length -1, whose table is -1, too.

transformers takes flash-attn on a GPU only. On the CPU it is told here that there is one; captured steps are run as the
functions that they are captured of.
"""

import collections
import inspect
import types

import numpy as np
import pytest
import torch
import transformers
from transformers import modeling_flash_attention_utils as flash_utils

import flash_attn

batching = pytest.importorskip(
    "transformers.generation.continuous_batching", reason="this transformers has no continuous batching"
)
if "page_size" not in inspect.signature(getattr(transformers, "ContinuousBatchingConfig", object)).parameters:
    pytest.skip("continuous batching is another one in this transformers", allow_module_level=True)
from transformers.generation.configuration_utils import CompileConfig  # noqa: E402
from transformers.generation.continuous_batching import initialization, model_runner  # noqa: E402

DECODER = dict(
    vocab_size=97,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    head_dim=16,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
WINDOW_THEN_FULL = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])
MODELS = {
    "llama": {},
    "mistral": dict(sliding_window=6),
    "gemma2": dict(**WINDOW_THEN_FULL, attn_logit_softcapping=2.0),
    "gpt_oss": dict(**WINDOW_THEN_FULL, num_local_experts=2, num_experts_per_tok=1),  # sinks
}
PROMPTS = 17, 5, 29, 9, 22  # lengths; some begin with the same tokens
PAGED = dict(page_size=4, num_blocks=96, max_batch_tokens=24, max_requests_per_batch=4, use_async_batching=False)


def model_of(name, device, dtype):
    config = transformers.CONFIG_MAPPING[name](**{**DECODER, **MODELS[name]})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:  # scores and logits that are far from equal
            torch.nn.init.normal_(parameter, std=0.2)
    return model.to(device, dtype).eval()


def prompts():
    common = torch.randint(3, 97, (12,)).tolist()
    drawn = [torch.randint(3, 97, (length,)).tolist() for length in PROMPTS]
    return [common + ids[12:] if len(ids) > 12 else ids for ids in drawn]


def generated(model, ids, new_tokens, **paged):
    """The tokens that continuous batching generates for each prompt."""
    config = transformers.ContinuousBatchingConfig(**PAGED | dict(auto_switch_to_flash=False) | paged)
    options = transformers.GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    results = list(model.generate_batch(ids, options, config).values())
    assert [result.error for result in results] == [None] * len(ids)
    return [result.generated_tokens for result in results]


def use(model, implementation):
    """Set the attention of a model, also where transformers would ask for a GPU."""
    model.config._attn_implementation = implementation


@pytest.fixture
def calls(monkeypatch, request):
    """The calls of attention by transformers, which takes this package for flash-attn on a GPU. Each by its name."""
    made = collections.defaultdict(list)

    def recorded(name):
        function = getattr(flash_attn, name)

        def call(*args, **kwargs):
            arguments = inspect.signature(function).bind(*args, **kwargs).arguments
            lists = {key: x.tolist() for key, x in arguments.items() if isinstance(x, torch.Tensor) and x.dim() <= 2}
            made[name].append(arguments | lists)
            return function(*args, **kwargs)

        call.__signature__ = inspect.signature(function)
        return call

    if "cuda" not in request.keywords:  # the test is on the CPU
        for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
            monkeypatch.setattr(flash_attn, name, recorded(name))
        monkeypatch.setattr(flash_utils, "is_flash_attn_2_available", lambda *args, **kwargs: True)
        has_cuda = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: True))
        monkeypatch.setattr(initialization, "torch", has_cuda)
    elif not transformers.utils.is_flash_attn_2_available():
        pytest.skip("transformers does not find this package: it is not installed")
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn"):
        monkeypatch.setattr(flash_utils, name, None)  # so that they are looked for now, and again after the test
    for name in ("_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn", "_pad_fn", "_unpad_fn"):
        monkeypatch.setattr(flash_utils, name, None)
    return made


def are_likeliest(model, prompt, tokens):
    """Whether each token has the greatest logit after those before it, up to the rounding of the model's dtype."""
    ids, dtype, logits = torch.tensor([prompt + tokens], device=model.device), model.dtype, []
    use(model, "eager")
    with torch.no_grad():
        for each in (dtype, torch.float64):
            logits.append(model.to(each)(ids).logits[0, len(prompt) - 1 : -1].double())
    model.to(dtype)
    rounded, exact = logits
    behind = exact.amax(-1) - exact.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)
    return bool((behind <= 4 * (rounded - exact).abs().max()).all())


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers_own_attention(name, calls):
    """Also of its generate, for a prompt alone. In float32, which transformers gives as it is: on the CPU only."""
    model, ids = model_of(name, "cpu", torch.float32), prompts()
    use(model, "paged|eager")
    expected = generated(model, ids, 10)
    use(model, "eager")
    for prompt, tokens in zip(ids[:2], expected):
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0, len(prompt) :]
        assert alone.tolist() == tokens
    use(model, "flash_attention_2")
    assert generated(model, ids, 10) == expected
    packed, paged = calls["flash_attn_varlen_func"], calls["flash_attn_with_kvcache"]
    queries, keys = ([np.diff(call[f"cu_seqlens_{x}"]) for call in packed] for x in "qk")
    assert any(1 in each and max(each) > 1 for each in queries)  # prompts beside decoding
    assert any((q < k).any() and max(q) > 1 for q, k in zip(queries, keys))  # chunks
    assert bool(paged) == (name == "llama")  # transformers has no tables for layers with a window
    assert bool(paged) == any(-1 in row for call in paged for row in call["block_table"])


def test_padded_batches(calls, monkeypatch):
    """As captured steps have them: rows of no tokens, and rows of length -1 without a page."""
    model, ids = model_of("llama", "cpu", torch.float32), prompts()
    use(model, "flash_attention_2")
    expected = generated(model, ids, 10)
    for made in calls.values():
        made.clear()
    monkeypatch.setattr(model_runner.torch, "compile", lambda function, **_: function)
    compiled = dict(varlen_compile_config=CompileConfig(), decode_compile_config=CompileConfig())
    compiled["max_requests_per_batch"] = 8  # to which the five that decode are padded
    assert generated(model, ids, 10, **compiled) == expected
    packed, paged = calls["flash_attn_varlen_func"], calls["flash_attn_with_kvcache"]
    assert any(call["cu_seqlens_q"][-1] < len(call["q"]) for call in packed)
    assert any(call["cu_seqlens_q"][-2] == call["cu_seqlens_q"][-1] for call in packed)
    padding = [
        row
        for call in paged
        for length, row in zip(call["cache_seqlens"], call["block_table"], strict=True)
        if length == -1
    ]
    assert padding and all(set(row) == {-1} for row in padding)


@pytest.mark.cuda
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])  # experts would be chosen by rounding
def test_tokens_on_a_gpu(name, captured, calls, device):
    """With and without CUDA graphs, from pages of the size that transformers has by default, and of 16."""
    model, ids = model_of(name, device, torch.bfloat16), prompts()
    for page_size in (16, 256):
        use(model, "flash_attention_2")
        options = dict(page_size=page_size, num_blocks=32, use_cuda_graph=captured, use_async_batching=captured)
        for prompt, tokens in zip(ids, generated(model, ids, 20, **options), strict=True):
            assert len(tokens) == 20 and are_likeliest(model, prompt, tokens)
