//! A commented spec to begin with, for a machine.
//!
//! *Invariant:* what stands in it without a comment can be planned on that machine, without a note
//! about UCX.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::{CallerEnvironment, plan};
use crate::spec::{ClusterSpec, GpuSelection, NetDevices, Request};
use crate::text::wrapped;
use crate::topology::Topology;
use crate::units::HumanBytes;

/// Columns of the lines.
const WIDTH: usize = 80;

/// A spec for a machine, which `source` names (a built-in machine or a file), or for this one.
pub fn starter(topology: &Topology, source: Option<&str>, caller: &CallerEnvironment) -> String {
    let mut text = comment("", &format!("A spec for {}.", described(topology))) + "#\n";
    text.push_str(
        "#   cuda-cluster plan -f THIS_FILE --explain    what it gives, and why\n\
         #   cuda-cluster up -f THIS_FILE\n#\n\
         # Every key: cuda-cluster spec schema. A line that begins with '#' shows a\n\
         # default or another choice.\nversion: 1\nname: default\n\n",
    );
    if let Some(source) = source {
        let _ = writeln!(text, "topology: {source}\nsimulate: true      # its GPUs are not here\n");
    }
    text.push_str(
        "# native runs functions of a Rust program, dask real Dask, command any program.\n\
         #engine: native\n\n",
    );
    let mut chosen = ClusterSpec::default();
    if topology.gpus.is_empty() {
        (chosen.gpus, chosen.cpu_workers) = (Some(GpuSelection::None), Some(2));
        text.push_str("# There is no GPU.\ngpus: none\ncpu_workers: 2\n#threads: 1\n\n");
    } else {
        text.push_str(
            "# Also '0-3', UUIDs, PCI addresses, or {count: 4, choose: best-connected}.\n\
             #gpus: all\n#workers_per_gpu: 1\n#threads: 1\n\n",
        );
    }
    text.push_str(
        "# local: the CPUs near its GPU; split: cores that no other worker has; none.\n\
         #cpus: local\n\n",
    );
    text.push_str("ucx:\n");
    let asked: [Offer; 2] = [
        ("nvlink: true", "Device memory goes over NVLink", |spec| spec.ucx.nvlink = Some(true)),
        (
            "infiniband: true\n  net_devices: auto",
            "Data go over InfiniBand or RoCE, by the NIC nearest to each GPU",
            |spec| {
                spec.ucx.infiniband = Some(true);
                spec.ucx.net_devices = Some(NetDevices::Auto);
            },
        ),
    ];
    let mut any = false;
    for (lines, what, ask) in asked {
        let mut trial = chosen.clone();
        ask(&mut trial);
        match objection(topology, trial.clone(), caller) {
            None => {
                let _ = writeln!(text, "  # {what}.\n  {lines}");
                (chosen, any) = (trial, true);
            }
            Some(why) => {
                text.push_str(&comment("  ", &format!("{what}; not here: {why}.")));
                for line in lines.lines() {
                    let _ = writeln!(text, "  #{}", line.trim_start());
                }
            }
        }
    }
    if !any {
        // A section with comments alone is empty, and that is what it says.
        text.push_str("  # Nothing is asked for; the plan says which transports are used.\n");
    }
    text.push_str(
        "\n# A size, a fraction of the whole, or auto: each worker's share.\n\
         #memory: {limit: auto}\n#device: {memory_limit: auto}\n\
         # A pool of device memory, as RMM's.\n#rmm: {pool_size: 0.5}\n\n\
         # Environment of every worker; a name without a value is inherited.\n\
         #worker:\n#  env:\n#    NAME: value\n\n\
         # READY only after every pair of workers has moved data over the expected lanes.\n\
         #verify: true\n# Refuse a plan with notes on what is missing or doubtful.\n#strict: true\n",
    );
    text
}

/// A comment, in lines that fit a terminal of 80 columns.
fn comment(indent: &str, text: &str) -> String {
    let begin = format!("{indent}# ");
    let lines = wrapped(text, WIDTH - begin.len());
    lines.iter().map(|line| format!("{begin}{line}\n")).collect()
}

/// Lines of a spec, what they do, and the same as a change.
type Offer = (&'static str, &'static str, fn(&mut ClusterSpec));

/// `dgx-h100: 8 x NVIDIA H100 80GB HBM3 (80.0 GiB), 12 NICs, 2 NUMA nodes`.
fn described(topology: &Topology) -> String {
    let mut models: BTreeMap<String, usize> = BTreeMap::new();
    for gpu in &topology.gpus {
        let name = gpu.name.clone().unwrap_or_else(|| "GPU".to_owned());
        let memory = gpu.memory_bytes.map(|bytes| format!(" ({})", HumanBytes(bytes)));
        *models.entry(name + &memory.unwrap_or_default()).or_default() += 1;
    }
    let mut parts: Vec<String> =
        models.into_iter().map(|(model, count)| format!("{count} x {model}")).collect();
    if parts.is_empty() {
        parts.push("no GPU".to_owned());
    }
    let counts = [("NIC", topology.nics.len()), ("NUMA node", topology.numa.len())];
    for (what, count) in counts.into_iter().filter(|(_, count)| *count > 0) {
        parts.push(format!("{count} {what}{}", if count == 1 { "" } else { "s" }));
    }
    let name = topology.name.as_deref().unwrap_or("this machine");
    format!("{name}: {}", parts.join(", "))
}

/// Why a spec is not right for a machine, as far as UCX is concerned.
fn objection(topology: &Topology, spec: ClusterSpec, caller: &CallerEnvironment) -> Option<String> {
    let request = Request::of(spec).map_err(|error| error.to_string());
    match request.map(|request| plan(topology, &request, caller)) {
        Err(text) => Some(text),
        Ok(Err(error)) => Some(error.to_string()),
        Ok(Ok(plan)) => {
            let mut notes = plan
                .notes
                .into_iter()
                .filter(|note| note.about.starts_with("ucx.") && note.about != "ucx.library");
            notes.next().map(|note| note.text)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec;
    use crate::topology::{builtin, builtin_names, parse};

    #[test]
    fn what_it_writes_is_right_on_every_machine() {
        let none = Topology { version: 1, ..Topology::default() };
        let machines =
            builtin_names().map(|name| (name, parse(builtin(name).expect(name)).expect(name)));
        for (name, topology) in machines.chain([("none", none)]) {
            let caller = CallerEnvironment::default();
            let text = starter(&topology, Some(name), &caller);
            let spec = spec::parse(&text, name).unwrap_or_else(|error| panic!("{error}\n{text}"));
            assert_eq!(spec.topology.as_deref(), Some(name));
            let widest = text.lines().map(str::len).max();
            assert!(widest <= Some(WIDTH), "{text}");
            let objection = objection(&topology, ClusterSpec { topology: None, ..spec }, &caller);
            assert_eq!(objection, None, "{name}\n{text}");
        }
    }

    #[test]
    fn it_reads_like_a_persons() {
        for name in ["dgx-h100", "rtx-4090-2"] {
            let topology = parse(builtin(name).expect(name)).expect(name);
            let text = starter(&topology, Some(name), &CallerEnvironment::default());
            insta::assert_snapshot!(format!("starter-{name}"), text);
        }
    }
}
