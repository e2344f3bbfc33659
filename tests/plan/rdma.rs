//! What is planned where no RDMA port can be used, and where NICs have DMA functions.

use crate::compact::{caller_with, machine, planned, planned_by, spec};
use cuda_cluster::plan::Plan;
use cuda_cluster::topology::{DmaFunction, NicKind, PortState, Topology};

fn made(topology: &Topology, text: &str) -> Plan {
    planned(topology, &spec(text)).expect("a plan")
}

fn transports(plan: &Plan) -> Vec<&str> {
    plan.client_env["UCX_TLS"].split(',').collect()
}

/// A DGX H100 whose ports are all down.
fn unplugged() -> Topology {
    let mut machine = machine("dgx-h100");
    for port in machine.nics.iter_mut().flat_map(|nic| &mut nic.ports) {
        port.state = Some(PortState::Down);
    }
    machine
}

#[test]
fn rc_is_in_the_list_only_where_a_port_can_be_used() {
    let asked = "ucx: {infiniband: true}\n";
    for nowhere in [machine("rtx-4090-2"), unplugged()] {
        let plan = made(&nowhere, asked);
        assert!(!transports(&plan).contains(&"rc"), "{:?}", plan.client_env);
        let why = plan.workers[0].why.iter().find(|why| why.choice == "env.UCX_TLS");
        let rejected = &why.expect("a reason").rejected;
        let rc = rejected.iter().find(|one| one.what == "rc").expect("rc is rejected");
        assert_eq!(rc.why, "no InfiniBand or RoCE port can be used");
        let text = "asked for, but no InfiniBand or RoCE port can be used";
        assert!(plan.notes.iter().any(|note| note.text.starts_with(text)), "{:?}", plan.notes);
    }
    let mut one = unplugged();
    one.nics[0].ports[0].state = Some(PortState::Active);
    assert!(transports(&made(&one, asked)).contains(&"rc"));
    // dask-cuda's table knows nothing of ports.
    let compat = "engine: dask\nucx: {infiniband: true, compat: dask}\n";
    assert!(transports(&made(&unplugged(), compat)).contains(&"rc"));
}

#[test]
fn rc_stays_for_whoever_names_a_device() {
    let mut software = unplugged();
    software.nics.truncate(1);
    software.nics[0].kind = NicKind::Software;
    software.nics[0].ports[0].state = Some(PortState::Active);
    let named = format!("ucx: {{infiniband: true, net_devices: [{}]}}\n", software.nics[0].name);
    assert!(transports(&made(&software, &named)).contains(&"rc"));
    let caller = caller_with("UCX_NET_DEVICES", "mlx5_0:1");
    let plan = planned_by(&unplugged(), &spec("ucx: {infiniband: true}\n"), &caller);
    assert!(transports(&plan.expect("a plan")).contains(&"rc"));
}

#[test]
fn without_rdma_tcp_alone_stays_on_loopback_and_sets_connections_up() {
    let plan = made(&unplugged(), "ucx: {infiniband: true, tcp: true}\n");
    assert_eq!(plan.workers[0].env["UCX_NET_DEVICES"], "lo");
    let rdmacm = "engine: dask\nucx: {infiniband: true, rdmacm: true, tcp: false}\n";
    let plan = made(&unplugged(), rdmacm);
    assert!(transports(&plan).contains(&"tcp"), "{:?}", plan.client_env);
    assert_eq!(plan.client_env["UCX_SOCKADDR_TLS_PRIORITY"], "tcp");
    let plan = made(&machine("dgx-h100"), rdmacm);
    assert!(!transports(&plan).contains(&"tcp"));
    assert_eq!(plan.client_env["UCX_SOCKADDR_TLS_PRIORITY"], "rdmacm");
}

/// The tray, of whose NICs nobody tells where their DMA functions are.
fn untold() -> Topology {
    let mut tray = machine("gb300-nvl72-tray");
    for nic in &mut tray.nics {
        nic.dma = Some(DmaFunction::default());
    }
    tray.links = tray.derive_links();
    tray
}

fn nics(plan: &Plan) -> Vec<String> {
    let workers = plan.workers.iter();
    workers.flat_map(|worker| worker.nics.iter().map(|nic| nic.nic.clone())).collect()
}

#[test]
fn the_nic_of_a_gpu_is_that_whose_dma_function_is_beside_it() {
    let crossed = ["ibP2p3s0", "ibp3s0", "ibP18p3s0", "ibP16p3s0"];
    for mode in ["auto", "pin", "stripe"] {
        let text = format!("ucx: {{infiniband: true, net_devices: {mode}}}\n");
        let plan = made(&machine("gb300-nvl72-tray"), &text);
        assert_eq!(nics(&plan), crossed, "{mode}");
        let why = plan.workers[1].why.iter().find(|why| why.choice == "nic").expect("a reason");
        assert!(why.reason.contains("PXB by its DMA function 0009:03:00.0"), "{}", why.reason);
    }
    // Neither names nor the order in the file decide.
    let mut renamed = machine("gb300-nvl72-tray");
    renamed.nics.reverse();
    for (nic, name) in renamed.nics.iter_mut().zip(["a", "b", "c", "d"]) {
        nic.name = name.to_owned();
    }
    renamed.links = renamed.derive_links();
    assert_eq!(nics(&made(&renamed, "ucx: {infiniband: true}\n")), ["d", "a", "b", "c"]);
}

#[test]
fn nothing_is_pinned_where_nobody_tells_whose_the_dma_functions_are() {
    for mode in ["auto", "pin", "stripe"] {
        let text = format!("ucx: {{infiniband: true, net_devices: {mode}}}\n");
        let plan = made(&untold(), &text);
        assert!(nics(&plan).is_empty());
        assert!(plan.workers.iter().all(|worker| !worker.env.contains_key("UCX_NET_DEVICES")));
        assert!(transports(&plan).contains(&"rc"), "UCX uses them");
        let why = plan.workers[0].why.iter().find(|why| why.choice == "nic").expect("a reason");
        assert!(
            why.reason.starts_with("nobody tells where the DMA functions of ibP2p3s0"),
            "{why:?}"
        );
        let noted = |words: &str| plan.notes.iter().any(|note| note.text.contains(words));
        assert!(noted("nothing is pinned: UCX finds them itself from 1.20 on"), "{:?}", plan.notes);
    }
    // One of them is enough, because any GPU could be beside it.
    let mut one = machine("gb300-nvl72-tray");
    one.nics[3].dma = Some(DmaFunction::default());
    one.links = one.derive_links();
    assert!(nics(&made(&one, "ucx: {infiniband: true}\n")).is_empty());
    // Whoever names a NIC gets it, and nobody is bothered who asks for none.
    let named = "ucx: {infiniband: true, net_devices: ['ibp3s0:1']}\n";
    assert_eq!(nics(&made(&untold(), named)).len(), 4);
    let plain = made(&untold(), "ucx: {nvlink: true}\n");
    assert!(!plain.notes.iter().any(|note| note.text.contains("DMA")), "{:?}", plain.notes);
}

#[test]
fn a_ucx_that_does_not_use_dma_functions_is_noted() {
    let noted = |version: &str| {
        let text = format!("ucx: {{infiniband: true, version: '{version}'}}\n");
        let plan = made(&machine("gb300-nvl72-tray"), &text);
        assert_eq!(nics(&plan).len(), 4);
        plan.notes
            .iter()
            .any(|note| note.text.starts_with("UCX 1.19 does not use the DMA functions"))
    };
    assert!(noted("1.19") && !noted("1.20"));
}
