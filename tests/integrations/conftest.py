"""Each door is tested with the library that it leads to: without that, there is nothing to collect."""

import importlib.util

collect_ignore = [
    f"test_{name}_door.py" for name in ("transformers", "diffusers") if importlib.util.find_spec(name) is None
]
