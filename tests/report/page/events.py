"""Events as a run writes them, for tests of what the page makes of them."""

import json


def line(kind, step, **fields):
    return {"kind": kind, "time": 1000.0 + step, "step": step, **fields}


def append(path, *lines):
    """-> `path`"""
    with open(path, "a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in lines))
    return path
