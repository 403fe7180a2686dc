"""Prepared folders: their tokens against plain concatenation, and what may happen while they are written."""

import itertools
import json
import multiprocessing
import os
import pathlib
import random
import resource
import signal
import threading
import time

import numpy as np
import pytest

from src.datamodules import token_cache
from src.datamodules.corpus import IdsFile, JsonLinesFile, TextFile
from src.datamodules.token_cache import Recipe, TokenCacheError
from src.datamodules.tokenizer import ByteTokenizer

EOS = ByteTokenizer.eos_token_id


class WideTokenizer(ByteTokenizer):
    """Ids that need more than 16 bits."""

    vocab_size = 70_000
    eos_token_id = 69_999


def documents(count, seed=0, size=40):
    """Texts, some of which are empty."""
    choose = random.Random(seed)
    return ["".join(choose.choices("ab é漢", k=choose.randrange(size))) for _ in range(count)]


def json_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [JsonLinesFile(path)]


def build(folder, sources, tokenizer=None, num_workers=1, **recipe):
    """What `token_cache.load` finds in a new folder."""
    identity = {"made by": "test"}

    def make(temporary):
        token_cache.build(temporary, sources, tokenizer or ByteTokenizer(), Recipe(**recipe), identity, num_workers)

    token_cache.prepare(folder, make)
    return token_cache.load(folder, identity)


def tokens_of(texts, eos=EOS):
    return list(
        itertools.chain.from_iterable([*text.encode(), *([] if eos is None else [eos])] for text in texts if text)
    )


@pytest.mark.parametrize("add_eos", [True, False])
def test_documents_are_joined_in_order(tmp_path, add_eos):
    texts = {"train": documents(5000), "validation": documents(30, 1), "test": documents(20, 2)}
    sources = {split: json_lines(tmp_path / f"{split}.jsonl", found) for split, found in texts.items()}
    tokens = build(tmp_path / "tokens", sources, add_eos=add_eos)
    for split, found in texts.items():
        assert isinstance(tokens.splits[split], np.memmap) and tokens.splits[split].dtype == np.uint16
        assert tokens.splits[split].tolist() == tokens_of(found, EOS if add_eos else None)
        assert tokens.metadata["splits"][split]["documents"] == sum(map(bool, found))
    assert isinstance(tokens.tokenizer, ByteTokenizer)
    assert {path.name for path in (tmp_path / "tokens").iterdir()} == {
        "metadata.json",
        "tokenizer",
        "train.npy",
        "validation.npy",
        "test.npy",
    }


@pytest.mark.parametrize("ratio, held_out", [(0.001, 1), (0.02, 4), (0.5, 100), (0.999, 199)])
def test_documents_are_held_out(tmp_path, ratio, held_out):
    texts = [f"document {i:04d} " + "x" * (i % 50) for i in range(200)]
    sources = {"train": json_lines(tmp_path / "rows.jsonl", texts)}
    found = []
    for seed in (1, 1, 2):
        tokens = build(tmp_path / f"tokens {len(found)}", sources, val_ratio=ratio, val_split_seed=seed)
        parts = {split: ByteTokenizer().decode(ids).split("<|endoftext|>")[:-1] for split, ids in tokens.splits.items()}
        assert parts["validation"] == parts["test"] and len(parts["validation"]) == held_out
        assert all(part == sorted(part) for part in parts.values())  # in the order of the corpus
        assert sorted(parts["train"] + parts["validation"]) == texts
        assert tokens.metadata["splits"]["train"]["documents"] == 200 - held_out
        found.append(parts["validation"])
    assert found[0] == found[1] != found[2]


def test_documents_that_span_tasks_are_held_out_whole(tmp_path):
    """Two of four texts, each of which is read in several ranges."""
    names = "abcd"
    for name in names:
        (tmp_path / f"{name}.txt").write_text(f"{name}\n" * 150_000)
    sources = {"train": [TextFile(tmp_path / f"{name}.txt", unit=1 << 16) for name in names]}
    tokens = build(tmp_path / "tokens", sources, val_ratio=0.5)
    texts = [ByteTokenizer().decode(tokens.splits[split]) for split in ("train", "validation")]
    found = [text.replace("\n", "").split("<|endoftext|>")[:-1] for text in texts]
    assert sorted(itertools.chain(*found)) == [name * 150_000 for name in names] and len(found[0]) == len(found[1]) == 2


def test_one_text_is_held_out_in_blocks(tmp_path):
    text = "".join(f"paragraph {i}\n\n" for i in range(9000))
    (tmp_path / "one.txt").write_text(text)
    tokens = build(tmp_path / "tokens", {"train": [TextFile(tmp_path / "one.txt")]}, val_ratio=0.1)
    parts = {split: ByteTokenizer().decode(ids).split("<|endoftext|>")[:-1] for split, ids in tokens.splits.items()}
    assert 0.05 < len(tokens.splits["validation"]) / len(text) < 0.15 and len(parts["validation"]) >= 4
    assert sorted("".join(parts["train"] + parts["validation"]).split()) == sorted(text.split())
    assert all(part.startswith("paragraph") and part.endswith("\n\n") for part in parts["train"] + parts["validation"])


def test_val_only(tmp_path):
    texts = documents(50, size=20)
    sources = {"train": json_lines(tmp_path / "a.jsonl", texts), "validation": json_lines(tmp_path / "b.jsonl", ["v"])}
    given = build(tmp_path / "given", sources, val_only=True)
    assert given.splits["train"].tolist() == given.splits["test"].tolist() == [ord("v"), EOS]
    whole, part = (
        build(tmp_path / f"{val_only}", {"train": sources["train"]}, val_ratio=0.2, val_only=val_only)
        for val_only in (False, True)
    )
    assert part.splits["train"].tolist() == part.splits["validation"].tolist() == whole.splits["validation"].tolist()


def shout(text):
    return text.upper()


def test_result_does_not_depend_on_the_number_of_workers(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(documents(40_000)))
    sources = {
        "train": [TextFile(tmp_path / "a.txt", "line"), *json_lines(tmp_path / "rows.jsonl", documents(2000, 3))],
        "test": json_lines(tmp_path / "test.jsonl", ["test"]),
    }
    one, two = (build(tmp_path / f"{n}", sources, num_workers=n, val_ratio=0.1, detokenize=shout) for n in (1, 2))
    assert len(list(token_cache._tasks("train", sources["train"]))) > 2
    for split, ids in one.splits.items():
        assert np.array_equal(ids, two.splits[split])
    assert b"A" in bytes(one.splits["train"].astype(np.uint8)) and b"a" not in bytes(
        one.splits["train"].astype(np.uint8)
    )


def test_error_of_a_worker_arrives(tmp_path):
    texts = [*documents(20_000), "x"]
    sources = {"train": json_lines(tmp_path / "rows.jsonl", texts)}
    with open(tmp_path / "rows.jsonl", "a") as file:
        file.write("{broken\n")
    with pytest.raises(ValueError, match="line 20002 must be a JSON object"):
        build(tmp_path / "tokens", sources, num_workers=2, val_ratio=0.1)
    assert not (tmp_path / "tokens").exists() and not list(tmp_path.glob(".tokens.tmp*"))


class Killed(ByteTokenizer):
    def encode_batch(self, texts):
        os.kill(os.getpid(), signal.SIGKILL)


def test_killed_worker_is_noticed(tmp_path):
    sources = {"train": json_lines(tmp_path / "rows.jsonl", documents(20_000))}
    with pytest.raises(RuntimeError, match="was killed, perhaps for memory: num_workers is 2, give less"):
        build(tmp_path / "tokens", sources, Killed(), num_workers=2, val_ratio=0.1)
    assert [path.name for path in tmp_path.glob("*tokens*")] == [".tokens.lock"]


def test_large_vocabularies_take_int32(tmp_path):
    sources = {
        "train": json_lines(tmp_path / "a.jsonl", ["ab", "c"]),
        "validation": json_lines(tmp_path / "b.jsonl", ["d"]),
    }
    ids = build(tmp_path / "tokens", sources, WideTokenizer()).splits["train"]
    assert ids.dtype == np.int32 and ids.tolist() == [97, 98, 69_999, 99, 69_999]


def test_ready_ids(tmp_path):
    np.save(tmp_path / "train.npy", np.arange(3000) % 257)
    np.array([5, 6], np.uint16).tofile(tmp_path / "valid.bin")
    sources = {"train": [IdsFile(tmp_path / "train.npy")], "validation": [IdsFile(tmp_path / "valid.bin", "uint16")]}
    tokens = build(tmp_path / "tokens", sources)
    assert tokens.splits["train"].tolist() == [i % 257 for i in range(3000)]  # and no end of text
    assert tokens.splits["validation"].tolist() == [5, 6]
    split = build(tmp_path / "split", {"train": sources["train"]}, val_ratio=0.25)
    assert len(split.splits["train"]) + len(split.splits["validation"]) == 3000
    assert 0.15 < len(split.splits["validation"]) / 3000 < 0.35


@pytest.mark.parametrize("bad", [-1, 257])
def test_ids_outside_the_vocabulary(tmp_path, bad):
    ids = np.zeros(1_100_000, np.int32)
    ids[1_050_000] = bad
    np.save(tmp_path / "train.npy", ids)
    sources = {"train": [IdsFile(tmp_path / "train.npy")]}
    with pytest.raises(ValueError, match=f"train.npy: ids must be .* 257, found {bad} at position 1050000"):
        build(tmp_path / "tokens", sources, val_ratio=0.1)


def test_nothing_to_read(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"split 'train' must have text, found none in .*empty.txt, which is empty"):
        build(tmp_path / "tokens", {"train": [TextFile(tmp_path / "empty.txt")]}, val_ratio=0.1)
    one = json_lines(tmp_path / "one.jsonl", ["a document", ""])
    with pytest.raises(ValueError, match=r"val_ratio needs at least two documents .* found 1 in .*one.jsonl"):
        build(tmp_path / "tokens", {"train": one}, val_ratio=0.1)


# What may happen to a folder


def some_tokens(folder):
    sources = {"train": json_lines(folder.parent / "rows.jsonl", ["a", "b"])}
    return build(folder, sources, val_ratio=0.5)


@pytest.mark.parametrize("damage", ["metadata", "cut", "shorter", "missing", "no metadata"])
def test_damaged_folder(tmp_path, damage):
    folder = tmp_path / "tokens"
    some_tokens(folder)
    if damage == "metadata":
        (folder / "metadata.json").write_text("{")
    elif damage == "cut":
        os.truncate(folder / "train.npy", 100)
    elif damage == "shorter":
        np.save(folder / "train.npy", np.zeros(1, np.uint16))
    elif damage == "missing":
        (folder / "train.npy").unlink()
    else:
        (folder / "metadata.json").unlink()
    with pytest.raises(TokenCacheError, match=str(folder)):
        some_tokens(folder)


def test_folder_of_other_tokens(tmp_path):
    some_tokens(tmp_path / "tokens")
    with pytest.raises(TokenCacheError, match="prepared with another made by: expected somebody, found test"):
        token_cache.load(tmp_path / "tokens", {"made by": "somebody"})


def write_slowly(folder):
    (folder / "started").touch()
    time.sleep(60)


def in_process(target, *args):
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    return process


def test_what_a_killed_process_leaves_is_removed(tmp_path):
    process = in_process(token_cache.prepare, tmp_path / "tokens", write_slowly)
    while not (tmp_path / ".tokens.tmp" / "started").exists():
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert (tmp_path / ".tokens.tmp" / "started").exists() and not token_cache.prepared(tmp_path / "tokens")
    tokens = some_tokens(tmp_path / "tokens")
    assert sorted(tokens.splits["train"].tolist() + tokens.splits["test"].tolist()) == [97, 98, EOS, EOS]
    assert not (tmp_path / "tokens" / "started").exists() and not (tmp_path / ".tokens.tmp").exists()


def test_one_of_several_prepares(tmp_path, capsys):
    made = []

    def make(folder):
        made.append(folder)
        time.sleep(0.3)
        (folder / "metadata.json").write_text("{}")

    threads = [threading.Thread(target=token_cache.prepare, args=(tmp_path / "tokens", make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and token_cache.prepared(tmp_path / "tokens")
    assert "Waiting for another process, which prepares" in capsys.readouterr().out


def prepare_in_process(folder, log):
    def make(temporary):
        with open(log, "a") as file:
            file.write("made\n")
        time.sleep(0.3)
        (temporary / "metadata.json").write_text("{}")

    token_cache.prepare(folder, make)
    assert token_cache.prepared(folder)


def test_one_of_several_processes_prepares(tmp_path):
    processes = [in_process(prepare_in_process, tmp_path / "tokens", tmp_path / "log") for _ in range(3)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert (tmp_path / "log").read_text() == "made\n"


def build_with_little_space(folder, sources, reply):
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        build(folder, sources, val_ratio=0.1)
    except OSError as error:
        reply.send((str(error), [path.name for path in folder.parent.glob("*tokens*")]))


def test_full_disk(tmp_path):
    sources = {"train": json_lines(tmp_path / "rows.jsonl", documents(3000))}
    reply, theirs = multiprocessing.Pipe()
    process = in_process(build_with_little_space, tmp_path / "tokens", sources, theirs)
    process.join()
    message, left = reply.recv()
    assert f"{tmp_path / 'tokens'} cannot be written: File too large after" in message and "were removed" in message
    assert left == [".tokens.lock"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TokenCacheError, match=r"cache_dir must be a folder .*/file/cache \(Not a dir.*DATA_DIR"):
        token_cache.prepare(tmp_path / "file" / "cache" / "tokens", print)


def test_failure_leaves_nothing(tmp_path):
    def make(folder):
        (folder / "part").write_text("x")
        raise KeyError("stop")

    with pytest.raises(KeyError):
        token_cache.prepare(tmp_path / "tokens", make)
    assert [path.name for path in pathlib.Path(tmp_path).iterdir()] == [".tokens.lock"]
