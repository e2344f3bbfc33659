//! Several programs in one job: what is wrong with them, and how many GPUs each takes.
//!
//! Does not choose GPUs; `plan` does.
//!
//! *Invariant:* of a spec that was checked, every program has a rank, and its GPUs are whole.

use super::error::{Found, refuse};
use super::{ClusterSpec, EngineKind, GpuSelection, ProgramSpec, PythonCommand};

/// Longest name of a program.
const LONGEST: usize = 32;

impl ClusterSpec {
    /// The programs of a job that has several.
    pub fn programs(&self) -> &[ProgramSpec] {
        let asked = self.command.programs.as_deref();
        asked.filter(|_| self.engine == Some(EngineKind::Command)).unwrap_or_default()
    }

    /// How many GPUs each of several programs takes: ranks with a GPU come first, those of
    /// `cpu_workers` last.
    pub fn gpus_of_programs(&self) -> Vec<u32> {
        let each = self.workers_per_gpu.unwrap_or(1).max(1);
        let of = |ranks: Vec<u32>| ranks.into_iter().map(|ranks| ranks.div_ceil(each)).collect();
        of(with_gpus(self, self.programs()))
    }
}

/// Each program's ranks that have a GPU.
fn with_gpus(spec: &ClusterSpec, programs: &[ProgramSpec]) -> Vec<u32> {
    let all = programs.iter().fold(0u32, |sum, one| sum.saturating_add(one.workers));
    let mut left = all.saturating_sub(spec.cpu_workers.unwrap_or(0));
    let take = |one: &ProgramSpec| {
        let taken = one.workers.min(left);
        left -= taken;
        taken
    };
    programs.iter().map(take).collect()
}

/// Checks the programs against each other and against the numbers of ranks.
pub(super) fn check(spec: &ClusterSpec) -> Result<(), Found> {
    let programs = spec.command.programs.as_deref().unwrap_or_default();
    if programs.is_empty() {
        return Ok(());
    }
    names(programs)?;
    commands(spec, programs)?;
    numbers(spec, programs)
}

fn names(programs: &[ProgramSpec]) -> Result<(), Found> {
    for (at, ProgramSpec { name, workers, .. }) in programs.iter().enumerate() {
        let key = |field: &str| format!("command.programs[{at}].{field}");
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
        let first = |c: char| c.is_ascii_alphabetic();
        if !(name.starts_with(first) && name.chars().all(plain) && name.len() <= LONGEST) {
            return refuse(
                &key("name"),
                format!("{name:?} is no name of a program"),
                "use letters, digits, '-' and '_', a letter first, at most 32",
            );
        }
        if programs[..at].iter().any(|other| other.name == *name) {
            return refuse(
                &key("name"),
                format!("two programs are called {name}"),
                "give each a name of its own",
            );
        }
        if *workers == 0 {
            let text = format!("{name} has no rank; the least is 1");
            return refuse(&key("workers"), text, "leave the program out, or give it a rank");
        }
    }
    Ok(())
}

fn commands(spec: &ClusterSpec, programs: &[ProgramSpec]) -> Result<(), Found> {
    if spec.command.argv.is_some() {
        return refuse(
            "command.programs",
            "there is a command for all ranks, too ('command.argv')",
            "leave one of them out; with 'command.programs' typed, a lone ':' parts the commands",
        );
    }
    for (at, program) in programs.iter().enumerate() {
        let first = program.argv.as_deref().map(<[String]>::first);
        if first.is_some_and(|first| first.is_none_or(String::is_empty)) {
            let key = format!("command.programs[{at}].argv");
            return refuse(&key, "there is no program in it", "name the program to run");
        }
    }
    let warm = spec.command.warm.as_deref().unwrap_or_default();
    let differ = || programs.iter().any(|program| program.argv != programs[0].argv);
    if !warm.is_empty() && differ() {
        return refuse(
            "command.warm",
            "one process imports for all ranks, and these run different programs",
            "leave 'command.warm' out, or give the programs the same command",
        );
    }
    if let (false, Some(argv)) = (warm.is_empty(), &programs[0].argv)
        && let Err(error) = PythonCommand::of(argv)
    {
        let hint = "begin the commands with python, or leave 'command.warm' out";
        return refuse("command.warm", error.to_string(), hint);
    }
    Ok(())
}

fn numbers(spec: &ClusterSpec, programs: &[ProgramSpec]) -> Result<(), Found> {
    let sum: u64 = programs.iter().map(|program| u64::from(program.workers)).sum();
    let (each, cpu) = (spec.workers_per_gpu.unwrap_or(1), spec.cpu_workers.unwrap_or(0));
    let gpus = match &spec.gpus {
        Some(GpuSelection::None) => Some(0),
        Some(GpuSelection::Choose(choose)) => Some(choose.count),
        _ => spec.workers,
    };
    let ranks = gpus.map(|gpus| u64::from(gpus) * u64::from(each) + u64::from(cpu));
    if let Some(ranks) = ranks.filter(|ranks| *ranks != sum) {
        let number = if ranks == 1 { "1 is".to_owned() } else { format!("{ranks} are") };
        return refuse(
            "command.programs",
            format!("the programs have {sum} ranks together, and {number} asked for"),
            "make the numbers agree, or leave the number of ranks out",
        );
    }
    if sum < u64::from(cpu) {
        return refuse(
            "command.programs",
            format!("the programs have {sum} ranks together, fewer than the {cpu} without a GPU"),
            "give fewer 'cpu_workers', or the programs more ranks",
        );
    }
    let split = with_gpus(spec, programs).into_iter().zip(programs);
    let split = split.enumerate().find(|(_, (ranks, _))| each > 0 && ranks % each != 0);
    if let Some((at, (ranks, program))) = split {
        return refuse(
            &format!("command.programs[{at}].workers"),
            format!(
                "{} would share a GPU with another program: {ranks} ranks, {each} for each GPU",
                program.name
            ),
            "give it a multiple of 'workers_per_gpu'",
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::spec::Request;

    fn said(text: &str) -> Result<Vec<u32>, String> {
        let text = format!("version: 1\nengine: command\n{text}");
        let spec = crate::spec::parse(&text, "test").map_err(|error| error.to_string())?;
        let request = Request::of(spec).map_err(|error| error.to_string())?;
        Ok(request.spec.gpus_of_programs())
    }

    fn two(a: u32, b: u32, more: &str) -> Result<Vec<u32>, String> {
        said(&format!(
            "command: {{programs: [{{name: a, workers: {a}}}, {{name: b, workers: {b}}}]}}\n{more}"
        ))
    }

    #[test]
    fn programs_have_whole_gpus_and_those_without_come_last() {
        assert_eq!(said(""), Ok(vec![]));
        assert_eq!(two(4, 4, ""), Ok(vec![4, 4]));
        assert_eq!(two(4, 4, "workers: 8"), Ok(vec![4, 4]));
        assert_eq!(two(4, 2, "workers_per_gpu: 2"), Ok(vec![2, 1]));
        assert_eq!(two(4, 3, "cpu_workers: 2"), Ok(vec![4, 1]));
        assert_eq!(two(1, 2, "cpu_workers: 3\ngpus: none"), Ok(vec![0, 0]));
        assert_eq!(two(2, 2, "gpus: {count: 4}"), Ok(vec![2, 2]));
    }

    #[test]
    fn what_contradicts_itself_is_refused_with_its_key() {
        for (wrong, words) in [
            (two(4, 4, "workers: 6"), "command.programs: the programs have 8 ranks together"),
            (two(1, 1, "gpus: none\ncpu_workers: 1"), "and 1 is asked for"),
            (two(2, 2, "gpus: {count: 2}"), "and 2 are asked for"),
            (two(1, 1, "cpu_workers: 3"), "fewer than the 3 without a GPU"),
            (two(3, 3, "workers_per_gpu: 2"), "command.programs[0].workers: a would share"),
            (two(0, 1, ""), "command.programs[0].workers: a has no rank"),
            (said("command: {programs: [{name: 1a, workers: 1}]}"), "is no name of a program"),
            (said("command: {programs: [{name: a:b, workers: 1}]}"), "is no name of a program"),
            (
                said("command: {programs: [{name: a, workers: 1}, {name: a, workers: 1}]}"),
                "command.programs[1].name: two programs are called a",
            ),
            (
                said("command: {argv: [x], programs: [{name: a, workers: 1}]}"),
                "command.programs: there is a command for all ranks, too",
            ),
            (
                said("command: {programs: [{name: a, workers: 1, argv: []}]}"),
                "command.programs[0].argv: there is no program in it",
            ),
            (
                said(
                    "command: {warm: [json], programs: [{name: a, workers: 1, argv: [python, x]}, \
                     {name: b, workers: 1, argv: [python, y]}]}",
                ),
                "command.warm: one process imports for all ranks",
            ),
            (said("command: {programs: [{name: a}]}"), "workers"),
        ] {
            let error = wrong.expect_err(words);
            assert!(error.contains(words), "{error}");
        }
        let same =
            "{name: a, workers: 1, argv: [python, x]}, {name: b, workers: 1, argv: [python, x]}";
        assert_eq!(said(&format!("command: {{warm: [json], programs: [{same}]}}")), Ok(vec![1, 1]));
    }
}
