//! Renders bandwidths as coloured matrices for a terminal, and as an SVG picture.
//!
//! Pure. A colour shows how close a value is to the best one in its matrix.
//!
//! *Invariant:* every value is also written out, so colour alone carries no information.

use std::fmt::Write;

use anstyle::{Color, RgbColor, Style};

use crate::text::xml_escaped;
use crate::units::Size;
use crate::wire::links::Pair;

/// From dark to light in even steps; also distinguishable with colour vision deficiency.
const SCALE: [(u8, u8, u8); 5] =
    [(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)];

/// What the rows and the columns are.
const AXES: &str = "from \\ to";

/// The bandwidths for one kind of memory and one message size.
struct Matrix<'a> {
    title: String,
    names: Vec<&'a str>,
    pairs: Vec<&'a Pair>,
    best: f64,
}

impl<'a> Matrix<'a> {
    /// Groups rows into matrices, in the order of the rows.
    fn all(pairs: &'a [Pair]) -> Vec<Self> {
        let mut matrices: Vec<Self> = Vec::new();
        for pair in pairs {
            // A number alone is a number of bytes.
            let unit = if pair.size_bytes < 1024 { " B" } else { "" };
            let title = format!("{}{unit} {}, GB/s", Size::Bytes(pair.size_bytes), pair.memory);
            if matrices.last().is_none_or(|matrix| matrix.title != title) {
                matrices.push(Matrix { title, names: vec![], pairs: vec![], best: 0.0 });
            }
            let Some(matrix) = matrices.last_mut() else { continue };
            for name in [pair.from.as_str(), pair.to.as_str()] {
                if !matrix.names.contains(&name) {
                    matrix.names.push(name);
                }
            }
            matrix.best = matrix.best.max(pair.gb_per_s.unwrap_or(0.0));
            matrix.pairs.push(pair);
        }
        matrices
    }

    fn pair(&self, from: &str, to: &str) -> Option<&'a Pair> {
        self.pairs.iter().find(|pair| pair.from == from && pair.to == to).copied()
    }

    fn colour(&self, gb_per_s: f64) -> (u8, u8, u8) {
        colour(if self.best > 0.0 { gb_per_s / self.best } else { 0.0 })
    }
}

/// The colour for a share between 0 and 1.
fn colour(share: f64) -> (u8, u8, u8) {
    let place = share.clamp(0.0, 1.0) * (SCALE.len() - 1) as f64;
    let below = (0..SCALE.len() - 1).rev().find(|at| *at as f64 <= place).unwrap_or(0);
    let part = place - below as f64;
    let (a, b) = (SCALE[below], SCALE[below + 1]);
    let mix = |a: u8, b: u8| {
        let mixed = f64::from(a) + (f64::from(b) - f64::from(a)) * part;
        // Between two bytes.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let byte = mixed.round() as u8;
        byte
    };
    (mix(a.0, b.0), mix(a.1, b.1), mix(a.2, b.2))
}

/// Whether dark text is easier to read on this colour.
fn is_light((red, green, blue): (u8, u8, u8)) -> bool {
    u32::from(red) * 3 + u32::from(green) * 6 + u32::from(blue) > 1400
}

/// A bandwidth with a sensible number of digits.
pub(super) fn figure(gb_per_s: f64) -> String {
    match gb_per_s {
        small if small < 0.01 => format!("{small:.4}"),
        small if small < 10.0 => format!("{small:.2}"),
        large => format!("{large:.1}"),
    }
}

/// The matrices for a terminal; rows send, columns receive. A matrix that is wider than the
/// terminal comes in parts, one below the other, each with some of its columns.
pub(super) fn terminal(pairs: &[Pair], columns: usize) -> String {
    let mut text = String::new();
    let bold = Style::new().bold();
    for matrix in Matrix::all(pairs) {
        let longest = matrix.names.iter().map(|name| name.len()).max().unwrap_or(0);
        let (first, width) = (longest.max(AXES.len()), longest.max(6) + 2);
        let most = (columns.saturating_sub(first + 2) / width).max(1);
        let _ = writeln!(text, "{bold}{}{bold:#}", matrix.title);
        for part in even_parts(&matrix.names, most) {
            let _ = write!(text, "{AXES:first$}  ");
            for to in part {
                let _ = write!(text, "{to:>width$}");
            }
            text.push('\n');
            for from in &matrix.names {
                let _ = write!(text, "{from:first$}  ");
                for to in part {
                    match matrix.pair(from, to).map(|pair| pair.gb_per_s) {
                        Some(Some(gb_per_s)) => {
                            let style = style(matrix.colour(gb_per_s));
                            let _ = write!(text, "{style}{:>width$}{style:#}", figure(gb_per_s));
                        }
                        Some(None) => drop(write!(text, "{:>width$}", "-")),
                        None => drop(write!(text, "{:>width$}", "")),
                    }
                }
                text.push('\n');
            }
            text.push('\n');
        }
    }
    for limit in limits(pairs) {
        let _ = writeln!(text, "{limit}");
    }
    text
}

/// Divides names into as few parts of at most `most` as possible, all of about the same length.
fn even_parts<'a, 'b>(names: &'b [&'a str], most: usize) -> std::slice::Chunks<'b, &'a str> {
    let parts = names.len().div_ceil(most).max(1);
    names.chunks(names.len().div_ceil(parts).max(1))
}

fn style(background: (u8, u8, u8)) -> Style {
    let rgb = |(red, green, blue)| Some(Color::Rgb(RgbColor(red, green, blue)));
    let writing = if is_light(background) { (0, 0, 0) } else { (255, 255, 255) };
    Style::new().bg_color(rgb(background)).fg_color(rgb(writing))
}

/// The distinct limits of the links.
fn limits(pairs: &[Pair]) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for pair in pairs {
        let Some(link) = &pair.link else { continue };
        let text = match (pair.limit_gb_per_s, pair.usual_gb_per_s) {
            (Some(most), Some(usual)) => {
                format!("{link}: at most {most:.0} GB/s, about {usual:.0} are usual")
            }
            (None, Some(usual)) => format!("{link}: about {usual:.0} GB/s are usual at 1MiB"),
            _ => continue,
        };
        if !all.contains(&text) {
            all.push(text);
        }
    }
    all
}

/// Side of a cell and the other dimensions of the picture, in pixels.
const CELL: (f64, f64) = (64.0, 34.0);
const MARGIN: f64 = 24.0;
const HEAD: f64 = 56.0;
const NAMES: f64 = 76.0;
const GAP: f64 = 16.0;
const LINE: f64 = 18.0;

/// The matrices as an SVG picture; rows send, columns receive.
pub(super) fn svg(pairs: &[Pair], simulated: bool) -> String {
    let matrices = Matrix::all(pairs);
    let sides = |matrix: &Matrix<'_>| {
        let count = matrix.names.len() as f64;
        (NAMES + CELL.0 * count, HEAD + CELL.1 * count + GAP)
    };
    let width = matrices.iter().map(|matrix| sides(matrix).0).fold(430.0, f64::max);
    let width = width + 2.0 * MARGIN;
    let limits = limits(pairs);
    let height: f64 = matrices.iter().map(|matrix| sides(matrix).1).sum();
    let height = height + LINE * limits.len() as f64 + 2.0 * MARGIN;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    let mut top = MARGIN;
    for matrix in &matrices {
        draw(&mut text, matrix, top, simulated);
        top += sides(matrix).1;
    }
    for limit in limits {
        top += LINE;
        write_text(&mut text, (MARGIN, top), "fill=\"#555555\"", &limit);
    }
    text.push_str("</svg>\n");
    text
}

fn draw(text: &mut String, matrix: &Matrix<'_>, top: f64, simulated: bool) {
    let note = if simulated { " (simulated GPUs: host memory)" } else { "" };
    write_text(text, (MARGIN, top + 16.0), "font-weight=\"bold\" font-size=\"14\"", &{
        format!("{}{note}", matrix.title)
    });
    let (left, first) = (MARGIN + NAMES, top + HEAD);
    for (at, name) in matrix.names.iter().enumerate() {
        let x = left + CELL.0 * (at as f64 + 0.5);
        write_text(text, (x, first - 8.0), "text-anchor=\"middle\"", name);
        let y = first + CELL.1 * (at as f64 + 0.5) + 4.0;
        write_text(text, (left - 8.0, y), "text-anchor=\"end\"", name);
    }
    for (row, from) in matrix.names.iter().enumerate() {
        for (column, to) in matrix.names.iter().enumerate() {
            let corner = (left + CELL.0 * column as f64, first + CELL.1 * row as f64);
            cell(text, matrix, corner, matrix.pair(from, to));
        }
    }
}

fn cell(text: &mut String, matrix: &Matrix<'_>, (x, y): (f64, f64), pair: Option<&Pair>) {
    let gb_per_s = pair.and_then(|pair| pair.gb_per_s);
    let fill = gb_per_s.map(|gb_per_s| matrix.colour(gb_per_s));
    let (red, green, blue) = fill.unwrap_or((240, 240, 240));
    let _ = write!(
        text,
        "<rect x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{}\" rx=\"3\" \
         fill=\"#{red:02x}{green:02x}{blue:02x}\">",
        CELL.0 - 2.0,
        CELL.1 - 2.0
    );
    if let Some(pair) = pair {
        let title =
            format!("{} to {}: {}, {}", pair.from, pair.to, pair.lanes.join(" "), pair.verdict);
        let _ = write!(text, "<title>{}</title>", xml_escaped(&title));
    }
    text.push_str("</rect>\n");
    let words = match (pair, gb_per_s) {
        (_, Some(gb_per_s)) => figure(gb_per_s),
        (Some(_), None) => "-".to_owned(),
        (None, None) => return,
    };
    let writing = if is_light((red, green, blue)) { "#000000" } else { "#ffffff" };
    let style = format!("text-anchor=\"middle\" fill=\"{writing}\"");
    write_text(text, (x + CELL.0 / 2.0 - 1.0, y + CELL.1 / 2.0 + 3.0), &style, &words);
}

fn write_text(text: &mut String, (x, y): (f64, f64), style: &str, words: &str) {
    let _ = writeln!(text, "<text x=\"{x}\" y=\"{y}\" {style}>{}</text>", xml_escaped(words));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::links::{Expected, Verdict};
    use crate::wire::peer::MemoryKind;

    fn pair(from: &str, to: &str, gb_per_s: Option<f64>) -> Pair {
        Pair {
            from: from.to_owned(),
            to: to.to_owned(),
            memory: MemoryKind::Host,
            lanes: vec!["sysv/memory".to_owned()],
            expected: Expected::SharedMemory,
            size_bytes: 1 << 20,
            gb_per_s,
            mean_gb_per_s: gb_per_s,
            latency_us: None,
            mean_latency_us: None,
            link: Some("host memory".to_owned()),
            limit_gb_per_s: None,
            usual_gb_per_s: Some(10.0),
            verdict: Verdict::Failed("a < b".to_owned()),
        }
    }

    #[test]
    fn a_matrix_has_a_cell_for_each_way_and_its_limit_below() {
        let rows = [pair("gpu0", "gpu1", Some(12.5)), pair("gpu1", "gpu0", None)];
        let plain = anstream::adapter::strip_str(&terminal(&rows, 80)).to_string();
        assert_eq!(
            plain,
            "1MiB host, GB/s\n\
             from \\ to      gpu0    gpu1\n\
             gpu0                   12.5\n\
             gpu1              -        \n\n\
             host memory: about 10 GB/s are usual at 1MiB\n"
        );
    }

    #[test]
    fn a_matrix_of_many_workers_comes_in_parts_that_fit_the_terminal() {
        let names: Vec<String> = (0..20).map(|at| format!("gpu{at}")).collect();
        let mut rows = Vec::new();
        for size_bytes in [8, 1 << 20] {
            for from in &names {
                for to in names.iter().filter(|to| *to != from) {
                    rows.push(Pair { size_bytes, ..pair(from, to, Some(12.5)) });
                }
            }
        }
        let plain = anstream::adapter::strip_str(&terminal(&rows, 80)).to_string();
        assert!(plain.lines().all(|line| line.chars().count() <= 80), "{plain}");
        assert_eq!(plain.matches("12.5").count(), rows.len(), "every value is there");
        let heads = plain.lines().filter(|line| line.starts_with(AXES));
        let counts: Vec<usize> = heads.map(|line| line.matches("gpu").count()).collect();
        assert_eq!(counts, [7, 7, 6, 7, 7, 6]);
        assert!(plain.starts_with("8 B host, GB/s\n"), "{plain}");
        assert_eq!(plain.matches("are usual").count(), 1, "{plain}");
    }

    #[test]
    fn a_picture_is_xml_whatever_the_verdicts_say() {
        let text = svg(&[pair("gpu0", "gpu1", Some(12.5))], true);
        let picture = roxmltree::Document::parse(&text).expect("XML");
        let said = |words: &str| picture.descendants().any(|node| node.text() == Some(words));
        assert!(said("12.5") && said("gpu0"), "{text}");
    }

    #[test]
    fn colours_run_from_one_end_of_the_scale_to_the_other() {
        assert_eq!(colour(0.0), SCALE[0]);
        assert_eq!(colour(0.5), SCALE[2]);
        assert_eq!(colour(1.0), SCALE[4]);
        assert!(is_light(SCALE[4]) && !is_light(SCALE[0]));
    }
}
