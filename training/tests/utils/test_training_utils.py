"""Loggers, modes, and the printed configuration."""

import io
import logging
import sys
import types
import warnings

import pytest
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import OmegaConf

from src.utils import utils


def test_only_rank_0_logs(monkeypatch, caplog):
    log = utils.get_logger("training.test")
    for rank in (0, 1):
        monkeypatch.setattr(rank_zero_only, "rank", rank)
        log.warning("from rank %d", rank)
    assert [each.getMessage() for each in caplog.records] == ["from rank 0"]


def test_logging_context():
    logger, text = logging.getLogger("training.test.context"), io.StringIO()
    logger.setLevel(logging.ERROR)
    handler = logging.StreamHandler(text)
    with utils.LoggingContext(logger, logging.INFO, handler) as inner:
        inner.info("within")
    logger.info("without")
    assert text.getvalue() == "within\n" and logger.level == logging.ERROR and handler not in logger.handlers


def test_a_fast_run_reads_in_its_own_process():
    config = OmegaConf.create({"trainer": {"fast_dev_run": True}, "datamodule": {"pin_memory": True, "num_workers": 4}})
    config.callbacks = {"model_checkpoint": {"save_last": True}}
    utils.extras(config)
    assert config.datamodule == {"pin_memory": False, "num_workers": 0}
    assert config.callbacks == {"model_checkpoint": None}  # no checkpoint of one batch in place of the last one


def test_an_experiment_has_a_name():
    config = OmegaConf.create({"experiment_mode": True, "name": None})
    with pytest.raises(ValueError, match="mode=exp needs the name of the experiment: name="):
        utils.extras(config)
    utils.extras(OmegaConf.create({"experiment_mode": True, "name": "first"}))


def test_warnings_are_silenced():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        utils.extras(OmegaConf.create({"ignore_warnings": True}))
        warnings.warn("not shown", stacklevel=1)
    assert not caught


def test_printed_configuration(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    utils.print_config(OmegaConf.create({"trainer": {"max_steps": 7, "double": "${.max_steps}"}, "seed": 5}))
    for text in (capsys.readouterr().out, (tmp_path / "config_tree.txt").read_text()):
        assert "max_steps: 7" in text and "double: 7" in text and "seed" in text


def test_wandb_is_closed(monkeypatch):
    closed = []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(finish=lambda: closed.append(True)))
    utils.finish(None, None, None, None, [], [])
    assert not closed
    utils.finish(None, None, None, None, [], [type("WandbLogger", (), {})()])
    assert closed == [True]
