"""What `make train` does around the commands that it runs."""

import importlib.util
import math
import pathlib
import sys

import pytest

FILE = pathlib.Path(__file__).resolve().parents[1] / "first_run.py"


@pytest.fixture(scope="module")
def first_run():
    spec = importlib.util.spec_from_file_location("first_run", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_unigram_entropy(first_run):
    assert first_run.unigram_entropy(b"aaaa") == 0
    assert first_run.unigram_entropy(bytes(range(256)) * 3) == pytest.approx(8)
    assert first_run.unigram_entropy(b"aab") == pytest.approx(math.log2(3) - 2 / 3)


def test_commands_are_printed_as_they_can_be_typed(first_run, capfd):
    first_run.run(["-c", "print('a b')"])
    assert capfd.readouterr().out == """$ python -c 'print('"'"'a b'"'"')'\na b\n"""


TRAINING = """
import pathlib, signal, sys, time
def stop(*_):
    pathlib.Path(sys.argv[1], "saved.ckpt").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
if sys.argv[2] == "fails":
    sys.exit(3)
pathlib.Path(sys.argv[1], "last.ckpt").touch()
time.sleep(60)
"""


def test_training_is_stopped_after_a_checkpoint(first_run, tmp_path, capfd):
    first_run.stop_after_checkpoint(["-c", TRAINING, str(tmp_path), "waits"], tmp_path)
    assert "stopped with status 143" in capfd.readouterr().out
    assert sorted(file.name for file in tmp_path.iterdir()) == ["last.ckpt", "saved.ckpt"]


def test_training_that_fails_ends_the_first_run(first_run, tmp_path):
    with pytest.raises(SystemExit, match="training ended with status 3"):
        first_run.stop_after_checkpoint(["-c", TRAINING, str(tmp_path), "fails"], tmp_path)


@pytest.mark.slow
def test_the_whole_of_it(first_run, monkeypatch, capfd):
    for name in ("DATA_DIR", "RESULT_DIR", "CHECKPOINT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(first_run.FOLDER)
    monkeypatch.setattr(sys, "argv", ["first_run.py", "--name", "test-of-first-run", "--steps", "120"])
    first_run.main()
    printed = capfd.readouterr().out
    unigram, _, model = (float(line.split()[0]) for line in printed.split("bits per byte:\n")[1].splitlines()[:3])
    assert model < unigram
    assert pathlib.Path("logs/test-of-first-run.png").is_file()
