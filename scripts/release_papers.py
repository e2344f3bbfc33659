"""The papers of a release: its version in every place, notes, provenance, the recipe for conda-forge.

    release_papers.py problems                what stops a release of this tree; nothing if nothing does
    release_papers.py bump VERSION            writes the version and the date everywhere
    release_papers.py notes [VERSION]         what CHANGELOG.md says of it
    release_papers.py provenance FOLDER       an in-toto statement about the files in FOLDER
    release_papers.py recipe SDIST            the conda recipe for this source on the Python index

Runs in the project's directory. `scripts/release.sh` has what a maintainer types.
"""

import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

MANIFEST = Path("Cargo.toml")
CHANGELOG = Path("CHANGELOG.md")
RECIPE = Path("packaging/conda/recipe.yaml")
#: Each is of a workspace of its own that uses our crates.
LOCKS = [Path("Cargo.lock"), Path("fuzz/Cargo.lock"), Path("python/comm/fuzz/Cargo.lock")]

#: A heading of CHANGELOG.md: a version, and its date or "unreleased".
HEADING = re.compile(r"^## (?P<version>\d+\.\d+\.\d+) \((?P<date>unreleased|\d{4}-\d\d-\d\d)\)$", re.M)

#: Where the version stands, and how often at least. The first is the one that others are compared with.
PLACES = [
    (MANIFEST, r'(?m)(^\[workspace\.package\]\nversion = ")([^"]+)', 1),
    (MANIFEST, r'(?m)(^cuda-cluster-[a-z]+ = \{ path = "[^"]+", version = "=)([^"]+)', 7),
    *(
        (lock, r'(?m)(^name = "cuda-cluster(?!-fuzz|-comm-fuzz)[a-z-]*"\nversion = ")([^"]+)', 2)
        for lock in LOCKS
    ),
    (RECIPE, r'(?m)(^  version: ")([^"]+)', 1),
    *(
        (Path("configs/kubernetes", name), r"(image: registry\.example/cuda-cluster:)(\S+)", 1)
        for name in ("dask-operator.yaml", "job.yaml")
    ),
]


class Refused(Exception):
    """What is wrong, where, and what to do."""


def text(path):
    try:
        return path.read_text()
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}; run this in the project's directory") from error


def version():
    found = re.search(PLACES[0][1], text(MANIFEST))
    if not found:
        raise Refused(f"{MANIFEST}: [workspace.package] does not begin with a version")
    return found[2]


def numbers(of):
    """A version as numbers. Others than X.Y.Z are refused: Debian, Python and cargo order them differently."""
    if not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", of):
        raise Refused(f"{of!r} is not a version: X.Y.Z, three numbers")
    return tuple(map(int, of.split(".")))


def sections():
    """The sections of CHANGELOG.md: (version, date, text), as they stand there."""
    whole = text(CHANGELOG)
    headings = list(HEADING.finditer(whole))
    others = [line for line in re.findall(r"^## .*$", whole, re.M) if not HEADING.match(line)]
    if others:
        raise Refused(f"{CHANGELOG}: {others[0]!r} is not '## VERSION (DATE)' or '## VERSION (unreleased)'")
    ends = [heading.start() for heading in headings[1:]] + [len(whole)]
    return [(h["version"], h["date"], whole[h.end() : end].strip()) for h, end in zip(headings, ends)]


def problems():
    """What stops a release, each with where it is and what to do."""
    here = version()
    for path, pattern, least in PLACES:
        found = [match[2] for match in re.finditer(pattern, text(path))]
        if len(found) < least:
            yield f"{path}: the version stands there {len(found)} times, not {least}; see PLACES in {__file__}"
        for other in sorted(set(found) - {here}):
            yield f"{path}: has version {other}, and {MANIFEST} {here}; scripts/release.sh bump {here}"
    yield from undeclared()
    top = next(iter(sections()), None)
    if top is None:
        yield f"{CHANGELOG}: has no '## {here} (unreleased)'; say there what users will see"
    elif top[0] != here or top[1] == "unreleased":
        yield f"{CHANGELOG}: begins with {top[0]} ({top[1]}), not with a dated {here}; scripts/release.sh bump"
    elif not top[2]:
        yield f"{CHANGELOG}: says nothing of {here}"


def undeclared():
    """Crates whose version is not the workspace's."""
    members = tomllib.loads(text(MANIFEST))["workspace"]["members"]
    for path in (Path(member, "Cargo.toml") for member in members):
        package = tomllib.loads(text(path))["package"]
        if package.get("publish") is not False and package["version"] != {"workspace": True}:
            yield f"{path}: has a version of its own; write version.workspace = true"


def bump(new):
    """Writes the version everywhere, and the date into CHANGELOG.md; nothing if something is wrong."""
    old = version()
    if numbers(new) < numbers(old):
        raise Refused(f"{new} is before {old}, which {MANIFEST} has")
    written = {}
    for path, pattern, least in PLACES:
        whole, count = re.subn(pattern, lambda match: match[1] + new, written.get(path) or text(path))
        if count < least:
            raise Refused(
                f"{path}: the version stands there {count} times, not {least}; see PLACES in {__file__}"
            )
        written[path] = whole
    known = sections()
    if not known or known[0][1] != "unreleased":
        raise Refused(
            f"{CHANGELOG}: has no '## {new} (unreleased)' at its top; say there what users will see"
        )
    if not known[0][2]:
        raise Refused(f"{CHANGELOG}: says nothing of what is not released yet")
    if new in (one for one, *_ in known[1:]):
        raise Refused(f"{CHANGELOG}: {new} has been released already")
    written[CHANGELOG] = HEADING.sub(f"## {new} ({today()})", text(CHANGELOG), count=1)
    for path, whole in written.items():
        path.write_text(whole)


def today():
    """The day of SOURCE_DATE_EPOCH, or else of now."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    now = datetime.datetime.now(datetime.UTC)
    return (datetime.datetime.fromtimestamp(int(epoch), datetime.UTC) if epoch else now).date()


def notes(of):
    for known, _, said in sections():
        if known == of:
            return said
    raise Refused(f"{CHANGELOG}: has no section for {of}, only for {', '.join(v for v, *_ in sections())}")


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def said(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def setting(name, path="scripts/wheel.sh"):
    """What `wheel.sh` gives a name at its top."""
    return re.search(rf"^{name}=(\S+)$", text(Path(path)), re.M)[1]


def compilers(files):
    """The versions of Rust that the programs in tarballs say made them: Arm's may be another."""
    found = set()
    for file in (file for file in files if file.name.endswith(".tar.xz")):
        with tarfile.open(file) as archive:
            for member in archive:
                if member.name.endswith("/bin/cuda-cluster"):
                    program = archive.extractfile(member).read()
                    found.update(re.findall(rb"rustc version (\S+) \(", program))
        if not found:
            raise Refused(f"{file}: its program does not say which Rust made it")
    return [{"uri": f"pkg:generic/rustc@{version.decode()}"} for version in sorted(found)]


def provenance(folder):
    """SLSA's provenance, version 1, without times, so that builds of a commit say the same. Nobody has
    signed it: the release's workflow does that for its own."""
    source = {"name": "cuda-cluster", "digest": {"gitCommit": said("git", "rev-parse", "HEAD")}}
    builder = {"id": "urn:cuda-cluster:unsigned-local-build"}
    server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    if server and repository:
        source["uri"] = f"git+{server}/{repository}@{os.environ['GITHUB_REF']}"
        builder["id"] = f"{server}/{os.environ['GITHUB_WORKFLOW_REF']}"
    hwloc = setting("hwloc")
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    subjects = [{"name": str(path.relative_to(folder)), "digest": {"sha256": digest(path)}} for path in files]
    if not subjects:
        raise Refused(f"{folder}: has no files; scripts/release.sh build makes them")
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:cuda-cluster:scripts/release.sh:1",
                "externalParameters": {"version": version(), "command": "scripts/release.sh build"},
                "internalParameters": {"SOURCE_DATE_EPOCH": int(said("git", "log", "-1", "--format=%ct"))},
                "resolvedDependencies": [
                    source,
                    *({"name": str(lock), "digest": {"sha256": digest(lock)}} for lock in LOCKS[:1]),
                    {
                        "uri": f"pkg:deb/debian/hwloc@{hwloc}?arch=source",
                        "digest": {"sha256": setting("hwloc_sha256")},
                    },
                    {"uri": f"pkg:pypi/maturin@{setting('maturin')}"},
                    {"uri": f"pkg:pypi/ziglang@{setting('zig')}"},
                    *compilers(files),
                ],
            },
            "runDetails": {"builder": builder},
        },
    }


def recipe(sdist):
    """The recipe with the index's source instead of this tree."""
    name = f"cuda_cluster-{version()}.tar.gz"
    if Path(sdist).name != name:
        raise Refused(f"{sdist}: this version's source is {name}")
    source = (
        "source:\n"
        "  url: https://pypi.org/packages/source/c/cuda-cluster/cuda_cluster-${{ version }}.tar.gz\n"
        f"  sha256: {digest(sdist)}\n"
    )
    whole, count = re.subn(r"(?m)^source:\n(?: .*\n)+", source, text(RECIPE))
    if count != 1:
        raise Refused(f"{RECIPE}: has no 'source:' of its own")
    return whole


def main(command="", *given):
    match command, *given:
        case ["problems"]:
            found = list(problems())
            print("\n".join(found), end="\n" if found else "")
            return 1 if found else 0
        case ["bump", new]:
            bump(new)
        case ["notes", *of] if len(of) < 2:
            print(notes(of[0] if of else version()))
        case ["provenance", folder]:
            print(json.dumps(provenance(folder), indent=1))
        case ["recipe", sdist]:
            print(recipe(sdist), end="")
        case _:
            raise Refused(__doc__.strip())
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except Refused as refused:
        sys.exit(str(refused))
