//! The matrix that `nvidia-smi topo -m` prints.
//!
//! Writes only what the matrix can express: links, affinities, GPU NUMA IDs, NIC names.
//!
//! *Invariant:* `read::smi` reads it back to the same devices, links and affinities.

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
        let devices: Vec<Device> = self.devices().collect();
        let mut rows = vec![heading(&devices)];
        rows.extend(devices.iter().map(|row| self.row(*row, &devices)));
        let mut text = align(&rows);
        text.push_str(LEGEND);
        if !self.nics.is_empty() {
            text.push_str("\nNIC Legend:\n\n");
            for (at, nic) in self.nics.iter().enumerate() {
                text.push_str(&format!("  NIC{at}: {}\n", nic.name));
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

/// Aligns cells in columns, two spaces apart, without spaces at the ends of lines.
fn align(rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
    };
    let widths: Vec<usize> = (0..).map_while(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}
