//! Judges what was measured by what the topology says that the path carries. Pure.
//!
//! *Invariant:* `ok` is only a way whose path is known.

use super::order::{End, Figures};
use super::{Measured, Outcome, PathVerdict, Trouble, Way};
use cuda_cluster_model::ids::GpuIndex;
use cuda_cluster_model::topology::{Device, Gpu, LinkKind, Topology};
use cuda_cluster_wire::links::{Limit, between, to_host};

/// Copies are slow below this share of what is usual, as in `verify`.
const SLOW: f64 = 0.5;

/// How far a figure may exceed what a path carries, because clocks and vendors round.
const TOLERANCE: f64 = 1.05;

/// What is left of a way to the host if each byte takes two of them, one after the other.
const STAGED_SHARE: f64 = 0.5;

/// Copies by way of the host between NUMA nodes, in 10⁹ bytes per second: less than most buses, and
/// no source tells how much.
const STAGED_BETWEEN_NODES: f64 = 10.0;

/// What makes bytes wrong between GPUs on PCIe (CUDA C++ Programming Guide, "IOMMU on Linux").
const IOMMU: &str = "on bare metal an IOMMU that translates the GPUs' addresses does this: boot \
                     with iommu=pt, or switch it off";

/// What makes them slow there.
const ACS: &str = "a PCIe switch with access control sends copies by way of the CPU: see ACSCtl in \
                   lspci -vvv";

/// Paths without NVLinks, and those of them that stay below a switch.
const ANY_PATH: [LinkKind; 5] =
    [LinkKind::Pix, LinkKind::Pxb, LinkKind::Phb, LinkKind::Node, LinkKind::Sys];
const BELOW_A_SWITCH: [LinkKind; 2] = [LinkKind::Pix, LinkKind::Pxb];

/// The row of a way.
pub(super) fn row(topology: &Topology, (from, to): (End, End), outcome: Outcome) -> Measured {
    let Outcome { verdict, figures, way, remark } = outcome;
    let limit = limit(topology, (from, to), way);
    let mut hint = None;
    let (verdict, reason) = match (verdict, figures) {
        (Err(Trouble::WrongBytes(text)), _) => {
            hint = is_peer_over_pcie(topology, (from, to), way, &ANY_PATH).then_some(IOMMU);
            (PathVerdict::Failed, Some(text))
        }
        (Err(Trouble::Failed(text)), _) => (PathVerdict::Failed, Some(text)),
        (Err(Trouble::LeftOut(text)), _) => (PathVerdict::LeftOut, Some(text)),
        (Ok(()), None) => (PathVerdict::Failed, Some("nothing was measured".to_owned())),
        (Ok(()), Some(figures)) => judged(figures, limit.as_ref()),
    };
    let mut used = None;
    if verdict == PathVerdict::Slow {
        used = in_use(topology, [from, to]);
        hint = is_peer_over_pcie(topology, (from, to), way, &BELOW_A_SWITCH).then_some(ACS);
    }
    let refused = refused_nvlinks(topology, (from, to), way);
    let parts = [reason, refused, remark, used, hint.map(str::to_owned)];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    Measured {
        from: from.to_string(),
        to: to.to_string(),
        bytes: figures.map_or(0, |figures| figures.bytes),
        gb_per_s: figures.map(|figures| figures.gb_per_s),
        latency_us: figures.map(|figures| figures.latency_us),
        way,
        path: limit.as_ref().map(|limit| limit.link.clone()),
        allowed_gb_per_s: limit.as_ref().and_then(|limit| limit.most),
        usual_gb_per_s: limit.as_ref().map(|limit| limit.usual),
        verdict,
        text: parts.join("; "),
    }
}

fn judged(figures: Figures, limit: Option<&Limit>) -> (PathVerdict, Option<String>) {
    let rate = figures.gb_per_s;
    let Some(limit) = limit else {
        let text = "the topology doesn't say what carries it";
        return (PathVerdict::CannotTell, Some(text.to_owned()));
    };
    if limit.most.is_some_and(|most| rate > most * TOLERANCE) {
        let text = format!("{} are more than {} carries", shown(rate), limit.link);
        return (PathVerdict::CannotTell, Some(text));
    }
    if rate < limit.usual * SLOW {
        let text = format!("{}; {} usually carries {:.0}", shown(rate), limit.link, limit.usual);
        return (PathVerdict::Slow, Some(text));
    }
    (PathVerdict::Ok, None)
}

fn shown(gb_per_s: f64) -> String {
    if gb_per_s < 10.0 { format!("{gb_per_s:.2} GB/s") } else { format!("{gb_per_s:.0} GB/s") }
}

/// Whether GPUs copy directly over one of these paths.
fn is_peer_over_pcie(
    topology: &Topology,
    ends: (End, End),
    way: Option<Way>,
    paths: &[LinkKind],
) -> bool {
    let (End::Gpu(a), End::Gpu(b)) = ends else { return false };
    way == Some(Way::Peer) && kind(topology, a, b).is_some_and(|kind| paths.contains(&kind))
}

fn gpu(topology: &Topology, index: GpuIndex) -> Option<&Gpu> {
    topology.gpus.iter().find(|gpu| gpu.index == index)
}

fn kind(topology: &Topology, a: GpuIndex, b: GpuIndex) -> Option<LinkKind> {
    topology.links.between(Device::Gpu(a), Device::Gpu(b))
}

/// What the path carries, if it is known.
fn limit(topology: &Topology, ends: (End, End), way: Option<Way>) -> Option<Limit> {
    match ends {
        (End::Host, End::Host) => None,
        (End::Host, End::Gpu(index)) | (End::Gpu(index), End::Host) => {
            to_host(topology, gpu(topology, index)?)
        }
        (End::Gpu(a), End::Gpu(b)) => {
            let kind = kind(topology, a, b);
            let (first, second) = (gpu(topology, a)?, gpu(topology, b)?);
            match (way, kind) {
                // NVLinks are what should carry it, whatever the driver does.
                (Some(Way::Staged), kind) if !matches!(kind, Some(LinkKind::Nv(_))) => {
                    let ways = [to_host(topology, first)?, to_host(topology, second)?];
                    Some(staged(ways, kind))
                }
                _ => between(topology, first, second),
            }
        }
    }
}

/// From GPU to GPU by way of the host.
fn staged([first, second]: [Limit; 2], kind: Option<LinkKind>) -> Limit {
    let narrowest = if second.most < first.most { second } else { first };
    let usual = narrowest.usual * STAGED_SHARE;
    let is_near = matches!(kind, Some(LinkKind::Pix | LinkKind::Pxb | LinkKind::Phb));
    let usual = if is_near { usual } else { usual.min(STAGED_BETWEEN_NODES) };
    Limit { link: format!("host memory, {}", narrowest.link), usual, ..narrowest }
}

/// That the driver does not use the NVLinks between two GPUs.
fn refused_nvlinks(topology: &Topology, ends: (End, End), way: Option<Way>) -> Option<String> {
    let (End::Gpu(a), End::Gpu(b)) = ends else { return None };
    let kind = kind(topology, a, b).filter(|kind| matches!(kind, LinkKind::Nv(_)))?;
    (way == Some(Way::Staged)).then(|| {
        format!(
            "the driver copies by way of the host although {kind} joins them: see \
             nvidia-fabricmanager and nvidia-smi topo -p2p n"
        )
    })
}

/// Who else may have been at work.
fn in_use(topology: &Topology, ends: [End; 2]) -> Option<String> {
    let used = ends.iter().filter_map(|end| match end {
        End::Gpu(index) => gpu(topology, *index).filter(|gpu| !gpu.processes.is_empty()),
        End::Host => None,
    });
    let names: Vec<String> = used.map(|gpu| format!("GPU {}", gpu.index)).collect();
    (!names.is_empty()).then(|| format!("other processes use {}", names.join(" and ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_cluster_model::topology;

    fn machine(name: &str) -> Topology {
        topology::parse(topology::builtin(name).expect("built in")).expect("it reads")
    }

    fn gpu(index: u32) -> End {
        End::Gpu(GpuIndex(index))
    }

    fn rated(machine: &Topology, ends: (End, End), way: Way, gb_per_s: f64) -> Measured {
        let figures = Some(Figures { bytes: 64 << 20, gb_per_s, latency_us: 5.0 });
        let outcome = Outcome { verdict: Ok(()), figures, way: Some(way), remark: None };
        row(machine, ends, outcome)
    }

    #[test]
    fn a_way_is_slow_below_half_of_what_is_usual_on_its_path() {
        let machine = machine("dgx-h100");
        let host = |rate| rated(&machine, (End::Host, gpu(0)), Way::Host, rate);
        assert_eq!(host(55.0).verdict, PathVerdict::Ok);
        assert_eq!(
            (host(55.0).path.as_deref(), host(55.0).text.as_str()),
            (Some("PCIe 5.0 x16"), "")
        );
        let downgraded = host(26.0);
        assert_eq!(downgraded.verdict, PathVerdict::Slow, "a link of the fourth generation");
        assert_eq!(downgraded.text, "26 GB/s; PCIe 5.0 x16 usually carries 55");
        let impossible = host(80.0);
        assert_eq!(impossible.verdict, PathVerdict::CannotTell);
        assert_eq!(impossible.text, "80 GB/s are more than PCIe 5.0 x16 carries");
        let pair = |rate| rated(&machine, (gpu(0), gpu(3)), Way::Peer, rate);
        assert_eq!(
            (pair(370.0).verdict, pair(370.0).path.as_deref()),
            (PathVerdict::Ok, Some("NV18"))
        );
        assert_eq!(pair(370.0).allowed_gb_per_s, Some(450.0));
        assert_eq!(pair(150.0).verdict, PathVerdict::Slow);
    }

    #[test]
    fn copies_by_way_of_the_host_are_not_what_nvlinks_are_for() {
        let machine = machine("dgx-h100");
        let staged = rated(&machine, (gpu(0), gpu(3)), Way::Staged, 30.0);
        assert_eq!((staged.verdict, staged.path.as_deref()), (PathVerdict::Slow, Some("NV18")));
        assert!(staged.text.contains("nvidia-fabricmanager"), "{staged:?}");
    }

    #[test]
    fn copies_by_way_of_the_host_are_judged_by_the_ways_to_it() {
        let machine = machine("rtx-4090-2");
        let staged = |rate| rated(&machine, (gpu(0), gpu(1)), Way::Staged, rate);
        assert_eq!(staged(10.0).verdict, PathVerdict::Ok);
        assert_eq!(staged(10.0).path.as_deref(), Some("host memory, PCIe 4.0 x8"));
        assert_eq!(staged(2.0).verdict, PathVerdict::Slow);
    }

    #[test]
    fn an_unknown_path_is_not_judged_and_wrong_bytes_are_never_ok() {
        let mut machine = self::machine("l40s-8");
        machine.gpus[0].pcie = None;
        let unknown = rated(&machine, (End::Host, gpu(0)), Way::Host, 20.0);
        assert_eq!(unknown.verdict, PathVerdict::CannotTell);
        assert_eq!((unknown.path, unknown.allowed_gb_per_s), (None, None));
        let figures = Some(Figures { bytes: 1, gb_per_s: 20.0, latency_us: 5.0 });
        let wrong = |machine: &Topology| {
            let verdict = Err(Trouble::WrongBytes("wrong bytes".to_owned()));
            let wrong = Outcome { verdict, figures, way: Some(Way::Peer), remark: None };
            row(machine, (gpu(1), gpu(2)), wrong)
        };
        let over_pcie = wrong(&machine);
        assert_eq!(over_pcie.verdict, PathVerdict::Failed);
        assert!(over_pcie.text.starts_with("wrong bytes; on bare metal an IOMMU"), "{over_pcie:?}");
        assert_eq!(wrong(&self::machine("dgx-h100")).text, "wrong bytes", "over NVLink");
    }

    #[test]
    fn a_slow_row_says_who_else_uses_the_gpus() {
        let mut machine = machine("dgx-h100");
        machine.gpus[3].processes = vec![17];
        let row = rated(&machine, (gpu(0), gpu(3)), Way::Peer, 100.0);
        assert!(row.text.ends_with("; other processes use GPU 3"), "{row:?}");
    }
}
