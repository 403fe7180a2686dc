"""Each integration is tested with the library that it serves: without that, there is nothing to collect."""

import importlib.util

collect_ignore = [f"test_{name}.py" for name in ("transformers", "diffusers") if importlib.util.find_spec(name) is None]
