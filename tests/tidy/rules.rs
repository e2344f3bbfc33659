//! The rules: each a function from the house to complaints.

use std::collections::BTreeSet;

use crate::house::{DRAWN, FLOORS, House, floor, is_inside};
use crate::source::Source;

/// Modules without effects; every `core` is one more.
const PURE: [&str; 10] = [
    "model",
    "wire",
    "why::evidence",
    "why::calls",
    "why::condition",
    "why::follow",
    "why::verdict",
    "why::patience",
    "why::wires",
    "why::audit",
];
/// It times what it compares.
const MEASURES: &str = "crate::wire::links";

/// What changes the world, or asks it.
const EFFECTS: [&str; 16] = [
    "std::env",
    "std::fs",
    "std::io::stderr",
    "std::io::stdin",
    "std::io::stdout",
    "std::net",
    "std::os",
    "std::process",
    "std::thread",
    "std::time::Instant::now",
    "std::time::SystemTime::now",
    "dbg",
    "eprint",
    "eprintln",
    "print",
    "println",
];

/// Methods that do so, of paths and of times.
const EFFECT_METHODS: [&str; 11] = [
    "canonicalize",
    "elapsed",
    "exists",
    "is_dir",
    "is_file",
    "is_symlink",
    "metadata",
    "read_dir",
    "read_link",
    "symlink_metadata",
    "try_exists",
];

/// Dependencies that only compute.
const PURE_CRATES: [&str; 20] = [
    "blake3",
    "bytemuck",
    "crc32c",
    "fastrand",
    "hashbrown",
    "humantime",
    "postcard",
    "roxmltree",
    "rmp_serde",
    "rustc_hash",
    "saphyr_parser",
    "schemars",
    "serde",
    "serde_json",
    "serde_path_to_error",
    "serde_yaml",
    "slab",
    "smallvec",
    "strsim",
    "strum",
];

const UNSAFE_ALLOWED: [&str; 3] = ["data", "machine", "why::look::native::profiler"];

const VAGUE: [&str; 6] = ["utils", "util", "common", "helpers", "misc", "types"];
const VAGUE_ENDINGS: [&str; 5] = ["Manager", "Helper", "Impl", "Util", "Utils"];
/// What systemd is.
const FIELDS_OWN: &str = "ServiceManager";

const LONGEST_FILE: usize = 520;
const WIDEST_LINE: usize = 100;

/// The packages that this project is asked to build on.
const PACKAGES: [&str; 8] = [
    "nvml-wrapper",
    "hwloc2",
    "nix",
    "tokio",
    "clap",
    "serde_yaml",
    "tracing-subscriber",
    "ucx1-sys",
];

pub(crate) type Rule = fn(&House) -> Vec<String>;

pub(crate) const RULES: [(&str, Rule); 12] = [
    ("imports run down", imports_run_down),
    ("floors are lived on", floors_are_lived_on),
    ("modules know each other one way", modules_know_each_other_one_way),
    ("pure modules have no effects", pure_modules_have_no_effects),
    ("unsafe stays in its modules", unsafe_stays_in_its_modules),
    ("modules say what they are for", modules_say_what_they_are_for),
    ("files are one subject", files_are_one_subject),
    ("names say something", names_say_something),
    ("lines are finished and fit", lines_are_finished_and_fit),
    ("dependencies say what they are for", dependencies_say_what_they_are_for),
    ("the packages asked for are used", the_packages_asked_for_are_used),
    ("the architecture names every module", the_architecture_names_every_module),
];

fn imports_run_down(house: &House) -> Vec<String> {
    let mut complaints = Vec::new();
    for source in house.code() {
        let module = source.module();
        let above = |name: &&str| is_inside(&format!("crate::{name}"), &module);
        let Some((here, name)) = floor(&module) else {
            // `crate` and `crate::engine` hold modules of several floors.
            if !FLOORS.iter().any(|names| names.iter().any(&above)) {
                complaints.push(format!("{}: module {module} has no floor", source.path));
            }
            continue;
        };
        for import in &source.names {
            let Some((there, other)) = floor(import) else { continue };
            let allowed = other == name || there < here || DRAWN.contains(&(name, other));
            if !allowed {
                complaints.push(format!("{}: {name} may not use {import}", source.path));
            }
        }
    }
    complaints
}

/// The table of floors tells no stories: its modules exist, and its arrows are needed.
fn floors_are_lived_on(house: &House) -> Vec<String> {
    let modules: BTreeSet<String> = house.code().map(Source::module).collect();
    let empty = FLOORS.iter().flat_map(|names| names.iter());
    let empty = empty.filter(|name| !modules.contains(&format!("crate::{name}")));
    let mut complaints: Vec<String> =
        empty.map(|name| format!("module {name} has a floor and does not exist")).collect();
    for (one, other) in DRAWN {
        let uses = |source: &Source| {
            let there = |name: &String| floor(name).is_some_and(|(_, name)| name == other);
            floor(&source.module()).is_some_and(|(_, name)| name == one)
                && source.names.iter().any(there)
        };
        if !house.code().any(uses) {
            complaints.push(format!("{one} may use {other}, and does not"));
        }
    }
    complaints
}

fn modules_know_each_other_one_way(house: &House) -> Vec<String> {
    let circles = house.circles().into_iter();
    circles.map(|circle| format!("these know each other in a circle: {circle}")).collect()
}

fn pure_modules_have_no_effects(house: &House) -> Vec<String> {
    let dependencies: Vec<String> =
        dependencies(&house.manifest).map(|(name, _)| name.replace('-', "_")).collect();
    let effect = |name: &&String| {
        let first = name.split("::").next().unwrap_or_default();
        EFFECTS.iter().any(|effect| is_inside(name, effect))
            || dependencies.iter().any(|known| known == first) && !PURE_CRATES.contains(&first)
    };
    let method = |name: &&String| EFFECT_METHODS.contains(&name.as_str());
    let mut complaints = Vec::new();
    for source in house.code() {
        let core = source.module().split("::").any(|part| part == "core");
        let pure = PURE.iter().any(|pure| is_inside(&source.module(), &format!("crate::{pure}")))
            && !is_inside(&source.module(), MEASURES);
        if !(pure || core) {
            continue;
        }
        let found = source.names.iter().filter(effect).chain(source.methods.iter().filter(method));
        complaints.extend(found.map(|name| format!("{}: {name} is an effect", source.path)));
    }
    complaints
}

fn unsafe_stays_in_its_modules(house: &House) -> Vec<String> {
    let allowed = |source: &&Source| {
        let module = source.module();
        UNSAFE_ALLOWED.iter().any(|one| is_inside(&module, &format!("crate::{one}")))
    };
    let found = house.code().filter(|source| source.has_unsafe && !allowed(source));
    found.map(|source| format!("{}: unsafe outside {UNSAFE_ALLOWED:?}", source.path)).collect()
}

fn modules_say_what_they_are_for(house: &House) -> Vec<String> {
    let mut complaints = Vec::new();
    for source in &house.sources {
        if !source.text.starts_with("//! ") {
            complaints.push(format!("{}: does not open with what it is for", source.path));
        }
        let mut doc = source.text.lines().take_while(|line| line.starts_with("//!"));
        let states = doc.any(|line| line.contains("*Invariant:*"));
        if source.is_room() && source.module() != "crate" && !states {
            complaints.push(format!("{}: states no *Invariant:*", source.path));
        }
    }
    complaints
}

fn files_are_one_subject(house: &House) -> Vec<String> {
    let long = house.sources.iter().filter(|source| source.length() > LONGEST_FILE);
    long.map(|source| format!("{}: {} lines are two subjects", source.path, source.length()))
        .collect()
}

fn names_say_something(house: &House) -> Vec<String> {
    let mut complaints = Vec::new();
    for source in &house.sources {
        let parts = source.path.trim_end_matches(".rs").split('/');
        let modules = parts.chain(source.modules.iter().map(String::as_str));
        let defined = source.defined.iter().map(String::as_str);
        let vague = |name: &&str| {
            VAGUE_ENDINGS.iter().any(|ending| name.ends_with(ending)) && *name != FIELDS_OWN
                || name.starts_with("get_")
        };
        let found = modules.filter(|name| VAGUE.contains(name)).chain(defined.filter(vague));
        complaints.extend(found.map(|name| format!("{}: {name} says nothing", source.path)));
    }
    complaints
}

/// rustfmt keeps code within its columns, but not comments.
fn lines_are_finished_and_fit(house: &House) -> Vec<String> {
    let mut complaints = Vec::new();
    for source in &house.sources {
        for (at, line) in source.text.lines().enumerate() {
            let place = format!("{}:{}", source.path, at + 1);
            let comment = line.trim_start().starts_with("//") && !line.contains("http");
            if comment && line.chars().count() > WIDEST_LINE {
                complaints.push(format!("{place}: wider than {WIDEST_LINE}"));
            }
            for mark in ["TODO", "FIXME", "XXX", "todo!(", "unimplemented!("] {
                if line.contains(mark) {
                    complaints.push(format!("{place}: {mark} is left"));
                }
            }
        }
    }
    complaints
}

/// The name of each dependency, and its line in the manifest.
fn dependencies(manifest: &str) -> impl Iterator<Item = (&str, &str)> {
    let mut section = "";
    manifest.lines().filter_map(move |line| {
        if line.starts_with('[') {
            section = line;
        }
        let (name, _) = line.split_once('=').filter(|_| section.ends_with("dependencies]"))?;
        Some((name.trim(), line))
    })
}

fn dependencies_say_what_they_are_for(house: &House) -> Vec<String> {
    let own = |line: &str| line.contains("workspace = true") || line.contains("path = \"");
    let all = dependencies(&house.manifest).filter(|(_, line)| !own(line));
    let silent = all.filter(|(_, line)| !line.contains('#'));
    silent.map(|(name, _)| format!("Cargo.toml: {name} has no comment")).collect()
}

fn the_packages_asked_for_are_used(house: &House) -> Vec<String> {
    let known: Vec<&str> = dependencies(&house.manifest).map(|(name, _)| name).collect();
    let missing = PACKAGES.iter().filter(|package| !known.contains(package));
    missing.map(|package| format!("Cargo.toml: {package} is to be used, and is not")).collect()
}

fn the_architecture_names_every_module(house: &House) -> Vec<String> {
    let tops: BTreeSet<String> = house.code().map(Source::top).collect();
    let missing = tops.iter().filter(|top| !house.architecture.contains(&format!("`{top}")));
    missing.map(|top| format!("src/ARCHITECTURE.md: does not name {top}")).collect()
}
