//! The NVLinks: below the GPUs a bar for NVSwitches and arcs for links from GPU to GPU, above them
//! those to the CPUs.
//!
//! *Invariant:* a pair is joined in the picture exactly when the matrix says `NV#`.

use std::collections::{BTreeMap, BTreeSet};

use super::layout::{Layout, Rect};
use super::widths::Widths;
use super::{Canvas, MARGIN};
use crate::topology::{Device, LinkKind, NvLinkPeer, Topology};

/// What was drawn.
pub(super) struct Fabric {
    pub(super) bottom: f64,
    /// Colours and their labels, for the legend.
    pub(super) colours: Vec<(String, String)>,
}

/// From few to many links.
const GREENS: [&str; 4] = ["#a6d468", "#6fb52c", "#4b8f12", "#2f6504"];

/// Draws the NVLinks; returns where they end.
pub(super) fn draw(
    canvas: &mut Canvas,
    topology: &Topology,
    layout: &Layout<'_>,
    widths: &mut Widths<'_>,
) -> Fabric {
    let mut pairs: Vec<(u32, u32, u8)> = Vec::new();
    for (a, b, kind) in topology.links.iter() {
        if let (Device::Gpu(a), Device::Gpu(b), LinkKind::Nv(links)) = (a, b, kind) {
            pairs.push((a.0, b.0, links));
        }
    }
    let joined: BTreeSet<u32> = pairs.iter().flat_map(|(a, b, _)| [*a, *b]).collect();
    let counts: BTreeSet<u8> = pairs.iter().map(|(_, _, links)| *links).collect();
    let is_switch = |peer: &NvLinkPeer| *peer == NvLinkPeer::Switch;
    let switched = topology.gpus.iter().any(|gpu| gpu.nvlinks_to(is_switch) > 0);
    // If all pairs have the same count, one bar is clearer than many arcs.
    let complete = pairs.len() == joined.len() * joined.len().saturating_sub(1) / 2;
    match (pairs.is_empty(), counts.first()) {
        (false, Some(links)) if counts.len() == 1 && complete && (switched || joined.len() > 5) => {
            strands(canvas, layout, &joined, widths);
            bar(canvas, topology, layout, *links, switched)
        }
        (false, _) => arcs(canvas, layout, &pairs, &counts, widths),
        (true, _) => Fabric { bottom: layout.bottom, colours: Vec::new() },
    }
}

/// What joins GPUs to their CPUs beside PCIe.
const TO_CPU: &str = GREENS[2];

/// Draws NVLink-C2C and NVLinks to CPUs, from the CPUs to the GPUs; returns what the legend says of
/// them.
pub(super) fn draw_to_cpus(
    canvas: &mut Canvas,
    layout: &Layout<'_>,
    widths: &mut Widths<'_>,
) -> Option<(String, String)> {
    let mut names = BTreeSet::new();
    for (card, gpu) in layout.gpus.values() {
        let name = match gpu.nvlinks_to(|peer| *peer == NvLinkPeer::Cpu) {
            _ if gpu.c2c.is_some() => "NVLink-C2C to the CPU".to_owned(),
            0 => continue,
            1 => "an NVLink to the CPU".to_owned(),
            links => format!("{links} NVLinks to the CPU"),
        };
        let node = layout.nodes.iter().find(|(_, _, id, _)| id.is_some() && *id == gpu.numa);
        let Some((_, bar, ..)) = node else { continue };
        // At the card's edge, since the wire is in its middle.
        let x = card.x + 10.0;
        canvas.open("chips", &[("data-device", &Device::Gpu(gpu.index).to_string())]);
        let ends = [(x, bar.bottom()), (x, card.y)];
        widths.line(canvas, ends, (TO_CPU, 4.4), widths.of_chips(gpu.index.0));
        canvas.close();
        names.insert(name);
    }
    let names: Vec<String> = names.into_iter().collect();
    (!names.is_empty()).then(|| (TO_CPU.to_owned(), names.join(", ")))
}

/// Where the bar is.
fn place_of_bar(layout: &Layout<'_>) -> Rect {
    let left = layout.packages.first().map_or(MARGIN, |(rect, _)| rect.x);
    Rect { x: left, y: layout.bottom + 34.0, w: layout.right - left, h: 36.0 }
}

/// Draws what joins the GPUs to the bar.
fn strands(
    canvas: &mut Canvas,
    layout: &Layout<'_>,
    joined: &BTreeSet<u32>,
    widths: &mut Widths<'_>,
) {
    let end = place_of_bar(layout).y;
    let cards = joined.iter().filter_map(|gpu| Some((gpu, &layout.gpus.get(gpu)?.0)));
    for (gpu, card) in cards {
        canvas.open("nvlink", &[("data-device", &format!("GPU{gpu}"))]);
        // One line is as wide as all of a GPU's links are fast.
        let strands = if widths.are_told() { &[0.0][..] } else { &[-9.0, -3.0, 3.0, 9.0] };
        for strand in strands {
            let x = card.middle() + strand;
            let ends = [(x, card.bottom()), (x, end)];
            widths.line(canvas, ends, (GREENS[1], 2.4), widths.of_gpu(*gpu));
        }
        canvas.close();
    }
}

fn bar(
    canvas: &mut Canvas,
    topology: &Topology,
    layout: &Layout<'_>,
    links: u8,
    switched: bool,
) -> Fabric {
    let rect = place_of_bar(layout);
    canvas.open("nvswitch", &[]);
    canvas.rect(&rect, 9.0, "#dff1c2", "#6fb52c", "");
    let speed = topology.gpus.iter().flat_map(|gpu| &gpu.nvlinks).find_map(|link| link.gb_per_s);
    let name = match (topology.nvswitch, switched) {
        (Some(1), true) => "1 NVSwitch".to_owned(),
        (Some(switches), true) => format!("{switches} NVSwitches"),
        (None, true) => "NVSwitch".to_owned(),
        (_, false) => "NVLink between all".to_owned(),
    };
    let words = match speed {
        Some(each) => {
            let all = each * f64::from(links);
            format!("{name}  ·  {links} NVLinks of {each} GB/s a GPU: {all} GB/s each way")
        }
        None => format!("{name}  ·  {links} NVLinks a GPU"),
    };
    let style = "text-anchor=\"middle\" style=\"font-size:13px;fill:#2f5a00\"";
    canvas.text(rect.middle(), rect.y + 23.0, "strong", style, &words);
    canvas.close();
    Fabric { bottom: rect.bottom(), colours: vec![(GREENS[1].to_owned(), format!("NV{links}"))] }
}

fn arcs(
    canvas: &mut Canvas,
    layout: &Layout<'_>,
    pairs: &[(u32, u32, u8)],
    counts: &BTreeSet<u8>,
    widths: &mut Widths<'_>,
) -> Fabric {
    let shade = |links: u8| {
        let at = counts.iter().position(|count| *count == links).unwrap_or(0);
        // If there are few different counts, use neighbouring greens that are easy to distinguish.
        GREENS[(at + usize::from(counts.len() < 3)).min(GREENS.len() - 1)]
    };
    let middle = |gpu: u32| layout.gpus.get(&gpu).map(|(rect, _)| rect.middle());
    // Where each arc leaves its GPU: arcs to the left start on the left, the farthest outermost.
    let mut ends: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (a, b, _) in pairs {
        ends.entry(*a).or_default().push(*b);
        ends.entry(*b).or_default().push(*a);
    }
    for (gpu, peers) in &mut ends {
        peers.sort_by(|a, b| {
            let offset =
                |peer: &u32| middle(*peer).zip(middle(*gpu)).map_or(0.0, |(p, own)| p - own);
            let turn = |offset: f64| (offset > 0.0, -offset);
            let (left, right) = (turn(offset(a)), turn(offset(b)));
            left.0.cmp(&right.0).then(left.1.total_cmp(&right.1).reverse())
        });
        // On the right, the farthest must be outermost, so nearer ones come first.
        let split = peers.iter().position(|peer| middle(*peer) > middle(*gpu));
        let split = split.unwrap_or(peers.len());
        peers[split..]
            .sort_by(|a, b| middle(*a).unwrap_or(0.0).total_cmp(&middle(*b).unwrap_or(0.0)));
        peers[..split]
            .sort_by(|a, b| middle(*a).unwrap_or(0.0).total_cmp(&middle(*b).unwrap_or(0.0)));
    }
    let start = |gpu: u32, peer: u32| {
        let (rect, _) = layout.gpus.get(&gpu)?;
        let peers = ends.get(&gpu)?;
        let at = peers.iter().position(|other| *other == peer)?;
        let share = (at as f64 + 1.0) / (peers.len() as f64 + 1.0);
        Some(rect.x + 12.0 + share * (rect.w - 24.0))
    };
    let mut deepest: f64 = 0.0;
    let top = layout.gpus.values().map(|(rect, _)| rect.bottom()).fold(0.0, f64::max);
    for (a, b, links) in pairs {
        let Some((xa, xb)) = start(*a, *b).zip(start(*b, *a)) else { continue };
        let depth = (44.0 + (xb - xa).abs() * 0.20).min(240.0);
        deepest = deepest.max(depth);
        let control = top + depth * 4.0 / 3.0;
        let plain = 2.0 + f64::from((*links).min(12)) * 0.55;
        let (stroke, rate) = widths.stroke(widths.of_pair(*a, *b), plain);
        let rate = rate.map_or(String::new(), |rate| format!(", {rate}"));
        let ends = [("data-a", format!("GPU{a}")), ("data-b", format!("GPU{b}"))];
        canvas.open("arc", &[(ends[0].0, &ends[0].1), (ends[1].0, &ends[1].1)]);
        canvas.push(&format!(
            "<path d=\"M{xa:.1} {top:.1} C{xa:.1} {control:.1} {xb:.1} {control:.1} {xb:.1} {top:.1}\" \
             fill=\"none\" stroke=\"{}\" {stroke} stroke-opacity=\"0.92\">\
             <title>GPU{a} to GPU{b}: NV{links}{rate}</title></path>",
            shade(*links)
        ));
        canvas.close();
    }
    let colours = counts.iter().map(|links| (shade(*links).to_owned(), format!("NV{links}")));
    Fabric { bottom: (top + deepest).max(layout.bottom), colours: colours.collect() }
}
