//! NCCL's lines: channels, and what has to be known to judge them.
//!
//! Judges nothing. The forms of the lines are those of NCCL 2.2 to 2.31 (`src/transport/*.cc`).
//!
//! *Invariant:* what is kept does not depend on the order of the lines.

use std::collections::{BTreeMap, BTreeSet};

use super::channel::{BetweenGpus, Channel, Who};
use super::lines::Record;

/// Devices with their numbers.
type List = Vec<(u32, String)>;

/// What NCCL's lines have said.
#[derive(Debug, Default)]
pub(super) struct Nccl {
    channels: BTreeSet<Raw>,
    /// The devices that a process has chosen, by `IB` or `Socket`: one list, unless they differ.
    devices: BTreeMap<(String, String), BTreeSet<List>>,
    pub(super) hosts: BTreeSet<String>,
    /// The most machines of a communicator.
    pub(super) nodes: u32,
    /// `2.19.3`.
    pub(super) versions: BTreeSet<String>,
    /// The networks that were chosen: `IB`, `Socket`.
    pub(super) networks: BTreeSet<String>,
    /// Settings, with a line that names them.
    pub(super) settings: BTreeMap<String, BTreeMap<String, String>>,
    /// The interfaces of sockets, with a line that names them.
    pub(super) interfaces: BTreeMap<String, String>,
    /// A line that says so, for facts that matter only beside others.
    pub(super) no_device: Option<(String, usize)>,
    pub(super) no_verbs: Option<(String, usize)>,
    pub(super) no_plugin: Option<(String, usize)>,
    pub(super) gdr_disabled: Option<(String, usize)>,
    pub(super) nvls_channels: u32,
    pub(super) link_layers: BTreeSet<String>,
}

/// A channel as it is written, from the view of the process that has written it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Raw {
    from: Who,
    to: Who,
    wire: String,
    /// The list that its device is in, and its place there.
    device: Option<(String, u32)>,
    gpus: Option<(String, String)>,
    sends: bool,
    host: String,
    process: String,
}

impl Nccl {
    /// Keeps what this says; `false` if it is nothing that we know.
    pub(super) fn see(&mut self, record: &Record<'_>) -> bool {
        if !record.host.is_empty() && !self.hosts.contains(record.host) {
            self.hosts.insert(record.host.to_owned());
        }
        self.see_version(record.whole);
        if let Some(raw) = raw(record) {
            self.channels.insert(raw);
            return true;
        }
        let body = record.body;
        let once = |place: &mut Option<(String, usize)>| {
            let (_, lines) = place.get_or_insert_with(|| (record.whole.to_owned(), 0));
            *lines += 1;
        };
        if body.contains("NET/IB") && body.contains("No device found") {
            once(&mut self.no_device);
        } else if body.contains("Failed to open libibverbs") {
            once(&mut self.no_verbs);
        } else if body.contains("GPU Direct RDMA Disabled for HCA") {
            once(&mut self.gdr_disabled);
        } else if body.contains("NET/Plugin") && body.contains("Could not find") {
            once(&mut self.no_plugin);
        } else if let Some((_, name)) = body.split_once("Using network ") {
            self.networks.insert(name.trim().to_owned());
        } else {
            return self.see_devices(record) || self.see_setting(record) || self.see_size(body);
        }
        true
    }

    fn see_version(&mut self, line: &str) {
        let Some((_, rest)) = line.split_once("NCCL version ") else { return };
        let version: String =
            rest.chars().take_while(|letter| letter.is_ascii_digit() || *letter == '.').collect();
        let version = version.trim_end_matches('.');
        if version.contains('.') {
            self.versions.insert(version.to_owned());
        }
    }

    /// `NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB …`, `Bootstrap : Using eth0:…`.
    fn see_devices(&mut self, record: &Record<'_>) -> bool {
        let Some((what, list)) = record.body.split_once(": Using ") else { return false };
        let mut keep = |names: Vec<(u32, String)>| {
            for (_, name) in names {
                let first = || record.whole.to_owned();
                self.interfaces.entry(name).or_insert_with(first);
            }
        };
        match what.trim() {
            "NET/IB" => {
                let layers = ["RoCE", "IB"].into_iter().filter(|layer| {
                    list.match_indices(layer).any(|(at, _)| list.get(..at).is_some_and(ends_port))
                });
                self.link_layers.extend(layers.map(str::to_owned));
                self.keep_list(record, "IB", list);
            }
            "NET/Socket" => {
                keep(devices(list, ':'));
                self.keep_list(record, "Socket", list);
            }
            "Bootstrap" if list.starts_with('[') => keep(devices(list, ':')),
            "Bootstrap" => keep(alone(list)),
            "NET" => keep(alone(list.trim_start_matches("interface "))),
            _ => return false,
        }
        true
    }

    fn keep_list(&mut self, record: &Record<'_>, kind: &str, list: &str) {
        let end = if kind == "IB" { '/' } else { ':' };
        let names = devices(list, end);
        if names.is_empty() {
            return;
        }
        for key in [record.process, record.host] {
            let key = (key.to_owned(), kind.to_owned());
            self.devices.entry(key).or_default().insert(names.clone());
        }
    }

    /// `NCCL_IB_HCA set by environment to mlx5_0.`
    fn see_setting(&mut self, record: &Record<'_>) -> bool {
        let (name, value) = match record.body.split_once(" set by environment to ") {
            Some(found) => found,
            None => match record.body.split_once(" set to ") {
                Some(found) => found,
                None => return false,
            },
        };
        let name = name.rsplit(char::is_whitespace).next().unwrap_or("");
        if !name.starts_with("NCCL_") {
            return false;
        }
        let value = value.trim().trim_end_matches('.').to_owned();
        let values = self.settings.entry(name.to_owned()).or_default();
        values.entry(value).or_insert_with(|| record.whole.to_owned());
        true
    }

    /// `comm 0x… rank 6 nRanks 16 nNodes 2 …`, `16 coll channels, …, 16 nvls channels, …`.
    fn see_size(&mut self, body: &str) -> bool {
        let words: Vec<&str> = body.split_whitespace().collect();
        let pairs = || words.iter().zip(words.iter().skip(1));
        let number = |text: &str| text.parse::<u32>().unwrap_or(0);
        let nodes = pairs().filter(|(name, _)| **name == "nNodes").map(|(_, size)| number(size));
        let nvls = pairs().filter(|(_, name)| **name == "nvls").map(|(size, _)| number(size));
        let (nodes, nvls) = (nodes.max(), nvls.max());
        self.nodes = self.nodes.max(nodes.unwrap_or(0));
        self.nvls_channels = self.nvls_channels.max(nvls.unwrap_or(0));
        nodes.is_some() || nvls.is_some()
    }

    /// The channels, each once: with the sender's device where the sender has said it.
    pub(super) fn channels(&self) -> BTreeSet<Channel> {
        let ends = |raw: &Raw| (raw.from.clone(), raw.to.clone(), raw.wire.clone());
        let sent: BTreeSet<_> = self.channels.iter().filter(|raw| raw.sends).map(ends).collect();
        let told = |raw: &&Raw| raw.sends || !sent.contains(&ends(raw));
        let channel = |raw: &Raw| Channel {
            from: raw.from.clone(),
            to: raw.to.clone(),
            wire: raw.wire.clone(),
            device: raw.device.as_ref().map(|(kind, place)| self.device(raw, kind, *place)),
        };
        self.channels.iter().filter(told).map(channel).collect()
    }

    /// The wires between GPUs, each once.
    pub(super) fn between_gpus(&self) -> BTreeSet<BetweenGpus> {
        let between = |raw: &Raw| {
            let (from, to) = raw.gpus.clone()?;
            Some(BetweenGpus { from, to, wire: raw.wire.clone() })
        };
        self.channels.iter().filter_map(between).collect()
    }

    /// The name of a device; its number if the process has not said which devices it has.
    fn device(&self, raw: &Raw, kind: &str, place: u32) -> String {
        let list = |of: &str| {
            let lists = self.devices.get(&(of.to_owned(), kind.to_owned()))?;
            // Processes of one name with different lists are several: nobody knows which it is.
            let list = lists.first().filter(|_| lists.len() == 1)?;
            list.iter().find(|(number, _)| *number == place).map(|(_, name)| name.clone())
        };
        list(&raw.process).or_else(|| list(&raw.host)).unwrap_or_else(|| place.to_string())
    }

    /// The values of a setting.
    pub(super) fn setting(&self, name: &str) -> impl Iterator<Item = (&str, &str)> {
        let values = self.settings.get(name).into_iter().flatten();
        values.map(|(value, line)| (value.as_str(), line.as_str()))
    }
}

/// Whether a port's number and a slash end here: `mlx5_0:1/`.
fn ends_port(text: &str) -> bool {
    let port = text.strip_suffix('/').and_then(|text| text.rsplit_once(':'));
    port.is_some_and(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()))
}

/// `[0]eth0:192.0.2.1<0> [1]…`: the numbers and the names, which this character ends. Several NICs
/// that are used as one are written `[0]={[0] mlx5_2:1/RoCE, [1] mlx5_3:1/RoCE}`.
fn devices(list: &str, end: char) -> Vec<(u32, String)> {
    let mut devices = Vec::new();
    let list = list.split(';').next().unwrap_or("");
    let mut rest = list;
    while let Some((_, after)) = rest.split_once('[') {
        rest = after;
        let Some((number, name)) = after.split_once(']') else { break };
        let Ok(number) = number.parse::<u32>() else { continue };
        if let Some(inside) = name.strip_prefix("={") {
            let (inside, after) = inside.split_once('}').unwrap_or((inside, ""));
            let names: Vec<String> =
                devices_in(inside, end).into_iter().map(|(_, name)| name).collect();
            devices.push((number, names.join("+")));
            rest = after;
        } else {
            rest = name;
            let name = name.split(end).next().unwrap_or("").trim();
            devices.push((number, name.to_owned()));
        }
    }
    devices.retain(|(_, name)| !name.is_empty() && !name.contains(char::is_whitespace));
    devices
}

/// Those of one that is made of several.
fn devices_in(list: &str, end: char) -> Vec<(u32, String)> {
    let one = |text: &str| {
        let (number, name) = text.trim().strip_prefix('[')?.split_once(']')?;
        let name = name.split(end).next()?.trim();
        Some((number.parse().ok()?, name.to_owned()))
    };
    list.split(',').filter_map(one).collect()
}

/// `eth0:192.0.2.1<0>`: the name.
fn alone(list: &str) -> Vec<(u32, String)> {
    let name = list.split(':').next().unwrap_or("").trim();
    if name.is_empty() { Vec::new() } else { vec![(0, name.to_owned())] }
}

/// `Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0/GDRDMA`; `Ring 00 : …` in old ones; and
/// `CollNet 00/0 : 3 [send] via COLLNET/SHARP/0`.
fn raw(record: &Record<'_>) -> Option<Raw> {
    let (what, rest) = record.body.split_once(" : ")?;
    let (ends, via) = rest.split_once(" via ")?;
    let collective = what.starts_with("CollNet ");
    if !collective && !what.starts_with("Channel ") && !what.starts_with("Ring ") {
        return None;
    }
    let sends = !ends.contains("[receive]");
    let (wire, device) = wire(via)?;
    let (from, to) = match ends.split_once(" -> ") {
        Some((from, to)) => (rank(from)?, rank(to)?),
        None if collective && sends => (rank(ends)?, Who::Name("collnet".to_owned())),
        None if collective => (Who::Name("collnet".to_owned()), rank(ends)?),
        None => return None,
    };
    let gpus = ends.split_once(" -> ").and_then(|(from, to)| Some((gpu(from)?, gpu(to)?)));
    let (host, process) = (record.host.to_owned(), record.process.to_owned());
    Some(Raw { from, to, wire, device, gpus, sends, host, process })
}

/// `1[1]`, `15`.
fn rank(text: &str) -> Option<Who> {
    let text = text.trim();
    let end = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    Some(Who::Rank(text.get(..end)?.parse().ok()?))
}

/// `1` of `0[1] [send]`, `1a000` of `0[1a000]`.
fn gpu(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    let (name, _) = rest.split_once(']')?;
    let is_number = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_number.then(|| name.to_owned())
}

/// The wire, and the device with the list that its number is of.
fn wire(via: &str) -> Option<(String, Option<(String, u32)>)> {
    // Two spaces part lines that ran together.
    let via = via.trim_start().split("  ").next()?.trim_end();
    if via.starts_with("direct shared memory") || via.starts_with("SHM") {
        return Some(("SHM".to_owned(), None));
    }
    let mut parts = via.split('/');
    match parts.next()? {
        "P2P" => {
            let way = parts.next()?.split_whitespace().next()?;
            Some((format!("P2P/{way}"), None))
        }
        kind @ ("NET" | "COLLNET") => {
            let name = parts.next()?;
            let number = parts.next()?;
            let digits = number.find(|letter: char| !letter.is_ascii_digit());
            let number: u32 = number.get(..digits.unwrap_or(number.len()))?.parse().ok()?;
            let gdr = if parts.any(|part| part.starts_with("GDRDMA")) { "/GDRDMA" } else { "" };
            let list = if name.starts_with("IB") { "IB" } else { name };
            let kind = if kind == "NET" { "NET" } else { "CollNet" };
            Some((format!("{kind}/{name}{gdr}"), Some((list.to_owned(), number))))
        }
        _ => None,
    }
}
