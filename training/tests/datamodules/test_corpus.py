"""Documents of each kind of source against plain reading, however the source is cut; and what it must not contain."""

import itertools
import json
import random
import re
import sys
import types

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from src.datamodules.corpus import (
    HubCorpus,
    HubSplit,
    IdsFile,
    JsonLinesFile,
    LocalCorpus,
    ParquetFile,
    TextFile,
    find_corpus,
    in_blocks,
    python_sources,
)


def random_text(seed, lines=60):
    """Lines with and without blank ones, of one to four bytes a character, with either line end."""
    choose = random.Random(seed)
    letters = "ab é漢😀"
    ends = choose.choice(["\n", "\r\n"])
    text = "".join(
        "".join(choose.choices(letters, k=choose.randrange(12))) + ends * choose.choice([1, 1, 2, 3])
        for _ in range(lines)
    )
    return text + choose.choice(["", "the end"])


def cuttings(size, seed):
    """Ways to cut a range: not at all, in small steps, at random."""
    yield [0, size]
    yield [*range(0, size, 7), size]
    yield sorted({0, size, *random.Random(seed).choices(range(size), k=9)})


def read(source, cuts):
    return [segment for start, stop in itertools.pairwise(cuts) for segment in source.read(start, stop)]


LINES = {
    "line": lambda text: [line for line in re.split(r"\r?\n", text)][: len(text.splitlines())],
    "paragraph": lambda text: [part.strip("\r\n") for part in re.split(r"(?:\r?\n[ \t]*)+\r?\n", text) if part.strip()],
}


@pytest.mark.parametrize("sample_by", LINES)
@pytest.mark.parametrize("seed", range(6))
def test_lines_and_paragraphs(tmp_path, sample_by, seed):
    text = random_text(seed)
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    expected = LINES[sample_by](text)
    for cuts in cuttings(path.stat().st_size, seed):
        segments = read(TextFile(path, sample_by), cuts)
        documents = [segment.content for segment in segments]
        if sample_by == "paragraph":  # blanks around a paragraph are not compared
            documents, expected = ([part.strip() for part in parts] for parts in (documents, expected))
        assert documents == expected
        assert all(segment.ends for segment in segments)


@pytest.mark.parametrize("sample_by", ["document", "block"])
@pytest.mark.parametrize("unit", [5, 16, 100, 10_000])
@pytest.mark.parametrize("seed", range(3))
def test_documents_and_blocks(tmp_path, sample_by, unit, seed):
    text = random_text(seed)
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    size = path.stat().st_size
    source = TextFile(path, sample_by, unit)
    whole = read(source, [0, size])
    assert "".join(segment.content for segment in whole) == text
    assert [segment.ends for segment in whole] == [
        sample_by == "block" or i == len(whole) for i in range(1, len(whole) + 1)
    ]
    assert all(len(segment.content.encode()) <= 2 * unit + 3 for segment in whole)
    assert [segment.offset for segment in whole] == np.cumsum([0, *(len(s.content.encode()) for s in whole)])[
        :-1
    ].tolist()
    if unit == 100:  # lines are shorter: each segment ends with one
        assert all(segment.content.endswith("\n") for segment in whole[:-1])
    for step in (1, 3):
        assert read(source, [start for start, _ in source.ranges(step * unit)] + [size]) == whole


def test_blocks_end_at_blank_lines(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one\ntwo\n\nthree\nfour\n\n" * 9)
    blocks = [segment.content for segment in read(TextFile(path, "block", 24), [0, path.stat().st_size])]
    assert all(block.endswith("\n\n") for block in blocks) and len(blocks) > 3


def test_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbfa line\n")
    for sample_by in ("document", "line"):
        assert [segment.content.strip() for segment in TextFile(path, sample_by).read(0, 10)] == ["a line"]


def json_lines(path, texts):
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" * (1 + i % 2) for i, text in enumerate(texts)))
    return path


@pytest.mark.parametrize("seed", range(3))
def test_json_lines(tmp_path, seed):
    texts = random_text(seed).split("a")
    path = json_lines(tmp_path / "rows.jsonl", texts)
    for cuts in cuttings(path.stat().st_size, seed):
        assert [segment.content for segment in read(JsonLinesFile(path), cuts)] == texts


def test_byte_order_mark_of_json_lines_is_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"text": "a"}\r\n{"text": "b"}\r\n')
    assert [segment.content for segment in JsonLinesFile(path).read(0, path.stat().st_size)] == ["a", "b"]


def test_parquet(tmp_path):
    texts = [f"text {i}" if i % 5 else None for i in range(20)]
    table = pyarrow.table({"id": range(20), "body": texts})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=6)
    source = ParquetFile(tmp_path / "rows.parquet", "body")
    assert source.ranges(1) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    for ranges in (source.ranges(1), source.ranges(source.size)):
        documents = [segment.content for start, stop in ranges for segment in source.read(start, stop)]
        assert documents == [text for text in texts if text is not None]


@pytest.mark.parametrize("dtype", ["uint16", "int64", ">u2"])
@pytest.mark.parametrize("unit", [None, 7])
def test_ids(tmp_path, dtype, unit):
    ids = np.arange(40).astype(dtype)
    np.save(tmp_path / "ids.npy", ids)
    ids.tofile(tmp_path / "ids.bin")
    for source in (IdsFile(tmp_path / "ids.npy", unit=unit), IdsFile(tmp_path / "ids.bin", dtype, unit)):
        segments = [segment for start, stop in source.ranges(1) for segment in source.read(start, stop)]
        assert np.concatenate([segment.content for segment in segments]).tolist() == list(range(40))
        assert [len(segment.content) for segment in segments] == ([40] if unit is None else [7] * 5 + [5])
        assert [segment.ends for segment in segments] == [True] * len(segments)
        assert [segment.offset for segment in segments] == list(range(0, 40, unit or 40))


class Rows:
    """What is used of datasets.Dataset."""

    def __init__(self, columns):
        self.columns, self.column_names = columns, list(columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        return {name: values[index] for name, values in self.columns.items()}


@pytest.fixture
def hub(monkeypatch):
    """A hub with one data set."""

    def load_dataset(name, config, download_config):
        if name != "owner/words":
            raise ConnectionError("no network\nand more lines")
        texts = [f"{config} {i}" for i in range(600)]
        return {"train": Rows({"id": range(600), "text": texts}), "test": Rows({"story": texts[:3]}), "extra": Rows({})}

    datasets = types.SimpleNamespace(load_dataset=load_dataset, DownloadConfig=dict)
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    monkeypatch.setattr("src.datamodules.corpus.hub_problem", lambda: None)


def test_hub(hub):
    corpus = find_corpus("owner/words", "small")
    assert isinstance(corpus, HubCorpus) and corpus.name == "words-small"
    sources = corpus.sources()
    assert sources.keys() == {"train", "test"}
    source = sources["train"][0]
    assert isinstance(source, HubSplit) and source.ranges(400) == [(0, 400), (400, 600)]
    documents = [segment.content for start, stop in source.ranges(400) for segment in source.read(start, stop)]
    assert documents == [f"small {i}" for i in range(600)]
    assert [segment.content for segment in sources["test"][0].read(0, 3)] == ["small 0", "small 1", "small 2"]
    with pytest.raises(
        ValueError, match=r"text_column must be a column of owner/words, \['id', 'text'\], found 'body'"
    ):
        find_corpus("owner/words", text_column="body").sources()
    assert corpus.identity() != find_corpus("owner/words", "large").identity()


def test_hub_says_what_is_missing(hub, monkeypatch):
    with pytest.raises(
        OSError,
        match=r"'openwebtext' is no file or folder here, and the hub did not give it: no network\. .*may be a file",
    ):
        find_corpus("openwebtext").sources()
    asked = []
    monkeypatch.setattr("src.datamodules.corpus.hub_problem", lambda: "it does not answer")
    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", lambda *_, **options: asked.append(options) or 1 / 0)
    with pytest.raises(OSError, match="the hub did not give it: it does not answer"):
        find_corpus("openwebtext").sources()
    assert asked == [{"download_config": {"local_files_only": True}}]  # it may be in the cache
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"'openwebtext' is no file or folder here.*pip install datasets"):
        find_corpus("openwebtext").sources()


def test_python_sources():
    files = find_corpus("python_sources").sources()["train"]
    assert [source.path for source in files] == python_sources()
    assert sum(source.size for source in files) > 300_000
    texts = {file.path.stem: "".join(part.content for part in file.read(0, file.size)) for file in files[:20]}
    assert "class ABC" in texts["abc"]


# Names


SPLITS = {
    "files": (["train.txt", "valid.txt", "test.txt"], {"train": 1, "validation": 1, "test": 1}),
    "shards": (
        ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "validation_0.jsonl"],
        {"train": 2, "validation": 1},
    ),
    "folders": (["train/a.txt", "train/deep/b.txt", "val/c.txt"], {"train": 2, "validation": 1}),
    "no splits": (["a.txt", "validator.txt", "b/train_notes.txt", "test-results.txt"], {"train": 4}),
    "other files": (["a.txt", "README.md", ".hidden.txt", ".git/x.txt"], {"train": 1}),
}


@pytest.mark.parametrize("name", SPLITS)
def test_splits_of_a_folder(tmp_path, name):
    files, expected = SPLITS[name]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("x")
    found = LocalCorpus(tmp_path).sources()
    assert {split: len(sources) for split, sources in found.items()} == expected


def test_splits_of_lists_globs_and_dicts(tmp_path):
    for name in ("a.txt", "b.txt", "train.txt", "valid.txt"):
        (tmp_path / name).write_text("x")

    def found(names):
        splits = LocalCorpus(names).sources()
        return {split: [source.path.name for source in sources] for split, sources in splits.items()}

    assert found(str(tmp_path / "?.txt")) == {"train": ["a.txt", "b.txt"]}
    assert found([tmp_path / "train.txt", str(tmp_path / "va*.txt")]) == {
        "train": ["train.txt"],
        "validation": ["valid.txt"],
    }
    assert found({"train": tmp_path / "b.txt", "val": [tmp_path / "a.txt", tmp_path / "train.txt"]}) == {
        "train": ["b.txt"],
        "validation": ["a.txt", "train.txt"],
    }


def test_relative_names_are_relative_to_where_hydra_was_started(tmp_path, monkeypatch):
    hydra_utils = types.SimpleNamespace(to_absolute_path=lambda name: str(tmp_path / name))
    monkeypatch.setitem(sys.modules, "hydra", types.SimpleNamespace(utils=hydra_utils))
    monkeypatch.setitem(sys.modules, "hydra.utils", hydra_utils)
    (tmp_path / "a.txt").write_text("x")
    assert LocalCorpus("a.txt").sources()["train"] == [TextFile(tmp_path / "a.txt")]


def test_identity_changes_with_the_files(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = LocalCorpus(tmp_path).identity()
    assert LocalCorpus(tmp_path).identity() == before != LocalCorpus(tmp_path, "line").identity()
    path.write_text("two, longer")
    assert LocalCorpus(tmp_path).identity() != before


def test_few_texts_are_cut_into_blocks(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("some words\n\n" * 1000)
    np.save(tmp_path / "ids.npy", np.zeros(10_000, np.uint16))
    texts = [TextFile(tmp_path / name) for name in ("a.txt", "b.txt")]
    blocks = in_blocks(texts, 0.25)
    assert [block.sample_by for block in blocks] == ["block", "block"] and blocks[0].unit == 24_000 // 16
    assert in_blocks(texts, 0.0001)[0].unit == 1024
    assert in_blocks(texts, 0.5) == texts  # one of two
    rows = [TextFile(tmp_path / "a.txt", "line")]
    assert in_blocks(rows, 0.01) == rows
    ids = in_blocks([IdsFile(tmp_path / "ids.npy")], 0.4)[0]
    assert ids.unit == 20_128 // 10 // 2


# Errors


BAD_TEXT = {
    "zero byte": (b"abc\n" * 300 + b"a\0b", "found a zero byte at offset 1201"),
    "not UTF-8": (b"abc\n" * 300 + b"ab\xe9\n", "must be text in UTF-8, found byte 0xe9 at offset 1202"),
    "cut character": (b"abc\xe6\xbc", "found byte 0xe6 at offset 3"),
}


@pytest.mark.parametrize("sample_by", ["document", "line", "paragraph"])
@pytest.mark.parametrize("name", BAD_TEXT)
def test_binary_files(tmp_path, name, sample_by):
    path = tmp_path / "data.txt"
    data, message = BAD_TEXT[name]
    path.write_bytes(data)
    source = TextFile(path, sample_by, 64) if sample_by == "document" else TextFile(path, sample_by)
    if sample_by == "paragraph":
        message = message.split(" at ")[0]
    with pytest.raises(ValueError, match=f"{path}.*{message}"):
        list(source.read(0, len(data)))


BAD_ROWS = {
    "broken": ('{"text": "a', "line 3 must be a JSON object, found: Unterminated string starting at, in column 10"),
    "no object": ('["text"]', "line 3 must be a JSON object, found list"),
    "no field": ('{"body": "a"}', r"line 3 must have the field 'text', found \['body'\]"),
    "no string": ('{"text": 5}', "line 3: field 'text' must be a string, found int"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_json_lines(tmp_path, name):
    path = tmp_path / "rows.jsonl"
    line, message = BAD_ROWS[name]
    path.write_text('{"text": "a"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=f"{path}, {message}"):
        list(JsonLinesFile(path).read(14, path.stat().st_size))


def test_bad_parquet(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"], "id": [1]}), path)
    with pytest.raises(ValueError, match=r"rows.parquet must have the column 'text', found \['body', 'id'\]"):
        ParquetFile(path).ranges(10)
    with pytest.raises(ValueError, match=r"column 'id' must be of strings, found int64"):
        ParquetFile(path, "id").ranges(10)
    path.write_text("no table")
    with pytest.raises(ValueError, match=r"rows.parquet must be a Parquet file, found: Parquet magic bytes"):
        ParquetFile(path).ranges(10)


def test_bad_ids(tmp_path):
    path = tmp_path / "ids.npy"
    for array, found in (
        (np.zeros((2, 2), int), r"int64 of shape \(2, 2\)"),
        (np.zeros(2), r"float64 of shape \(2,\)"),
    ):
        np.save(path, array)
        with pytest.raises(ValueError, match=rf"ids.npy must be integers of shape \(n,\), found {found}"):
            IdsFile(path).ranges(10)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"ids.npy must be an array of numpy"):
        IdsFile(path).ranges(10)
    raw = tmp_path / "ids.bin"
    raw.write_bytes(b"12345")
    with pytest.raises(ValueError, match=r"ids.bin must be a whole number of uint16"):
        IdsFile(raw, "uint16").ranges(10)


def test_dtype_of_bin(tmp_path):
    path = tmp_path / "train.bin"
    np.arange(5, dtype=np.uint16).tofile(path)
    with pytest.raises(ValueError, match=r"train.bin: ids_dtype, or 'dtype' in train.bin.json, must be .* found None"):
        LocalCorpus(path).sources()
    assert LocalCorpus(path, ids_dtype="uint16").sources()["train"] == [IdsFile(path, "<u2")]
    (tmp_path / "train.bin.json").write_text('{"dtype": "int32"}')
    assert LocalCorpus(path, ids_dtype="uint16").sources()["train"] == [IdsFile(path, "<i4")]
    (tmp_path / "train.bin.json").write_text('{"dtype": "float32"}')
    with pytest.raises(ValueError, match=r"must be a dtype of integers, found 'float32'"):
        LocalCorpus(path).sources()


def names_that_fail(tmp_path):
    (tmp_path / "part").mkdir()
    for name in ("notes.md", "part/train.txt", "part/other.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "only").mkdir()
    (tmp_path / "only/test.txt").write_text("x")
    return {
        "file": (tmp_path / "missing.txt", FileNotFoundError, "found no .*missing.txt"),
        "relative": ("./missing.txt", FileNotFoundError, "found no .*missing.txt"),
        "glob": (str(tmp_path / "*.parquet"), FileNotFoundError, r"found no .*\*.parquet"),
        "list": ([], FileNotFoundError, "at least one file, found an empty list"),
        "folder": (tmp_path / "empty", FileNotFoundError, "with the extensions .txt, .* found none in .*empty"),
        "extension": (tmp_path / "notes.md", ValueError, "with the extensions .txt, .jsonl, .* found .*notes.md"),
        "stray": (tmp_path / "part", ValueError, r"splits \['train'\], and .*other.txt, which belongs to none"),
        "no train": (tmp_path / "only", ValueError, r"split 'train', found only \['test'\]"),
        "key": ({"training": "a"}, ValueError, r"keys train, validation and test, found \['training'\]"),
    }


@pytest.mark.parametrize(
    "name", ["file", "relative", "glob", "list", "folder", "extension", "stray", "no train", "key"]
)
def test_names_that_fail(tmp_path, name):
    names, kind, message = names_that_fail(tmp_path)[name]
    with pytest.raises(kind, match=message):
        find_corpus(names)


def test_config_is_for_the_hub(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"dataset_config_name is for data sets of the hub, found 'raw' with files"):
        find_corpus(tmp_path, "raw")
