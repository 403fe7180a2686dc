"""The models are compared with those of transformers: without it there is nothing to collect."""

import importlib.util

if importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_*.py"]
