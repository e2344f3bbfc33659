#!/usr/bin/env bash
# What `topo` costs beside a plain reader of NVML in C, which asks what the matrix of `nvidia-smi
# topo -m` needs and nothing else: names, PCI addresses, CPU affinities, and for each pair its
# common ancestor and its NVLinks. Both ask the same NVML, that of a made-up machine (real processes,
# no GPU); `topo` also reads CPUs, NUMA nodes and the PCI tree. Prints the medians and their ratio.
# `nvidia-smi` itself cannot run on a made-up machine. Where it is installed, on a machine with GPUs,
# both are timed on the real NVML as well.
#
#   scripts/bench-topo.sh [GPUS [RUNS]]     CUDA_CLUSTER names the program; 8 GPUs, 200 runs of each
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
gpus=${1:-8} runs=${2:-200}
program=$(realpath "${CUDA_CLUSTER:-target/release/cuda-cluster}")
[ -x "$program" ] || { echo "$program is missing; build it with: cargo build --release --locked" >&2; exit 2; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cat >"$scratch/reader.c" <<'C'
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#define ASK(name, ...) ((int (*)())ask(#name))(__VA_ARGS__)

static void *library;

static void *ask(const char *name) {
    void *function = dlsym(library, name);
    if (!function) {
        fprintf(stderr, "%s is missing\n", name);
        exit(1);
    }
    return function;
}

int main(void) {
    static void *gpus[64];
    unsigned count = 0;
    library = dlopen(getenv("CUDA_CLUSTER_NVML"), RTLD_NOW);
    if (!library || ASK(nvmlInit_v2)) return 1;
    ASK(nvmlDeviceGetCount_v2, &count);
    for (unsigned at = 0; at < count; at++) {
        char name[96] = "", pci[256] = "";
        unsigned long cpus[16] = {0};
        ASK(nvmlDeviceGetHandleByIndex_v2, at, &gpus[at]);
        ASK(nvmlDeviceGetName, gpus[at], name, (unsigned)sizeof name);
        ASK(nvmlDeviceGetPciInfo_v3, gpus[at], pci);
        ASK(nvmlDeviceGetCpuAffinity, gpus[at], 16u, cpus);
        printf("%u %s %lx\n", at, name, cpus[0]);
    }
    for (unsigned at = 0; at < count; at++) {
        for (unsigned link = 0; link < 18; link++) {
            char pci[256] = "";
            unsigned active = 0;
            if (!ASK(nvmlDeviceGetNvLinkState, gpus[at], link, &active) && active)
                ASK(nvmlDeviceGetNvLinkRemotePciInfo_v2, gpus[at], link, pci);
        }
        for (unsigned other = 0; other < count; other++) {
            unsigned level = 0;
            if (other != at) ASK(nvmlDeviceGetTopologyCommonAncestor, gpus[at], gpus[other], &level);
            printf(" %u", level);
        }
        printf("\n");
    }
    return ASK(nvmlShutdown);
}
C
cc -O2 -o "$scratch/reader" "$scratch/reader.c" -ldl
cat >"$scratch/compare.py" <<'P'
import statistics, subprocess, sys, time

def milliseconds(command):
    begin = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - begin) * 1e3

program, reader, runs = sys.argv[1], sys.argv[2], int(sys.argv[3])
commands = {"topo": [program, "topo"], "reader": [reader], "true": ["true"]}
took = {name: [] for name in commands}
for _ in range(runs):  # one after the other, so that a busy moment hits all of them
    for name, command in commands.items():
        took[name].append(milliseconds(command))
median = {name: statistics.median(times) for name, times in took.items()}
print(f"topo {median['topo']:.1f} ms, reader of NVML {median['reader']:.1f} ms "
      f"(ratio {median['topo'] / median['reader']:.2f}); an empty program {median['true']:.1f} ms")
P
cat >"$scratch/real.py" <<'P'
import statistics, subprocess, sys, time

def milliseconds(command):
    begin = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - begin) * 1e3

topo, smi = [sys.argv[1], "topo"], ["nvidia-smi", "topo", "-m"]
took = [(milliseconds(topo), milliseconds(smi)) for _ in range(int(sys.argv[2]))]
ours, theirs = (statistics.median(times) for times in zip(*took))
print(f"on this machine: topo {ours:.1f} ms, nvidia-smi topo -m {theirs:.1f} ms (ratio {ours / theirs:.2f})")
P
if nvidia-smi -L >/dev/null 2>&1; then python3 "$scratch/real.py" "$program" "$runs"
else echo "not compared with nvidia-smi topo -m: nvidia-smi is not installed, or finds no GPU"; fi
CUDA_CLUSTER_BIN=${CUDA_CLUSTER_BIN:-} scripts/made-up.sh "$gpus" \
    python3 "$scratch/compare.py" "$program" "$scratch/reader" "$runs"
