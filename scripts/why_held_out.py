#!/usr/bin/env python3
"""Tries `cuda-cluster why` on causes of stalls and on healthy slow jobs that were written without its code in mind.

    scripts/why_held_out.py [--program P] [--healthy] [--set held_out_more] [--save FOLDER] [NAME...]

Each cause of tests/python/stalls/held_out, or of the set there that is named, is started, left alone until no rank has
made progress for some seconds, and looked at once; `expected.yaml` has the answer. With --healthy each job of
tests/python/stalls/healthy_more is looked at six times over 12 s, and must never be called stalled. Prints a table;
exits with 1 if anything was not as expected.
"""

import argparse
import atexit
import contextlib
import functools
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]
STALLS = ROOT / "tests/python/stalls"
FROZEN = pathlib.Path("/sys/fs/cgroup/unified/held-out-frozen")
GROUPS = [FROZEN] + [pathlib.Path(f"/sys/fs/cgroup/{kind}/held-out-{kind}") for kind in ("memory", "cpu")]
MACHINE = ["--simulate", "--topology", "dgx-h100"]
LOOKS, BETWEEN_LOOKS_S = 6, 2.4


def python(kind, base):
    if kind == "venv":
        return str(base / ".venv/bin/python")
    if kind == "torch":
        return str(base / "target/programs/torch/bin/python")
    home = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    return str(home / "versions" / kind / "bin/python")


class Job:
    """A job of `run`, or a Dask cluster with its client; what it leaves is removed at the end."""

    def __init__(self, program, base, name, folder, how):
        self.program, self.name = program, f"held-{name.replace('_', '-')}"
        self.temporary = tempfile.mkdtemp(prefix="held-out-")
        self.log = open(os.path.join(self.temporary, "log"), "w+")
        interpreter = python(str(how.get("python", "venv")), base)
        ranks = str(how.get("ranks", 4))
        env = {
            **os.environ,
            "TMPDIR": self.temporary,
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            # What the healthy jobs share is the first set's.
            "PYTHONPATH": str(STALLS / "held_out" if folder.name == "healthy_more" else folder),
        }
        self.outside = None
        if how.get("outside"):
            port = free_port()
            env["OUTSIDE"] = f"http://127.0.0.1:{port}"
            self.outside = subprocess.Popen(
                [interpreter, str(folder / "outside.py"), str(port)],
                stdout=self.log,
                stderr=subprocess.STDOUT,
            )
        self.folder = folder
        script = str(folder / f"{name}.py")
        start = how.get("start", "run")
        self.client = None
        if start == "dask":
            up = [
                program,
                "up",
                "--engine",
                "dask",
                "--python",
                interpreter,
                *MACHINE,
                "--n-workers",
                ranks,
                "--threads-per-worker",
                "2",
                "--name",
                self.name,
                "--detach",
                *how.get("options", []),
            ]
            self.job = None
            subprocess.run(up, env=env, check=True, stdout=self.log, stderr=subprocess.STDOUT)
            said = subprocess.run(
                [program, "env", self.name], env=env, check=True, capture_output=True, text=True
            )
            for line in said.stdout.splitlines():
                key, _, value = line.removeprefix("export ").partition("=")
                env[key] = value.strip("'\"")
            self.client = subprocess.Popen(
                [interpreter, script],
                env=env,
                stdout=self.log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        elif start == "native":
            self.job = None
            self.client = subprocess.Popen(
                [native_jobs(folder, base), name, self.name],
                env=env,
                stdout=self.log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        else:
            command = (
                ["sh", str(folder / f"{name}.sh"), interpreter] if start == "sh" else [interpreter, script]
            )
            self.job = subprocess.Popen(
                [program, "run", *MACHINE, "-n", ranks, "--name", self.name, "--", *command],
                env=env,
                stdout=self.log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def why(self):
        done = subprocess.run([self.program, "why", self.name, "-o", "json"], capture_output=True, text=True)
        try:
            return done.returncode, json.loads(done.stdout), done.stderr
        except json.JSONDecodeError:
            return done.returncode, None, done.stderr

    def running(self):
        return (self.job or self.client).poll() is None

    def tail(self):
        self.log.flush()
        self.log.seek(0)
        return self.log.read()[-600:]

    def end(self):
        for group in GROUPS:
            release(group)
        if (self.folder / "release.py").exists():
            subprocess.run([sys.executable, str(self.folder / "release.py"), self.temporary])
        if self.outside:
            self.outside.kill()
            self.outside.wait()
        if self.client:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.client.pid, signal.SIGKILL)
            self.client.wait()
        subprocess.run([self.program, "down", self.name, "--kill"], capture_output=True)
        if self.job:
            self.job.wait(30)
        for group in GROUPS:
            with contextlib.suppress(OSError):
                group.rmdir()
        self.log.close()
        shutil.rmtree(self.temporary, ignore_errors=True)


@functools.cache
def native_jobs(folder, base):
    """The program of tasks for the native engine, built against the library that cargo has built."""
    built = tempfile.mkdtemp(prefix="held-out-built-")
    atexit.register(shutil.rmtree, built, ignore_errors=True)
    library = base / "target/debug"
    rustc = ["rustc", "--edition", "2024", "-C", "debuginfo=line-tables-only"]
    rustc += ["--extern", f"cuda_cluster={library / 'libcuda_cluster.rlib'}"]
    rustc += ["-L", f"dependency={library / 'deps'}", str(folder / "native_jobs.rs")]
    # Where build scripts have found or made libraries in C.
    for said in library.glob("build/*/output"):
        found = (line.removeprefix("cargo:rustc-link-search=") for line in said.read_text().splitlines())
        rustc += [f"-L{place}" for place in found if place.startswith("native=")]
    subprocess.run([*rustc, "-o", f"{built}/native_jobs"], check=True)
    return f"{built}/native_jobs"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def release(group):
    """Lets the processes of a control group of ours run and die."""
    if not group.exists():
        return
    for name, value in (("cgroup.freeze", "0"), ("memory.oom_control", "0"), ("cpu.cfs_quota_us", "-1")):
        if (group / name).exists():
            (group / name).write_text(value)
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    time.sleep(0.3)


def hang_after(how):
    return {"torch": 22, "venv": 11}.get(str(how.get("python", "venv")), 11) + (4 if how.get("ranks") else 0)


def places(answer):
    """The places of the odd ranks' conditions, with what they wait for."""
    odd = set(answer["verdict"].get("odd", []))
    groups = [g for g in answer["verdict"].get("groups", []) if odd & set(g["ranks"])]
    return json.dumps(groups)


def held_out(job, how, more):
    time.sleep(hang_after(how) + more)
    if not job.running():
        return None, "the job has ended: " + job.tail()
    code, answer, error = job.why()
    if answer is None:
        return code, error
    verdict = answer["verdict"]
    right_odd = sorted(verdict.get("odd", [])) == sorted(how["odd"])
    seen = places(answer) + verdict["text"]
    # As a function, as all that is known of a place, or as a task.
    said = [r"(\bin |\.|\(|\btask ){name}\b", r"\({name} in "]
    right_place = any(re.search(one.format(name=re.escape(p)), seen) for p in how["place"] for one in said)
    return code, (right_odd, right_place, verdict["cause"], verdict["text"], answer)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", default=str(ROOT / "target/debug/cuda-cluster"))
    parser.add_argument("--base", type=pathlib.Path, default=ROOT, help="where .venv and target/programs are")
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--set", choices=("held_out", "held_out_more"), help="which causes [default: held_out]")
    parser.add_argument("--save", type=pathlib.Path)
    parser.add_argument("--more", type=float, default=0.0, help="seconds more before a look: this machine is busy")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    if args.healthy and args.set:
        parser.error("--set is of causes, and --healthy asks for jobs without one")
    folder = STALLS / ("healthy_more" if args.healthy else args.set or "held_out")
    known = yaml.safe_load((folder / "expected.yaml").read_text())
    if unknown := sorted(set(args.names) - set(known)):
        parser.error(f"{', '.join(unknown)}: not in {folder / 'expected.yaml'}")
    if args.save:
        args.save.mkdir(parents=True, exist_ok=True)
    wrong = 0
    for name in args.names or known:
        how = known[name] or {}
        job = Job(args.program, args.base, name, folder, how)
        try:
            wrong += healthy(job, name, how, args) if args.healthy else stalled(job, name, how, args)
        finally:
            job.end()
        sys.stdout.flush()
    print(f"\n{wrong} not as expected")
    return bool(wrong)


def stalled(job, name, how, args):
    code, found = held_out(job, how, args.more)
    if not isinstance(found, tuple):
        print(f"| {name} | {code} | - | - | {found.strip()} |")
        return 1
    odd, place, cause, text, answer = found
    if args.save:
        (args.save / f"{name}.json").write_text(json.dumps(answer, indent=1))
    print(
        f"| {name} | {code} | {'yes' if odd else 'NO'} | {'yes' if place else 'NO'} | {cause}: {text} |"
        f" expected {', '.join(how['odd'])}: {how['cause']} |"
    )
    return not (code == 5 and odd and place)


def healthy(job, name, how, args):
    time.sleep(float(how.get("after", {"torch": 14}.get(str(how.get("python")), 3))) + args.more)
    alarms, texts = [], []
    for look in range(LOOKS):
        if not job.running():
            print(f"| {name} | the job has ended before look {look}: {job.tail().strip()} |")
            return 1
        begun = time.monotonic()
        code, answer, error = job.why()
        text = answer["verdict"]["text"] if answer else error.strip()
        texts.append(f"{code} {text}")
        if code != 0:
            alarms.append((look, code, text))
            if args.save and answer:
                (args.save / f"{name}.{look}.json").write_text(json.dumps(answer, indent=1))
        time.sleep(max(0.0, BETWEEN_LOOKS_S - (time.monotonic() - begun)))
    false = sum(code == 5 for _, code, _ in alarms)
    print(
        f"| {name} | {false} false alarms, {len(alarms) - false} untold, of {LOOKS} | {'; '.join(dict.fromkeys(texts))} |"
    )
    return bool(alarms)


if __name__ == "__main__":
    sys.exit(main())
