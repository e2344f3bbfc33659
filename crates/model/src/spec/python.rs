//! Commands that run a program of Python's.
//!
//! Knows Python's command line; does not look for files.
//!
//! *Invariant:* what stands before the program's name are Python's own options, what follows it the
//! program's arguments.

use std::path::Path;

use serde::Serialize;

/// Options of Python that are followed by a value.
const WITH_VALUE: [&str; 3] = ["-W", "-X", "--check-hash-based-pycs"];

/// How a program of Python is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Named {
    /// By the path of its file.
    File,
    /// By a module's name, after `-m`.
    Module,
    /// By its text, after `-c`.
    Code,
}

/// The words of a command that runs a program of Python's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PythonCommand<'a> {
    /// The Python.
    pub python: &'a str,
    /// Python's own options.
    pub options: &'a [String],
    /// How the program is named.
    pub kind: Named,
    /// The place of the program's name.
    pub at: usize,
}

/// A command that runs no program of Python's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is not a Python with a program, a module or a text of its own")]
pub struct NotPython(String);

impl<'a> PythonCommand<'a> {
    /// Finds the program in a command.
    ///
    /// # Errors
    /// If it runs none of Python's.
    pub fn of(argv: &'a [String]) -> Result<Self, NotPython> {
        let program = || argv.first().map_or("nothing", String::as_str).to_owned();
        Self::found(argv).ok_or_else(|| NotPython(program()))
    }

    fn found(argv: &'a [String]) -> Option<Self> {
        let python = argv.first()?;
        let name = Path::new(python).file_name()?.to_str()?;
        if !name.starts_with("python") {
            return None;
        }
        let mut at = 1;
        loop {
            let word = argv.get(at)?;
            let (kind, name) = match word.as_str() {
                "-m" => (Named::Module, at + 1),
                "-c" => (Named::Code, at + 1),
                // It reads the program from its standard input, which is empty, or asks a person.
                "-" | "-i" => return None,
                option if WITH_VALUE.contains(&option) => {
                    at += 2;
                    continue;
                }
                option if option.starts_with('-') => {
                    at += 1;
                    continue;
                }
                _ => (Named::File, at),
            };
            argv.get(name)?;
            return Some(Self { python, options: &argv[1..at], kind, at: name });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_of_python_is_found_behind_its_options() {
        let found = |text: &str| {
            let words: Vec<String> = text.split(' ').map(str::to_owned).collect();
            PythonCommand::of(&words)
                .ok()
                .map(|command| (command.kind, command.at, command.options.len()))
        };
        assert_eq!(found("python train.py --lr 1"), Some((Named::File, 1, 0)));
        assert_eq!(
            found("/usr/bin/python3.12 -u -X dev -m pkg.train"),
            Some((Named::Module, 5, 3))
        );
        assert_eq!(found("python3 -Wignore -c pass"), Some((Named::Code, 3, 1)));
        for other in ["torchrun a.py", "python", "python -u", "python -", "python -m", "./a.py"] {
            assert_eq!(found(other), None, "{other}");
        }
    }
}
