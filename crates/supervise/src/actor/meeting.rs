//! Has workers that are started again together told of each other.
//!
//! *Invariant:* the programs of a start are taken before its workers are started.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use super::Actor;
use crate::core::Event;
use cuda_cluster_model::plan::Program;

/// The workers of a start, and their programs.
pub(super) type NextStart =
    Pin<Box<dyn Future<Output = (Vec<usize>, Result<Vec<Program>, String>)> + Send>>;

impl Actor {
    /// Has the workers of the next start told of each other.
    pub(super) fn meet(&mut self, restart: u32, members: Vec<usize>) {
        let Some(meeting) = &self.meeting else {
            return self.tell_later(Event::Met(Ok(Vec::new())));
        };
        let programs = Arc::clone(meeting).meet(restart, members.clone());
        self.next_start = Some(Box::pin(async move { (members, programs.await) }));
    }

    pub(super) fn take_programs(
        &mut self,
        members: &[usize],
        programs: Result<Vec<Program>, String>,
    ) -> Event {
        self.next_start = None;
        let programs = match programs {
            Ok(programs) => programs,
            Err(failure) => return Event::Met(Err(failure)),
        };
        let roles = programs.iter().map(|program| program.role.clone()).collect();
        for (member, program) in members.iter().zip(programs) {
            if let Some(worker) = self.launch.workers.get_mut(*member) {
                worker.program = program;
            }
        }
        Event::Met(Ok(roles))
    }
}

/// The programs of the next start, once they are prepared.
pub(super) async fn prepared(
    next: &mut Option<NextStart>,
) -> (Vec<usize>, Result<Vec<Program>, String>) {
    match next {
        Some(next) => next.await,
        None => std::future::pending().await,
    }
}
