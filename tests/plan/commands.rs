//! `cuda-cluster plan` as a user runs it: published machines get the right plan.

use std::process::{Command, Output};

use cuda_cluster::cluster::Cluster;
use cuda_cluster::topology;
use serde_json::Value;

fn plan(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    command.arg("plan").args(arguments).env("CUDA_CLUSTER_NVML", "none");
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if ["UCX", "NCCL_", "CUDA_VISIBLE"].iter().any(|prefix| name.starts_with(prefix)) {
            command.env_remove(&*name);
        }
    }
    command.output().expect("the program runs")
}

fn json(arguments: &[&str]) -> Value {
    let output = plan(&[arguments, &["-o", "json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("the answer is JSON")
}

/// The path of a file with this text.
fn written(directory: &tempfile::TempDir, name: &str, text: &str) -> String {
    let path = directory.path().join(name);
    std::fs::write(&path, text).expect("written");
    path.into_os_string().into_string().expect("UTF-8")
}

#[test]
fn a_program_sees_the_plan_before_it_launches_it() {
    let text = topology::builtin("dgx-1-v100").expect("a machine that is built in");
    let machine = topology::parse(text).expect("a topology");
    let plan = Cluster::builder().simulate(machine).workers(2).plan().expect("a plan");
    assert_eq!((plan.workers.len(), plan.machine.simulated), (2, true));
}

/// The GPUs of the published DGX-1 matrix are attached in pairs to four PCIe switches, each with a
/// NIC.
#[test]
fn a_dgx_1_gives_the_two_gpus_of_a_switch_the_nic_of_that_switch() {
    let plan = json(&[
        "--topology",
        "dgx-1-v100",
        "--enable-nvlink",
        "--enable-infiniband",
        "--net-devices",
        "auto",
    ]);
    let workers = plan["workers"].as_array().expect("workers");
    assert_eq!(workers.len(), 8);
    let machine = cuda_cluster::topology::builtin("dgx-1-v100").expect("built in");
    let machine = cuda_cluster::topology::parse(machine).expect("a machine");
    for (at, worker) in workers.iter().enumerate() {
        let nic = format!("mlx5_{}:1", at / 2);
        let (cpus, node) = if at < 4 { ("0-19,40-59", "0") } else { ("20-39,60-79", "1") };
        assert_eq!(worker["name"], format!("gpu{at}"));
        assert_eq!(worker["gpu"]["index"], at);
        assert_eq!(worker["nics"], serde_json::json!([nic]));
        assert_eq!(worker["cpus"], cpus);
        assert_eq!(worker["mems"], node);
        assert_eq!(worker["env"]["UCX_NET_DEVICES"], format!("{nic},lo"));
        assert_eq!(worker["env"]["UCX_TLS"], "rc,cuda_copy,cuda_ipc,posix,cma,self");
        assert_eq!(worker["env"]["CUDA_DEVICE_ORDER"], "PCI_BUS_ID");
        let uuid = |gpu: &cuda_cluster::topology::Gpu| gpu.uuid.as_ref().map(ToString::to_string);
        let mut mask: Vec<String> = machine.gpus.iter().filter_map(uuid).collect();
        mask.rotate_left(at);
        assert_eq!(worker["env"]["CUDA_VISIBLE_DEVICES"], mask.join(","));
    }
    assert_eq!(plan["notes"], serde_json::json!([]));
}

#[test]
fn a_machine_without_gpus_is_an_error_that_says_what_to_try() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("none.yaml");
    std::fs::write(&file, "version: 1\nname: bare\n").expect("written");
    let output = plan(&["--topology", file.to_str().expect("UTF-8")]);
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr);
    for part in ["bare has no NVIDIA GPU", "--topology dgx-h100", "--simulate", "doctor"] {
        assert!(error.contains(part), "{part:?} is missing in: {error}");
    }
    assert!(output.stdout.is_empty());
}

/// The output of `plan` for a person, without colours.
fn shown(arguments: &[&str]) -> String {
    let output = plan(arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

const DGX_1: [&str; 5] =
    ["--topology", "dgx-1-v100", "--enable-nvlink", "--enable-infiniband", "--gpus=0-3"];

#[test]
fn the_table_fits_a_page() {
    insta::assert_snapshot!(shown(&DGX_1));
}

#[test]
fn the_explanation_reads_like_an_expert() {
    let arguments = ["--topology", "dgx-a100", "--enable-infiniband", "--explain", "gpu5"];
    insta::assert_snapshot!(shown(&arguments));
}

#[test]
fn a_prediction_fits_a_page_and_names_what_limits() {
    for machine in ["dgx-1-v100", "l40s-8", "dgx-a100"] {
        let text = shown(&["--topology", machine, "--predict"]);
        let widest = text.lines().map(|line| line.chars().count()).max();
        assert!(widest <= Some(80), "{machine}: {widest:?}\n{text}");
        insta::assert_snapshot!(format!("prediction-{machine}"), text);
    }
}

#[test]
fn a_prediction_is_of_the_gpus_of_the_plan_and_says_its_version() {
    let answer = json(&["--topology", "dgx-h100", "--gpus=0,3", "--predict"]);
    assert_eq!(answer["version"], 1);
    let gpus: Vec<&Value> = answer["gpus"].as_array().expect("GPUs").iter().collect();
    assert_eq!(gpus.iter().map(|gpu| &gpu["gpu"]).collect::<Vec<_>>(), [0, 3]);
    let part = &answer["pairs"][0]["one_way"]["limited_by"];
    assert_eq!(part["name"], "18 NVLinks of gpu0 to the NVSwitches");
    let wrong = plan(&["--topology", "dgx-h100", "--predict", "-o", "yaml"]);
    assert_eq!(wrong.status.code(), Some(2));
}

#[test]
fn what_a_topology_does_not_tell_is_no_number() {
    let directory = tempfile::tempdir().expect("a directory");
    let machine = "version: 1\nname: two\ngpus:\n\
                   - {index: 0, uuid: GPU-00000000-0000-0000-0000-000000000000}\n\
                   - {index: 1, uuid: GPU-00000000-0000-0000-0000-000000000001}\n";
    let file = written(&directory, "two.yaml", machine);
    let text = shown(&["--topology", &file, "--predict"]);
    assert!(text.contains("?  every pair") && text.contains("Unknown (?)"), "{text}");
    let answer = json(&["--topology", &file, "--predict"]);
    assert!(answer["gpus"][0]["from_host"]["unknown"].is_string(), "{answer}");
}

#[test]
fn the_environment_is_what_a_shell_reads() {
    let text = shown(&[&DGX_1[..], &["-o", "env", "--process", "gpu2"]].concat());
    insta::assert_snapshot!(text);
    let script = format!("{text}\nprintf %s \"$CUDA_VISIBLE_DEVICES $UCX_NET_DEVICES\"");
    let shell = Command::new("sh").args(["-c", &script]).output().expect("a shell");
    let said = String::from_utf8_lossy(&shell.stdout);
    assert!(said.starts_with("GPU-4358b455-") && said.ends_with(" mlx5_1:1,lo"), "{said}");
}

#[test]
fn yaml_and_json_are_one_plan() {
    let arguments = ["--topology", "dgx-a100-mig", "--enable-infiniband"];
    let yaml = shown(&[&arguments[..], &["-o", "yaml"]].concat());
    let from_yaml: cuda_cluster::plan::Plan = serde_yaml::from_str(&yaml).expect("a plan");
    let from_json = serde_json::from_value(json(&arguments)).expect("a plan");
    assert_eq!(from_yaml, from_json);
}

#[test]
fn a_spec_names_its_machine() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("cluster.yaml");
    std::fs::write(&file, "version: 1\ntopology: rtx-4090-2\n").expect("written");
    let plan = json(&["-f", file.to_str().expect("UTF-8")]);
    assert_eq!(plan["machine"]["name"], "rtx-4090-2");
    assert_eq!(plan["workers"].as_array().map(Vec::len), Some(2));
}

#[test]
fn several_specs_are_merged_and_variables_put_in() {
    let directory = tempfile::tempdir().expect("a directory");
    let written = |name: &str, text: &str| written(&directory, name, text);
    let machine = cuda_cluster::topology::builtin("rtx-4090-2").expect("built in");
    written("machine.yaml", &machine.replace("name: rtx-4090-2", "name: beside"));
    let text = "version: 1\n$schema: any\nx-own: &own {A: 1.10}\ntopology: machine.yaml\n\
                threads: ${CUDA_CLUSTER_TEST_THREADS:-3}\nworkers: 2\n\
                worker: {env: {<<: *own, PATH: }}\nsupervision: {grace: 1m30s}\n";
    let first = written("first.yaml", text);
    let second = written("second.yaml", "version: 1\nworkers: 1\n");
    let plan = json(&["-f", &first, "-f", &second]);
    assert_eq!(plan["machine"]["name"], "beside", "a path is relative to its file");
    let check =
        Command::new(env!("CARGO_BIN_EXE_cuda-cluster")).args(["spec", "check", &first]).output();
    let said = String::from_utf8_lossy(&check.expect("the program runs").stdout).into_owned();
    assert!(said.contains("right; on beside: 2 native workers"), "{said}");
    assert_eq!(plan["workers"].as_array().map(Vec::len), Some(1), "the later file wins");
    let worker = &plan["workers"][0];
    assert_eq!((&worker["threads"], &worker["env"]["A"]), (&3.into(), &"1.10".into()));
    assert_eq!(worker["env"]["PATH"].as_str(), std::env::var("PATH").ok().as_deref());
    assert_eq!(plan["supervision"]["grace"], "90s");
    let third = written("third.yaml", "version: 1\nengin: dask\nucx: {nvlnk: true, tcp: maybe}\n");
    let output = self::plan(&["-f", &first, "-f", &third]);
    let error = String::from_utf8_lossy(&output.stderr);
    for part in ["engin: unknown key", "'nvlink'", "\"maybe\" is not true or false"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert_eq!(output.status.code(), Some(2));
}

/// What the table prints is what the engine is told.
#[test]
fn the_schedulers_address_is_the_engines_own() {
    let listens = |flags: &[&str]| {
        let text = shown(&[&["--topology", "dgx-1-v100"], flags].concat());
        let mut lines = text.lines().skip_while(|line| *line != "Scheduler");
        lines.nth(1).expect("a line about the scheduler").trim().to_owned()
    };
    assert_eq!(listens(&[]), "any CPU; a socket in the run directory");
    let dask = ["--engine", "dask"];
    assert_eq!(listens(&dask), "any CPU; 127.0.0.1; port 8786, or any free one");
    let flags = ["--engine", "dask", "--interface", "eth0", "--scheduler-port", "9000:9010"];
    assert_eq!(listens(&flags), "any CPU; interface eth0; the first free port of 9000 to 9010");
    let told = json(&[&["--topology", "dgx-1-v100"], &flags[..]].concat());
    let told = &told["engine"]["dask"];
    let expected = serde_json::json!([null, "eth0", "9000:9010", true]);
    let keys = ["host", "interface", "scheduler_ports", "scheduler_ports_required"];
    assert_eq!(serde_json::json!(keys.map(|key| &told[key])), expected);
}

#[test]
fn a_flag_beats_the_spec_and_the_plan_says_who_won() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("cluster.yaml");
    let text =
        "version: 1\nname: demo\nthreads: 2\nworkers: 4\nucx:\n  nvlink: true\n  tcp: true\n";
    std::fs::write(&file, text).expect("written");
    let file = file.to_str().expect("UTF-8");
    let plan = json(&[
        "-f",
        file,
        "--topology",
        "dgx-1-v100",
        "--nthreads=3",
        "--disable-nvlink",
        "--resources",
        "GPU=1 MEM=10e9",
    ]);
    assert_eq!(plan["name"], "demo");
    assert_eq!(plan["workers"].as_array().map(Vec::len), Some(4));
    assert_eq!(plan["workers"][0]["threads"], 3);
    assert_eq!(plan["workers"][0]["env"]["UCX_TLS"], "tcp,cuda_copy,posix,cma,self");
    let expected = serde_json::json!({
        "name": "spec", "workers": "spec", "ucx.tcp": "spec",
        "threads": "flag", "ucx.nvlink": "flag", "topology": "flag",
        "worker.resources.GPU": "flag", "worker.resources.MEM": "flag",
    });
    assert_eq!(plan["origins"], expected);
}

#[test]
fn what_is_wrong_is_refused_with_exit_code_2() {
    for (arguments, part) in [
        (&["--topology", "dgx-1-v100", "--net-devices", "mlx5_9:1"][..], "mlx5_0:1"),
        (&["--topology", "dgx-1-v100", "--gpus", "8"], "there is no GPU 8"),
        (&["--topology", "dgx-1-v100", "--n-workers", "9"], "9 GPUs are asked for"),
        (&["--topology", "dgx-1-v100", "--memory-limit", "much"], "'auto', 'none'"),
        (
            &["--topology", "dgx-1-v100", "--memory-limit", "20MB"],
            "does not hold the worker itself",
        ),
        (&["--topology", "dgx-1-v100", "--engine", "dsak"], "native dask command"),
        (&["--topology", "dgx-1-v100", "--explain", "gpu9"], "gpu0, gpu1"),
        (&["--topology", "dgx-1-v100", "--worker-port", "9000:9003"], "fewer ports"),
        (&["--topology", "dgx-1-v100", "--nthreads", "0"], "the least is 1"),
        (
            &["--topology", "l40s-8", "--enable-nvlink", "--strict"],
            "no two of the chosen GPUs of l40s-8",
        ),
        (
            &["--topology", "dgx-1-v100", "--enable-nvlink", "--rmm-managed-memory"],
            "managed memory cannot be shared over NVLink",
        ),
    ] {
        let output = plan(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {error}");
        assert!(error.contains(part), "{arguments:?}: {error}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
}

#[test]
fn the_schema_and_the_check_of_specs() {
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
        command.arg("spec").args(arguments).output().expect("the program runs")
    };
    let schema: Value = serde_json::from_slice(&run(&["schema"]).stdout).expect("JSON");
    assert!(schema["properties"]["engine"]["description"].is_string());
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/configs/");
    let right = format!("{folder}minimal.yaml");
    assert_eq!(run(&["check", &right]).status.code(), Some(0));
    let directory = tempfile::tempdir().expect("a directory");
    let wrong = directory.path().join("wrong.yaml");
    std::fs::write(&wrong, "version: 1\nengine: dsak\n").expect("written");
    let output = run(&["check", wrong.to_str().expect("UTF-8"), &right]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("did you mean 'dask'"));
    assert!(String::from_utf8_lossy(&output.stdout).contains("minimal.yaml: right"));
    let first = directory.path().join("first.yaml");
    let text = run(&["init", "--topology", "dgx-1-v100"]).stdout;
    assert!(String::from_utf8_lossy(&text).contains("8 x Tesla V100"));
    std::fs::write(&first, text).expect("written");
    let said = run(&["check", first.to_str().expect("UTF-8")]);
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("right; on dgx-1-v100: 8 native workers, 8 with a GPU"), "{said}");
}

#[test]
fn a_spec_is_checked_for_any_machine_with_its_notes_and_merged_with_others() {
    let directory = tempfile::tempdir().expect("a directory");
    let written = |name: &str, text: &str| written(&directory, name, text);
    let base = written("base.yaml", "version: 1\nucx: {infiniband: true, net_devices: auto}\n");
    let small = written("small.yaml", "version: 1\nworkers: 1\n");
    let check = |flags: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
        let output = command.args(["spec", "check"]).args(flags).output().expect("it runs");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let said = check(&[&base, &small, "--topology", "dgx-h100", "--merged"]);
    let first = "base.yaml: right; on dgx-h100: 8 native workers, 8 with a GPU\n  ucx.nvlink: not \
                 asked for";
    assert!(said.contains(first), "{said}");
    let together = "together: on dgx-h100: 1 native worker, 1 with a GPU\n";
    assert!(said.contains(together), "{said}");
    let merged = ["-f", &base, "-f", &small, "--topology", "dgx-h100"];
    assert_eq!(check(&merged), said, "as plan takes them");
    assert!(!check(&["-f", &base, "--topology", "dgx-h100"]).contains("together"));
}

#[test]
fn specs_that_contradict_each_other_only_together_are_wrong() {
    let directory = tempfile::tempdir().expect("a directory");
    let written = |name: &str, text: &str| written(&directory, name, text);
    let nvlink = written("nvlink.yaml", "version: 1\nengine: dask\nucx: {nvlink: true}\n");
    let managed = written("managed.yaml", "version: 1\nrmm: {managed: true}\n");
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    command.args(["spec", "check", "--topology", "dgx-h100", "-f", &nvlink, "-f", &managed]);
    let output = command.output().expect("it runs");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("managed memory cannot be shared over NVLink"), "{error}");
}

#[test]
fn a_checked_spec_is_told_which_of_its_paths_cannot_be_used_and_wrong_if_one_cannot_be_read() {
    let directory = tempfile::tempdir().expect("a directory");
    let spec = directory.path().join("spec.yaml");
    let text = "version: 1\ntopology: dgx-1-v100\nengine: dask\n\
                tls:\n  ca_file: ca.pem\n  cert: cert.pem\n  key: .\n\
                worker: {local_directory: ca.pem/below, pid_file: pid}\n\
                scheduler:\n  file: no/such/address.json\n\
                dask:\n  python: bin/python\n  preload: [mine.py, a.module]\n";
    std::fs::write(&spec, text).expect("written");
    std::fs::write(directory.path().join("ca.pem"), "").expect("written");
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    let output = command.args(["spec", "check"]).arg(&spec).output().expect("it runs");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("spec.yaml names 3 files that cannot be read"), "{error}");
    assert!(error.contains("hint: name a file that you may read"), "{error}");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let here = directory.path().display();
    let lines: Vec<&str> = said.lines().filter(|line| line.contains("cannot be")).collect();
    let beside = |name: &str| format!("{here}/{name}");
    for (at, key, path) in [
        ("6:3", "tls.cert", beside("cert.pem")),
        ("7:3", "tls.key", here.to_string()),
        ("10:3", "scheduler.file", beside("no/such/address.json")),
        ("12:3", "dask.python", beside("bin/python")),
        ("13:3", "dask.preload", beside("mine.py")),
    ] {
        let expected = format!("  {here}/spec.yaml:{at}: '{key}': {path} cannot be ");
        assert!(lines.iter().any(|line| line.starts_with(&expected)), "{expected}\n{said}");
    }
    let expected = format!("'worker.local_directory': nothing can be written into {here}/ca.pem");
    assert!(said.contains(&expected), "{said}");
    assert_eq!(said.lines().filter(|line| line.contains("spec.yaml:")).count(), 7, "{said}");

    for name in ["cert.pem", "mine.py"] {
        std::fs::write(directory.path().join(name), "").expect("written");
    }
    std::fs::write(&spec, text.replace("key: .", "key: ca.pem")).expect("written");
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuda-cluster"));
    let output = command.args(["spec", "check"]).arg(&spec).output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && said.contains("spec.yaml: right; "), "{output:?}");
    assert!(said.contains("bin/python cannot be run"), "it may be made: {said}");
}

#[test]
fn the_scheduler_is_explained_by_itself() {
    let output = plan(&["--topology", "dgx-h100", "--engine", "dask", "--explain=scheduler"]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("\nscheduler\n") && !said.contains("gpu0"), "{said}");
    assert!(said.contains("address  127.0.0.1; port 8786, or any free one"), "{said}");
    assert!(said.contains("loopback, because a scheduler runs the code"), "{said}");
    let asked = ["--host", "0.0.0.0", "--scheduler-port", "8786:8790", "--explain=scheduler"];
    let said = shown(&[&["--topology", "dgx-h100", "--engine", "dask"][..], &asked].concat());
    assert!(said.contains("0.0.0.0; the first free port of 8786 to 8790  asked for"), "{said}");
}

/// The scheduler's initial estimate of the links between workers: what good software measures on
/// such links, by NVLink generation and number, and for PCIe what it carries.
#[test]
fn workers_that_start_later_are_planned_after_the_best_connected_ones() {
    let machine = ["--topology", "dgx-1-v100", "--engine", "dask"];
    let names = |flags: &[&str]| -> Vec<String> {
        let plan = json(&[&machine[..], flags].concat());
        let workers = plan["workers"].as_array().expect("workers").iter();
        workers.map(|worker| worker["name"].as_str().expect("a name").to_owned()).collect()
    };
    let (few, all) = (names(&["--n-workers", "3"]), names(&["--start-workers", "3"]));
    assert_eq!((&all[..3], all.len()), (&few[..], 8));
    assert!(all[3..].is_sorted() && all[3..].iter().all(|name| !few.contains(name)), "{all:?}");
    let limit = |flags: &[&str]| {
        json(&[&machine[..], flags].concat())["workers"][0]["memory_limit_bytes"].clone()
    };
    assert_eq!(limit(&["--n-workers", "1"]), limit(&["--start-workers", "1"]));
    let said = plan(&[&machine[..], &["--start-workers", "9"]].concat());
    assert_eq!(said.status.code(), Some(2), "{said:?}");
}

#[test]
fn the_native_engine_is_told_what_the_links_should_carry() {
    let rates = |machine: &str| {
        let plan = json(&["--topology", machine]);
        let rates = &plan["engine"]["native"]["gb_per_s"]["gpu0"];
        rates.as_object().expect("rates to the others").clone()
    };
    let dgx_1 = rates("dgx-1-v100");
    assert_eq!((&dgx_1["gpu1"], &dgx_1["gpu3"]), (&Value::from(20.0), &Value::from(40.0)));
    assert_eq!(dgx_1["gpu5"], 10.0, "no NVLink, another NUMA node");
    assert_eq!(rates("dgx-1-p100")["gpu1"], 18.0);
    assert_eq!(rates("dgx-h100")["gpu7"], 360.0);
    assert_eq!(rates("gb200-nvl72-tray")["gpu3"], 720.0);
    let pcie = rates("rtx-4090-2")["gpu1"].as_f64().expect("a number");
    assert!((26.0..27.0).contains(&pcie), "PCIe 4.0 of sixteen lanes: {pcie}");
}
