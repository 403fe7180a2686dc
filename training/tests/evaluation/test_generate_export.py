"""Text that a model writes, and a model and its tokenizer that transformers loads."""

import pytest
import torch
import transformers

from flash_attn.models.gpt import GPTLMHeadModel
from src.datamodules.tokenizer import ByteTokenizer
from src.evaluation.loading import open_model
from src.evaluation.perplexity import main as perplexity_command
from src.export import byte_tokenizer, export
from src.export import main as export_command
from src.generate import generate
from src.generate import main as generate_command

POSITIONS = 32


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=POSITIONS, vocab_size=257)
    config.pad_vocab_size_multiple, config.scale_attn_by_inverse_layer_idx = 8, True
    model = GPTLMHeadModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    export(model, ByteTokenizer(), folder)
    return folder


def greedy(model, prompt, length):
    """The text of the likeliest bytes, one at a time without a cache."""
    ids = list(prompt)
    while len(ids) < length:
        with torch.no_grad():
            ids.append(model(torch.tensor([ids])).logits[0, -1, :257].argmax().item())
        if ids[-1] == 256:
            break
    return bytes(i for i in ids[len(prompt) :] if i < 256).decode(errors="replace")


def test_greedy_is_the_likeliest_text(model):
    assert generate(model, ByteTokenizer(), "ab", 10, greedy=True) == greedy(model, b"ab", 12)


def test_an_empty_prompt_begins_a_document(model):
    expected = greedy(model, [256], 11)
    assert generate(model, ByteTokenizer(), max_new_tokens=10, greedy=True) == expected


@pytest.fixture(scope="module")
def model_of_transformers():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=POSITIONS, vocab_size=1000)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("greedily", [False, True])
def test_models_of_transformers_write(model_of_transformers, greedily):
    options = dict(max_new_tokens=10, greedy=greedily, seed=0, temperature=5.0, top_k=300)
    text = generate(model_of_transformers, ByteTokenizer(), "ab", **options)
    assert text == generate(model_of_transformers, ByteTokenizer(), "ab", **options)
    if greedily:
        assert text == greedy(model_of_transformers, b"ab", 12)


def test_no_id_is_written_that_the_tokenizer_lacks(model_of_transformers):
    """The models have 1000 ids, of which the tokenizer knows 257."""
    ours = GPTLMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=512, vocab_size=1000))
    for model, length in ((ours.eval(), 500), (model_of_transformers, 30)):
        assert generate(model, ByteTokenizer(), "a", max_new_tokens=length, temperature=10.0, seed=0)


def test_it_ends_where_the_positions_do(model):
    assert generate(model, ByteTokenizer(), "ab", 1000, greedy=True) == greedy(model, b"ab", POSITIONS)
    with pytest.raises(ValueError, match="prompt must have less than 32 tokens, the model's positions, found 32"):
        generate(model, ByteTokenizer(), "a" * POSITIONS)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, found 0"):
        generate(model, ByteTokenizer(), "a", 0)


def test_sampling_with_a_seed_is_repeatable(model):
    texts = [generate(model, ByteTokenizer(), "ab", 10, temperature=3.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_text_with_line_breaks_is_streamed(model, capsys):
    written = generate(model, ByteTokenizer(), "one\ntwo\n", 20, seed=0, stream=True)
    assert capsys.readouterr().out == f"one\ntwo\n{written}\n"


def test_transformers_loads_what_was_exported(model, folder):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.randint(257, (2, 20))
    with torch.no_grad():
        expected = model(tokens).logits[..., :257]
        assert theirs.config.vocab_size == 257 and theirs.config.eos_token_id == 256
        assert (theirs(tokens).logits - expected).abs().max() < 1e-4 * expected.abs().max()


TEXTS = ["", "plain", "n\u00e4her \u2192 \U0001f389\n\t\x00  end", "x" * 300]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_the_exported_tokenizer_is_the_byte_tokenizer(folder, text):
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), ByteTokenizer()
    ids = theirs.encode(text)
    assert ids == ours.encode(text)
    assert theirs.decode(ids) == text
    assert theirs.eos_token_id == ours.eos_token_id and len(theirs) == len(byte_tokenizer()) == len(ours)


def test_a_folder_is_opened_again(model, folder):
    again, tokenizer = open_model(folder, device="cpu")
    assert not again.training and tokenizer.eos_token_id == 256
    tokens = torch.randint(257, (2, 20))
    with torch.no_grad():
        assert (again(tokens).logits - model(tokens).logits[..., :257]).abs().max() < 1e-4
    assert next(open_model(folder, "byte", "cpu", "bfloat16")[0].parameters()).dtype == torch.bfloat16


def test_commands(folder, tmp_path, capsys):
    generate_command([str(folder), "--device", "cpu", "--prompt", "ab", "--greedy", "--max-new-tokens", "10"])
    printed = capsys.readouterr().out
    model, _ = open_model(folder, device="cpu")
    assert printed == "ab" + greedy(model, b"ab", 12) + "\n"
    export_command([str(folder), str(tmp_path / "again")])
    assert capsys.readouterr().out == f"34.7 K parameters: {tmp_path / 'again'}\n"
    assert transformers.AutoConfig.from_pretrained(tmp_path / "again").n_embd == 32


def test_what_gpt2_cannot_be_is_refused(tmp_path):
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=0, vocab_size=257)
    config.rotary_emb_fraction = 0.5
    with pytest.raises(ValueError, match="rotary_emb_fraction must be 0"):
        export(GPTLMHeadModel(config), ByteTokenizer(), tmp_path)


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="checkpoint must be a file or a folder, found nothing at"):
        open_model(tmp_path / "missing")


@pytest.mark.parametrize(
    ("command", "arguments", "named"),
    [
        (generate_command, ["{}/missing"], "checkpoint"),
        (export_command, ["{}/missing", "out"], "checkpoint"),
        (perplexity_command, ["{}/missing"], "checkpoint"),
        (perplexity_command, ["{}", "--data={}/missing"], "--data"),
    ],
)
def test_commands_say_what_is_not_there(command, arguments, named, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        command([each.format(tmp_path) for each in arguments])
    assert error.value.code == 2
    assert f"error: argument {named}: must be a file or a folder, found nothing at" in capsys.readouterr().err
