//! Which peers there are, the state of each connection, and when this worker is ready.
//!
//! Pure: events in, actions out. Does not call UCX.
//!
//! A connection from A to B is verified by four messages: A's `Hello`, B's `Welcome`, A's `Probe`,
//! B's `Met`. Either side may learn of the other first, from the scheduler or from the other's
//! `Hello`; whatever needs an endpoint waits until the scheduler has sent the address.
//!
//! A peer that nobody needs is only known: its connection is opened when it is expected before
//! READY, when it says `Hello`, or on first use.
//!
//! *Invariant:* a message is accepted only under the token of a verified `Hello`; READY is
//! reported once, and only when the connection to every expected peer is verified.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use cuda_cluster_wire::peer::{Kind, Member, token};
use cuda_cluster_wire::secret::{Secret, Token};

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// The scheduler says which peers must be reached before READY.
    Expect(Vec<String>),
    /// The scheduler sent a peer's address.
    Appeared(Member),
    /// The scheduler reports that a peer is gone.
    Lost(Member),
    /// This worker has something for a peer.
    Wanted(Member),
    /// A peer opens its connection to this worker.
    Hello { from: Member, token: Token },
    /// A peer answers a `Hello` (`Welcome`) or a `Probe` (`Met`).
    Answered { by: Member, kind: Kind },
    /// A peer's probe has arrived completely.
    Probed { by: Member },
    /// UCX has given up the connection to a peer.
    Broken(Member),
    /// It is time to try a broken connection again.
    Retry(Member),
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Open an endpoint.
    Connect(Member),
    /// Drop the endpoint, if there is one.
    Disconnect(Member),
    /// Send a message.
    Send { to: Member, kind: Kind },
    /// Deliver [`Event::Retry`] after a while.
    RetryLater(Member),
    /// The connection to a peer is verified: the peer will answer requests.
    Proven(Member),
    /// A peer has opened its connection again: answers that it sent over the old one may be lost.
    Reopened(Member),
    /// All expected peers are reached.
    Ready,
    /// After READY: a connection has been verified since, and none that was opened waits to be.
    Settled,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Nobody has needed it yet.
    Known,
    Greeting,
    Probing,
    Proven,
    Broken,
}

struct Peer {
    incarnation: u64,
    way: Way,
}

/// A worker's view of its peers.
pub(super) struct Core {
    me: Member,
    secret: Secret,
    peers: BTreeMap<String, Peer>,
    /// Verified senders, by the token of their messages to this worker.
    sessions: FxHashMap<Token, Member>,
    expected: Option<Vec<String>>,
    ready: bool,
}

impl Core {
    pub(super) fn new(me: Member, secret: Secret) -> Self {
        Self {
            me,
            secret,
            peers: BTreeMap::new(),
            sessions: FxHashMap::default(),
            expected: None,
            ready: false,
        }
    }

    /// This worker.
    pub(super) fn me(&self) -> &Member {
        &self.me
    }

    /// The token of this worker's messages to a peer.
    pub(super) fn token_to(&self, peer: &Member) -> Token {
        token(&self.secret, &self.me, peer)
    }

    /// The sender of messages with this token; `None` for a stranger.
    pub(super) fn sender(&self, token: Token) -> Option<&Member> {
        self.sessions.get(&token)
    }

    /// Whether the connection to a peer is verified. Then the peer can answer; before, it may not
    /// even know this worker.
    pub(super) fn is_proven(&self, member: &Member) -> bool {
        self.present(member)
            && self.peers.get(&member.name).is_some_and(|peer| peer.way == Way::Proven)
    }

    /// The present peer with this name, connected or not.
    pub(super) fn named(&self, name: &str) -> Option<Member> {
        let peer = self.peers.get(name)?;
        Some(Member { name: name.to_owned(), incarnation: peer.incarnation })
    }

    /// Decides what to do about an event.
    pub(super) fn handle(&mut self, event: Event) -> Vec<Action> {
        let (mut actions, was_ready) = (Vec::new(), self.ready);
        match event {
            Event::Expect(names) => {
                let known: Vec<Member> = names.iter().filter_map(|name| self.named(name)).collect();
                self.expected = Some(names);
                known.into_iter().for_each(|member| self.want(member, &mut actions));
            }
            Event::Appeared(member) => {
                let peer = Peer { incarnation: member.incarnation, way: Way::Known };
                self.peers.insert(member.name.clone(), peer);
                let expected = self.expected.iter().flatten().any(|name| *name == member.name);
                if expected || self.has_greeted(&member) {
                    self.open(member, &mut actions);
                }
            }
            Event::Wanted(member) => self.want(member, &mut actions),
            Event::Lost(member) => {
                self.sessions.remove(&token(&self.secret, &member, &self.me));
                if self.present(&member) {
                    self.peers.remove(&member.name);
                    actions.push(Action::Disconnect(member));
                }
            }
            Event::Hello { from, token: shown } => {
                if shown != token(&self.secret, &from, &self.me) {
                    return actions;
                }
                if self.reachable(&from) {
                    actions.push(Action::Send { to: from.clone(), kind: Kind::Welcome });
                }
                if let Some(before) = self.sessions.insert(shown, from.clone()) {
                    actions.push(Action::Reopened(before));
                }
                self.want(from, &mut actions);
            }
            Event::Answered { by, kind } => self.answered(by, kind, &mut actions),
            Event::Probed { by } => {
                if self.reachable(&by) {
                    actions.push(Action::Send { to: by, kind: Kind::Met });
                }
            }
            Event::Broken(member) => {
                if let Some(peer) = self.peer(&member) {
                    peer.way = Way::Broken;
                    actions.push(Action::Disconnect(member.clone()));
                    actions.push(Action::RetryLater(member));
                }
            }
            Event::Retry(member) => {
                if self.peer(&member).is_some_and(|peer| peer.way == Way::Broken) {
                    self.open(member, &mut actions);
                }
            }
        }
        if !self.ready && self.expected_are_proven() {
            self.ready = true;
            actions.push(Action::Ready);
        }
        let proven = actions.iter().any(|action| matches!(action, Action::Proven(_)));
        let is_settled = |peer: &Peer| matches!(peer.way, Way::Known | Way::Proven);
        if was_ready && proven && self.peers.values().all(is_settled) {
            actions.push(Action::Settled);
        }
        actions
    }

    /// Connects to a peer that is only known.
    fn want(&mut self, member: Member, actions: &mut Vec<Action>) {
        if self.peer(&member).is_some_and(|peer| peer.way == Way::Known) {
            self.open(member, actions);
        }
    }

    fn open(&mut self, member: Member, actions: &mut Vec<Action>) {
        let has_greeted = self.has_greeted(&member);
        let Some(peer) = self.peer(&member) else { return };
        peer.way = Way::Greeting;
        actions.push(Action::Connect(member.clone()));
        actions.push(Action::Send { to: member.clone(), kind: Kind::Hello });
        if has_greeted {
            actions.push(Action::Send { to: member, kind: Kind::Welcome });
        }
    }

    fn answered(&mut self, by: Member, kind: Kind, actions: &mut Vec<Action>) {
        let Some(peer) = self.peer(&by) else { return };
        match (peer.way, kind) {
            // When it comes a second time, the peer has opened its connection again, and its answer
            // to the probe may be lost.
            (Way::Greeting | Way::Probing, Kind::Welcome) => {
                peer.way = Way::Probing;
                actions.push(Action::Send { to: by, kind: Kind::Probe });
            }
            (Way::Probing, Kind::Met) => {
                peer.way = Way::Proven;
                actions.push(Action::Proven(by));
            }
            // A repeated answer changes nothing.
            _ => {}
        }
    }

    fn peer(&mut self, member: &Member) -> Option<&mut Peer> {
        self.peers.get_mut(&member.name).filter(|peer| peer.incarnation == member.incarnation)
    }

    fn present(&self, member: &Member) -> bool {
        self.peers.get(&member.name).is_some_and(|peer| peer.incarnation == member.incarnation)
    }

    fn has_greeted(&self, member: &Member) -> bool {
        self.sessions.contains_key(&token(&self.secret, member, &self.me))
    }

    fn reachable(&self, member: &Member) -> bool {
        self.peers.get(&member.name).is_some_and(|peer| {
            peer.incarnation == member.incarnation && !matches!(peer.way, Way::Known | Way::Broken)
        })
    }

    fn expected_are_proven(&self) -> bool {
        let proven =
            |name: &String| self.peers.get(name).is_some_and(|peer| peer.way == Way::Proven);
        self.expected.as_ref().is_some_and(|names| names.iter().all(proven))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn member(name: &str, incarnation: u64) -> Member {
        Member { name: name.to_owned(), incarnation }
    }

    fn secret() -> Secret {
        Secret::new([9; 32])
    }

    fn core(name: &str) -> Core {
        Core::new(member(name, 1), secret())
    }

    fn hello(from: &Member, to: &Member) -> Event {
        Event::Hello { from: from.clone(), token: token(&secret(), from, to) }
    }

    #[test]
    fn a_worker_without_peers_is_ready_when_it_is_told_so() {
        let mut core = core("gpu0");
        assert_eq!(core.handle(Event::Expect(vec![])), [Action::Ready]);
        assert_eq!(core.handle(Event::Expect(vec![])), []);
    }

    #[test]
    fn a_hello_under_a_false_token_opens_nothing() {
        let mut core = core("gpu0");
        let stranger = member("gpu1", 1);
        let false_token = Token(0);
        assert_eq!(core.handle(Event::Hello { from: stranger, token: false_token }), []);
        assert_eq!(core.sender(false_token), None);
    }

    #[test]
    fn a_hello_that_comes_before_the_address_is_answered_after_it() {
        let mut core = core("gpu0");
        let (me, peer) = (core.me().clone(), member("gpu1", 5));
        assert_eq!(core.handle(hello(&peer, &me)), []);
        let actions = core.handle(Event::Appeared(peer.clone()));
        assert_eq!(
            actions,
            [
                Action::Connect(peer.clone()),
                Action::Send { to: peer.clone(), kind: Kind::Hello },
                Action::Send { to: peer, kind: Kind::Welcome },
            ]
        );
    }

    #[test]
    fn a_lost_peer_is_a_stranger_again() {
        let mut core = core("gpu0");
        let (me, peer) = (core.me().clone(), member("gpu1", 5));
        core.handle(Event::Appeared(peer.clone()));
        core.handle(hello(&peer, &me));
        let shown = token(&secret(), &peer, &me);
        assert_eq!(core.sender(shown), Some(&peer));
        let actions = core.handle(Event::Lost(peer.clone()));
        assert_eq!(actions, [Action::Disconnect(peer.clone())]);
        assert_eq!(core.sender(shown), None);
        assert_eq!(core.handle(Event::Retry(peer)), []);
    }

    #[test]
    fn a_connection_that_is_opened_anew_is_said_and_proven_again() {
        let mut core = core("gpu0");
        let (me, peer) = (core.me().clone(), member("gpu1", 5));
        core.handle(Event::Appeared(peer.clone()));
        core.handle(hello(&peer, &me));
        let send = |kind| Action::Send { to: peer.clone(), kind };
        let welcome = || Event::Answered { by: peer.clone(), kind: Kind::Welcome };
        assert_eq!(core.handle(welcome()), [send(Kind::Probe)]);
        assert!(!core.is_proven(&peer));
        let again = core.handle(hello(&peer, &me));
        assert_eq!(again, [send(Kind::Welcome), Action::Reopened(peer.clone())]);
        assert_eq!(core.handle(welcome()), [send(Kind::Probe)]);
        let met = Event::Answered { by: peer.clone(), kind: Kind::Met };
        assert_eq!(core.handle(met), [Action::Proven(peer.clone())]);
        assert!(core.is_proven(&peer));
    }

    /// Workers and the messages between them, which the test delivers in an order of its choice.
    struct Bench {
        cores: Vec<Core>,
        /// In order for each sender and receiver, as UCX delivers them.
        wires: BTreeMap<(usize, usize), Vec<Kind>>,
        ready: Vec<usize>,
    }

    impl Bench {
        fn new(workers: usize, expects: impl Fn(usize, usize) -> bool) -> Self {
            let name = |i: usize| format!("gpu{i}");
            let mut bench = Self { cores: vec![], wires: BTreeMap::new(), ready: vec![0; workers] };
            for i in 0..workers {
                let mut core = core(&name(i));
                let expected = (0..workers).filter(|j| *j != i && expects(i, *j));
                for action in core.handle(Event::Expect(expected.map(name).collect())) {
                    assert_eq!(action, Action::Ready);
                    bench.ready[i] += 1;
                }
                bench.cores.push(core);
            }
            bench
        }

        /// All introductions, and all messages, in some order.
        fn settle(&mut self, introduced: bool, choices: &[usize]) {
            let workers = self.cores.len();
            let mut news: Vec<(usize, usize)> = (0..workers)
                .flat_map(|at| (0..workers).filter(move |of| *of != at).map(move |of| (at, of)))
                .filter(|_| introduced)
                .collect();
            for choice in choices.iter().cycle() {
                if !news.is_empty() && choice % 2 == 0 {
                    let (at, of) = news.swap_remove(choice / 2 % news.len());
                    let peer = self.cores[of].me().clone();
                    self.handle(at, Event::Appeared(peer));
                } else if !self.carry(choice / 2) && news.is_empty() {
                    break;
                }
            }
        }

        fn proven(&self, at: usize, of: usize) -> bool {
            self.cores[at].is_proven(self.cores[of].me())
        }

        fn handle(&mut self, at: usize, event: Event) {
            for action in self.cores[at].handle(event) {
                match action {
                    Action::Send { to, kind } => {
                        let to = to.name[3..].parse().expect("a number");
                        self.wires.entry((at, to)).or_default().push(kind);
                    }
                    Action::Ready => self.ready[at] += 1,
                    Action::Proven(peer) => {
                        let back: usize = peer.name[3..].parse().expect("a number");
                        let me = self.cores[at].me();
                        assert!(self.cores[back].reachable(me), "{} cannot answer", peer.name);
                    }
                    Action::Connect(_)
                    | Action::Disconnect(_)
                    | Action::RetryLater(_)
                    | Action::Reopened(_)
                    | Action::Settled => {}
                }
            }
        }

        /// Delivers the first message from one sender to one receiver.
        fn carry(&mut self, choice: usize) -> bool {
            self.wires.retain(|_, messages| !messages.is_empty());
            let Some(&(from, to)) = self.wires.keys().nth(choice % self.wires.len().max(1)) else {
                return false;
            };
            let kind = self.wires.get_mut(&(from, to)).expect("just seen").remove(0);
            let (sender, me) = (self.cores[from].me().clone(), self.cores[to].me().clone());
            let event = match kind {
                Kind::Hello => hello(&sender, &me),
                Kind::Probe => Event::Probed { by: sender },
                kind => Event::Answered { by: sender, kind },
            };
            self.handle(to, event);
            true
        }
    }

    proptest! {
        #[test]
        fn every_worker_gets_ready_once_in_whatever_order_news_and_messages_come(
            workers in 2usize..6, choices in proptest::collection::vec(0usize..1000, 200),
        ) {
            let mut bench = Bench::new(workers, |_, _| true);
            bench.settle(true, &choices);
            prop_assert_eq!(bench.ready, vec![1; workers]);
        }

        #[test]
        fn a_connection_is_opened_when_one_of_its_ends_needs_it_and_not_before(
            workers in 2usize..6, expected in any::<u32>(), wanted in any::<u32>(),
            choices in proptest::collection::vec(0usize..1000, 200),
        ) {
            let bit = |bits: u32, at: usize, of: usize| bits >> (at * 5 + of) & 1 == 1;
            let both = |bits, at, of| bit(bits, at, of) || bit(bits, of, at);
            let mut bench = Bench::new(workers, |at, of| bit(expected, at, of));
            bench.settle(true, &choices);
            prop_assert_eq!(&bench.ready, &vec![1; workers]);
            let pairs = || (0..workers).flat_map(|at| (0..workers).map(move |of| (at, of)));
            for (at, of) in pairs().filter(|(at, of)| at != of) {
                prop_assert_eq!(bench.proven(at, of), both(expected, at, of));
            }
            for (at, of) in pairs().filter(|&(at, of)| at != of && bit(wanted, at, of)) {
                let peer = bench.cores[of].me().clone();
                bench.handle(at, Event::Wanted(peer));
            }
            bench.settle(false, &choices);
            for (at, of) in pairs().filter(|(at, of)| at != of) {
                let opened = both(expected, at, of) || both(wanted, at, of);
                prop_assert_eq!(bench.proven(at, of), opened);
            }
        }
    }
}
