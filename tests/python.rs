//! The Python package: its own tests, by pytest, from the source tree with the binary under test.
//!
//! One test for each file of `tests/python`, so that they run side by side; what pytest skips is
//! told and counted as other skips are.

#[path = "packages/mod.rs"]
mod packages;
#[path = "skip/mod.rs"]
mod skip;

use std::process::Command;

use packages::{packages, passes, python, root};
use skip::skip;

/// Runs the tests of a file, and counts what pytest skipped.
fn told_by(file: &str) {
    run(file, Command::new(python()));
}

/// The same, on a machine with two made-up GPUs.
fn told_on_two_gpus_by(file: &str) {
    let mut command = Command::new(root().join("scripts/made-up.sh"));
    command.arg("2").arg(python()).env("PYTHON", python());
    run(file, command);
}

/// The same, in a network of its own, where the tests may make links.
fn told_in_its_own_network_by(file: &str) {
    if !nix::unistd::geteuid().is_root() {
        return told_by(file);
    }
    let mut command = Command::new(root().join("scripts/own-network.sh"));
    command.arg(python());
    run(file, command);
}

fn run(file: &str, mut pytest: Command) {
    if packages() {
        pytest.args(["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--timeout", "900"]);
        pytest.arg(root().join("tests/python").join(file)).current_dir(root());
        for line in passes(&mut pytest).lines().filter_map(|line| line.strip_prefix("SKIPPED ")) {
            skip("dask", line);
        }
    }
}

#[test]
fn a_python_program_plans_launches_and_watches_clusters_of_any_engine() {
    told_by("test_program.py");
}

#[test]
fn local_cuda_cluster_starts_and_scales_as_dasks_users_know() {
    told_by("test_cluster.py");
}

#[test]
fn the_workloads_of_the_examples_have_the_results_of_the_same_work_without_dask() {
    told_by("test_workloads.py");
}

#[test]
fn ranks_find_each_other_in_the_languages_of_their_libraries() {
    told_by("test_ranks.py");
}

#[test]
fn ranks_are_started_again_together_and_forked() {
    told_by("test_restarts.py");
}

#[test]
fn the_rank_that_keeps_a_job_waiting_is_named() {
    told_by("test_why.py");
}

#[test]
fn what_ranks_write_is_also_in_files() {
    told_by("test_output.py");
}

#[test]
fn a_process_of_another_pool_binds_itself() {
    told_by("test_bind.py");
}

#[test]
fn actors_of_ray_are_bound_to_what_is_near_their_gpus() {
    told_by("test_ray.py");
}

#[test]
fn a_release_has_one_version_its_notes_and_its_provenance() {
    told_by("test_release.py");
}

#[test]
fn the_rank_that_mpi_waits_for_and_the_task_that_dask_waits_for_are_named() {
    told_by("test_why_libraries.py");
}

#[test]
fn what_tasks_of_dask_wait_for_is_told_with_the_rank_that_has_them() {
    told_by("test_why_queues.py");
}

#[test]
fn where_little_may_be_seen_the_rest_is_named_and_the_kernels_messages_are_told() {
    told_by("test_why_less.py");
}

#[test]
fn what_cannot_go_on_is_told_of_and_ended_if_that_is_wanted() {
    told_by("test_stalls.py");
}

#[test]
fn the_wires_that_bytes_took_are_told_and_a_verified_program_has_to_use_the_plans() {
    told_by("test_audit.py");
}

#[test]
fn keywords_and_settings_of_wrong_types_are_refused_by_their_names() {
    told_by("test_keywords.py");
}

#[test]
fn tasks_that_kill_are_given_up_and_a_scheduler_that_dies_is_found_again() {
    told_by("test_deaths.py");
}

#[test]
fn local_cuda_cluster_ends_with_its_python_and_leaves_nothing() {
    told_by("test_ends.py");
}

#[test]
fn tasks_are_placed_by_the_wires_between_workers() {
    told_by("test_wires.py");
}

#[test]
fn tasks_that_need_a_gpu_are_given_to_workers_with_one() {
    told_by("test_kinds.py");
}

#[test]
fn what_we_use_of_dask_is_there() {
    told_by("test_dask_surface.py");
}

#[test]
fn the_oldest_dask_that_we_claim_runs_clusters_as_the_newest_does() {
    if packages() {
        if !root().join(".venv-oldest/bin/python").exists() {
            return skip("dask", ".venv-oldest is not here; scripts/setup.sh --tests");
        }
        passes(Command::new(root().join("scripts/oldest-dask.sh")).arg("--short"));
    }
}

#[test]
fn workers_run_as_jobs_of_a_slurm() {
    told_by("test_slurm.py");
}

#[test]
fn a_script_that_is_started_on_each_machine_goes_on_in_one() {
    told_by("test_runner.py");
}

#[test]
fn jobs_that_are_whole_machines_come_go_and_say_why() {
    told_by("test_jobs.py");
}

#[test]
fn what_dasks_users_do_gives_the_same_over_it() {
    told_by("test_work.py");
}

#[test]
fn what_workers_print_is_seen_where_their_cluster_was_started() {
    told_by("test_relay.py");
}

#[test]
fn programs_that_cannot_be_edited_run_over_it() {
    told_by("test_as_dask_cuda.py");
}

#[test]
fn dasks_messages_travel_over_direct_connections() {
    told_by("test_comm.py");
}

#[test]
fn host_memory_travels_over_ucx_where_that_is_better() {
    told_by("test_comm_ucx.py");
}

#[test]
fn device_memory_travels_from_device_to_device() {
    told_on_two_gpus_by("test_comm_device.py");
}

#[test]
fn memory_that_direct_connections_share_is_never_changed_by_others() {
    told_by("test_comm_memory.py");
}

#[test]
fn direct_connections_heed_the_memory_limits_of_dasks_workers() {
    told_by("test_comm_limits.py");
}

#[test]
fn who_speaks_another_language_than_direct_connections_is_told() {
    told_by("test_comm_languages.py");
}

#[test]
fn direct_connections_carry_on_whatever_is_killed_or_stopped() {
    told_by("test_comm_chaos.py");
}

#[test]
fn strangers_stopped_peers_and_lost_networks_harm_no_direct_connection() {
    told_in_its_own_network_by("test_comm_strangers.py");
}

#[test]
fn direct_connections_join_hosts_and_outlive_links_that_fail() {
    told_in_its_own_network_by("test_comm_hosts.py");
}

#[test]
fn a_cluster_over_two_hosts_is_seen_as_one_and_each_end_has_its_cause() {
    told_in_its_own_network_by("test_join.py");
}

#[test]
fn results_are_right_and_ends_have_causes_on_bad_days_of_hosts() {
    told_in_its_own_network_by("test_bad_days.py");
}

#[test]
fn wires_between_hosts_are_observed_or_said_not_to_be() {
    told_in_its_own_network_by("test_wires_between_hosts.py");
}

#[test]
fn one_command_brings_up_workers_on_several_hosts_and_another_ends_them() {
    told_in_its_own_network_by("test_hosts.py");
}

#[test]
fn interpreters_that_end_during_transfers_hurt_no_peer() {
    told_by("test_comm_ends.py");
}

#[test]
fn a_notebook_shows_it_and_works_with_it() {
    told_by("test_notebook.py");
}

#[test]
fn jupyter_finds_the_page_and_serves_it() {
    told_by("test_jupyter.py");
}

#[test]
fn each_row_of_the_guide_from_dask_cuda_is_true() {
    told_by("test_guide.py");
}

#[test]
fn dask_cudas_own_tests_pass_over_it_on_a_made_up_machine() {
    if packages() {
        // What it skips itself wants cuDF or a real GPU; the script prints it with the reasons.
        let mut script = Command::new(root().join("scripts/dask-cuda-tests.sh"));
        passes(script.arg("--short").env("PYTHON", python()));
    }
}
