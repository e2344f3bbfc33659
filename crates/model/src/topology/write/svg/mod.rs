//! A picture of the machine, as SVG.
//!
//! CPUs are at the top, GPUs at the bottom with their NVLinks below them. The colours of the wires
//! stand for the kinds of links: the highest colour on the way between two devices is their link in
//! the matrix. Their widths are what the links carry, if somebody says so.
//!
//! The same picture can be drawn for a page that brings it to life: without colours of texts, in
//! groups that name what they show, and with places for what changes.
//!
//! *Invariant:* the text is well-formed XML whatever the names in the topology are.

mod cards;
mod layout;
mod nvlinks;
mod style;
mod widths;
mod workers;

use super::hierarchy::packages;
use crate::text::xml_escaped;
use crate::topology::{LinkRates, Occupant, Topology};
use crate::units::HumanBytes;
use layout::{Layout, Rect, Room, SWITCH_BAR, Step, Wire};
use nvlinks::Fabric;
use style::STYLE;
use widths::Widths;

const MARGIN: f64 = 28.0;
/// Width of a character of the legend in the widest of its fonts.
const LEGEND_CHARACTER: f64 = 5.8;
const HEAD: f64 = 104.0;
const LIVE_HEAD: f64 = 34.0;
/// As wide as the legend's sentence.
const LIVE_NARROWEST: f64 = 440.0;
const NARROWEST: f64 = 780.0;

const PIX: &str = "#2f80ed";
const PXB: &str = "#0fa3a3";
const PHB: &str = "#8e5bd6";
const NODE: &str = "#e8a13a";
const SYS: &str = "#e0555a";
/// On a page, where red is for what is wrong.
const LIVE_SYS: &str = "#7b8799";

impl Topology {
    /// The machine as a picture.
    pub fn to_svg(&self) -> String {
        self.to_svg_with(&[], &LinkRates::default())
    }

    /// The machine as a picture, with workers on their GPUs, their CPUs, and lines to their NICs.
    /// Lines are as wide as their links are fast, if anything is known of that.
    pub fn to_svg_with(&self, workers: &[Occupant], rates: &LinkRates) -> String {
        self.drawn(workers, Widths::new(rates), Canvas::default())
    }

    /// The machine for a page with a stylesheet and a script of its own: each device and worker is
    /// a group with its name in `data-device` or `data-worker`, and nothing has inline styles.
    pub fn to_live_svg(&self, workers: &[Occupant]) -> String {
        // There widths are what goes over the links.
        let rates = LinkRates::default();
        self.drawn(workers, Widths::new(&rates), Canvas { live: true, ..Canvas::default() })
    }

    fn drawn(&self, workers: &[Occupant], mut widths: Widths<'_>, mut canvas: Canvas) -> String {
        let packages = packages(self);
        let room = Room { strip: workers::strip(workers, canvas.live) };
        // A page has a heading of its own.
        let head = if canvas.live { LIVE_HEAD } else { HEAD };
        let mut layout = Layout::new(&packages, MARGIN, head, room);
        let free = NARROWEST - MARGIN - layout.right;
        if free > 0.0 && !canvas.live {
            layout = Layout::new(&packages, MARGIN + free / 2.0, head, room);
        }
        frames(&mut canvas, &layout);
        sys(&mut canvas, &layout, head, &mut widths);
        let chips = nvlinks::draw_to_cpus(&mut canvas, &layout, &mut widths);
        layout.wires.iter().for_each(|wire| draw_wire(&mut canvas, wire, &mut widths));
        bars(&mut canvas, self, &layout);
        layout.gpus.values().for_each(|(rect, gpu)| cards::gpu(&mut canvas, rect, gpu));
        layout.nics.iter().for_each(|(rect, at, nic)| cards::nic(&mut canvas, rect, *at, nic));
        workers::draw(&mut canvas, self, &layout, workers);
        let mut fabric = nvlinks::draw(&mut canvas, self, &layout, &mut widths);
        fabric.colours.extend(chips);
        let bottom = legend(&mut canvas, self, &layout, (&fabric, &widths), workers);
        let width = if canvas.live {
            layout.right.max(LIVE_NARROWEST)
        } else {
            title(&mut canvas, self);
            layout.right.max(NARROWEST - MARGIN)
        } + MARGIN;
        canvas.finish(width, bottom + MARGIN)
    }
}

/// SVG elements, in the order they are drawn.
#[derive(Default)]
struct Canvas {
    body: String,
    /// Whether a page brings the picture to life.
    live: bool,
}

impl Canvas {
    fn push(&mut self, element: &str) {
        self.body.push_str(element);
        self.body.push('\n');
    }

    fn rect(&mut self, rect: &Rect, radius: f64, fill: &str, stroke: &str, title: &str) {
        let Rect { x, y, w, h } = rect;
        let start = format!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" height=\"{h:.1}\" rx=\"{radius}\" \
             fill=\"{fill}\" stroke=\"{stroke}\""
        );
        if title.is_empty() {
            self.push(&format!("{start}/>"));
        } else {
            self.push(&format!("{start}><title>{}</title></rect>", xml_escaped(title)));
        }
    }

    /// Begins a group that a page finds by its class and attributes.
    fn open(&mut self, class: &str, attributes: &[(&str, &str)]) {
        if self.live {
            let attribute =
                |(name, value): &(&str, &str)| format!(" {name}=\"{}\"", xml_escaped(value));
            let attributes: String = attributes.iter().map(attribute).collect();
            self.push(&format!("<g class=\"{class}\"{attributes}>"));
        }
    }

    /// Begins a group that can be selected.
    fn open_button(&mut self, class: &str, data: &str, name: &str) {
        let button = [(data, name), ("tabindex", "0"), ("role", "button"), ("aria-label", name)];
        self.open(class, &button);
    }

    fn close(&mut self) {
        if self.live {
            self.push("</g>");
        }
    }

    /// A place for a bar that grows from left to right.
    fn gauge(&mut self, class: &str, x: f64, y: f64, w: f64) {
        if self.live {
            for (part, w) in [("track", w), ("fill", 0.0)] {
                self.push(&format!(
                    "<rect class=\"{part} {class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" \
                     height=\"4\" rx=\"2\"/>"
                ));
            }
        }
    }

    fn text(&mut self, x: f64, y: f64, class: &str, more: &str, words: &str) {
        // The style comes last. A page's own would not override it, and forbids it.
        let more = if self.live { more.split("style=").next().unwrap_or_default() } else { more };
        let words = xml_escaped(words);
        self.push(&format!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"{class}\" {more}>{words}</text>"
        ));
    }

    fn line(&mut self, from: (f64, f64), to: (f64, f64), colour: &str, width: f64) {
        let colour = if self.live && colour == SYS { LIVE_SYS } else { colour };
        self.push(&format!(
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\" \
             stroke-width=\"{width}\" stroke-linecap=\"round\"/>",
            from.0, from.1, to.0, to.1
        ));
    }

    fn finish(self, width: f64, height: f64) -> String {
        if self.live {
            return format!(
                "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\">\n\
                 {}</svg>\n",
                self.body
            );
        }
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
             viewBox=\"0 0 {width:.0} {height:.0}\">\n<style>{STYLE}</style>\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#f5f7fb\"/>\n{}</svg>\n",
            self.body
        )
    }
}

fn title(canvas: &mut Canvas, topology: &Topology) {
    let name = topology.name.as_deref().unwrap_or("machine");
    canvas.text(MARGIN, 42.0, "strong", "style=\"font-size:24px\"", name);
    let count = |number: usize, what: &str| match number {
        0 => None,
        1 => Some(format!("1 {what}")),
        _ => Some(format!("{number} {what}s")),
    };
    let driver = topology.driver.as_ref().map(|driver| format!("driver {driver}"));
    let words = [
        count(topology.gpus.len(), "GPU"),
        count(topology.nics.len(), "NIC"),
        count(topology.numa.iter().filter(|node| !node.gpu_memory).count(), "NUMA node"),
        driver,
        topology.source.clone(),
    ];
    let words: Vec<String> = words.into_iter().flatten().collect();
    canvas.text(MARGIN, 63.0, "label", "", &words.join("  ·  "));
}

/// The line between NUMA nodes.
fn sys(canvas: &mut Canvas, layout: &Layout<'_>, head: f64, widths: &mut Widths<'_>) {
    let (y, rate) = (head - 14.0, widths.of_sockets());
    let at: Vec<f64> = layout.nodes.iter().map(|(_, bar, ..)| bar.right() - 26.0).collect();
    if let [first, .., last] = at.as_slice() {
        widths.line(canvas, [(*first, y), (*last, y)], (SYS, 3.0), rate);
        for ((_, bar, ..), x) in layout.nodes.iter().zip(&at) {
            widths.line(canvas, [(*x, y), (*x, bar.y)], (SYS, 3.0), rate);
        }
    }
}

fn frames(canvas: &mut Canvas, layout: &Layout<'_>) {
    canvas.open("packages", &[]);
    for (rect, id) in &layout.packages {
        canvas.rect(rect, 14.0, "#ffffff", "#d5dbe6", "");
        let words = id.map_or(String::new(), |id| format!("Package {id}"));
        canvas.text(rect.x + 14.0, rect.y + 20.0, "label strong", "", &words);
    }
    canvas.close();
    canvas.open("nodes", &[]);
    for (rect, _, id, _) in &layout.nodes {
        canvas.rect(rect, 10.0, "#fafbfd", "#e3e8f1", "");
        let words = id.map_or("NUMA node unknown".to_owned(), |id| format!("NUMA node {id}"));
        canvas.text(rect.x + 12.0, rect.y + 19.0, "label", "", &words);
    }
    canvas.close();
}

fn bars(canvas: &mut Canvas, topology: &Topology, layout: &Layout<'_>) {
    canvas.open("cpus", &[]);
    for (_, bar, id, node) in &layout.nodes {
        // If the source names no NUMA nodes, the GPUs still show which CPUs are near.
        let near =
            || topology.gpus.iter().find(|gpu| gpu.numa == *id).and_then(|gpu| gpu.cpus.as_ref());
        let cpus = node.and_then(|node| node.cpus.as_ref()).or_else(near);
        let list = cpus.map(|cpus| cpus.to_string()).filter(|list| !list.is_empty());
        let words = list.as_ref().map_or("CPUs unknown".to_owned(), |list| format!("CPUs {list}"));
        canvas.rect(bar, 7.0, "#fdebc8", NODE, &words);
        let style = "text-anchor=\"middle\" style=\"font-size:11px;fill:#6d4a0c\"";
        let memory = node.and_then(|node| node.memory_bytes);
        let line = if memory.is_some() { bar.y + 16.0 } else { bar.y + 23.0 };
        canvas.text(bar.middle(), line, "strong", style, &clipped(&words, bar.w, 6.4));
        if let Some(memory) = memory {
            let words = HumanBytes(memory).to_string();
            canvas.text(bar.middle(), bar.y + 30.0, "", style, &words);
        }
    }
    canvas.close();
    canvas.open("hosts", &[]);
    for (bar, name) in &layout.hosts {
        canvas.rect(bar, 4.0, "#e2d5f7", PHB, &format!("host bridge {}", name.unwrap_or_default()));
    }
    canvas.close();
    canvas.open("switches", &[]);
    for (bar, name) in &layout.switches {
        let words = format!("PCIe switch {}", name.unwrap_or_default());
        canvas.rect(bar, 5.0, "#d8e8fd", PIX, &words);
        let style = "text-anchor=\"middle\" style=\"fill:#1d4f91\"";
        let words = if clipped(&words, bar.w, 5.6) == words { &words } else { "PCIe switch" };
        canvas.text(bar.middle(), bar.y + SWITCH_BAR - 5.0, "mono", style, words.trim());
    }
    canvas.close();
}

fn colour(step: Step) -> &'static str {
    match step {
        Step::Pix => PIX,
        Step::Pxb => PXB,
        Step::Phb => PHB,
        Step::Node => NODE,
    }
}

fn draw_wire(canvas: &mut Canvas, wire: &Wire<'_>, widths: &mut Widths<'_>) {
    let device = wire.device.map(|device| device.to_string()).unwrap_or_default();
    canvas.open("wire", &[("data-device", &device)]);
    let ends = [(wire.x, wire.from), (wire.x, wire.to)];
    widths.line(canvas, ends, (colour(wire.step), 2.2), widths.of_wire(wire));
    if !wire.passed.is_empty() {
        let pip = Rect { x: wire.x - 5.0, y: wire.from + 6.0, w: 10.0, h: 10.0 };
        let words = format!("{} more PCIe switch(es)", wire.passed.len());
        canvas.rect(&pip, 3.0, "#d8e8fd", colour(wire.step), &words);
    }
    canvas.close();
}

/// Where the next entry of the legend comes.
struct Place {
    x: f64,
    y: f64,
    right: f64,
}

impl Place {
    /// The place for an entry of this width: on the next line if it doesn't fit.
    fn next(&mut self, width: f64) -> (f64, f64) {
        if self.x > MARGIN && self.x + width > self.right {
            (self.x, self.y) = (MARGIN, self.y + 16.0);
        }
        let at = self.x;
        self.x += width + 18.0;
        (at, self.y)
    }
}

/// The room that words of the legend take.
fn length(words: &str) -> f64 {
    words.chars().count() as f64 * LEGEND_CHARACTER
}

/// Draws the legend; returns its end.
fn legend(
    canvas: &mut Canvas,
    topology: &Topology,
    layout: &Layout<'_>,
    (fabric, widths): (&Fabric, &Widths<'_>),
    workers: &[Occupant],
) -> f64 {
    let drawn = |step: Step| layout.wires.iter().any(|wire| wire.step == step);
    let kinds = [
        (drawn(Step::Pix), PIX, "PIX: one switch"),
        (drawn(Step::Pxb), PXB, "PXB: several switches"),
        (drawn(Step::Phb), PHB, "PHB: a host bridge"),
        (drawn(Step::Node), NODE, "NODE: between host bridges"),
        (layout.nodes.len() > 1, SYS, "SYS: between NUMA nodes"),
        (workers.iter().any(|worker| !worker.nics.is_empty()), workers::LINE, "a worker's NIC"),
    ];
    let pci = kinds.iter().filter(|(drawn, ..)| *drawn);
    let pci = pci.map(|(_, colour, words)| ((*colour).to_owned(), (*words).to_owned()));
    canvas.open("legend", &[]);
    let right = layout.right.max(if canvas.live { LIVE_NARROWEST } else { NARROWEST - MARGIN });
    let mut place = Place { x: MARGIN, y: fabric.bottom + 34.0, right };
    for (colour, words) in fabric.colours.iter().cloned().chain(pci) {
        let (x, y) = place.next(29.0 + length(&words));
        canvas.line((x, y), (x + 22.0, y), &colour, 3.6);
        canvas.text(x + 29.0, y + 4.0, "small", "", &words);
    }
    canvas.close();
    if widths.are_told() {
        let heading = "Widths: what one copy should get of the link alone, in one direction.";
        place = Place { x: MARGIN, y: place.y + 22.0, right };
        let (x, y) = place.next(length(heading));
        canvas.text(x, y + 4.0, "small", "", heading);
        for (stroke, words) in widths.legend() {
            let (x, y) = place.next(29.0 + length(&words));
            let line = format!("x1=\"{x:.1}\" y1=\"{y:.1}\" x2=\"{:.1}\" y2=\"{y:.1}\"", x + 22.0);
            canvas.push(&format!("<line {line} {stroke}/>"));
            canvas.text(x + 29.0, y + 4.0, "small", "", &words);
        }
    }
    let top = place.y;
    if topology.links.is_empty() {
        return top;
    }
    let (first, rest) =
        ("The outermost colour on the way between two devices", "is the kind of their link.");
    let whole = format!("{first} {rest}");
    if MARGIN + length(&whole) <= layout.right.max(LIVE_NARROWEST) {
        canvas.text(MARGIN, top + 22.0, "small", "", &whole);
        return top + 22.0;
    }
    canvas.text(MARGIN, top + 22.0, "small", "", first);
    canvas.text(MARGIN, top + 38.0, "small", "", rest);
    top + 38.0
}

/// The longest beginning of a text that fits.
fn clipped(words: &str, room: f64, character: f64) -> String {
    let fits = |count: usize| count as f64 * character <= room;
    let count = words.chars().count();
    if fits(count) {
        return words.to_owned();
    }
    let kept = (0..count).take_while(|kept| fits(kept + 2)).count();
    words.chars().take(kept).chain(['…']).collect()
}
