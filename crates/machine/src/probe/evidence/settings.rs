//! Variables and files that change how programs use GPUs.
//!
//! *Invariant:* of what may hold a secret only the name is read.

use std::path::{Path, PathBuf};

use super::super::Options;
use cuda_cluster_model::ids::PciAddress;
use cuda_cluster_model::preflight::Setting;
use cuda_cluster_model::topology;

/// Prefixes of names that matter.
const PREFIXES: [&str; 3] = ["NCCL_", "UCX_", "CUDA_"];

/// Further names that matter.
const NAMES: [&str; 6] = [
    "NVIDIA_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_USE_CUDA_DSA",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
];

/// Names of which only their presence matters: addresses of proxies have passwords in them.
const PRESENT: [&str; 4] = ["http_proxy", "https_proxy", "all_proxy", "no_proxy"];

/// Longest value that is kept.
const LONGEST: usize = 1 << 12;

/// Reads the environment and the files.
pub(super) fn look(options: &Options) -> Vec<Setting> {
    let own = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let mut all: Vec<Setting> =
        own.filter_map(|(name, value)| setting("environment", name, value)).collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let files = [
        Some(options.etc.join("nccl.conf")),
        home.map(|home| home.join(".nccl.conf")),
        Some(options.etc.join("environment")),
        Some(options.etc.join("ucx/ucx.conf")),
    ];
    for file in files.into_iter().flatten() {
        all.extend(of_file(&file));
    }
    all
}

fn setting(place: &str, name: String, value: String) -> Option<Setting> {
    let present = PRESENT.iter().any(|one| name.eq_ignore_ascii_case(one));
    let matters = present
        || NAMES.contains(&name.as_str())
        || PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    // Our own are not the user's.
    if !matters || name.starts_with("CUDA_CLUSTER_") {
        return None;
    }
    let value = match present {
        true => "(set)".to_owned(),
        false => value.chars().take(LONGEST).collect(),
    };
    let gpus = (name == "NCCL_TOPO_FILE").then(|| gpus_of(Path::new(&value)));
    Some(Setting { place: place.to_owned(), name, value, gpus })
}

/// `NAME=value` or `export NAME="value"`, a line each, with comments.
fn of_file(path: &Path) -> Vec<Setting> {
    let Ok(text) = std::fs::read_to_string(path) else { return Vec::new() };
    let place = path.display().to_string();
    let line = |line: &str| {
        let line = line.trim();
        let line = line.strip_prefix("export ").unwrap_or(line);
        let (name, value) = line.split_once('=').filter(|_| !line.starts_with('#'))?;
        let value = value.trim().trim_matches(['"', '\'']);
        setting(&place, name.trim().to_owned(), value.to_owned())
    };
    text.lines().filter_map(line).collect()
}

/// The GPUs in a topology for NCCL.
fn gpus_of(path: &Path) -> Result<Vec<PciAddress>, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    let read = topology::parse(&text).map_err(|error| error.to_string())?;
    Ok(read.gpus.iter().filter_map(|gpu| gpu.pci).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_as_nccl_and_shells_write_them_and_proxies_stay_secret() {
        let folder = tempfile::tempdir().expect("a directory");
        let file = folder.path().join("nccl.conf");
        let text = "# NCCL_DEBUG=INFO\nNCCL_P2P_DISABLE=1\nexport UCX_TLS=\"tcp\"\nPATH=/bin\n\
                    https_proxy=http://me:secret@proxy\nnonsense\nCUDA_CLUSTER_UCX=/x\n";
        std::fs::write(&file, text).expect("written");
        let found = of_file(&file);
        let pairs: Vec<(&str, &str)> =
            found.iter().map(|one| (one.name.as_str(), one.value.as_str())).collect();
        let expected = [("NCCL_P2P_DISABLE", "1"), ("UCX_TLS", "tcp"), ("https_proxy", "(set)")];
        assert_eq!(pairs, expected);
        assert!(of_file(&folder.path().join("missing")).is_empty());
    }
}
