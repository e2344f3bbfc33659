//! The programs of the ranks, start by start: who has which rank, and what it is told.
//!
//! Does not decide who takes part; the supervisor does. Serves the languages that need somebody who
//! answers (`rendezvous`) until the next start.
//!
//! *Invariant:* all ranks of a start are told of the same places to meet, which no other start had.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tokio::task::JoinHandle;

use crate::audit;
use crate::command::crew::{self, Member, Role};
use crate::command::{Meeting, MeetingError, SHARED_MEMORY, devices};
use crate::processes::{rank, with_shared_memory};
use crate::secret;
use cuda_cluster_machine::os::run_directory::Paths;
use cuda_cluster_model::ids::RANKS;
use cuda_cluster_model::plan::{CommandPlan, Plan, WorkerPlan};
use cuda_cluster_model::spec::Bootstrap;
use cuda_cluster_supervise::{Meet, Meeting as Programs, ProcessSpec, Stopper};

/// The ranks of a job, whose plan is for this machine.
#[derive(Debug)]
pub struct Ranks {
    plan: Plan,
    told: CommandPlan,
    paths: Paths,
    shared_memory: Option<PathBuf>,
    /// The ranks of the present start.
    members: Mutex<Vec<Member>>,
    /// Serves the ranks of the present start.
    serving: Mutex<Option<JoinHandle<()>>>,
    /// Ends the cluster when ranks can't go on.
    stopper: Arc<OnceLock<Stopper>>,
}

impl Ranks {
    pub(crate) fn new(
        plan: &Plan,
        told: &CommandPlan,
        paths: &Paths,
        shared_memory: Option<PathBuf>,
    ) -> Self {
        let (plan, told, paths) = (plan.clone(), told.clone(), paths.clone());
        let (serving, stopper) = (Mutex::default(), Arc::default());
        let members = Mutex::new(crew::first(&plan, &told));
        Self { plan, told, paths, shared_memory, members, serving, stopper }
    }

    /// From now on the cluster ends if those that serve the ranks do.
    pub(crate) fn can_end(&self, stopper: Stopper) {
        // It is set once.
        let _ = self.stopper.set(stopper);
    }

    /// The processes of the first start; the last ones are the spares, which are told nothing yet.
    ///
    /// # Errors
    /// If the ranks have no place to meet.
    pub(crate) async fn first(&self) -> Result<Vec<ProcessSpec>, MeetingError> {
        let mut ranks = self.start(0, crew::first(&self.plan, &self.told)).await?;
        let spares = &self.plan.workers[ranks.len()..];
        ranks.extend(spares.iter().map(|planned| rank(planned, &self.told, None)));
        Ok(ranks)
    }

    /// The processes of the start after `restart` others, in the order of their ranks.
    async fn start(
        &self,
        restart: u32,
        members: Vec<Member>,
    ) -> Result<Vec<ProcessSpec>, MeetingError> {
        if let Some(program) = crew::left_out(&members, &self.told) {
            return Err(MeetingError::NobodyLeft(program.to_owned()));
        }
        if let Some(before) = self.serve(None) {
            before.abort();
            // It is gone, with what it has started, when this returns.
            let _ = before.await;
        }
        for rank in (0..).take(members.len()) {
            // What it has said in a start before.
            let _ = std::fs::remove_file(self.paths.rank_error(rank));
        }
        // The socket of the start before.
        let _ = std::fs::remove_file(self.paths.socket(RANKS));
        let job = self.plan.name.to_string();
        let (told, paths) = (&self.told, &self.paths);
        let start = format!("{job}-{}", secret::random_name()?);
        let (names, secret) = ([&*job, &*start], secret::fresh()?);
        let roles = crew::roles(&members, told);
        let meeting = Meeting::prepare(names, roles.clone(), told, restart, paths, secret).await;
        let (meeting, hosts) = meeting?;
        let stopper = Arc::clone(&self.stopper);
        let lost = move |why| {
            if let Some(stopper) = stopper.get() {
                stopper.fail(why);
            }
        };
        self.serve(Some(tokio::spawn(hosts.serve(lost))));
        let pmix = self.told.bootstrap.contains(&Bootstrap::Pmix);
        let files = if pmix { &SHARED_MEMORY[..] } else { &[] };
        let workers = members.iter().filter_map(|member| self.plan.workers.get(member.worker));
        let workers: Vec<&WorkerPlan> = workers.collect();
        let told = |((number, planned), role): ((u32, &WorkerPlan), Role)| {
            let mut spec = rank(planned, &self.told, role.name);
            devices::show(&self.plan.workers, &workers, planned, &mut spec.program.env);
            meeting.tell(number, &self.told.bootstrap, &mut spec.program);
            if self.plan.supervision.audit {
                audit::ask_nccl(&self.paths, &mut spec.program.env);
            }
            with_shared_memory(&mut spec.program, self.shared_memory.as_deref(), files);
            spec
        };
        *self.members.lock().unwrap_or_else(PoisonError::into_inner) = members;
        Ok((0..).zip(workers.iter().copied()).zip(roles).map(told).collect())
    }

    /// Keeps who serves the ranks now, and returns who did.
    fn serve(&self, now: Option<JoinHandle<()>>) -> Option<JoinHandle<()>> {
        let mut serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *serving, now)
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        if let Some(before) = self.serve(None) {
            before.abort();
        }
    }
}

impl Meet for Ranks {
    fn meet(self: Arc<Self>, restart: u32, members: Vec<usize>) -> Programs {
        Box::pin(async move {
            let before = self.members.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let specs = self
                .start(restart, crew::next(&before, &members))
                .await
                .map_err(|error| error.to_string())?;
            Ok(specs.into_iter().map(|spec| spec.program).collect())
        })
    }
}
