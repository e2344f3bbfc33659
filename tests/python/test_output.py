"""What ranks of `run` write, in files of the user's (`--output-dir`)."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import BUILT, RUNTIME

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def run(script, *flags, ranks=2, **options):
    """What `run` says of ranks that run a script of the shell."""
    command = [str(BUILT), "run", "--topology", "dgx-a100", "--simulate", "-n", str(ranks)]
    return subprocess.run(
        [*command, *flags, "--", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )


def files(place):
    """The files below a directory, with what they hold."""
    found = [path for path in Path(place).rglob("*") if path.is_file()]
    return {str(path.relative_to(place)): path.read_text() for path in found}


def test_each_rank_has_a_file_for_each_stream_and_is_still_shown(tmp_path):
    for _ in range(2):  # The files of the first job are replaced.
        said = run("echo out $RANK; echo err $RANK >&2; printf end", "--output-dir", tmp_path / "a/b")
        assert said.returncode == 0, said
        assert sorted(said.stdout.replace("end", "").split("\n"))[1:] == ["out 0", "out 1"], said
        assert sorted(re.findall("^err .", said.stderr, re.M)) == ["err 0", "err 1"], said
        assert files(tmp_path) == {
            "a/b/rank0.out": "out 0\nend",
            "a/b/rank0.err": "err 0\n",
            "a/b/rank1.out": "out 1\nend",
            "a/b/rank1.err": "err 1\n",
        }


def test_a_restart_has_files_of_its_own_and_says_where(tmp_path):
    script = """
        echo start $TORCHELASTIC_RESTART_COUNT of $RANK
        test $TORCHELASTIC_RESTART_COUNT = 1 && exit 0
        test $RANK = 0 && exec sleep 600
        until test -s o/rank0.out; do sleep 0.02; done
        kill -9 $$
    """
    name = f"again-{os.getpid()}"
    said = run(script, "--restarts", "1", "--name", name, "--output-dir", "o", cwd=tmp_path)
    # What is known of the failure is kept.
    shutil.rmtree(f"{RUNTIME}/cuda-cluster/{name}")
    assert said.returncode == 0, said
    assert f"their output goes to {tmp_path}/o/restart1" in said.stderr, said
    assert files(tmp_path / "o") == {
        "rank0.err": "",
        "rank1.err": "",
        "rank0.out": "start 0 of 0\n",
        "rank1.out": "start 0 of 1\n",
        "restart1/rank0.err": "",
        "restart1/rank1.err": "",
        "restart1/rank0.out": "start 1 of 0\n",
        "restart1/rank1.out": "start 1 of 1\n",
    }


def test_a_directory_that_cannot_be_written_is_said_before_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    said = run("echo begun", "--output-dir", tmp_path / "file")
    assert said.returncode == 2, said
    assert "--output-dir" in said.stderr, said
    assert str(tmp_path / "file") in said.stderr, said
    assert said.stdout == "", said


def test_a_disk_that_gets_full_is_said_and_the_ranks_go_on(tmp_path):
    os.symlink("/dev/full", tmp_path / "rank1.out")
    script = "i=0; while [ $i -lt 20000 ]; do echo $RANK line $i; i=$((i + 1)); done"
    said = run(script, "--output-dir", tmp_path)
    assert said.returncode == 0, said
    refused = [line for line in said.stderr.splitlines() if "is not written any more" in line]
    assert len(refused) == 1, said.stderr
    assert f"{tmp_path}/rank1.out is not written any more: No space left" in refused[0]
    for rank in (0, 1):
        shown = [line for line in said.stdout.splitlines() if line.startswith(f"{rank} ")]
        assert shown == [f"{rank} line {number}" for number in range(20000)]
    (tmp_path / "rank1.out").unlink()
    assert files(tmp_path)["rank0.out"].splitlines()[-1] == "0 line 19999"


def test_a_cluster_of_up_has_them_too(tmp_path):
    name = f"output-{os.getpid()}"
    spec = tmp_path / "job.yaml"
    spec.write_text(
        "version: 1\nengine: command\ncommand:\n  argv: [sh, -c, 'echo here; exec sleep 600']\n"
        "  output_dir: out\n"
    )
    where = ["--topology", "dgx-a100", "--simulate", "--n-workers", "1", "--name", name]
    up = [str(BUILT), "up", "-f", str(spec), *where, "--detach"]
    subprocess.run(up, check=True, capture_output=True, timeout=120)
    try:
        subprocess.run([str(BUILT), "logs", name, "gpu0"], check=True, capture_output=True)
        assert (tmp_path / "out" / "rank0.out").read_text() in ("", "here\n")
    finally:
        subprocess.run([str(BUILT), "down", name], check=True, capture_output=True, timeout=120)
        shutil.rmtree(f"{RUNTIME}/cuda-cluster/{name}", ignore_errors=True)
    assert (tmp_path / "out" / "rank0.out").read_text() == "here\n"
