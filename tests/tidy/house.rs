//! All of `src` and `crates`, and what a path in one file means in another.

use std::collections::{BTreeMap, BTreeSet};

use crate::source::Source;

/// The floors, and on each the modules that may live there. `a::b` is more precise than `a`.
/// Cargo keeps most of it: what a crate does not depend on it cannot name.
pub(crate) const FLOORS: [&[&str]; 17] = [
    &["model::ids", "model::cpuset", "model::units", "model::text", "guide"],
    &["model::topology", "model::spec"],
    &["model::predict"],
    &["model::plan"],
    &[
        "model::preflight",
        "wire",
        "data::functions",
        "data::memory",
        "machine::status",
        "why::evidence",
    ],
    &["why::calls", "why::wires"],
    &["why::audit"],
    &["why::look"],
    &["why::condition"],
    &["why::follow"],
    &["why::verdict"],
    &["why::patience"],
    &["machine::probe", "machine::os", "cluster::python", "data::copy", "data::ucx", "data::cuda"],
    &["native", "cluster::dask", "cluster::command", "supervise"],
    &["cluster"],
    &["dashboard"],
    &["cli"],
];

/// Neighbours on one floor that may know each other, as drawn: (who, whom).
pub(crate) const DRAWN: [(&str, &str); 1] = [("data::ucx", "data::cuda")];

/// What the rules look at.
pub(crate) struct House {
    pub(crate) sources: Vec<Source>,
    /// `Cargo.toml`.
    pub(crate) manifest: String,
    /// `src/ARCHITECTURE.md`.
    pub(crate) architecture: String,
}

impl House {
    /// A house of these sources, with this project's papers.
    pub(crate) fn new(sources: Vec<Source>) -> Self {
        Self {
            sources,
            manifest: include_str!("../../Cargo.toml").to_owned(),
            architecture: include_str!("../../src/ARCHITECTURE.md").to_owned(),
        }
    }

    /// The sources without those that are compiled for tests alone, which may do anything.
    pub(crate) fn code(&self) -> impl Iterator<Item = &Source> {
        let tests: BTreeSet<&str> = self
            .sources
            .iter()
            .flat_map(|source| source.test_modules.iter().map(String::as_str))
            .collect();
        self.sources.iter().filter(move |source| {
            let module = source.module();
            !tests.iter().any(|test| is_inside(&module, test))
        })
    }

    /// The modules that know each other in a circle: those that lie side by side, and what is in
    /// them. A module and its children always know each other, and do not count.
    pub(crate) fn circles(&self) -> BTreeSet<String> {
        let files: BTreeMap<String, &Source> =
            self.code().map(|source| (source.module(), source)).collect();
        let mut arrows: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (module, source) in &files {
            for name in &source.names {
                let other = home(&files, module, name);
                if let Some((from, to)) = other.and_then(|other| side_by_side(module, &other)) {
                    arrows.entry(from).or_default().insert(to);
                }
            }
        }
        let circle = |module: &String| {
            let back = |other: &str| reached(&arrows, other).contains(module.as_str());
            let round: Vec<&str> =
                reached(&arrows, module).into_iter().filter(|other| back(other)).collect();
            (round.len() > 1).then(|| round.join(", "))
        };
        arrows.keys().filter_map(circle).collect()
    }
}

/// Whether `module` is `other`, or one of the modules in it.
pub(crate) fn is_inside(module: &str, other: &str) -> bool {
    module.strip_prefix(other).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// The floor and the name that the table gives a module.
pub(crate) fn floor(module: &str) -> Option<(usize, &'static str)> {
    let module = module.strip_prefix("crate::")?;
    FLOORS.iter().enumerate().find_map(|(floor, names)| {
        names.iter().find(|name| is_inside(module, name)).map(|name| (floor, *name))
    })
}

/// The module in which the thing lives that `name` means in `module`, re-exports followed.
fn home(files: &BTreeMap<String, &Source>, module: &str, name: &str) -> Option<String> {
    let (mut module, mut name) = (module.to_owned(), name.to_owned());
    // Re-exports in a chain; one that leads to itself ends, too.
    for _ in 0..8 {
        let first = name.split("::").next().unwrap_or_default();
        if first != "crate" {
            let child = format!("{module}::{first}");
            name = files.contains_key(&child).then(|| format!("{module}::{name}"))?;
        }
        let mut ends = name.rmatch_indices("::").map(|(at, _)| at);
        let whole = files.contains_key(&name).then_some(name.len());
        let end = whole.or_else(|| ends.find(|end| files.contains_key(&name[..*end])))?;
        let (known, rest) = (name[..end].to_owned(), name[end..].trim_start_matches("::"));
        let (next, beyond) = rest.split_once("::").unwrap_or((rest, ""));
        let Some(path) = files[&known].imports.get(next) else { return Some(known) };
        name = if beyond.is_empty() { path.clone() } else { format!("{path}::{beyond}") };
        module = known;
    }
    None
}

/// The two modules that lie side by side and hold these two.
fn side_by_side(one: &str, other: &str) -> Option<(String, String)> {
    let (one, other): (Vec<&str>, Vec<&str>) =
        (one.split("::").collect(), other.split("::").collect());
    let common = one.iter().zip(&other).take_while(|(a, b)| a == b).count();
    let apart = common < one.len() && common < other.len();
    apart.then(|| (one[..=common].join("::"), other[..=common].join("::")))
}

/// What can be reached along the arrows.
fn reached<'a>(arrows: &'a BTreeMap<String, BTreeSet<String>>, from: &str) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut next: Vec<&str> = arrows.get(from).into_iter().flatten().map(String::as_str).collect();
    while let Some(module) = next.pop() {
        if found.insert(module) {
            next.extend(arrows.get(module).into_iter().flatten().map(String::as_str));
        }
    }
    found
}
