"""The papers of a release, on a copy of what they are written into."""

import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAPERS = ROOT / "scripts/release_papers.py"

SAID = "The first version.\n\n### Machines\n\n- `topo` shows them."


@pytest.fixture
def copy(tmp_path):
    """What has the version, and a short CHANGELOG.md."""
    found = [*ROOT.glob("*.toml"), *ROOT.glob("*/*.toml"), *ROOT.glob("crates/*/*.toml")]
    found += [
        *ROOT.glob("python/**/*.toml"),
        ROOT / "tests/tidy/Cargo.toml",
        ROOT / "packaging/conda/recipe.yaml",
    ]
    found += [ROOT / "Cargo.lock", ROOT / "fuzz/Cargo.lock", ROOT / "python/comm/fuzz/Cargo.lock"]
    found += ROOT.glob("configs/kubernetes/*")
    for file in set(found):
        there = tmp_path / file.relative_to(ROOT)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, there)
    now = re.search(r'^version = "([^"]+)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
    (tmp_path / "CHANGELOG.md").write_text(f"# Changes\n\n## {now} (unreleased)\n\n{SAID}\n")
    return tmp_path


def papers(where, *arguments, fails=False, **environment):
    """What the script prints, or, if it fails, says."""
    command = [sys.executable, PAPERS, *arguments]
    done = subprocess.run(
        command, cwd=where, env={"PATH": "/usr/bin:/bin"} | environment, capture_output=True, text=True
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return (done.stdout + done.stderr if fails else done.stdout).strip()


def test_what_is_not_dated_yet_is_no_release(copy):
    assert "not with a dated" in papers(copy, "problems", fails=True)


def test_a_bump_writes_the_version_everywhere_and_the_date(copy):
    before = {path: path.read_text() for path in copy.rglob("*") if path.is_file()}
    papers(copy, "bump", "7.8.9", SOURCE_DATE_EPOCH="1700000000")
    assert papers(copy, "problems") == ""
    assert "## 7.8.9 (2023-11-14)\n" in (copy / "CHANGELOG.md").read_text()
    written = {str(path.relative_to(copy)) for path, text in before.items() if path.read_text() != text}
    assert written == {
        "CHANGELOG.md",
        "Cargo.lock",
        "Cargo.toml",
        "configs/kubernetes/dask-operator.yaml",
        "configs/kubernetes/job.yaml",
        "fuzz/Cargo.lock",
        "packaging/conda/recipe.yaml",
        "python/comm/fuzz/Cargo.lock",
    }
    for path in written:
        old, new = before[copy / path].splitlines(), (copy / path).read_text().splitlines()
        assert len(old) == len(new)
        assert all("7.8.9" in two for one, two in zip(old, new) if one != two), path


def test_cargo_agrees_with_the_bumped_lock(copy):
    papers(copy, "bump", "7.8.9")
    ours = re.findall(
        r'^name = "(cuda-cluster.*)"\nversion = "7\.8\.9"$', (copy / "Cargo.lock").read_text(), re.M
    )
    named = re.findall(r'^name = "(cuda-cluster.*)"$', (ROOT / "Cargo.lock").read_text(), re.M)
    assert ours == named and {"cuda-cluster", "cuda-cluster-comm"} < set(named)


def test_the_notes_are_what_the_changes_say_of_the_version(copy):
    papers(copy, "bump", "7.8.9")
    assert papers(copy, "notes") == papers(copy, "notes", "7.8.9") == SAID
    assert "no section for 1.0.0, only for 7.8.9" in papers(copy, "notes", "1.0.0", fails=True)


@pytest.mark.parametrize(
    ("version", "changes", "why"),
    [
        ("0.0.1", None, "0.0.1 is before"),
        ("1.0", None, "'1.0' is not a version"),
        ("1.0.0-rc.1", None, "is not a version"),
        ("01.0.0", None, "is not a version"),
        ("1.0.0", "# Changes\n", "has no '## 1.0.0 (unreleased)'"),
        ("1.0.0", "# Changes\n\n## 0.1.0 (2020-01-01)\n\nOld.\n", "has no '## 1.0.0 (unreleased)'"),
        ("1.0.0", "# Changes\n\n## 1.0.0 (unreleased)\n", "says nothing"),
        ("1.0.0", "# Changes\n\n## Next\n\nNew.\n", "'## Next' is not '## VERSION (DATE)'"),
        (
            "1.0.0",
            "# Changes\n\n## 1.0.0 (unreleased)\n\nNew.\n\n## 1.0.0 (2020-01-01)\n\nOld.\n",
            "1.0.0 has been released already",
        ),
    ],
)
def test_a_wrong_bump_is_refused_and_writes_nothing(copy, version, changes, why):
    if changes:
        (copy / "CHANGELOG.md").write_text(changes)
    before = {path: path.read_text() for path in copy.rglob("*") if path.is_file()}
    assert why in papers(copy, "bump", version, fails=True)
    assert before == {path: path.read_text() for path in copy.rglob("*") if path.is_file()}


def test_a_version_that_was_forgotten_is_a_problem(copy):
    papers(copy, "bump", "7.8.9")
    lock, crate = copy / "fuzz/Cargo.lock", copy / "crates/wire/Cargo.toml"
    lock.write_text(lock.read_text().replace("7.8.9", "7.8.8", 1))
    crate.write_text(crate.read_text().replace("version.workspace = true", 'version = "7.8.9"'))
    problems = papers(copy, "problems", fails=True).splitlines()
    assert [line.split(":")[0] for line in problems] == ["fuzz/Cargo.lock", "crates/wire/Cargo.toml"]


def test_the_recipe_for_the_index_names_its_source_and_keeps_the_rest(copy):
    papers(copy, "bump", "7.8.9")
    source = copy / "cuda_cluster-7.8.9.tar.gz"
    source.write_bytes(b"source")
    recipe = papers(copy, "recipe", source)
    assert "  sha256: 41cf6794ba4200b839c53531555f0f3998df4cbb01a4d5cb0b94e3ca5e23947d\n" in recipe
    assert "path: ../.." not in recipe and 'version: "7.8.9"' in recipe and "libhwloc" in recipe
    assert "this version's source is" in papers(copy, "recipe", copy / "other.tar.gz", fails=True)


def test_the_provenance_names_the_files_their_digests_and_the_commit(tmp_path):
    (tmp_path / "a.whl").write_bytes(b"source")
    program = b"\0rustc version 1.2.3 (abc 2020-01-01)\0"
    with tarfile.open(tmp_path / "b.tar.xz", "w:xz") as archive:
        member = tarfile.TarInfo("cuda-cluster-7.8.9-x86_64/bin/cuda-cluster")
        member.size = len(program)
        archive.addfile(member, io.BytesIO(program))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if commit.returncode:
        pytest.skip("this is no git tree")
    statement = json.loads(papers(ROOT, "provenance", tmp_path))
    subject, other = statement["subject"]
    assert other["name"] == "b.tar.xz"
    assert subject["name"] == "a.whl" and subject["digest"]["sha256"].startswith("41cf6794")
    predicate = statement["predicate"]
    assert predicate["runDetails"]["builder"]["id"] == "urn:cuda-cluster:unsigned-local-build"
    materials = predicate["buildDefinition"]["resolvedDependencies"]
    assert {"name": "cuda-cluster", "digest": {"gitCommit": commit.stdout.strip()}} in materials
    assert {"uri": "pkg:generic/rustc@1.2.3"} in materials
    assert all(set(material) & {"uri", "digest"} for material in materials)
