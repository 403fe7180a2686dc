"""LMDataModule: preparation of local files and of the hub's corpora, loaders, and its position without a trainer.

The tests of the hub's corpora also prepare them, which takes hours for the large ones:

    DATA_DIR=/data pytest -q -s tests/datamodules/test_language_modeling_hf.py -k openwebtext
"""

import gc
import importlib.util
import inspect
import itertools
import json
import math
import os
import pathlib
import socket
import tempfile

import numpy as np
import pytest
import torch
import torch.distributed as dist
from counting import Counting, sequences_of

from src.datamodules import token_cache
from src.datamodules.language_modeling_hf import LMDataModule
from src.datamodules.tokenizer import ByteTokenizer


@pytest.fixture
def text(tmp_path):
    """A text of 200 paragraphs of 49 characters, 10200 bytes."""
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"{i:03d} The quick brown fox jumps over the lazy dogs.\n\n" for i in range(200)))
    return path


def module(dataset_name, tmp_path, **options):
    options = {"max_length": 16, "batch_size": 4, "val_ratio": 0.1, "cache_dir": tmp_path / "cache"} | options
    data = LMDataModule(dataset_name, options.pop("tokenizer_name", "byte"), loader_workers=0, **options)
    data.prepare_data()
    data.setup()
    return data


def check_loaders(data, tokens=(None, None, None)):
    """What holds for every corpus; `tokens` are the numbers of training, validation and test tokens, if known."""
    loaders = data.train_dataloader(), data.val_dataloader(), data.test_dataloader()
    for loader, dataset, expected in zip(loaders, (data.dataset_train, data.dataset_val, data.dataset_test), tokens):
        assert expected in (None, len(dataset.tokens))
        sequences = (len(dataset.tokens) - 1) // data.max_length
        assert len(loader) == math.ceil(sequences / loader.batch_size)
        x, y = next(iter(loader))
        assert x.shape == y.shape == (min(loader.batch_size, sequences), data.max_length)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])


@pytest.mark.parametrize("kind", ["txt", "jsonl", "npy", "folder"])
def test_local_corpora(text, tmp_path, kind):
    lines = text.read_text().split("\n\n")[:-1]
    path = tmp_path / f"rows.{kind}"
    if kind == "txt":
        path = text
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    elif kind == "npy":
        np.save(path, np.frombuffer(text.read_bytes(), np.uint8))
    else:
        path.mkdir()
        for split, part in {"train": lines[:150], "valid": lines[150:170], "test": lines[170:]}.items():
            (path / f"{split}.txt").write_text("\n\n".join(part))
    data = module(path, tmp_path, sample_by="paragraph" if kind in ("txt", "folder") else "document")
    per_paragraph = len(lines[0]) + 1
    expected = {"folder": [n * per_paragraph for n in (150, 20, 30)], "npy": (None, None, None)}
    check_loaders(data, expected.get(kind, [n * per_paragraph for n in (180, 20, 20)]))
    assert data.vocab_size == 257 and isinstance(data.tokenizer, ByteTokenizer)
    assert len({str(data.dataset_val.tokens.filename), str(data.dataset_test.tokens.filename)}) == 1 + (
        kind == "folder"
    )


def test_python_sources(tmp_path):
    data = module("python_sources", tmp_path, val_ratio=0.05, max_length=128)
    check_loaders(data)
    assert len(data.dataset_train.tokens) > 300_000


def test_prepared_once_and_reported(text, tmp_path, capsys, monkeypatch):
    first = module(text, tmp_path, sample_by="paragraph")
    printed = capsys.readouterr().out
    assert f"{first.cache_folder}: uint16, vocabulary 257, prepared in" in printed
    assert "9,000 tokens in 180 documents, train.npy" in printed
    monkeypatch.setattr(token_cache, "build", None)
    again = module(text, tmp_path, sample_by="paragraph")
    assert str(again.dataset_train.tokens.filename) == str(first.dataset_train.tokens.filename)
    assert capsys.readouterr().out == printed
    again.prepare_data()
    again.setup("test")
    assert capsys.readouterr().out == ""
    assert first.process_dataset()[0]["train"].tolist() == again.dataset_train.tokens.tolist()


def test_everything_that_matters_has_a_folder_of_its_own(text, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    ByteTokenizer().save_pretrained(tmp_path / "tokenizer")
    other = [
        {},
        {"val_ratio": 0.2},
        {"val_split_seed": 1},
        {"add_eos": False},
        {"val_only": True},
        {"sample_by": "line"},
        {"tokenizer_name": "gpt2"},
    ]
    same = [{"max_length": 8}, {"batch_size": 2}, {"num_workers": 3}, {"tokenizer_name": tmp_path / "tokenizer"}]

    def folder(options):
        names = {"dataset_name": text, "tokenizer_name": "byte", "cache_dir": tmp_path, "val_ratio": 0.1}
        return LMDataModule(**(names | options)).cache_folder

    assert len({folder(options) for options in other}) == len(other)
    assert {folder(options) for options in same} == {folder({})}
    assert folder({}).name.startswith("corpus-byte-") and folder({}).parent == tmp_path
    text.write_text("something else")
    assert folder({}) not in {folder(options | {"max_length": 8}) for options in other[1:]}


def test_prepared_folder_as_dataset(text, tmp_path):
    prepared = module(text, tmp_path).cache_folder
    text.unlink()
    data = module(prepared, tmp_path / "elsewhere")
    check_loaders(data)
    check_loaders(module(prepared, tmp_path / "elsewhere", tokenizer_name=prepared / "tokenizer"))
    assert data.cache_folder == prepared and not (tmp_path / "elsewhere").exists()
    with pytest.raises(
        ValueError,
        match=r"prepared with another tokenizer: expected .*'gpt2'.* found .*'byte'.*give that tokenizer_name",
    ):
        module(prepared, tmp_path, tokenizer_name="gpt2")


@pytest.mark.parametrize("use_shmem", [True, False])
def test_without_cache_dir_tokens_go_with_the_module(text, tmp_path, monkeypatch, use_shmem):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    data = LMDataModule(text, "byte", max_length=16, val_ratio=0.1, use_shmem=use_shmem, loader_workers=1)
    data.setup()
    folder = data.cache_folder.parent
    in_memory = use_shmem and os.access("/dev/shm", os.W_OK)
    assert folder.parent == (pathlib.Path("/dev/shm") if in_memory else tmp_path)
    assert sum(len(x) for x, _ in data.train_dataloader()) == len(data.dataset_train)
    assert folder.exists()  # after the worker has ended
    del data
    gc.collect()
    assert not folder.exists()


def test_detokenize(tmp_path):
    (tmp_path / "wikitext-2").mkdir()
    for name in ("train", "valid"):
        (tmp_path / "wikitext-2" / f"{name}.txt").write_text(" a @-@ b , c . \n" * 20)
    plain, clean = (
        module(tmp_path / "wikitext-2", tmp_path, sample_by="line", detokenize=clean) for clean in (False, True)
    )
    assert plain.tokenizer.decode(plain.dataset_train.tokens[:16]) == " a @-@ b , c . <"[:15] + "<|endoftext|>"
    assert clean.tokenizer.decode(clean.dataset_train.tokens[:11]) == " a-b, c. <|endoftext|> "


# Loaders


def test_loaders_leave_the_global_generator_alone(text, tmp_path):
    data = module(text, tmp_path, shuffle=True, fault_tolerant=True)
    before = torch.get_rng_state()
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        assert len(list(loader)) == len(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_batch_sizes_and_drop_last(text, tmp_path):
    data = module(text, tmp_path, batch_size=5, batch_size_eval=7, drop_last=True)
    sequences = len(data.dataset_train), len(data.dataset_val)
    assert sequences[0] % 5 and sequences[1] % 7
    assert [len(x) for x, _ in data.train_dataloader()] == [5] * (sequences[0] // 5)
    assert [len(x) for x, _ in data.val_dataloader()] == [7] * (sequences[1] // 7) + [sequences[1] % 7]


def order(sequences, seed):
    return torch.randperm(sequences, generator=torch.Generator().manual_seed(seed)).tolist()


def counting(sequences, **options):
    data = Counting(sequences, **options)
    data.setup()
    return data


def test_order():
    plain = counting(9, batch_size=2, shuffle=False, fault_tolerant=False).train_dataloader()
    assert [list(map(sequences_of, plain)) for _ in range(2)] == [[[0, 1], [2, 3], [4, 5], [6, 7], [8]]] * 2
    shuffled = counting(9, batch_size=2, seed=3).train_dataloader()
    for epoch in range(3):
        assert list(itertools.chain(*map(sequences_of, shuffled))) == order(9, 3 + epoch)


def test_seed_is_that_of_seed_everything(text, tmp_path, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert LMDataModule(text, "byte").seed == 0
    monkeypatch.setenv("PL_GLOBAL_SEED", "1111")
    assert LMDataModule(text, "byte").seed == 1111 and LMDataModule(text, "byte", seed=4).seed == 4


# Position


@pytest.fixture
def as_rank(monkeypatch):
    """`as_rank(rank, ranks)` lets torch.distributed say that this process is one of several."""

    def become(rank, ranks):
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: ranks)

    return become


# (ranks, batch size of each, batches that each takes before it stops); an epoch has 50 sequences
PARTS = [
    [(1, 4, 3), (2, 3, 2), (4, 2, 1), (1, 1, 40)],  # the first epoch ends in the last part
    [(2, 8, 4), (1, 8, 6)],  # right at the end of the first part
    [(3, 4, 4), (2, 5, 9), (1, 7, 1)],
]


def consume(as_rank, state, ranks, batch_size, batches):
    """{epoch: sequences in the order of consumption} of all ranks, and the state after that."""
    by_rank, states = [], []
    for rank in range(ranks):
        as_rank(rank, ranks)
        data = counting(50, seed=9, batch_size=batch_size)
        if state:
            data.load_state_dict(state)
        loader = data.train_dataloader()
        epochs = ((epoch, batch) for epoch in itertools.count(state["epoch"] if state else 0) for batch in loader)
        by_rank.append([(epoch, sequences_of(batch)) for epoch, batch in itertools.islice(epochs, batches)])
        states.append(data.state_dict())
    assert all(found == states[0] for found in states)
    seen = {}
    for batch_of_each in zip(*by_rank, strict=True):
        (epoch,) = {epoch for epoch, _ in batch_of_each}
        rows = zip(*(sequences for _, sequences in batch_of_each), strict=True)
        seen.setdefault(epoch, []).extend(itertools.chain.from_iterable(rows))
    return seen, states[0]


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_any_number_of_ranks_goes_on(as_rank, parts):
    state, seen = None, {}
    for part in parts:
        found, state = consume(as_rank, state, *part)
        for epoch, sequences in found.items():
            seen.setdefault(epoch, []).extend(sequences)
    *whole, last = seen
    assert whole
    for epoch in whole:  # once, and the padding
        first = order(50, 9 + epoch)
        assert seen[epoch] == first + first[: len(seen[epoch]) - 50]
    assert len(seen[0]) - 50 < max(ranks for ranks, _, _ in parts)
    assert seen[last] == order(50, 9 + last)[: len(seen[last])]
    assert (state["epoch"], state["samples"]) == (last, len(seen[last]))


def test_state_at_the_end_of_an_epoch():
    data = counting(10, batch_size=4)
    assert data.state_dict() == {}
    loader = data.train_dataloader()
    found = [data.state_dict()]
    for _ in range(2):
        for _ in loader:
            found.append(data.state_dict())
    found.append(data.state_dict())
    positions = [(state["epoch"], state["samples"]) for state in found]
    assert positions == [(0, 0), (0, 4), (0, 8), (1, 0), (1, 4), (1, 8), (2, 0), (2, 0)]
    expected = {"epoch": 0, "samples": 4, "seed": data.seed, "size": 10, "batch": 4, "batches": 0}
    assert found[1] == expected | {"data": data.description()}
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("drop_last, first, after", [(False, 3, (3, 0)), (True, 4, (3, 4))])
def test_rest_that_fills_no_batch(drop_last, first, after):
    data = counting(10, batch_size=4, seed=0, drop_last=drop_last)
    data.load_state_dict({"epoch": 2, "samples": 7, "seed": 0, "size": 10, "batch": 1})
    assert len(sequences_of(next(iter(data.train_dataloader())))) == first
    assert (data.state_dict()["epoch"], data.state_dict()["samples"]) == after


def test_looking_at_a_batch_does_not_move():
    data = counting(10, batch_size=4, seed=0)
    next(iter(data.train_dataloader()))
    assert list(itertools.chain(*map(sequences_of, data.train_dataloader()))) == order(10, 0)


def test_fast_forward(as_rank):
    as_rank(1, 2)
    options = {"batch_size": 3, "ddp": True}
    loader = counting(50, **options).train_dataloader()
    epochs = [list(map(sequences_of, loader)) for _ in range(2)]
    skipped = counting(50, fast_forward_epochs=1, fast_forward_batches=5, **options)
    assert list(map(sequences_of, skipped.train_dataloader())) == epochs[1][5:]
    loops = {
        "epoch_progress": {"current": {"completed": 1}},
        "epoch_loop.batch_progress": {"current": {"completed": 5}},
    }
    loaded = counting(50, **options)
    loaded.load_state_dict({"loops": {"fit_loop": loops}})
    assert list(map(sequences_of, loaded.train_dataloader())) == epochs[1][5:]


def test_order_of_the_state_is_kept():
    first, second = counting(10, batch_size=2, seed=1), counting(10, batch_size=2, seed=2)
    iterator = iter(first.train_dataloader())
    next(iterator)
    with pytest.warns(UserWarning, match="datamodule.seed is 2, and was 1"):
        second.load_state_dict(first.state_dict())
    assert list(map(sequences_of, second.train_dataloader())) == list(map(sequences_of, iterator))


# Errors


BAD_ARGUMENTS = [
    ({"max_length": 0}, "max_length must be at least 1, found 0"),
    ({"batch_size": 0}, "batch_size must be at least 1, found 0"),
    ({"batch_size_eval": 0}, "batch_size_eval must be at least 1, found 0"),
    ({"num_workers": -1}, "num_workers must be at least 0, found -1"),
    ({"loader_workers": -1}, "loader_workers must be at least 0, found -1"),
    ({"val_ratio": 0}, "val_ratio must be more than 0 and less than 1, found 0"),
    ({"val_ratio": 1.0}, "val_ratio must be more than 0 and less than 1, found 1.0"),
    ({"sample_by": "word"}, "sample_by must be one of document, paragraph, line, found word"),
    ({"fault_tolerant": True}, "shuffle must be True with fault_tolerant, found False"),
    ({"ddp": True}, "fault_tolerant must be True with ddp, found False"),
    ({"fast_forward_epochs": 0}, "ddp must be True with fast_forward_epochs and fast_forward_batches, found False"),
]


@pytest.mark.parametrize("options, message", BAD_ARGUMENTS, ids=str)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        LMDataModule("corpus", "byte", **options)


def test_too_short(text, tmp_path):
    message = (
        r"split 'validation' must have at least max_length \+ 1 = 2001 tokens, found \d+: give a smaller max_length"
    )
    with pytest.raises(ValueError, match=message):
        module(text, tmp_path, max_length=2000)
    data = module(text, tmp_path, batch_size=10_000, drop_last=True)
    with pytest.raises(ValueError, match=r"a batch for each rank, found \d+ samples for batch_size 10000 on 1 ranks"):
        data.train_dataloader()


def test_tokenizer_without_end_of_text(text, tmp_path, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "eos_token_id", None)
    with pytest.raises(ValueError, match="add_eos needs an end-of-text token, found none in tokenizer_name byte"):
        module(text, tmp_path)
    module(text, tmp_path, add_eos=False)


def test_state_of_other_data(text, tmp_path):
    state = {"epoch": 0, "samples": 4, "seed": 0, "size": 10, "batch": 4}
    data = module(text, tmp_path, seed=0)
    data.load_state_dict(state)
    with pytest.raises(ValueError, match=r"taken with 10 training samples, found \d+ others .*: resume with the same"):
        data.train_dataloader()


def test_missing_files_are_named(tmp_path):
    for name, message in (("missing.txt", "found no .*missing.txt"), (tmp_path / "gone", "found no .*gone")):
        with pytest.raises(FileNotFoundError, match=message):
            module(name, tmp_path)
    assert not (tmp_path / "cache").exists()


def test_signature():
    parameters = inspect.signature(LMDataModule).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == [
        "dataset_name",
        "tokenizer_name",
        "dataset_config_name",
        "max_length",
        "cache_dir",
        "val_ratio",
        "val_split_seed",
        "add_eos",
        "detokenize",
        "val_only",
        "batch_size",
        "batch_size_eval",
        "num_workers",
        "shuffle",
        "pin_memory",
        "drop_last",
        "fault_tolerant",
        "ddp",
        "fast_forward_epochs",
        "fast_forward_batches",
        "use_shmem",
    ]


# The hub


def why_no_hub():
    if "DATA_DIR" not in os.environ:
        return "prepares a corpus of the hub: set DATA_DIR to a folder with room for it"
    if importlib.util.find_spec("datasets") is None:
        return "needs the package datasets"
    try:
        socket.create_connection(("huggingface.co", 443), timeout=5).close()
    except OSError as error:
        return f"needs the Hugging Face hub, which is not reachable: {error}"
    return None


HALF = max((os.cpu_count() or 2) // 2, 1)
WIKITEXT = {"add_eos": False, "max_length": 1024, "batch_size": 7, "num_workers": 4}
CORPORA = {  # name and configuration, folder, options, tokens
    "wikitext2": ("wikitext", "wikitext-2-raw-v1", "wikitext-2", WIKITEXT, (2391884, 247289, 283287)),
    "wikitext103": ("wikitext", "wikitext-103-raw-v1", "wikitext-103", WIKITEXT, (117920140, 247289, 283287)),
    "openwebtext": (
        "openwebtext",
        None,
        "openwebtext",
        {"max_length": 1024, "batch_size": 8, "num_workers": HALF},
        (None,) * 3,
    ),
    "lambada": ("lambada", None, "lambada", {"max_length": 1024, "batch_size": 8, "num_workers": 64}, (None,) * 3),
    "the_pile": (
        "the_pile",
        None,
        "the_pile",
        {"max_length": 2048, "batch_size": 8, "num_workers": HALF, "use_shmem": False},
        (374337375694, 383326395, 373297018),
    ),
    "pg19": (
        "pg19",
        None,
        "pg19",
        {"max_length": 2048, "batch_size": 8, "num_workers": HALF},
        (3066544128, 4653056, 10584064),
    ),
}


@pytest.mark.parametrize("name", CORPORA)
def test_corpora_of_the_hub(name):
    reason = why_no_hub()
    if reason:
        pytest.skip(reason)
    dataset, config, folder, options, tokens = CORPORA[name]
    cache = pathlib.Path(os.environ["DATA_DIR"], folder, "cache")
    data = LMDataModule(dataset, "gpt2", config, cache_dir=cache, val_ratio=0.0005, **options)
    data.prepare_data()
    data.setup()
    check_loaders(data, tokens)
    if name == "openwebtext":  # which documents are held out is not the same everywhere, how many tokens there are is
        assert len(data.dataset_train.tokens) + len(data.dataset_val.tokens) == 9035582198 + 4434897
