//! Which wire the bytes of a job took, and why not the fast one: from the lines that NCCL and UCX
//! write, and from the answers of NCCL's RAS.
//!
//! Finds no lines itself: it is given text.
//!
//! *Invariant:* any text has a reading, and the channels do not depend on the order in which the
//! lines of different ranks came.

mod cause;
mod channel;
mod judge;
mod lines;
mod nccl;
pub mod ras;
mod signs;
mod ucx;

use serde::{Deserialize, Serialize};

pub use cause::{Cause, Found};
pub use channel::{BetweenGpus, Channel, Who, grouped};

/// What was read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Wires {
    /// Who sends to whom by what, in order and each once.
    pub channels: Vec<Channel>,
    /// The wires between GPUs, where the lines name them; each once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub between_gpus: Vec<BetweenGpus>,
    /// What is wrong, the weightiest first; each cause once.
    pub causes: Vec<Found>,
    /// What is not wrong, but good to know.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// The most machines of a communicator, where a line says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machines: Option<u32>,
    /// What RAS has answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ras: Option<ras::Status>,
    /// Lines that say something that we know.
    pub understood: usize,
    /// Lines of NCCL or UCX that say something that we don't know.
    pub not_understood: usize,
}

impl Wires {
    /// Whether there was any line of NCCL, RAS or UCX.
    pub fn any(&self) -> bool {
        self.understood > 0 || self.not_understood > 0 || self.ras.is_some()
    }
}

/// Reads the lines of one job, of any number of its processes.
pub fn read(text: &str) -> Wires {
    let lines = lines::lines(text);
    let mut job = judge::Job::default();
    let (mut understood, mut not_understood) = (0, 0);
    for line in &lines {
        for record in lines::records(line) {
            let sign = signs::sign(&record);
            let known = [
                sign.is_some(),
                job.nccl.see(&record),
                job.ucx.see(&record),
                lines::is_usual(&record),
            ];
            if let Some(cause) = sign.or_else(|| job.ucx.failed(&record)) {
                job.found(cause, record.whole);
            }
            match known.contains(&true) {
                true => understood += 1,
                false if record.speaks() => not_understood += 1,
                false => {}
            }
        }
    }
    job.ras = ras::parse(text);
    let channels = job.channels();
    let (causes, notes) = (job.causes(&channels), job.notes(&channels));
    let machines = Some(job.nccl.nodes).filter(|nodes| *nodes > 0);
    let between_gpus = job.nccl.between_gpus().into_iter().collect();
    let ras = job.ras;
    Wires { channels, between_gpus, causes, notes, machines, ras, understood, not_understood }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What lines are made of, also in the wrong places.
    fn piece() -> impl Strategy<Value = String> {
        let known = [
            "node-a:11:21 [0] NCCL INFO ",
            "NCCL WARN ",
            "Channel 00/0 : 0[0] -> 1[1] ",
            "CollNet 00/0 : 3 [send] via COLLNET/SHARP/0/GDRDMA(PCI)",
            " [receive] via NET/IB/",
            "via",
            "NET/IB : Using [0]={[0] mlx5_0:1/IB, [1]",
            " [1]eth0:192.0.2.1<0>; OOB ",
            "4294967296",
            "[1.5] [node-a:101:0] ucp_worker.c:1 UCX  INFO  x inter-node cfg#",
            "ep_cfg[1]: tag(tcp/eth0 ",
            "| x intra-node cfg#1 | y |",
            "| 0..inf | z | 50% on rc/mlx5_0:1 |",
            "lane[0]:  0:self/memory.0 ",
            "Job summary\n#0-0 (1) MISMATCH\n  Rank 1 -- GPU 0 managed by process 1 on node n\n",
            "\u{1b}[3",
            "é→",
            "\n",
        ];
        prop_oneof![
            proptest::sample::select(known.to_vec()).prop_map(str::to_owned),
            "[ -~]{0,12}",
            any::<String>(),
        ]
    }

    /// A line of a rank on one of three machines, which has two NICs.
    fn line() -> impl Strategy<Value = String> {
        (0..3u32, 0..6u32, 0..6u32, 0..5usize, any::<bool>()).prop_map(
            |(host, from, to, wire, sends)| {
                let way = if sends { "send" } else { "receive" };
                let said = match wire {
                    0 => "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0".to_owned(),
                    1 => format!("Channel 01/0 : {from}[0] -> {to}[0] via P2P/CUMEM/read"),
                    2 => format!("Channel 00 : {from}[1] -> {to}[1] via SHM/direct/direct"),
                    _ => {
                        let device = wire - 3;
                        format!("Channel 0/0 : {from}[1] -> {to}[1] [{way}] via NET/IB/{device}")
                    }
                };
                format!("node-{host}:1{host}:2 [0] NCCL INFO {said}")
            },
        )
    }

    proptest! {
        #[test]
        fn any_text_has_a_reading(pieces in proptest::collection::vec(piece(), 0..24)) {
            let wires = read(&pieces.concat());
            let text = serde_json::to_string(&wires).expect("it has a text form");
            let again: Wires = serde_json::from_str(&text).expect("and is read from it");
            prop_assert_eq!(again, wires.clone());
            let _ = grouped(&wires.channels);
            prop_assert!(wires.causes.windows(2).all(|two| two[0].cause < two[1].cause));
        }

        #[test]
        fn the_order_of_the_ranks_lines_changes_no_channel(
            (lines, mixed) in proptest::collection::vec(line(), 0..24)
                .prop_flat_map(|lines| (Just(lines.clone()), Just(lines).prop_shuffle())),
        ) {
            prop_assert_eq!(read(&lines.join("\n")).channels, read(&mixed.join("\n")).channels);
        }

        #[test]
        fn tables_of_two_processes_may_be_mixed(turns in proptest::collection::vec(any::<bool>(), 6)) {
            let table = |process: u32, device: &str| {
                let name = format!("[1.5] [n:{process}:0]");
                vec![
                    format!("{name} | x inter-node cfg#1 | remote memory write |"),
                    format!("{name} | 0..10 | short | rc_mlx5/{device} |"),
                    format!("{name} | 11..inf | zero-copy | rc_mlx5/{device} |"),
                ]
            };
            let (mut one, mut two) = (table(1, "mlx5_0:1"), table(2, "mlx5_1:1"));
            let apart = read(&[one.clone(), two.clone()].concat().join("\n")).channels;
            let mut mixed = Vec::new();
            for turn in turns {
                let from = if turn { &mut one } else { &mut two };
                if !from.is_empty() {
                    mixed.push(from.remove(0));
                }
            }
            mixed.extend(one.into_iter().chain(two));
            prop_assert_eq!(read(&mixed.join("\n")).channels, apart.clone());
            prop_assert_eq!(apart.len(), 2);
        }
    }

    #[test]
    fn a_table_about_another_machine_with_tcp_alone_is_slow() {
        let table = "[1.5] [n:1    :0]  | perftest inter-node cfg#0      |\n\
                     [1.5] [n:1    :0]  |   0 | eager short | tcp/eth0 |\n\
                     [1.5] [n:1    :0]  | 1..inf | rendezvous | 52% on tcp/eth0 and 48% on WIRE |\n";
        let found = |wire: &str| read(&table.replace("WIRE", wire)).causes;
        assert_eq!(found("tcp/eth1")[0].cause, Cause::TcpOnly);
        assert_eq!(found("rc_mlx5/mlx5_0:1"), []);
    }

    #[test]
    fn a_peer_that_no_transport_reaches_is_unreachable_in_all_words() {
        let line = "select.c:721  UCX  ERROR   no active messages transport to <no debug data>: ";
        let cause = |reasons: &str| read(&format!("{line}{reasons}")).causes[0].cause;
        let lost = "self/memory - iface mismatch, tcp/lo - different host id local 1 vs 2";
        assert_eq!(cause(lost), Cause::Unreachable);
        assert_eq!(cause("tcp/eth0 - Destination is unreachable"), Cause::Unreachable);
        let unable = "tcp/eno1 - no peer failure handler, cuda_ipc/cuda - no am bcopy";
        assert_eq!(cause(unable), Cause::Transport);
    }

    #[test]
    fn what_is_not_understood_is_counted() {
        let wires = read("n:1:2 [0] NCCL INFO Something new\nn:1:2 [0] NCCL INFO Trees [0]\nx\n");
        assert_eq!((wires.understood, wires.not_understood), (1, 1));
        assert!(!read("a line of a program\n").any());
    }
}
