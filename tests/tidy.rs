//! Holds the house rules of `src/ARCHITECTURE.md` that a compiler does not.
//!
//! Each rule is a function from source text to complaints, so that the rules themselves are tested
//! on text that breaks them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The floors, and on each the modules that may live there. `a::b` is more precise than `a`.
const FLOORS: [&[&str]; 7] = [
    &["ids", "cpuset", "units", "text"],
    &["topology", "spec", "wire"],
    &["plan"],
    &["probe", "os", "ucx", "cuda"],
    &["engine::native", "engine::dask", "engine::command", "supervise"],
    &["cluster", "dashboard"],
    &["cli"],
];

/// Neighbours on one floor that may know each other, as drawn: (who, whom).
const DRAWN: [(&str, &str); 3] = [("units", "ids"), ("cluster", "dashboard"), ("ucx", "cuda")];

/// Modules without effects; every `core.rs` is one more.
const PURE: [&str; 8] = ["ids", "cpuset", "units", "text", "topology", "spec", "wire", "plan"];

const EFFECTS: [&str; 11] = [
    "std::fs",
    "std::env",
    "std::net",
    "std::process",
    "std::thread",
    "tokio::",
    "Instant::now",
    "SystemTime::now",
    "getrandom::",
    "println!",
    "tracing::",
];

const UNSAFE_ALLOWED: [&str; 4] = ["ucx", "cuda", "os", "probe"];

const VAGUE: [&str; 6] = ["utils", "util", "common", "helpers", "misc", "types"];

const LONGEST_FILE: usize = 520;
const WIDEST_LINE: usize = 100;

struct Source {
    /// Path below `src`, with forward slashes.
    path: String,
    text: String,
}

impl Source {
    /// `engine::native::core` for `engine/native/core.rs`; empty for `lib.rs` and `main.rs`.
    fn module(&self) -> String {
        let stem = self.path.trim_end_matches(".rs").trim_end_matches("/mod");
        if matches!(stem, "lib" | "main") { String::new() } else { stem.replace('/', "::") }
    }

    /// The text without its trailing unit tests, which may do anything.
    fn code(&self) -> &str {
        self.text.split("\n#[cfg(test)]\nmod ").next().unwrap_or(&self.text)
    }

    /// Numbered lines of [`Source::code`] without comments.
    fn statements(&self) -> impl Iterator<Item = (usize, &str)> {
        let code = |line| str::split(line, "//").next().unwrap_or_default();
        self.code().lines().enumerate().map(move |(at, line)| (at + 1, code(line)))
    }
}

fn sources() -> Vec<Source> {
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
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    walk(&root, &mut found);
    found.sort();
    let source = |path: PathBuf| Source {
        text: fs::read_to_string(&path).expect("sources are text"),
        path: path.strip_prefix(&root).expect("found below src").display().to_string(),
    };
    found.into_iter().map(source).collect()
}

/// The floor and the name that the table gives a module path.
fn floor(module: &str) -> Option<(usize, &'static str)> {
    let inside = |name: &str| {
        module == name || module.strip_prefix(name).is_some_and(|rest| rest.starts_with("::"))
    };
    FLOORS.iter().enumerate().find_map(|(floor, names)| {
        names.iter().find(|name| inside(name)).map(|name| (floor, *name))
    })
}

/// Module paths that a line of code names below `crate::`, braces at the first level opened.
fn imports(line: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in line.match_indices("crate::") {
        let before = line[..at].chars().next_back();
        if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == '$') {
            continue;
        }
        let rest = &line[at + "crate::".len()..];
        if let Some(group) = rest.strip_prefix('{') {
            let parts = group.split('}').next().unwrap_or_default().split(',');
            found.extend(parts.map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()));
        } else {
            let path = rest.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'));
            found.extend(path.take(1).map(|path| path.trim_end_matches(':').to_owned()));
        }
    }
    found
}

fn imports_run_down(source: &Source) -> Vec<String> {
    let module = source.module();
    if module.is_empty() || module == "engine" {
        return Vec::new();
    }
    let Some((here, name)) = floor(&module) else {
        return vec![format!("{}: module {module} has no floor", source.path)];
    };
    let mut complaints = Vec::new();
    for (line, code) in source.statements() {
        for import in imports(code) {
            let Some((there, other)) = floor(&import) else { continue };
            let allowed = other == name || there < here || DRAWN.contains(&(name, other));
            if !allowed {
                complaints.push(format!("{}:{line}: {name} may not use {other}", source.path));
            }
        }
    }
    complaints
}

fn pure_modules_have_no_effects(source: &Source) -> Vec<String> {
    let module = source.module();
    let top = module.split("::").next().unwrap_or_default();
    let core = module.ends_with("::core") || module.contains("::core::");
    if !(PURE.contains(&top) || core) {
        return Vec::new();
    }
    let effect = |code: &str| EFFECTS.iter().find(|effect| code.contains(**effect)).copied();
    let found = source.statements().filter_map(|(line, code)| Some((line, effect(code)?)));
    found.map(|(line, effect)| format!("{}:{line}: {effect} is an effect", source.path)).collect()
}

fn unsafe_stays_in_its_modules(source: &Source) -> Vec<String> {
    let module = source.module();
    let top = module.split("::").next().unwrap_or_default();
    if UNSAFE_ALLOWED.contains(&top) {
        return Vec::new();
    }
    let lifts = |code: &str| code.contains("unsafe ") || code.contains("allow(unsafe_code)");
    let lines = source.statements().filter(|(_, code)| lifts(code));
    lines
        .map(|(line, _)| format!("{}:{line}: unsafe outside {UNSAFE_ALLOWED:?}", source.path))
        .collect()
}

fn modules_say_what_they_are_for(source: &Source) -> Vec<String> {
    let mut complaints = Vec::new();
    if !source.text.starts_with("//! ") {
        complaints.push(format!("{}: does not open with what it is for", source.path));
    }
    let mut doc = source.text.lines().take_while(|line| line.starts_with("//!"));
    let is_root = source.path.ends_with("/mod.rs") || !source.path.contains('/');
    let states = doc.any(|line| line.contains("*Invariant:*"));
    if is_root && !source.module().is_empty() && !states {
        complaints.push(format!("{}: states no *Invariant:*", source.path));
    }
    complaints
}

fn files_are_one_subject(source: &Source) -> Vec<String> {
    let mut complaints = Vec::new();
    let lines = source.code().lines().count();
    if lines > LONGEST_FILE {
        complaints.push(format!("{}: {lines} lines are two subjects", source.path));
    }
    let part = source.path.trim_end_matches(".rs").split('/').find(|part| VAGUE.contains(part));
    complaints.extend(part.map(|part| format!("{}: {part} is no subject", source.path)));
    complaints
}

/// rustfmt keeps code within its columns, but not comments.
fn lines_are_finished_and_fit(source: &Source) -> Vec<String> {
    let mut complaints = Vec::new();
    for (at, line) in source.text.lines().enumerate() {
        let comment = line.trim_start().starts_with("//") && !line.contains("http");
        if comment && line.chars().count() > WIDEST_LINE {
            complaints.push(format!("{}:{}: wider than {WIDEST_LINE}", source.path, at + 1));
        }
        for mark in ["TODO", "FIXME", "XXX", "todo!(", "unimplemented!("] {
            if line.contains(mark) {
                complaints.push(format!("{}:{}: {mark} is left", source.path, at + 1));
            }
        }
    }
    complaints
}

type Rule = fn(&Source) -> Vec<String>;

const RULES: [(&str, Rule); 6] = [
    ("imports run down", imports_run_down),
    ("pure modules have no effects", pure_modules_have_no_effects),
    ("unsafe stays in its modules", unsafe_stays_in_its_modules),
    ("modules say what they are for", modules_say_what_they_are_for),
    ("files are one subject", files_are_one_subject),
    ("lines are finished and fit", lines_are_finished_and_fit),
];

#[test]
fn the_house_is_tidy() {
    let sources = sources();
    assert!(sources.len() > 10, "the sources were found");
    let complaints: Vec<String> =
        sources.iter().flat_map(|source| RULES.iter().flat_map(|(_, rule)| rule(source))).collect();
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

#[test]
fn every_dependency_says_what_it_is_for() {
    let manifest = include_str!("../Cargo.toml");
    let mut section = "";
    let mut silent = Vec::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            section = line;
        } else if section.ends_with("dependencies]") && line.contains('=') && !line.contains('#') {
            silent.push(line);
        }
    }
    assert!(silent.is_empty(), "dependencies without a comment: {silent:#?}");
}

#[test]
fn the_architecture_names_every_module() {
    let picture = include_str!("../src/ARCHITECTURE.md");
    let mut missing = BTreeMap::new();
    for source in sources() {
        let module = source.module();
        let top = module.split("::").next().unwrap_or_default().to_owned();
        if !top.is_empty() && !picture.contains(&format!("`{top}")) {
            missing.insert(top, source.path);
        }
    }
    assert!(missing.is_empty(), "not in src/ARCHITECTURE.md: {missing:?}");
}

/// A source that breaks a rule must be told, or the rule checks nothing.
#[test]
fn each_rule_can_fail() {
    let broken = [
        ("imports run down", "plan/nic.rs", "//! x\nuse crate::os::process;\n"),
        ("imports run down", "supervise/core.rs", "//! x\nuse crate::{cpuset, engine::native};\n"),
        ("imports run down", "somewhere/mod.rs", "//! x\n"),
        ("pure modules have no effects", "topology/smi.rs", "//! x\nlet t = std::fs::read(p);\n"),
        ("pure modules have no effects", "supervise/core.rs", "//! x\nlet t = Instant::now();\n"),
        ("unsafe stays in its modules", "plan/mod.rs", "//! x\nunsafe { go() }\n"),
        ("modules say what they are for", "plan/nic.rs", "use std::fmt;\n"),
        ("modules say what they are for", "plan/mod.rs", "//! Plans.\n"),
        ("files are one subject", "plan/utils.rs", "//! x\n"),
        ("lines are finished and fit", "plan/nic.rs", "//! x\n// TODO: later\n"),
    ];
    for (name, path, text) in broken {
        let source = Source { path: path.to_owned(), text: text.to_owned() };
        let rule = RULES.iter().find(|(rule, _)| *rule == name).expect("a rule of this name").1;
        assert!(!rule(&source).is_empty(), "{name:?} lets {path} pass: {text:?}");
    }
}

#[test]
fn the_rules_let_good_code_pass() {
    let text =
        "//! What.\n//!\n//! *Invariant:* x.\nuse crate::plan::Plan;\nuse crate::os::process;\n";
    let source = Source { path: "supervise/mod.rs".to_owned(), text: text.to_owned() };
    for (name, rule) in RULES {
        assert_eq!(rule(&source), Vec::<String>::new(), "{name}");
    }
}
