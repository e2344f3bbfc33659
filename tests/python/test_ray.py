"""Ray's actors, each on a GPU, are bound to what is near it, as the kernel says from outside."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from conftest import ROOT
from halves import cpus_of, half, made, nic, policy_of

#: Eight actors in one of two ways; then it waits to be looked at.
DRIVER = """
    import json, os, sys
    import cuda_cluster, cuda_cluster.ray, ray

    class Late:
        def __init__(self):
            self.born = sorted(os.sched_getaffinity(0))
            self.bound = cuda_cluster.bind(enable_infiniband=True).gpu.index
        def place(self):
            return {"pid": os.getpid(), "gpu": self.bound, "born": self.born, "ray": ray.get_gpu_ids(),
                    "environ": dict(os.environ)}

    class Born(Late):
        def __init__(self):
            self.born = sorted(os.sched_getaffinity(0))
            self.bound = int(os.environ["CUDA_VISIBLE_DEVICES"])

    resources = cuda_cluster.ray.resources(enable_infiniband=True)
    for left in (2, 1, 0):
        try:
            ray.init(num_gpus=8, num_cpus=2, resources=resources, include_dashboard=False,
                     object_store_memory=80 << 20)
            break
        except Exception as error:
            # Ray gives its own processes 30 seconds, whatever else the machine has to do.
            if not left or "timed out during startup" not in str(error):
                raise
            ray.shutdown()
    if sys.argv[1] == "late":
        actors = [ray.remote(Late).options(num_cpus=0, num_gpus=1).remote() for _ in range(8)]
    else:
        asked = cuda_cluster.ray.options(enable_infiniband=True)
        actors = [ray.remote(Born).options(num_cpus=0, **one).remote() for one in asked]
    places = ray.get([actor.place.remote() for actor in actors])
    print(json.dumps({"places": places, "left": ray.available_resources(), "all": resources}), flush=True)
    sys.stdin.readline()
    ray.shutdown()
"""


def python():
    """A Python with Ray: this one, or that of the benches (`scripts/setup.sh --rivals`)."""
    for candidate in (sys.executable, str(ROOT / ".venv-rivals/bin/python")):
        command = [candidate, "-c", "import ray"]
        if os.path.exists(candidate) and not subprocess.run(command, capture_output=True).returncode:
            return candidate
    pytest.skip("scripts/setup.sh --tests installs Ray")


@pytest.mark.parametrize("way", ["late", "born"])
def test_each_actor_is_bound_to_what_is_near_its_gpu(tmp_path, way):
    variables = made(tmp_path)
    # What a launcher has said of the process that starts Ray is not said of its workers.
    variables |= {"SLURM_LOCALID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    driver = subprocess.Popen(
        [python(), "-c", textwrap.dedent(DRIVER), way],
        env={**os.environ, **variables, "RAY_DISABLE_IMPORT_WARNING": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = iter(driver.stdout.readline, "")
    line = next((line for line in lines if line.startswith("{")), None)
    assert line, driver.communicate()[1]
    said = json.loads(line)
    assert sorted(place["gpu"] for place in said["places"]) == list(range(8))
    for place in said["places"]:
        gpu = place["gpu"]
        assert cpus_of(place["pid"]) == {half(gpu)}, place
        assert policy_of(place["pid"]).startswith("prefer"), place
        assert place["environ"]["UCX_NET_DEVICES"].startswith(nic(gpu))
        assert nic(gpu) in place["environ"]["NCCL_IB_HCA"]
        assert place["environ"]["CUDA_VISIBLE_DEVICES"] == str(gpu)
        assert list(map(int, place["ray"])) == [gpu]
        assert "RANK" not in place["environ"]
        everything = sorted(os.sched_getaffinity(0))
        assert (place["born"] == everything) == (way == "late"), place
    assert "GPU" not in said["left"], "all GPUs are taken"
    taken = [name for name in said["all"] if name not in said["left"]]
    assert taken == ([] if way == "late" else list(said["all"])), said["left"]
    driver.communicate("\n", timeout=120)
    assert driver.returncode == 0
