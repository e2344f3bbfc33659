//! Which UCX variables scheduler, workers and clients get.
//!
//! Does not choose NICs; `nics` does.
//!
//! *Invariant:* all processes of a cluster get the same variables except `UCX_NET_DEVICES`. The
//! caller's value of a variable wins, then the spec's, then ours.

use std::collections::BTreeMap;

use super::advised;
use super::context::CallerEnvironment;
use super::form::Rejected;
use super::libucp;
use super::variables::{
    NET_DEVICES, PRIORITY, Situation, TLS, Variables, connects, is_rdma, is_used, may_use_tcp,
    protocol,
};
use crate::spec::{ClusterSpec, EngineKind, Origin, UcxCompat, UcxPreset, UcxSpec, UcxVersion};
use crate::topology::Note;

/// UCX's first version with `UCX_RNDV_PIPELINE_ERROR_HANDLING`, and with `UCX_RNDV_FRAG_MEM_TYPES`
/// in the plural (names in the released libraries 1.15 to 1.18, compared).
const NEW_NAMES_SINCE: UcxVersion = UcxVersion { major: 1, minor: 18 };

/// The oldest UCX known to crash without its registration cache (openucx/ucx#11467). No release
/// with the fix is known yet.
pub const NEEDS_CACHE_SINCE: UcxVersion = UcxVersion { major: 1, minor: 18 };

/// UCX's first version with Elastic Fabric Adapters' own transport, `srd`.
const SRD_SINCE: UcxVersion = UcxVersion { major: 1, minor: 19 };

/// UCX's first version that knows the GPUs of compute capability 10 (released sources, compared).
const KNOWS_BLACKWELL_SINCE: UcxVersion = UcxVersion { major: 1, minor: 19 };

/// 10⁹ bytes per second that UCX expects between GPUs that it does not know.
const UNKNOWN_GPU: f64 = 7.2;

/// Decides the variables that are common to all processes.
pub(super) fn variables(situation: &Situation<'_>) -> Variables {
    let mut variables = Variables::default();
    let spec = situation.spec;
    if is_used(spec, situation.engine) {
        if spec.ucx.compat == Some(UcxCompat::Dask) {
            as_dask_cuda_does(&spec.ucx, &situation.elastic, &mut variables);
        } else {
            our_own(situation, &mut variables);
        }
        libucp::choose(situation, &mut variables);
    }
    advised::heed(situation, &mut variables);
    for (name, value) in spec.ucx.env.iter().flatten() {
        variables.why.retain(|why| why.choice != format!("env.{name}"));
        variables.set(name, value, "set by 'ucx.env'");
    }
    callers_win(situation.caller, &mut variables);
    warn_of_missing_lanes(situation, &mut variables);
    warn_of_listeners(situation, &mut variables);
    warn_of_no_cache(situation, &mut variables);
    warn_of_expandable_segments(situation, &mut variables);
    variables
}

/// The given variables that switch UCX's registration cache off, with their values.
///
/// Without it UCX may crash when a peer is lost in the middle of a large message, because it
/// revokes the peer's access to memory through the missing cache (openucx/ucx#11467 names both
/// variables; #11485 has the fix).
pub fn without_cache(env: &BTreeMap<String, String>) -> impl Iterator<Item = (&str, &str)> {
    // The words that UCX reads as no, in upper or lower case.
    let no = |value: &str| ["n", "no", "0", "off"].contains(&value.to_ascii_lowercase().as_str());
    let named = ["UCX_RCACHE_ENABLE", "UCX_MEM_EVENTS"].into_iter();
    named.filter_map(move |name| Some((name, env.get(name).filter(|value| no(value))?.as_str())))
}

/// Notes that the registration cache is off, for engines whose workers outlive their peers.
fn warn_of_no_cache(situation: &Situation<'_>, variables: &mut Variables) {
    let version = situation.spec.ucx.version.or(situation.caller.ucx_version);
    let concerned = version.is_none_or(|version| version >= NEEDS_CACHE_SINCE);
    if !concerned || !is_used(situation.spec, situation.engine) {
        return;
    }
    let note = |(name, value): (&str, &str)| {
        let text = format!(
            "{value:?} leaves UCX without its registration cache: from UCX {NEEDS_CACHE_SINCE} on, \
             a worker may crash when a peer is lost in the middle of a large message \
             (openucx/ucx#11467); better unset it"
        );
        Note::new(name, text)
    };
    let notes: Vec<Note> = without_cache(&variables.env).map(note).collect();
    variables.notes.extend(notes);
}

/// Notes that PyTorch's memory cannot be shared: UCX has CUDA IPC for the driver's virtual memory
/// from 1.22 on, by file descriptors, and only if it is made for that (ai-dynamo/nixl#1754: 600
/// times slower, and nobody says so).
fn warn_of_expandable_segments(situation: &Situation<'_>, variables: &mut Variables) {
    // The native engine moves memory of its own pool.
    let theirs = situation.engine != EngineKind::Native;
    if !situation.gpus || !theirs || !is_used(situation.spec, situation.engine) {
        return;
    }
    for name in ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"] {
        let own = situation.spec.worker.env.as_ref().and_then(|env| env.get(name));
        let value = own.or_else(|| situation.caller.variables.get(name));
        if value.is_some_and(|value| value.to_ascii_lowercase().contains("expandable_segments:t")) {
            let text = "memory of PyTorch's expandable segments has no CUDA IPC here: between GPUs \
                        it goes through host memory";
            variables.notes.push(Note::new(name, text));
        }
    }
}

/// The three transports that flags switch, by dask-cuda's rule: if some are switched off and none
/// on, the rest is on. `None` if no list is needed.
fn switched(ucx: &UcxSpec) -> Option<(bool, bool, bool)> {
    let flags = [ucx.tcp, ucx.infiniband, ucx.nvlink];
    let any_on = flags.contains(&Some(true));
    let any_off = flags.contains(&Some(false));
    let all_off = flags.iter().all(|flag| *flag == Some(false));
    if !any_on && (!any_off || all_off) {
        return None;
    }
    let [tcp, infiniband, nvlink] = flags.map(|flag| flag.unwrap_or(!any_on));
    Some((tcp, infiniband, nvlink))
}

/// Exactly dask-cuda's table (facts §1): no list has shared memory, and each has TCP.
fn as_dask_cuda_does(ucx: &UcxSpec, elastic: &[String], variables: &mut Variables) {
    const REASON: &str = "as dask-cuda sets it ('ucx.compat: dask')";
    let Some((_, infiniband, nvlink)) = switched(ucx) else {
        variables.unset(TLS, "dask-cuda leaves it to UCX for these flags");
        return;
    };
    if infiniband && !elastic.is_empty() {
        let text = format!("{}, and dask-cuda's list no 'srd'", are_adapters(elastic));
        variables.notes.push(Note::new("ucx.infiniband", text));
    }
    let mut list = Vec::new();
    list.extend(infiniband.then_some("rc"));
    list.extend(["tcp", "cuda_copy"]);
    list.extend(nvlink.then_some("cuda_ipc"));
    variables.set(TLS, list.join(","), REASON);
    variables.set(PRIORITY, connection_manager(ucx), REASON);
}

fn connection_manager(ucx: &UcxSpec) -> &'static str {
    if ucx.rdmacm == Some(true) { "rdmacm" } else { "tcp" }
}

fn our_own(situation: &Situation<'_>, variables: &mut Variables) {
    let ucx = &situation.spec.ucx;
    transports(situation, variables);
    variables.set(
        "UCX_TCP_CM_REUSEADDR",
        "y",
        "a port that was in use a moment ago can be listened on again",
    );
    // Without these, endpoints with error handling silently fall back from shared memory to TCP
    // (facts §7): 3.5 instead of 12 GB/s.
    variables.set(
        "UCX_POSIX_ERROR_HANDLING",
        "y",
        "shared memory also for endpoints that notice a lost peer",
    );
    variables.set(
        "UCX_CMA_MEMORY_INVALIDATE",
        "y",
        "single-copy shared memory also for endpoints that notice a lost peer",
    );
    if ucx.preset.unwrap_or_default() == UcxPreset::Auto {
        presets(situation, variables);
    }
}

/// The transports of our list; `None` if UCX chooses among all that it has.
#[derive(Clone, Copy)]
struct Listed {
    tcp: bool,
    infiniband: bool,
    nvlink: bool,
    /// Whether InfiniBand is left out because no port of it can be used.
    rdma_missing: bool,
}

/// The transports that our list has besides shared memory.
///
/// All native workers are on one machine, where TCP carries nothing, so it is listed only on
/// request. The other engines' processes connect by address and port, or to other machines. `rdma`
/// says whether any RDMA port can be used: UCX warns of transports that it has no device for.
fn listed(spec: &ClusterSpec, engine: EngineKind, rdma: bool) -> Option<Listed> {
    let ucx = &spec.ucx;
    let all_off = [ucx.tcp, ucx.infiniband, ucx.nvlink].iter().all(|flag| *flag == Some(false));
    let switched = switched(ucx).or(all_off.then_some((false, false, false)));
    let native = engine == EngineKind::Native;
    let (infiniband, nvlink) = match switched {
        Some((_, infiniband, nvlink)) => (infiniband, nvlink),
        None if native => (false, true),
        None => return None,
    };
    let tcp = match engine {
        EngineKind::Native => ucx.tcp == Some(true),
        EngineKind::Dask if protocol(spec) == "direct" => {
            ucx.tcp.unwrap_or_else(|| direct_needs_tcp(spec, rdma))
        }
        // Dask connects by address and port, which takes TCP unless RDMA does it.
        EngineKind::Dask => ucx.tcp != Some(false) || ucx.rdmacm != Some(true) || !rdma,
        EngineKind::Command => ucx.tcp != Some(false),
    };
    Some(Listed { tcp, infiniband: infiniband && rdma, nvlink, rdma_missing: infiniband && !rdma })
}

/// Whether UCX needs TCP for `direct://`, which tells UCX's addresses in its own messages: for
/// device memory between machines without RDMA.
fn direct_needs_tcp(spec: &ClusterSpec, rdma: bool) -> bool {
    let may_leave_this_machine = spec.dask.join.is_some()
        || spec.scheduler.host.is_some()
        || spec.scheduler.interface.is_some();
    may_leave_this_machine && !rdma
}

/// Whether TCP is the only network transport and connects workers of one machine only, so that
/// loopback is enough.
pub(super) fn needs_loopback_alone(spec: &ClusterSpec, engine: EngineKind, rdma: bool) -> bool {
    let ours = spec.ucx.compat.is_none() && engine == EngineKind::Native;
    ours && listed(spec, engine, rdma).is_some_and(|listed| listed.tcp && !listed.infiniband)
}

/// Whether Elastic Fabric Adapters need `srd`; they have no reliable connections
/// (openucx/ucx#6882).
fn elastic_fabric(situation: &Situation<'_>, variables: &mut Variables) -> bool {
    if situation.elastic.is_empty() {
        return false;
    }
    let version = situation.spec.ucx.version.or(situation.caller.ucx_version);
    let adapters = are_adapters(&situation.elastic);
    let note = match version {
        Some(version) if version < SRD_SINCE => {
            Some(format!("{adapters}; UCX {version} cannot use them: 'srd' came with {SRD_SINCE}"))
        }
        Some(_) => None,
        None => Some(format!("{adapters} but 'srd', which UCX has from version {SRD_SINCE} on")),
    };
    variables.notes.extend(note.map(|text| Note::new("ucx.infiniband", text)));
    version.is_none_or(|version| version >= SRD_SINCE)
}

fn are_adapters(names: &[String]) -> String {
    let (verb, have) = match names.len() {
        1 => ("is an Elastic Fabric Adapter", "has"),
        _ => ("are Elastic Fabric Adapters", "have"),
    };
    format!("{} {verb}, which {have} no 'rc'", names.join(", "))
}

/// The list of transports: dask-cuda's, plus shared memory for traffic on this machine.
///
/// No list has System V segments: UCX makes them accessible to the user's group, while POSIX
/// segments are in a directory of the cluster's own.
fn transports(situation: &Situation<'_>, variables: &mut Variables) {
    let ucx = &situation.spec.ucx;
    let rdma = situation.rdma;
    let direct = situation.engine == EngineKind::Dask && protocol(situation.spec) == "direct";
    let Some(listed) = listed(situation.spec, situation.engine, rdma) else {
        if direct && !direct_needs_tcp(situation.spec, rdma) {
            let reason = "no transport is switched on or off: UCX takes the best it has, but for \
                          System V segments, which are open to the user's group, and TCP, on \
                          which it would listen to everybody, and which direct:// does not need";
            variables.set(TLS, "^sysv,tcp", reason);
        } else if situation.engine == EngineKind::Dask {
            let reason = "no transport is switched on or off: UCX takes the best it has, but for \
                          System V segments, which are open to the user's group";
            variables.set(TLS, "^sysv", reason);
        } else {
            let reason = "no transport is switched on or off: UCX takes the best it has";
            variables.unset(TLS, reason);
        }
        return;
    };
    let Listed { tcp, infiniband, nvlink, rdma_missing } = listed;
    let mut list = Vec::new();
    let mut parts = Vec::new();
    if infiniband {
        let srd = elastic_fabric(situation, variables);
        if srd {
            list.push("srd");
            parts.push("srd: Elastic Fabric Adapters");
        }
        if !srd || situation.other_nics {
            list.push("rc");
            parts.push("rc: InfiniBand or RoCE");
        }
    }
    if tcp {
        list.push("tcp");
        parts.push("tcp: connections, and host memory where nothing better reaches");
        if ucx.tcp == Some(false) {
            variables.notes.push(Note::new(
                "ucx.tcp",
                "TCP stays, because Dask sets its connections up over it; data prefers other lanes",
            ));
        }
    }
    if situation.gpus {
        list.push("cuda_copy");
        parts.push("cuda_copy: between host and device");
    }
    if nvlink && situation.gpus && situation.all_mig && ucx.nvlink.is_some() {
        let text = "MIG instances have no CUDA IPC, so 'cuda_ipc' will find no lane";
        variables.notes.push(Note::new(TLS, text));
    }
    if nvlink && situation.gpus && (ucx.nvlink.is_some() || !situation.all_mig) {
        list.push("cuda_ipc");
        parts.push("cuda_ipc: NVLink or PCIe between GPUs");
    } else if ucx.nvlink.is_none() && situation.nvlink == Some(true) {
        let text = "not asked for, so 'cuda_ipc' is left out, though GPUs here are joined by \
                    NVLink: 'ucx.nvlink: true' uses it";
        variables.notes.push(Note::new("ucx.nvlink", text));
    }
    list.extend(["posix", "cma", "self"]);
    parts.push("posix,cma,self: host memory within this machine");
    let mut rejected = vec![Rejected {
        what: "sysv".to_owned(),
        why: "its segments are open to the user's group".to_owned(),
    }];
    if rdma_missing {
        let why = "no InfiniBand or RoCE port can be used".to_owned();
        rejected.push(Rejected { what: "rc".to_owned(), why });
    }
    if !tcp {
        let why = match situation.engine {
            EngineKind::Native => {
                "shared memory reaches every worker, and any user of this machine could connect \
                 to a listener"
            }
            EngineKind::Dask if direct => {
                "direct:// does not need it, and any user of this machine could connect to a \
                 listener"
            }
            _ => "switched off",
        };
        rejected.push(Rejected { what: "tcp".to_owned(), why: why.to_owned() });
    }
    variables.set(TLS, list.join(","), parts.join("; "));
    if let Some(why) = variables.why.last_mut() {
        why.rejected = rejected;
    }
    if tcp || ucx.rdmacm == Some(true) {
        let (manager, reason) = match ucx.rdmacm {
            Some(true) if rdma => ("rdmacm", "connections are set up over RDMA, as asked for"),
            Some(true) => ("tcp", "connections are set up over TCP: no RDMA port can be used"),
            _ => ("tcp", "connections are set up over TCP"),
        };
        variables.set(PRIORITY, manager, reason);
    }
}

/// Notes who can reach the TCP listeners of UCX. They have no authentication, and a few bytes with
/// the right prefix end the process by an assertion in UCX (seen in 1.13).
///
/// No objection under `strict`: TCP was requested, or Dask needs it.
fn warn_of_listeners(situation: &Situation<'_>, variables: &mut Variables) {
    let engine = situation.engine;
    if engine == EngineKind::Command || !is_used(situation.spec, engine) {
        return;
    }
    if !may_use_tcp(&variables.env) {
        return;
    }
    let devices = variables.env.get(NET_DEVICES).map(String::as_str);
    let who = match devices {
        Some("lo") => "every user of this machine",
        None if needs_loopback_alone(situation.spec, engine, situation.rdma) => {
            "every user of this machine"
        }
        _ => "every user of this machine, and whoever reaches its network interfaces,",
    };
    // Whoever speaks Dask over UCX is a client like any other.
    let can = if connects(situation.spec, engine) {
        "can run code as this user"
    } else {
        "can end a worker with a few bytes"
    };
    let text = format!("UCX listens on TCP ports without authentication: {who} {can}");
    variables.told.push(Note::new(TLS, text));
}

/// Settings that depend on what the machine is.
fn presets(situation: &Situation<'_>, variables: &mut Variables) {
    let spec = situation.spec;
    let version = spec.ucx.version.or(situation.caller.ucx_version);
    let older = version.filter(|version| *version < NEW_NAMES_SINCE);
    if situation.gpus {
        // With error handling, UCX refuses pipelines otherwise, and copies device memory that peers
        // cannot access in pieces of 8 KiB (`ucp_proto_common_init_check_err_handling`).
        const NAME: &str = "UCX_RNDV_PIPELINE_ERROR_HANDLING";
        let reason = "pipelined transfers of device memory stay available with error handling";
        match older {
            Some(version) => variables.unset(NAME, format!("UCX {version} does not know it yet")),
            None => variables.set(NAME, "y", reason),
        }
    }
    registration(situation, variables);
    speed_of_peers(situation, variables);
    let pools = situation.engine == EngineKind::Dask;
    if pools && (spec.rmm.asynchronous == Some(true) || spec.rmm.managed == Some(true)) {
        let name =
            if older.is_some() { "UCX_RNDV_FRAG_MEM_TYPE" } else { "UCX_RNDV_FRAG_MEM_TYPES" };
        variables.set(
            name,
            "cuda",
            "RMM makes asynchronous and managed pools that cannot be shared directly: staged in \
             device memory",
        );
    }
    if situation.rails > 1 {
        let rails = situation.rails.to_string();
        let reason = format!("a large message is spread over all {rails} NICs of a worker");
        variables.set("UCX_MAX_RNDV_RAILS", rails, reason);
    }
}

/// How much of a GPU's memory UCX registers with a NIC at once. By default pools above a tenth of
/// it are registered message by message, because small windows (BAR1) do not hold more.
///
/// ucxx decides the same by asking NVML when it is imported, and keeps NVML open, so that nobody
/// could be forked after it; it does not if it finds the variable.
fn registration(situation: &Situation<'_>, variables: &mut Variables) {
    const NAME: &str = "UCX_CUDA_COPY_MAX_REG_RATIO";
    let ucxx = situation.engine == EngineKind::Dask && protocol(situation.spec).starts_with("ucx");
    match situation.large_windows.filter(|_| situation.gpus) {
        Some(true) if ucxx || situation.rdma => {
            let reason = "each GPU's BAR1 is as large as its memory: pools are registered once";
            variables.set(NAME, "1.0", reason);
        }
        _ if ucxx && situation.gpus => {
            let reason = "UCX's own; written down, so that ucxx does not open NVML to decide it";
            variables.set(NAME, "0.1", reason);
        }
        _ => {}
    }
}

/// What UCX believes that GPUs copy between each other, where it takes them for far slower than
/// their links, and would choose a NIC instead (`uct_cuda_ipc_iface_get_bw`).
fn speed_of_peers(situation: &Situation<'_>, variables: &mut Variables) {
    let version = situation.spec.ucx.version.or(situation.caller.ucx_version);
    let is_known = |major: u32| match major {
        6..=9 => true,
        10 => version.is_some_and(|version| version >= KNOWS_BLACKWELL_SINCE),
        _ => false,
    };
    // One figure serves all of a process's peers: that of the fastest link of such a GPU.
    let rates = situation.peers.iter().filter(|peers| {
        peers.majors.iter().any(|major| major.is_some_and(|major| !is_known(major)))
    });
    let rate = rates.map(|peers| peers.gb_per_s).max_by(f64::total_cmp);
    if let Some(rate) = rate.filter(|rate| *rate > 2.0 * UNKNOWN_GPU) {
        let reason = format!(
            "UCX takes GPUs that it does not know for slow ones ({UNKNOWN_GPU} GB/s): these copy \
             about {rate:.0} GB/s between each other"
        );
        let mebibytes = (rate * 1e9 / f64::from(1 << 20)).round();
        variables.set("UCX_CUDA_IPC_BW", format!("{mebibytes}MBs"), reason);
    }
}

/// The variables that the caller has exported win.
fn callers_win(caller: &CallerEnvironment, variables: &mut Variables) {
    for (name, value) in &caller.variables {
        if !(name.starts_with("UCX_") || name.starts_with("UCXPY_")) {
            continue;
        }
        let ours = variables.env.get(name).cloned();
        if let Some(ours) = ours.filter(|ours| ours != value) {
            let text =
                format!("{value:?} from the caller's environment stands instead of {ours:?}");
            variables.notes.push(Note::new(name, text));
        }
        variables.why.retain(|why| why.choice != format!("env.{name}"));
        variables.set(name, value, "set in the caller's environment, which wins");
        variables.origins.insert(format!("env.{name}"), Origin::Environment);
    }
}

/// Notes that a list leaves a kind of connection without a transport.
fn warn_of_missing_lanes(situation: &Situation<'_>, variables: &mut Variables) {
    let compat = situation.spec.ucx.compat == Some(UcxCompat::Dask);
    let Some(list) = variables.env.get(TLS).cloned() else { return };
    // A list that begins with `^` names the excluded transports.
    if list.starts_with('^') || list == "all" || !is_used(situation.spec, situation.engine) {
        return;
    }
    let has = |names: &[&str]| list.split(',').any(|lane| names.contains(&lane.trim()));
    let mut warn = |text: &str| variables.notes.push(Note::new(TLS, format!("{list:?} {text}")));
    let network = has(&["tcp", "all"]) || list.split(',').any(|lane| is_rdma(lane.trim()));
    let memory = ["sm", "shm", "mm", "posix", "sysv", "all"];
    if connects(situation.spec, situation.engine)
        && !has(&["tcp", "all"])
        && situation.spec.ucx.rdmacm != Some(true)
    {
        warn("has no 'tcp': Dask cannot set its connections up");
    } else if !network && !has(&memory) {
        warn("has no transport for messages between processes: workers cannot connect");
    } else if !has(&memory) && !compat {
        warn(
            "has no shared memory ('sm'): host memory within this machine takes the network's way",
        );
    }
    if situation.gpus && !has(&["cuda_copy", "cuda", "all"]) {
        warn("has no 'cuda_copy': device memory goes through host memory");
    }
}
