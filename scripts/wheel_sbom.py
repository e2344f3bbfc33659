"""Completes the SBOM in a wheel: `wheel_sbom.py WHEEL LINKED CRATES`, in the directory where it was
built.

maturin lists the program's crates. Added are the components in LINKED (JSON), which are not crates,
and those in CRATES (`cargo tree`'s, as `NAME vVERSION …|LICENSE`), which are the package's module's.
Removed is the directory's path, so that builds elsewhere are the same. Prints the SBOM.
"""

import base64
import hashlib
import json
import os
import sys
import zipfile


def crates(path):
    """The crates of the module, as components, without the module itself."""
    with open(path) as file:
        lines = {line.strip().removesuffix(" (*)") for line in file}
    for line in sorted(lines):
        crate, license = line.split("|")
        name, version, *_ = crate.split()
        version = version.removeprefix("v")
        if "/python/comm" not in crate:
            yield {
                "type": "library",
                "name": name,
                "version": version,
                "licenses": [{"expression": license}],
                "purl": f"pkg:cargo/{name}@{version}",
            }


def main(wheel, linked, tree):
    with zipfile.ZipFile(wheel) as old:
        files = {info: old.read(info) for info in old.infolist()}
    (bom,) = (info for info in files if info.filename.endswith("/sboms/cuda-cluster.cyclonedx.json"))
    (record,) = (info for info in files if info.filename.endswith(".dist-info/RECORD"))

    document = json.loads(files[bom].decode().replace(f"file://{os.getcwd()}", "file://."))
    with open(linked) as file:
        document["components"] += json.load(file)
    known = {component.get("purl") for component in document["components"]}
    document["components"] += [one for one in crates(tree) if one["purl"] not in known]
    files[bom] = json.dumps(document, indent=1).encode()

    digest = base64.urlsafe_b64encode(hashlib.sha256(files[bom]).digest()).rstrip(b"=").decode()
    line = f"{bom.filename},sha256={digest},{len(files[bom])}"
    lines = files[record].decode().splitlines()
    lines = [line if old.startswith(f"{bom.filename},") else old for old in lines]
    files[record] = "".join(f"{line}\n" for line in lines).encode()

    with zipfile.ZipFile(f"{wheel}.new", "w") as new:
        for info, content in files.items():
            new.writestr(info, content, compresslevel=9)
    os.replace(f"{wheel}.new", wheel)
    sys.stdout.buffer.write(files[bom])


if __name__ == "__main__":
    main(*sys.argv[1:])
