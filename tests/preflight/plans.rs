//! Findings for a plan: exit codes, plans from files, `up --preflight`, settings for others.

use cuda_cluster::preflight::{Severity, checks};
use serde_json::{Value, json};

use crate::machine::{Place, on};

fn broken() -> Place {
    on("dgx-h100").health(6, json!({"recovery_action": 1}))
}

fn run(place: &Place, arguments: &[&str]) -> (Option<i32>, String, String) {
    let folder = tempfile::tempdir().expect("a directory");
    let fake = place.write(folder.path());
    let output = fake.command().args(arguments).output().expect("it runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn an_error_for_the_plan_is_exit_4_and_one_beside_it_is_none() {
    // Without libcuda, CUDA is an error of its own.
    let here = |said: &crate::machine::Said| {
        let own = said.findings.iter().filter(|one| one.severity == Severity::Error);
        own.map(|one| one.id.clone()).collect::<Vec<_>>()
    };
    let said = broken().doctor();
    assert_eq!(said.code, Some(4));
    assert!(here(&said).contains(&"recovery-action".to_owned()), "{said:#?}");
    let beside = broken().asked(&["--gpus", "0-3"]).doctor();
    assert!(!here(&beside).contains(&"recovery-action".to_owned()));
    let note = beside.of("recovery-action");
    assert_eq!(note[0].severity, Severity::Note, "{note:#?}");
}

#[test]
fn a_plan_from_a_file_is_judged() {
    let folder = tempfile::tempdir().expect("a directory");
    let (code, plan, errors) = run(&on("dgx-h100"), &["plan", "--gpus", "6", "-o", "yaml"]);
    assert_eq!(code, Some(0), "{errors}");
    let file = folder.path().join("plan.yaml");
    std::fs::write(&file, plan).expect("written");
    let said = broken().asked(&["--plan", file.to_str().expect("UTF-8")]).doctor();
    assert_eq!(said.of("recovery-action")[0].concerns, ["gpu6"]);
    assert_eq!(said.document["plan"]["workers"], json!(["gpu6"]));
}

#[test]
fn a_plan_for_the_gpus_of_another_machine_is_exit_4() {
    let folder = tempfile::tempdir().expect("a directory");
    let (code, plan, errors) = run(&on("dgx-h100"), &["plan", "-o", "yaml"]);
    assert_eq!(code, Some(0), "{errors}");
    let file = folder.path().join("plan.yaml");
    std::fs::write(&file, plan).expect("written");
    let said = on("l40s-8").asked(&["--plan", file.to_str().expect("UTF-8")]).doctor();
    assert_eq!(said.code, Some(4));
    let [finding] = said.of("plan")[..] else { panic!("one finding: {said:#?}") };
    assert_eq!(finding.severity, Severity::Error);
    assert!(finding.text.contains("are not in this machine"), "{finding:#?}");
}

#[test]
fn up_tells_what_is_bad_and_preflight_refuses() {
    let dry = ["up", "--preflight", "--name", "preflight-refuses", "--detach"];
    let (code, output, errors) = run(&broken(), &dry);
    assert_eq!(code, Some(4), "{output}{errors}");
    for part in ["recovery-action", "GPU6", "the driver wants a reset of the GPU"] {
        assert!(errors.contains(part), "{part:?}: {errors}");
    }
    assert!(!output.contains("READY"));
}

#[test]
fn other_launchers_can_ask_for_settings() {
    let place = on("l40s-8");
    let gpu = place.gpu(0);
    let place = place.function(&gpu, "iommu_group/type", "DMA\n");
    let (code, text, errors) = run(&place, &["doctor", "--for", "nccl", "-o", "json"]);
    assert_eq!(code, Some(0), "{errors}");
    let document: Value = serde_json::from_str(&text).expect("JSON");
    let first = &document["settings"][0];
    assert_eq!((&first["name"], &first["value"]), (&json!("NCCL_P2P_LEVEL"), &json!("NVL")));
    assert_eq!(first["id"], "iommu");
    let (_, text, _) = run(&place, &["doctor", "--for", "ucx"]);
    assert!(
        text.contains("export UCX_TLS='^cuda_ipc'") || text.contains("export UCX_TLS=^cuda_ipc"),
        "{text}"
    );
    let (_, text, _) = run(&on("dgx-h100"), &["doctor", "--for", "vllm"]);
    assert_eq!(text, "# nothing is to be set\n");
}

#[test]
fn every_check_has_a_page() {
    let (code, list, _) = run(&on("gh200"), &["doctor", "--explain"]);
    assert_eq!(code, Some(0));
    assert!(checks().count() >= 50, "{}", checks().count());
    let mut names = std::collections::BTreeSet::new();
    for check in checks() {
        assert!(names.insert(check.id), "{} is there twice", check.id);
        assert!(list.contains(check.id), "{}", check.id);
        assert!(!check.title.is_empty() && !check.looks_at.is_empty(), "{}", check.id);
    }
    let (code, page, _) = run(&on("gh200"), &["doctor", "--explain", "acs"]);
    assert_eq!(code, Some(0));
    for part in ["looks at", "if bad", "source", "do "] {
        assert!(page.contains(part), "{part:?}: {page}");
    }
    let (code, _, errors) = run(&on("gh200"), &["doctor", "--explain", "asc"]);
    assert_eq!(code, Some(2));
    assert!(errors.contains("did you mean 'acs'?"), "{errors}");
}

#[test]
fn a_topology_is_refused_with_what_to_do() {
    let (code, _, errors) = run(&on("gh200"), &["doctor", "--topology", "dgx-h100"]);
    assert_eq!(code, Some(2));
    assert!(errors.contains("--evidence"), "{errors}");
}

#[test]
fn programs_get_what_is_advised_with_its_reason_and_the_users_own_stays() {
    let translated = || {
        let place = on("l40s-8");
        let gpu = place.gpu(0);
        place.function(&gpu, "iommu_group/type", "DMA\n")
    };
    let plan = ["plan", "--engine", "command", "-o", "json"];
    let environment = |place: &Place, arguments: &[&str]| -> Value {
        let (code, text, errors) = run(place, arguments);
        assert_eq!(code, Some(0), "{errors}");
        let plan: Value = serde_json::from_str(&text).expect("JSON");
        plan["workers"][0].clone()
    };
    let worker = environment(&translated(), &plan);
    assert_eq!(worker["env"]["NCCL_P2P_LEVEL"], "NVL", "{worker:#}");
    let why = worker["why"].as_array().expect("reasons").iter();
    let why = why.clone().find(|why| why["choice"] == "env.NCCL_P2P_LEVEL").expect("a reason");
    let reason = why["reason"].as_str().expect("a text");
    assert!(reason.contains("doctor --explain iommu"), "{reason}");
    // Other GPUs, other engines, and what the user has set.
    let beside = environment(&translated(), &[&plan[..], &["--gpus", "2,3"]].concat());
    assert!(beside["env"].get("NCCL_P2P_LEVEL").is_none(), "{beside:#}");
    let native = environment(&translated(), &["plan", "-o", "json"]);
    assert!(native["env"].get("NCCL_P2P_LEVEL").is_none(), "{native:#}");
    let well = environment(&on("l40s-8"), &plan);
    assert!(well["env"].get("NCCL_P2P_LEVEL").is_none(), "{well:#}");
    let folder = tempfile::tempdir().expect("a directory");
    let fake = translated().write(folder.path());
    let mut command = fake.command();
    let output = command.args(plan).env("NCCL_P2P_LEVEL", "SYS").output().expect("it runs");
    let plan: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_ne!(plan["workers"][0]["env"]["NCCL_P2P_LEVEL"], "NVL", "{plan:#}");
}
