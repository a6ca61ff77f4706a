"""What make_flash_attn.py wrote."""

import json
from pathlib import Path

import numpy as np


def read(kind):
    """By name, the cases of one kind: the settings of a call, and its arrays."""
    cases = {}
    with np.load(Path(__file__).with_name("flash_attn.npz")) as file:
        for key in file.files:
            its_kind, name, part = key.split("/")
            if its_kind == kind:
                x = _as_arrays(json.loads(str(file[key]))) if part == "settings" else file[key]
                cases.setdefault(name, {})[part] = x
    return cases


def _as_arrays(settings):
    """Lists of numbers as arrays, but the window."""
    convert = lambda name, x: np.asarray(x) if isinstance(x, list) and name != "window_size" else x
    settings = {name: convert(name, x) for name, x in settings.items()}
    if "alibi_slopes" in settings:
        settings["alibi_slopes"] = settings["alibi_slopes"].astype(np.float32)
    return settings
