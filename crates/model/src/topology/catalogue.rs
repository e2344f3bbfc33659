//! The machines of `topologies/`, built into the program.
//!
//! Does not read the directory at run time. The crate has links to its files, which cargo packs.
//!
//! *Invariant:* names are the files' names without `.yaml`, in ascending order.

/// Lists each file once, and embeds its text.
macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../topologies/", $name, ".yaml")))),*]
    };
}

const FILES: &[(&str, &str)] = files![
    "a100-pcie-4-bridges",
    "aws-p4d",
    "aws-p5",
    "aws-p6-b200",
    "azure-ndv5",
    "dgx-1-p100",
    "dgx-1-v100",
    "dgx-2",
    "dgx-a100",
    "dgx-a100-mig",
    "dgx-b200",
    "dgx-h100",
    "dgx-spark",
    "dgx-station-a100",
    "gb200-nvl72-tray",
    "gb300-nvl72-tray",
    "gcp-a3-mega",
    "gcp-a3-ultra",
    "gcp-a4",
    "gh200",
    "hgx-b200",
    "hgx-b300",
    "ibm-ac922",
    "l40s-8",
    "laptop",
    "rtx-4090-2",
    "rtx-4090-8",
    "rtx-pro-6000-8",
];

/// The YAML of a built-in machine, to be read by [`parse`](super::parse); `None` for a name that is
/// not one of [`builtin_names`].
pub fn builtin(name: &str) -> Option<&'static str> {
    FILES.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// The names of all built-in machines, in ascending order.
pub fn builtin_names() -> impl Iterator<Item = &'static str> {
    FILES.iter().map(|(name, _)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::parse;

    #[test]
    fn every_file_of_the_directory_is_built_in() {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../topologies");
        let mut files: Vec<String> = std::fs::read_dir(directory)
            .expect("topologies/ is there")
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter_map(|file| file.strip_suffix(".yaml").map(str::to_owned))
            .collect();
        files.sort();
        assert!(builtin_names().eq(files.iter().map(String::as_str)), "{files:?}");
    }

    #[test]
    fn every_built_in_machine_reads_and_knows_all_its_links() {
        for name in builtin_names() {
            let topology = parse(builtin(name).expect(name)).expect(name);
            assert_eq!(topology.name.as_deref(), Some(name));
            assert!(topology.source.is_some(), "{name}: a source is named");
            let devices = topology.devices().count();
            assert_eq!(topology.links.len(), devices * (devices - 1) / 2, "{name}");
            assert!(topology.gpus.iter().all(|gpu| gpu.cpus.is_some() && gpu.uuid.is_some()));
        }
    }
}
