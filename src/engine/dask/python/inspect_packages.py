"""Prints Python's version and the installed distributions as JSON; imports none of them."""

import json
import platform
import sys
from importlib.metadata import distributions

packages = {}
for one in distributions():
    name = one.metadata["Name"]
    if name:
        # The first on the path is the one that an import finds.
        packages.setdefault(name.lower().replace("_", "-"), one.version)
print(json.dumps({"version": platform.python_version(), "prefix": sys.prefix, "packages": packages}))
