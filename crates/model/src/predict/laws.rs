//! What holds for the predictions of any machine.

use proptest::prelude::*;

use super::{Figure, Prediction, fair, predict, predict_among};
use crate::ids::GpuIndex;
use crate::topology::{Gpu, NvLink, NvLinkPeer, Topology, builtin, builtin_names, parse};

fn machine(name: &str) -> Topology {
    parse(builtin(name).expect("built in")).expect("it reads")
}

fn any_machine() -> impl Strategy<Value = Topology> {
    let names: Vec<&'static str> = builtin_names().collect();
    proptest::sample::select(names).prop_map(machine)
}

/// A machine and some of its GPUs.
fn some_gpus() -> impl Strategy<Value = (Topology, Vec<GpuIndex>)> {
    any_machine().prop_flat_map(|machine| {
        let gpus: Vec<GpuIndex> = machine.gpus.iter().map(|gpu| gpu.index).collect();
        let count = gpus.len();
        (Just(machine), proptest::sample::subsequence(gpus, 1..=count))
    })
}

/// Whether a figure is not above another, as far as both are known.
fn at_most(less: &Figure, more: &Figure) -> bool {
    match (less.gb_per_s(), more.gb_per_s()) {
        (Some(less), Some(more)) => less <= more * (1.0 + 1e-9),
        _ => true,
    }
}

fn of(prediction: &Prediction, gpu: GpuIndex) -> &super::GpuFigures {
    prediction.gpus.iter().find(|figures| figures.gpu == gpu).expect("a chosen GPU")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn neighbours_never_raise_a_figure((machine, chosen) in some_gpus()) {
        let (all, few) = (predict(&machine), predict_among(&machine, &chosen));
        for figures in &few.gpus {
            prop_assert!(at_most(&figures.from_host_with_all, &figures.from_host));
            prop_assert!(at_most(&figures.to_host_with_all, &figures.to_host));
            let with_more = of(&all, figures.gpu);
            prop_assert!(at_most(&with_more.from_host_with_all, &figures.from_host_with_all));
            prop_assert!(at_most(&with_more.to_host_with_all, &figures.to_host_with_all));
        }
    }

    #[test]
    fn both_ways_are_more_than_one_and_at_most_twice_as_much(machine in any_machine()) {
        for pair in predict(&machine).pairs {
            prop_assert!(at_most(&pair.one_way, &pair.both_ways));
            prop_assert!(at_most(&pair.both_ways, &pair.one_way.clone().times(2.0)));
        }
    }

    #[test]
    fn there_is_as_far_as_back(machine in any_machine()) {
        let figures = predict(&machine).pairs;
        for pair in &figures {
            let back = figures.iter().find(|back| (back.from, back.to) == (pair.to, pair.from));
            let back = back.expect("both orders");
            prop_assert_eq!(pair.one_way.gb_per_s(), back.one_way.gb_per_s());
            prop_assert_eq!(pair.both_ways.gb_per_s(), back.both_ways.gb_per_s());
        }
    }

    #[test]
    fn one_more_nvlink_lowers_nothing(machine in any_machine(), a in 0_usize..16, b in 0_usize..16) {
        let (a, b) = (a % machine.gpus.len(), b % machine.gpus.len());
        prop_assume!(a != b);
        let mut more = machine.clone();
        // The matrix follows from the NVLinks.
        more.links = crate::topology::Links::default();
        // A driver takes NVLinks even where there are so few that PCIe is faster, as beside cards
        // with PCIe 5.0; of the built-in machines with NVLinks between GPUs none is so.
        let joined = |gpu: &Gpu| gpu.nvlinks.iter().any(|link| matches!(link.peer, NvLinkPeer::Gpu(_)));
        prop_assume!(joined(&more.gpus[a]) && joined(&more.gpus[b]));
        let places = [a, b].map(|at| more.gpus[at].pci);
        for (own, other) in [(a, places[1]), (b, places[0])] {
            let Some(place) = other else { return Ok(()) };
            let link = u32::try_from(more.gpus[own].nvlinks.len()).expect("few");
            let peer = NvLinkPeer::Gpu(place);
            let version = more.gpus[own].nvlinks.first().and_then(|link| link.version);
            let gb_per_s = more.gpus[own].slowest_nvlink_gb_per_s();
            more.gpus[own].nvlinks.push(NvLink { link, active: true, version, peer, gb_per_s });
        }
        for (before, after) in predict(&machine).pairs.iter().zip(&predict(&more).pairs) {
            prop_assert!(at_most(&before.one_way, &after.one_way), "{before:?} {after:?}");
            prop_assert!(at_most(&before.both_ways, &after.both_ways), "{before:?} {after:?}");
        }
    }

    #[test]
    fn a_wider_link_lowers_nothing(machine in any_machine(), at in 0_usize..16) {
        let mut wider = machine.clone();
        let at = at % wider.gpus.len();
        if let Some(pcie) = &mut wider.gpus[at].pcie {
            let doubled = |lanes: Option<u32>| lanes.map(|lanes| lanes * 2);
            (pcie.width, pcie.max_width) = (doubled(pcie.width), doubled(pcie.max_width));
        }
        let (before, after) = (predict(&machine), predict(&wider));
        for (before, after) in before.pairs.iter().zip(&after.pairs) {
            prop_assert!(at_most(&before.one_way, &after.one_way));
            prop_assert!(at_most(&before.both_ways, &after.both_ways));
        }
        for (before, after) in before.gpus.iter().zip(&after.gpus) {
            prop_assert!(at_most(&before.from_host, &after.from_host));
            prop_assert!(at_most(&before.to_host, &after.to_host));
        }
    }

    #[test]
    fn no_capacity_is_exceeded_and_each_flow_meets_a_full_one(
        capacities in proptest::collection::vec(1.0_f64..100.0, 1..8),
        flows in proptest::collection::vec(proptest::collection::vec(0_usize..8, 1..5), 1..8),
    ) {
        let within = |part: &usize| part % capacities.len();
        let flows: Vec<Vec<usize>> =
            flows.iter().map(|flow| flow.iter().map(within).collect()).collect();
        let shares = fair::shares(&capacities, &flows);
        let mut used = vec![0.0; capacities.len()];
        for (flow, share) in flows.iter().zip(&shares) {
            let rate = share.expect("it passes something").rate;
            flow.iter().for_each(|part| used[*part] += rate);
        }
        for (used, capacity) in used.iter().zip(&capacities) {
            prop_assert!(*used <= capacity * (1.0 + 1e-9), "{used} of {capacity}");
        }
        for share in shares.into_iter().flatten() {
            prop_assert!(used[share.full] >= capacities[share.full] * (1.0 - 1e-9));
        }
    }
}

#[test]
fn what_is_not_told_is_not_guessed() {
    let mut machine = machine("l40s-8");
    machine.gpus[0].pcie = None;
    let prediction = predict(&machine);
    let unknown = |figure: &Figure| {
        matches!(figure, Figure::Unknown { unknown } if
        unknown == "the PCIe link of gpu0 is unknown")
    };
    assert!(unknown(&of(&prediction, GpuIndex(0)).from_host));
    assert!(of(&prediction, GpuIndex(1)).from_host.gb_per_s().is_some());
    assert!(unknown(&prediction.pairs[0].one_way), "{:?}", prediction.pairs[0]);
    assert!(unknown(&of(&prediction, GpuIndex(1)).from_host_with_all));
}

#[test]
fn a_shared_uplink_is_named_with_those_who_share_it() {
    let prediction = predict(&machine("l40s-8"));
    let figure = &of(&prediction, GpuIndex(0)).from_host_with_all;
    let alone = of(&prediction, GpuIndex(0)).from_host.gb_per_s().expect("known");
    let name = figure.limited_by().map(|part| part.name.as_str());
    assert_eq!(name, Some("uplink of switch 0000:17:00.0, shared by gpu0 and gpu1"));
    assert!((figure.gb_per_s().expect("known") - alone / 2.0).abs() < 1e-9);
    let across = prediction.pairs.iter().find(|pair| pair.from.0 == 0 && pair.to.0 == 7);
    let across = across.and_then(|pair| pair.one_way.limited_by());
    assert_eq!(across.map(|part| part.name.as_str()), Some("the interconnect of the sockets"));
}

#[test]
fn a_narrow_slot_counts_as_its_lanes() {
    let prediction = predict(&machine("rtx-4090-2"));
    let figure = &prediction.gpus[0].from_host;
    let name = figure.limited_by().map(|part| part.name.as_str());
    assert_eq!(name, Some("PCIe x8 gen 4 of gpu0"));
}
