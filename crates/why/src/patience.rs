//! From verdicts in turn: since when a job can't go on, and when that is to be said.
//!
//! Pure: the time is an argument.
//!
//! *Invariant:* "it goes on" is said only after "it is stalled", and each once for each stall.

use std::time::Duration;

use crate::condition::Kind;
use crate::verdict::{Standing, Verdict};

/// What has become of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It has not been able to go on for as long as one was to wait.
    Stalled,
    /// It goes on again, or is stalled for another cause.
    GoesOn,
}

/// What all verdicts up to now say.
#[derive(Debug)]
pub struct Patience {
    after: Duration,
    stall: Option<Stall>,
}

/// Verdicts in turn that say the same.
#[derive(Debug)]
struct Stall {
    cause: Option<Kind>,
    odd: Vec<String>,
    since: Duration,
    said: bool,
}

impl Patience {
    /// Waits so long.
    pub fn new(after: Duration) -> Self {
        Self { after, stall: None }
    }

    /// Hears a verdict of this moment; says what is new.
    pub fn hear(&mut self, verdict: &Verdict, now: Duration) -> Option<Change> {
        let (cause, odd) = (verdict.cause, &verdict.odd);
        let stalled = verdict.standing == Standing::Stalled || self.is_kept_waiting(verdict);
        let same = |stall: &&mut Stall| stalled && stall.cause == cause && stall.odd == *odd;
        if let Some(stall) = self.stall.as_mut().filter(same) {
            let due = !stall.said && now.saturating_sub(stall.since) >= self.after;
            stall.said |= due;
            return due.then_some(Change::Stalled);
        }
        let before = self.interrupt();
        if stalled {
            // What kept others waiting was not one wait.
            let kept = verdict.standing == Standing::Waiting;
            let silence = if kept { self.after } else { silence(verdict) };
            let since = now.saturating_sub(silence);
            let said = before.is_none() && now.saturating_sub(since) >= self.after;
            self.stall = Some(Stall { cause, odd: odd.clone(), since, said });
            return before.or_else(|| said.then_some(Change::Stalled));
        }
        before
    }

    /// Whether ranks have waited for so long for some that do not work: that sleep again and again,
    /// or ask again and again for what does not come.
    fn is_kept_waiting(&self, verdict: &Verdict) -> bool {
        let works = [Kind::Works, Kind::Device, Kind::Memory, Kind::Throttled, Kind::Interpreter];
        let idles = verdict.cause.is_some_and(|cause| !works.contains(&cause));
        let others = verdict
            .groups
            .iter()
            .filter(|one| !verdict.odd.iter().any(|odd| one.ranks.contains(odd)));
        let waits = others.filter_map(|group| group.condition.for_ms);
        let waits = waits.min().map(Duration::from_millis);
        verdict.standing == Standing::Waiting && idles && waits.is_some_and(|it| it >= self.after)
    }

    /// The job is not looked at: it starts, or ends.
    pub fn interrupt(&mut self) -> Option<Change> {
        self.stall.take().filter(|stall| stall.said).map(|_| Change::GoesOn)
    }
}

/// For how long nobody of the job has run.
fn silence(verdict: &Verdict) -> Duration {
    let times = verdict.groups.iter().map(|group| group.condition.for_ms.unwrap_or(0));
    Duration::from_millis(times.min().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::condition::Condition;
    use crate::verdict::{Confidence, Group};
    use proptest::prelude::*;

    fn verdict(standing: Standing, odd: &str, for_ms: Option<u64>) -> Verdict {
        let condition = Condition { for_ms, ..Condition::plain(1, "waits".to_owned()) };
        Verdict {
            standing,
            cause: Some(Kind::Peer),
            confidence: Confidence::Likely,
            odd: vec![odd.to_owned()],
            text: String::new(),
            groups: vec![Group { ranks: vec![odd.to_owned()], condition }],
        }
    }

    const fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_stall_counts_from_when_the_last_one_ran() {
        let mut patience = Patience::new(secs(60));
        let stalled = |for_ms| verdict(Standing::Stalled, "gpu1", for_ms);
        assert_eq!(patience.hear(&stalled(Some(20_000)), secs(100)), None);
        assert_eq!(patience.hear(&stalled(Some(59_000)), secs(139)), None);
        assert_eq!(patience.hear(&stalled(Some(60_000)), secs(140)), Some(Change::Stalled));
        assert_eq!(patience.hear(&stalled(Some(61_000)), secs(141)), None, "it was said");
        let goes_on = verdict(Standing::Working, "gpu1", None);
        assert_eq!(patience.hear(&goes_on, secs(142)), Some(Change::GoesOn));
        assert_eq!(patience.hear(&goes_on, secs(143)), None);
    }

    #[test]
    fn another_cause_is_another_stall() {
        let mut patience = Patience::new(secs(10));
        let stalled = |odd| verdict(Standing::Stalled, odd, Some(10_000));
        assert_eq!(patience.hear(&stalled("gpu1"), secs(50)), Some(Change::Stalled));
        assert_eq!(patience.hear(&stalled("gpu2"), secs(51)), Some(Change::GoesOn));
        assert_eq!(patience.hear(&stalled("gpu2"), secs(52)), Some(Change::Stalled));
        assert_eq!(patience.interrupt(), Some(Change::GoesOn));
        assert_eq!(patience.interrupt(), None);
    }

    #[test]
    fn who_sleeps_again_and_again_while_others_wait_for_long_is_a_stall_in_the_end() {
        let mut patience = Patience::new(secs(60));
        let polls = |waited| {
            let mut verdict = verdict(Standing::Waiting, "gpu1", Some(10));
            verdict.cause = Some(Kind::Sleeps);
            let condition = Condition { for_ms: waited, ..verdict.groups[0].condition.clone() };
            verdict.groups.push(Group { ranks: vec!["gpu0".to_owned()], condition });
            verdict
        };
        assert_eq!(patience.hear(&polls(Some(30_000)), secs(30)), None);
        assert_eq!(patience.hear(&polls(None), secs(40)), None, "nobody knows for how long");
        let mut works = polls(Some(70_000));
        works.cause = Some(Kind::Works);
        assert_eq!(patience.hear(&works, secs(65)), None);
        assert_eq!(patience.hear(&polls(Some(70_000)), secs(70)), Some(Change::Stalled));
        assert_eq!(patience.hear(&polls(Some(80_000)), secs(80)), None, "it was said");
        assert_eq!(patience.hear(&polls(Some(100)), secs(90)), Some(Change::GoesOn));
    }

    proptest! {
        #[test]
        fn stalls_and_their_ends_are_said_in_turn(
            looks in proptest::collection::vec((any::<bool>(), 0..2u8, 0..90_000u64), 0..60),
        ) {
            let mut patience = Patience::new(secs(30));
            let (mut now, mut stalled) = (0, false);
            for (is_stalled, odd, for_ms) in looks {
                now += 7;
                let standing = if is_stalled { Standing::Stalled } else { Standing::Waiting };
                let verdict = verdict(standing, &odd.to_string(), Some(for_ms));
                match patience.hear(&verdict, secs(now)) {
                    Some(Change::Stalled) => {
                        prop_assert!(!stalled && is_stalled);
                        stalled = true;
                    }
                    Some(Change::GoesOn) => {
                        prop_assert!(stalled);
                        stalled = false;
                    }
                    None => prop_assert!(is_stalled || !stalled),
                }
            }
        }
    }
}
