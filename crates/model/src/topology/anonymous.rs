//! A topology to share: the machine without anything that identifies it.
//!
//! Places, sizes, links and locality stay, because they are what a report is about.
//!
//! *Invariant:* equal identities stay equal and different ones different, so the plan for the
//! anonymous machine is the plan for the real one.

use std::collections::BTreeMap;

use super::Topology;
use crate::ids::GpuUuid;

/// What stands for the UUID of a fabric's cluster: a machine is in one.
const NO_CLUSTER: &str = "00000000-0000-0000-0000-000000000000";

impl Topology {
    /// The same machine with numbered UUIDs, and without its name, processes and notes about them.
    pub fn anonymized(&self) -> Topology {
        let mut machine = self.clone();
        let mut names = Names::default();
        machine.name = self.name.as_ref().map(|_| "machine".to_owned());
        for gpu in &mut machine.gpus {
            gpu.uuid = gpu.uuid.as_ref().map(|uuid| names.of(uuid));
            gpu.processes.clear();
            if let Some(fabric) = &mut gpu.fabric {
                fabric.cluster = fabric.cluster.as_ref().map(|_| NO_CLUSTER.to_owned());
            }
            for part in &mut gpu.mig {
                part.uuid = names.of(&part.uuid);
            }
        }
        for note in &mut machine.notes {
            for (before, after) in &names.given {
                note.text = note.text.replace(before.as_str(), after.as_str());
                note.about = note.about.replace(before.as_str(), after.as_str());
            }
            if let Some(name) = self.name.as_deref().filter(|name| !name.is_empty()) {
                note.text = note.text.replace(name, "machine");
            }
        }
        machine
    }
}

/// New names, numbered in the order of first use.
#[derive(Default)]
struct Names {
    given: BTreeMap<GpuUuid, GpuUuid>,
}

impl Names {
    fn of(&mut self, uuid: &GpuUuid) -> GpuUuid {
        let number = self.given.len();
        let numbered = || GpuUuid::numbered(uuid.is_mig(), number);
        self.given.entry(uuid.clone()).or_insert_with(numbered).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{builtin, builtin_names, parse};
    use crate::topology::Note;

    #[test]
    fn nothing_that_identifies_a_machine_is_left_and_everything_else_is() {
        for name in builtin_names() {
            let mut machine = parse(builtin(name).expect("built in")).expect("it reads");
            machine.name = Some("secret-host".to_owned());
            machine.notes.push(Note::new("GPU0", "seen on secret-host"));
            let anonymous = machine.anonymized();
            let text = anonymous.to_yaml();
            assert!(!text.contains("secret-host"), "{name}");
            for gpu in &machine.gpus {
                for uuid in gpu.uuid.iter().chain(gpu.mig.iter().map(|part| &part.uuid)) {
                    assert!(!text.contains(uuid.as_str()), "{name}: {uuid}");
                }
            }
            assert_eq!(parse(&text).expect("it reads back"), anonymous, "{name}");
            assert_eq!((&anonymous.links, &anonymous.nics), (&machine.links, &machine.nics));
            assert_eq!(anonymous.anonymized(), anonymous, "{name}");
        }
    }
}
