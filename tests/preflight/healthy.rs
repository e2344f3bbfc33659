//! Machines that are well, and the traps in which others warned of nothing.

use cuda_cluster::topology::builtin_names;
use serde_json::json;

use crate::machine::on;

#[test]
fn nothing_is_said_of_any_built_in_machine() {
    for name in builtin_names() {
        let said = on(name).judged();
        assert!(said.bad().is_empty(), "{name}: {:#?}", said.bad());
    }
}

#[test]
fn nothing_is_said_of_them_with_everything_asked_for() {
    for name in
        ["dgx-h100", "dgx-b200", "gb200-nvl72-tray", "gb300-nvl72-tray", "gh200", "azure-ndv5"]
    {
        let said = on(name).asked(&["--enable-nvlink", "--enable-infiniband"]).doctor();
        assert!(said.bad().is_empty(), "{name}: {:#?}", said.bad());
    }
}

#[test]
fn an_idle_gpu_is_well() {
    // The generation falls at idle (nvtop#6, jan#183), not the width.
    let idle = on("dgx-h100").described(|it| {
        it.gpus.iter_mut().filter_map(|gpu| gpu.pcie.as_mut()).for_each(|link| {
            link.gt_per_s = Some(2.5);
        });
    });
    assert!(idle.judged().bad().is_empty());
    // A cap of power by software is set by people (azurehpc#595); 1 is idle, 4 the cap.
    let capped = on("dgx-h100").health(0, json!({"clocks_event_reasons": 5}));
    assert!(capped.judged().bad().is_empty());
}

#[test]
fn a_card_without_a_bridge_is_well() {
    // NVSentinel#1481: a card of four has none.
    let alone = on("a100-pcie-4-bridges").described(|it| {
        it.gpus[3].nvlinks.iter_mut().for_each(|link| link.active = false);
    });
    assert!(alone.judged().of("nvlinks-down").iter().all(|one| !one.is_bad()));
}

#[test]
fn machines_without_a_fabric_manager_of_their_own_are_well() {
    // gpud#1106, #1206: GH200 has no NVSwitch, and a tray's manager is elsewhere.
    for name in ["gh200", "gb200-nvl72-tray"] {
        let said = on(name).judged();
        let fabric = ["fabric-state", "subnet-manager", "fabric-clique"];
        assert!(said.bad().iter().all(|one| !fabric.contains(&one.id.as_str())), "{name}");
    }
    // torchcomms#1315: an H100 has a clique without any other machine.
    let clique = on("dgx-h100").described(|it| {
        it.gpus.iter_mut().filter_map(|gpu| gpu.fabric.as_mut()).for_each(|one| one.clique = 32766);
    });
    assert!(clique.judged().bad().is_empty());
}

#[test]
fn a_gpu_that_is_hidden_from_a_container_is_not_lost() {
    let place = on("dgx-h100");
    let gpu = place.gpu(7);
    let hidden = place.faults("forbidden=7").without(&format!("proc/driver/nvidia/gpus/{gpu}"));
    assert!(hidden.judged().of("gpus-missing").iter().all(|one| !one.is_bad()));
}

#[test]
fn what_cannot_be_looked_at_is_never_ok() {
    use cuda_cluster::preflight::Severity;
    let blind = on("dgx-h100")
        .without("proc/self/limits")
        .faults("unsupported=nvmlDeviceGetRemappedRows")
        .judged();
    for id in ["open-files", "locked-memory", "processes", "address-space"] {
        assert_eq!(blind.of(id)[0].severity, Severity::CannotTell, "{id}");
    }
    // What a GPU does not have is no finding.
    assert!(blind.of("row-remap").is_empty());
}
