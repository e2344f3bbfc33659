//! Properties of the decisions, tested with random events.

use std::time::Duration;

use proptest::prelude::*;

use super::world::{World, launch, policy, stall, up};
use super::{Event, GpuFinding, Moment};
use crate::Escalation;
use cuda_cluster_model::plan::{RestartWhen, Unresponsive};
use cuda_cluster_model::units::Span;
use cuda_cluster_wire::process::{Exit, Key};
use cuda_cluster_wire::status::{AfterLeaving, Condition, Status};

/// A random event, resolved with the processes that live at the time.
#[derive(Clone, Debug)]
enum Happening {
    Ready(usize),
    Step(usize),
    Forks(usize),
    Work(usize),
    Fail(usize),
    Leave(usize, AfterLeaving),
    Die(usize, Exit),
    NotStarted(usize),
    Memory(usize),
    CloseStatus(usize),
    Stale(u64),
    Stop(Escalation),
    Restart(usize),
    Scale(usize),
    Verified,
    Stall(bool),
    Meet(bool),
    Hang(usize, bool),
    HangGuardian(bool),
    Answer,
    Look(Vec<usize>),
    Gone(usize),
    Gpu(usize, u8),
    Pass(u64),
    Wait,
}

fn happening() -> impl Strategy<Value = Happening> {
    let exit = prop_oneof![Just(Exit::status(0)), Just(Exit::status(1)), Just(Exit::by_signal(9)),];
    let slot = 0usize..5;
    prop_oneof![
        10 => slot.clone().prop_map(Happening::Ready),
        2 => slot.clone().prop_map(Happening::Step),
        2 => slot.clone().prop_map(Happening::Forks),
        4 => slot.clone().prop_map(Happening::Work),
        1 => slot.clone().prop_map(Happening::Fail),
        1 => (slot.clone(), prop_oneof![
            Just(AfterLeaving::Rest), Just(AfterLeaving::Return), Just(AfterLeaving::EndCluster)
        ])
        .prop_map(|(slot, then)| Happening::Leave(slot, then)),
        6 => (slot.clone(), exit).prop_map(|(slot, exit)| Happening::Die(slot, exit)),
        1 => slot.clone().prop_map(Happening::NotStarted),
        1 => slot.clone().prop_map(Happening::Memory),
        1 => slot.clone().prop_map(Happening::CloseStatus),
        1 => (0u64..40).prop_map(Happening::Stale),
        1 => prop_oneof![Just(Escalation::Graceful), Just(Escalation::Kill)]
            .prop_map(Happening::Stop),
        1 => (0usize..6).prop_map(Happening::Restart),
        1 => (0usize..6).prop_map(Happening::Scale),
        1 => Just(Happening::Verified),
        1 => any::<bool>().prop_map(Happening::Stall),
        4 => proptest::bool::weighted(0.1).prop_map(Happening::Meet),
        2 => (slot.clone(), any::<bool>()).prop_map(|(slot, hangs)| Happening::Hang(slot, hangs)),
        1 => any::<bool>().prop_map(Happening::HangGuardian),
        6 => Just(Happening::Answer),
        2 => proptest::collection::vec(slot.clone(), 0..3).prop_map(Happening::Look),
        1 => slot.clone().prop_map(Happening::Gone),
        4 => (slot, 0u8..3).prop_map(|(slot, finding)| Happening::Gpu(slot, finding)),
        4 => (0u64..4000).prop_map(Happening::Pass),
        6 => Just(Happening::Wait),
    ]
}

impl World {
    fn happen(&mut self, happening: &Happening) {
        let living = |world: &World, slot: usize| world.core.key_of(slot);
        let said = |key, status| Event::Said { key, status };
        let event = match happening.clone() {
            Happening::Ready(slot) => living(self, slot).map(|key| {
                said(
                    key,
                    Status::Ready {
                        address: None,
                        peers: Vec::new(),
                        ucx: None,
                        condition: Condition::default(),
                    },
                )
            }),
            Happening::Step(slot) => {
                living(self, slot).map(|key| said(key, Status::Step { step: "s".to_owned() }))
            }
            Happening::Forks(slot) => living(self, slot).map(|key| said(key, Status::Forks)),
            Happening::Work(slot) => living(self, slot).map(|key| said(key, Status::Working)),
            Happening::Fail(slot) => {
                living(self, slot).map(|key| said(key, Status::Failed { reason: "r".to_owned() }))
            }
            Happening::Leave(slot, then) => living(self, slot).map(|key| {
                said(key, Status::Leaving { then, reason: "r".to_owned(), lost: false })
            }),
            Happening::Die(slot, exit) => living(self, slot).map(|key| Event::Exited {
                key,
                exit,
                log_tail: Vec::new(),
                starved: false,
            }),
            Happening::NotStarted(slot) => living(self, slot)
                .map(|key| Event::NotStarted { key, reason: "no memory".to_owned() }),
            Happening::Memory(slot) => living(self, slot).map(|key| Event::MemoryReached {
                key,
                resident_bytes: 95,
                limit_bytes: 100,
            }),
            Happening::CloseStatus(slot) => {
                living(self, slot).map(|key| Event::StatusClosed { key })
            }
            Happening::Stale(number) => {
                let key = Key(number);
                let gone = !self.living.contains_key(&key);
                let exit = Exit::status(1);
                gone.then_some(Event::Exited { key, exit, log_tail: Vec::new(), starved: false })
            }
            Happening::Hang(slot, true) => {
                self.hung.insert(slot);
                None
            }
            Happening::Hang(slot, false) => {
                self.hung.remove(&slot);
                None
            }
            Happening::HangGuardian(hangs) => {
                self.guardian_hung = hangs;
                None
            }
            Happening::Answer => {
                self.answer();
                None
            }
            Happening::Look(stopped) => {
                self.look(&stopped);
                None
            }
            Happening::Gone(slot) => living(self, slot).map(|key| Event::Gone { key }),
            Happening::Stop(how) => Some(Event::Stop(how)),
            Happening::Restart(slot) => Some(Event::Restart(slot)),
            Happening::Scale(workers) => Some(Event::Scale(workers)),
            Happening::Verified => Some(Event::Verified),
            Happening::Stall(begins) => Some(Event::Stalled(begins.then(stall))),
            Happening::Meet(fails) => self.meeting.then(|| {
                let met = if fails { Err("no port".to_owned()) } else { Ok(Vec::new()) };
                Event::Met(met)
            }),
            Happening::Gpu(slot, finding) => self.awaited.contains(&slot).then(|| Event::Gpu {
                slot,
                finding: match finding {
                    0 => GpuFinding::Free,
                    1 => GpuFinding::Held("held".to_owned()),
                    _ => GpuFinding::Lost("lost".to_owned()),
                },
            }),
            Happening::Pass(millis) => {
                // Never beyond a deadline, because the actor does not sleep past one.
                let latest = self.core.next_deadline().unwrap_or(Moment::MAX);
                self.now = (self.now + Duration::from_millis(millis)).min(latest.max(self.now));
                Some(Event::Tick)
            }
            Happening::Wait => {
                self.now = self.core.next_deadline().unwrap_or(self.now).max(self.now);
                Some(Event::Tick)
            }
        };
        if let Some(event) = event {
            self.tell(event);
        }
    }

    /// Requests the end while no process ends by itself: the cluster must end all the same.
    fn must_end(&mut self) {
        self.tell(Event::Stop(Escalation::Graceful));
        for _ in 0..100 {
            if self.outcome.is_some() {
                return;
            }
            self.now = self.core.next_deadline().expect("an end has a deadline").max(self.now);
            self.tell(Event::Tick);
        }
        panic!("it does not end: {:#?}", self.core.state());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn the_laws_hold_whatever_happens(
        scheduler: bool,
        gpus: bool,
        run_to_completion in proptest::bool::weighted(0.2),
        restart in prop_oneof![
            Just(RestartWhen::Never), Just(RestartWhen::OnFailure), Just(RestartWhen::Always)
        ],
        unresponsive in prop_oneof![Just(Unresponsive::Wait), Just(Unresponsive::Restart)],
        answer_within in prop_oneof![Just(Span::secs(1)), Just(policy().answer_within)],
        to_be_verified in proptest::bool::weighted(0.2),
        end_when_stalled: bool,
        scheduler_stays: bool,
        workers_wait: bool,
        together in proptest::option::weighted(0.3, 0u32..4),
        standby in 0usize..2,
        brought_up in proptest::bool::weighted(0.8),
        happenings in proptest::collection::vec(happening(), 0..120),
    ) {
        let mut launch = launch(scheduler, 4, gpus);
        launch.run_to_completion = run_to_completion;
        launch.to_be_verified = to_be_verified;
        launch.scheduler_stays = scheduler_stays;
        launch.workers_wait = workers_wait;
        launch.together = together;
        launch.standby = if together.is_some() { standby } else { 0 };
        launch.supervision.restart = restart;
        launch.supervision.unresponsive = unresponsive;
        launch.supervision.end_when_stalled = end_when_stalled;
        launch.supervision.answer_within = answer_within;
        let mut world = if brought_up { up(launch) } else { World::new(launch) };
        for happening in &happenings {
            world.happen(happening);
        }
        world.must_end();
    }
}
