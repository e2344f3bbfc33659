//! From what the lines say to what is wrong.
//!
//! Reads no lines.
//!
//! *Invariant:* a job is not blamed for what it does not need: no missing network in a job on one
//! machine, no missing plugin if none was asked for.

use std::collections::{BTreeMap, BTreeSet};

use super::cause::{Cause, Found};
use super::channel::Channel;
use super::nccl::Nccl;
use super::ras::Status;
use super::ucx::{Lanes, Ucx};

/// What the lines of a job have said.
#[derive(Debug, Default)]
pub(super) struct Job {
    pub(super) nccl: Nccl,
    pub(super) ucx: Ucx,
    pub(super) ras: Option<Status>,
    /// Causes that a line has named by itself: the first such line, and how many.
    named: BTreeMap<Cause, (String, usize)>,
}

/// The longest part of a line that is kept.
const LONGEST: usize = 400;

impl Job {
    /// A line has named a cause.
    pub(super) fn found(&mut self, cause: Cause, line: &str) {
        let (_, lines) = self.named.entry(cause).or_insert_with(|| (line.to_owned(), 0));
        *lines += 1;
    }

    /// All channels, in order and each once.
    pub(super) fn channels(&self) -> Vec<Channel> {
        self.nccl.channels().into_iter().chain(self.ucx.channels().iter().cloned()).collect()
    }

    /// What is wrong, the weightiest first.
    pub(super) fn causes(&self, channels: &[Channel]) -> Vec<Found> {
        let mut causes = self.named.clone();
        self.judge_reach(&mut causes);
        let mut add = |cause: Cause, line: &str, lines: usize| {
            causes.entry(cause).or_insert_with(|| (line.to_owned(), lines));
        };
        if self.nccl.versions.len() > 1 {
            let all: Vec<&str> = self.nccl.versions.iter().map(String::as_str).collect();
            add(Cause::Versions, &format!("NCCL version {}", all.join(" and ")), all.len());
        }
        if let Some(line) = self.wrong_interface(channels) {
            add(Cause::Interface, line, 1);
        }
        if let Some((line, lines)) = self.unused_plugin() {
            add(Cause::Plugin, line, lines);
        }
        for (cause, line, lines) in self.downgrades(channels) {
            add(cause, line, lines);
        }
        if let Some(line) = self.tcp_only() {
            add(Cause::TcpOnly, &line, 1);
        }
        for (cause, line) in self.ras.iter().flat_map(Status::causes) {
            add(cause, &line, 1);
        }
        let found = |(cause, (line, lines)): (Cause, (String, usize))| {
            let line: String = line.chars().take(LONGEST).collect();
            Found { cause, text: cause.says().to_owned(), line, lines }
        };
        causes.into_iter().map(found).collect()
    }

    /// A NIC that does not answer: with InfiniBand there is no index to get wrong.
    fn judge_reach(&self, causes: &mut BTreeMap<Cause, (String, usize)>) {
        let layers = &self.nccl.link_layers;
        let infiniband = layers.contains("IB") && !layers.contains("RoCE");
        if let Some(lines) = infiniband.then(|| causes.remove(&Cause::GidIndex)).flatten() {
            causes.entry(Cause::Unreachable).or_insert(lines);
        }
    }

    /// Whether bytes have to go to another machine, as far as the lines tell.
    fn needs_network(&self, channels: &[Channel]) -> bool {
        let sockets = channels.iter().any(|channel| channel.wire.starts_with("NET/Socket"));
        let mixed = self.nccl.networks.len() > 1;
        let nothing_known = channels.is_empty() && self.nccl.hosts.is_empty();
        let several = self.nccl.hosts.len() > 1 || self.nccl.nodes > 1;
        sockets || mixed || several || nothing_known
    }

    /// A slower wire than there could be, with the line that says why.
    fn downgrades<'a>(&'a self, channels: &[Channel]) -> Vec<(Cause, &'a str, usize)> {
        let mut found = Vec::new();
        let nccl = &self.nccl;
        if self.needs_network(channels) {
            let disabled = nccl.setting("NCCL_IB_DISABLE").find(|(value, _)| is_on(value));
            found.extend(disabled.map(|(_, line)| (Cause::IbDisabled, line, 1)));
            let named = nccl.setting("NCCL_IB_HCA").next().is_some();
            let cause = if named { Cause::HcaName } else { Cause::NoRdmaDevice };
            let device = nccl.no_device.as_ref();
            found.extend(device.map(|(line, lines)| (cause, line.as_str(), *lines)));
            let verbs = nccl.no_verbs.as_ref();
            found.extend(verbs.map(|(line, lines)| (Cause::NoVerbs, line.as_str(), *lines)));
        }
        let direct = channels.iter().any(|channel| channel.wire.ends_with("/GDRDMA"));
        let disabled = nccl.gdr_disabled.as_ref().filter(|_| !direct);
        found.extend(disabled.map(|(line, lines)| (Cause::GdrModule, line.as_str(), *lines)));
        let shared = channels.iter().any(|channel| channel.wire == "SHM");
        let off = nccl.setting("NCCL_P2P_DISABLE").find(|(value, _)| is_on(value));
        let near = nccl.setting("NCCL_P2P_LEVEL").find(|(value, _)| matches!(*value, "LOC" | "0"));
        // NCCL shows NCCL_P2P_DISABLE=1 as the level LOC.
        let p2p = off.or(near).filter(|_| shared || channels.is_empty());
        found.extend(p2p.map(|(_, line)| (Cause::P2pSwitchedOff, line, 1)));
        found
    }

    /// An interface that is private to its machine, although others have to be reached.
    fn wrong_interface(&self, channels: &[Channel]) -> Option<&str> {
        let fails = self.named.contains_key(&Cause::Unreachable);
        let sockets: BTreeSet<&str> = channels
            .iter()
            .filter(|channel| channel.wire.starts_with("NET/Socket"))
            .filter_map(|channel| channel.device.as_deref())
            .collect();
        let wrong = |(name, _): &(&String, &String)| {
            let loopback = name.as_str() == "lo" && (fails || sockets.contains("lo"));
            loopback || is_private(name) && (fails || !sockets.is_empty())
        };
        self.nccl.interfaces.iter().find(wrong).map(|(_, line)| line.as_str())
    }

    /// A plugin that was asked for and is not there.
    fn unused_plugin(&self) -> Option<(&str, usize)> {
        let named = self.nccl.setting("NCCL_NET_PLUGIN").any(|(value, _)| value != "none");
        let (line, lines) = self.nccl.no_plugin.as_ref().filter(|_| named)?;
        Some((line, *lines))
    }

    /// The line after which only TCP is left to another machine.
    fn tcp_only(&self) -> Option<String> {
        let local = |name: &String| {
            let here = ["self", "sysv", "posix", "xpmem", "knem", "cma", "cuda_copy", "cuda_ipc"];
            here.contains(&name.as_str())
        };
        let only = |names: &BTreeSet<String>| {
            let mut names = names.iter().filter(|name| !local(name)).peekable();
            names.peek().is_some() && names.all(|name| name == "tcp")
        };
        let slow = |lanes: &Lanes| {
            only(&lanes.transports) && (lanes.certain || !lanes.transports.iter().any(local))
        };
        let lanes = self.ucx.elsewhere.iter().find(|lanes| slow(lanes));
        let table = || self.ucx.tables().find(slow).map(|lanes| lanes.line);
        let transport = |name: &String| name.split('/').next().unwrap_or("").to_owned();
        let resources: BTreeSet<String> = self.ucx.resources.iter().map(transport).collect();
        let context = || {
            let all: Vec<&str> = self.ucx.resources.iter().map(String::as_str).collect();
            only(&resources).then(|| format!("resources: {}", all.join(" ")))
        };
        lanes.map(|lanes| lanes.line.clone()).or_else(table).or_else(context)
    }

    /// What is not wrong, but good to know.
    pub(super) fn notes(&self, channels: &[Channel]) -> Vec<String> {
        let mut notes = Vec::new();
        let has = |wire: &dyn Fn(&str) -> bool| channels.iter().any(|one| wire(&one.wire));
        if self.nccl.nvls_channels > 0 {
            let channels = self.nccl.nvls_channels;
            notes.push(format!("NVLS: {channels} channels reduce in the NVSwitches"));
        }
        let plain = has(&|wire| wire.starts_with("NET/IB") && !wire.ends_with("/GDRDMA"));
        if plain && self.nccl.gdr_disabled.is_none() {
            let text = "NET/IB without GDRDMA: data goes by way of host memory, and no line says \
                        why (NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH would)";
            notes.push(text.to_owned());
        }
        let off = self.nccl.setting("NCCL_SHM_DISABLE").any(|(value, _)| is_on(value));
        if off {
            notes.push("NCCL_SHM_DISABLE: GPUs without P2P use the network".to_owned());
        }
        let pairs: BTreeSet<_> = channels.iter().map(|one| (&one.from, &one.to)).collect();
        let wires: BTreeSet<_> =
            channels.iter().map(|one| (&one.from, &one.to, &one.wire)).collect();
        if wires.len() > pairs.len() && self.ucx.channels().is_empty() {
            let text = "some ranks have several wires to the same other: ranks are numbered in \
                        each communicator anew";
            notes.push(text.to_owned());
        }
        notes
    }
}

/// Whether a setting's value says yes.
fn is_on(value: &str) -> bool {
    !matches!(value, "" | "0")
}

/// Interfaces of containers and virtual machines, which lead nowhere else.
fn is_private(name: &str) -> bool {
    let begins = ["docker", "veth", "br-", "virbr", "cni", "cali", "flannel", "lxc", "tunl"];
    begins.iter().any(|begin| name.starts_with(begin))
}
