"""The flags of the program that set keys of a spec, as `cuda-cluster spec flags` prints them.

*Invariant:* `flags.json` is the program's own table (`tests/plan/configs.rs`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict


class _Row(TypedDict, total=False):
    key: str
    flag: str
    off: str
    takes: str


_ROWS: list[_Row] = json.loads((Path(__file__).parent / "flags.json").read_text())


def _keyword(flag: str) -> str:
    return flag.replace("-", "_")


#: What each keyword takes; a keyword is a flag with `_` for `-`.
TAKES = {_keyword(row["flag"]): row["takes"] for row in _ROWS}

#: The flags that switch something off, by the keywords that are False then.
OFF = {_keyword(row["flag"]): "--" + row["off"] for row in _ROWS if "off" in row}
