//! CUDA C++ as tasks, on a stand-in for the driver: what kernels compute, and what they are given.

use std::path::{Path, PathBuf};

use cuda_cluster::cluster::{Client, CudaParameter, CudaTask, Kernel, Remote, Scalar};

use crate::gpus::{Machine, described, moved};
use crate::skip::skip;
use serde_json::Value;

const AXPY: &str = r#"
extern "C" __global__ void fill(float *out, float value, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = value + i;
}
extern "C" __global__ void axpy(float a, const float *x, const float *y, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a * x[i] + y[i];
}
"#;

/// Numbers in a buffer of the kernels' chain: more than are sent inline.
const NUMBERS: i32 = 50_000;

fn kernel(function: &str, parameters: Vec<CudaParameter>) -> CudaTask {
    let blocks = NUMBERS.unsigned_abs().div_ceil(256);
    let kernel = Kernel {
        source: AXPY.to_owned(),
        function: function.to_owned(),
        grid: [blocks, 1, 1],
        block: [256, 1, 1],
        shared_bytes: 0,
    };
    CudaTask { kernel, parameters }
}

fn run_kernel(client: &Client, on: &str, task: &CudaTask, inputs: &[&Remote]) -> Remote {
    let named = client.task(CudaTask::FUNCTION).arguments(task).inputs(inputs).on(on);
    named.submit().expect("submitted")
}

#[test]
fn chains_of_kernels_over_four_gpus_give_the_right_numbers() {
    for faults in ["poison", "poison async latency=5"] {
        let Some(machine) = Machine::new("kernels", faults) else { return };
        let up = machine.up(&["--n-workers", "4", "--enable-nvlink"], &[]);
        assert_eq!(up.code, 0, "{up}");
        let client = machine.client();
        let out = || CudaParameter::Output(4 * u64::from(NUMBERS.unsigned_abs()));
        let scalar = |value: f32| CudaParameter::Value(Scalar::F32(value));
        let count = || CudaParameter::Value(Scalar::I32(NUMBERS));
        let filled = |gpu: usize, value: f32| {
            let task = kernel("fill", vec![out(), scalar(value), count()]);
            run_kernel(&client, &format!("gpu{gpu}"), &task, &[])
        };
        // Each step runs on the next GPU, so each moves what the last one made.
        let (mut sum, other) = (filled(0, 1.0), filled(3, 2.0));
        for step in 1..=8 {
            let inputs = (CudaParameter::Input(0), CudaParameter::Input(1));
            let parameters = vec![scalar(0.5), inputs.0, inputs.1, out(), count()];
            let task = kernel("axpy", parameters);
            sum = run_kernel(&client, &format!("gpu{}", step % 4), &task, &[&sum, &other]);
        }
        let bytes = sum.bytes().expect("computed");
        let (numbers, _) = bytes.as_chunks();
        assert_eq!(numbers.len(), NUMBERS.unsigned_abs() as usize);
        for (at, number) in numbers.iter().enumerate() {
            let mut expected = 1.0 + at as f32;
            for _ in 0..8 {
                expected = 0.5 * expected + (2.0 + at as f32);
            }
            assert_eq!(f32::from_le_bytes(*number), expected, "number {at} with {faults}");
        }
        drop((sum, other));
        drop(client);
        let moved: u64 = machine.down(4).iter().map(|report| moved(report, "peer to device")).sum();
        assert!(moved > 8 * 200_000, "between GPUs: {moved}");
    }
}

#[test]
fn a_kernel_that_goes_where_it_must_not_ends_its_worker_and_the_task_is_named() {
    let Some(machine) = Machine::new("a wild kernel", "") else { return };
    let up = machine.up(&["--n-workers", "2", "--enable-nvlink"], &[]);
    assert_eq!(up.code, 0, "{up}");
    let client = machine.client();
    // A number where the kernel has a pointer.
    let wild = CudaParameter::Value(Scalar::U64(0x10));
    let parameters =
        vec![wild, CudaParameter::Value(Scalar::F32(1.0)), CudaParameter::Value(Scalar::I32(8))];
    let task = run_kernel(&client, "gpu1", &kernel("fill", parameters), &[]);
    let error = task.wait().expect_err("it ends every worker that it runs on").to_string();
    assert!(error.contains("gpu1"), "{error}");
    let worker = machine.worker("gpu1");
    let reason = worker["last_exit"]["reason"].as_str().expect("a reason");
    assert!(reason.contains("an illegal memory access was encountered"), "{reason}");
    assert!(reason.contains("(cuda)"), "the task's function: {reason}");
    machine.run(&["down", "dev"], &[]);
    machine.sandbox.assert_only_the_causes_are_left("dev");
}

/// What is said of a task that runs on one worker.
fn refused(client: &Client, task: &CudaTask) -> String {
    run_kernel(client, "gpu0", task, &[]).wait().expect_err("not what it takes").to_string()
}

#[test]
fn a_kernel_gets_as_many_parameters_as_it_takes_and_none_that_is_too_small() {
    let Some(machine) = Machine::new("parameters", "poison") else { return };
    let up = machine.up(&["--n-workers", "1", "--enable-nvlink"], &[]);
    assert_eq!(up.code, 0, "{up}");
    let client = machine.client();
    let (out, count) = (CudaParameter::Output(1024), CudaParameter::Value(Scalar::I32(8)));
    let value = |scalar| CudaParameter::Value(scalar);
    for (parameters, said) in [
        (vec![out, count], "the kernel fill takes 3 parameters, 2 were given"),
        (vec![], "the kernel fill takes 3 parameters, 0 were given"),
        (vec![out, count, count, count], "the kernel fill takes 3 parameters, 4 were given"),
        (
            vec![value(Scalar::F32(1.0)), value(Scalar::F32(1.0)), count],
            "parameter 1 of the kernel fill has 8 bytes, the value given has 4 bytes",
        ),
        (
            vec![out, value(Scalar::F64(1.0)), count],
            "parameter 2 of the kernel fill has 4 bytes, the value given has 8 bytes",
        ),
    ] {
        let error = refused(&client, &kernel("fill", parameters));
        assert!(error.contains(said), "{error}");
    }
    let mut wide = kernel("wide", vec![out, value(Scalar::U64(1))]);
    wide.kernel.source = WIDE.to_owned();
    let error = refused(&client, &wide);
    let said = "parameter 2 of the kernel wide has 2048 bytes, the value given has 8 bytes";
    assert!(error.contains(said), "{error}");
    // A narrow type has no scalar of its own.
    let mut narrow = kernel("narrow", vec![out, value(Scalar::U32(1))]);
    narrow.kernel.source =
        "extern \"C\" __global__ void narrow(int *out, bool on) { out[0] = on ? 7 : 8; }".into();
    let seven = run_kernel(&client, "gpu0", &narrow, &[]).bytes().expect("computed");
    assert_eq!(seven[..4], 7i32.to_le_bytes());
    assert_eq!(machine.worker("gpu0")["restarts"], 0);
    drop(client);
    machine.down(1);
}

/// A parameter that is wider than every value that can be given.
const WIDE: &str = r#"
struct Wide { long long numbers[256]; };
extern "C" __global__ void wide(long long *out, Wide from) {
    for (int i = 0; i < 128; i++) out[i] = from.numbers[i];
}
"#;

#[test]
fn with_a_driver_that_cannot_tell_its_parameters_a_kernel_reads_zeros_and_nothing_of_others() {
    let Some(machine) = Machine::new("an older driver", "poison") else { return };
    let machine = machine.without("cuFuncGetParamInfo");
    let up = machine.up(&["--n-workers", "1", "--enable-nvlink"], &[]);
    assert_eq!(up.code, 0, "{up}");
    let client = machine.client();
    let mut wide =
        kernel("wide", vec![CudaParameter::Output(1024), CudaParameter::Value(Scalar::U64(5))]);
    wide.kernel.source = WIDE.to_owned();
    for (given, first) in [(2, 5i64), (1, 0)] {
        wide.parameters.truncate(given);
        let bytes = run_kernel(&client, "gpu0", &wide, &[]).bytes().expect("computed");
        let (numbers, _) = bytes.as_chunks();
        let numbers: Vec<i64> = numbers.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect();
        assert_eq!(numbers[0], first);
        assert_eq!(numbers[1..], [0; 127]);
    }
    drop(client);
    machine.down(1);
}

/// The folder of NVIDIA's compiler; `None`, with a recorded skip, if it is not there.
fn nvidias_compiler() -> Option<PathBuf> {
    let venv = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/lib");
    let pythons = std::fs::read_dir(&venv).into_iter().flatten().flatten();
    let folders = pythons.map(|python| python.path().join("site-packages/nvidia/cu13/lib"));
    let found = folders.into_iter().find(|folder| folder.join("libnvrtc.so.13").exists());
    if found.is_none() {
        skip("ucx-cuda", "NVRTC: nvidia-cuda-nvrtc is not in .venv, see scripts/setup.sh --tests");
    }
    found
}

#[test]
fn pips_compiler_is_found_with_its_headers_in_the_active_environment() {
    let Some(machine) = Machine::new("pip's NVRTC", "") else { return };
    let Some(compiler) = nvidias_compiler() else { return };
    // The loader finds none.
    std::fs::remove_file(machine.root().join("lib/libnvrtc.so.13")).expect("it was there");
    let environment = machine.root().join("environment");
    let package = environment.join("lib/python3.11/site-packages/nvidia/cu13");
    std::fs::create_dir_all(package.join("include")).expect("made");
    std::os::unix::fs::symlink(compiler, package.join("lib")).expect("made");
    std::fs::write(package.join("include/of_pip.h"), "#define VALUE 2.0f\n").expect("written");
    let environment = environment.to_str().expect("a path in UTF-8");
    let up = machine.up(&["--n-workers", "1"], &[("VIRTUAL_ENV", environment)]);
    assert_eq!(up.code, 0, "{up}");
    let client = machine.client();
    let mut task = kernel("fill", vec![CudaParameter::Output(4096)]);
    let source = |header: &str| {
        format!(
            "#include <{header}>\nextern \"C\" __global__ void fill(float *out) {{ *out = VALUE; }}"
        )
    };
    let mut said = |header: &str| {
        task.kernel.source = source(header);
        let failed = run_kernel(&client, "gpu0", &task, &[]).wait();
        failed.expect_err("a stand-in runs no cubin").to_string()
    };
    let compiled = said("of_pip.h");
    assert!(compiled.contains("cuModuleLoadData"), "{compiled}");
    let missing = said("of_nobody.h");
    assert!(missing.contains("cannot open source file \"of_nobody.h\""), "{missing}");
    drop(client);
    machine.down(1);
}

#[test]
fn what_nvidias_compiler_says_reaches_the_client() {
    let Some(machine) = Machine::new("NVRTC", "") else { return };
    let Some(nvrtc) = nvidias_compiler() else { return };
    let environment = machine.fake.environment();
    let own = environment.iter().find(|(name, _)| *name == "LD_LIBRARY_PATH").expect("a driver");
    let path = format!("{}:{}", nvrtc.display(), own.1.display());
    let up = machine.up(&["--n-workers", "1"], &[("LD_LIBRARY_PATH", &path)]);
    assert_eq!(up.code, 0, "{up}");
    let client = machine.client();
    let mut task = kernel("fill", vec![CudaParameter::Output(4096)]);
    let good =
        run_kernel(&client, "gpu0", &task, &[]).wait().expect_err("a stand-in runs no cubin");
    let good = good.to_string();
    assert!(
        good.contains("cuModuleLoadData") && good.contains("operation not supported"),
        "{good}"
    );
    task.kernel.source = "extern \"C\" __global__ void fill(float *out) { out[0] = wrong; }".into();
    let bad = run_kernel(&client, "gpu0", &task, &[]).wait().expect_err("no such name").to_string();
    assert!(bad.contains("task.cu(1): error: identifier \"wrong\" is undefined"), "{bad}");
    drop(client);
    machine.down(1);
}

#[test]
fn a_compiler_without_code_for_a_gpu_makes_ptx_or_says_that_it_is_too_new() {
    let Some(machine) = Machine::new("architectures", "") else { return };
    let parameters = || {
        let value = CudaParameter::Value;
        vec![CudaParameter::Output(32), value(Scalar::F32(1.0)), value(Scalar::I32(8))]
    };
    let numbers: Vec<u8> = (1u8..=8).flat_map(|number| f32::from(number).to_le_bytes()).collect();
    // An H100 has compute capability 9.0.
    for known in ["75,80,90", "75,80", "100,120"] {
        let variables = [("CUDA_CLUSTER_FAKE_NVRTC_ARCHS", known)];
        let up = machine.up(&["--n-workers", "1", "--enable-nvlink"], &variables);
        assert_eq!(up.code, 0, "{up}");
        let client = machine.client();
        let mut task = kernel("fill", parameters());
        // More than a function has without asking for it.
        task.kernel.shared_bytes = 64 << 10;
        let ran = run_kernel(&client, "gpu0", &task, &[]);
        if known == "100,120" {
            let error = ran.wait().expect_err("no code").to_string();
            let said = "makes no code for compute capability 9.0, the oldest is 10.0";
            assert!(error.contains(said), "{error}");
        } else {
            assert_eq!(&ran.bytes().expect("computed")[..], &numbers[..], "{known}");
        }
        drop((ran, client));
        machine.run(&["down", "dev"], &[]);
        machine.sandbox.assert_nothing_is_left();
    }
}

#[test]
fn doctor_says_which_compiler_fits_the_driver_and_the_gpus() {
    let said = |machine: &Machine, variables: &[(&str, &str)]| {
        let said = machine.run(&["doctor", "-o", "json"], variables);
        let document: Value = serde_json::from_str(&said.stdout).expect("JSON");
        let all = document["findings"].as_array().expect("findings").iter();
        let all = all.filter(|finding| finding["id"] == "nvrtc");
        let all = all.map(|it| format!("{}: {}", it["severity"], it["text"]).replace('"', ""));
        all.collect::<Vec<_>>()
    };
    let Some(machine) = Machine::new("the compiler", "") else { return };
    assert_eq!(said(&machine, &[]), ["ok: CUDA 13.0, sm_90a"]);
    let newer = said(&machine, &[("CUDA_CLUSTER_FAKE_NVRTC_ARCHS", "100,120")]);
    assert!(newer[0].contains("warning") && newer[0].contains("no code for compute"), "{newer:?}");
    let mut described = described("dgx-h100");
    described.cuda = Some("12.8".to_owned());
    let Some(older) = Machine::of(&described, "the compiler", "") else { return };
    let older = said(&older, &[]);
    assert!(older[0].contains("of CUDA 13.0, and the driver of 12.8"), "{older:?}");
    // Neither the loader nor a Python environment has one.
    std::fs::remove_file(machine.root().join("lib/libnvrtc.so.13")).expect("it was there");
    let copy = machine.root().join("lib/libucp.so.0");
    let none = said(&machine, &[("CUDA_CLUSTER_UCX", copy.to_str().expect("UTF-8"))]);
    assert!(none[0].contains("note: cannot find libnvrtc.so"), "{none:?}");
}
