//! Translates errors for users of flags: `--enable-nvlink` instead of `ucx.nvlink`.
//!
//! The modules below know only the keys of the spec, and quote them in their messages. A key that
//! the spec file sets keeps its name; any other key is replaced by its flag.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::cli::failure::{Exit, Failure};
use crate::cluster::PrepareError;
use crate::plan::PlanError;
use crate::preflight::Finding;
use crate::spec::{self, ClusterSpec, Flag, Origin, Request, SpecError};
use crate::topology::Note;

/// The keys that the spec file sets; messages keep their names.
pub(in crate::cli) struct Keys<'a>(Vec<&'a str>);

impl<'a> Keys<'a> {
    /// The keys that a merged request took from the spec file.
    pub(in crate::cli) fn of(request: &'a Request) -> Self {
        let from_file = |(key, origin): (&'a String, &Origin)| {
            (*origin == Origin::Spec).then_some(key.as_str())
        };
        Self(request.origins.iter().filter_map(from_file).collect())
    }

    /// The flag that sets `key`; `None` if the spec file sets it or no flag does.
    fn flag(&self, key: &str) -> Option<Flag> {
        let own = !self.0.contains(&key);
        spec::flags().find(|flag| own && flag.key == key)
    }

    /// A quoted key, or key and value (`cpus: split`), as the user would type it.
    fn typed(&self, quoted: &str) -> Option<String> {
        let (key, value) = quoted.split_once(": ").unwrap_or((quoted, ""));
        let flag = self.flag(key)?;
        Some(match value {
            "" | "true" => format!("--{}", flag.flag),
            "false" if !flag.off.is_empty() => format!("--{}", flag.off),
            value => format!("--{} {value}", flag.flag),
        })
    }

    /// The message with each quoted key replaced by its flag.
    pub(in crate::cli) fn in_flags(&self, sentence: &str) -> String {
        let mut text = String::new();
        let mut rest = sentence;
        while let Some(start) = rest.find('\'') {
            let (before, from) = rest.split_at(start);
            text.push_str(before);
            let quoted = from[1..].split_once('\'');
            match quoted.and_then(|(quoted, after)| Some((self.typed(quoted)?, after))) {
                Some((typed, after)) => {
                    text.push_str(&typed);
                    rest = after;
                }
                // An apostrophe, or a quotation that is not a key.
                None => {
                    text.push('\'');
                    rest = &from[1..];
                }
            }
        }
        text + rest
    }

    /// A note with the keys in it replaced by flags.
    pub(in crate::cli) fn note(&self, note: &Note) -> Note {
        let flag = self.flag(&note.about).map(|flag| format!("--{}", flag.flag));
        Note::new(flag.unwrap_or_else(|| note.about.clone()), self.in_flags(&note.text))
    }

    /// The failure for values that contradict each other.
    pub(in crate::cli) fn contradiction(&self, error: &SpecError) -> Failure {
        let problem = self.in_flags(&error.problem.to_string());
        // A flag sets all items of a list.
        let key = error.key.split('[').next().unwrap_or_default();
        let text = match self.flag(key) {
            Some(flag) => format!("--{}: {problem}", flag.flag),
            None if key.is_empty() => problem,
            None => format!("{}: {problem}", error.key),
        };
        self.failure(text, error.hint())
    }

    /// The failure for a request that cannot be planned.
    pub(in crate::cli) fn no_plan(&self, error: PlanError) -> Failure {
        let hint = error.hint();
        match error {
            PlanError::Spec(error) => self.contradiction(&error),
            PlanError::Strict { notes } => {
                let notes = notes.iter().map(|note| self.note(note)).collect();
                self.failure(self.in_flags(&PlanError::Strict { notes }.to_string()), hint)
            }
            error => self.failure(self.in_flags(&error.to_string()), hint),
        }
    }

    /// The failure for a plan that this machine cannot run.
    pub(in crate::cli) fn unprepared(&self, error: PrepareError) -> Failure {
        let hint = error.hint();
        match error {
            PrepareError::Plan(error) => self.no_plan(error),
            PrepareError::Path(_)
            | PrepareError::NoInterface { .. }
            | PrepareError::NoPlace { .. } => {
                let error = anyhow::Error::new(error);
                let cause = error.root_cause().to_string();
                let text = error.to_string();
                // What was attempted, and the system's error.
                let text = if cause == text { text } else { format!("{text}: {cause}") };
                let exit = Failure::new(Exit::Usage, error).exit;
                Failure { exit, ..self.failure(self.in_flags(&text), hint) }
            }
            error => {
                Failure::new(Exit::Usage, error).maybe_hint(hint.map(|hint| self.in_flags(&hint)))
            }
        }
    }

    fn failure(&self, text: String, hint: Option<String>) -> Failure {
        let hint = hint.map(|hint| self.in_flags(&hint));
        Failure::new(Exit::Usage, anyhow::anyhow!(text)).maybe_hint(hint)
    }
}

/// A hint about a cluster that was asked for, or is running, with each quoted key replaced by its
/// flag.
pub(in crate::cli) fn in_flags(hint: String) -> String {
    Keys(Vec::new()).in_flags(&hint)
}

/// Findings with each quoted key in what is to be done replaced by its flag.
pub(in crate::cli) fn findings_in_flags(findings: Vec<Finding>) -> Vec<Finding> {
    let typed = |finding: Finding| Finding { remedy: finding.remedy.map(in_flags), ..finding };
    findings.into_iter().map(typed).collect()
}

/// The failure for a contradiction between the spec file and the flags.
pub(in crate::cli) fn contradiction(error: &SpecError, files: &[ClusterSpec]) -> Failure {
    let mut paths = BTreeMap::new();
    for file in files.iter().filter_map(|file| serde_json::to_value(file).ok()) {
        collect_paths(&file, "", &mut paths);
    }
    Keys(paths.keys().map(String::as_str).collect()).contradiction(error)
}

/// Collects the path of every value.
fn collect_paths(value: &Value, path: &str, paths: &mut BTreeMap<String, ()>) {
    if !path.is_empty() {
        paths.insert(path.to_owned(), ());
    }
    for (key, value) in value.as_object().into_iter().flatten() {
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        collect_paths(value, &path, paths);
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::flags::Asked;

    #[derive(Parser, Debug)]
    struct Line {
        #[command(flatten)]
        asked: Asked,
    }

    /// The keys that a command line sets.
    fn keys_of(words: &[&str]) -> Option<Vec<String>> {
        let line = Line::try_parse_from([&["cuda-cluster"], words].concat()).ok()?;
        let json = serde_json::to_value(line.asked.flags.0).expect("JSON");
        let mut paths = BTreeMap::new();
        collect_paths(&json, "", &mut paths);
        let sections =
            |path: &String| paths.keys().any(|other| other.starts_with(&format!("{path}.")));
        Some(paths.keys().filter(|path| !sections(path)).cloned().collect())
    }

    #[test]
    fn every_row_is_the_flag_that_sets_its_key() {
        for Flag { key, flag: on, off, .. } in spec::flags() {
            let (on, off_flag) = (&*format!("--{on}"), &*format!("--{off}"));
            let samples =
                ["1", "1GB", "local", "warn", "native", "1.18", "5s", "preferred", "dask"];
            let more = ["auto", "wait", "never", "GPU=1", "gpu", "cpu", "torch", "x"];
            let with_value = samples.iter().chain(&more).find_map(|value| keys_of(&[on, value]));
            let set = keys_of(&[on]).or(with_value).unwrap_or_else(|| panic!("{on} is no flag"));
            let set: Vec<&String> =
                set.iter().filter(|path| !path.starts_with("worker.resources.")).collect();
            assert!(set.is_empty() || set == [key], "{on} sets {set:?}");
            if !off.is_empty() {
                assert_eq!(keys_of(&[off_flag]).as_deref(), Some(&[key.to_owned()][..]), "{off}");
            }
        }
    }

    /// What the library says to programs has no flags in it: they have the names of keys.
    #[test]
    fn only_the_command_line_names_flags() {
        let rows = spec::flags().flat_map(|row| [row.flag, row.off]);
        let rows = rows.filter(|name| !name.is_empty());
        let flags: Vec<String> = rows.map(|name| format!("--{name}")).collect();
        fn walk(folder: &std::path::Path, flags: &[String], complaints: &mut Vec<String>) {
            for entry in std::fs::read_dir(folder).expect("sources").flatten() {
                let path = entry.path();
                // Arguments of Dask's programs and of containers'; what `doctor` alone says.
                let is_other = [
                    "src/cli",
                    "src/dashboard",
                    "cluster/src/dask/settings.rs",
                    "cluster/src/doctor",
                    "data/src/cuda/hints.rs",
                ];
                if is_other.iter().any(|other| path.ends_with(other)) {
                    continue;
                }
                if path.is_dir() {
                    walk(&path, flags, complaints);
                    continue;
                }
                let text = std::fs::read_to_string(&path).unwrap_or_default();
                let text = text.split("#[cfg(test)]").next().unwrap_or_default();
                // Whole commands have flags.
                let is_told = |line: &&str| {
                    !["//", "cuda-cluster ", "docker run "].iter().any(|one| line.contains(one))
                };
                for line in text.lines().filter(|_| path.extension() == Some("rs".as_ref())) {
                    let words = line.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
                    let named = words.filter(|word| flags.iter().any(|flag| flag == word));
                    if is_told(&line) && named.count() > 0 {
                        complaints.push(format!("{}: {}", path.display(), line.trim()));
                    }
                }
            }
        }
        let mut complaints = Vec::new();
        let top = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        ["src", "crates"]
            .iter()
            .for_each(|folder| walk(&top.join(folder), &flags, &mut complaints));
        assert_eq!(complaints, Vec::<String>::new());
    }

    #[test]
    fn sentences_speak_of_what_was_typed() {
        let keys = Keys(vec!["ucx.nvlink"]);
        for (from, to) in [
            ("set 'cpus: split' too", "set --cpus split too"),
            ("set 'rmm.async: true' too", "set --rmm-async too"),
            ("'ucx.tcp: false' is", "--disable-tcp-over-ucx is"),
            ("drop 'rmm.managed' or 'ucx.nvlink'", "drop --rmm-managed-memory or 'ucx.nvlink'"),
            ("the user's 'gpus' aren't 'wrong'", "the user's --gpus aren't 'wrong'"),
        ] {
            assert_eq!(keys.in_flags(from), to);
        }
    }
}
