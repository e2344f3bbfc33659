//! Holds the house rules of `src/ARCHITECTURE.md` that a compiler does not.
//!
//! Each rule is a function from the house, a value, to complaints, so that the rules themselves are
//! tested on houses that break them.

#![cfg(test)]

mod house;
mod rules;
mod source;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use house::{FLOORS, House};
use rules::RULES;
use source::{CRATES, Source};

/// This project, read once.
fn ours() -> &'static House {
    static OURS: OnceLock<House> = OnceLock::new();
    OURS.get_or_init(read)
}

fn read() -> House {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("src is readable") {
            let path = entry.expect("src is readable").path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                found.push(path);
            }
        }
    }
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let roots = CRATES.map(|name| (name, top.join("crates").join(name).join("src")));
    let mut sources = Vec::new();
    for (name, root) in roots.into_iter().chain([("", top.join("src"))]) {
        let mut found = Vec::new();
        walk(&root, &mut found);
        found.sort();
        sources.extend(found.into_iter().map(|path| {
            let text = fs::read_to_string(&path).expect("sources are text");
            let path = path.strip_prefix(&root).expect("found below it").display().to_string();
            match (name, path.as_str()) {
                ("", _) => Source::new(&path, &text),
                (name, "lib.rs") => Source::new(&format!("{name}/mod.rs"), &text),
                _ => Source::new(&format!("{name}/{path}"), &text),
            }
        }));
    }
    House::new(sources)
}

/// A house that keeps all rules, and what the given files make of it.
fn model(files: &[(&str, &str)]) -> House {
    let drawn =
        |module: &str| if module == "data::ucx" { "use crate::cuda::Buffer;\n" } else { "" };
    let room = |module: &&str| {
        let text = format!("//! What.\n//!\n//! *Invariant:* x.\n{}", drawn(module));
        (format!("{}/mod.rs", module.replace("::", "/")), text)
    };
    let rooms: Vec<(String, String)> = FLOORS.iter().flat_map(|names| *names).map(room).collect();
    let others = rooms.iter().map(|(path, text)| (path.as_str(), text.as_str()));
    let others = others.filter(|(path, _)| !files.iter().any(|(other, _)| other == path));
    let all = others.chain(files.iter().copied());
    House::new(all.map(|(path, text)| Source::new(path, text)).collect())
}

fn complaints(rule: &str, house: &House) -> Vec<String> {
    RULES.iter().find(|(name, _)| *name == rule).expect("a rule of this name").1(house)
}

/// Asserts that a rule complains about a file with this text, and the other rules' tests are theirs.
#[track_caller]
fn breaks(rule: &str, path: &str, text: &str) {
    let found = complaints(rule, &model(&[(path, text)]));
    assert!(!found.is_empty(), "{rule:?} lets {path} pass:\n{text}");
}

#[test]
fn the_house_is_tidy() {
    let house = ours();
    assert!(house.sources.len() > 100, "the sources were found");
    let found: Vec<String> = RULES.iter().flat_map(|(_, rule)| rule(house)).collect();
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn good_code_passes() {
    let text = "//! What.\n//!\n//! *Invariant:* x.\n\
        #[cfg(test)]\nmod laws;\n#[cfg(test)]\nmod tests {\n    use crate::cli::x;\n}\n\
        use cuda_cluster_model::plan::Plan;\nuse cuda_cluster_machine::os::process;\nfn f() {}\n";
    let laws = "//! Laws.\nuse crate::cli::x;\nfn f() { std::fs::read(p); }\n";
    let house = model(&[("supervise/core/mod.rs", text), ("supervise/core/laws.rs", laws)]);
    for (name, rule) in RULES {
        assert_eq!(rule(&house), Vec::<String>::new(), "{name}");
    }
}

#[test]
fn an_import_that_runs_up_or_sideways_is_found() {
    let rule = "imports run down";
    breaks(rule, "model/spec/key.rs", "//! x\nuse crate::plan::Plan;\n");
    breaks(
        rule,
        "model/spec/key.rs",
        "//! x\nuse crate::{\n    cpuset,\n    plan::{self, x},\n};\n",
    );
    breaks(rule, "model/spec/key.rs", "//! x\nuse super::super::plan::Plan;\n");
    breaks(rule, "model/spec/key.rs", "//! x\nfn f() { crate::plan::x() }\n");
    breaks(rule, "model/spec/key.rs", "//! x\nfn f(a: &crate::plan::X) {}\n");
    breaks(rule, "model/spec/key.rs", "//! x\nfn f() { assert!(a, \"{}\", crate::plan::x()) }\n");
    breaks(rule, "model/spec/key.rs", "//! x\nmacro_rules! m { () => { $crate::plan::x() } }\n");
    breaks(rule, "model/plan/nic.rs", "//! x\nuse cuda_cluster_machine::os::process;\n");
    breaks(rule, "supervise/core.rs", "//! x\nuse cuda_cluster_native::x;\n");
    breaks(rule, "machine/os/mod.rs", "//! x\nuse crate::probe::x;\n");
    breaks(rule, "cluster/dask/mod.rs", "//! x\nuse super::command::x;\n");
    breaks(rule, "somewhere/mod.rs", "//! x\n");
}

#[test]
fn what_follows_tests_that_are_declared_first_is_seen() {
    let first = "//! x\n#[cfg(test)]\nmod tests;\n#[cfg(all(test, unix))]\nmod laws {}\n\n";
    breaks("imports run down", "model/spec/key.rs", &format!("{first}use crate::plan::x;\n"));
    let read = format!("{first}fn f() {{ std::fs::read(p); }}\n");
    breaks("pure modules have no effects", "supervise/core.rs", &read);
    let long = format!("{first}{}", "fn f() {}\n".repeat(600));
    breaks("files are one subject", "supervise/core.rs", &long);
}

#[test]
fn a_read_at_the_end_of_the_supervisors_core_is_found() {
    let rule = "pure modules have no effects";
    let mut house = House::new(ours().sources.clone());
    assert_eq!(complaints(rule, &house), Vec::<String>::new());
    let core = |source: &Source| source.module() == "crate::supervise::core";
    let place = house.sources.iter().position(core).expect("the supervisor has a core");
    let Source { path, text, .. } = house.sources.swap_remove(place);
    let read = "fn limit() -> Option<String> {\n    std::fs::read_to_string(\"limit\").ok()\n}\n";
    house.sources.push(Source::new(&path, &format!("{text}\n{read}")));
    let found = [format!("{path}: std::fs::read_to_string is an effect")];
    assert_eq!(complaints(rule, &house), found);
}

#[test]
fn a_floor_without_its_module_is_found() {
    let mut house = model(&[]);
    house.sources.retain(|source| source.module() != "crate::wire");
    assert_eq!(
        complaints("floors are lived on", &house),
        ["module wire has a floor and does not exist"]
    );
}

#[test]
fn an_arrow_that_nobody_needs_is_found() {
    let text = "//! x\n//!\n//! *Invariant:* x.\n";
    assert_eq!(
        complaints("floors are lived on", &model(&[("data/ucx/mod.rs", text)])),
        ["data::ucx may use data::cuda, and does not"]
    );
}

#[test]
fn a_circle_of_files_is_found() {
    let circles = |one: &str, other: &str| {
        let room = "//! x\nmod a;\nmod b;\npub use b::B;\nuse b::deep::D;\n";
        let house = model(&[
            ("model/plan/mod.rs", room),
            ("model/plan/a.rs", &format!("//! x\n{one}")),
            ("model/plan/b/mod.rs", "//! x\nmod deep;\n"),
            ("model/plan/b/deep.rs", &format!("//! x\n{other}")),
        ]);
        house.circles().into_iter().collect::<Vec<String>>()
    };
    let found = ["crate::model::plan::a, crate::model::plan::b"];
    assert_eq!(circles("use super::b::B;\n", "use super::super::a::A;\n"), found);
    assert_eq!(circles("use super::B;\n", "use crate::plan::a;\n"), found);
    assert_eq!(circles("fn f() { super::D::new() }\n", "use crate::plan::a;\n"), found);
    assert_eq!(circles("use super::B;\n", "use super::super::B;\n"), Vec::<String>::new());
    assert_eq!(circles("use super::B;\n", "use crate::plan::Plan;\n"), Vec::<String>::new());
}

#[test]
fn a_ring_of_modules_is_found() {
    let ring = |modules: usize| {
        let text = |at: usize| format!("//! x\nuse super::m{};\n", (at + 1) % modules);
        let files = (0..modules).map(|at| Source::new(&format!("model/plan/m{at}.rs"), &text(at)));
        complaints("modules know each other one way", &House::new(files.collect())).len()
    };
    assert_eq!(ring(1), 0);
    assert_eq!(ring(2), 1);
    assert_eq!(ring(7), 1);
}

#[test]
fn an_effect_in_a_pure_module_is_found() {
    let rule = "pure modules have no effects";
    breaks(rule, "model/topology/smi.rs", "//! x\nfn f() { std::fs::read(p) }\n");
    breaks(rule, "model/topology/smi.rs", "//! x\nuse std::{fmt, fs};\n");
    breaks(rule, "model/topology/smi.rs", "//! x\nfn f(p: &Path) { p.exists() }\n");
    breaks(rule, "model/topology/smi.rs", "//! x\nfn f(p: &Path) { assert!(p.exists()) }\n");
    breaks(
        rule,
        "model/plan/nic.rs",
        "//! x\nuse std::time::Instant;\nfn f() { Instant::now(); }\n",
    );
    breaks(
        rule,
        "model/plan/nic.rs",
        "//! x\nuse std::time as t;\nfn f() { t::SystemTime::now(); }\n",
    );
    breaks(rule, "model/plan/nic.rs", "//! x\nfn f() { println!(\"x\") }\n");
    breaks(rule, "model/plan/nic.rs", "//! x\nfn f() { assert!(tokio::x()) }\n");
    breaks(rule, "model/plan/nic.rs", "//! x\nuse getrandom::fill;\n");
    breaks(rule, "supervise/core.rs", "//! x\nfn f() { tracing::info!(\"x\") }\n");
    breaks(rule, "supervise/core/ending.rs", "//! x\nfn f() { std::env::var(\"x\") }\n");
    breaks(rule, "native/objects/core.rs", "//! x\nuse nix::unistd;\n");
}

#[test]
fn unsafe_code_elsewhere_is_found() {
    let rule = "unsafe stays in its modules";
    breaks(rule, "model/plan/nic.rs", "//! x\nfn f() { unsafe { go() } }\n");
    breaks(rule, "model/plan/nic.rs", "//! x\nunsafe fn f() {}\n");
    breaks(rule, "model/plan/nic.rs", "//! x\nunsafe impl Send for X {}\n");
    breaks(rule, "model/plan/nic.rs", "//! x\nunsafe extern \"C\" {}\n");
    breaks(rule, "model/plan/nic.rs", "//! x\nfn f() { m!(unsafe { go() }) }\n");
    breaks(rule, "model/plan/nic.rs", "#![allow(unsafe_code)]\n//! x\n");
}

#[test]
fn a_module_that_says_nothing_about_itself_is_found() {
    let rule = "modules say what they are for";
    breaks(rule, "model/plan/nic.rs", "use std::fmt;\n");
    breaks(rule, "model/plan/mod.rs", "//! Plans.\n");
}

#[test]
fn a_file_of_two_subjects_is_found() {
    let rule = "files are one subject";
    let tests = "#[cfg(test)]\nmod tests {\n    fn f() {}\n}\n";
    let text = |lines: usize| format!("//! x\n{tests}{}", "fn f() {}\n".repeat(lines));
    breaks(rule, "model/plan/nic.rs", &text(520));
    assert!(complaints(rule, &model(&[("model/plan/nic.rs", &text(519))])).is_empty());
}

#[test]
fn a_vague_name_is_found() {
    let rule = "names say something";
    breaks(rule, "model/plan/utils.rs", "//! x\n");
    breaks(rule, "model/plan/common/nic.rs", "//! x\n");
    breaks(rule, "model/plan/nic.rs", "//! x\nmod helpers {}\n");
    breaks(rule, "model/plan/nic.rs", "//! x\nstruct PlanManager;\n");
    breaks(rule, "model/plan/nic.rs", "//! x\ntrait Common {}\nenum PlanHelper {}\n");
    breaks(rule, "model/plan/nic.rs", "//! x\nimpl X { fn get_nic(&self) {} }\n");
}

#[test]
fn a_line_that_is_too_wide_or_unfinished_is_found() {
    let rule = "lines are finished and fit";
    breaks(rule, "model/plan/nic.rs", "//! x\n// TODO: later\n");
    breaks(rule, "model/plan/nic.rs", "//! x\nfn f() { todo!() }\n");
    breaks(rule, "model/plan/nic.rs", &format!("//! x\n    // {}\n", "x".repeat(94)));
}

#[test]
fn a_dependency_without_a_reason_is_found() {
    let mut house = model(&[]);
    house.manifest += "\n[dev-dependencies]\nmystery = \"1\"\n";
    assert_eq!(
        complaints("dependencies say what they are for", &house),
        ["Cargo.toml: mystery has no comment"]
    );
}

#[test]
fn a_package_that_was_asked_for_is_missed() {
    let mut house = model(&[]);
    house.manifest = house.manifest.replace("\nhwloc2 = ", "\nhwlocality = ");
    assert_eq!(
        complaints("the packages asked for are used", &house),
        ["Cargo.toml: hwloc2 is to be used, and is not"]
    );
}

#[test]
fn a_module_that_the_architecture_forgets_is_found() {
    let mut house = model(&[]);
    house.architecture = house.architecture.replace("`wire", "`wyre");
    assert_eq!(
        complaints("the architecture names every module", &house),
        ["src/ARCHITECTURE.md: does not name wire"]
    );
}
