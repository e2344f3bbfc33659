//! Who takes part in a start of a job with several programs: which worker runs which of them, and
//! what it is among those that run the same.
//!
//! *Invariant:* a worker keeps its program from start to start, and a spare gets that of the worker
//! whose place it takes. So ranks stay numbered program by program.

use cuda_cluster_model::plan::{CommandPlan, Plan, WorkerPlan};

/// One rank of a start; its number is its place among all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// Its place among the workers of the plan.
    pub(crate) worker: usize,
    /// The number of its program; 0 if there is only one.
    pub(crate) program: usize,
}

/// What a rank is among those that run the same program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Role {
    /// The number of its program: `MPI_APPNUM`.
    pub(crate) program: u32,
    /// The program's name; `None` if there is only one.
    pub(crate) name: Option<String>,
    /// Its number among those, from 0, and how many these are.
    pub(crate) rank: u32,
    pub(crate) size: u32,
}

/// The ranks of the first start: all but the spares.
pub(crate) fn first(plan: &Plan, told: &CommandPlan) -> Vec<Member> {
    let ranks = plan.workers.len().saturating_sub(told.spares as usize);
    let number = |name: &String| told.programs.iter().position(|one| one.name == *name);
    let member = |(worker, planned): (usize, &WorkerPlan)| {
        let program = planned.program.as_ref().and_then(number).unwrap_or(0);
        Member { worker, program }
    };
    plan.workers[..ranks].iter().enumerate().map(member).collect()
}

/// The ranks of the start after one with the ranks of `before`, with the workers of `now`: in the
/// place of one that is lost there is a spare, or nobody.
pub(crate) fn next(before: &[Member], now: &[usize]) -> Vec<Member> {
    let was_there = |worker: usize| before.iter().any(|member| member.worker == worker);
    let mut now = now.iter().copied().peekable();
    let mut next = Vec::new();
    for Member { worker, program } in before {
        let takes = |there: &usize| there == worker || !was_there(*there);
        next.extend(now.next_if(takes).map(|worker| Member { worker, program: *program }));
    }
    next
}

/// What each rank is among those of its program.
pub(crate) fn roles(members: &[Member], told: &CommandPlan) -> Vec<Role> {
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let of = |members: &[Member], program| {
        number(members.iter().filter(|member| member.program == program).count())
    };
    let role = |(at, member): (usize, &Member)| Role {
        program: number(member.program),
        name: told.programs.get(member.program).map(|program| program.name.clone()),
        rank: of(&members[..at], member.program),
        size: of(members, member.program),
    };
    members.iter().enumerate().map(role).collect()
}

/// A program that nobody runs any more.
pub(crate) fn left_out<'a>(members: &[Member], told: &'a CommandPlan) -> Option<&'a str> {
    let mut programs = told.programs.iter().enumerate();
    let nobody = |at: usize| members.iter().all(|member| member.program != at);
    programs.find(|(at, _)| nobody(*at)).map(|(_, program)| program.name.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_cluster_model::plan::{EnginePlan, plan};
    use cuda_cluster_model::spec::Request;
    use cuda_cluster_model::topology::{builtin, parse};

    /// Two programs of two ranks, and a spare.
    fn job() -> (Plan, CommandPlan) {
        let programs = [("a", 2), ("b", 2)]
            .map(|(name, workers)| serde_json::json!({ "name": name, "workers": workers }));
        let spec = serde_json::json!({
            "engine": "command",
            "command": { "programs": programs, "restarts": 2, "spares": 1 },
        });
        let machine = parse(builtin("dgx-h100").expect("built in")).expect("right");
        let request = Request::of(serde_json::from_value(spec).expect("a spec")).expect("sound");
        let plan = plan(&machine, &request, &Default::default()).expect("a plan");
        let EnginePlan::Command(told) = plan.engine.clone() else { panic!("{:?}", plan.engine) };
        (plan, told)
    }

    fn who(members: &[Member]) -> Vec<(usize, usize)> {
        members.iter().map(|member| (member.worker, member.program)).collect()
    }

    #[test]
    fn a_spare_gets_the_program_whose_place_it_takes() {
        let (plan, told) = job();
        assert_eq!(plan.workers.len(), 5);
        let first = first(&plan, &told);
        assert_eq!(who(&first), [(0, 0), (1, 0), (2, 1), (3, 1)]);
        // At the border between the programs, on both sides of it.
        let second = next(&first, &[0, 4, 2, 3]);
        assert_eq!(who(&second), [(0, 0), (4, 0), (2, 1), (3, 1)]);
        assert_eq!(who(&next(&first, &[0, 1, 4, 3])), [(0, 0), (1, 0), (4, 1), (3, 1)]);
        // Then one is lost, and there is no spare any more.
        let third = next(&second, &[4, 2, 3]);
        assert_eq!(who(&third), [(4, 0), (2, 1), (3, 1)]);
        assert_eq!(who(&next(&first, &[0, 1, 2, 3])), who(&first));
        assert_eq!(left_out(&third, &told), None);
        assert_eq!(left_out(&next(&third, &[2, 3]), &told), Some("a"));
    }

    #[test]
    fn a_rank_has_a_number_in_its_program() {
        let (plan, told) = job();
        let roles = roles(&first(&plan, &told), &told);
        let shown: Vec<(u32, &str, u32, u32)> = roles
            .iter()
            .map(|role| (role.program, role.name.as_deref().expect("a name"), role.rank, role.size))
            .collect();
        assert_eq!(shown, [(0, "a", 0, 2), (0, "a", 1, 2), (1, "b", 0, 2), (1, "b", 1, 2)]);
    }
}
