//! The cards of GPUs and NICs.
//!
//! Does not place them; each card is given its rectangle.

use super::layout::{GPU_HEIGHT, Rect};
use super::{Canvas, clipped};
use crate::ids::PciAddress;
use crate::topology::{Gpu, MigInstance, Nic, NvLinkPeer, PcieLink, Port, PortState};

pub(super) fn gpu(canvas: &mut Canvas, rect: &Rect, gpu: &Gpu) {
    let display = gpu.display == Some(true);
    let (fill, stroke) = if display { ("#f0f1f4", "#9aa3b5") } else { ("#f0f8e4", "#76b900") };
    let title = [
        Some(format!("GPU{}", gpu.index)),
        gpu.name.clone(),
        gpu.uuid.as_ref().map(|uuid| uuid.to_string()),
    ];
    let title: Vec<String> = title.into_iter().flatten().collect();
    canvas.open_button("gpu", "data-device", &format!("GPU{}", gpu.index));
    canvas.rect(rect, 9.0, fill, stroke, &title.join(", "));
    let x = rect.x + 10.0;
    let bold = "style=\"font-size:13px;fill:#2f5a00\"";
    canvas.text(x, rect.y + 19.0, "strong", bold, &format!("GPU{}", gpu.index));
    let name = gpu.name.as_deref().unwrap_or_default();
    let name = name.trim_start_matches("NVIDIA ").trim_start_matches("Tesla ");
    canvas.text(x, rect.y + 34.0, "small", "", &clipped(name, rect.w - 16.0, 5.6));
    let place = [gpu.pci.map(short), gpu.pcie.and_then(generation)];
    let place: Vec<String> = place.into_iter().flatten().collect();
    // An address with a domain is so long that it is shown alone.
    let place = Some(place.join(" ")).filter(|words| words.len() < 20).or(place.first().cloned());
    canvas.text(x, rect.y + 47.0, "mono", "", &place.unwrap_or_default());
    let memory = gpu.memory_bytes.map(|bytes| format!("{} GiB", (bytes + (1 << 29)) >> 30));
    let memory_numa = gpu.memory_numa.map(|id| format!("NUMA {id}"));
    let words: Vec<String> = [memory, memory_numa].into_iter().flatten().collect();
    if gpu.mig.is_empty() {
        canvas.text(x, rect.y + 61.0, "small", "", &words.join(" · "));
    } else {
        instances(canvas, rect, &gpu.mig);
    }
    badge(canvas, rect, gpu, display);
    if canvas.live {
        canvas.text(rect.right() - 9.0, rect.y + 61.0, "small now", "text-anchor=\"end\"", "");
        canvas.gauge("memory", x, rect.y + GPU_HEIGHT - 9.0, rect.w - 20.0);
    }
    canvas.close();
}

/// A word in the upper right corner.
fn badge(canvas: &mut Canvas, rect: &Rect, gpu: &Gpu, display: bool) {
    let to_cpu = gpu.nvlinks_to(|peer| *peer == NvLinkPeer::Cpu);
    let words = match (display, gpu.mig_mode == Some(true), to_cpu) {
        (true, ..) => "display".to_owned(),
        (_, true, _) => "MIG".to_owned(),
        (_, _, 0) => return,
        (_, _, links) => format!("NV{links} to CPU"),
    };
    let style = "text-anchor=\"end\" style=\"fill:#4c7a12\"";
    canvas.text(rect.right() - 9.0, rect.y + 18.0, "small", style, &words);
}

/// MIG instances as parts of seven, the number of slices of a GPU.
fn instances(canvas: &mut Canvas, rect: &Rect, mig: &[MigInstance]) {
    let slice = (rect.w - 16.0) / 7.0;
    let mut x = rect.x + 8.0;
    for instance in mig {
        let slices = instance.profile.split('g').next().and_then(|text| text.parse::<f64>().ok());
        let w = slice * slices.unwrap_or(1.0).clamp(1.0, 7.0);
        let part = Rect { x: x + 1.0, y: rect.y + GPU_HEIGHT - 20.0, w: w - 2.0, h: 12.0 };
        if part.right() > rect.right() {
            break;
        }
        canvas.rect(&part, 3.0, "#bfe08a", "#76b900", &format!("MIG {}", instance.profile));
        if w > 40.0 {
            let style = "text-anchor=\"middle\" style=\"font-size:8px;fill:#2f5a00\"";
            canvas.text(part.middle(), part.y + 9.0, "mono", style, &instance.profile);
        }
        x += w;
    }
}

pub(super) fn nic(canvas: &mut Canvas, rect: &Rect, at: u32, nic: &Nic) {
    let dma = nic.dma.as_ref().and_then(|dma| dma.pci);
    let dma = dma.map_or_else(String::new, |pci| format!(", DMA function {pci}"));
    let title = format!("NIC{at}, {}{dma}", nic.name);
    canvas.open_button("nic", "data-device", &format!("NIC{at}"));
    canvas.rect(rect, 8.0, "#e9f2fe", "#5a9bea", &title);
    let style = "style=\"font-size:11px;fill:#1d4f91\"";
    canvas.text(
        rect.x + 9.0,
        rect.y + 16.0,
        "strong",
        style,
        &clipped(&nic.name, rect.w - 28.0, 6.6),
    );
    let rate = nic.ports.iter().find_map(|port| port.rate_gbps).map(|rate| format!("{rate}G"));
    let layer = nic.ports.iter().find_map(|port| port.link_layer).map(|layer| layer.to_string());
    let words: Vec<String> = [rate, layer].into_iter().flatten().collect();
    canvas.text(rect.x + 9.0, rect.y + 29.0, "small", "", &words.join(" "));
    let place = nic.pci.map(short).unwrap_or_default();
    canvas.text(rect.x + 9.0, rect.y + 42.0, "mono", "", &place);
    let (colour, words) = health(&nic.ports);
    let look = match canvas.live && colour == DOWN {
        // A port that nothing needs may be down: on a page red is for what is wrong.
        true => "fill=\"none\" stroke=\"#7b8799\" stroke-width=\"1.6\"".to_owned(),
        false => format!("fill=\"{colour}\""),
    };
    canvas.push(&format!(
        "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.6\" {look}><title>{words}</title></circle>",
        rect.right() - 10.0,
        rect.y + 12.0
    ));
    canvas.close();
}

/// The colour of ports that carry nothing.
const DOWN: &str = "#e0555a";

/// A colour for the ports; one port that carries data is enough for green.
fn health(ports: &[Port]) -> (&'static str, &'static str) {
    let is = |state: PortState| ports.iter().any(|port| port.state == Some(state));
    if is(PortState::Active) {
        ("#35b058", "active")
    } else if ports.is_empty() || ports.iter().any(|port| port.state.is_none()) {
        ("#b4bccb", "state unknown")
    } else {
        (DOWN, "down")
    }
}

/// A link's current generation and width, like `gen4 ×16`.
fn generation(link: PcieLink) -> Option<String> {
    let generation = match link.gt_per_s? {
        rate if rate < 3.0 => 1,
        rate if rate < 6.0 => 2,
        rate if rate < 10.0 => 3,
        rate if rate < 20.0 => 4,
        rate if rate < 40.0 => 5,
        _ => 6,
    };
    Some(format!("gen{generation} ×{}", link.width?))
}

/// A PCI address without domain 0.
fn short(place: PciAddress) -> String {
    let text = place.to_string();
    text.strip_prefix("0000:").map(str::to_owned).unwrap_or(text)
}
