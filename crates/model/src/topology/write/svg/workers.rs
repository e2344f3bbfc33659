//! Workers on the cards of their GPUs, with lines to their NICs.
//!
//! *Invariant:* anything without a card in the picture (a CPU worker, another machine's NIC) is
//! left out.

use std::collections::BTreeMap;

use super::layout::{GPU_HEIGHT, Layout, Rect};
use super::{Canvas, clipped};
use crate::topology::{Occupant, Topology};

/// The colour of workers.
pub(super) const LINE: &str = "#b8327f";

const ROW: f64 = 13.0;
const PADDING: f64 = 6.0;
/// Most workers of one GPU that are named; the others are counted.
const NAMED: usize = 4;

/// Height of a worker on a page, with a bar and, where a GPU has more than two, without.
const LIVE_ROW: f64 = 32.0;
const LIVE_LOW_ROW: f64 = 16.0;

/// Height of the strip for the workers of the GPU that has most.
pub(super) fn strip(workers: &[Occupant], live: bool) -> f64 {
    let gpus = by_gpu(workers);
    if live {
        let fullest = gpus.values().map(Vec::len).max();
        return fullest.map_or(0.0, |most| most as f64 * live_row(workers) + PADDING);
    }
    let fullest = gpus.values().map(|workers| rows(workers).len()).max();
    fullest.map_or(0.0, |rows| rows as f64 * ROW + PADDING)
}

fn live_row(workers: &[Occupant]) -> f64 {
    let fullest = by_gpu(workers).values().map(Vec::len).max().unwrap_or(0);
    if fullest > 2 { LIVE_LOW_ROW } else { LIVE_ROW }
}

/// Draws the strips and the lines to NICs.
pub(super) fn draw(
    canvas: &mut Canvas,
    topology: &Topology,
    layout: &Layout<'_>,
    workers: &[Occupant],
) {
    let (height, row) = (strip(workers, canvas.live), live_row(workers));
    for (gpu, workers) in by_gpu(workers) {
        let Some((card, _)) = layout.gpus.get(&gpu) else { continue };
        let y = card.y + GPU_HEIGHT;
        if canvas.live {
            for (at, worker) in workers.iter().enumerate() {
                let top = y + row * at as f64;
                let rect = Rect { x: card.x + 4.0, y: top, w: card.w - 8.0, h: row - 2.0 };
                live(canvas, &rect, worker);
            }
            nic_lines(canvas, topology, layout, card, &workers);
            continue;
        }
        let rect = Rect { x: card.x + 4.0, y, w: card.w - 8.0, h: height - 4.0 };
        let title: Vec<String> = workers.iter().map(|worker| in_full(worker)).collect();
        canvas.rect(&rect, 5.0, "#fbe9f3", LINE, &title.join("; "));
        for (at, words) in rows(&workers).iter().enumerate() {
            let style = format!("style=\"fill:{LINE}\"");
            let words = clipped(words, rect.w - 8.0, 5.8);
            let line = y + ROW * (at + 1) as f64 - 2.0;
            canvas.text(rect.x + 5.0, line, "mono", &style, &words);
        }
        nic_lines(canvas, topology, layout, card, &workers);
    }
}

/// A worker with places for its state and, where there is room, its memory.
fn live(canvas: &mut Canvas, rect: &Rect, worker: &Occupant) {
    canvas.open_button("worker", "data-worker", &worker.name);
    canvas.rect(rect, 5.0, "none", LINE, &in_full(worker));
    canvas.text(rect.x + 5.0, rect.y + 11.0, "mark", "", "");
    canvas.text(rect.x + 17.0, rect.y + 11.0, "mono strong", "", &clipped(&worker.name, 60.0, 5.8));
    canvas.text(rect.right() - 5.0, rect.y + 11.0, "mono now", "text-anchor=\"end\"", "");
    if rect.h > LIVE_LOW_ROW {
        canvas.text(rect.x + 5.0, rect.y + 22.0, "mono doing", "", "");
        canvas.gauge("memory", rect.x + 5.0, rect.y + 24.5, rect.w - 10.0);
    }
    canvas.close();
}

fn nic_lines(
    canvas: &mut Canvas,
    topology: &Topology,
    layout: &Layout<'_>,
    card: &Rect,
    workers: &[&Occupant],
) {
    canvas.open("uses", &[]);
    for name in workers.iter().flat_map(|worker| &worker.nics) {
        to_nic(canvas, topology, layout, card, name);
    }
    canvas.close();
}

/// A line from a GPU's card to the card of a NIC.
fn to_nic(canvas: &mut Canvas, topology: &Topology, layout: &Layout<'_>, card: &Rect, name: &str) {
    let nic = |at: u32| topology.nics.get(at as usize).filter(|nic| nic.name == name);
    let Some((rect, ..)) = layout.nics.iter().find(|(_, at, _)| nic(*at).is_some()) else { return };
    let (from, to) = ((card.x + 22.0, card.y), (rect.x + 22.0, rect.bottom()));
    // A line to a NIC in the row of the GPUs ends at its top, like all other lines there.
    let to = if rect.bottom() <= card.y { to } else { (rect.x + 22.0, rect.y) };
    canvas.push(&format!(
        "<path d=\"M{:.1} {:.1} L{:.1} {:.1}\" fill=\"none\" stroke=\"{LINE}\" stroke-width=\"2\" \
         stroke-dasharray=\"4 3\"/>",
        from.0, from.1, to.0, to.1
    ));
}

fn by_gpu(workers: &[Occupant]) -> BTreeMap<u32, Vec<&Occupant>> {
    let mut gpus: BTreeMap<u32, Vec<&Occupant>> = BTreeMap::new();
    for worker in workers {
        if let Some(gpu) = worker.gpu {
            gpus.entry(gpu.0).or_default().push(worker);
        }
    }
    gpus
}

/// The text about the workers of a GPU: two lines for one worker, one line each for several.
fn rows(workers: &[&Occupant]) -> Vec<String> {
    let cpus = |worker: &Occupant| {
        worker.cpus.as_ref().map_or("any CPU".to_owned(), |cpus| format!("CPU {cpus}"))
    };
    if let [worker] = workers {
        let nics = worker.nics.join(",");
        let name = [worker.name.as_str(), nics.as_str()].map(str::trim).join(" ");
        return vec![name.trim().to_owned(), cpus(worker)];
    }
    let mut rows: Vec<String> = workers
        .iter()
        .take(NAMED)
        .map(|worker| format!("{} {}", worker.name, cpus(worker)))
        .collect();
    let more = workers.len().saturating_sub(NAMED);
    rows.extend((more > 0).then(|| format!("and {more} more")));
    rows
}

fn in_full(worker: &Occupant) -> String {
    let cpus = worker.cpus.as_ref().map(|cpus| format!("CPUs {cpus}"));
    let nics = (!worker.nics.is_empty()).then(|| worker.nics.join(", "));
    let words = [Some(worker.name.clone()), cpus, nics];
    words.into_iter().flatten().collect::<Vec<_>>().join(", ")
}
