"""Our model in the lm-evaluation-harness: a task of its own, read from a file, gives what the formulas give."""

import json
import math
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import transformers

from flash_attn.models.gpt import GPTLMHeadModel

pytest.importorskip("lm_eval", reason="needs lm_eval: pip install lm_eval")

import lm_eval
from lm_eval.tasks import TaskManager

from src.datamodules.tokenizer import ByteTokenizer
from src.evaluation.lm_harness import FlashAttnLM

DOCUMENTS = [
    {"text": "to be or not to be", "question": "to be or", "choices": [" not", " yes", " x"], "answer": 0},
    {"text": "a rose is a rose is a rose is a rose", "question": "a rose", "choices": [" is", "s", "?"], "answer": 1},
    {"text": "x", "question": "?", "choices": ["y", "zz", "a long one"], "answer": 2},
    {"text": "n\u00e4her \u2192 ferner", "question": "\u00e4", "choices": ["\u00f6", "u", "e"], "answer": 0},
]
LENGTH = 24
TRAINING = pathlib.Path(__file__).resolve().parents[2]

TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "byte_perplexity"}],
    },
    "writing": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def lm():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=LENGTH, vocab_size=257)
    model = GPTLMHeadModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return FlashAttnLM(model=model, tokenizer=ByteTokenizer(), batch_size=2)


@pytest.fixture
def evaluate(lm, tmp_path):
    """The harness's results and samples of one of TASKS."""
    (tmp_path / "documents.jsonl").write_text("\n".join(map(json.dumps, DOCUMENTS)))

    def run(name):
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "documents.jsonl")}}}
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, "test_split": "test"} | source | TASKS[name]))
        tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
        result = lm_eval.simple_evaluate(lm, tasks=[name], task_manager=tasks, bootstrap_iters=0, verbosity="ERROR")
        return result["results"][name], result["samples"][name]

    return run


def log_probabilities(lm, ids):
    """log P of each of ids after those before it, in float64."""
    with torch.no_grad():
        logits = lm.model(torch.tensor([ids[:-1]])).logits[0].double()
    return logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]].tolist()


def test_multiple_choice(lm, evaluate):
    results, samples = evaluate("choices")
    right = 0
    for document, sample in zip(DOCUMENTS, samples):
        expected = []
        for choice in document["choices"]:
            ids = list((document["question"] + choice).encode())
            expected.append(sum(log_probabilities(lm, ids)[-len(choice.encode()) :]))
        found = [float(response[0]) for response in sample["filtered_resps"]]
        assert found == pytest.approx(expected, rel=1e-5)
        right += expected.index(max(expected)) == document["answer"]
    assert results["acc,none"] == right / len(DOCUMENTS)


def test_rolling(lm, evaluate):
    results, samples = evaluate("rolling")
    total = 0.0
    for document in DOCUMENTS:
        ids = [256, *document["text"].encode()]
        first = log_probabilities(lm, ids[: LENGTH + 1])
        total += sum(first)
        if len(ids) > LENGTH + 1:  # one more window, which ends with the text and has full length
            rest = len(ids) - LENGTH - 1
            assert rest <= LENGTH
            total += sum(log_probabilities(lm, ids[-LENGTH - 1 :])[-rest:])
    num_bytes = sum(len(document["text"].encode()) for document in DOCUMENTS)
    assert results["bits_per_byte,none"] == pytest.approx(-total / num_bytes / math.log(2), rel=1e-5)
    assert results["byte_perplexity,none"] == pytest.approx(math.exp(-total / num_bytes), rel=1e-5)


def greedy(lm, prompt, count):
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(lm.model(torch.tensor([ids])).logits[0, -1, :257].argmax().item())
        if ids[-1] == 256:
            break
    return [i for i in ids[len(prompt) :] if i != 256]


def test_generation(lm, evaluate):
    _, samples = evaluate("writing")
    for document, sample in zip(DOCUMENTS, samples):
        text = lm.tokenizer.decode(greedy(lm, document["question"].encode(), 6)).split("\n")[0]
        assert sample["resps"] == [[text]]


def request(*args):
    return lm_eval.api.instance.Instance("generate_until", {}, args, 0)


def test_generation_stops_at_strings_and_long_contexts_lose_their_beginning(lm):
    context = "once upon a time there was"
    whole = lm.tokenizer.decode(greedy(lm, context.encode()[-(LENGTH - 8) :], 8))
    options = {"max_gen_toks": 8, "until": []}
    assert lm.generate_until([request(context, options)], disable_tqdm=True) == [whole]
    stop = whole[3:5]
    found = lm.generate_until([request(context, options | {"until": [stop]})], disable_tqdm=True)
    assert found == [whole.split(stop)[0]]


def test_options_of_sampling(lm):
    def write(**options):
        torch.manual_seed(0)
        return lm.generate_until([request("a", {"max_gen_toks": 8, "until": []} | options)], disable_tqdm=True)

    assert write(temperature=1e-3, do_sample=True) == write() == write(do_sample=True, temperature=5.0, top_k=1)
    assert write(do_sample=True, temperature=5.0) != write()
    with pytest.raises(ValueError, match="generation options that are not known: num_beams"):
        write(num_beams=2)
    with pytest.raises(ValueError, match="max_gen_toks must be less than the 24 tokens that the model reads, found 24"):
        write(max_gen_toks=24)


def test_command(lm, tmp_path):
    """The harness's own command has the model, and gives it a GPU that need not be there."""
    from src.evaluation.loading import open_model
    from src.export import export

    export(lm.model, lm.tokenizer, tmp_path / "model")
    (tmp_path / "documents.jsonl").write_text(json.dumps(DOCUMENTS[0]))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "documents.jsonl")}}}
    (tmp_path / "rolling.yaml").write_text(
        json.dumps({"task": "rolling", "test_split": "test"} | source | TASKS["rolling"])
    )
    command = [sys.executable, "-m", "src.evaluation.lm_harness", "run", "--model", "flash_attn", "--tasks", "rolling"]
    options = ["--model_args", f"checkpoint={tmp_path / 'model'}", "--include_path", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(TRAINING)]), "HF_HUB_OFFLINE": "1"}
    printed = subprocess.run(command + options, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
    model, tokenizer = open_model(tmp_path / "model")
    score = FlashAttnLM(model=model, tokenizer=tokenizer).loglikelihood_rolling([request(DOCUMENTS[0]["text"])])[0]
    bits = -score / len(DOCUMENTS[0]["text"]) / math.log(2)
    assert f"{bits:.3f}" in printed


def test_arguments(lm):
    with pytest.raises(ValueError, match="either checkpoint or model must be given"):
        FlashAttnLM()
    with pytest.raises(ValueError, match="batch_size must be a number, found 'auto'"):
        FlashAttnLM(model=lm.model, tokenizer=lm.tokenizer, batch_size="auto")
