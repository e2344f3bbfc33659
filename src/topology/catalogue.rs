//! The machines of `topologies/`, built into the program.
//!
//! Does not read the directory at run time.
//!
//! *Invariant:* names are the files' names without `.yaml`, in rising order.

/// Names each file once, and takes its text in.
macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../topologies/", $name, ".yaml")))),*]
    };
}

const FILES: &[(&str, &str)] = files![];

/// The text of a built-in machine.
pub fn builtin(name: &str) -> Option<&'static str> {
    FILES.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// The names of all built-in machines, in rising order.
pub fn builtin_names() -> impl Iterator<Item = &'static str> {
    FILES.iter().map(|(name, _)| *name)
}
