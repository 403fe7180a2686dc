"""Tokenizers: round trips, their names, their files."""

import json
import pathlib
import pickle
import socketserver
import sys
import threading

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from src.datamodules.tokenizer import (
    ByteTokenizer,
    JsonTokenizer,
    encode_batch,
    load_tokenizer,
    tokenizer_identity,
)

TEXTS = ["plain text", "", "é漢😀\n\ttabs", "a" * 500, "<|endoftext|>"]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A folder with a tokenizer.json of at most 280 byte-level tokens and an end of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the text of the tests", "other text"] * 9, trainer)
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def pretrained(bpe, tmp_path_factory):
    """The same as a folder of transformers."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("pretrained")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(bpe / "tokenizer.json"), eos_token="<|endoftext|>")
    fast.save_pretrained(folder)
    return folder


def test_bytes():
    tokenizer = ByteTokenizer()
    assert len(tokenizer) == tokenizer.vocab_size == 257 and tokenizer.eos_token_id == 256
    for text in TEXTS:
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(np.asarray(tokenizer.encode(text), np.int64)) == text
    assert tokenizer.decode([72, 256, 105]) == "H<|endoftext|>i"
    assert tokenizer.decode([72, 256, 105], skip_special_tokens=True) == "Hi"
    assert tokenizer.decode([256, 256, 72, 256]) == "<|endoftext|><|endoftext|>H<|endoftext|>"
    assert tokenizer.decode([]) == "" and tokenizer.decode(iter([72])) == tokenizer.decode(torch.tensor([72])) == "H"
    with pytest.raises(ValueError, match="ids must be from 0 to 256, found 72 to 257"):
        tokenizer.decode([72, 257])
    assert tokenizer.decode([0xE6, 72]) == "\N{REPLACEMENT CHARACTER}H"


@pytest.mark.parametrize("kind", ["byte", "bpe", "json", "pretrained"])
def test_tokenizers_keep_texts_and_themselves(kind, bpe, pretrained, tmp_path):
    name = {"byte": "byte", "bpe": bpe, "json": bpe / "tokenizer.json", "pretrained": pretrained}[kind]
    tokenizer = load_tokenizer(name)
    tokenizer.save_pretrained(str(tmp_path / "saved"))
    batch = [list(ids) for ids in encode_batch(tokenizer, TEXTS)]
    for other in (tokenizer, load_tokenizer(tmp_path / "saved"), pickle.loads(pickle.dumps(tokenizer))):
        assert [list(ids) for ids in encode_batch(other, TEXTS)] == batch
        assert other.eos_token_id == tokenizer.eos_token_id and len(other) == len(tokenizer)
    for text, ids in zip(TEXTS, batch):
        assert tokenizer.encode(text) == ids and tokenizer.decode(ids) == text
        assert max(ids, default=0) < len(tokenizer)
    (index,) = tokenizer.encode("a")
    for one in (index, np.int64(index), torch.tensor(index)):  # as the TextStreamer of transformers calls it
        assert tokenizer.decode(one) == "a"


def test_bpe_merges(bpe):
    tokenizer = load_tokenizer(bpe)
    assert isinstance(tokenizer, JsonTokenizer) and 257 < len(tokenizer) <= 280
    assert len(tokenizer.encode("the text")) < 8
    assert tokenizer.eos_token == "<|endoftext|>" and tokenizer.encode("<|endoftext|>") == [tokenizer.eos_token_id]


def test_end_of_text_is_what_the_config_says(bpe, tmp_path):
    contents = json.loads((bpe / "tokenizer.json").read_text())
    contents["added_tokens"][0]["content"] = "<end>"
    contents["model"]["vocab"]["<end>"] = contents["model"]["vocab"].pop("<|endoftext|>")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(contents))
    assert JsonTokenizer(path).eos_token_id is None
    for eos in ("<end>", {"content": "<end>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert JsonTokenizer(path).eos_token == "<end>"


def test_without_transformers_a_folder_needs_a_tokenizer_json(pretrained, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    tokenizer = load_tokenizer(pretrained)
    assert isinstance(tokenizer, JsonTokenizer) and tokenizer.eos_token == "<|endoftext|>"
    (tmp_path / "vocab.json").write_text("{}")
    for name in (tmp_path, "gpt2"):
        with pytest.raises(ModuleNotFoundError, match=f"tokenizer_name '{name}' needs the package transformers"):
            load_tokenizer(name)


def test_identity(bpe, pretrained, tmp_path):
    assert tokenizer_identity("byte") == {"name": "byte"} and tokenizer_identity("gpt2") == {"name": "gpt2"}
    before = tokenizer_identity(bpe)
    assert before.keys() == {"digest"} and before != tokenizer_identity(pretrained)
    (tmp_path / "model.safetensors").write_text("not a tokenizer")
    (tmp_path / "tokenizer.json").write_text((bpe / "tokenizer.json").read_text())
    assert tokenizer_identity(tmp_path) == before
    (tmp_path / "tokenizer.json").write_text((bpe / "tokenizer.json").read_text() + " ")
    assert tokenizer_identity(tmp_path) != before
    ByteTokenizer().save_pretrained(tmp_path / "bytes")
    assert tokenizer_identity(tmp_path / "bytes") == {"name": "byte"}


def test_errors(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"found no .*missing"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match=r"found no missing.json"):
        load_tokenizer("missing.json")
    with pytest.raises(FileNotFoundError, match=r"must be a folder with a tokenizer, found none in"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json must be a tokenizer.json, found"):
        load_tokenizer(tmp_path)
    transformers = pytest.importorskip("transformers")

    def unreachable(name, local_files_only=False):
        raise OSError("We couldn't connect\nto the hub")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", unreachable)
    monkeypatch.setattr("src.datamodules.tokenizer.hub_problem", lambda: None)
    with pytest.raises(
        OSError, match=r"'gpt2' is no folder here, .* the hub did not give it: We couldn't connect\. .*may be 'byte'"
    ):
        load_tokenizer("gpt2")
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(OSError, match=f"'{pathlib.Path(tmp_path)}' cannot be read: We couldn't"):
        load_tokenizer(tmp_path)


class Silent(socketserver.BaseRequestHandler):
    """Takes connections, and does not answer."""

    def handle(self):
        self.request.recv(1)
        self.server.asked.set()
        self.server.over.wait()


def test_a_hub_that_is_not_there_is_not_asked_for_long(tmp_path, monkeypatch):
    """Neither one that refuses, nor one that never answers; and HF_HUB_OFFLINE asks none. The cache comes first."""
    pytest.importorskip("transformers")
    constants = pytest.importorskip("huggingface_hub").constants
    calls = []
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained", lambda *_, **options: calls.append(options) or 1 / 0
    )
    monkeypatch.setattr("src.datamodules.hub._PATIENCE", 0.2)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Silent) as server:
        server.asked, server.over, server.daemon_threads = threading.Event(), threading.Event(), True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        silent = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", silent)
        with pytest.raises(OSError, match=f"is not in the cache of the hub, .*: {silent} does not answer"):
            load_tokenizer("some/name")
        assert server.asked.wait(10)
        server.over.set()
        server.shutdown()
    with pytest.raises(OSError, match=f"{silent} does not answer"):  # nobody is there
        load_tokenizer("some/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="the hub did not give it: HF_HUB_OFFLINE is set"):
        load_tokenizer("some/name")
    assert calls == 3 * [{"local_files_only": True}]
