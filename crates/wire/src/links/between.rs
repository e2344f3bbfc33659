//! What carried bytes from a worker to one of another machine, beside what their plans name; and
//! whether workers with the same GPU have the same NIC on both.
//!
//! Pure. Each plan knows its own machine alone, so what is expected follows from the two ends.
//!
//! *Invariant:* `ok` is said only of bytes that have arrived unchanged, and whose way is known.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Serialize, Serializer};

/// Bytes on a planned port, as a share of those that came, that show that it carried them: some may
/// have come before it was read.
const SHARE: f64 = 0.9;

/// Lanes over RDMA begin so: `rc_mlx5/mlx5_0:1`, `dc_mlx5/…`, `ud_verbs/…`, `srd/…`.
const RDMA: [&str; 4] = ["rc_", "dc_", "ud_", "srd"];

/// A worker at an end of a connection between machines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct End {
    /// Its name: in its cluster, or for the scheduler that it has joined.
    pub name: String,
    /// Its machine's name, for people.
    pub host: String,
    /// Which machine that is; hosts may share a name.
    pub machine: String,
    /// What it has in common with workers of equal machines: its process's name, `gpu3`.
    pub place: String,
    /// Ports of the NICs that its plan names.
    pub nics: Vec<String>,
}

/// What has come.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Came {
    /// Bytes of all messages.
    pub bytes: u64,
    /// Those of them that were compared with what was sent.
    pub compared_bytes: u64,
    /// In 10⁹ bytes per second.
    pub gb_per_s: Option<f64>,
    /// What carried them, by the receiver's end of the connection.
    pub lanes: Vec<String>,
    /// What each planned port of the receiver that counts has received meanwhile.
    pub ports: BTreeMap<String, u64>,
    /// Why there is no better lane, if the receiver knows.
    pub cause: Option<String>,
}

/// How a pair compares with the plans of its ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// As planned.
    Ok,
    /// The bytes took another way than the planned one.
    BelowPlan(String),
    /// The bytes arrived, and nothing shows on which way.
    NotObserved(String),
    /// No bytes were seen to arrive.
    NotMeasured(String),
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Ok => f.write_str("ok"),
            Verdict::BelowPlan(why) => write!(f, "below plan: {why}"),
            Verdict::NotObserved(why) => write!(f, "not observed: {why}"),
            Verdict::NotMeasured(why) => write!(f, "not measured: {why}"),
        }
    }
}

impl Serialize for Verdict {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// One ordered pair of workers of two machines.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub from: String,
    pub from_host: String,
    pub to: String,
    pub to_host: String,
    /// The planned NIC ports of both.
    pub from_nics: Vec<String>,
    pub to_nics: Vec<String>,
    /// What should carry the bytes.
    pub expected: String,
    /// What carried them, as the receiver sees it.
    pub lanes: Vec<String>,
    /// Bytes that each planned port of the receiver has received meanwhile, where it counts.
    pub port_bytes: BTreeMap<String, u64>,
    /// Bytes that came, and how many of them were compared with what was sent.
    pub moved_bytes: u64,
    pub compared_bytes: u64,
    /// Bandwidth of the median round, in 10⁹ bytes per second.
    pub gb_per_s: Option<f64>,
    pub verdict: Verdict,
}

/// Judges what came from one end to another by a protocol of Dask.
pub fn row(protocol: &str, from: &End, to: &End, came: Result<Came, String>) -> Row {
    let expected = Expected::of(protocol, from, to);
    let (came, verdict) = match came {
        Ok(came) => {
            let verdict = expected.judge(&came);
            (came, verdict)
        }
        Err(why) => (Came::default(), Verdict::NotMeasured(why)),
    };
    Row {
        from: from.name.clone(),
        from_host: from.host.clone(),
        to: to.name.clone(),
        to_host: to.host.clone(),
        from_nics: from.nics.clone(),
        to_nics: to.nics.clone(),
        expected: expected.to_string(),
        lanes: came.lanes,
        port_bytes: came.ports,
        moved_bytes: came.bytes,
        compared_bytes: came.compared_bytes,
        gb_per_s: came.gb_per_s,
        verdict,
    }
}

/// What should carry bytes between two machines.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Expected {
    /// A protocol without UCX: its socket.
    Socket(&'static str),
    /// RDMA on these ports of the receiver, because both plans name NICs.
    Rdma(BTreeSet<String>),
    /// Only one end's plan names NICs.
    OneEnd(String),
    /// Whatever there is.
    Any,
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Expected::Socket(lane) => f.write_str(lane),
            Expected::Rdma(ports) => write!(f, "RDMA on {}", listed(ports)),
            Expected::OneEnd(_) => f.write_str("RDMA"),
            Expected::Any => f.write_str("any lane"),
        }
    }
}

fn listed<'a>(words: impl IntoIterator<Item = &'a String>) -> String {
    words.into_iter().map(String::as_str).collect::<Vec<_>>().join(", ")
}

impl Expected {
    fn of(protocol: &str, from: &End, to: &End) -> Self {
        match (protocol, from.nics.is_empty(), to.nics.is_empty()) {
            ("tcp", ..) => Expected::Socket("tcp"),
            ("tls", ..) => Expected::Socket("tls"),
            (_, true, true) => Expected::Any,
            (_, false, false) => Expected::Rdma(to.nics.iter().cloned().collect()),
            (_, without_from, _) => {
                let (with, without) = if without_from { (to, from) } else { (from, to) };
                let (nics, with, without) = (listed(&with.nics), &with.name, &without.name);
                Expected::OneEnd(format!("{nics} is planned for {with}, and no NIC for {without}"))
            }
        }
    }

    fn judge(&self, came: &Came) -> Verdict {
        let used = || came.lanes.join(" ");
        if came.bytes == 0 || came.compared_bytes == 0 {
            return Verdict::NotMeasured("nothing has come that was compared".to_owned());
        }
        if came.lanes.is_empty() {
            return Verdict::NotObserved("the receiver does not say what carried it".to_owned());
        }
        match self {
            Expected::Socket(lane) if came.lanes.iter().any(|used| used == lane) => Verdict::Ok,
            Expected::Socket(lane) => {
                Verdict::BelowPlan(format!("{lane} expected, {} used", used()))
            }
            Expected::OneEnd(why) => Verdict::BelowPlan(format!("{why}; {} used", used())),
            Expected::Any => Verdict::Ok,
            Expected::Rdma(ports) => by_rdma(ports, came),
        }
    }
}

/// Judges bytes that should have come by RDMA on these ports.
fn by_rdma(planned: &BTreeSet<String>, came: &Came) -> Verdict {
    let used = came.lanes.join(" ");
    let is_rdma = |lane: &&String| RDMA.iter().any(|name| lane.starts_with(name));
    let ports = |lane: &String| lane.split_once('/').map(|(_, port)| port.to_owned());
    let rails: BTreeSet<String> = came.lanes.iter().filter(is_rdma).filter_map(ports).collect();
    let expected = format!("RDMA on {} expected", listed(planned));
    if rails.is_empty() {
        let cause = came.cause.iter().map(|cause| format!(" because {cause}")).collect::<String>();
        return Verdict::BelowPlan(format!("{expected}, {used} used{cause}"));
    }
    if !rails.is_subset(planned) {
        return Verdict::BelowPlan(format!("{expected}, {used} used"));
    }
    let counted: Vec<u64> =
        planned.iter().filter_map(|port| came.ports.get(port)).copied().collect();
    let received = counted.iter().fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
    if counted.len() == planned.len() {
        let (bytes, enough) = (came.bytes, came.bytes as f64 * SHARE);
        if (received as f64) < enough {
            let why = format!("{expected}, which has received {received} of {bytes} bytes");
            return Verdict::BelowPlan(format!("{why}; UCX lists {used}"));
        }
        return Verdict::Ok;
    }
    match came.lanes.iter().find(|lane| !is_rdma(lane)) {
        Some(other) => Verdict::NotObserved(format!(
            "UCX lists {used}, and the ports count no bytes: {other} may have carried them"
        )),
        None => Verdict::Ok,
    }
}

/// Workers of two machines that have the same place, and whether their NICs are of one rail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Rail {
    /// The place: `gpu3`.
    pub worker: String,
    pub host: String,
    pub nics: Vec<String>,
    pub other_host: String,
    pub other_nics: Vec<String>,
    /// Whether both are of one rail.
    pub is_one: bool,
}

impl fmt::Display for Rail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { worker, host, nics, other_host, other_nics, .. } = self;
        let (nics, other) = (listed(nics), listed(other_nics));
        write!(f, "{worker} has {nics} on {host}, and {other} on {other_host}")
    }
}

/// Compares each machine's workers with those of the first one that has NICs planned: by the names
/// of their NICs, or by their order where no name is on both.
pub fn rails(ends: &[End]) -> Vec<Rail> {
    let planned: Vec<&End> = ends.iter().filter(|end| !end.nics.is_empty()).collect();
    let Some(first) = planned.first().map(|end| end.machine.as_str()) else { return Vec::new() };
    let of = |machine: &str| -> Vec<&End> {
        planned.iter().filter(|end| end.machine == machine).copied().collect()
    };
    let (ours, mut rails) = (of(first), Vec::new());
    let mut seen = BTreeSet::from([first]);
    for end in &planned {
        if !seen.insert(&end.machine) {
            continue;
        }
        let theirs = of(&end.machine);
        let (names, others) = (order(&ours), order(&theirs));
        let same_names = names.iter().any(|name| others.contains(name));
        for our in &ours {
            let Some(their) = theirs.iter().find(|their| their.place == our.place) else {
                continue;
            };
            let at = |order: &[&str], nics: &[String]| -> Vec<Option<usize>> {
                nics.iter().map(|nic| order.iter().position(|one| one == nic)).collect()
            };
            let is_one = match same_names {
                true => our.nics == their.nics,
                false => at(&names, &our.nics) == at(&others, &their.nics),
            };
            rails.push(Rail {
                worker: our.place.clone(),
                host: our.host.clone(),
                nics: our.nics.clone(),
                other_host: their.host.clone(),
                other_nics: their.nics.clone(),
                is_one,
            });
        }
    }
    rails
}

/// The NICs of workers, each once, in the order of their numbers.
fn order<'a>(ends: &[&'a End]) -> Vec<&'a str> {
    let all = ends.iter().flat_map(|end| &end.nics).map(String::as_str);
    let mut names: Vec<&str> = all.collect::<BTreeSet<&str>>().into_iter().collect();
    names.sort_by_key(|name| (name.len(), *name));
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(name: &str, machine: &str, nics: &[&str]) -> End {
        End {
            name: format!("{machine}-{name}"),
            host: machine.to_owned(),
            machine: machine.to_owned(),
            place: name.to_owned(),
            nics: nics.iter().map(|nic| (*nic).to_owned()).collect(),
        }
    }

    fn came(lanes: &str, ports: &[(&str, u64)]) -> Came {
        Came {
            bytes: 1000,
            compared_bytes: 500,
            lanes: lanes.split_whitespace().map(str::to_owned).collect(),
            ports: ports.iter().map(|(port, bytes)| ((*port).to_owned(), *bytes)).collect(),
            ..Came::default()
        }
    }

    fn judged(protocol: &str, from: &[&str], to: &[&str], came: Came) -> String {
        let (from, to) = (end("gpu0", "a", from), end("gpu0", "b", to));
        row(protocol, &from, &to, Ok(came)).verdict.to_string()
    }

    #[test]
    fn bytes_over_the_planned_nic_are_as_planned_and_others_are_not() {
        let nic: &[&str] = &["mlx5_0:1"];
        let of = |lanes: &str, ports: &[(&str, u64)]| judged("ucxx", nic, nic, came(lanes, ports));
        assert_eq!(of("rc_mlx5/mlx5_0:1", &[]), "ok", "nothing else can have carried them");
        assert_eq!(of("rc_mlx5/mlx5_0:1 tcp/eth0", &[("mlx5_0:1", 1040)]), "ok");
        assert_eq!(
            of("rc_mlx5/mlx5_0:1 tcp/eth0", &[]),
            "not observed: UCX lists rc_mlx5/mlx5_0:1 tcp/eth0, and the ports count no bytes: \
             tcp/eth0 may have carried them"
        );
        assert_eq!(
            of("rc_mlx5/mlx5_0:1 tcp/eth0", &[("mlx5_0:1", 12)]),
            "below plan: RDMA on mlx5_0:1 expected, which has received 12 of 1000 bytes; UCX lists \
             rc_mlx5/mlx5_0:1 tcp/eth0"
        );
        assert_eq!(
            of("rc_verbs/mlx5_3:1", &[("mlx5_0:1", 2000)]),
            "below plan: RDMA on mlx5_0:1 expected, rc_verbs/mlx5_3:1 used"
        );
        assert_eq!(of("tcp/eth0", &[]), "below plan: RDMA on mlx5_0:1 expected, tcp/eth0 used");
        assert!(of("", &[("mlx5_0:1", 2000)]).starts_with("not observed"));
    }

    #[test]
    fn rails_are_all_planned_ones_together() {
        let both: &[&str] = &["mlx5_0:1", "mlx5_1:1"];
        let of =
            |lanes: &str, ports: &[(&str, u64)]| judged("direct", both, both, came(lanes, ports));
        assert_eq!(
            of("rc_mlx5/mlx5_0:1 rc_mlx5/mlx5_1:1", &[("mlx5_0:1", 480), ("mlx5_1:1", 530)]),
            "ok"
        );
        assert!(of("rc_mlx5/mlx5_0:1 rc_mlx5/mlx5_2:1", &[]).starts_with("below plan"));
    }

    #[test]
    fn without_nics_in_both_plans_nothing_is_ok_by_silence() {
        assert_eq!(judged("tcp", &["mlx5_0:1"], &["mlx5_0:1"], came("tcp", &[])), "ok");
        assert_eq!(judged("direct", &[], &[], came("direct/tcp", &[])), "ok");
        assert_eq!(
            judged("direct", &["mlx5_0:1"], &[], came("direct/tcp", &[])),
            "below plan: mlx5_0:1 is planned for a-gpu0, and no NIC for b-gpu0; direct/tcp used"
        );
        assert!(judged("tcp", &[], &[], Came::default()).starts_with("not measured"));
        let (from, to) = (end("gpu0", "a", &[]), end("gpu0", "b", &[]));
        let failed = row("tcp", &from, &to, Err("it is gone".to_owned()));
        assert_eq!(
            (failed.verdict.to_string(), failed.moved_bytes),
            ("not measured: it is gone".to_owned(), 0)
        );
    }

    #[test]
    fn workers_of_one_place_should_have_nics_of_one_rail() {
        let told = |ends: &[End]| -> Vec<String> {
            rails(ends).iter().filter(|rail| !rail.is_one).map(Rail::to_string).collect()
        };
        let here = [end("gpu0", "a", &["mlx5_0:1"]), end("gpu1", "a", &["mlx5_1:1"])];
        let of = |machine: &str, nics: [&str; 2]| {
            [end("gpu0", machine, &nics[..1]), end("gpu1", machine, &nics[1..])]
        };
        let equal = [&here[..], &of("b", ["mlx5_0:1", "mlx5_1:1"])].concat();
        assert_eq!((rails(&equal).len(), told(&equal).len()), (2, 0));
        let crossed = [&here[..], &of("b", ["mlx5_1:1", "mlx5_0:1"])].concat();
        assert_eq!(told(&crossed)[0], "gpu0 has mlx5_0:1 on a, and mlx5_1:1 on b");
        let renamed = [&here[..], &of("b", ["ibp9s0:1", "ibp10s0:1"])].concat();
        assert!(told(&renamed).is_empty(), "by their order");
        let both = [&here[..], &of("b", ["ibp10s0:1", "ibp9s0:1"])].concat();
        assert_eq!(told(&both).len(), 2);
        assert!(rails(&[end("gpu0", "a", &[]), end("gpu0", "b", &[])]).is_empty());
    }
}
