//! Removes old run directories of clusters with generated names (`run-123`), because no later
//! cluster uses those names again.
//!
//! *Invariant:* directories of running clusters, and of clusters with chosen names, are kept.

use std::fs;
use std::path::Path;
use std::time::Duration;

use super::{Paths, RunDirectory, names_below};
use cuda_cluster_model::ids::ClusterName;

/// This many of the directories with generated names are kept, however old.
const KEPT: usize = 8;

/// This many are kept while they are young, in case somebody is about to look at them.
const KEPT_YOUNG: usize = 64;

/// Time for the guardian to end after its supervisor.
const ENDING: Duration = Duration::from_secs(5);

/// The age at which a directory is no longer young.
const YOUNG: Duration = Duration::from_secs(600);

/// Removes old directories below `base`, and kills what their clusters have left running.
pub(super) fn prune(base: &Path) {
    let dead = names_below(base).unwrap_or_default().into_iter().filter(is_made_up);
    let mut dead: Vec<_> = dead
        .map(|name| (Paths::below(base, &name), name))
        .filter(|(paths, _)| paths.look().is_ok_and(|alive| !alive))
        .filter_map(|(paths, name)| Some((unchanged_for(paths.root())?, paths, name)))
        .collect();
    dead.sort_by_key(|(age, ..)| *age);
    for (nth, (age, paths, name)) in dead.into_iter().enumerate() {
        if !is_kept(nth, age)
            && let Ok(Some(directory)) = RunDirectory::left_over(&name, &paths, Duration::ZERO)
        {
            directory.sweep();
            // Directories that can't be removed now are tried again next time.
            let _ = directory.remove();
        }
    }
}

/// Removes what a failed start has left under a name that the embedded API or the Python package
/// generated: the cause was told to the program, which no longer uses the name.
pub fn forget_failed_start(name: &ClusterName) {
    let of_a_program =
        name.as_str().starts_with("embedded-") || name.as_str().starts_with("python-");
    if of_a_program && is_made_up(name) {
        forget_ended(name);
    }
}

/// Removes what a cluster of this name has left that has ended, or ends in the next moments.
pub fn forget_ended(name: &ClusterName) {
    let paths = Paths::of(name);
    if let Ok(Some(directory)) = RunDirectory::left_over(name, &paths, ENDING) {
        directory.sweep();
        // If that fails, a later start removes it.
        let _ = directory.remove();
    }
}

/// Whether to keep the `nth` youngest directory.
fn is_kept(nth: usize, age: Duration) -> bool {
    nth < KEPT || (nth < KEPT_YOUNG && age < YOUNG)
}

/// `run-123`, `embedded-123-0`, `python-123-0`: with the id of the process that generated the name;
/// `job-77-0-1`: with those of a job, a step and a task.
fn is_made_up(name: &ClusterName) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match name.as_str().split_once('-') {
        Some(("run", pid)) => number(pid),
        Some(("embedded" | "python", rest)) => rest.split('-').all(number),
        Some(("job", rest)) => rest.split('-').count() == 3 && rest.split('-').all(number),
        _ => false,
    }
}

/// The time since an entry was last created or removed in a directory.
fn unchanged_for(directory: &Path) -> Option<Duration> {
    let modified = fs::symlink_metadata(directory).ok()?.modified().ok()?;
    // A time in the future counts as now.
    Some(modified.elapsed().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::run_directory::tests::{name, private_base};

    #[test]
    fn of_names_that_nobody_chose_only_the_youngest_directories_stay() {
        assert!(is_made_up(&name("run-123")) && is_made_up(&name("embedded-7-0")));
        assert!(is_made_up(&name("python-7-0")) && is_made_up(&name("job-77-0-1")));
        for chosen in [
            "job-77",
            "job-77-0",
            "job-a-0-1",
            "run",
            "run-",
            "run-a",
            "run-1b",
            "runs-1",
            "embedded-",
            "nightly-3",
        ] {
            assert!(!is_made_up(&name(chosen)), "{chosen}");
        }
        let (young, old) = (Duration::from_secs(1), Duration::from_secs(86_400));
        assert!(is_kept(0, old) && is_kept(KEPT - 1, old) && !is_kept(KEPT, old));
        assert!(is_kept(KEPT, young) && !is_kept(KEPT_YOUNG, young));

        let base = private_base();
        let living = RunDirectory::acquire_below(base.path(), &name("run-0")).expect("free");
        for number in 1..=KEPT_YOUNG + 3 {
            let name = name(&format!("run-{number}"));
            RunDirectory::acquire_below(base.path(), &name).expect("free");
            // In a minute's distance, so that the order is sure.
            let back = Duration::from_secs(60 * (KEPT_YOUNG + 4 - number) as u64);
            let at = std::time::SystemTime::now() - back;
            let directory = fs::File::open(base.path().join(name.as_str())).expect("there");
            directory.set_modified(at).expect("set");
        }
        RunDirectory::acquire_below(base.path(), &name("mine")).expect("free");
        prune(base.path());
        assert!(living.path().exists(), "it lives");
        assert!(base.path().join("mine").exists(), "somebody chose the name");
        let left = |number| base.path().join(format!("run-{number}")).exists();
        let newest = KEPT_YOUNG + 3;
        assert!((newest - KEPT + 1..=newest).all(left));
        assert!((1..newest - KEPT - 2).all(|number| !left(number)));
    }
}
