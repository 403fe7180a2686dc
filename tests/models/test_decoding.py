"""Generation with every family is what a loop gives that computes everything again for each token."""

import functools
import types
import warnings

import pytest
import torch
import transformers
from families import CASES, ids_of
from overwriting import Overwriting

from flash_attn.models.gpt import GPTLMHeadModel
from flash_attn.utils.generation import _steps, decode, decode_speculative

# One of each kind of position, head and block.
NAMES = (
    "gpt2",
    "llama gqa",
    "llama 3",
    "mistral",
    "qwen2 windows",
    "qwen3",
    "gemma 7B",
    "granite",
    "smollm3",
    "gemma2",
    "gemma3",
    "olmo2",
    "exaone4",
    "cohere",
    "cohere2",
    "stablelm",
    "stablelm parallel",
    "phi3",
    "phi3 short",
    "starcoder2",
    "opt",
    "opt 350m",
    "gptj",
    "gpt_neox",
    "gpt_neox sequential",
    "gpt_neox yarn",
    "falcon",
    "falcon new decoder",
    "falcon alibi",
    "bigcode",
    "btlm",
    "btlm learned",
    "baichuan",
    "phi",
)
FUSED = dict(use_flash_attn=True, fused_bias_fc=True, fused_dropout_add_ln=True)


def model_of(name, device, dtype=None, seed=0, **options):
    """Ours, with random weights that let it say something else for each prompt."""
    torch.manual_seed(seed)
    config = CASES[name].ours()
    config.pad_vocab_size_multiple = 8
    for field, value in options.items():
        setattr(config, field, value)
    model = GPTLMHeadModel(config, device=device, dtype=dtype).eval()
    torch.nn.init.normal_(model.lm_head.weight, std=0.3)
    return model


def slowly(model, ids, max_length, teacher=None):
    """(sequences, scores) by computing the whole sequence for each token."""
    scores = []
    while True:
        with torch.no_grad():
            scores.append(model(ids).logits[:, -1, :96])
        tokens = scores[-1].argmax(-1)
        if teacher is not None and teacher.shape[1] > ids.shape[1]:
            tokens = teacher[:, ids.shape[1]]
        ids = torch.cat([ids, tokens[:, None]], dim=1)
        if ids.shape[1] >= max_length:
            return ids, scores


def generate(model, ids, max_length, **options):
    options = dict(return_dict_in_generate=True, output_scores=True) | options
    output = model.generate(ids, max_length=max_length, **options)
    return output.sequences, list(output.scores)


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.same_on_cpu("fused")
def test_greedy(name, fused, device):
    model = model_of(name, device, **FUSED if fused else {})
    ids = ids_of(model.config, seqlen=7, device=device)
    expected = slowly(model, ids, 16)
    assert_same(generate(model, ids, 16), expected)
    assert len(expected[0].unique()) > 10  # or a single repeated token would do


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.same_on_cpu("fused")
def test_pages(name, fused, device):
    """Caches with pages, of which max_length is no multiple, give the tokens and scores of caches in one piece."""
    model = model_of(name, device, **FUSED if fused else {})
    ids = ids_of(model.config, batch=3, seqlen=9, device=device)
    mask = (torch.arange(9, device=device) >= torch.tensor([[4], [0], [1]], device=device)).long()
    options = dict(attention_mask=mask, eos_token_id=95)
    assert_same(generate(model, ids, 15, page_size=4, **options), generate(model, ids, 15, **options))


@pytest.mark.parametrize("name", ["gpt2", "llama gqa", "falcon"])
def test_teacher(name, device):
    model = model_of(name, device)
    ids, teacher = (ids_of(model.config, seqlen=n, device=device) for n in (5, 9))
    assert_same(generate(model, ids, 14, teacher_outputs=teacher), slowly(model, ids, 14, teacher))


@pytest.mark.parametrize("name", ["gpt2", "llama gqa"])
def test_end_of_sequence(name, device):
    model = model_of(name, device)
    ids = ids_of(model.config, batch=1, seqlen=5, device=device)
    whole, _ = slowly(model, ids, 16)
    end = whole[0, 9].item()
    first = (whole[0, 5:] == end).nonzero()[0, 0].item() + 5
    found, _ = generate(model, ids, 16, eos_token_id=end)
    assert torch.equal(found, whole[:, : first + 1])


@pytest.mark.parametrize("name", ["gpt2", "llama gqa", "btlm"])
def test_prompt_as_long_as_the_result(name, device):
    """One token is added whatever max_length is."""
    model = model_of(name, device)
    ids = ids_of(model.config, seqlen=7, device=device)
    for max_length in (5, 7, 8):
        assert_same(generate(model, ids, max_length), slowly(model, ids, 8))


def test_prompt_longer_than_the_positions(device):
    model = model_of("gpt2", device)
    with pytest.raises(ValueError, match=r"sequences must have at most 64 tokens .* positions, found 65"):
        generate(model, ids_of(model.config, seqlen=65, device=device), 70)


@pytest.mark.parametrize("name", ["gpt2", "llama gqa", "qwen3", "falcon", "btlm"])
def test_several_tokens_behind_a_cache(name, device):
    """10 tokens, then 4, then 6 are 20."""
    from flash_attn.utils.generation import InferenceParams

    model = model_of(name, device, use_flash_attn=True)
    ids = ids_of(model.config, seqlen=20, device=device)
    params, found = InferenceParams(max_seqlen=20, max_batch_size=2), []
    with torch.no_grad():
        for chunk in ids.split((10, 4, 6), dim=1):
            positions = params.seqlen_offset + torch.arange(chunk.shape[1], device=device)
            found.append(model(chunk, position_ids=positions.expand_as(chunk), inference_params=params).logits)
            params.seqlen_offset += chunk.shape[1]
        torch.testing.assert_close(torch.cat(found, dim=1), model(ids).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("known_by", ["offset", "lengths", "padding", "lengths and padding"])
@pytest.mark.parametrize("name", ["gpt2", "opt", "btlm learned", "llama gqa"])
@pytest.mark.cover(2)
def test_positions_follow_from_what_the_caches_hold(name, known_by, paged, device):
    """Learned ones, too: without position_ids, each row gives what it gives alone, in prompts and in later chunks."""
    from flash_attn.utils.generation import InferenceParams, PageAllocator

    model = model_of(name, device, use_flash_attn=True)
    padding = [2, 0, 1] if "padding" in known_by else [0, 0, 0]
    ids, leftpad = ids_of(model.config, batch=3, seqlen=12, device=device), torch.tensor(padding, device=device)
    params = InferenceParams(max_seqlen=12, max_batch_size=4, batch_size_offset=1)
    if "padding" in known_by:
        params.leftpad_per_sample = torch.nn.functional.pad(leftpad, (1, 0), value=9)
    if paged:
        pages = PageAllocator(num_pages=13, page_size=4)
        params.key_value_memory_dict = model.allocate_inference_cache(13, 4)
        for row in range(4):
            pages.allocate(row, 12)
        params.block_table = pages.block_table(range(4), device=device)
    found = []
    with torch.no_grad():
        for chunk in ids.split((6, 1, 3, 2), dim=1):
            if "lengths" in known_by:
                held = (params.seqlen_offset - leftpad).clamp(min=0).int()
                params.lengths_per_sample = torch.nn.functional.pad(held, (1, 0), value=9)
            found.append(model(chunk, inference_params=params).logits)
            params.seqlen_offset += chunk.shape[1]
        found = torch.cat(found, dim=1)
        for row, first in enumerate(padding):
            expected = model(ids[row, None, first:]).logits[0]
            torch.testing.assert_close(found[row, first:], expected, rtol=1e-3, atol=1e-3)


def test_more_tokens_than_positions_behind_a_cache(device):
    from flash_attn.utils.generation import InferenceParams

    model, params = model_of("gpt2", device), InferenceParams(max_seqlen=100, max_batch_size=1, seqlen_offset=60)
    message = r"seqlen_offset \+ seqlen must be at most 64, the number of positions, found 65"
    with pytest.raises(ValueError, match=message):
        model(ids_of(model.config, batch=1, seqlen=5, device=device), inference_params=params)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_of_different_lengths(name, device):
    """Padded on the left, each goes on as it would alone."""
    model = model_of(name, device, **FUSED)
    ids = ids_of(model.config, batch=3, seqlen=9, device=device)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((4, 0, 1)):
        mask[row, :padding] = 0
    found = model.generate(ids.masked_fill(mask == 0, 0), max_length=16, attention_mask=mask)
    for row, padding in enumerate((4, 0, 1)):
        expected, _ = slowly(model, ids[row : row + 1, padding:], 16 - padding)
        assert torch.equal(found[row, padding:], expected[0])


def test_padding_of_the_vocabulary_is_never_drawn(device):
    """Though its logits are zeros, and all others less."""
    model = model_of("gpt2", device, pad_vocab_size_multiple=64)
    with torch.no_grad():
        model.transformer.ln_f.bias.fill_(1.0)
        model.lm_head.weight[:96] = -model.lm_head.weight[:96].abs()
        model.lm_head.weight[96:] = 0
        model.transformer.ln_f.weight.zero_()
    ids = ids_of(model.config, device=device)
    assert model(ids).logits[..., 96:].max() > model(ids).logits[..., :96].max()
    assert model.generate(ids, max_length=30).max() < 96
    assert decode(ids, model, 30).sequences.max() < 96
    assert decode_speculative(ids[:1], model, model, 30).sequences.max() < 96


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama gqa", marks=pytest.mark.slow), "qwen3", "falcon"])
def test_compiled_steps(name, device):
    """A step behind a cache as one graph."""
    from flash_attn.utils.generation import InferenceParams

    model = model_of(name, device, **FUSED | (dict() if name == "qwen3" else dict(n_layer=1)))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = ids_of(model.config, seqlen=8, device=device)
    results = []
    for step in (model, compiled):
        lengths = torch.zeros(2, dtype=torch.int32, device=device)
        params = InferenceParams(8, 2, lengths_per_sample=lengths)
        with torch.no_grad():
            model(ids[:, :7], inference_params=params)
            params.seqlen_offset = 7
            lengths.fill_(7)
            positions = torch.full_like(ids[:, 7:], 7)
            results.append(step(ids[:, 7:], position_ids=positions, inference_params=params).logits)
    torch.testing.assert_close(results[1], results[0])


def test_compiled_steps_with_pages(device):
    from flash_attn.utils.generation import InferenceParams

    model = model_of("llama gqa", device, n_layer=1, **FUSED)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids, results = ids_of(model.config, seqlen=8, device=device), []
    for step in (model, compiled):
        params = InferenceParams(10, 2, key_value_memory_dict=model.allocate_inference_cache(7, 4))
        params.block_table = torch.tensor([[6, 0, 1], [2, 5, 3]], dtype=torch.int32, device=device)
        params.lengths_per_sample = torch.zeros(2, dtype=torch.int32, device=device)
        with torch.no_grad():
            model(ids[:, :7], inference_params=params)
            params.seqlen_offset = 7
            params.lengths_per_sample.fill_(7)
            results.append(step(ids[:, 7:], inference_params=params).logits)
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[0], model(ids).logits[:, 7:], rtol=1e-3, atol=1e-3)


def test_compiled_steps_compute_no_tables(device):
    """They take those of the prompt, of which growing takes at most one more graph."""
    from flash_attn.utils.generation import InferenceParams

    model = model_of("llama gqa", device, n_layer=1, **FUSED)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for capacity in (8, 24, 40, 56):
        ids, results = ids_of(model.config, seqlen=8, device=device), []
        for step in (model, compiled):
            lengths = torch.zeros(2, dtype=torch.int32, device=device)
            params = InferenceParams(capacity, 2, lengths_per_sample=lengths)
            with torch.no_grad():
                model(ids[:, :7], inference_params=params)
                params.seqlen_offset = 7
                lengths.fill_(7)
                results.append(step(ids[:, 7:], inference_params=params).logits)
        torch.testing.assert_close(results[1], results[0])
    assert 0 < len(graphs) <= 2
    assert not any(node.target == "cos" for graph in graphs for node in graph.graph.nodes)


@pytest.mark.parametrize("part", ["model", "layer in a wrapper"])
def test_what_graphs_return_may_be_overwritten(part, device, monkeypatch):
    """In the next step, as with mode="reduce-overhead": neither caches, tables nor scores are then used any more."""
    model = model_of("llama gqa", device, n_layer=1, **FUSED)
    ids = ids_of(model.config, batch=1, seqlen=4, device=device)
    expected = generate(model, ids, 6)
    torch._dynamo.reset()
    backend, layers = Overwriting(), model.transformer.layers
    if part == "layer in a wrapper":
        layers[0] = torch.compile(layers[0], backend=backend)
    else:
        model.compile(backend=backend)
    run = _steps.Steps.run
    monkeypatch.setattr(_steps.Steps, "run", lambda self, *args: [backend.step(), run(self, *args)][1])
    found = generate(model, ids, 6)
    assert torch.equal(found[0], expected[0]) and backend.graphs > 0
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
def test_reduced_overhead(device):
    """Training with torch.compile's CUDA graphs while sequences grow, then generation, with and without the graphs."""
    torch._dynamo.reset()
    model, other = (model_of("llama gqa", device, torch.bfloat16, **FUSED) for _ in range(2))
    compiled = torch.compile(model, mode="reduce-overhead")
    for seqlen in (8, 8, 8, 16, 24, 24, 24, 8):
        ids = ids_of(model.config, seqlen=seqlen, device=device)
        losses = [function(ids, labels=ids).loss for function in (compiled, other)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*(loss.detach() for loss in losses), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(
            *([p.grad for p in each.parameters()] for each in (model, other)), rtol=0.1, atol=0.1
        )
        for each in (model, other):
            each.zero_grad()
    ids = ids_of(model.config, seqlen=7, device=device)
    expected, scores = generate(other, ids, 20)
    assert torch.equal(generate(model, ids, 20)[0], expected)
    model.compile(mode="reduce-overhead")
    for _ in range(3):  # the first runs of a graph do not replay it
        found, of_graphs = generate(model, ids, 20, teacher_outputs=expected)
        torch.testing.assert_close(of_graphs, scores, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("name", ["gpt2", "llama gqa", "gptj"])
def test_speculative(name, device):
    """The same as without a draft model, whatever that proposes."""
    model = model_of(name, device)
    ids = ids_of(model.config, batch=1, seqlen=7, device=device)
    expected, _ = slowly(model, ids, 20)
    for draft in (model, model_of(name, device, seed=1)):
        assert torch.equal(decode_speculative(ids, model, draft, 20, vocab_size=96).sequences, expected)


@pytest.mark.parametrize("name", ["llama gqa", "gpt_neox yarn"])
def test_speculative_with_pages(name, device):
    model = model_of(name, device)
    ids = ids_of(model.config, batch=1, seqlen=7, device=device)
    expected = generate(model, ids, 16)[0]
    for draft in (model, model_of(name, device, seed=1)):
        found = decode_speculative(ids, model, draft, 16, vocab_size=96, page_size=4).sequences
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("name", "bound"), [("llama dynamic", 16), ("phi3 short", 32)])
def test_angles_are_those_of_the_length_and_not_of_its_pages(name, bound, device):
    """Where they depend on how long sequences may become, around the length from which they do."""
    model = model_of(name, device)
    for length in (bound - 2, bound, bound + 2):
        ids = ids_of(model.config, seqlen=length - 5, device=device)
        expected = generate(model, ids, length)
        assert_same(generate(model, ids, length, page_size=24), expected)
        assert_same(generate(model, ids, length, page_size=1), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_graphs_with_pages(name, dtype, device):
    """Replaying a graph gives the same numbers, bit for bit."""
    model = model_of(name, device, dtype, **FUSED)
    for batch, prompt, length in ((2, 7, 20), (2, 7, 30), (1, 3, 9)):
        ids = ids_of(model.config, batch=batch, seqlen=prompt, device=device)
        expected, scores = generate(model, ids, length, page_size=16)
        found, scores_of_graph = generate(model, ids, length, page_size=16, cg=True)
        assert torch.equal(found, expected)
        assert all(torch.equal(one, other) for one, other in zip(scores_of_graph, scores, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_graphs(name, dtype, device):
    """Replaying a graph gives the same numbers, bit for bit."""
    model = model_of(name, device, dtype, **FUSED)
    for batch, prompt, length in ((2, 7, 20), (2, 7, 30), (1, 3, 9)):
        ids = ids_of(model.config, batch=batch, seqlen=prompt, device=device)
        expected, scores = generate(model, ids, length)
        found, scores_of_graph = generate(model, ids, length, cg=True)
        assert torch.equal(found, expected)
        assert all(torch.equal(one, other) for one, other in zip(scores_of_graph, scores, strict=True))


def test_more_tokens_than_learned_positions():
    """The last token of a sequence needs no position; padding on the left takes none."""
    model = GPTLMHeadModel(CASES["gpt2"].config()).eval()
    ids = ids_of(model.config, seqlen=60)
    assert model.generate(ids, max_length=65).shape == (2, 65)
    with pytest.raises(ValueError, match=r"max_length must be at most 65 .* as the model has 64 positions, found 66"):
        model.generate(ids, max_length=66)
    with pytest.raises(ValueError, match=r"sequences must have at most 64 tokens .* positions, found 65"):
        model.generate(ids, max_length=66, eos_token_id=96)  # which it never says
    ended = model.generate(ids, max_length=66, teacher_outputs=torch.full((2, 66), 2), eos_token_id=2)
    assert ended.shape == (2, 61)  # one that ends before is no error
    mask = (torch.arange(60) >= torch.tensor([4, 7])[:, None]).long()
    assert model.generate(ids, max_length=69, attention_mask=mask).shape == (2, 69)
    with pytest.raises(ValueError, match=r"max_length must be at most 69 \(padding included\) .* found 70"):
        model.generate(ids, max_length=70, attention_mask=mask)
    rotary = GPTLMHeadModel.from_config(CASES["llama"].config()).eval()
    assert rotary.generate(ids, max_length=70).shape == (2, 70)


@pytest.mark.parametrize(("length", "max_length"), [(65, 66), (60, 66)])
def test_too_few_positions_are_found_at_once(length, max_length, monkeypatch):
    """Before a model runs, caches are made, or a streamer gets the prompt, whose reader is told that it is over."""
    model, told = GPTLMHeadModel(CASES["gpt2"].config()).eval(), []
    larger = GPTLMHeadModel.from_config(CASES["gpt2"].config(), n_positions=80).eval()
    streamer = types.SimpleNamespace(put=told.append, end=lambda: told.append("end"))
    monkeypatch.setattr(GPTLMHeadModel, "forward", None)
    monkeypatch.setattr(_steps, "update_graph_cache", None)
    monkeypatch.setattr(_steps, "InferenceParams", None)
    ids = ids_of(model.config, batch=1, seqlen=length)
    for cg in (False, True):
        with pytest.raises(ValueError, match=r"the model has (64|no more) positions, found"):
            model.generate(ids, max_length=max_length, cg=cg, streamer=streamer)
    assert told == ["end", "end"]
    monkeypatch.setattr(_steps, "InferenceParams", lambda *args, **kwargs: types.SimpleNamespace())
    with pytest.raises(ValueError, match=r"model_draft has (64|no more) positions, found"):
        decode_speculative(ids, larger, model, max_length + 1)


def test_a_draft_model_does_not_read_the_last_two_tokens():
    model = GPTLMHeadModel(CASES["gpt2"].config()).eval()
    larger = GPTLMHeadModel.from_config(CASES["gpt2"].config(), n_positions=80).eval()
    ids = ids_of(model.config, batch=1, seqlen=60)
    assert decode_speculative(ids, larger, model, 66).sequences.shape == (1, 66)


def test_max_new_tokens():
    model = GPTLMHeadModel(CASES["gpt2"].config()).eval()
    ids = ids_of(model.config, seqlen=7)
    expected = model.generate(ids, 12)
    for length in (5, 5.0, torch.tensor(5)):
        assert torch.equal(model.generate(ids, max_new_tokens=length), expected)
    mask = (torch.arange(7) >= torch.tensor([2, 0])[:, None]).long()
    assert model.generate(ids, max_new_tokens=5, attention_mask=mask).shape == (2, 12)
    for options in (dict(), dict(max_length=12, max_new_tokens=5)):
        with pytest.raises(
            ValueError, match="either max_length or max_new_tokens must be given, found max_length="
        ) as e:
            model.generate(ids, **options)
        assert str(e.value).endswith(f"={options.get('max_length')} and max_new_tokens={options.get('max_new_tokens')}")
    with pytest.raises(ValueError, match="max_new_tokens must be positive, found 0"):
        model.generate(ids, max_new_tokens=0)


def test_dropout_is_told_once():
    ids = torch.zeros(1, 3, dtype=torch.int64)
    for options, count in ((dict(), 1), (dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), 0)):
        model = GPTLMHeadModel.from_config(CASES["gpt2"].config(), **options)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("default")
            model.eval().generate(ids, max_length=5)
            assert not told
            for _ in range(2):
                model.train().generate(ids, max_length=5)
        assert [each.category for each in told] == [UserWarning] * count
        assert all("call model.eval() first" in str(each.message) for each in told)


def test_padding_is_a_token_of_the_vocabulary():
    model = GPTLMHeadModel(CASES["gpt2"].config()).eval()
    with pytest.raises(ValueError, match="pad_token_id must be from 0 to 95, found 96"):
        model.generate(ids_of(model.config), max_length=30, eos_token_id=2, pad_token_id=96)


def test_what_a_tokenizer_returns_is_given_by_name():
    model = GPTLMHeadModel(CASES["gpt2"].config()).eval()
    batch = transformers.BatchEncoding({"input_ids": ids_of(model.config), "attention_mask": torch.ones(2, 24)})
    for call in (model, model.transformer, functools.partial(model.generate, max_length=30)):
        with pytest.raises(TypeError, match=r"input_ids must be a torch.Tensor, found BatchEncoding"):
            call(batch)
    assert model.generate(**batch, max_length=30).shape == (2, 30)
