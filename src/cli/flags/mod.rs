//! The flags that `plan`, `up`, `run` and `exec` share, as overrides of a spec.
//!
//! Sets no defaults: the spec, then the plan, decide whatever no flag sets.
//!
//! *Invariant:* every flag is a row of the table of `spec`.

pub(super) mod keys;

use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use super::failure::{Exit, Failure};
use super::input;
use crate::ids::ClusterName;
pub(super) use crate::spec::whole;
use crate::spec::{self, ClusterSpec, Flag, Request, SpecError, Takes};

/// A request: the machine, a spec file, and flags that override it.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Asked {
    /// Spec file ('-' for standard input); of several, later ones win
    #[arg(short = 'f', long = "file", value_name = "SPEC")]
    pub(crate) file: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) flags: Flags,
}

/// Overrides of a spec: the keys that flags were given for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Flags(ClusterSpec);

/// As [`whole`], for a number of what there has to be one of.
pub(super) fn positive<T: TryFrom<u64> + Default + PartialEq>(text: &str) -> Result<T, String> {
    let number = whole(text)?;
    if number == T::default() { Err("it must be at least 1".to_owned()) } else { Ok(number) }
}

/// The flags that determine the plan: all except the name and those that matter only at run time.
pub(super) fn deciding() -> impl Iterator<Item = &'static str> {
    let deciding = spec::flags().filter(|flag| !["name", "verify"].contains(&flag.key));
    deciding.flat_map(|flag| [flag.flag, flag.off]).filter(|name| !name.is_empty())
}

/// The arguments of one row of the table: a flag, and the one that switches it off.
fn arguments(flag: Flag) -> impl Iterator<Item = Arg> {
    let headed = |name| Arg::new(name).long(name).help_heading(heading(flag));
    let on = headed(flag.flag).help(flag.help);
    let on = if flag.takes == Takes::Switch {
        on.action(ArgAction::SetTrue)
    } else {
        let read = move |text: &str| {
            flag.set(&mut ClusterSpec::default(), &[text]).map(|()| text.to_owned())
        };
        let action = if flag.list { ArgAction::Append } else { ArgAction::Set };
        // What begins like a flag is no address, and is refused with the reason.
        let hyphens = flag.key == "dask.join";
        on.value_name(flag.value).value_parser(read).action(action).allow_hyphen_values(hyphens)
    };
    let on = if flag.alias.is_empty() { on } else { on.visible_alias(flag.alias) };
    if flag.off.is_empty() {
        return [Some(on), None].into_iter().flatten();
    }
    let off = headed(flag.off).action(ArgAction::SetTrue);
    let off = if flag.off_help.is_empty() { off.hide(true) } else { off.help(flag.off_help) };
    [Some(on.conflicts_with(flag.off)), Some(off)].into_iter().flatten()
}

fn heading(flag: Flag) -> Option<&'static str> {
    (!flag.heading.is_empty()).then_some(flag.heading)
}

impl Args for Flags {
    fn augment_args(command: Command) -> Command {
        command.args(spec::flags().flat_map(arguments))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Flags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut overrides = ClusterSpec::default();
        for flag in spec::flags() {
            let texts: Vec<&str> = if flag.takes != Takes::Switch {
                let texts = matches.get_many::<String>(flag.flag);
                texts.into_iter().flatten().map(String::as_str).collect()
            } else if matches.get_flag(flag.flag) {
                vec!["true"]
            } else if !flag.off.is_empty() && matches.get_flag(flag.off) {
                vec!["false"]
            } else {
                Vec::new()
            };
            if !texts.is_empty() {
                let set = flag.set(&mut overrides, &texts);
                set.map_err(|reason| clap::Error::raw(ErrorKind::ValueValidation, reason))?;
            }
        }
        Ok(Self(overrides))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Flags {
    /// Whether READY requires that every pair of workers uses the expected transport, if given.
    pub(crate) fn verify(&self) -> Option<bool> {
        self.0.verify
    }

    /// The name given with `--name`.
    pub(crate) fn name(&self) -> Option<&ClusterName> {
        self.0.name.as_ref()
    }
}

impl Asked {
    /// Reads the spec file and applies the flags to it.
    pub(crate) fn request(&self) -> Result<Request, Failure> {
        self.request_with(|_| ())
    }

    /// Like [`Asked::request`]; `change` sets further keys on behalf of the command.
    pub(crate) fn request_with(
        &self,
        change: impl FnOnce(&mut ClusterSpec),
    ) -> Result<Request, Failure> {
        let mut flags = self.flags.0.clone();
        // A machine's relative path is read here and now.
        let topology = flags.topology.take();
        let here = std::env::current_dir().unwrap_or_default();
        flags.resolve_paths(&here);
        flags.topology = topology;
        let files = self.file.iter().map(|path| read_spec(path)).collect::<Result<Vec<_>, _>>()?;
        change(&mut flags);
        Request::merge(&files, &flags).map_err(|error| keys::contradiction(&error, &files))
    }
}

/// Reads a spec from a file, or from standard input for `-`. Its relative paths are beside it.
fn read_spec(path: &Path) -> Result<ClusterSpec, Failure> {
    Ok(read_spec_and_text(path)?.0)
}

/// Reads a spec as [`read_spec`] does, with its text.
pub(super) fn read_spec_and_text(path: &Path) -> Result<(ClusterSpec, String), Failure> {
    let text = input::read(path, spec::SIZE_LIMIT).map_err(|error| error.failure("spec", path))?;
    let variable = |name: &str| std::env::var_os(name);
    let mut spec = spec::parse_with(&text, &input::shown(path), &variable).map_err(wrong_spec)?;
    spec.resolve_paths(&input::folder(path));
    Ok((spec, text))
}

fn wrong_spec(error: SpecError) -> Failure {
    let hint = error.hint();
    Failure::new(Exit::Usage, error).maybe_hint(hint)
}
