//! The matrix that `nvidia-smi topo -m` prints.
//!
//! Writes only what the matrix can express: links, affinities, GPU NUMA IDs, NIC names.
//!
//! *Invariant:* `read::smi` reads it back to the same devices, links and affinities.

use std::ops::Range;

use crate::ids::NumaId;
use crate::topology::{Device, Gpu, LinkKind, Topology};

const LEGEND: &str = "
Legend:

  X    = Self
  SYS  = Through the interconnect between NUMA nodes (UPI, Infinity Fabric)
  NODE = Through the interconnect between PCIe host bridges of one NUMA node
  PHB  = Through one PCIe host bridge (the CPU)
  PXB  = Through several PCIe bridges, not the host bridge
  PIX  = Through at most one PCIe bridge
  NV#  = Through # bonded NVLinks
";

/// The cell of an unknown link.
const UNKNOWN: &str = "N/A";

impl Topology {
    /// The machine as `nvidia-smi topo -m` prints it: cells, affinities, legends. Columns are
    /// aligned with spaces; an unknown link is `N/A`.
    pub fn to_matrix(&self) -> String {
        align(&self.rows()) + &self.legends()
    }

    /// The matrix for people who see only so many columns: if it is wider, it comes in parts, one
    /// below the other, each with some of its columns.
    pub fn to_matrix_within(&self, width: usize) -> String {
        let rows = self.rows();
        let parts = parts(&widths(&rows), self.gpus.len(), self.nics.len(), width);
        let tables = parts.into_iter().map(|columns| {
            let cells = |row: &Vec<String>| {
                let own = row.get(columns.clone()).or_else(|| row.get(columns.start..))?;
                let shown = columns.start == 1 || !own.is_empty();
                shown.then(|| row.iter().take(1).chain(own).cloned().collect())
            };
            align(&rows.iter().filter_map(cells).collect::<Vec<Vec<String>>>())
        });
        tables.collect::<Vec<_>>().join("\n") + &self.legends()
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let devices: Vec<Device> = self.devices().collect();
        let mut rows = vec![heading(&devices)];
        rows.extend(devices.iter().map(|row| self.row(*row, &devices)));
        rows
    }

    fn legends(&self) -> String {
        let mut text = LEGEND.to_owned();
        if !self.nics.is_empty() {
            text.push_str("\nNIC Legend:\n\n");
            for (at, nic) in self.nics.iter().enumerate() {
                let dma = nic.dma.as_ref().and_then(|dma| dma.pci);
                let dma = dma.map_or_else(String::new, |pci| format!(" (DMA function {pci})"));
                text.push_str(&format!("  NIC{at}: {}{dma}\n", nic.name));
            }
        }
        text
    }

    fn row(&self, row: Device, columns: &[Device]) -> Vec<String> {
        let mut cells = vec![row.to_string()];
        for column in columns {
            let link = self.links.between(row, *column);
            cells.push(match link {
                // Centred as in nvidia-smi, so that the diagonal stands out.
                Some(LinkKind::X) => " X".to_owned(),
                Some(kind) => kind.to_string(),
                None => UNKNOWN.to_owned(),
            });
        }
        if let Device::Gpu(index) = row
            && let Some(gpu) = self.gpus.iter().find(|gpu| gpu.index == index)
        {
            cells.extend(affinities(gpu));
        }
        cells
    }
}

fn heading(devices: &[Device]) -> Vec<String> {
    let names = devices.iter().map(Device::to_string);
    let affinities = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"].map(str::to_owned);
    std::iter::once(String::new()).chain(names).chain(affinities).collect()
}

fn affinities(gpu: &Gpu) -> [String; 3] {
    let unknown = || UNKNOWN.to_owned();
    let numa = gpu.numa_set.as_ref().map(|set| set.to_string());
    [
        gpu.cpus.as_ref().map_or_else(unknown, |cpus| cpus.to_string()),
        numa.or(gpu.numa.as_ref().map(NumaId::to_string)).unwrap_or_else(unknown),
        gpu.memory_numa.as_ref().map_or_else(unknown, NumaId::to_string),
    ]
}

fn widths(rows: &[Vec<String>]) -> Vec<usize> {
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
    };
    (0..).map_while(width).collect()
}

/// The columns of each part of a matrix that is to fit a width; the first column is in all. GPUs,
/// NICs and affinities begin a part of their own where they don't fit with what is before.
fn parts(widths: &[usize], gpus: usize, nics: usize, width: usize) -> Vec<Range<usize>> {
    let Some((names, _)) = widths.split_first() else { return Vec::new() };
    let length = |columns: &Range<usize>| {
        widths[columns.clone()].iter().map(|width| 2 + width).sum::<usize>() + names
    };
    let kinds = [1..1 + gpus, 1 + gpus..1 + gpus + nics, 1 + gpus + nics..widths.len()];
    let mut parts: Vec<Range<usize>> = Vec::new();
    for kind in kinds.into_iter().filter(|kind| !kind.is_empty()) {
        let last = parts.last_mut();
        if let Some(last) = last.filter(|last| length(&(last.start..kind.end)) <= width) {
            last.end = kind.end;
            continue;
        }
        let mut start = kind.start;
        for end in kind.clone() {
            if end > start && length(&(start..end + 1)) > width {
                parts.push(start..end);
                start = end;
            }
        }
        parts.push(start..kind.end);
    }
    parts
}

/// Aligns cells in columns, two spaces apart, without spaces at the ends of lines.
fn align(rows: &[Vec<String>]) -> String {
    let widths = widths(rows);
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_matrix_of_twenty_devices_comes_in_parts_that_fit() {
        let text = crate::topology::builtin("dgx-h100").expect("built in");
        let machine = crate::topology::parse(text).expect("a machine");
        for width in [80, 120] {
            let text = machine.to_matrix_within(width);
            let (tables, legend) = text.split_once("\nLegend").expect("a legend");
            assert!(legend.contains("NIC11: mlx5_11"), "{text}");
            assert!(tables.lines().all(|line| line.chars().count() <= width), "{text}");
            let headings = tables.split("\n\n").filter_map(|part| part.lines().next());
            let columns: Vec<&str> = headings.flat_map(str::split_whitespace).collect();
            let whole = machine.to_matrix();
            let all = whole.lines().next().expect("a heading").split_whitespace();
            assert_eq!(columns, all.collect::<Vec<_>>(), "{text}");
        }
        assert_eq!(machine.to_matrix_within(200), machine.to_matrix());
        insta::assert_snapshot!(machine.to_matrix_within(80));
    }

    #[test]
    fn parts_are_never_empty_however_narrow() {
        for width in 0..40 {
            let parts = parts(&[4, 4, 4, 5, 9], 2, 1, width);
            assert!(parts.iter().all(|part| !part.is_empty()), "{parts:?}");
            assert_eq!((parts[0].start, parts.last().map(|part| part.end)), (1, Some(5)));
            assert!(parts.windows(2).all(|two| two[0].end == two[1].start), "{parts:?}");
        }
    }
}
