#!/usr/bin/env bash
# Checks everything that needs a GPU, on a machine with one NVIDIA GPU or more and a prebuilt
# binary: the probe against nvidia-smi, two workers on one GPU over cuda_ipc and cuda_copy, the CUDA
# context before UCX, device-to-device bandwidth. Says at the end what could not be checked.
#
#   scripts/gpu-check.sh [BINARY]      default: target/release/cuda-cluster, then target/debug
#   UCX=PATH                           the libucp (default: auto)
#
# On a made-up machine (tests/fake-machine, with its nvidia-smi on PATH) all but speeds are checked.
#
# Ends with 0 if every check passed, 1 if one failed, 2 if the binary is missing, 77 if there is no
# GPU.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
binary=${1:-target/release/cuda-cluster}
[[ $# -eq 0 && ! -x $binary ]] && binary=target/debug/cuda-cluster
name=gpu-check-$$
scratch=$(mktemp -d)
passed=0 failed=0 unchecked=()

pass() { echo "ok        $*"; passed=$((passed + 1)); }
fail() { echo "FAILED    $*"; failed=$((failed + 1)); }
skip() { unchecked+=("$*"); }
check() { local what=$1; shift; if "$@"; then pass "$what"; else fail "$what"; fi; }
show() { sed 's/^/          /' "$@"; }
# number EXPRESSION FILE: what a Python expression makes of the JSON in a file, as d.
json() { python3 -c "import json, sys; d = json.load(open(sys.argv[1])); print($1)" "$2"; }

finish() {
    "$binary" down "$name" >/dev/null 2>&1
    rm -rf "$scratch"
}
trap finish EXIT

[[ -x $binary ]] || { echo "there is no binary at $binary: cargo build --release" >&2; exit 2; }
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L >"$scratch/gpus" 2>&1 || ! [[ -s $scratch/gpus ]]; then
    echo "no GPU here (nvidia-smi: $( (nvidia-smi -L 2>&1 || true) | head -1))"
    echo "not checked: the probe against nvidia-smi; cuda_ipc and cuda_copy lanes; the CUDA context"
    echo "before UCX; bandwidth between device memories; NVLink; GPUDirect RDMA"
    exit 77
fi
command -v python3 >/dev/null || { echo "python3 is missing" >&2; exit 2; }
show "$scratch/gpus"
gpus=$(wc -l <"$scratch/gpus")

# The probe against the driver's own tools.
"$binary" topo -o json >"$scratch/topo.json" 2>"$scratch/topo.err" || { fail "topo"; show "$scratch/topo.err"; exit 1; }
nvidia-smi --query-gpu=index,uuid,pci.bus_id,memory.total --format=csv,noheader,nounits |
    python3 -c "
import json, sys
ours = {g['index']: g for g in json.load(open('$scratch/topo.json'))['gpus']}
wrong = []
for line in sys.stdin:
    index, uuid, pci, mib = [part.strip() for part in line.split(',')]
    gpu = ours.pop(int(index), None)
    if gpu is None: wrong.append(f'GPU{index} is missing'); continue
    if gpu['uuid'] != uuid: wrong.append(f'GPU{index}: {gpu[\"uuid\"]} is not {uuid}')
    place = lambda text: text.lower().split(':', 1)[1] + '@' + str(int(text.split(':')[0], 16))
    if place(gpu['pci']) != place(pci): wrong.append(f'GPU{index}: {gpu[\"pci\"]} is not {pci}')
    if abs(gpu['memory_bytes'] / 2**20 - float(mib)) > 0.05 * float(mib):
        wrong.append(f'GPU{index}: {gpu[\"memory_bytes\"]} bytes are not {mib} MiB')
wrong += [f'GPU{index} is not in nvidia-smi' for index in ours]
print(*wrong, sep='\n'); sys.exit(bool(wrong))" >"$scratch/differs"
if [[ $? -eq 0 ]]; then pass "GPUs: number, identity, place and memory as nvidia-smi says"; else fail "GPUs"; show "$scratch/differs"; fi

nvidia-smi topo -m >"$scratch/smi" 2>&1
"$binary" topo -o matrix >"$scratch/ours" 2>&1
python3 - "$scratch/smi" "$scratch/ours" >"$scratch/differs" <<'PY'
import re, sys
def rows(path):
    # Cells are parted by blanks; the columns of GPUs and NICs come first.
    text = re.sub(r"\x1b\[[0-9;]*m", "", open(path).read())
    found, names = {}, []
    for line in text.splitlines():
        cells = line.split()
        if not cells: continue
        if not names and cells[0].startswith("GPU0"):
            names = [c for c in cells if re.fullmatch(r"(GPU|NIC)\d+", c)]
        elif re.fullmatch(r"GPU\d+", cells[0]) and names:
            for name, cell in zip(names, cells[1:]): found[cells[0], name] = cell
            rest = cells[1 + len(names):]
            found[cells[0], "cpus"] = rest[0] if rest and re.fullmatch(r"[\d,-]+", rest[0]) else None
    return found
smi, ours = rows(sys.argv[1]), rows(sys.argv[2])
wrong = [f"{a} {b}: nvidia-smi {smi[a, b]}, ours {ours.get((a, b))}"
         for a, b in smi if smi[a, b] is not None and ours.get((a, b)) != smi[a, b]]
print(*wrong, sep="\n")
sys.exit(bool(wrong) or not smi)
PY
if [[ $? -eq 0 ]]; then pass "links and CPU affinity as nvidia-smi topo -m says"
else fail "links and CPU affinity"; show "$scratch/differs" "$scratch/smi" "$scratch/ours"; fi

"$binary" doctor >"$scratch/doctor" 2>&1; check "doctor finds nothing that keeps a cluster from coming up" test $? -eq 0
grep -E "ucx|driver" "$scratch/doctor" | show

# Two workers on one GPU.
if ! "$binary" up --gpus 0 --workers-per-gpu 2 --ucx "${UCX:-auto}" --name "$name" --detach >"$scratch/up" 2>&1; then
    fail "two workers on one GPU come up"; show "$scratch/up"; exit 1
fi
pass "two workers on one GPU come up"
"$binary" ps "$name" -o wide >"$scratch/ps" 2>&1; show "$scratch/ps"
ucx=$(grep '^UCX' "$scratch/ps")
# UCX drops its CUDA transports when no context is there as it starts.
check "UCX knows CUDA, and saw a context as it was opened (cuda_copy, cuda_ipc)" \
    grep -q 'cuda_copy.*cuda_ipc\|cuda_ipc.*cuda_copy' <<<"$ucx"
"$binary" logs "$name" >"$scratch/logs" 2>&1
check "the device is opened before UCX" python3 -c "
import sys
lines = open('$scratch/logs').read().splitlines()
at = lambda text: [n for n, line in enumerate(lines) if text in line and 'gpu0' in line][:1]
device, ucx = at('device is open'), at('UCX is open')
sys.exit(not (device and ucx and device < ucx))"
"$binary" ps "$name" -o json >"$scratch/ps.json"
lanes=$(json "' '.join(sorted({l.split('/')[0] for w in d['workers'] for p in w['peers'] for l in p['lanes']}))" "$scratch/ps.json")
echo "          lanes: $lanes"
check "the workers' connections have a cuda_ipc lane" grep -qw cuda_ipc <<<"$lanes"

"$binary" verify "$name" --memory both >"$scratch/verify" 2>&1; code=$?
show "$scratch/verify"
check "verify passes in host and device memory (exit $code)" test $code -eq 0

"$binary" bench links "$name" --memory device --size 8,64KiB,1MiB,16MiB,64MiB,256MiB,1GiB -o json \
    >"$scratch/bench.json" 2>"$scratch/bench.err" || { fail "bench links in device memory"; show "$scratch/bench.err"; }
if [[ -s $scratch/bench.json ]]; then
    json "'\n'.join(f\"{p['from']} to {p['to']}  {p['size_bytes']:>11} B  {p['gb_per_s'] or 0:9.3f} GB/s  {p['latency_us'] or 0:7.2f} µs  {p['verdict']}\" for p in d['pairs'])" "$scratch/bench.json" | show
    # Through host memory, PCIe 5.0 carries 63 GB/s at best; within the GPU it is far more.
    best=$(json "max(p['gb_per_s'] or 0 for p in d['pairs'])" "$scratch/bench.json")
    if [[ -n ${CUDA_CLUSTER_FAKE_CUDA_FAULTS:-} ]]; then
        skip "speed (these GPUs are a stand-in's)"
    else
        check "device to device on one GPU: $best GB/s, more than through the host" \
            python3 -c "import sys; sys.exit(not $best > 65)"
    fi
fi
"$binary" down "$name" >/dev/null 2>&1
sleep 1
check "no process of the cluster holds the GPU afterwards" \
    bash -c "! nvidia-smi --query-compute-apps=process_name --format=csv,noheader 2>/dev/null | grep -q cuda-cluster"

((gpus > 1)) || skip "links between GPUs: NVLink and PCIe limits, verdicts, peer access (one GPU)"
[[ -d /sys/class/infiniband && -n $(ls /sys/class/infiniband) ]] || skip "InfiniBand, RoCE, GPUDirect RDMA (no adapter)"
[[ $(json "any(g['mig'] for g in d['gpus'])" "$scratch/topo.json") == True ]] || skip "MIG instances (none)"
skip "a GPU that fails (Xid) while workers use it"
echo
echo "$passed passed, $failed failed"
for what in "${unchecked[@]}"; do echo "not checked: $what"; done
((failed == 0))
