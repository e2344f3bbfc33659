//! What is planned where no RDMA port can be used.

use crate::compact::{caller_with, machine, planned, planned_by, spec};
use cuda_cluster::plan::Plan;
use cuda_cluster::topology::{NicKind, PortState, Topology};

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
